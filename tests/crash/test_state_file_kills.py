"""Killed while a file of state is written or repaired: what was there stays whole, and the next try succeeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from firnline.state.columns import Layout
from firnline.state.home import StateHome
from firnline.state.keys import locate
from firnline.state.lookup import scan
from firnline.state.manifest import SegmentRef
from firnline.state.merge import merge_segments
from firnline.state.segments import open_segments, write_segment
from firnline.state.timers import due_slots, write_timers
from tests.support.kills import kill

pytestmark = pytest.mark.crash

LAYOUT = Layout(pa.schema([("id", pa.int64())]), pa.schema([("n", pa.int64())]))


def write(root: str, n: int) -> SegmentRef:
    keys = pa.table({"id": np.arange(n, n + 100)})
    table = LAYOUT.table(locate(keys, 1, 8).slots, keys, pa.table({"n": np.full(100, n)}))
    return write_segment(StateHome(root).storage, "e/shard_0/op", table, LAYOUT, operator="op", epoch=n)


def merge(root: str, refs: list[SegmentRef]) -> SegmentRef:
    merged = merge_segments(StateHome(root), refs, (0, 8), "e/shard_0/m", operator="op", epoch=9, with_oldest=True)
    assert merged is not None
    return merged


def set_timers(root: str) -> None:
    storage = StateHome(root).storage
    write_timers(storage, "e/shard_0/op", np.arange(9), np.arange(9, dtype=np.uint64), operator="op", epoch=1)


def content(home: StateHome, refs: list[SegmentRef]) -> dict[int, int]:
    return {r["id"]: r["n"] for t in scan(open_segments(home, refs), (0, 8), LAYOUT) for r in t.to_pylist()}


def open_all(home: StateHome, refs: list[SegmentRef]) -> None:
    content(home, refs)


@pytest.mark.parametrize("point", ["state.run.before", "state.run.after"])
def test_a_killed_write_or_merge_leaves_what_is_named_whole(tmp_path: Path, point: str) -> None:
    root = str(tmp_path / "home")
    home = StateHome(root)
    refs = [write(root, 1), write(root, 51)]
    wanted = content(home, refs)
    named = {ref.path: (tmp_path / "home" / ref.path).read_bytes() for ref in refs}
    kill(f"{point}:1", write, root, 2)
    kill(f"{point}:1", merge, root, refs)
    assert {path: (tmp_path / "home" / path).read_bytes() for path in named} == named
    assert content(home, refs) == wanted
    assert content(home, [merge(root, refs)]) == wanted
    assert content(home, [*refs, write(root, 2)])[2] == 2


@pytest.mark.parametrize("point", ["state.timers.before", "state.timers.after"])
def test_a_killed_write_of_timers_harms_none(tmp_path: Path, point: str) -> None:
    root = str(tmp_path / "home")
    home = StateHome(root)
    ref = write_timers(home.storage, "e/shard_0/op", np.array([5]), np.array([7], np.uint64), operator="op", epoch=1)
    assert ref is not None
    kill(f"{point}:1", set_timers, root)
    assert due_slots(home, [ref], 5, (0, 8)).tolist() == [7]


@pytest.mark.parametrize("point", ["state.repair.before", "state.repair.after"])
def test_a_killed_repair_is_done_again(tmp_path: Path, point: str) -> None:
    home = StateHome(str(tmp_path / "home"), fallback=StateHome(str(tmp_path / "remote")))
    refs = [write(home.root, 1)]
    path = tmp_path / "home" / refs[0].path
    data = path.read_bytes()
    StateHome(str(tmp_path / "remote")).storage.put(refs[0].path, data)
    path.write_bytes(data[:100])
    kill(f"{point}:1", open_all, home, refs)
    assert path.read_bytes() in (data[:100], data)
    assert len(content(home, refs)) == 100
    assert path.read_bytes() == data
