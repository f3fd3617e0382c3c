"""Timers against a plain dict: every key that is due is found, at the first epoch after, and once."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import DamagedError, StateDamagedError
from firnline.state import timers as module
from firnline.state.home import StateHome
from firnline.state.keys import SLOT_BITS, shard_ranges
from firnline.state.manifest import OperatorState, ShardState, TimerRef, rescale
from firnline.state.segments import OPEN
from firnline.state.timers import after_firing, due_slots, merge_timers, open_timers, write_timers

GROUPS = 4
ALL = (0, GROUPS)


def slot(key: int) -> int:
    return (key % GROUPS) << SLOT_BITS | key


def write(home: StateHome, entries: list[tuple[int, int]], epoch: int = 1) -> TimerRef | None:
    due, slots = np.array([d for d, _ in entries], np.int64), np.array([s for _, s in entries], np.uint64)
    return write_timers(home.storage, "cp/shard_0/op", due, slots, operator="op", epoch=epoch)


def must_write(home: StateHome, entries: list[tuple[int, int]]) -> TimerRef:
    ref = write(home, entries)
    assert ref is not None
    return ref


@pytest.fixture
def home(tmp_path: Path) -> StateHome:
    OPEN.clear()
    return StateHome(str(tmp_path))


class World:
    """Shards with timer files beside the dict of what is due when."""

    def __init__(self, folder: str) -> None:
        self.home = StateHome(folder)
        self.due: dict[int, int] = {}  # by key
        self.state = OperatorState(0, ((0, GROUPS, ShardState()),))
        self.watermark: int | None = None
        self.epoch = 0

    def run_epoch(self, forward: int, times: dict[int, int | None], again: int | None) -> None:
        """Fire what is due, then set timers: of the fired keys to `again` (or never), of others to `times`."""
        self.epoch += 1
        if forward:
            self.watermark = (self.watermark or 0) + forward
        shards, found = [], []
        for first, last, shard in self.state.shards:
            hints = due_slots(self.home, shard.timers, self.watermark, (first, last)).tolist()
            assert hints == sorted(set(hints))
            assert all(first <= s >> SLOT_BITS < last for s in hints)
            keys = [s & 0xFFFF for s in hints]
            fired = [k for k in keys if k in self.due and self.watermark is not None and self.due[k] <= self.watermark]
            found += fired
            own = {k: t for k, t in times.items() if first <= k % GROUPS < last}
            shards.append((first, last, self.set_timers((first, last), shard, fired, own, again)))
        expected = [k for k, t in self.due.items() if self.watermark is not None and t <= self.watermark]
        assert sorted(found) == sorted(expected)
        for key in expected:
            del self.due[key]
        changes = {**dict.fromkeys(expected, again), **times}
        for key, time in changes.items():
            self.due.pop(key, None)
            if time is not None:
                self.due[key] = time
        self.state = OperatorState(self.epoch, tuple(shards))

    def set_timers(
        self, groups: tuple[int, int], shard: ShardState, fired: list[int], own: dict[int, Any], again: int | None
    ) -> ShardState:
        files = after_firing(self.home, shard.timers, self.watermark)
        new = {**dict.fromkeys(fired, again), **own}
        ref = write(self.home, [(t, slot(k)) for k, t in new.items() if t is not None], self.epoch)
        files = (*files, *([ref] if ref else []))
        files = merge_timers(self.home, files, groups, "cp/shard_0/op", operator="op", epoch=self.epoch)
        assert len(files) <= module.MOST_FILES or len(self.state.shards) > 1
        return replace(shard, timers=files)


EPOCHS = st.tuples(
    st.integers(0, 30),
    st.dictionaries(st.integers(0, 30), st.none() | st.integers(-50, 300), max_size=8),
    st.none() | st.integers(0, 300),
)


@settings(max_examples=120)
@given(st.lists(EPOCHS | st.integers(1, GROUPS), max_size=25))
def test_what_is_due_is_found_once(steps: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        OPEN.clear()
        world = World(folder)
        for step in steps:
            if isinstance(step, int):
                world.state = rescale(world.state, shard_ranges(GROUPS, step))
            else:
                world.run_epoch(*step)
        world.run_epoch(1000, {}, None)
        assert world.due == {}
        assert all(shard.timers == () for _, _, shard in world.state.shards)


def test_a_timer_set_to_the_past_fires_at_the_next_epoch(home: StateHome) -> None:
    old = must_write(home, [(500, slot(1))])
    assert due_slots(home, [old], 100, ALL).tolist() == []
    (old,) = after_firing(home, [old], 100)
    late = must_write(home, [(50, slot(2))])  # set in the epoch whose watermark is 100
    assert due_slots(home, [old, late], 100, ALL).tolist() == [slot(2)]
    left = after_firing(home, [old, late], 100)
    assert [(ref.segment.path, ref.fired_until) for ref in left] == [(old.segment.path, 100)]


def test_a_timer_at_the_watermark_is_due_and_fires_once(home: StateHome) -> None:
    ref = must_write(home, [(100, slot(1)), (101, slot(2))])
    assert due_slots(home, [ref], 99, ALL).tolist() == []
    assert due_slots(home, [ref], 100, ALL).tolist() == [slot(1)]
    (fired,) = after_firing(home, [ref], 100)
    assert due_slots(home, [fired], 100, ALL).tolist() == []
    assert due_slots(home, [fired], 101, ALL).tolist() == [slot(2)]
    assert after_firing(home, [fired], 101) == ()


def test_a_watermark_that_goes_back_fires_nothing_again(home: StateHome) -> None:
    ref = must_write(home, [(100, slot(1)), (200, slot(2))])
    (fired,) = after_firing(home, [ref], 150)
    assert after_firing(home, [fired], 50) == (fired,)
    assert due_slots(home, [fired], 120, ALL).tolist() == []


def test_without_a_watermark_nothing_is_due(home: StateHome) -> None:
    ref = must_write(home, [(-(2**62), slot(1))])
    assert due_slots(home, [ref], None, ALL).tolist() == []
    assert after_firing(home, [ref], None) == (ref,)


def test_a_merge_keeps_what_a_new_file_has_in_the_past_and_drops_what_was_fired(home: StateHome) -> None:
    fired = replace(must_write(home, [(10, slot(1)), (90, slot(1)), (300, slot(1))]), fired_until=100)
    new = [must_write(home, [(20 + i, slot(2 + i)), (400, slot(2))]) for i in range(5)]
    (merged,) = merge_timers(home, [fired, *new], ALL, "cp/m", operator="op", epoch=3)
    due, slots = open_timers(home, merged).between(None, None)
    entries = sorted(zip(due.tolist(), slots.tolist(), strict=True))
    assert entries == sorted([*((20 + i, slot(2 + i)) for i in range(5)), (300, slot(1)), (400, slot(2))])
    assert merged.fired_until is None


def test_a_merge_of_what_is_all_fired_leaves_no_file(home: StateHome) -> None:
    refs = [replace(must_write(home, [(i, slot(1))]), fired_until=50) for i in range(4)]
    assert merge_timers(home, refs, ALL, "cp/m", operator="op", epoch=3) == ()


def test_only_the_shards_own_groups_are_found_and_merged(home: StateHome) -> None:
    refs = [must_write(home, [(i, slot(k)) for k in range(4)]) for i in range(4)]
    assert due_slots(home, refs, 10, (1, 3)).tolist() == [slot(1), slot(2)]
    cut = [replace(ref, segment=replace(ref.segment, last_group=1)) for ref in refs]
    assert due_slots(home, cut, 10, (1, 3)).tolist() == [slot(1)]
    assert due_slots(home, cut, 10, (2, 4)).tolist() == []
    (merged,) = merge_timers(home, refs, (1, 3), "cp/m", operator="op", epoch=3)
    assert (merged.segment.first_group, merged.segment.last_group, merged.segment.rows) == (1, 2, 8)


def test_entries_are_sorted_and_stand_once(home: StateHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    ref = must_write(home, [(5, slot(1)), (1, slot(2)), (5, slot(1)), (3, slot(3)), (5, slot(0)), (9, slot(1))])
    file = open_timers(home, ref)
    assert [len(part) for part in file.due] == [3, 2]
    due, slots = file.between(None, None)
    wanted = [(1, slot(2)), (3, slot(3)), (5, slot(0)), (5, slot(1)), (9, slot(1))]
    assert list(zip(due.tolist(), slots.tolist(), strict=True)) == wanted
    assert file.between(1, 5)[0].tolist() == [3, 5, 5]
    assert (file.largest, ref.segment.rows) == (9, 5)


def test_no_entries_make_no_file(home: StateHome) -> None:
    assert write(home, []) is None
    assert not list(Path(home.root).iterdir())


def test_a_damaged_file_of_timers_is_found(home: StateHome) -> None:
    ref = must_write(home, [(1, slot(1))])
    path = Path(home.root) / ref.segment.path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StateDamagedError, match=ref.segment.path):
        due_slots(home, [ref], 10, ALL)


def test_a_segment_of_state_is_not_taken_for_timers(home: StateHome) -> None:
    import pyarrow as pa

    from firnline.state.columns import Layout
    from firnline.state.segments import write_segment

    layout = Layout(pa.schema([]), pa.schema([("n", pa.int64())]))
    table = layout.table(np.array([0], np.uint64), pa.table({}), pa.table({"n": [1]}))
    segment = write_segment(home.storage, "cp/x", table, layout, operator="op", epoch=1)
    with pytest.raises(DamagedError, match="timers"):
        open_timers(home, TimerRef(segment))
