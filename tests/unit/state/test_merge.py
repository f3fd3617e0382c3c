"""Merges: rarely, cheaply, in bounded memory, and never of another shard's keys."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.faults import VARIABLE, InjectedFaultError
from firnline.state.columns import Layout
from firnline.state.home import StateHome
from firnline.state.keys import locate
from firnline.state.lookup import lookup, scan
from firnline.state.manifest import SegmentRef
from firnline.state.merge import FAN_IN, MOST_SEGMENTS, merge_due, merge_segments, plan_merge
from firnline.state.segments import open_segment, open_segments, write_segment

GROUPS = 16
LAYOUT = Layout(pa.schema([("id", pa.int64())]), pa.schema([("n", pa.int64())]))

# -- the policy -------------------------------------------------------------------------------------------


def simulate(batches: list[int], most_keys: float = math.inf) -> tuple[int, int]:
    """Write batches one after the other. Returns how many rows merges wrote, and how many runs there were at most."""
    sizes: list[int] = []
    rewritten = most = 0
    for batch in batches:
        sizes.append(batch)
        chosen = plan_merge(sizes)
        if chosen is not None:
            merged = int(min(sum(sizes[chosen]), most_keys))
            rewritten += merged
            sizes[chosen] = [merged]
        most = max(most, len(sizes))
    return rewritten, most


@pytest.mark.parametrize(
    ("sizes", "start"),
    [
        ([], None), ([5], None), ([5, 5, 5], None), ([5, 5, 5, 5], 0), ([100, 5, 5, 5], None), ([100, 5, 5, 5, 5], 1),
        ([20, 20, 20, 5, 5, 5, 5], 0), ([1000, 400, 300, 200, 200], 0), ([1000, 300, 200, 100, 100], 1),
        ([1_000_000, 1, 1, 1], None),
    ],
)  # fmt: skip
def test_the_newest_runs_of_like_size_are_merged(sizes: list[int], start: int | None) -> None:
    assert plan_merge(sizes) == (None if start is None else slice(start, len(sizes)))


@given(st.lists(st.integers(1, 10**9), max_size=30))
def test_a_plan_is_a_suffix_and_never_leaves_too_many_runs(sizes: list[int]) -> None:
    chosen = plan_merge(sizes)
    if chosen is None:
        assert len(sizes) <= MOST_SEGMENTS
        return
    assert 0 <= chosen.start <= len(sizes) - 2
    assert chosen.stop == len(sizes)


@given(st.lists(st.integers(1, 10**6), min_size=FAN_IN, max_size=MOST_SEGMENTS))
def test_a_large_run_is_rewritten_only_when_as_much_lies_beside_it(sizes: list[int]) -> None:
    chosen = plan_merge(sizes)
    if chosen is not None:
        merged = sizes[chosen]
        assert 2 * max(merged) <= sum(merged)


@pytest.mark.parametrize("count", [100, 1000, 10_000])
def test_a_row_is_rewritten_a_logarithmic_number_of_times(count: int) -> None:
    rewritten, most = simulate([50] * count)
    assert rewritten / (50 * count) <= math.log2(count)
    assert most <= MOST_SEGMENTS + 1


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=300))
def test_uneven_batches_cost_no_more(batches: list[int]) -> None:
    rewritten, most = simulate(batches)
    assert rewritten <= sum(batches) * (2 + math.log2(sum(batches)))
    assert most <= MOST_SEGMENTS + 1


def test_updates_of_a_large_state_rewrite_about_as_much_as_they_write() -> None:
    """A million keys, ten thousand of which change per epoch."""
    rewritten, most = simulate([1_000_000] + [10_000] * 2000, most_keys=1_000_000)
    assert rewritten / (10_000 * 2000) <= 6
    assert most <= MOST_SEGMENTS + 1


# -- the merge --------------------------------------------------------------------------------------------


def write(home: StateHome, ids: list[int], n: int, removed: list[int] | None = None) -> SegmentRef:
    gone = removed or []
    keys = pa.table({"id": np.array([*ids, *gone], np.int64)})
    state = pa.table({"n": np.full(len(ids), n)})
    slots = locate(keys, 1, GROUPS).slots
    table = LAYOUT.changes(slots, keys, np.arange(len(ids)), state, np.arange(len(ids), len(ids) + len(gone)))
    return write_segment(home.storage, "e/shard_0/op", table, LAYOUT, operator="op", epoch=n)


def content(home: StateHome, refs: list[SegmentRef]) -> dict[int, int]:
    return {r["id"]: r["n"] for t in scan(open_segments(home, refs), (0, GROUPS), LAYOUT) for r in t.to_pylist()}


def merge(
    home: StateHome, refs: list[SegmentRef], groups: tuple[int, int] = (0, GROUPS), oldest: bool = True
) -> SegmentRef:
    merged = merge_segments(home, refs, groups, "e/shard_0/m", operator="op", epoch=9, with_oldest=oldest)
    assert merged is not None
    return merged


def test_removed_keys_are_forgotten_only_with_the_oldest_run(tmp_path: Path) -> None:
    home = StateHome(str(tmp_path))
    refs = [write(home, [1, 2, 3], 1), write(home, [4], 2, removed=[1, 5]), write(home, [2], 3)]
    newer = merge(home, refs[1:], oldest=False)
    assert newer.rows == 4
    assert content(home, [refs[0], newer]) == {2: 3, 3: 1, 4: 2}
    whole = merge(home, refs)
    assert (whole.rows, content(home, [whole])) == (3, {2: 3, 3: 1, 4: 2})


def test_nothing_left_makes_no_file(tmp_path: Path) -> None:
    home = StateHome(str(tmp_path))
    refs = [write(home, [1, 2], 1), write(home, [], 2, removed=[1, 2])]
    before = sorted(tmp_path.rglob("*.arrow"))
    assert merge_segments(home, refs, (0, GROUPS), "e/shard_0/m", operator="op", epoch=3, with_oldest=True) is None
    assert sorted(tmp_path.rglob("*.arrow")) == before


def test_only_the_shards_own_groups_are_copied(tmp_path: Path) -> None:
    home = StateHome(str(tmp_path))
    refs = [write(home, list(range(500)), 1), write(home, list(range(0, 500, 2)), 2)]
    parts = [merge(home, refs, groups) for groups in ((0, 5), (5, 6), (6, 16))]
    assert [(p.first_group, p.last_group) for p in parts] == [(0, 4), (5, 5), (6, 15)]
    assert sum(p.rows for p in parts) == 500
    groups = [open_segment(home, p).slice(0, p.rows)["_slot"].to_numpy() >> np.uint64(48) for p in parts]
    assert [(int(g.min()), int(g.max())) for g in groups] == [(0, 4), (5, 5), (6, 15)]
    assert content(home, parts) == {i: 1 if i % 2 else 2 for i in range(500)}


def test_a_merge_that_is_due_replaces_a_suffix(tmp_path: Path) -> None:
    home = StateHome(str(tmp_path))
    refs = [write(home, list(range(1000)), 1), *(write(home, [i, i + 10], 2 + i) for i in range(4))]
    merged = merge_due(home, refs, (0, GROUPS), "e/shard_0/m", operator="op", epoch=9)
    assert (len(merged), merged[0]) == (2, refs[0])
    assert content(home, list(merged)) == content(home, refs)
    assert merge_due(home, merged, (0, GROUPS), "e/shard_0/m", operator="op", epoch=9) == merged


def test_a_merge_brings_old_columns_up_to_date(tmp_path: Path) -> None:
    home = StateHome(str(tmp_path))
    new = Layout(LAYOUT.key, pa.schema([("n", pa.float64()), ("more", pa.string())]), timers=True)
    keys = pa.table({"id": [7]})
    state = pa.table({"n": [0.5], "more": ["x"]})
    table = new.table(locate(keys, 1, GROUPS).slots, keys, state, timers=pa.array([99]))
    refs = [write(home, [1], 1), write_segment(home.storage, "e/x", table, new, operator="op", epoch=2)]
    run = open_segment(home, merge(home, refs))
    assert run.layout == new
    found = locate(pa.table({"id": [1, 7]}), 1, GROUPS)
    order = np.argsort(found.slots)
    answer = lookup([run], found.slots[order], found.keys.take(order), new)
    told = dict(zip((order).tolist(), answer.state.to_pylist(), strict=True))
    assert told == {0: {"n": 1.0, "more": None}, 1: {"n": 0.5, "more": "x"}}


def test_a_merge_that_fails_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline import faults

    home = StateHome(str(tmp_path))
    refs = [write(home, [1], 1), write(home, [2], 2)]
    before = sorted(tmp_path.rglob("*.arrow"))
    faults._seen.clear()
    monkeypatch.setenv(VARIABLE, "state.run.after:1:raise")
    with pytest.raises(InjectedFaultError):
        merge(home, refs)
    assert sorted(tmp_path.rglob("*.arrow")) == before


LARGE_MERGE = """
import sys
import numpy as np, pyarrow as pa
from firnline.state.columns import Layout
from firnline.state.home import StateHome
from firnline.state.keys import locate
from firnline.state.merge import merge_segments
from firnline.state.segments import SegmentWriter

home = StateHome(sys.argv[1])
layout = Layout(pa.schema([("id", pa.int64())]), pa.schema([("text", pa.string())]))
count = 400_000
slots = np.sort(np.random.default_rng(1).integers(0, 2**52, count, dtype=np.uint64))
refs = []
for part in range(2):
    writer = SegmentWriter(home.storage, "e/shard_0/op", layout, operator="op", epoch=1)
    for start in range(0, count, 10_000):
        ids = np.arange(start, start + 10_000) * 2 + part
        state = pa.table({"text": pa.array([f"{i:0100d}" for i in ids])})
        writer.write(layout.table(slots[start : start + 10_000], pa.table({"id": ids}), state))
    refs.append(writer.close())
merged = merge_segments(home, refs, (0, 16), "e/shard_0/m", operator="op", epoch=2, with_oldest=True, rows=20_000)
assert merged.rows == 2 * count, merged
print(merged.size_bytes, pa.default_memory_pool().max_memory())
"""


def test_memory_is_bounded_however_large_the_runs_are(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LARGE_MERGE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, most = map(int, done.stdout.split())
    assert size > 90_000_000
    assert most < 45_000_000
