"""State in runs against a plain dict: newest wins, removed is gone, collisions are exact, shards are apart."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.errors import SchemaError
from firnline.state import segments as runs_module
from firnline.state.columns import Layout, can_widen
from firnline.state.home import StateHome
from firnline.state.keys import LOW48, distinct, locate, shard_ranges
from firnline.state.lookup import by_slots, lookup, scan
from firnline.state.manifest import OperatorState, SegmentRef, ShardState, rescale
from firnline.state.merge import merge_due, merge_segments
from firnline.state.segments import OPEN, open_segments, write_segment

GROUPS = 8
KEY = pa.schema([("user", pa.string()), ("start", pa.int64())])
OLD = Layout(KEY, pa.schema([("count", pa.int32()), ("note", pa.string())]))
NEW = Layout(KEY, pa.schema([("extra", pa.float64()), ("count", pa.int64()), ("note", pa.string())]), timers=True)
Key = tuple[str | None, int | None]

ALL_KEYS: list[Key] = [(u, s) for u in ("ann", "bob", "", None, "carl-with-a-longer-name") for s in (0, 60, None)]


class World:
    """Shards of state on disk beside the dict that they must equal."""

    def __init__(self, folder: str, mask: int) -> None:
        self.home = StateHome(folder)
        self.mask = mask
        self.state = OperatorState(0, ((0, GROUPS, ShardState()),))
        self.model: dict[Key, dict[str, Any]] = {}
        self.layout = OLD
        self.epoch = 0

    def locate(self, keys: list[Key]) -> tuple[pa.Table, Any]:
        table = pa.table([pa.array(c) for c in zip(*keys, strict=True)], schema=KEY)
        return table, locate(table, 1, GROUPS, mask=self.mask)

    def write(self, changed: dict[Key, tuple[int, str | None, int | None]], removed: set[Key]) -> None:
        """One epoch: each shard writes one run with what changed there."""
        self.epoch += 1
        keys = [*changed, *(removed - changed.keys())]
        if not keys:
            return
        table, found = self.locate(keys)
        rows = [
            {"count": count, "note": note, "extra": count / 2, "timer": due} for count, note, due in changed.values()
        ]
        shards = []
        for first, last, shard in self.state.shards:
            own = np.flatnonzero((found.groups >= first) & (found.groups < last))
            new, gone = own[own < len(changed)], own[own >= len(changed)]
            if own.size:
                state = pa.Table.from_pylist([rows[i] for i in new], schema=self.layout.state)
                timers = pa.array([rows[i]["timer"] for i in new], pa.int64()) if self.layout.timers else None
                piece = self.layout.changes(found.slots, table, new, state, gone, timers)
                ref = write_segment(
                    self.home.storage, "e/shard_0/op", piece, self.layout, operator="op", epoch=self.epoch
                )
                shard = replace(shard, segments=(*shard.segments, ref))
            shards.append((first, last, shard))
        self.state = OperatorState(self.epoch, tuple(shards))
        for key in removed:
            self.model.pop(key, None)
        for key, row in zip(changed, rows, strict=True):
            old = self.layout is OLD
            self.model[key] = {**row, "extra": None, "timer": None} if old else row

    def merge(self, start: int) -> None:
        """Merge the newest runs of every shard, from its run number `start` on."""
        shards = []
        for first, last, shard in self.state.shards:
            at = min(start, max(len(shard.segments) - 1, 0))
            if shard.segments:
                merged = merge_segments(
                    self.home, shard.segments[at:], (first, last), "e/shard_0/m",
                    operator="op", epoch=self.epoch, with_oldest=at == 0, rows=6,
                )  # fmt: skip
                shard = replace(shard, segments=(*shard.segments[:at], *([merged] if merged else [])))
            shards.append((first, last, shard))
        self.state = replace(self.state, shards=tuple(shards))

    def check(self, layout: Layout) -> None:
        """Look up, scan and search by slot in every shard: together they are the dict, each key in its own shard."""
        _, found = self.locate(ALL_KEYS)
        scanned: dict[Key, dict[str, Any]] = {}
        for first, last, shard in self.state.shards:
            runs = open_segments(self.home, shard.segments)
            own = np.flatnonzero((found.groups >= first) & (found.groups < last))
            each = distinct(found.slots[own], found.keys.take(own))
            rows = own[each.rows]
            answer = lookup(runs, found.slots[rows], found.keys.take(rows), layout)
            told = answer.state.to_pylist()
            for place, row in enumerate(rows):
                want = self.model.get(ALL_KEYS[row])
                assert bool(answer.exists[place]) == (want is not None)
                blank = dict.fromkeys([*layout.state.names, "timer"])
                wanted = blank if want is None else {name: want[name] for name in blank}
                assert {**told[place], "timer": answer.timers[place].as_py()} == wanted
            self.check_due(runs, found.slots[own], layout, (first, last))
            columns = ["user", "start", *layout.state.names, "_slot", *(["_timer"] if layout.timers else [])]
            last_slot = -1
            for part in scan(runs, (first, last), layout, columns, rows=5):
                for line in part.to_pylist():
                    assert line["_slot"] >= last_slot
                    last_slot = line.pop("_slot")
                    key = (line.pop("user"), line.pop("start"))
                    assert key not in scanned
                    due = line.pop("_timer", None)
                    scanned[key] = {**line, "timer": due}
        names = [*layout.state.names, "timer"]
        assert scanned == {key: {name: row[name] for name in names} for key, row in self.model.items()}

    def check_due(self, runs: list[Any], slots: Any, layout: Layout, groups: tuple[int, int]) -> None:
        if not layout.timers:
            return
        rows = layout.keys_of(by_slots(runs, np.unique(slots), layout, due_before=50)).to_pylist()
        _, found = self.locate(ALL_KEYS)
        inside = {k for k, g in zip(ALL_KEYS, found.groups, strict=True) if groups[0] <= g < groups[1]}
        due = {k for k, row in self.model.items() if row["timer"] is not None and row["timer"] <= 50}
        assert {(r["user"], r["start"]) for r in rows} == due & inside


@contextmanager
def small_batches(rows: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs_module, "BATCH_ROWS", rows)
        OPEN.clear()
        yield
        OPEN.clear()


KEYS = st.sampled_from(ALL_KEYS)
ROWS = st.tuples(st.integers(-5, 5), st.none() | st.sampled_from(["", "x", "long" * 9]), st.none() | st.integers(0, 99))
OPERATIONS = st.one_of(
    st.tuples(st.just("write"), st.dictionaries(KEYS, ROWS, max_size=10), st.sets(KEYS, max_size=5)),
    st.tuples(st.just("write"), st.dictionaries(KEYS, ROWS, max_size=10), st.just(set())),
    st.tuples(st.just("merge"), st.integers(0, 3)),
    st.tuples(st.just("rescale"), st.integers(1, GROUPS)),
    st.tuples(st.just("evolve")),
    st.tuples(st.just("forget")),
)


@settings(max_examples=120)
@given(st.lists(OPERATIONS, max_size=12), st.sampled_from([LOW48, 3, 0]), st.sampled_from([1, 3, 64 * 1024]))
def test_runs_tell_what_a_dict_would(operations: list[tuple[Any, ...]], mask: int, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder, small_batches(batch):
        world = World(folder, mask)
        for name, *arguments in operations:
            if name == "write":
                world.write(*arguments)
            elif name == "merge":
                world.merge(*arguments)
            elif name == "rescale":
                world.state = rescale(world.state, shard_ranges(GROUPS, arguments[0]))
            elif name == "evolve":
                world.layout = NEW
            else:
                OPEN.clear()
        world.check(NEW)
        if world.layout is OLD:
            world.check(OLD)


def test_a_shared_file_does_not_bring_back_what_one_of_its_shards_has_changed(tmp_path: Path) -> None:
    """Split and joined again, a shard names the old file twice; each time only for its own groups."""
    world = World(str(tmp_path), LOW48)
    world.write(dict.fromkeys(ALL_KEYS, (1, "old", None)), set())
    world.state = rescale(world.state, shard_ranges(GROUPS, 4))
    world.write(dict.fromkeys(ALL_KEYS, (2, "new", None)), set())
    world.state = rescale(world.state, shard_ranges(GROUPS, 1))
    assert len({r.path for r in world.state.shards[0][2].segments}) < len(world.state.shards[0][2].segments)
    world.check(OLD)
    world.merge(0)
    world.check(OLD)


def test_a_run_of_many_epochs_keeps_few_files_and_the_right_state(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    home = StateHome(str(tmp_path))
    refs: tuple[SegmentRef, ...] = ()
    model: dict[int, int] = {}
    layout = Layout(pa.schema([("id", pa.int64())]), pa.schema([("n", pa.int64())]))
    most = 0
    for epoch in range(1, 80):
        ids = np.unique(rng.integers(0, 2000, 60))
        gone = rng.random(ids.size) < 0.2
        keys = pa.table({"id": ids})
        found = locate(keys, 1, GROUPS)
        state = pa.table({"n": np.full(int((~gone).sum()), epoch)})
        table = layout.changes(found.slots, keys, np.flatnonzero(~gone), state, np.flatnonzero(gone))
        refs = (*refs, write_segment(home.storage, "e/shard_0/op", table, layout, operator="op", epoch=epoch))
        refs = merge_due(home, refs, (0, GROUPS), "e/shard_0/op", operator="op", epoch=epoch)
        most = max(most, len(refs))
        for one, dead in zip(ids.tolist(), gone, strict=True):
            model.pop(one, None)
            if not dead:
                model[one] = epoch
    assert most <= 12
    parts = list(scan(open_segments(home, refs), (0, GROUPS), layout))
    assert {r["id"]: r["n"] for part in parts for r in part.to_pylist()} == model


# -- without key or state columns ------------------------------------------------------------------------


def test_an_operator_without_key_columns_has_one_state(tmp_path: Path) -> None:
    home, layout = StateHome(str(tmp_path)), Layout(pa.schema([]), pa.schema([("n", pa.int64())]))
    found = locate(pa.table({}), 0, GROUPS, rows=1)
    refs = []
    for n in (1, 2):
        table = layout.table(found.slots, pa.table({}), pa.table({"n": [n]}))
        refs.append(write_segment(home.storage, "e/op", table, layout, operator="op", epoch=n))
    answer = lookup(open_segments(home, refs), found.slots, found.keys, layout)
    assert (answer.exists.tolist(), answer.state.to_pylist()) == ([True], [{"n": 2}])
    merged = merge_segments(home, refs, (0, GROUPS), "e/m", operator="op", epoch=3, with_oldest=True)
    assert merged is not None
    assert [t.to_pylist() for t in scan(open_segments(home, [merged]), (0, GROUPS), layout)] == [[{"n": 2}]]


def test_a_state_without_columns_says_that_a_key_was_seen(tmp_path: Path) -> None:
    home, layout = StateHome(str(tmp_path)), Layout(pa.schema([("id", pa.int64())]), pa.schema([]))
    keys = pa.table({"id": [1, 2, 3]})
    found = locate(keys, 1, GROUPS)
    none = np.empty(0, np.int64)
    table = layout.changes(found.slots, keys, np.array([0, 2]), pa.table({}), none)
    ref = write_segment(home.storage, "e/op", table, layout, operator="op", epoch=1)
    order = np.argsort(found.slots)
    answer = lookup(open_segments(home, [ref]), found.slots[order], found.keys.take(order), layout)
    assert dict(zip((order + 1).tolist(), answer.exists.tolist(), strict=True)) == {1: True, 2: False, 3: True}
    assert (answer.state.num_columns, len(answer.timers)) == (0, 3)


def test_a_lookup_of_nothing_and_in_nothing(tmp_path: Path) -> None:
    found = locate(pa.table({"user": ["a"], "start": [1]}), 1, GROUPS)
    answer = lookup([], found.slots, found.keys, NEW)
    assert (answer.exists.tolist(), answer.state.schema, answer.timers.null_count) == ([False], NEW.state, 1)
    none = np.empty(0, np.int64)
    assert lookup([], found.slots[:0], found.keys.take(none), NEW).state.num_rows == 0
    assert by_slots([], found.slots, NEW).num_rows == 0


def test_unsorted_slots_are_refused() -> None:
    found = locate(pa.table({"id": [1, 2]}), 1, GROUPS)
    with pytest.raises(ValueError, match="sorted"):
        lookup([], np.sort(found.slots)[::-1], found.keys, OLD)


# -- evolution -------------------------------------------------------------------------------------------


def one_run(tmp_path: Path, layout: Layout, keys: pa.Table, state: pa.Table) -> tuple[StateHome, SegmentRef, Any]:
    home = StateHome(str(tmp_path))
    found = locate(keys, 1, GROUPS)
    table = layout.table(found.slots, keys, state)
    return home, write_segment(home.storage, "e/op", table, layout, operator="op", epoch=1), found


@pytest.mark.parametrize(
    ("old", "new", "fits"),
    [
        (pa.int32(), pa.int64(), True), (pa.int8(), pa.int32(), True), (pa.uint32(), pa.int64(), True),
        (pa.int32(), pa.float64(), True), (pa.float32(), pa.float64(), True), (pa.string(), pa.large_string(), True),
        (pa.int64(), pa.int32(), False), (pa.float64(), pa.int64(), False), (pa.int64(), pa.string(), False),
        (pa.int64(), pa.uint64(), False), (pa.uint64(), pa.int64(), False), (pa.float64(), pa.float32(), False),
        (pa.timestamp("us"), pa.int64(), False), (pa.list_(pa.int32()), pa.list_(pa.int64()), False),
    ],
)  # fmt: skip
def test_types_widen_or_are_refused(old: pa.DataType, new: pa.DataType, fits: bool) -> None:
    assert can_widen(old, new) is fits


def test_a_type_that_does_not_fit_names_column_and_file(tmp_path: Path) -> None:
    keys = pa.table({"id": [1]})
    old, new = (Layout(keys.schema, pa.schema([("n", kind)])) for kind in (pa.string(), pa.int64()))
    home, ref, found = one_run(tmp_path, old, keys, pa.table({"n": ["x"]}))
    with pytest.raises(SchemaError, match=f"'n' in .*{ref.path}"):
        lookup(open_segments(home, [ref]), found.slots, found.keys, new)
    with pytest.raises(SchemaError, match="'n'"):
        list(scan(open_segments(home, [ref]), (0, GROUPS), new))


def test_an_integer_that_no_float_equals_is_refused_rather_than_rounded(tmp_path: Path) -> None:
    keys = pa.table({"id": [1]})
    old, new = (Layout(keys.schema, pa.schema([("n", kind)])) for kind in (pa.int64(), pa.float64()))
    home, ref, found = one_run(tmp_path, old, keys, pa.table({"n": [2**53 + 1]}))
    with pytest.raises(SchemaError, match="'n'"):
        lookup(open_segments(home, [ref]), found.slots, found.keys, new)


@pytest.mark.parametrize("key", [pa.schema([("id", pa.float64())]), pa.schema([("other", pa.int64())]), pa.schema([])])
def test_another_key_is_refused_and_not_taken_for_empty_state(tmp_path: Path, key: pa.Schema) -> None:
    keys = pa.table({"id": [1]})
    state = pa.schema([("n", pa.int64())])
    home, ref, found = one_run(tmp_path, Layout(keys.schema, state), keys, pa.table({"n": [1]}))
    with pytest.raises(SchemaError, match="key"):
        lookup(open_segments(home, [ref]), found.slots, found.keys, Layout(key, state))


def test_a_key_may_become_wider(tmp_path: Path) -> None:
    keys = pa.table({"id": pa.array([1, 2], pa.int32())})
    state = pa.schema([("n", pa.int64())])
    home, ref, _ = one_run(tmp_path, Layout(keys.schema, state), keys, pa.table({"n": [1, 2]}))
    wide = Layout(pa.schema([("id", pa.int64())]), state)
    found = locate(pa.table({"id": pa.array([2], pa.int64())}), 1, GROUPS)
    assert lookup(open_segments(home, [ref]), found.slots, found.keys, wide).state.to_pylist() == [{"n": 2}]
    scanned = pa.concat_tables(scan(open_segments(home, [ref]), (0, GROUPS), wide))
    assert scanned.schema.field("id").type == pa.int64()
