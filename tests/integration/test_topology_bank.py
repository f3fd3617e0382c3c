"""A bank whose accounts lie in several pipelines: the total is the same in every snapshot and after every restore.

Members run in processes of their own, under load, and are killed at random moments. All tables are read by delta-rs,
all topics by a plain consumer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from firnline.clock import SystemClock
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.history.topology.snapshot import Snapshots
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.banks import SHAPES, Processes, RealBank, find_cut
from tests.support.kafka import KafkaServer
from tests.support.mixed_banks import MixedBank
from tests.support.proof import covered
from tests.support.topologies import TIMEOUT

LONG = bool(os.environ.get("FIRNLINE_PROOF"))
pytestmark = pytest.mark.timeout(4 * 3600 if LONG else 900)  # the long form beside other tests; alone it takes minutes

ROUNDS, SNAPSHOTS = (10, 4) if LONG else (1, 1)  # of each bank; each round ends with a restore
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


def check_bank(bank: RealBank, rng: random.Random, where: str = "", leave: Sequence[str] = ()) -> None:
    """Take snapshots under load and go back to one of them, again and again; compare the total each time."""
    bank.deposit()
    bank.run_each()
    snapshots = bank.open()
    for _ in range(ROUNDS):
        taken: dict[str, int] = {}
        with Processes(bank) as processes:
            for _ in range(SNAPSHOTS):
                snapshot = take(bank, processes, snapshots, rng)
                taken[snapshot] = bank.audit(find_cut(snapshots, snapshot))
                covered[f"topology snapshots{where} compared"] += 1
            bank.deposit()
        target, epochs = find_snapshot_epochs(snapshots, rng.choice(list(taken)))
        order = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds(), leave=leave)
        result = perform_restore(snapshots, order, RandomIds().new(), SystemClock(), lambda _: None)
        assert result.decision is Decision.GO, result.reason
        assert bank.audit() == taken[target]
        covered[f"topology restores{where} compared"] += 1
        for snapshot in taken:
            snapshots.drop(snapshot)
    bank.run_to_end()
    bank.audit()
    assert bank.balances() == bank.expected()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_total_is_the_same_in_every_snapshot_and_after_every_restore(tmp_path: Path, shape: str) -> None:
    rng = random.Random(f"{os.environ.get('FIRNLINE_SEED', 'bank')} {shape}")
    check_bank(RealBank(tmp_path, shape), rng)


@pytest.mark.kafka
@pytest.mark.parametrize("number", range(3 if LONG else 1))
def test_the_total_is_the_same_over_topics_and_a_table(tmp_path: Path, kafka: KafkaServer, number: int) -> None:
    rng = random.Random(f"{os.environ.get('FIRNLINE_SEED', 'bank')} mixed {number}")
    bank = MixedBank.make(tmp_path, kafka)
    check_bank(bank, rng, " over topics", bank.sinks)
