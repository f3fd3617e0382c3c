"""What one step of the epoch's decisions does with each event."""

from __future__ import annotations

import pytest

from firnline.epoch import messages as m
from firnline.epoch.decide import EpochState, Phase, Policy, Settings, Stage, initial, step

SINKS = [("d", True), ("f", True)]
READ_EMPTY = m.SinksRead("", (("d", 0), ("f", 0)))
READ_LEVEL = m.SinksRead("old", (("d", 5), ("f", 5)))
CLAIMED = (m.Started(), READ_EMPTY, m.Planned(1, "a", ""), m.Claimed(0, ""), m.Joined("f", 0))
STAGED = (*CLAIMED, m.Ran(1, "a"), m.Staged(1, "a"))
DECIDED = (*STAGED, m.Planned(2, "b", "a"), m.Committed("d", 1, "a"))
SETTLED = (*DECIDED, m.Committed("f", 1, "a"))


def fed(
    *events: m.Event, settings: Settings | None = None, sinks: list[tuple[str, bool]] | None = None
) -> tuple[EpochState, list[m.Action]]:
    """The state after these events, and what the last of them gave rise to."""
    state, actions = initial(settings or Settings(restart_attempts=2), sinks or SINKS), list[m.Action]()
    for event in events:
        state, actions = step(state, event)
    return state, actions


# -- start, claim, join ----------------------------------------------------------------------------------


def test_a_run_first_reads_the_sinks() -> None:
    assert fed(m.Started())[1] == [m.ReadSinks()]


def test_a_failed_read_is_repeated_after_a_back_off() -> None:
    assert fed(m.Started(), m.Failed(retry=True))[1] == [m.Wait(1)]
    assert fed(m.Started(), m.Failed(retry=True), m.TimerFired())[1] == [m.ReadSinks()]


def test_a_run_with_level_sinks_plans_before_it_claims() -> None:
    state, actions = fed(m.Started(), READ_LEVEL)
    assert (actions, state.phase) == ([m.Plan(6, "old")], Phase.OPEN)


def test_a_second_reading_changes_nothing() -> None:
    state, _ = fed(*CLAIMED)
    assert step(state, READ_LEVEL) == (state, [])


@pytest.mark.parametrize(
    "read",
    [
        m.SinksRead("old", (("d", 5), ("f", 4))),
        m.SinksRead("old", (("d", 5),)),
        m.SinksRead("old", (("d", 5), ("f", 5)), recorded=4),
        m.SinksRead("old", (("d", 5), ("f", 5)), recorded=5, acknowledged=3),
    ],
    ids=["a sink lags", "a sink could not be read", "an epoch is not recorded", "an epoch is not acknowledged"],
)
def test_a_run_claims_at_once_when_something_lags(read: m.SinksRead) -> None:
    assert fed(m.Started(), read)[1] == [m.Claim()]


def test_a_run_that_finds_nothing_to_do_writes_nothing() -> None:
    done = m.SinksRead("old", (("d", 5), ("f", 5)), recorded=5, acknowledged=4)
    state, actions = fed(m.Started(), done, m.NothingToPlan(), settings=Settings(once=True))
    assert (actions, state.exit_code) == ([m.Stop(0)], 0)


def test_what_another_run_records_meanwhile_is_not_believed_before_it_is_read() -> None:
    assert fed(m.Started(), m.SinksRead("old", (("d", 5), ("f", 5)), recorded=7))[0].recorded == 5


def test_a_failed_claim_is_repeated_after_a_back_off() -> None:
    planned = (m.Started(), READ_EMPTY, m.Planned(1, "a", ""))
    assert fed(*planned)[1] == [m.Claim()]
    assert fed(*planned, m.Failed(retry=True))[1] == [m.Wait(1)]
    assert fed(*planned, m.Failed(retry=True), m.TimerFired())[1] == [m.Claim()]


def test_a_plan_is_kept_when_the_claim_stands_on_its_base() -> None:
    state, actions = fed(m.Started(), READ_EMPTY, m.Planned(1, "a", ""), m.Claimed(0, ""))
    assert [slot.attempt for slot in state.slots] == ["a"]
    assert actions == [m.Join("f")]


