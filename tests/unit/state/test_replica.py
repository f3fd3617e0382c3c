"""The remote copy of state: complete or not there, taken up again after any failure, and the way back."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from firnline.errors import CheckpointError, StateConflictError, StateDamagedError, StateIncompleteError
from firnline.names import COMMITTED
from firnline.state import remote as replicas
from firnline.state.manifest import CompleteCheckpoint
from firnline.state.remote import Replica
from firnline.state.snapshot import abort, begin, load, verify_files
from firnline.state.sweep import Marks
from firnline.storage import Storage, open_storage
from firnline.testing.faults import Faults, FaultyStorage
from tests.support.s3 import new_bucket, s3_options
from tests.support.samples import files_below
from tests.support.states import (
    StateHistory,
    check_complete,
    find_newest_complete,
    list_checkpoints,
    make_checkpoint,
    sample_plan,
)

NOW = datetime(2040, 1, 1, tzinfo=UTC)


@pytest.fixture
def local(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "local"))


@pytest.fixture
def remote(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "remote"))


@pytest.fixture(params=["in one piece", "in pieces"])
def replica(
    local: Storage, remote: Storage, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Replica:
    if request.param == "in pieces":
        monkeypatch.setattr(replicas, "ATOMIC_BYTES", 0)
        monkeypatch.setattr(replicas, "_PIECE_BYTES", 7)
    return Replica(local, remote)


def needed(storage: Storage, *complete: CompleteCheckpoint) -> dict[str, bytes]:
    """The files of some checkpoints, with their content."""
    names = {path for c in complete for path in c.files()}
    ids = {c.checkpoint_id for c in complete}
    return {
        k: v
        for k, v in files_below(storage.root).items()
        if k in names or (k.split("/")[0] in ids and not k.endswith(".arrow"))
    }


def faulty(storage: Storage, faults: Faults) -> Storage:
    made: Storage = type("Counted", (FaultyStorage,), {"faults": faults})(storage.root)
    return made


# -- there -----------------------------------------------------------------------------------------------


def test_a_copy_is_the_same_and_complete(replica: Replica) -> None:
    made = make_checkpoint(replica.local, sample_plan(1))
    assert replica.replicate(made.checkpoint_id) == sum(len(v) for v in files_below(replica.local.root).values())
    assert files_below(replica.remote.root) == files_below(replica.local.root)
    assert load(replica.remote, made.checkpoint_id, made.digest) == made
    assert replica.replicate(made.checkpoint_id) == 0
    assert Replica(replica.local, replica.remote).replicate(made.checkpoint_id, made.digest) == 0


def test_only_what_is_new_is_copied(replica: Replica) -> None:
    history = StateHistory(replica.local, random.Random(1))
    first, second = (history.complete[history.next_epoch("checkpoint")] for _ in range(2))
    replica.replicate(first.checkpoint_id)
    before = files_below(replica.remote.root)
    new = needed(replica.local, second).keys() - before.keys()
    assert replica.replicate(second.checkpoint_id) == sum(len(files_below(replica.local.root)[key]) for key in new)
    assert files_below(replica.remote.root).keys() - before.keys() == new
    assert not second.files().keys() <= new
    assert find_newest_complete(replica.remote) == second


def test_what_nobody_refers_to_is_not_copied(replica: Replica) -> None:
    history = StateHistory(replica.local, random.Random(1))
    history.next_epoch("lost")
    made = history.complete[history.next_epoch("checkpoint", merge=True)]
    replica.replicate(made.checkpoint_id)
    assert files_below(replica.remote.root) == needed(replica.local, made)


def test_committed_comes_last(local: Storage, remote: Storage) -> None:
    made = make_checkpoint(local, sample_plan(1))
    faults = Faults()
    Replica(local, faulty(remote, faults)).replicate(made.checkpoint_id)
    order = [call.split(" ", 1)[1] for call in faults.calls if call.startswith(("put ", "put_new "))]
    name = made.checkpoint_id
    assert order == [
        *sorted(made.files()),
        f"{name}/shard_0/metadata.json",
        f"{name}/shard_1/metadata.json",
        f"{name}/metadata.json",
        f"{name}/COMMITTED",
    ]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("side", ["local", "remote"])
def test_broken_off_at_any_call_it_is_taken_up_again(side: str, after: bool, replica: Replica, tmp_path: Path) -> None:
    local, remote = replica.local, replica.remote
    history = StateHistory(local, random.Random(1))
    first, second = (history.complete[history.next_epoch("checkpoint")] for _ in range(2))
    replica.replicate(first.checkpoint_id)
    shutil.copytree(remote.root, tmp_path / "kept")
    counted = Faults()
    attempt(local, remote, side, counted, second.checkpoint_id)
    for nth in range(1, len(counted.calls) + 1):
        shutil.rmtree(remote.root)
        shutil.copytree(tmp_path / "kept", remote.root)
        where = f"call {nth}, {counted.calls[nth - 1]}"
        faults = Faults(nth=nth, for_ever=True, after=after)
        with suppress(OSError):
            attempt(local, remote, side, faults, second.checkpoint_id)
        check_complete(remote)
        Replica(local, remote).replicate(second.checkpoint_id)
        assert files_below(remote.root) == needed(local, first, second), where


def attempt(local: Storage, remote: Storage, side: str, faults: Faults, checkpoint: str) -> None:
    if side == "local":
        local = faulty(local, faults)
    else:
        remote = faulty(remote, faults)
    Replica(local, remote).replicate(checkpoint)


def test_one_replica_goes_on_after_its_own_failure(local: Storage, remote: Storage) -> None:
    made = make_checkpoint(local, sample_plan(1))
    faults = Faults(nth=9)
    replica = Replica(local, faulty(remote, faults))
    with pytest.raises(OSError, match="injected"):
        replica.replicate(made.checkpoint_id)
    replica.replicate(made.checkpoint_id)
    assert files_below(remote.root) == files_below(local.root)


@pytest.mark.parametrize("rest", [b"", b"short", None])
def test_the_rest_of_a_broken_copy_is_replaced(rest: bytes | None, replica: Replica) -> None:
    made = make_checkpoint(replica.local, sample_plan(1))
    for path, ref in made.files().items():
        target = Path(replica.remote.root) / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bytes(ref.size_bytes) if rest is None else rest)
    replica.replicate(made.checkpoint_id)
    assert files_below(replica.remote.root) == files_below(replica.local.root)


def test_a_file_that_vanished_from_the_remote_home_is_copied_again(replica: Replica) -> None:
    made = make_checkpoint(replica.local, sample_plan(1))
    replica.replicate(made.checkpoint_id)
    (Path(replica.remote.root) / next(iter(made.files()))).unlink()
    Replica(replica.local, replica.remote).replicate(made.checkpoint_id)
    assert files_below(replica.remote.root) == files_below(replica.local.root)


def test_a_damaged_file_never_becomes_part_of_a_complete_copy(replica: Replica) -> None:
    made = make_checkpoint(replica.local, sample_plan(1))
    for damage in ("rot", "cut", "gone"):
        path = Path(replica.local.root) / max(made.files())
        data = path.read_bytes()
        path.write_bytes(data[::-1] if damage == "rot" else data[:-1])
        if damage == "gone":
            path.unlink()
        with pytest.raises(StateDamagedError):
            replica.replicate(made.checkpoint_id)
        assert max(made.files()) not in files_below(replica.remote.root)
        assert find_newest_complete(replica.remote) is None
        path.write_bytes(data)
    replica.replicate(made.checkpoint_id)
    check_complete(replica.remote)


def test_what_is_not_complete_is_not_copied(replica: Replica) -> None:
    plan = sample_plan(1)
    begin(replica.local, plan)
    with pytest.raises(StateIncompleteError):
        replica.replicate(plan.checkpoint_id)
    made = make_checkpoint(replica.local, sample_plan(2))
    abort(replica.local, made.checkpoint_id, "dropped", unnamed=True)
    with pytest.raises(StateIncompleteError):
        replica.replicate(made.checkpoint_id)
    assert files_below(replica.remote.root) == {}
    replica.replicate(made.checkpoint_id, made.digest)  # a sink names it all the same
    assert load(replica.remote, made.checkpoint_id) == made


def test_another_checkpoint_of_the_same_id_is_never_mixed_with_this_one(replica: Replica) -> None:
    theirs = make_checkpoint(replica.remote, sample_plan(1, shards=1))
    ours = make_checkpoint(replica.local, sample_plan(1, shards=2))
    with pytest.raises(StateConflictError):
        replica.replicate(ours.checkpoint_id)
    with pytest.raises(CheckpointError):
        replica.restore_missing(theirs.checkpoint_id, "0" * 64)
    assert load(replica.remote, theirs.checkpoint_id).digest == theirs.digest
    assert load(replica.local, ours.checkpoint_id) == ours


# -- and back --------------------------------------------------------------------------------------------


def test_a_lost_local_home_comes_back(replica: Replica) -> None:
    history = StateHistory(replica.local, random.Random(1))
    ids = [history.next_epoch("checkpoint") for _ in range(3)]
    made = history.complete[ids[-1]]
    for name in ids:
        replica.replicate(name)
    shutil.rmtree(replica.local.root)
    size = sum(len(data) for data in needed(replica.remote, made).values())
    assert replica.restore_missing(made.checkpoint_id, made.digest) == size
    assert load(replica.local, made.checkpoint_id, made.digest) == made
    verify_files(replica.local, made, deep=True)
    assert replica.restore_missing(made.checkpoint_id, made.digest) == 0


def test_only_what_is_missing_or_damaged_comes_back(replica: Replica) -> None:
    made = make_checkpoint(replica.local, sample_plan(1))
    replica.replicate(made.checkpoint_id)
    before = files_below(replica.local.root)
    gone, rotten, cut = sorted(made.files())[:3]
    root = Path(replica.local.root)
    (root / gone).unlink()
    (root / rotten).write_bytes(bytes(len(before[rotten])))
    (root / cut).write_bytes(b"")
    (root / made.checkpoint_id / "shard_0" / "metadata.json").write_bytes(b"rot")
    (root / made.checkpoint_id / COMMITTED).unlink()
    with pytest.raises(StateConflictError):  # nobody says that the remote one is meant
        replica.restore_missing(made.checkpoint_id)
    replica.restore_missing(made.checkpoint_id, made.digest)
    assert files_below(replica.local.root) == before


def test_what_the_remote_home_lacks_cannot_come_back(replica: Replica) -> None:
    with pytest.raises(StateIncompleteError):
        replica.restore_missing(sample_plan(1).checkpoint_id)


# -- sweeping --------------------------------------------------------------------------------------------


def test_the_remote_home_is_swept_though_it_lags_and_the_next_copy_is_whole(replica: Replica) -> None:
    history = StateHistory(replica.local, random.Random(1))
    made = [history.complete[history.next_epoch("checkpoint")] for _ in range(4)]
    for complete in made[:3]:
        replica.replicate(complete.checkpoint_id)
    marks = Marks({made[0].checkpoint_id: made[0].digest, made[3].checkpoint_id: made[3].digest}, 1000)
    told = replica.sweep_remote(marks, NOW, 0, 0, 0)
    assert told.kept == (made[0].checkpoint_id,)
    assert files_below(replica.remote.root) == needed(replica.local, made[0])
    replica.replicate(made[3].checkpoint_id)
    check_complete(replica.remote)
    assert files_below(replica.remote.root) == needed(replica.local, made[0], made[3])


@pytest.mark.s3
def test_a_bucket_keeps_the_same_promises(local: Storage, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = open_storage(f"s3://{new_bucket(s3)}/deep/er", s3_options(s3))
    replica = Replica(local, remote)
    history = StateHistory(local, random.Random(1))
    made = [history.complete[history.next_epoch("checkpoint", merge=n == 2)] for n in range(3)]
    replica.replicate(made[0].checkpoint_id)
    monkeypatch.setattr(replicas, "ATOMIC_BYTES", 0)
    for complete in made[1:]:
        replica.replicate(complete.checkpoint_id)
    assert find_newest_complete(remote) == made[2]
    with pytest.raises(StateConflictError):
        abort(remote, made[2].checkpoint_id, "too late")
    told = replica.sweep_remote(Marks({made[2].checkpoint_id: made[2].digest}, 1000), NOW, 0, 0, 0)
    assert told.checkpoints == tuple(c.checkpoint_id for c in made[:2])
    assert [info.checkpoint_id for info in list_checkpoints(remote)] == [made[2].checkpoint_id]
    shutil.rmtree(local.root)
    replica.restore_missing(made[2].checkpoint_id, made[2].digest)
    verify_files(local, load(local, made[2].checkpoint_id, made[2].digest), deep=True)
