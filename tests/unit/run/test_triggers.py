from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from firnline.options import CheckpointOptions, OperatorOptions, TriggerOptions
from firnline.run.snapshots import Since, due_operators

NOW = Since(epochs=1, millis=50.0, records=10, watermark_then=None, watermark_now=None)
ONE = OperatorOptions("one", "aggregate", ("a",))
TWO = OperatorOptions("two", "aggregate", ("a",))
OFF = TriggerOptions(every_epochs=None)


def due(trigger: TriggerOptions, since: Since, *, asked: bool = False, **settings: Any) -> set[str]:
    options = CheckpointOptions(trigger=trigger, **settings)
    return set(due_operators(options, (ONE, TWO), {"one": since, "two": since}, asked=asked))


@pytest.mark.parametrize(
    ("trigger", "not_yet", "now"),
    [
        (TriggerOptions(every_epochs=3), replace(NOW, epochs=2), replace(NOW, epochs=3)),
        (replace(OFF, every_ms=100), replace(NOW, millis=99), replace(NOW, millis=100)),
        (replace(OFF, every_records=100), replace(NOW, records=99), replace(NOW, records=100)),
        (
            replace(OFF, event_time_ms=60_000),
            replace(NOW, watermark_then=60_000_001, watermark_now=119_999_999),
            replace(NOW, watermark_then=119_999_999, watermark_now=120_000_000),
        ),
        (replace(OFF, event_time_ms=60_000), NOW, replace(NOW, watermark_now=1)),
    ],
)
def test_a_trigger_is_due_when_its_measure_is_full(trigger: TriggerOptions, not_yet: Since, now: Since) -> None:
    assert due(trigger, not_yet) == set()
    assert due(trigger, now) == {"one", "two"}


def test_what_is_asked_for_and_what_has_no_snapshot_is_always_due() -> None:
    assert due(OFF, NOW) == set()
    assert due(OFF, NOW, asked=True) == {"one", "two"}
    assert due(OFF, replace(NOW, never=True)) == {"one", "two"}


def test_each_operator_has_its_own_time_in_per_operator_mode() -> None:
    operators = (replace(ONE, interval_ms=10), replace(TWO, interval_ms=1000))
    options = CheckpointOptions(mode="per_operator")
    assert due_operators(options, operators, {"one": NOW, "two": NOW}, asked=False) == {"one"}
    unset = (replace(ONE, interval_ms=1000), TWO)
    assert due_operators(options, unset, {"one": NOW, "two": NOW}, asked=False) == {"two"}