def test_a_plan_is_dropped_and_made_again_when_the_claim_stands_on_another_tip() -> None:
    _, actions = fed(m.Started(), READ_EMPTY, m.Planned(1, "a", ""), m.Claimed(1, "other"))
    assert actions == [m.Drop(1, "a"), m.Join("f"), m.Plan(2, "other")]


def test_a_doubled_claim_changes_nothing() -> None:
    state, _ = fed(*DECIDED)
    assert step(state, m.Claimed(0, "")) == (state, [])


def test_a_job_starts_once_every_needed_sink_is_joined() -> None:
    assert fed(*CLAIMED)[1] == [m.Run(1, "a")]


def test_a_doubled_registration_changes_nothing() -> None:
    state, _ = fed(*SETTLED)
    assert step(state, m.Joined("f", 0)) == (state, [])


def test_a_sink_that_cannot_be_joined_rests_alone_and_is_tried_again() -> None:
    failed = (*CLAIMED[:4], m.Failed(retry=True, sink="f"))
    assert fed(*failed)[1] == [m.Wait(1, "f")]
    assert fed(*failed, m.TimerFired("f"))[1] == [m.Join("f")]


# -- plan, run, stage ------------------------------------------------------------------------------------


def test_the_next_epoch_is_planned_when_the_job_has_ended() -> None:
    assert fed(*CLAIMED, m.Ran(1, "a"))[1] == [m.StageEntry(1, "a"), m.Plan(2, "a")]


def test_no_more_epochs_are_planned_than_may_be_in_flight() -> None:
    assert fed(*CLAIMED, m.Ran(1, "a"), settings=Settings(max_inflight=1))[1] == [m.StageEntry(1, "a")]


def test_a_poll_that_finds_nothing_waits_and_then_plans_again() -> None:
    idle = (m.Started(), READ_LEVEL, m.NothingToPlan())
    assert fed(*idle)[1] == [m.Wait()]
    assert fed(*idle, m.TimerFired())[1] == [m.Plan(6, "old")]


def test_a_poll_that_finds_nothing_ends_the_row_of_failures() -> None:
    failed = (m.Started(), READ_LEVEL, m.Failed(retry=True), m.TimerFired())
    assert fed(*failed)[0].failures == 1
    assert fed(*failed, m.NothingToPlan())[0].failures == 0


def test_a_plan_under_way_on_a_lost_epoch_counts_for_nothing() -> None:
    lost = (*CLAIMED, m.Ran(1, "a"), m.EpochLost(1, "a"))
    state, actions = fed(*lost, m.NothingToPlan(), settings=Settings(once=True))
    assert (actions, state.exhausted) == ([], False)
    assert fed(*lost, m.Planned(2, "b", "a"))[1] == [m.Drop(2, "b")]


def test_a_poll_does_not_add_a_timer_to_a_back_off() -> None:
    state, actions = fed(*STAGED, m.RecordFailed(), m.NothingToPlan())
    assert (actions, state.polling, state.resting) == ([], False, True)


def test_answers_about_dropped_epochs_change_nothing() -> None:
    state, _ = fed(*CLAIMED)
    for event in (m.Ran(1, "x"), m.Staged(1, "x"), m.EpochLost(1, "x"), m.Staged(1, "a")):
        assert step(state, event) == (state, [])


def test_a_lost_epoch_takes_later_ones_with_it() -> None:
    state, actions = fed(*STAGED, m.Planned(2, "b", "a"), m.EpochLost(1, "a"))
    assert actions == [m.Drop(1, "a"), m.Drop(2, "b"), m.Wait(1)]
    assert state.slots == ()
    assert step(state, m.TimerFired())[1] == [m.Plan(1, "")]


def test_a_lost_epoch_leaves_earlier_ones() -> None:
    state, actions = fed(*STAGED, m.Planned(2, "b", "a"), m.EpochLost(2, "b"))
    assert actions == [m.Drop(2, "b"), m.Wait(1)]
    assert [(slot.attempt, slot.stage) for slot in state.slots] == [("a", Stage.COMMITTING)]


# -- commit ----------------------------------------------------------------------------------------------


def test_the_deciding_sink_commits_what_is_staged() -> None:
    assert fed(*STAGED)[1] == [m.Commit("d", 1)]


def test_further_sinks_commit_what_is_decided_while_the_next_job_runs() -> None:
    state, actions = fed(*DECIDED)
    assert actions == [m.Commit("f", 1)]
    assert (state.decided, state.tip, state.settled) == (1, "a", 0)


