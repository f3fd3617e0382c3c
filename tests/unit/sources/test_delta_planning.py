"""How a slice of a Delta source is cut and distributed, and what a commit means."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import DamagedError, SchemaError
from firnline.sources.base import Limits
from firnline.sources.delta.planning import TASK_BYTES, Slice, deal, rows_of, settle
from firnline.sources.delta.position import TRAIL, DeltaPosition
from firnline.sources.delta.reader import partition_scalar
from firnline.sources.delta.versions import Kind, changed_files, read_version

LIMITS = Limits(max_files=100, max_bytes=1 << 40, max_events=10**9, max_ms=1000, max_output_files=100, parallelism=4)


def item(rows: int, size: int, number: int = 0) -> dict[str, Any]:
    return {"path": f"{number}", "version": 1, "file": number, "size_bytes": size, "from": 0, "to": rows, "rows": rows}


def test_a_large_file_is_cut_between_row_groups() -> None:
    groups = list(range(0, 1000, 100))
    splits = deal([item(1000, 8 * TASK_BYTES)], LIMITS, lambda _: groups)
    parts = [(part["from"], part["to"]) for split in splits for part in split.inputs]
    assert len(splits) == 8
    assert parts[0][0] == 0
    assert parts[-1][1] == 1000
    assert all(a[1] == b[0] and a[1] in groups for a, b in itertools.pairwise(parts))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 5), st.data())
def test_what_a_slice_and_its_outcomes_leave_is_the_rest(
    sizes: list[int], most: int, parallelism: int, data: st.DataObject
) -> None:
    limits = replace(LIMITS, max_events=most, parallelism=parallelism)
    chosen = Slice(limits)
    files = [item(rows, rows * 10, number) for number, rows in enumerate(sizes)]
    waiting = [file for file in files if not chosen.take(file)]
    assert sum(rows_of(part) or 0 for part in chosen.items) <= most
    splits = deal(chosen.items, limits, lambda _: [])
    outcomes = []
    for split in splits:
        for part in split.inputs:
            to = data.draw(st.integers(part["from"], part["to"]))
            outcomes.append({"part": part["part"], "to": to, "finished": to == part["to"]})
            if to < part["to"]:
                break
    records, left = settle(splits, outcomes)
    read = [(record["path"], row) for record in records for row in range(record["from"], record["to"])]
    rest = [(part["path"], row) for part in [*left, *chosen.left, *waiting] for row in range(part["from"], part["to"])]
    assert sorted(read + rest) == sorted((file["path"], row) for file in files for row in range(file["to"]))


def test_a_position_survives_json_and_remembers_the_newest_epochs() -> None:
    position = DeltaPosition("/t", "id", 7, reading=9, files=2, changes=True, since=3, left=(item(1, 1),), ignored=4)
    for epoch in range(1, 2 * TRAIL):
        position = position.with_epoch(epoch)
    assert len(position.trail) == TRAIL
    assert position.trail[-1] == (2 * TRAIL - 1, 9)
    assert DeltaPosition.from_json(json.loads(json.dumps(position.to_json()))) == position
    with pytest.raises(DamagedError):
        DeltaPosition.from_json({"table": "/t", "table_id": None, "version": "x"})


def commit(info: dict[str, Any], *actions: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"commitInfo": {"timestamp": 5, **info}}, *actions]


ADD = {"add": {"path": "a", "size": 3, "dataChange": True, "partitionValues": {}, "stats": '{"numRecords": 2}'}}
REMOVE = {"remove": {"path": "b", "size": 3, "dataChange": True, "partitionValues": {}}}
MOVED = ({"add": {**ADD["add"], "dataChange": False}}, {"remove": {**REMOVE["remove"], "dataChange": False}})


@pytest.mark.parametrize(
    ("actions", "kind", "parent"),
    [
        (commit({"operation": "WRITE"}, ADD), Kind.APPEND, 6),
        (commit({"operation": "OPTIMIZE"}, *MOVED), Kind.EMPTY, 6),
        (commit({"operation": "MERGE"}, ADD, REMOVE), Kind.CHANGE, 6),
        (commit({"operation": "DELETE"}, REMOVE), Kind.CHANGE, 6),
        (commit({"operation": "RESTORE", "operationParameters": {"version": "3"}}, ADD, REMOVE), Kind.UNDO, 3),
        (commit({"operation": "RESTORE", "operationParameters": {"version": 3}}), Kind.UNDO, 3),
        (commit({"operation": "RESTORE", "operationParameters": {"timestamp": "x"}}, ADD, REMOVE), Kind.CHANGE, 6),
        (commit({"firnline": '{"kind":"fresh","pipeline":"p","epoch":4}'}, REMOVE), Kind.REPLACE, -1),
        (
            commit({"firnline": '{"kind":"epoch","pipeline":"p","epoch":4,"widened":["v"]}'}, ADD, REMOVE),
            Kind.APPEND,
            6,
        ),
        (commit({"firnline": '{"kind":"claim","pipeline":"p"}'}), Kind.EMPTY, 6),
        ([], Kind.EMPTY, 6),
    ],
)
def test_what_a_commit_means(actions: list[dict[str, Any]], kind: Kind, parent: int) -> None:
    version = read_version(7, actions)
    assert (version.kind, version.parent) == (kind, parent)


def test_old_rows_come_before_new_ones() -> None:
    feed = {"cdc": {"path": "c", "size": 1, "partitionValues": {}}}
    actions = commit({"operation": "UPDATE"}, ADD, REMOVE, feed)
    files = changed_files("/t", read_version(7, actions), actions)
    assert [(file["path"], file["change"]) for file in files] == [("c", "old"), ("c", "new")]
    files = changed_files("/t", read_version(7, actions[:3]), actions[:3])
    assert [(file["path"], file["change"]) for file in files] == [("b", "delete"), ("a", "insert")]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("7", pa.int32(), 7),
        ("2024-05-01", pa.date32(), "2024-05-01"),
        ("2024-05-01 01:02:03.5", pa.timestamp("us", "UTC"), "2024-05-01 01:02:03.500000+00:00"),
        ("2024-05-01T01:02:03Z", pa.timestamp("us", "UTC"), "2024-05-01 01:02:03+00:00"),
        ("true", pa.bool_(), True),
        ("1.50", pa.decimal128(9, 2), "1.50"),
        ("", pa.string(), None),
        (None, pa.int64(), None),
    ],
)
def test_partition_values(text: str | None, kind: pa.DataType, value: Any) -> None:
    found = partition_scalar(text, kind, "c").as_py()
    assert (str(found) if isinstance(value, str) else found) == value


def test_a_partition_value_that_does_not_fit_is_named() -> None:
    with pytest.raises(SchemaError, match="c=x"):
        partition_scalar("x", pa.int64(), "c")
