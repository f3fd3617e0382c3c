"""A sink that fails in any way, in any method: a required one is retried and named, an optional one stops nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import SinkError
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run import open_pipeline as opened
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import guard
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.types import Json
from tests.support.pipelines import LocalRun, MakeOptions, run_once
from tests.support.samples import SampleInput, table_ids
from tests.support.shelf import ShelfOptions, ShelfSink, ShelfStager, register_shelf, shelved

FOR_EVER = 10**9
SECONDS = 0.25  # the time limit of an optional sink here


@dataclass
class Fault:
    """What goes wrong now: which method, how, how many times, before or after its effect."""

    method: str = ""
    error: Exception | None = None  # None: it hangs
    times: int = 0
    after: bool = False
    seen: int = 0

    def __post_init__(self) -> None:
        self.going = threading.Event()  # set: nothing hangs any more

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        if name != self.method:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.seen += 1
            if self.seen > self.times:
                return real(*args, **kwargs)
            answer = real(*args, **kwargs) if self.after else None
            if self.error is not None:
                raise self.error
            self.going.wait(60.0)
            return answer if self.after else real(*args, **kwargs)

        return call


NOW = [Fault()]


class FaultySink(ShelfSink):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return NOW[0].wrap(name, found) if callable(found) else found


class FaultyStager(ShelfStager):
    def __init__(self, target: dict[str, Json], attempt: str) -> None:
        NOW[0].wrap("open_stager", lambda: None)()
        super().__init__(target, attempt)

    def write(self, batch: Any) -> None:
        NOW[0].wrap("stager.write", super().write)(batch)

    def close(self) -> list[dict[str, Json]]:
        files: list[dict[str, Json]] = NOW[0].wrap("stager.close", super().close)()
        return files


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    register_shelf(monkeypatch, FaultySink, FaultyStager)
    for module, name in (
        (guard, "ANSWER_SECONDS"),
        (guard, "STAGE_SECONDS"),
        (opened, "ANSWER_SECONDS"),
        (opened, "WORK_SECONDS"),
    ):
        monkeypatch.setattr(module, name, SECONDS)
    yield
    NOW[0].going.set()
    NOW[0] = Fault()


def break_sink(method: str, error: Exception | None, times: int, *, after: bool = False) -> None:
    NOW[0] = Fault(method, error, times, after)


def mend_sink() -> None:
    NOW[0].going.set()
    NOW[0] = Fault()


class Pair:
    """A table that decides, and a shelf beside it that may fail."""

    def __init__(self, make_options: MakeOptions, sample: SampleInput, folder: Path) -> None:
        self._make_options, self._sample, self.folder = make_options, sample, folder

    def options(self, *, required: bool, **settings: Any) -> PipelineOptions:
        table = DeltaSinkOptions("table", str(self.folder / "table"))
        shelf = ShelfOptions("shelf", str(self.folder / "shelf"), required=required)
        return self._make_options(max_files=1, sinks=(table, shelf), **settings)

    def fill(self, first: int) -> None:
        for number in range(first, first + 3):
            self._sample.add(f"f{number}.json", 3)

    def run_broken(self, spec: PipelineOptions, method: str, error: Exception | None, *, after: bool) -> LocalRun:
        """Run once, then with more input and a shelf that fails for ever; returns the second run."""
        self._sample.add("f0.json", 3)
        assert run_once(spec).exit_code == 0
        self.fill(1)
        break_sink(method, error, FOR_EVER, after=after)
        return run_once(spec)

    def table_is_complete(self) -> bool:
        return table_ids(self.folder / "table") == self._sample.ids

    def is_complete(self) -> bool:
        """Whether both have everything, once."""
        return self.table_is_complete() and shelved() == self._sample.ids


@pytest.fixture
def pair(make_options: MakeOptions, sample: SampleInput, tmp_path: Path) -> Pair:
    return Pair(make_options, sample, tmp_path)


ERRORS: dict[str, Exception | None] = {
    "SinkError": SinkError("the shelf is away"),
    "OSError": OSError("the shelf is away"),
    "RuntimeError": RuntimeError("the shelf is away"),
    "hang": None,
}
METHODS = [
    "load",
    "read_fence",
    "claim",
    "find_schema",
    "stage_target",
    "open_stager",
    "stager.write",
    "stager.close",
    "is_full",
    "settled_epoch",
    "fetch_staged",
    "find_missing_staged",
    "commit",
    "maintain",
]
AFTER = ["claim", "commit"]  # also with the effect, and only the answer lost
CASES = [(method, False) for method in METHODS] + [(method, True) for method in AFTER]
IDS = [f"{method}{'-lost-answer' if after else ''}" for method, after in CASES]
NOT_NEEDED = ("find_schema", "maintain")  # the columns of the deciding table are known, too


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize(("method", "after"), CASES, ids=IDS)
def test_an_optional_sink_stops_nobody(method: str, after: bool, error: str, pair: Pair, sample: SampleInput) -> None:
    spec = pair.options(required=False)
    run = pair.run_broken(spec, method, ERRORS[error], after=after)
    assert run.exit_code == 0, run.result
    assert pair.table_is_complete()
    assert not shelved() - sample.ids, "nothing is doubled"
    asked = NOW[0].seen
    mend_sink()
    if method not in NOT_NEEDED:
        assert asked
    if shelved() != sample.ids:
        [row] = [row for row in load_status(open_pipeline(spec)).sinks if row["name"] == "shelf"]
        assert row["epochs_behind"], "shown as behind"
        assert row["error"], "with the reason"
        if error not in ("SinkError",):
            assert "sink 'shelf' (shelf) failed in" in row["error"]
    sample.add("f9.json", 3)
    assert run_once(spec).exit_code == 0
    assert pair.is_complete()


@pytest.mark.parametrize("error", ["SinkError", "OSError", "RuntimeError"])
@pytest.mark.parametrize(("method", "after"), CASES, ids=IDS)
def test_a_required_sink_is_retried(method: str, after: bool, error: str, pair: Pair) -> None:
    pair.fill(0)
    break_sink(method, ERRORS[error], 2, after=after)
    run = run_once(pair.options(required=True))
    assert run.exit_code == 0, run.result
    assert pair.is_complete()


@pytest.mark.parametrize("method", METHODS)
def test_a_required_sink_that_hangs_is_waited_for(method: str, pair: Pair) -> None:
    pair.fill(0)
    break_sink(method, None, 1)
    timer = threading.Timer(3 * SECONDS, NOW[0].going.set)
    timer.start()
    run = run_once(pair.options(required=True))
    assert run.exit_code == 0, run.result
    assert not run.told.troubles
    assert pair.is_complete()


@pytest.mark.parametrize("error", ["OSError", "RuntimeError"])
@pytest.mark.parametrize(("method", "after"), CASES, ids=IDS)
def test_a_required_sink_that_always_fails_ends_the_run_by_name(
    method: str, after: bool, error: str, pair: Pair
) -> None:
    spec = pair.options(required=True)
    run = pair.run_broken(spec, method, ERRORS[error], after=after)
    if method in NOT_NEEDED or (method, after) == ("commit", True):  # `find_receipt` answers after a lost answer
        assert run.exit_code == 0, run.result
    else:
        assert run.exit_code in (3, 4), run.result
        messages = [trouble.message for trouble in run.told.troubles]
        assert any(message.startswith("sink 'shelf' (shelf) failed in") for message in messages), messages
        assert run.result.error is not None
        assert "shelf" in run.result.error.message
    mend_sink()
    assert run_once(spec).exit_code == 0
    assert pair.is_complete()


@pytest.mark.parametrize("method", ["open_stager", "stager.write", "stager.close"])
def test_a_stager_that_works_again_is_used_again(method: str, pair: Pair) -> None:
    spec = pair.options(required=False)
    pair.fill(0)
    break_sink(method, RuntimeError("odd"), 1)
    run = run_once(spec)
    assert run.exit_code == 0, run.result
    assert len(run.told.troubles) == 1, "one epoch was repeated, and no other"
    assert run_once(spec).exit_code == 0
    assert pair.is_complete()
    left = list((pair.folder / "table").rglob("parked-*"))
    assert left == [], "what the sink holds is not kept"


def test_an_epoch_repeated_without_a_sink_is_no_failure_of_the_run(pair: Pair) -> None:
    pair.fill(0)
    break_sink("stager.write", RuntimeError("odd"), FOR_EVER)
    assert run_once(pair.options(required=False, attempts=0)).exit_code == 0
    assert pair.table_is_complete()