def test_the_next_epoch_commits_only_when_this_one_is_settled() -> None:
    ready = (*DECIDED, m.Ran(2, "b"), m.Staged(2, "b"))
    assert fed(*ready)[1] == []
    assert fed(*ready, m.Committed("f", 1, "a"))[1] == [m.Commit("d", 2), m.Record(1)]


def test_a_doubled_receipt_changes_nothing() -> None:
    state, _ = fed(*DECIDED)
    assert step(state, m.Committed("d", 1, "a")) == (state, [])


def test_a_receipt_with_another_attempt_means_fenced() -> None:
    state, actions = fed(*STAGED, m.Committed("d", 1, "z"))
    assert (actions, state.exit_code) == ([m.Stop(5)], 5)


def test_an_unclear_commit_is_asked_about_first() -> None:
    unclear = (*STAGED, m.CommitUnclear("d", 1))
    assert fed(*unclear)[1] == [m.FindReceipt("d", 1)]
    assert fed(*unclear, m.Committed("d", 1, "a"))[0].decided == 1


def test_a_question_that_fails_is_asked_again_after_a_back_off() -> None:
    failed = (*STAGED, m.CommitUnclear("d", 1), m.CommitUnclear("d", 1))
    assert fed(*failed)[1] == [m.Wait(1, "d")]
    assert fed(*failed, m.TimerFired("d"))[1] == [m.FindReceipt("d", 1)]


def test_a_question_that_is_never_answered_ends_the_run_as_unknown() -> None:
    state, _ = fed(*STAGED, *[m.CommitUnclear("d", 1)] * 4)
    assert state.exit_code == 4


def test_an_absent_receipt_means_the_same_commit_again_after_a_back_off() -> None:
    absent = (*STAGED, m.CommitUnclear("d", 1), m.ReceiptAbsent("d", 1))
    assert fed(*absent)[1] == [m.Wait(1, "d")]
    assert fed(*absent, m.TimerFired("d"))[1] == [m.Commit("d", 1)]


def test_a_further_sink_that_lacks_the_epoch_is_given_it_again() -> None:
    absent = (*DECIDED, m.CommitUnclear("f", 1), m.ReceiptAbsent("f", 1))
    assert fed(*absent)[1] == [m.Wait(1, "f")]
    assert fed(*absent, m.TimerFired("f"))[1] == [m.Commit("f", 1)]


def test_an_absence_that_nobody_asked_about_changes_nothing() -> None:
    state, _ = fed(*STAGED)
    assert step(state, m.ReceiptAbsent("d", 1)) == (state, [])


def test_a_commit_that_found_another_table_is_lost_and_frees_the_sink() -> None:
    state, actions = fed(*STAGED, m.EpochLost(1, "a"))
    assert actions == [m.Drop(1, "a"), m.Wait(1)]
    assert not state.deciding.busy


# -- record, acknowledge ---------------------------------------------------------------------------------


def test_the_newest_epoch_is_recorded_but_not_acknowledged() -> None:
    assert fed(*SETTLED)[1] == [m.Record(1)]
    assert fed(*SETTLED, m.Recorded(1))[1] == []


def test_an_epoch_is_acknowledged_after_the_next_one_is_recorded() -> None:
    second = (m.Ran(2, "b"), m.Staged(2, "b"), m.Recorded(1), m.Committed("d", 2, "b"), m.Committed("f", 2, "b"))
    assert fed(*SETTLED, *second)[1] == [m.Record(2)]
    state, actions = fed(*SETTLED, *second, m.Recorded(2))
    assert actions == [m.Acknowledge(1)]
    assert step(state, m.Acknowledged(1))[0].acknowledged == 1


def test_recording_that_failed_is_repeated_after_a_back_off() -> None:
    assert fed(*SETTLED, m.RecordFailed())[1] == [m.Wait(1)]
    assert m.Record(1) in fed(*SETTLED, m.RecordFailed(), m.TimerFired())[1]


# -- failures and policies -------------------------------------------------------------------------------


def test_failures_in_a_row_end_the_run() -> None:
    failures: list[m.Event] = [m.Failed(retry=True), m.TimerFired()] * 2
    state, actions = fed(m.Started(), *failures, m.Failed(retry=True, exit_code=3))
    assert (actions, state.exit_code) == ([m.Stop(3)], 3)


