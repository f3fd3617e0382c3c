"""Seconds never go back, whatever the system's clock does."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable

import pytest

from firnline.clock import RESTART_SECONDS, SteadySeconds, SystemClock, jitter, monotonic
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput


def scripted(*readings: float) -> Callable[[], float]:
    return iter(readings).__next__


def test_a_clock_that_goes_on_is_read_as_it_is() -> None:
    steady = SteadySeconds(scripted(1.0, 1.0, 2.5))
    assert [steady() for _ in range(3)] == [1.0, 1.0, 2.5]


def test_a_step_back_by_milliseconds_is_no_time_at_all() -> None:
    """Two cores whose clocks differ: time stands still until the slower one has caught up, and runs no faster."""
    steady = SteadySeconds(scripted(10.000, 9.995, 10.001, 9.996, 10.010))
    assert [steady() for _ in range(5)] == [10.000, 10.000, 10.001, 10.001, 10.010]


def test_a_clock_that_began_anew_goes_on_from_where_it_was() -> None:
    steady = SteadySeconds(scripted(5000.0, 3.0, 4.0, 4.0 - RESTART_SECONDS / 2, 6.0))
    assert [steady() for _ in range(5)] == [5000.0, 5000.0, 5001.0, 5001.0, 5003.0]


def test_no_thread_sees_time_go_back_on_cores_that_differ() -> None:
    """Every reading that began after another one ended is at least as large, in whichever thread."""
    ticks, lock, latest, wrong = iter(range(10**9)), threading.Lock(), [0.0], []
    skew = random.Random(1)

    def read() -> float:
        return next(ticks) * 1e-4 - skew.choice((0.0, 0.005))

    steady = SteadySeconds(read)

    def look() -> None:
        for _ in range(2000):
            with lock:
                before = latest[0]
            now = steady()
            if now < before:
                wrong.append((before, now))
            with lock:
                latest[0] = max(latest[0], now)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_system_clock_is_steady() -> None:
    """Everything that measures time in this process reads one clock."""
    before = monotonic()
    assert before <= SystemClock().monotonic() <= monotonic()


def test_no_duration_of_a_run_is_negative(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second reading of the clock is 900 ms behind the one before."""
    behind, real = itertools.cycle((0.0, 0.9)), monotonic._read
    monkeypatch.setattr(monotonic, "_read", lambda: real() - next(behind))
    for number in range(3):
        sample.add(f"f{number}.json", 2)
    run = run_once(make_options(max_files=1))
    assert run.exit_code == 0
    durations = [took for facts in run.told.epochs for took in facts.durations_ms.values()]
    assert len(run.told.epochs) == 3
    assert min(durations) >= 0
    assert max(durations) < 60_000


def test_pauses_leave_the_generator_of_the_user_alone() -> None:
    random.seed(7)
    state = random.getstate()
    pauses = {jitter(0.5, 1.5) for _ in range(100)}
    assert random.getstate() == state
    assert len(pauses) > 1
    assert all(0.5 <= pause <= 1.5 for pause in pauses)
