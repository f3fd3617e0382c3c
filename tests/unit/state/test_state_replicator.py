"""Replication of state in the background: the newest wins, failures are kept and tried again, a stop may wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from firnline.state.manifest import CompleteCheckpoint
from firnline.state.remote import CheckpointCopy, Replica, StateReplicator
from firnline.storage import open_storage
from firnline.stores.replicator import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Replication
from tests.support.states import list_checkpoints, make_checkpoint, sample_plan

SECONDS = 20.0  # how long a test waits for what must come


class World:
    """Two homes, a clock that stands still, and a remote home that can be down or slow."""

    def __init__(self, folder: Path) -> None:
        self.local, self.remote = open_storage(str(folder / "local")), open_storage(str(folder / "remote"))
        self.time = 100.0
        self.down = ""
        self.gate: threading.Event | None = None
        self.reached = threading.Event()
        self.tries: list[str] = []
        self.told: list[Replication] = []
        self.heard = threading.Condition()
        world = self

        class Watched(Replica):
            def replicate(self, checkpoint: str, expected_digest: str | None = None) -> int:
                world.tries.append(checkpoint)
                world.reached.set()
                if world.gate:
                    assert world.gate.wait(SECONDS)
                if world.down:
                    raise OSError(world.down)
                return super().replicate(checkpoint, expected_digest)

        self.replicator = StateReplicator(Watched(self.local, self.remote), 10_000, lambda: self.time, self.tell)

    def tell(self, told: Replication) -> None:
        with self.heard:
            self.told.append(told)
            self.heard.notify_all()

    def wait_for(self, true: Callable[[], bool]) -> None:
        with self.heard:
            assert self.heard.wait_for(true, timeout=SECONDS)

    def make(self, epoch: int) -> CompleteCheckpoint:
        return make_checkpoint(self.local, sample_plan(epoch))

    def offer(self, epoch: int) -> CompleteCheckpoint:
        made = self.make(epoch)
        self.replicator.offer(CheckpointCopy(made.checkpoint_id, made.digest))
        return made

    def lag_seconds(self) -> float:
        return self.replicator.replication().lag_seconds(self.time)

    def remote_epochs(self) -> list[int]:
        return [info.epoch for info in list_checkpoints(self.remote) if info.status == "COMPLETED"]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    if world.gate:
        world.gate.set()
    world.replicator.close()


# -- without a thread: turn by turn ----------------------------------------------------------------------


def test_nothing_waits_at_first(world: World) -> None:
    assert world.replicator.turn() is None
    assert world.replicator.replication() == Replication("remote", world.remote.root, 0)
    assert world.lag_seconds() == 0


def test_the_first_is_copied_at_once_and_the_next_after_the_interval(world: World) -> None:
    world.offer(1)
    assert world.replicator.turn() is None
    assert world.remote_epochs() == [1]
    world.offer(2)
    world.time += 4
    assert world.replicator.turn() == 6
    assert world.remote_epochs() == [1]
    world.time += 6
    assert world.replicator.turn() is None
    assert world.remote_epochs() == [1, 2]
    assert world.told[-1] == Replication("remote", world.remote.root, 2)


def test_the_newest_takes_the_place_of_what_waits(world: World) -> None:
    world.offer(1)
    world.replicator.turn()
    for epoch in (2, 3, 4):
        world.offer(epoch)
        world.time += 1
    lag = world.replicator.replication()
    assert (lag.epoch, lag.epochs_behind) == (1, 3)
    assert world.lag_seconds() == 3
    world.time += 10
    world.replicator.turn()
    assert world.remote_epochs() == [1, 4]
    assert world.lag_seconds() == 0
    assert world.replicator.replication().epoch == 4


def test_a_failure_is_kept_and_tried_again_with_a_back_off(world: World) -> None:
    world.offer(1)
    world.down = "no route"
    assert world.replicator.turn() == FIRST_BACKOFF_SECONDS
    world.time += FIRST_BACKOFF_SECONDS
    assert world.replicator.turn() == 2 * FIRST_BACKOFF_SECONDS
    lag = world.replicator.replication()
    assert (lag.reason, lag.epoch, lag.epochs_behind) == ("no route", 0, 1)
    assert world.lag_seconds() == FIRST_BACKOFF_SECONDS
    world.down = ""
    world.time += 2 * FIRST_BACKOFF_SECONDS
    assert world.replicator.turn() is None
    assert world.remote_epochs() == [1]
    assert world.replicator.replication().reason == ""


def test_an_outage_of_days_is_survived(world: World) -> None:
    world.offer(1)
    world.down = "no route"
    for _ in range(3000):
        wait = world.replicator.turn()
        assert wait is not None
        assert 0 < wait <= MAX_BACKOFF_SECONDS
        world.time += wait
    world.down = ""
    world.replicator.turn()
    assert world.remote_epochs() == [1]


def test_a_newer_one_replaces_one_that_failed_but_the_lag_counts_from_the_first(world: World) -> None:
    world.offer(1)
    world.down = "no route"
    world.replicator.turn()
    world.time += 5
    world.offer(2)
    assert world.lag_seconds() == 5
    world.down = ""
    world.replicator.turn()
    assert world.tries == [sample_plan(1).checkpoint_id, sample_plan(2).checkpoint_id]
    assert world.remote_epochs() == [2]


def test_an_error_that_nobody_expected_is_kept_too(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.replicator.offer(CheckpointCopy(sample_plan(9).checkpoint_id))
    assert world.replicator.turn() == FIRST_BACKOFF_SECONDS
    assert "lacks COMMITTED" in world.replicator.replication().reason
    assert [record.message for record in caplog.records] == ["state not replicated"]


def test_what_the_remote_home_holds_already_is_known(world: World) -> None:
    world.replicator.holds(7)
    assert world.replicator.replication().epoch == 7


def test_a_flush_does_not_wait_for_the_interval(world: World) -> None:
    world.offer(1)
    world.replicator.turn()
    world.offer(2)
    assert world.replicator.flush(SECONDS)
    assert world.remote_epochs() == [1, 2]
    world.offer(3)
    assert world.replicator.turn() == 10  # it hurried once only


# -- with its thread -------------------------------------------------------------------------------------


def test_it_copies_in_the_background_and_drains_at_the_end(world: World) -> None:
    world.replicator.start()
    world.replicator.start()
    world.offer(1)
    world.wait_for(lambda: bool(world.told))
    world.offer(2)
    assert world.replicator.close(drain_seconds=SECONDS)
    assert world.remote_epochs() == [1, 2]


def test_closing_without_draining_leaves_what_waits(world: World) -> None:
    world.replicator.start()
    world.offer(1)
    world.wait_for(lambda: bool(world.told))
    world.offer(2)
    assert not world.replicator.close()
    assert world.remote_epochs() == [1]


def test_draining_gives_up_when_the_remote_home_is_down(world: World) -> None:
    world.down = "no route"
    world.replicator.start()
    world.offer(1)
    world.wait_for(lambda: bool(world.told))
    assert not world.replicator.close(drain_seconds=SECONDS)
    assert len(world.tries) >= 2
    assert world.replicator.replication().reason == "no route"


def test_an_offer_never_waits_for_a_slow_copy_and_a_drain_takes_the_newest(world: World) -> None:
    world.gate = threading.Event()
    world.replicator.start()
    world.offer(1)
    assert world.reached.wait(SECONDS)
    for epoch in (2, 3):
        world.offer(epoch)
    assert world.replicator.replication().epochs_behind == 3
    assert not world.replicator.flush(0.01)
    world.gate.set()
    assert world.replicator.close(drain_seconds=SECONDS)
    assert world.remote_epochs() == [1, 3]


def test_a_drain_that_begins_during_a_failing_copy_tries_once_more(world: World) -> None:
    world.gate = threading.Event()
    world.down = "no route"
    world.replicator.start()
    world.offer(1)
    assert world.reached.wait(SECONDS)
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(world.replicator.close(drain_seconds=SECONDS)))
    closer.start()
    world.gate.set()
    closer.join(SECONDS)
    assert closed == [False]
    assert len(world.tries) == 2
