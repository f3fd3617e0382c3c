"""Planning waits while the run is paused and while a sink is full; room is reported again, also after a failure."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from firnline.errors import SinkError
from firnline.run.backpressure import Backpressure
from firnline.run.runner import _Timers


class Sink:
    required = True
    name = "main"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def is_full(self) -> tuple[int, int] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def make(monkeypatch: pytest.MonkeyPatch, sink: Sink) -> tuple[Backpressure, list[Any]]:
    monkeypatch.setattr("firnline.run.backpressure.POLL_SECONDS", 0.001)
    told: list[Any] = []
    return Backpressure([sink], on_full=told.append), told  # type: ignore[list-item]


def test_no_room_is_told_once_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backpressure, told = make(monkeypatch, Sink((3, 30), (3, 30), None))
    assert backpressure.wait()
    assert told == [(3, 30), None]


def test_no_room_is_taken_back_although_a_look_failed_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    backpressure, told = make(monkeypatch, Sink((3, 30), OSError("away"), None))
    with pytest.raises(OSError, match="away"):
        backpressure.wait()
    assert backpressure.wait()
    assert told == [(3, 30), None]


def test_a_pause_waits_and_a_stop_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.run.backpressure.POLL_SECONDS", 0.001)
    still = threading.Event()
    backpressure = Backpressure([Sink(None)], on_paused=still.set)  # type: ignore[list-item]
    assert backpressure.pause()
    assert not backpressure.pause(), "it is paused already"
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(backpressure.wait()))
    waiting.start()
    assert still.wait(120)
    assert backpressure.paused
    backpressure.stop()
    waiting.join(120)
    assert answers == [False]


def test_a_timer_takes_the_place_of_the_one_that_runs() -> None:
    timers = _Timers()
    for at in (5.0, 9.0, 7.0):
        timers.set("", at)
    timers.set("sink", 8.0)
    assert timers.next(6.0) == (None, 1.0)
    assert timers.next(7.0) == ("", None)
    assert timers.next(7.0) == (None, 1.0), "the other two are gone"
    timers.drop("sink")
    assert timers.next(99.0) == (None, None)


def test_an_optional_sink_that_cannot_be_asked_holds_up_nobody() -> None:
    sink = Sink(SinkError("away"))
    sink.required, sink.name = False, "optional"
    assert Backpressure([sink]).wait()  # type: ignore[list-item]
