"""What an upsert decides before it writes: which change counts, which rows it meets, which files may hold them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

import firnline.operators.base as operators
from firnline import options
from firnline.errors import DamagedError, SchemaError, SinkError
from firnline.sinks.delta import kind as delta
from firnline.sinks.delta.stage import ChangeStager, ParquetStager
from firnline.sinks.delta.upsert.changes import Changes, KeyIndex, comparable, load_changes
from firnline.sinks.delta.upsert.prune import KeyRanges, after_prefix
from firnline.sinks.delta.upsert.rewrite import (
    FileToRewrite,
    RewriteReport,
    RewriteTask,
    RewrittenFile,
    pack_indices,
    unpack_indices,
)
from firnline.sinks.registry import open_stager
from firnline.storage import open_storage
from firnline.types import Json
from tests.support.upserts import changes

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
DAY = datetime(2026, 3, 1, tzinfo=UTC)


def target(folder: Path, write: str = "upsert", **settings: Json) -> dict[str, Json]:
    plain = {
        "type": "delta",
        "sink": "out",
        "table": str(folder),
        "storage_options": {},
        "partition_by": [],
        "file_size_bytes": 8 * 1024 * 1024,
        "pipeline": "demo",
    }
    return {**plain, "shape": {"write": write, "key": ["id"]}, **settings}


def staged(folder: Path, *batches: pa.RecordBatch) -> list[dict[str, Json]]:
    found = []
    for batch in batches:
        stager = open_stager(target(folder), "0123456789abcdef")
        stager.write(batch)
        found += stager.close()
    return found


def load(folder: Path, *batches: pa.RecordBatch, key: Sequence[str] = ("id",)) -> Changes:
    return load_changes(open_storage(str(folder)), staged(folder, *batches), key, ())


# -- staging ------------------------------------------------------------------------------------------


def test_the_words_of_a_changelog_are_those_of_the_operators() -> None:
    assert (options.OP, options.SEQUENCE) == (operators.OP, operators.SEQUENCE)


def test_changes_are_staged_outside_the_data_and_say_what_they_are(tmp_path: Path) -> None:
    (file,) = staged(tmp_path, changes([{"id": 1}], SCHEMA))
    assert file["path"].startswith("_firnline/demo/changes/0123456789abcdef-")
    assert (file["kind"], file["rows"], file["partition_values"]) == ("changes", 1, {})
    path = tmp_path / file["path"]
    assert path.stat().st_size == file["size_bytes"]
    assert pq.read_table(path).num_rows == 1


def test_the_target_picks_the_stager(tmp_path: Path) -> None:
    assert type(delta.open_stager(target(tmp_path), "a")) is ChangeStager
    assert type(delta.open_stager(target(tmp_path, write="append"), "a")) is ParquetStager


def test_changes_are_not_split_by_partition_and_can_be_discarded(tmp_path: Path) -> None:
    stager = open_stager(target(tmp_path, partition_by=["v"]), "0123456789abcdef")
    stager.write(changes([{"id": 1, "v": "a"}, {"id": 2, "v": "b"}], SCHEMA))
    (file,) = stager.close()
    assert pq.read_table(tmp_path / file["path"]).column("v").to_pylist() == ["a", "b"]
    stager.discard()
    assert not list(tmp_path.rglob("*.parquet"))


# -- which change counts ------------------------------------------------------------------------------


def test_the_highest_sequence_wins_then_the_later_row(tmp_path: Path) -> None:
    first = changes([{"id": 1, "v": "a", "_sequence": 5}, {"id": 2, "v": "b"}, {"id": 2, "v": "c"}], SCHEMA)
    second = changes([{"id": 1, "v": "d", "_sequence": 4}, {"id": 2, "_op": "delete"}, {"id": 3, "v": "e"}], SCHEMA)
    found = load(tmp_path, first, second)
    assert found.keys.column("id").to_pylist() == [1, 2, 3]
    assert found.keeps.tolist() == [True, False, True]
    assert found.rows.column("v").to_pylist() == ["a", None, "e"]
    assert found.rows.column_names == ["id", "v"]


def test_the_row_before_is_not_a_column_of_the_table(tmp_path: Path) -> None:
    batch = changes([{"id": 1, "v": "a"}], SCHEMA).append_column("_before", pa.array([{"id": 1}]))
    assert load(tmp_path, batch).rows.column_names == ["id", "v"]


def test_files_may_have_different_columns(tmp_path: Path) -> None:
    wide = pa.schema([*SCHEMA, ("w", pa.int64())])
    found = load(tmp_path, changes([{"id": 1, "v": "a"}], SCHEMA), changes([{"id": 2, "w": 7}], wide))
    assert found.rows.column("w").to_pylist() == [None, 7]


@pytest.mark.parametrize("operation", ["upsert", None])
def test_an_unknown_operation_is_refused(tmp_path: Path, operation: str | None) -> None:
    with pytest.raises(SchemaError, match="_op"):
        load(tmp_path, changes([{"id": 1, "_op": operation}], SCHEMA))


def test_plain_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="_op"):
        load(tmp_path, pa.RecordBatch.from_pylist([{"id": 1}]))


def test_a_key_must_be_a_column_of_a_plain_type(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="'other'"):
        load(tmp_path, changes([{"id": 1}], SCHEMA), key=["other"])
    nested = pa.schema([("id", pa.list_(pa.int64()))])
    with pytest.raises(SchemaError, match="cannot identify"):
        load(tmp_path, changes([{"id": [1]}], nested))


def test_rot_in_a_change_file_is_detected_byte_by_byte(tmp_path: Path) -> None:
    files = staged(tmp_path, changes([{"id": 1, "v": "a"}], SCHEMA))
    path = tmp_path / files[0]["path"]
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DamagedError):
            load_changes(open_storage(str(tmp_path)), files, ["id"], ())
    path.unlink()
    with pytest.raises(SinkError):
        load_changes(open_storage(str(tmp_path)), files, ["id"], ())


# -- which rows it meets ------------------------------------------------------------------------------

KINDS: dict[pa.DataType, list[Any]] = {
    pa.int64(): [-(2**63), -1, 0, 1, 2**53 + 1, 2**63 - 1],
    pa.string(): ["", "a", "b", "ä", "😀", "a" * 40],
    pa.binary(): [b"", b"a", b"\0"],
    pa.bool_(): [True, False],
    pa.float64(): [0.0, -0.0, 1.5, math.nan, math.inf],
    pa.date32(): [date(1960, 1, 1), date(2026, 1, 1)],
    pa.timestamp("us", "UTC"): [DAY, DAY + timedelta(microseconds=1)],
    pa.decimal128(20, 4): [Decimal("1.5"), Decimal("-2.25")],
}


def plain(value: Any) -> Any:
    """A key as Python compares it."""
    return "nan" if isinstance(value, float) and math.isnan(value) else value


@given(data=st.data(), kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=3))
def test_rows_are_found_exactly_and_nulls_are_equal(data: st.DataObject, kinds: list[pa.DataType]) -> None:
    row = st.tuples(*(st.sampled_from([None, *KINDS[kind]]) for kind in kinds))
    rows = data.draw(st.lists(row, max_size=20))
    names = [f"k{number}" for number in range(len(kinds))]

    def columns(of: Sequence[tuple[Any, ...]]) -> list[pa.Array]:
        return [comparable(pa.array([r[n] for r in of], kind), False) for n, kind in enumerate(kinds)]

    changed = list({tuple(map(plain, r)): r for r in data.draw(st.lists(row, min_size=1, max_size=12))}.values())
    numbers = {tuple(map(plain, r)): number for number, r in enumerate(changed)}
    found, which = KeyIndex(pa.table(columns(changed), names=names)).find(columns(rows))
    wanted = [(n, numbers[key]) for n, r in enumerate(rows) if (key := tuple(map(plain, r))) in numbers]
    assert list(zip(found.tolist(), which.tolist(), strict=True)) == wanted


@given(st.sets(st.integers(0, 2**40)))
def test_packed_numbers_come_back(numbers: set[int]) -> None:
    ascending = np.array(sorted(numbers), np.int64)
    assert unpack_indices(pack_indices(ascending)).tolist() == ascending.tolist()


# -- which files may hold them ------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_nothing_that_begins_with_a_prefix_lies_above_its_successor(prefix: str, rest: str) -> None:
    successor = after_prefix(prefix)
    assert (successor is None) == (prefix.strip("\U0010ffff") == "")
    assert successor is None or prefix <= prefix + rest < successor


def candidates(folder: Path, keys: pa.Table, partition_by: Sequence[str] = ()) -> set[str]:
    found, _ = KeyRanges(keys, partition_by).find_candidates(DeltaTable(folder))
    return {file.path for file in found}


def holders(folder: Path, column: str, values: set[Any]) -> set[str]:
    """The files that really hold one of the values."""
    paths = pa.table(DeltaTable(folder).get_add_actions()).column("path").to_pylist()
    return {p for p in paths if values & set(pq.ParquetFile(folder / p).read().column(column).to_pylist())}


VALUES: dict[pa.DataType, Any] = {
    pa.int64(): lambda rng: rng.choice([rng.randint(-50, 50), 2**53 + rng.randint(0, 3)]),
    pa.string(): lambda rng: rng.choice(["", "ä", "😀", "x" * 31, "y" * 45]) + chr(rng.randint(97, 122)),
    pa.timestamp("us", "UTC"): lambda rng: DAY + timedelta(microseconds=rng.randint(-3000, 3000)),
    pa.date32(): lambda rng: date(2026, 1, 1) + timedelta(days=rng.randint(0, 60)),
    pa.decimal128(20, 4): lambda rng: Decimal(rng.randint(0, 99)) / 4,
    pa.float64(): lambda rng: rng.choice([math.nan, 0.0, -0.0, rng.random()]),
}


@pytest.mark.parametrize("kind", list(VALUES), ids=str)
def test_no_file_that_holds_a_key_is_pruned(tmp_path: Path, kind: pa.DataType) -> None:
    """With the statistics of another writer, which cuts times to milliseconds."""
    rng = random.Random(str(kind))
    stored: list[Any] = []
    for _ in range(12):
        rows = [rng.choice([None, VALUES[kind](rng), VALUES[kind](rng)]) for _ in range(rng.randint(1, 4))]
        write_deltalake(tmp_path, pa.table({"k": pa.array(rows, kind)}), mode="append")
        stored += rows
    for value in stored:  # each stored value by itself: a bound that is off by the least must show
        wanted = {value, *(rng.choice([None, VALUES[kind](rng)]) for _ in range(rng.randint(0, 1)))}
        keys = pa.table({"k": comparable(pa.array(list(wanted), kind), False)})
        assert holders(tmp_path, "k", wanted) <= candidates(tmp_path, keys)


def test_files_without_overlap_are_pruned_by_any_column(tmp_path: Path) -> None:
    for first in (0, 100, 200):
        rows = {"a": list(range(first, first + 10)), "b": [f"t{first + n:03d}" for n in range(10)]}
        write_deltalake(tmp_path, pa.table(rows), mode="append")
    assert len(candidates(tmp_path, pa.table({"a": [5, 105]}))) == 2
    assert len(candidates(tmp_path, pa.table({"a": [50, 300]}))) == 0
    assert len(candidates(tmp_path, pa.table({"a": [5], "b": ["t205"]}))) == 0
    assert len(candidates(tmp_path, pa.table({"a": pa.array([None], pa.int64())}))) == 0


def test_nulls_are_found_by_their_count(tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"a": pa.array([None, None], pa.int64())}), mode="append")
    write_deltalake(tmp_path, pa.table({"a": pa.array([1, None], pa.int64())}), mode="append")
    write_deltalake(tmp_path, pa.table({"a": pa.array([1, 2], pa.int64())}), mode="append")
    assert len(candidates(tmp_path, pa.table({"a": pa.array([None], pa.int64())}))) == 2
    assert len(candidates(tmp_path, pa.table({"a": pa.array([1], pa.int64())}))) == 2


def test_partitions_are_pruned_by_their_values(tmp_path: Path) -> None:
    rows = {"p": ["x", "y", None], "a": [1, 1, 1]}
    write_deltalake(tmp_path, pa.table(rows), partition_by=["p"])
    assert len(candidates(tmp_path, pa.table({"p": ["x"], "a": [1]}), ["p"])) == 1
    assert len(candidates(tmp_path, pa.table({"p": pa.array([None], pa.string()), "a": [1]}), ["p"])) == 1
    assert len(candidates(tmp_path, pa.table({"a": [1]}), ["p"])) == 3


def test_a_file_without_statistics_is_a_candidate(tmp_path: Path) -> None:
    table = {"delta.dataSkippingNumIndexedCols": "0"}
    write_deltalake(tmp_path, pa.table({"a": [1]}), configuration=table)
    assert len(candidates(tmp_path, pa.table({"a": [99]}))) == 1


def test_row_groups_are_pruned_by_the_footer(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    pq.write_table(pa.table({"a": list(range(100))}), path, row_group_size=10)
    ranges = KeyRanges(pa.table({"a": [5, 51, 52]}), ())
    types = pa.schema([("a", pa.int64())])
    assert ranges.find_row_groups(pq.ParquetFile(path).metadata, types) == [0, 5]


def test_a_rewriting_task_and_its_report_survive_the_way_to_a_worker() -> None:
    numbers = np.array([0, 3, 9])
    file = FileToRewrite("p=1/a.parquet", 10, None, {"p": "1"}, numbers)
    task = RewriteTask(
        type="delta",
        attempt="a1",
        table="/table",
        storage_options={"region": "x"},
        partition_by=("p",),
        key=("k",),
        file_size_bytes=64 * 1024 * 1024,
        changes=({"path": "c.parquet", "crc32": 7},),
        schema=pa.schema([pa.field("k", pa.string()), pa.field("p", pa.string())]),
        files=(file,),
    )
    for sent in (task, replace(task, files=(), insert=numbers)):
        received = RewriteTask.from_json(json.loads(json.dumps(sent.to_json())))
        assert received.to_json() == sent.to_json()
        assert received.schema == sent.schema
    report = RewriteReport((RewrittenFile("a", [{"path": "b", "rows": 1}], numbers, numbers[:1]),), ({"path": "c"},))
    assert RewriteReport.from_json(json.loads(json.dumps(report.to_json()))).to_json() == report.to_json()
