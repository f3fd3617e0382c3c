"""A source that fails or hangs while it acknowledges holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from firnline.sources import group
from firnline.sources.base import MAIN_PORT, Source
from firnline.sources.group import Sources
from tests.support.processes import wait_until


def _source(name: str, acknowledge: Any) -> Source:
    return cast(Source, SimpleNamespace(name=name, ports=(MAIN_PORT,), acknowledge=acknowledge))


@pytest.mark.parametrize(
    "error", [ValueError("odd"), RuntimeError(), SystemExit(3), asyncio.CancelledError(), OSError("away")]
)
def test_whatever_a_source_raises_the_next_one_is_told(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: Any) -> None:
        raise error

    told: list[Any] = []
    Sources([_source("a", refuse), _source("b", told.append)]).acknowledge({"a": 1, "b": 2})
    assert told == [2]
    assert [record.__dict__["source"] for record in caplog.records] == ["a"]


def test_a_source_that_hangs_is_asked_again_after_it_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "ACKNOWLEDGE_SECONDS", 0.01)
    free, told = threading.Event(), []

    def hang(position: Any) -> None:
        told.append(position)
        assert free.wait(60)

    sources = Sources([_source("a", hang)])
    sources.acknowledge({"a": 1})
    wait_until(lambda: told == [1])
    sources.acknowledge({"a": 2})
    assert told == [1]
    free.set()
    while told[-1] != 3:
        sources.acknowledge({"a": 3})
    assert told[0:1] == [1]
    assert 2 not in told
