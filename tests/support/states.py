"""Checkpoints of sharded state for tests, with small files that have the right sizes and checksums."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime

from isal import isal_zlib

from firnline.errors import CheckpointError
from firnline.names import METADATA, shard_folder
from firnline.state.manifest import (
    CheckpointPlan,
    CompleteCheckpoint,
    OperatorInfo,
    SegmentRef,
    ShardContent,
    ShardState,
    TimerRef,
    Worker,
    assemble,
)
from firnline.state.snapshot import Status, begin, commit, finish_shard, list_folders, load, verify_files
from firnline.storage import Storage

KEY_GROUPS = 8
OPERATOR = "totals"


def sample_plan(
    epoch: int, attempt: str = "a1", *, shards: int = 2, operators: Sequence[str] = (OPERATOR,)
) -> CheckpointPlan:
    """A plan over equal ranges of key groups."""
    bounds = [KEY_GROUPS * n // shards for n in range(shards + 1)]
    return CheckpointPlan(
        pipeline="orders",
        epoch=epoch,
        attempt=attempt,
        key_groups=KEY_GROUPS,
        shards=tuple(itertools.pairwise(bounds)),
        operators={name: OperatorInfo("aggregate", "k" * 64, "s" * 64) for name in operators},
        positions={"files": {"last_committed_file": f"in/{epoch:06d}.json", "files": {}}},
        watermarks={"totals": epoch * 1_000_000},
        workers=(Worker("worker-1", 100),),
        created_at="2026-01-01T00:00:00+00:00",
    )


def write_segment(storage: Storage, checkpoint: str, shard: int, name: str, data: bytes, *, epoch: int) -> SegmentRef:
    """Write one file of state, as a task does; its bytes need not be Arrow's."""
    path = f"{shard_folder(checkpoint, shard)}/{name}.arrow"
    stream = storage.create(path)
    stream.write(data)
    stream.close()
    return SegmentRef(path, len(data), isal_zlib.crc32(data), len(data) // 8, 0, KEY_GROUPS - 1, epoch)


def finish_all(
    storage: Storage, plan: CheckpointPlan, states: Mapping[int, Mapping[str, ShardState]]
) -> tuple[list[ShardContent], dict[int, str]]:
    """Finish every shard; returns what stands, and the checksums."""
    contents: list[ShardContent] = []
    sums: dict[int, str] = {}
    for shard in range(len(plan.shards)):
        report = {"rows": shard}
        content, sums[shard] = finish_shard(storage, plan.checkpoint_id, shard, states[shard], report)
        contents.append(content)
    return contents, sums


def make_checkpoint(
    storage: Storage, plan: CheckpointPlan, states: Mapping[int, Mapping[str, ShardState]] | None = None
) -> CompleteCheckpoint:
    """A complete checkpoint; without `states` every shard gets one new run and a timer file."""
    begin(storage, plan)
    if states is None:
        states = new_states(storage, plan)
    contents, sums = finish_all(storage, plan, states)
    return assemble(plan, commit(storage, plan.checkpoint_id, sums), contents)


def new_states(storage: Storage, plan: CheckpointPlan) -> dict[int, dict[str, ShardState]]:
    """Every shard and operator with one new run and a timer file."""
    states: dict[int, dict[str, ShardState]] = {}
    for shard in range(len(plan.shards)):
        for operator in plan.operators:
            name = f"{operator}.t{shard}"
            data = f"{plan.checkpoint_id} {operator} {shard}".encode() * 3
            run = write_segment(storage, plan.checkpoint_id, shard, name, data, epoch=plan.epoch)
            timer = write_segment(storage, plan.checkpoint_id, shard, f"{name}.timers", data[:20], epoch=plan.epoch)
            states.setdefault(shard, {})[operator] = ShardState((run,), (TimerRef(timer, plan.epoch),))
    return states


@dataclass
class StateHistory:
    """A pipeline's state as it goes on: each epoch adds a run to every shard, merges now and then, and may be
    checkpointed, aborted, left half done, or rolled back.
    """

    storage: Storage
    generator: random.Random
    shards: int = 2
    epoch: int = 0
    live: dict[int, ShardState] = field(default_factory=dict)
    complete: dict[str, CompleteCheckpoint] = field(default_factory=dict)
    base: str = ""  # the newest checkpoint that the live state is built on

    def state(self, shard: int) -> ShardState:
        return self.live.get(shard, ShardState())

    def fold(self, plan: CheckpointPlan, *, merge: bool) -> dict[int, ShardState]:
        """Write what one epoch changes; returns the state of every shard after it."""
        after = {}
        for shard in range(self.shards):
            data = self.generator.randbytes(self.generator.randint(1, 200))
            run = write_segment(self.storage, plan.checkpoint_id, shard, f"{OPERATOR}.t1", data, epoch=plan.epoch)
            runs = (*self.state(shard).segments, run)
            if merge:
                merged = self.generator.randbytes(sum(r.size_bytes for r in runs))
                name = f"{OPERATOR}.t1.merged"
                runs = (write_segment(self.storage, plan.checkpoint_id, shard, name, merged, epoch=plan.epoch),)
            after[shard] = replace(self.state(shard), segments=runs)
        return after

    def next_epoch(self, kind: str, *, merge: bool = False) -> str:
        """One more epoch; `kind`: checkpoint, plain (no checkpoint of state), partial, or lost (no metadata at all).

        Returns the id of its folder.
        """
        self.epoch += 1
        plan = sample_plan(self.epoch, f"a{self.generator.randrange(10**6)}", shards=self.shards)
        if kind in ("checkpoint", "partial"):
            begin(self.storage, plan)
        after = self.fold(plan, merge=merge)
        if kind in ("checkpoint", "plain"):
            self.live = after
        states = {shard: {OPERATOR: state} for shard, state in after.items()}
        if kind == "checkpoint":
            self.base = plan.checkpoint_id
            self.complete[self.base] = make_checkpoint(self.storage, plan, states)
        elif kind == "partial":
            finish_shard(self.storage, plan.checkpoint_id, 0, states[0])
        return plan.checkpoint_id

    def go_back(self, checkpoint: str) -> None:
        """Go on from the state of an older checkpoint; epoch numbers only grow."""
        self.base = checkpoint
        contents = self.complete[checkpoint].contents
        self.live = {content.shard: content.operators[OPERATOR] for content in contents}


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One checkpoint, for people. Its size is that of the files in its own folder."""

    checkpoint_id: str
    epoch: int
    status: Status
    shards_done: int  # shards that wrote their metadata
    size_bytes: int
    created_at: datetime  # when its oldest file was written
    modified_at: datetime  # and its newest


def list_checkpoints(storage: Storage, named: Set[str] = frozenset()) -> list[CheckpointInfo]:
    """Every checkpoint, oldest first. `named` are the ids that sinks name."""
    found = []
    for folder in list_folders(storage):
        status = folder.find_status(named)
        if status is None:
            continue
        times = [stat.modified_at for stat in folder.files.values()]
        found.append(
            CheckpointInfo(
                checkpoint_id=folder.checkpoint_id,
                epoch=folder.epoch,
                status=status,
                shards_done=sum(key.endswith(f"/{METADATA}") and key.count("/") == 2 for key in folder.files),
                size_bytes=sum(stat.size_bytes for stat in folder.files.values()),
                created_at=min(times),
                modified_at=max(times),
            )
        )
    return found


def find_newest_complete(
    storage: Storage, *, up_to_epoch: int | None = None, named: Set[str] = frozenset()
) -> CompleteCheckpoint | None:
    """The newest complete checkpoint, up to an epoch, that can be read and has all its files; None without one."""
    for info in reversed(list_checkpoints(storage, named)):
        if info.status != "COMPLETED" or (up_to_epoch is not None and info.epoch > up_to_epoch):
            continue
        try:
            found = load(storage, info.checkpoint_id, named=info.checkpoint_id in named)
            verify_files(storage, found, deep=False)
        except CheckpointError:  # an older one is the next best
            continue
        return found
    return None


def check_complete(storage: Storage) -> None:
    """Check that every checkpoint which claims to be complete has all its files, intact."""
    for info in list_checkpoints(storage):
        if info.status == "COMPLETED":
            verify_files(storage, load(storage, info.checkpoint_id), deep=True)
