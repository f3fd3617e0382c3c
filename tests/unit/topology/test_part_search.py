"""Every interleaving of small topologies whose channels are parts of sinks with a template, and planted bugs."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

from tests.support.bank import Broken, Graph, Recorded, explore
from tests.support.part_bank import PartBank, PartRules
from tests.support.proof import covered

LIMIT = 500_000 if os.environ.get("FIRNLINE_PROOF") else 6_000
TWO_READERS = ((0, 1), (0, 2))
ONE_READER = ((0, 1), (0, 1))

SMALL = (  # searched whole in every run
    Graph("a part", 2, ((0, 1),), epochs=2),
    Graph("two parts of one reader", 2, ONE_READER, epochs=1, crashes=0),
    Graph("two readers", 3, TWO_READERS, epochs=1, crashes=0),
)
LARGE = (  # so many states of each, breadth first
    Graph("two parts, two epochs", 2, ONE_READER, epochs=2),
    Graph("two readers, a crash", 3, TWO_READERS, epochs=2),
    Graph("chain of three", 3, ((0, 1), (1, 2)), epochs=1),
    Graph("two epochs in flight", 2, ONE_READER, epochs=2, in_flight=2, crashes=0),
    Graph("two snapshots", 2, ((0, 1),), epochs=1, snapshots=2, crashes=0),
    Graph("cycle", 2, ((0, 1), (1, 0)), epochs=1, crashes=0),
    Graph("two completers", 2, ((0, 1),), epochs=1, expires=True),
    Graph("rollback", 2, ((0, 1),), epochs=1, rollbacks=1, crashes=0),
    Graph("restore", 2, ((0, 1),), epochs=2, restores=1, crashes=0),
    Graph("restore of two parts", 2, ONE_READER, epochs=1, restores=1, crashes=0),
    Graph("killed restore", 2, ((0, 1),), epochs=1, restores=1),
)


@pytest.mark.parametrize("graph", SMALL, ids=lambda graph: graph.name)
def test_the_rules_hold(graph: Graph) -> None:
    states, complete = explore(PartBank(graph), 500_000)
    print(f"{graph.name}: {states:,} states, all")
    assert complete
    covered["states of topologies searched"] += states


@pytest.mark.parametrize("graph", LARGE, ids=lambda graph: graph.name)
def test_the_rules_hold_in_large_graphs(graph: Graph) -> None:
    states, complete = explore(PartBank(graph), LIMIT)
    print(f"{graph.name}: {states:,} states{', all' if complete else ''}")
    covered["states of topologies searched"] += states


class OnlyTouchedParts(PartRules):
    """Only the commits of the marker epoch are markers; nobody compares the channels."""

    checks_channels = False

    def passed(self, recorded: Recorded, epoch: int) -> list[int]:
        return []


class MarkerBehind(PartRules):
    """Takes the first commit behind the marker for the marker, and reads it; nobody compares the channels."""

    checks_channels = False

    def passed(self, recorded: Recorded, epoch: int) -> list[int]:
        return [snapshot for snapshot, record, _ in recorded if epoch > record + 1]


class PartsFirst(PartRules):
    """Reads the parts before the heads of the sinks."""

    heads_first = False


class HeadIgnored(PartRules):
    """Completes a snapshot once the epochs are decided, whatever the sinks hold."""

    def is_held(self, held: int, record: int) -> bool:
        return True

    def part_end(self, held: int, record: int, touched: Iterable[int]) -> int | None:
        return super().part_end(record, record, touched)


class NewestCommit(PartRules):
    """Takes the newest commit of a part for the end of the record."""

    def part_end(self, held: int, record: int, touched: Iterable[int]) -> int | None:
        return max(touched, default=0)


MUTANTS = (
    (OnlyTouchedParts(), Graph("a part", 2, ((0, 1),), epochs=2)),
    (MarkerBehind(), Graph("a part", 2, ((0, 1),), epochs=2)),
    (PartsFirst(), Graph("a part", 2, ((0, 1),), epochs=2)),
    (HeadIgnored(), Graph("a part", 2, ((0, 1),), epochs=2)),
    (NewestCommit(), Graph("a part", 2, ((0, 1),), epochs=2)),
)


@pytest.mark.parametrize(("rules", "graph"), MUTANTS, ids=lambda one: type(one).__name__ * isinstance(one, PartRules))
def test_a_planted_bug_is_caught(rules: PartRules, graph: Graph) -> None:
    with pytest.raises(Broken):
        explore(PartBank(graph, rules), 400_000)
