"""What a checkpoint topic says of topics counts for these topics alone, and not for others of the same names."""

from __future__ import annotations

from firnline.topology.records import Marker, remember
from firnline.topology.topics import ChannelState, combine_lanes, find_ends

MARKER = Marker("s1", "lake", "home", ("a", "b"))
OLD, NEW = {"t": "id-1", "u": "id-7"}, {"t": "id-2", "u": "id-7"}
ENDS = {("t", 0): 10, ("u", 0): 5}


def marked() -> ChannelState:
    return ChannelState().after_epoch(remember({}, [MARKER], 3), 3, 1, ENDS, OLD)


def test_a_cut_names_the_ends_of_the_topics_that_it_was_made_in() -> None:
    cuts = marked().cuts.values()
    assert find_ends(cuts, 3, OLD) == ENDS
    assert find_ends(cuts, 3, NEW) == {("u", 0): 5}
    assert find_ends(cuts, 3, {}) == ENDS, "a topic whose id is unknown may be the same"


def test_void_offsets_end_with_their_topic() -> None:
    state = marked().after_restore(3, ENDS, {("t", 0): 20, ("u", 0): 9}, OLD)
    assert state.void_in(OLD) == {("t", 0): ((10, 20),), ("u", 0): ((5, 9),)}
    assert state.void_in(NEW) == {("u", 0): ((5, 9),)}
    again = state.after_restore(3, {("u", 0): 5}, {("t", 0): 4, ("u", 0): 12}, NEW)
    assert again.void_in(NEW) == {("t", 0): ((0, 4),), ("u", 0): ((5, 12),)}


def test_ids_are_durable_and_records_without_ids_are_read() -> None:
    state = marked().after_restore(3, ENDS, {("t", 0): 20}, OLD)
    assert ChannelState.from_json(state.to_json(), "it") == state
    old = state.to_json()
    del old["void_ids"], old["cuts"]["s1"]["ids"]
    read = ChannelState.from_json(old, "it")
    assert read.void_in(NEW) == {("t", 0): ((10, 20),)}
    assert find_ends(read.cuts.values(), 3, NEW) == ENDS


def test_lane_0_knows_which_topic_is_meant() -> None:
    lanes = {
        1: ChannelState().after_restore(3, {}, {("t", 0): 20}, OLD),
        0: ChannelState().after_restore(3, {}, {("t", 0): 4}, NEW),
    }
    assert combine_lanes(lanes).void_in(NEW) == {("t", 0): ((0, 4),)}