def test_a_failure_that_no_retry_helps_ends_the_run_at_once() -> None:
    assert fed(*CLAIMED, m.Failed(retry=False, exit_code=1))[1] == [m.Stop(1)]


def test_a_failure_during_a_back_off_sets_no_second_timer() -> None:
    assert fed(*STAGED, m.RecordFailed(), m.Failed(retry=True))[1] == []


def test_a_required_sink_that_keeps_failing_ends_the_run() -> None:
    failures: list[m.Event] = [m.Failed(retry=True, sink="f"), m.TimerFired("f")] * 2
    assert fed(*CLAIMED[:4], *failures, m.Failed(retry=True, sink="f"))[1] == [m.Stop(3)]
    assert fed(*CLAIMED[:4], m.Failed(retry=False, exit_code=1, sink="f"))[1] == [m.Stop(1)]


@pytest.mark.parametrize(
    "settings", [Settings(policy=Policy.REQUIRED), Settings(policy=Policy.QUORUM, quorum=1)], ids=["required", "quorum"]
)
def test_a_run_goes_on_without_a_sink_that_it_can_do_without(settings: Settings) -> None:
    sinks = [("d", True), ("f", False)]
    down = (*CLAIMED[:4], m.Failed(retry=False, sink="f"))
    assert fed(*down, settings=settings, sinks=sinks)[1] == [m.Wait(6, "f")]
    done = (m.Ran(1, "a"), m.Staged(1, "a"), m.NothingToPlan(), m.Committed("d", 1, "a"))
    state, actions = fed(*down, *done, settings=settings, sinks=sinks)
    assert (actions, state.settled) == ([m.Record(1)], 1)


def test_a_quorum_counts_the_best_sinks_beside_the_deciding_one() -> None:
    settings = Settings(policy=Policy.QUORUM, quorum=2)
    sinks = [("d", True), ("f", True), ("g", True)]
    read = m.SinksRead("t", (("d", 3), ("f", 1), ("g", 2)))
    assert fed(m.Started(), read, settings=settings, sinks=sinks)[0].settled == 2


def test_another_generation_ends_the_run_as_fenced() -> None:
    state, actions = fed(*CLAIMED, m.Fenced())
    assert (actions, state.phase) == ([m.Stop(5)], Phase.STOPPED)
    assert step(state, m.Ran(1, "a")) == (state, [])


# -- stop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "events",
    [(m.Started(),), (m.Started(), READ_LEVEL), (m.Started(), READ_LEVEL, m.Failed(retry=True))],
    ids=["reading", "planning", "resting"],
)
def test_a_run_that_has_not_claimed_stops_at_once(events: tuple[m.Event, ...]) -> None:
    assert fed(*events, m.StopRequested())[1] == [m.Stop(0)]


def test_a_run_that_stops_finishes_what_is_in_flight_and_plans_no_more() -> None:
    stopping = (*STAGED, m.StopRequested(), m.Planned(2, "b", "a"))
    assert fed(*stopping)[1] == [m.Drop(2, "b")]
    settled = (*stopping, m.Committed("d", 1, "a"), m.Committed("f", 1, "a"))
    assert fed(*settled)[1] == [m.Record(1)]
    assert fed(*settled, m.Recorded(1))[1] == [m.Stop(0)]


def test_a_stop_does_not_wait_for_a_sink_that_the_policy_can_do_without() -> None:
    settings, sinks = Settings(policy=Policy.REQUIRED), [("d", True), ("f", False)]
    read = m.SinksRead("t", (("d", 5), ("f", 1)))
    lagging = (m.Started(), read, m.Claimed(5, "t"), m.NothingToPlan(), m.Joined("f", 1))
    assert fed(*lagging, settings=settings, sinks=sinks)[1] == [m.Commit("f", 2)]
    stopped = (*lagging, m.StopRequested(), m.Committed("f", 2, "u"), m.Acknowledged(2))
    assert fed(*stopped, settings=settings, sinks=sinks)[1] == [m.Stop(0)]


def test_once_ends_when_everything_is_delivered_and_recorded() -> None:
    events = (*STAGED, m.NothingToPlan(), m.Committed("d", 1, "a"), m.Committed("f", 1, "a"), m.Recorded(1))
    assert fed(*events, settings=Settings(once=True))[1] == [m.Stop(0)]


