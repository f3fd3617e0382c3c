"""The remote tier of state: what it holds is what was copied there, no more and no less."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.model import Checkpoint
from firnline.clock import SystemClock
from firnline.options import RemoteTierOptions
from firnline.run.operator_state import RemoteState
from firnline.state.home import StateHome
from firnline.state.manifest import SnapshotRef
from firnline.state.remote import Replica
from tests.support.states import make_checkpoint, sample_plan

SECONDS = 20.0  # how long a test waits for what must come


class Tier:
    """A home with a remote one behind it, where every copy waits for leave."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.remote = StateHome(str(folder / "remote"), {})
        self.home = StateHome(str(folder / "home"), {}, fallback=self.remote)
        self.begun = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)
        real = Replica.replicate

        def replicate(replica: Replica, checkpoint: str, digest: str | None = None) -> int:
            self.begun.release()
            assert self.allowed.acquire(timeout=SECONDS)
            return real(replica, checkpoint, digest)

        monkeypatch.setattr(Replica, "replicate", replicate)
        self.state = self.open()

    def open(self) -> RemoteState:
        options = RemoteTierOptions(self.remote.storage.root, interval_ms=0)
        return RemoteState(self.home, options, ["often", "seldom"], SystemClock())

    def snapshot(self, epoch: int) -> SnapshotRef:
        made = make_checkpoint(self.home.storage, sample_plan(epoch))
        return SnapshotRef(made.plan.checkpoint_id, epoch, made.digest, 1, 0, 0)

    def settle(self, epoch: int, **refs: SnapshotRef) -> Checkpoint:
        state: dict[str, Any] = {name: ref.to_json() for name, ref in refs.items()}
        checkpoint = Checkpoint("demo", epoch, 1, "run", "attempt", "", positions={}, state=state)
        self.state.settled(checkpoint)
        return checkpoint

    def let_one_through(self) -> None:
        assert self.begun.acquire(timeout=SECONDS)
        self.allowed.release()


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    tier = Tier(tmp_path, monkeypatch)
    yield tier
    for _ in range(100):
        tier.allowed.release()
    tier.state.close(drain_seconds=0)


def test_a_copy_counts_although_newer_snapshots_were_made_meanwhile(tier: Tier) -> None:
    first = tier.snapshot(1)
    tier.settle(1, often=first, seldom=first)
    assert tier.begun.acquire(timeout=SECONDS)
    for epoch in (2, 3, 4):  # while the first is being copied
        ref = tier.snapshot(epoch)
        tier.settle(epoch, often=ref, seldom=ref)
    assert tier.state.epoch == 0, "nothing counts before it is copied"
    tier.allowed.release()
    assert tier.begun.acquire(timeout=SECONDS)  # the next copy begins after the first was counted
    assert tier.state.epoch == 1
    tier.allowed.release()
    assert tier.state.flush(SECONDS)
    assert tier.state.epoch == 4


def test_what_is_copied_of_one_operator_does_not_count_for_another(tier: Tier) -> None:
    first, second = tier.snapshot(1), tier.snapshot(2)
    tier.settle(1, often=first, seldom=first)
    tier.let_one_through()
    assert tier.state.flush(SECONDS)
    tier.settle(2, often=second, seldom=first)
    tier.let_one_through()
    assert tier.state.flush(SECONDS)
    assert tier.state.epoch == 1, "the other operator's newest snapshot there is of epoch 1"
    third = tier.snapshot(3)
    tier.settle(3, often=second, seldom=third)
    tier.let_one_through()
    assert tier.state.flush(SECONDS)
    assert tier.state.epoch == 2


def test_after_a_restart_only_what_is_there_counts(tier: Tier) -> None:
    first = tier.snapshot(1)
    checkpoint = tier.settle(1, often=first, seldom=first)
    restarted = tier.open()
    restarted.begin(checkpoint)
    assert restarted.epoch == 0, "named by the sinks, but not copied yet"
    tier.let_one_through()
    assert tier.state.flush(SECONDS)
    restarted = tier.open()
    restarted.begin(checkpoint)
    assert restarted.epoch == 1


def test_the_floor_lies_at_an_epoch_that_was_copied_never_between_two(tier: Tier) -> None:
    """Back at an epoch between two copies, and the host gone: what the source forgot could not be folded again."""
    for epoch in (3, 6):
        ref = tier.snapshot(epoch)
        tier.settle(epoch, often=ref, seldom=ref)
        tier.let_one_through()
        assert tier.state.flush(SECONDS)
    assert [tier.state.below(limit) for limit in (2, 3, 5, 6, 9)] == [0, 3, 3, 6, 6]
