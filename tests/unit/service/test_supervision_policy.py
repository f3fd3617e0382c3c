"""When the service starts a run, waits, or calls a person; and what it takes for alive."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.run.wanted import Wanted, Wish, find_charged
from firnline.service.supervise.policy import (
    ALIVE,
    BEGIN_SECONDS,
    BOOT_SECONDS,
    MOST_FAILURES,
    MOST_SECONDS,
    SILENT_SECONDS,
    WITHIN_SECONDS,
    Ended,
    NeedsPerson,
    Nothing,
    Now,
    Signs,
    Start,
    Wait,
    back_off,
    decide,
    is_restarted,
    judge,
)

LATER = Now(10_000, since_end=MOST_SECONDS * 2)
CODES: list[int | None] = [None, 0, 1, 2, 3, 4, 5, 6, 7, 130, -9, -15]


def test_nothing_is_started_that_nobody_wants() -> None:
    assert decide(None, 0, False, [], LATER) == Nothing()
    assert decide("stopped", 1, False, [], LATER) == Nothing()


@pytest.mark.parametrize("wanted", ["running", "paused"])
def test_a_wanted_run_is_started_once(wanted: Wanted) -> None:
    assert decide(wanted, 1, False, [], LATER) == Start()
    assert decide(wanted, 1, True, [], LATER) == Nothing()


@pytest.mark.parametrize("code", [3, 4, 130, -9, -15, None])
def test_failures_that_may_pass_are_restarted_after_a_back_off(code: int | None) -> None:
    ends = [Ended(100, code, 1)]
    waits = decide("running", 1, False, ends, Now(100.5, since_end=0.5))
    assert isinstance(waits, Wait)
    assert waits.until == 101
    assert decide("running", 1, False, ends, Now(101, since_end=1)) == Start()


@pytest.mark.parametrize("code", [1, 2, 5, 6, 7])
def test_failures_that_stay_wait_for_a_person(code: int) -> None:
    assert isinstance(decide("running", 1, False, [Ended(100, code, 1)], LATER), NeedsPerson)


def test_a_run_that_ended_by_itself_is_not_started_again() -> None:
    assert decide("running", 1, False, [Ended(100, 0, 1)], LATER) == Nothing()


@given(
    st.sampled_from(get_args(Wanted)),
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.sampled_from(CODES), st.integers(0, 3)), max_size=8),
    st.floats(-1e9, 1e9),
    st.floats(0, 1e9),
)
def test_ends_count_by_the_number_of_their_wish_and_by_no_clock(
    wanted: Wanted, ends: list[tuple[float, int | None, int]], at: float, since: float
) -> None:
    ended = [Ended(*end) for end in ends]
    now = Now(at, since)
    decision = decide(wanted, 3, False, ended, now)
    assert decision == decide(wanted, 3, False, [end for end in ended if end.wish == 3], now)  # older ones do not count
    mine = [end for end in ended if end.wish == 3]
    if wanted == "stopped":
        assert decision == Nothing()
    elif not mine:
        assert decision == Start()
    elif mine[-1].code == 0:
        assert decision == Nothing()
    elif not is_restarted(mine[-1].code):
        assert isinstance(decision, NeedsPerson)
    else:
        assert not isinstance(decision, Nothing)
    if isinstance(decision, Wait):
        assert decision.until <= at + MOST_SECONDS * 1.2  # a clock that was set holds nothing up for longer


def test_many_failures_in_a_short_time_call_a_person_for_good() -> None:
    ends = [Ended(100 + 60 * number, 3, 1) for number in range(MOST_FAILURES)]
    assert isinstance(decide("running", 1, False, ends[:-1], LATER), Start)
    assert isinstance(decide("running", 1, False, ends, Now(1000, 1)), NeedsPerson)
    assert isinstance(decide("running", 1, False, ends, LATER), NeedsPerson)
    assert decide("running", 2, False, ends, LATER) == Start()  # somebody asks again


def test_failures_that_lie_far_apart_call_nobody() -> None:
    ends = [Ended(WITHIN_SECONDS * number, 3, 1) for number in range(3 * MOST_FAILURES)]
    assert decide("running", 1, False, ends, LATER) == Start()


@pytest.mark.parametrize("place", range(MOST_FAILURES))
@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_failure_with_a_wrong_date_makes_no_others_look_close(place: int, jump: float) -> None:
    ends = [Ended(2e6 + WITHIN_SECONDS * number, 3, 1) for number in range(MOST_FAILURES)]
    ends[place] = Ended(ends[place].at + jump, 3, 1)
    assert decide("running", 1, False, ends, LATER) == Start()
    close = [Ended(ends[-1].at - jump + number, 3, 1) for number in range(MOST_FAILURES)]  # those that come after it
    assert isinstance(decide("running", 1, False, [*ends, *close[:-1]], LATER), Start)
    assert isinstance(decide("running", 1, False, [*ends, *close], LATER), NeedsPerson)


def test_clocks_that_differ_a_little_hide_no_failures() -> None:
    ends = [Ended(1000 + 10 * number + 20 * (number % 2), 3, 1) for number in range(MOST_FAILURES)]  # of two hosts
    assert isinstance(decide("running", 1, False, ends, LATER), NeedsPerson)


def test_the_back_off_grows_up_to_a_limit_and_has_jitter() -> None:
    assert [back_off(n, 0) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert back_off(50, 0) == MOST_SECONDS
    assert back_off(3, -1) < back_off(3, 0) < back_off(3, 1)


def test_what_is_wrong_with_a_live_run_is_said_whatever_is_wanted() -> None:
    for wanted in (None, *get_args(Wanted)):
        assert decide(wanted, 1, True, [], LATER, "mute") == NeedsPerson("mute")


# -- the wish that an end belongs to ------------------------------------------------------------------


def wishes(*words: Wanted) -> list[Wish]:
    return [Wish(word, "ann", "2026-11-18T00:00:00+00:00", number) for number, word in enumerate(words, 2)]


def test_the_end_of_a_run_belongs_to_the_last_stop_or_to_the_newest_wish() -> None:
    assert find_charged(1, []) == 1
    assert find_charged(1, wishes("paused", "running")) == 3
    assert find_charged(1, wishes("stopped")) == 2
    assert find_charged(1, wishes("stopped", "running")) == 2  # wanted again while it was stopping
    assert find_charged(1, wishes("stopped", "running", "stopped", "paused")) == 4


@given(st.lists(st.sampled_from(get_args(Wanted)), max_size=6), st.sampled_from(CODES))
def test_a_pipeline_that_is_wanted_after_a_stop_is_started_however_its_run_ended(
    words: list[Wanted], code: int | None
) -> None:
    later = wishes(*words)
    newest = later[-1] if later else Wish("running", "ann", "", 1)
    decision = decide(newest.wanted, newest.number, False, [Ended(0, code, find_charged(1, later))], LATER)
    if newest.wanted == "stopped":
        assert decision == Nothing()
    elif "stopped" in words:
        assert decision == Start()


# -- what is alive ------------------------------------------------------------------------------------


def test_a_launch_lives_by_signs_and_every_doubt_has_an_end() -> None:
    known = (True, False, None)
    for run, launcher, former, answers in itertools.product(known, known, (False, True), (False, True)):
        early = judge(Signs(True, run, launcher, former, answers, watched=0))
        late = judge(Signs(True, run, launcher, former, answers, watched=SILENT_SECONDS))
        if run is True or (run is None and answers):
            assert (early, late) == ("alive", "alive")
        elif run is False:
            assert early == late == ("ending" if launcher else "gone")
        else:
            assert (early, late) == ("alive", "gone")
            assert judge(Signs(True, None, launcher, True, False, BOOT_SECONDS)) == "gone"


def test_a_launcher_that_does_not_let_its_run_go_is_waited_for_for_a_while() -> None:
    assert judge(Signs(False)) == "beginning"
    assert judge(Signs(False, watched=BEGIN_SECONDS)) == "lost"
    assert judge(Signs(False, reaped=True)) == "lost"
    assert frozenset(("beginning", "alive", "ending")) == ALIVE
