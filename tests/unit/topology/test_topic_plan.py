"""Which offsets of a topic a savepoint copies, and where readers stand in the copy."""

from __future__ import annotations

import numpy as np
import pytest

from firnline.errors import RollbackRefusedError
from firnline.history.topology.topic_plan import (
    PlaceMap,
    TopicMove,
    find_lost,
    find_states,
    may_be_compacted,
    places_in,
    plan_ranges,
    translate,
)
from firnline.sources.kafka.position import PartitionState, Position, Range, TopicState


def states(*nexts: int) -> dict[int, PartitionState]:
    return {number: PartitionState(offset) for number, offset in enumerate(nexts)}


def test_ranges_go_from_the_slowest_reader_to_the_cut() -> None:
    ranges = plan_ranges([states(3, 9, 0), states(7, 9, 0)], {0: 10, 1: 9, 2: 0}, {})
    assert ranges == {0: [Range(3, 10)]}


def test_a_reader_beyond_the_cut_has_nothing_to_read() -> None:
    assert plan_ranges([states(12)], {0: 10}, {}) == {}


def test_void_offsets_are_left_out() -> None:
    void = {0: ((1, 4), (6, 8)), 1: ((0, 10),)}
    assert plan_ranges([states(2, 0)], {0: 10, 1: 10}, void) == {0: [Range(4, 6), Range(8, 10)]}


def test_what_lies_before_the_log_start_is_lost() -> None:
    ranges = {0: [Range(3, 10)], 1: [Range(0, 2), Range(5, 7)], 2: [Range(4, 5)]}
    assert find_lost(ranges, {0: 5, 1: 6, 2: 4}) == [(0, 3, 4), (1, 0, 1), (1, 5, 5)]
    assert find_lost({3: [Range(1, 4)]}, {}) == [(3, 1, 3)], "a partition that is gone has nothing"


@pytest.mark.parametrize(("kept_from", "suspects"), [({0: 3}, []), ({0: 4}, [0]), ({0: -1}, [0]), ({}, [0])])
def test_compaction_may_have_taken_what_is_old_enough(kept_from: dict[int, int], suspects: list[int]) -> None:
    assert may_be_compacted({0: [Range(3, 10)]}, kept_from) == suspects


def test_a_reader_stands_at_its_offsets_or_at_the_beginning() -> None:
    known = Position("t", {"t": TopicState("id", {0: PartitionState(5)})})
    firsts = {0: 2, 1: 0}
    assert find_states(known, "t", "id", firsts, begins=False, reader="b") == states(5, 0)
    assert find_states(Position("t"), "t", "id", firsts, begins=True, reader="b") == states(2, 0)
    with pytest.raises(RollbackRefusedError, match="b has not begun to read t"):
        find_states(Position("t"), "t", "id", firsts, begins=False, reader="b")
    with pytest.raises(RollbackRefusedError, match="created again since b read it"):
        find_states(known, "t", "another", firsts, begins=False, reader="b")


def test_places_are_found_again_behind_what_was_not_copied() -> None:
    """Offsets 12 and 15 were control records: they are not copied."""
    places = PlaceMap([10, 12, 14, 16, 99])
    places.add(np.array([10, 11]), np.array([0, 1]))
    assert places.find(12) == 2, "nothing was copied from there on yet"
    places.add(np.array([13, 14, 16]), np.array([3, 4, 7]))
    places.add(np.array([], np.int64), np.array([], np.int64))
    assert [places.find(offset) for offset in (10, 12, 14, 16, 99)] == [0, 3, 4, 7, 8]
    assert PlaceMap([5]).find(5) == 0, "nothing was copied"


def test_positions_move_with_what_was_read_ahead() -> None:
    state = PartitionState(10, 4, (Range(13, 14, 4), Range(15, 17, 4)))
    places = PlaceMap(places_in([state]))
    places.add(np.array([10, 11, 13, 14, 16]), np.array([0, 1, 3, 4, 5]))
    kept = TopicState("other id", {0: PartitionState(77)})
    position = Position("old,other", {"old": TopicState("old id", {0: state}), "other": kept})
    move = TopicMove("new", "new id", {0: places})
    moved = translate(position, {"old": {0: state}}, {"old": move}, "new,other")
    expected = PartitionState(0, -1, (Range(3, 4), Range(5, 6)))
    assert moved == Position("new,other", {"other": kept, "new": TopicState("new id", {0: expected})})
    assert [list(one[:2]) for one in expected.unread(6)] == [[0, 3], [4, 5]], "records 10, 11 and 14"
