"""A bank whose accounts lie in several pipelines: the total is the same in every snapshot and after every restore.

Members run in processes of their own, under load, and are killed at random moments. All tables are read by delta-rs.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.snapshot import Snapshots
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.banks import SHAPES, Processes, RealBank
from tests.support.proof import covered
from tests.support.topologies import TIMEOUT

pytestmark = pytest.mark.timeout(3600)  # of the long form

ROUNDS, SNAPSHOTS = (10, 4) if os.environ.get("FIRNLINE_PROOF") else (1, 1)  # of each shape
PATIENCE_SECONDS = 300.0


def take(bank: RealBank, processes: Processes, snapshots: Snapshots, rng: random.Random) -> str:
    """Take a snapshot under load; some member is killed meanwhile."""
    clock = SystemClock()
    for _ in range(rng.randint(1, 3)):
        bank.deposit()
    clock.sleep(rng.random() / 2)
    order = snapshots.order(TIMEOUT)
    clock.sleep(rng.random() / 4)
    processes.kill(rng.choice(bank.names))
    covered["kills"] += 1
    end = clock.monotonic() + PATIENCE_SECONDS
    while True:
        processes.start_missing()
        outcome, reason = snapshots.settle(order)
        if outcome is not Outcome.WAIT:
            break
        assert clock.monotonic() < end, f"still waiting for {reason}"
        clock.sleep(0.05)
    assert (outcome, reason) == (Outcome.COMMIT, "")
    return order.snapshot


@pytest.mark.parametrize("shape", SHAPES)
def test_the_total_is_the_same_in_every_snapshot_and_after_every_restore(tmp_path: Path, shape: str) -> None:
    rng = random.Random(f"{os.environ.get('FIRNLINE_SEED', 'bank')} {shape}")
    bank = RealBank(tmp_path, shape)
    bank.deposit()
    bank.run_to_end()
    snapshots = bank.open()
    for _ in range(ROUNDS):
        taken: dict[str, tuple[dict[str, int], int]] = {}
        with Processes(bank) as processes:
            for _ in range(SNAPSHOTS):
                snapshot = take(bank, processes, snapshots, rng)
                _, records = find_snapshot_epochs(snapshots, snapshot)
                for pipeline in snapshots.opened.values():
                    pipeline.deciding.load_committed()
                versions = {name: snapshots.opened[name].deciding.version_of(epoch) for name, epoch in records.items()}
                taken[snapshot] = versions, bank.audit(versions)
                covered["topology snapshots compared"] += 1
            bank.deposit()
        target, epochs = find_snapshot_epochs(snapshots, rng.choice(list(taken)))
        order = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds())
        result = perform_restore(snapshots, order, RandomIds().new(), SystemClock(), lambda _: None)
        assert result.decision is Decision.GO, result.reason
        assert bank.audit() == taken[target][1]
        covered["topology restores compared"] += 1
        for snapshot in taken:
            snapshots.drop(snapshot)
    bank.run_to_end()
    bank.audit()
    assert bank.balances() == bank.expected()
