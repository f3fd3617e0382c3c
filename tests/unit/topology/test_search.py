"""Every interleaving of small topologies under the real rules, and planted bugs that the search must catch.

Two invariants hold for every completed snapshot: nothing that a member received before the cut was sent after it, and
balances plus channel contents are the total. It can be restored as long as it is kept. After a restore, balances plus
channel contents are the total again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.sources.delta import chain
from firnline.topology.decide import OrderState, OrderStep
from tests.support.bank import RUN, Bank, Broken, Epoch, Graph, Member, Rules, explore
from tests.support.proof import covered

LONG = bool(os.environ.get("FIRNLINE_PROOF"))
LIMIT = 1_000_000 if LONG else 6_000  # the long form searches all graphs whole, but for those of TOO_LARGE
TOO_LARGE = {"diamond": 500_000}  # "an epoch in one step" is searched whole
CHAIN = ((0, 1),)
LONGER = ((0, 1), (1, 2))
TRIANGLE = ((0, 1), (1, 2), (0, 2))
DIAMOND = ((0, 1), (0, 2), (1, 3), (2, 3))
CYCLE = ((0, 1), (1, 0))
STAGED = frozenset({0})

SMALL = (  # searched whole in every run
    Graph("chain", 2, CHAIN, epochs=2),
    Graph("chain of three", 3, LONGER, epochs=1),
    Graph("fan-out", 3, ((0, 1), (0, 2)), epochs=1, crashes=0),
    Graph("fan-in", 3, ((0, 2), (1, 2)), epochs=1, crashes=0),
    Graph("staged", 2, CHAIN, staged=STAGED, epochs=3),
    Graph("staged in the middle", 3, LONGER, staged=frozenset({1}), epochs=1, crashes=0),
    Graph("two epochs in flight", 2, CHAIN, epochs=2, in_flight=2),
    Graph("two completers", 2, CHAIN, epochs=1, expires=True),
    Graph("restore", 2, CHAIN, epochs=2, restores=1, crashes=0),
    Graph("restore, reader first", 2, ((1, 0),), epochs=2, restores=1, crashes=0),
    Graph("killed restore", 2, CHAIN, epochs=1, restores=1),
)
LARGE = (  # whole in the long form; else so many states of each, breadth first
    Graph("two tables", 2, ((0, 1), (0, 1)), epochs=2, crashes=0),
    Graph("diamond", 4, DIAMOND, epochs=1, crashes=0),
    Graph("diamond, an epoch in one step", 4, DIAMOND, epochs=1, crashes=0, in_one_step=True),
    Graph("triangle", 3, TRIANGLE, epochs=1),
    Graph("cycle", 2, CYCLE, epochs=2),
    Graph("cycle of three", 3, ((0, 1), (1, 2), (2, 0)), epochs=1),
    Graph("two snapshots", 2, CHAIN, epochs=1, snapshots=2),
    Graph("two snapshots of a cycle", 2, CYCLE, epochs=1, snapshots=2, crashes=0),
    Graph("rollback", 2, CHAIN, epochs=1, rollbacks=1),
    Graph("sweeps", 2, CHAIN, epochs=2, sweeps=True, crashes=0),
    Graph("restore of three", 3, LONGER, epochs=1, restores=1, crashes=0),
    Graph("restore of a cycle", 2, CYCLE, epochs=1, restores=1, crashes=0),
    Graph("restore of a staged table", 2, CHAIN, staged=STAGED, epochs=2, restores=1, crashes=0),
    Graph("restore with sweeps", 2, CHAIN, epochs=1, restores=1, sweeps=True),
    Graph("restore after a rollback", 2, CHAIN, epochs=1, restores=1, rollbacks=1, crashes=0),
    Graph("two restores", 2, CHAIN, epochs=1, restores=2),
)


def count(states: int, *, complete: bool) -> None:
    covered["states of topologies searched"] += states
    covered["topologies searched whole" if complete else "topologies searched up to the limit"] += 1


@pytest.mark.parametrize("graph", SMALL, ids=lambda graph: graph.name)
def test_the_rules_hold(graph: Graph) -> None:
    states, complete = explore(Bank(graph), 500_000)
    print(f"{graph.name}: {states:,} states, all")
    assert complete
    count(states, complete=complete)


@pytest.mark.parametrize("graph", LARGE, ids=lambda graph: graph.name)
def test_the_rules_hold_in_large_graphs(graph: Graph) -> None:
    states, complete = explore(Bank(graph), min(LIMIT, TOO_LARGE.get(graph.name, LIMIT)))
    assert complete or not LONG or graph.name in TOO_LARGE
    print(f"{graph.name}: {states:,} states{', all' if complete else ''}")
    count(states, complete=complete)


class EpochBefore(Rules):
    """Records the newest committed epoch, not the one that carries the marker; nobody compares the channels."""

    checks_channels = False

    def record_epoch(self, epoch: int, committed: int) -> int:
        return committed


class OneSourceCut(Rules):
    """Ends only the slice of the first source at a marker; nobody compares the channels."""

    checks_channels = False

    def is_barrier(self, snapshot: int, recorded: Iterable[int], channel_index: int, *, closed: bool) -> bool:
        return channel_index == 0 and super().is_barrier(snapshot, recorded, channel_index, closed=closed)


class MarkerInside(Rules):
    """Commits units behind a marker in the same Delta commit; nobody compares the channels."""

    checks_channels = False

    def units(self, has_marker: Sequence[bool]) -> int:
        return len(has_marker)


class NoHold(Rules):
    """Claims the members of a restore, and lets other runs claim them again."""

    def find_blocking(self, holds: Iterable[int], mine: int = RUN) -> str | None:
        return None


class UndoneRead(Rules):
    """Reads versions in the order of their numbers, also those that were undone."""

    def path(self, epochs: Sequence[Epoch], reader: int, newest: int) -> chain.Path:
        return chain.Path([], list(range(reader + 1, newest + 1)))


class RollbackIgnored(Rules):
    """Completes a snapshot although a member went back since the order."""

    def find_record(self, member: Member, ordered: int, recorded: int | None) -> tuple[int | None, str]:
        return recorded, ""


class NotExclusive(Rules):
    """Replaces the outcome of another completer."""

    exclusive = False


class FloorRises(Rules):
    """Lets the floor pass the record of a snapshot."""

    def floor(self, oldest: int, records: Iterable[int]) -> int:
        return oldest


class PinLast(Rules):
    """Pins the tables after the members were asked."""

    def next_order_step(self, state: OrderState) -> OrderStep | None:
        return super().next_order_step(replace(state, tables=())) or super().next_order_step(state)


class NoBarrier(Rules):
    """Reads beyond markers; nobody compares the channels."""

    checks_channels = False

    def is_barrier(self, snapshot: int, recorded: Iterable[int], channel_index: int, *, closed: bool) -> bool:
        return False


class OnlyWhenAsked(Rules):
    """Ends a slice at a marker, and records the snapshot only when it is asked."""

    def choose(self, asked: Sequence[int], reached: Sequence[int], recorded: Iterable[int]) -> list[int]:
        return super().choose(asked, [], recorded)


class LooksBeforeClaim(Rules):
    """Looks for holds first, and claims then."""

    claims_first = False


class LooksBeforeHold(Rules):
    """Looks for other restores first, and holds then."""

    holds_first = False


MUTANTS = (
    (EpochBefore(), Graph("two epochs in flight", 2, CHAIN, epochs=2, in_flight=2)),
    (OneSourceCut(), Graph("two tables", 2, ((0, 1), (0, 1)), epochs=2, crashes=0)),
    (MarkerInside(), Graph("staged", 2, CHAIN, staged=STAGED, epochs=3)),
    (NoHold(), Graph("reader first", 2, ((1, 0),), epochs=2, restores=1, crashes=0)),
    (UndoneRead(), Graph("restore", 2, CHAIN, epochs=2, restores=1, crashes=0)),
    (RollbackIgnored(), Graph("rollback", 2, CHAIN, epochs=1, rollbacks=1)),
    (NotExclusive(), Graph("two completers", 2, CHAIN, epochs=1, expires=True)),
    (FloorRises(), Graph("sweeps", 2, CHAIN, epochs=2, sweeps=True, crashes=0)),
    (PinLast(), Graph("sweeps", 2, CHAIN, epochs=2, sweeps=True, crashes=0)),
    (LooksBeforeClaim(), Graph("reader first", 2, ((1, 0),), epochs=2, restores=1)),
    (LooksBeforeHold(), Graph("two restores", 2, CHAIN, epochs=1, restores=2, crashes=0)),
    (NoBarrier(), Graph("chain", 2, CHAIN, epochs=2)),
    (OnlyWhenAsked(), Graph("chain", 2, CHAIN, epochs=2)),
    # An epoch in one step hides none of them.
    (OneSourceCut(), Graph("two tables", 2, ((0, 1), (0, 1)), epochs=2, crashes=0, in_one_step=True)),
    (NoBarrier(), Graph("chain", 2, CHAIN, epochs=2, crashes=0, in_one_step=True)),
    (OnlyWhenAsked(), Graph("chain", 2, CHAIN, epochs=2, crashes=0, in_one_step=True)),
)


@pytest.mark.parametrize(("rules", "graph"), MUTANTS, ids=lambda one: type(one).__name__ * isinstance(one, Rules))
def test_a_planted_bug_is_caught(rules: Rules, graph: Graph) -> None:
    with pytest.raises(Broken):
        explore(Bank(graph, rules), 400_000)


def test_the_page_names_every_planted_bug() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-it-is-tested.md").read_text()
    table = page.partition("### Planted bugs of topologies")[2].partition("\n## ")[0]
    modules = Path(__file__).parent.glob("test*_search.py")
    planted = [name for one in modules for name in re.findall(r"\n    \((\w+)\(\), ", one.read_text())]
    assert set(re.findall(r"`([A-Z]\w+)`", table)) == set(planted)
