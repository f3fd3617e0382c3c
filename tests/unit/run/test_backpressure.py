"""Credits: withheld while paused and while there is no room; what was told is taken back, also after a failure."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from firnline.run.backpressure import Credits
from firnline.run.runner import _Timers


class Sink:
    required = True

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def is_full(self) -> tuple[int, int] | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def make(monkeypatch: pytest.MonkeyPatch, sink: Sink) -> tuple[Credits, list[Any]]:
    monkeypatch.setattr("firnline.run.backpressure.POLL_SECONDS", 0.001)
    credits, told = Credits([sink]), []  # type: ignore[list-item, var-annotated]
    credits.tell_waiting = told.append
    return credits, told


def test_no_room_is_told_once_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    credits, told = make(monkeypatch, Sink((3, 30), (3, 30), None))
    assert credits.wait()
    assert told == [(3, 30), None]


def test_no_room_is_taken_back_although_a_look_failed_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    credits, told = make(monkeypatch, Sink((3, 30), OSError("away"), None))
    with pytest.raises(OSError, match="away"):
        credits.wait()
    assert credits.wait()
    assert told == [(3, 30), None]


def test_a_pause_waits_and_a_stop_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    credits, _ = make(monkeypatch, Sink(None))
    still = threading.Event()
    credits.tell_still = still.set
    credits.going.clear()
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(credits.wait()))
    waiting.start()
    assert still.wait(10)
    assert credits.paused
    credits.stopping.set()
    waiting.join(10)
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
    sink = Sink(OSError("away"))
    sink.required = False
    assert Credits([sink]).wait()  # type: ignore[list-item]