# -- a two-stage deciding table --------------------------------------------------------------------------


def test_a_further_sink_is_served_once_the_log_holds_the_epoch() -> None:
    put = (*STAGED, m.Committed("d", 1, "a", committed=0))
    assert m.Commit("f", 1) not in fed(*put)[1]
    assert m.WatchLog() in fed(*put)[1]
    assert m.WatchLog() in fed(*put, m.LogRead(0))[1]
    assert m.Commit("f", 1) in fed(*put, m.LogRead(1))[1]


def test_a_log_tells_of_no_more_than_the_run_has_heard_to_be_put() -> None:
    later = m.Committed("d", 1, "a", committed=5)  # others went on meanwhile, or answers are on their way
    assert fed(*STAGED, later)[0].committed == 1
    assert fed(*STAGED, m.Committed("d", 1, "a", committed=0), m.LogRead(5))[0].committed == 1


def test_a_run_ends_without_waiting_for_the_committer() -> None:
    once = Settings(once=True)
    put = (*STAGED, m.Planned(2, "b", "a"), m.EpochLost(2, "b"), m.TimerFired(), m.NothingToPlan())
    state, actions = fed(*put, m.Committed("d", 1, "a", committed=0), settings=once)
    assert (state.exit_code, actions) == (0, [m.WatchLog(), m.Stop(0)])


# -- followers -------------------------------------------------------------------------------------------


def test_a_sink_that_went_back_is_joined_again_and_gets_what_it_lost() -> None:
    state, actions = fed(*SETTLED, m.Ran(2, "b"), m.Staged(2, "b"), m.Committed("d", 2, "b"), m.WentBack("f"))
    assert m.Wait(1, "f") in actions
    assert state.exit_code is None
    state, actions = step(state, m.TimerFired("f"))
    assert actions == [m.Join("f")]
    state, actions = step(state, m.Joined("f", 0))
    assert m.Commit("f", 1) in actions
    assert state.settled == 1  # it was settled once


def test_a_run_does_not_end_well_while_a_sink_that_went_back_lacks_an_epoch() -> None:
    lost = (m.Claimed(5, "old"), m.Recorded(5), m.Acknowledged(4), m.NothingToPlan(), m.Joined("f", 4))
    read = m.SinksRead("old", (("d", 5), ("f", 5)), recorded=4)
    events = (m.Started(), read, *lost, m.CommitUnclear("f", 5), m.ReceiptAbsent("f", 5))
    state, _ = fed(*events, settings=Settings(once=True))
    assert state.exit_code is None
    state, actions = step(state, m.TimerFired("f"))
    assert actions == [m.Commit("f", 5)]
    assert step(state, m.Committed("f", 5, "old"))[0].exit_code == 0


@pytest.mark.parametrize(("read", "claimed"), [((), ("f",)), (("f",), ())])
def test_a_claim_tells_which_sinks_are_set_aside(read: tuple[str, ...], claimed: tuple[str, ...]) -> None:
    events = (m.SinksRead("old", (("d", 5), ("f", 4)), recorded=4, away=read), m.Claimed(6, "other", away=claimed))
    state, actions = fed(m.Started(), *events, sinks=[("d", True), ("f", False)])
    assert state.sinks[1].away is bool(claimed)
    assert (m.Join("f") in actions) is not bool(claimed)


def test_a_claim_made_again_waits_for_no_sink_that_is_set_aside() -> None:
    second = (m.Ran(2, "b"), m.Staged(2, "b"), m.Committed("d", 2, "b"), m.NothingToPlan(), m.Recorded(2))
    events = (*DECIDED, m.SetAside("f"), m.CommitUnclear("f", 1), *second, m.ShardsChanged())
    assert m.Claim(again=True) in fed(*events, sinks=[("d", True), ("f", False)])[1]


def test_a_claim_made_again_waits_for_a_sweep() -> None:
    second = (m.Ran(2, "b"), m.Staged(2, "b"), m.Committed("d", 2, "b"), m.Committed("f", 2, "b"))
    state, actions = fed(*SETTLED, m.Recorded(1), *second, m.NothingToPlan(), m.Recorded(2), m.ShardsChanged())
    assert state.acknowledging
    assert actions == []
    assert m.Claim(again=True) in step(state, m.Acknowledged(1))[1]
