"""Whoever writes, sweeps or copies checkpoints of state is killed at every fault point: what stands is whole.

These tests cover the fault points `state.begin`, `.shard`, `.commit`, `.abort`, `.sweep` and `.replicate`.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from firnline.errors import StateConflictError, StateIncompleteError
from firnline.state.manifest import ShardContent
from firnline.state.remote import Replica
from firnline.state.snapshot import abort, begin, commit, finish_shard, load, verify_files
from firnline.state.sweep import Marks, sweep
from firnline.storage import LocalStorage, Storage
from tests.support.kills import PROOF, kill_at_every_point, perform
from tests.support.processes import KILLED
from tests.support.samples import files_below
from tests.support.states import (
    StateHistory,
    check_complete,
    finish_all,
    list_checkpoints,
    make_checkpoint,
    new_states,
    sample_plan,
)

pytestmark = pytest.mark.crash

PLAN = sample_plan(9, shards=2)
ID = PLAN.checkpoint_id
FUTURE = datetime(2040, 1, 1, tzinfo=UTC)
MOST_KILLS = None if PROOF else 2  # per point; spread over its calls
# What an operation does, it does through the storage below it.
POINTS = {
    "begin": ("state.begin", "storage.put"),
    "shard": ("state.shard", "storage.put"),
    "commit": ("state.commit", "storage.put"),
    "abort": ("state.abort", "storage.put"),
    "sweep": ("state.sweep", "storage.delete"),
    "replicate": ("state.replicate", "storage.put"),
    "restore": ("state.replicate", "storage.put", "storage.delete"),
}


def local(folder: Path) -> LocalStorage:
    return LocalStorage(str(folder / "local"))


def remote(folder: Path) -> LocalStorage:
    return LocalStorage(str(folder / "remote"))


def marks(folder: Path) -> Marks:
    """Those that were written down when the world was made, before anything was swept."""
    return Marks(dict.fromkeys((folder / "marks").read_text().split()), 1000)


def prepare(folder: Path, operation: str) -> None:
    folder.mkdir(exist_ok=True)
    storage = local(folder)
    match operation:
        case "shard" | "commit" | "abort":
            begin(storage, PLAN)
            if operation == "commit":
                finish_all(storage, PLAN, new_states(storage, PLAN))
        case "sweep":
            history = StateHistory(storage, random.Random(7))
            for number in range(5):
                history.next_epoch("plain")
                history.next_epoch("checkpoint", merge=number == 3)
            abort(storage, history.next_epoch("partial"), "a shard failed")
            history.next_epoch("checkpoint")
            ids = [*history.complete]  # one is a savepoint, the last one is named by the sinks
            (folder / "marks").write_text(f"{ids[2]} {ids[-1]}")
        case "replicate" | "restore":
            history = StateHistory(storage, random.Random(7))
            ids = [history.next_epoch("checkpoint") for _ in range(2)]
            Replica(storage, remote(folder)).replicate(ids[0])
            make_checkpoint(storage, PLAN)
            if operation == "restore":
                Replica(storage, remote(folder)).replicate(ID)
                lose(storage)


def lose(storage: LocalStorage) -> None:
    """A part of the local home is gone, and a part is damaged."""
    root = Path(storage.root)
    for path in sorted((root / ID).rglob("*.arrow"))[:2]:
        path.write_bytes(bytes(path.stat().st_size))
    shutil.rmtree(root / ID / "shard_1")
    (root / ID / "COMMITTED").unlink()


def operate(operation: str, folder: Path) -> None:
    storage = local(folder)
    match operation:
        case "begin":
            begin(storage, PLAN)
        case "shard":
            finish_shard(storage, ID, 1, new_states(storage, PLAN)[1], {"try": os.getpid()})
        case "commit":
            commit(storage, ID, sums(storage))
        case "abort":
            abort(storage, ID, "timed out")
        case "sweep":
            sweep(storage, marks(folder), FUTURE, 0, 1, 0)
        case "replicate":
            Replica(storage, remote(folder)).replicate(ID)
        case "restore":
            Replica(storage, remote(folder)).restore_missing(ID, load(remote(folder), ID).digest)


def sums(storage: Storage) -> dict[int, str]:
    return {shard: finish_shard(storage, ID, shard, {})[1] for shard in range(2)}


def check_begin(folder: Path) -> None:
    assert begin(local(folder), PLAN) == ID
    commit_now(local(folder))


def check_shard(folder: Path) -> None:
    """The next try of the task writes other files, and gets what stands, whosever it is."""
    storage = local(folder)
    path = Path(storage.root) / ID / "shard_1" / "metadata.json"
    before = ShardContent.from_bytes(path.read_bytes(), "", ID, 1) if path.exists() else None
    states = new_states(storage, sample_plan(9, "b2"))
    content, _ = finish_shard(storage, ID, 1, states[1], {"try": "again"})
    assert content == (before or content)
    assert (content.report == {"try": "again"}) == (before is None)
    finish_shard(storage, ID, 0, states[0])
    commit(storage, ID, sums(storage))
    verify_files(storage, load(storage, ID), deep=True)


def commit_now(storage: Storage) -> None:
    finish_all(storage, PLAN, new_states(storage, PLAN))
    commit(storage, ID, sums(storage))
    verify_files(storage, load(storage, ID), deep=True)


def check_commit(folder: Path) -> None:
    storage = local(folder)
    stands = (Path(storage.root) / ID / "COMMITTED").exists()
    if stands:
        with pytest.raises(StateConflictError):
            abort(storage, ID, "too late")
    else:
        with pytest.raises(StateIncompleteError):
            load(storage, ID)
    digest = commit(storage, ID, sums(storage))
    verify_files(storage, load(storage, ID, digest), deep=True)


def check_abort(folder: Path) -> None:
    storage = local(folder)
    stands = (Path(storage.root) / ID / "ABORTED").exists()
    abort(storage, ID, "again")
    with pytest.raises(StateIncompleteError, match="timed out" if stands else "again"):
        load(storage, ID)
    finish_all(storage, PLAN, new_states(storage, PLAN))
    with pytest.raises(StateConflictError):
        commit(storage, ID, sums(storage))


def check_sweep(folder: Path) -> None:
    """Against a sweep of the same home that nobody killed."""
    storage = local(folder)
    check_complete(storage)
    for checkpoint in marks(folder).ids:
        verify_files(storage, load(storage, checkpoint), deep=True)
    operate("sweep", folder)
    check_complete(storage)
    assert files_below(storage.root) == files_below(local(folder.parent / "unkilled").root)


def check_replicate(folder: Path) -> None:
    storage, copy = local(folder), remote(folder)
    check_complete(copy)
    Replica(storage, copy).replicate(ID)
    assert load(copy, ID) == load(storage, ID)
    check_complete(copy)
    assert not {name for name in files_below(copy.root) if not name.endswith(".tmp")} - files_below(storage.root).keys()


def check_restore(folder: Path) -> None:
    storage, copy = local(folder), remote(folder)
    digest = load(copy, ID).digest
    Replica(storage, copy).restore_missing(ID, digest)
    assert load(storage, ID, digest) == load(copy, ID, digest)
    check_complete(storage)


CHECKS: dict[str, Callable[[Path], None]] = {
    "begin": check_begin,
    "shard": check_shard,
    "commit": check_commit,
    "abort": check_abort,
    "sweep": check_sweep,
    "replicate": check_replicate,
    "restore": check_restore,
}


@pytest.mark.parametrize("operation", POINTS)
def test_killed_at_every_point(operation: str, tmp_path: Path) -> None:
    made, folder = tmp_path / "made", tmp_path / "killed"
    prepare(made, operation)

    def start_over() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
        return folder

    shutil.copytree(made, tmp_path / "unkilled")
    operate(operation, tmp_path / "unkilled")  # what a killed sweep is compared with
    points = {f"{call}.{side}" for call in POINTS[operation] for side in ("before", "after")}
    work, check = partial(operate, operation), CHECKS[operation]
    reached = kill_at_every_point(start_over, work, lambda it, _: check(it), points=points, most=MOST_KILLS)
    assert points <= reached.keys()


def test_a_sweep_that_is_killed_again_and_again_comes_to_an_end(tmp_path: Path) -> None:
    prepare(tmp_path, "sweep")
    storage = local(tmp_path)
    for _ in range(100):
        code, _ = perform("state.sweep.after:6:kill", operate, "sweep", tmp_path)
        check_complete(storage)
        if code == 0:
            break
        assert code == KILLED
    else:
        raise AssertionError("never done")
    assert [info.checkpoint_id for info in list_checkpoints(storage)] == sorted(marks(tmp_path).ids)
