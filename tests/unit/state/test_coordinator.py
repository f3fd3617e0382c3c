"""The rules of the checkpoint coordinator, one by one."""

from __future__ import annotations

import pytest

from firnline.state import coordinator as c
from firnline.state.coordinator import Action, CheckpointDone, CoordinatorState, Event, initial, step


def play(*events: Event, state: CoordinatorState | None = None) -> tuple[CoordinatorState, list[Action]]:
    """The state after some events, and the actions of the last one."""
    state = initial() if state is None else state
    actions: list[Action] = []
    for event in events:
        state, actions = step(state, event)
    return state, actions


BEGIN = c.Begin("a", 1, 2)
BOTH_DONE = (BEGIN, CheckpointDone("a", 0, True), CheckpointDone("a", 1, True))


def test_a_checkpoint_is_committed_once_every_shard_reported_and_the_file_is_durable() -> None:
    assert play(BEGIN)[1] == [c.CheckpointRequest("a", 1)]
    assert play(*BOTH_DONE[:2])[1] == []
    assert play(*BOTH_DONE)[1] == [c.WriteCommitted("a")]
    state, actions = play(*BOTH_DONE, c.WrittenCommitted("a"))
    assert actions == [c.CheckpointCommitted("a")]
    assert state == CoordinatorState(None, ("a",), 1)


def test_a_shard_that_reports_twice_counts_once() -> None:
    state, actions = play(*BOTH_DONE[:2], CheckpointDone("a", 0, True))
    assert actions == []
    assert state.current is not None
    assert state.current.done == {0}


def test_a_report_while_committed_is_written_does_not_write_it_again() -> None:
    assert play(*BOTH_DONE, CheckpointDone("a", 1, True))[1] == []


@pytest.mark.parametrize("shard", [0, 1])
def test_a_failure_aborts_also_after_success(shard: int) -> None:
    events = (BEGIN, CheckpointDone("a", 0, True), CheckpointDone("a", shard, False))
    state, actions = play(*events)
    assert actions == [c.CheckpointAborted("a", f"shard {shard} failed")]
    assert state.current is None


def test_a_failure_while_committed_is_written_aborts() -> None:
    state, actions = play(*BOTH_DONE, CheckpointDone("a", 1, False))
    assert actions == [c.CheckpointAborted("a", "shard 1 failed")]
    assert step(state, c.WrittenCommitted("a")) == (state, [])


def test_a_failure_after_the_commit_changes_nothing() -> None:
    state, _ = play(*BOTH_DONE, c.WrittenCommitted("a"))
    assert step(state, CheckpointDone("a", 1, False)) == (state, [])


@pytest.mark.parametrize(
    "event",
    [
        CheckpointDone("a", 2, True),
        CheckpointDone("a", -1, False),
        CheckpointDone("b", 1, False),
        c.TimedOut("b"),
        c.WrittenCommitted("a"),
        c.WriteFailed("a", "disk full"),
        c.Dropped(2),
    ],
)
def test_what_does_not_concern_the_checkpoint_changes_nothing(event: Event) -> None:
    state, _ = play(*BOTH_DONE[:2])
    assert step(state, event) == (state, [])


def test_a_timeout_names_the_shards_that_are_missing() -> None:
    assert play(BEGIN, c.TimedOut("a"))[1] == [c.CheckpointAborted("a", "timed out waiting for shards 0, 1")]
    assert play(*BOTH_DONE[:2], c.TimedOut("a"))[1] == [c.CheckpointAborted("a", "timed out waiting for shard 1")]
    assert play(*BOTH_DONE, c.TimedOut("a"))[1] == [c.CheckpointAborted("a", "timed out while COMMITTED was written")]


def test_a_failed_write_aborts_for_good() -> None:
    state, actions = play(*BOTH_DONE, c.WriteFailed("a", "disk full"))
    assert actions == [c.CheckpointAborted("a", "COMMITTED could not be written: disk full")]
    assert step(state, c.WrittenCommitted("a")) == (state, [])


def test_a_second_one_waits_for_the_first() -> None:
    state, actions = play(BEGIN, c.Begin("b", 2, 2))
    assert actions == [c.Busy("b", "a")]
    state, _ = step(state, c.TimedOut("a"))
    assert step(state, c.Begin("b", 2, 2))[1] == [c.CheckpointRequest("b", 2)]


@pytest.mark.parametrize("end", [c.TimedOut("a"), c.WrittenCommitted("a")])
def test_an_id_is_never_begun_again(end: Event) -> None:
    state, _ = play(*BOTH_DONE, end)
    after, actions = step(state, c.Begin("a", 5, 2))
    assert (after, actions) == (state, [c.Refused("a", "this id was begun before")])


def test_barriers_grow_unless_epochs_are_dropped() -> None:
    state, _ = play(*BOTH_DONE, c.WrittenCommitted("a"))
    assert step(state, c.Begin("b", 1, 2))[1] == [c.Refused("b", "the checkpoint of epoch 1 is committed already")]
    state, actions = step(state, c.Dropped(1))
    assert actions == []
    assert step(state, c.Begin("b", 1, 2))[1] == [c.CheckpointRequest("b", 1)]


def test_a_dropped_epoch_aborts_its_checkpoint() -> None:
    assert play(BEGIN, c.Dropped(1))[1] == [c.CheckpointAborted("a", "its epoch was dropped")]


def test_a_run_goes_on_after_the_epoch_that_it_began_from() -> None:
    assert step(initial(7), c.Begin("a", 7, 1))[1] == [c.Refused("a", "the checkpoint of epoch 7 is committed already")]
    assert step(initial(7), c.Begin("b", 8, 1))[1] == [c.CheckpointRequest("b", 8)]


def test_a_checkpoint_without_shards_is_refused() -> None:
    assert play(c.Begin("a", 1, 0))[1] == [c.Refused("a", "it has no shards")]


def test_the_state_stays_small() -> None:
    state = initial()
    for number in range(1, 1000):
        state, _ = play(c.Begin(f"id-{number}", number, 1), c.TimedOut(f"id-{number}"), state=state)
    assert len(state.known) == c.REMEMBERED
    assert step(state, c.Begin("id-999", 2000, 1))[1] == [c.Refused("id-999", "this id was begun before")]
