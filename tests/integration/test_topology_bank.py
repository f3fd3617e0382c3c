"""Snapshots and restores of a fan-out and a chain under load: what came in is in a table or in a channel, once.

Rows are the tokens. At every snapshot, the rows of a reader and what its channel holds are the rows of the writer. Read
through delta-rs, not through Firnline.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from deltalake import DeltaTable

from firnline.clock import SystemClock
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.snapshot import Snapshots
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.delta.position import DeltaPosition
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.pipelines import run_to_end
from tests.support.proof import covered
from tests.support.samples import SampleInput, table_ids
from tests.support.topologies import TIMEOUT, member, open_snapshots, running, settle

ROUNDS, EACH = (30, 4) if os.environ.get("FIRNLINE_PROOF") else (2, 3)


def ids_at(table: Path, version: int) -> Counter[int]:
    return Counter(DeltaTable(table, version=version).to_pyarrow_table(columns=["id"]).column("id").to_pylist())


def check_cut(folder: Path, snapshots: Snapshots, snapshot: str) -> None:
    _, records = find_snapshot_epochs(snapshots, snapshot)
    for channel in snapshots.topology.channels:
        versions, checkpoints = {}, {}
        for name in (channel.writer, channel.reader):
            pipeline = open_pipeline(snapshots.topology.members[name])
            head = pipeline.load()
            versions[name] = pipeline.deciding.version_of(records[name])
            checkpoints[name] = next(e for e in pipeline.entries(head.entry) if e.epoch == records[name]).checkpoint
        at = DeltaPosition.from_json(checkpoints[channel.reader].positions[channel.source])
        assert at.reading is None
        assert not at.left
        writer = ids_at(folder / channel.writer, versions[channel.writer])
        reader = ids_at(folder / channel.reader, versions[channel.reader])
        assert not reader - writer, "the reader has rows that were written after the cut"
        waiting = writer - reader
        assert waiting == writer - ids_at(folder / channel.writer, at.version), "the channel holds what is missing"
        assert max(writer.values()) == 1


def test_the_total_is_the_same_in_every_snapshot_and_after_every_restore(tmp_path: Path) -> None:
    rng = random.Random(os.environ.get("FIRNLINE_SEED", "lake"))
    sample = SampleInput(tmp_path / "in")
    members = [
        member(tmp_path, "a", max_files=2),
        member(tmp_path, "b", "a"),
        member(tmp_path, "c", "a"),
        member(tmp_path, "d", "b"),
    ]
    sample.add("f0000.json", 2)
    for one in members:
        run_to_end(one)
    snapshots = open_snapshots(tmp_path, members)
    number = 0
    for _ in range(ROUNDS):
        taken = []
        with ExitStack() as stack:
            for one in members:
                stack.enter_context(running(one))
            for _ in range(EACH):
                for _ in range(rng.randint(1, 4)):
                    number += 1
                    sample.add(f"f{number:04d}.json", 2)
                SystemClock().sleep(rng.random() / 5)
                order = snapshots.order(TIMEOUT)
                assert settle(snapshots, order) == (Outcome.COMMIT, "")
                check_cut(tmp_path, snapshots, order.snapshot)
                taken.append(order.snapshot)
                covered["topology snapshots compared"] += 1
        target, epochs = find_snapshot_epochs(snapshots, rng.choice(taken))
        order_restore = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds())
        result = perform_restore(snapshots, order_restore, RandomIds().new(), SystemClock(), lambda _: None)
        assert result.decision is Decision.GO
        for one in members:
            run_to_end(one)
        for one in members:
            assert table_ids(one.sinks[0].location) == sample.ids, f"{one.name}: each row once"
        covered["topology restores compared"] += 1
        for snapshot in taken:
            snapshots.drop(snapshot)
