"""Statistics and partition values in the log, against what DuckDB computes from the files."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from firnline.options import FieldOptions, PipelineOptions, SchemaOptions
from tests.support.damage import commit_files
from tests.support.pipelines import MakeOptions, run_once

FIELDS = SchemaOptions(
    fields=(
        FieldOptions("id", "int64"),
        FieldOptions("small", "int32"),
        FieldOptions("f", "float64"),
        FieldOptions("s", "string"),
        FieldOptions("long_text", "string"),
        FieldOptions("b", "boolean"),
        FieldOptions("d", "decimal(18,4)"),
        FieldOptions("ts", "timestamp"),
        FieldOptions("day", "date"),
        FieldOptions("geo", "struct<lat: float64, name: string, deep: struct<n: int64>>"),
        FieldOptions("tags", "list<string>"),
        FieldOptions("nothing", "string"),
    )
)


INF, NAN = float("inf"), float("nan")


def record(number: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": number - 50,
        "small": number % 7,
        "f": number / 3 - 10,
        "s": f"ä{number:03d}😀" if number % 5 else None,
        "long_text": "x" * 40 + f"{number:04d}",
        "b": number % 2 == 0,
        "d": f"{number}.{number:04d}",
        "ts": f"2026-03-{number % 28 + 1:02d}T10:11:12.{123456 + number:06d}Z",
        "day": f"2026-04-{number % 28 + 1:02d}",
        "tags": ["a", None],
    }
    if number % 3:
        row["geo"] = {"lat": number * 1.5, "deep": {"n": number} if number % 2 else None}
    if number % 11 == 0:
        del row["f"]
    return row


def adds(table: str | Path) -> list[dict[str, Any]]:
    found = []
    for path in commit_files(table):
        for line in path.read_text().splitlines():
            if "add" in json.loads(line):
                found.append(json.loads(line)["add"])
    return found


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


PATHS = {
    "id": "id", "small": "small", "f": "f", "s": "s", "long_text": "long_text", "d": "d", "ts": "ts", "day": "day",
    "geo.lat": "geo.lat", "geo.deep.n": "geo.deep.n", "geo.name": "geo.name", "nothing": "nothing",
}  # fmt: skip


def dig(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def comparable(bound: Any, true: Any) -> Any:
    """A bound as the log writes it, as a value of the column's type."""
    if bound is None or true is None:
        return bound
    if isinstance(true, datetime):
        return datetime.fromisoformat(bound)
    if isinstance(true, date):
        return date.fromisoformat(bound)
    if isinstance(true, Decimal):
        return Decimal(str(bound))
    if isinstance(true, float):
        return float(bound)
    return bound


def test_statistics_are_true(tmp_path: Path, make_options: MakeOptions) -> None:
    for number in range(4):
        write(tmp_path / "in", f"{number}.json", [record(number * 100 + k) for k in range(100)])
    options: PipelineOptions = make_options(schema=FIELDS, max_files=1)
    assert run_once(options).exit_code == 0
    found = adds(options.sinks[0].location)
    assert len(found) == 4
    for add in found:
        stats = json.loads(add["stats"], parse_float=Decimal)
        file = str(Path(options.sinks[0].location) / add["path"])
        assert stats["numRecords"] == 100
        for column in PATHS:
            query = f"select min({column}), max({column}), count(*) - count({column}) from read_parquet('{file}')"
            connection = duckdb.connect()
            connection.execute("set timezone = 'UTC'")
            low, high, nulls = connection.execute(query).fetchall()[0]
            assert dig(stats["nullCount"], column) == nulls, column
            found_low, found_high = dig(stats["minValues"], column), dig(stats["maxValues"], column)
            if low is None:
                assert found_low is None and found_high is None, column  # noqa: PT018
                continue
            if isinstance(low, datetime):
                low, high = low.astimezone(), high.astimezone()
            assert comparable(found_low, low) <= low, column
            assert comparable(found_high, high) >= high, column
            if isinstance(low, int | Decimal):
                assert (comparable(found_low, low), comparable(found_high, high)) == (low, high), column
        assert "tags" not in stats["minValues"]


def test_skipping_by_statistics_loses_nothing(tmp_path: Path, make_options: MakeOptions) -> None:
    """A reader that skips files by their bounds finds every row that a reader of everything finds."""
    import pyarrow.compute as pc

    for number in range(4):
        write(tmp_path / "in", f"{number}.json", [record(number * 100 + k) for k in range(100)])
    options: PipelineOptions = make_options(schema=FIELDS, max_files=1)
    assert run_once(options).exit_code == 0
    table = DeltaTable(options.sinks[0].location)
    everything = table.to_pyarrow_table().to_pylist()
    dataset = table.to_pyarrow_dataset()
    for column in ("id", "f", "s", "long_text", "d", "ts", "day"):
        for value in {row[column] for row in everything[::17] if row[column] is not None}:
            expected = sum(1 for row in everything if row[column] == value)
            scalar = pa.scalar(value, table.to_pyarrow_table().schema.field(column).type)
            assert dataset.to_table(filter=pc.field(column) == scalar).num_rows == expected, (column, value)


def test_infinite_and_huge_numbers_leave_valid_statistics(tmp_path: Path, make_options: MakeOptions) -> None:
    rows = '{"id":1,"x":1e308}\n{"id":2,"x":-1e308}\n{"id":3,"x":1e999}\n{"id":4,"x":-0.0}\n'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text(rows)
    options: PipelineOptions = make_options()
    assert run_once(options).exit_code == 0
    for add in adds(options.sinks[0].location):
        json.loads(add["stats"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert DeltaTable(options.sinks[0].location).to_pyarrow_table().num_rows == 4


@pytest.mark.parametrize(
    "values", [[INF, 1.0], [-INF, 1.0], [INF], [-INF], [NAN], [NAN, 1.0], [NAN, -INF, None], [1.0, None, 2.0]]
)
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_floats_that_are_no_numbers_leave_a_readable_table(
    tmp_path: Path, make_options: MakeOptions, values: list[float | None], kind: pa.DataType
) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"x": pa.array(values, kind)}), tmp_path / "in" / "a.parquet")
    options: PipelineOptions = make_options(format="parquet")
    assert run_once(options).exit_code == 0
    (add,) = adds(options.sinks[0].location)
    stats = json.loads(add["stats"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    bounds = (stats["minValues"].get("x"), stats["maxValues"].get("x"))
    assert bounds == ((1.0, 2.0) if values == [1.0, None, 2.0] else (None, None))
    assert str(DeltaTable(options.sinks[0].location).to_pyarrow_table().column("x").to_pylist()) == str(values)


ODD = [
    "plain",
    "with space",
    "a/b",
    "a=b",
    "100%",
    "ü😀",
    "quote'\"",
    "a:b",
    "#?&",
    "..",
    "x" * 200,
    "%2F",
    "a\nb",
    " ",
]


def test_partition_values_read_back(tmp_path: Path, make_options: MakeOptions) -> None:
    rows: list[dict[str, Any]] = [{"id": n, "p": value} for n, value in enumerate(ODD)]
    rows += [{"id": 100, "p": None}, {"id": 101}, {"id": 102, "p": ""}]
    write(tmp_path / "in", "a.json", rows)
    options: PipelineOptions = make_options(partition_by=("p",))
    assert run_once(options).exit_code == 0
    found = {row["id"]: row["p"] for row in DeltaTable(options.sinks[0].location).to_pyarrow_table().to_pylist()}
    expected: dict[int, Any] = dict(enumerate(ODD))
    expected |= {100: None, 101: None, 102: None}  # Delta knows no empty partition value: it reads as null
    assert found == expected
    dataset = DeltaTable(options.sinks[0].location).to_pyarrow_dataset()
    rows_by_duckdb = duckdb.from_arrow(dataset).project("id, p").fetchall()
    assert dict(rows_by_duckdb) == expected
    for add in adds(options.sinks[0].location):
        assert "p" not in json.loads(add["stats"])["minValues"]


TYPED: dict[str, tuple[str, list[Any], list[Any]]] = {
    "int64": ("int64", [1, -5, None], [1, -5, None]),
    "boolean": ("boolean", [True, False, None], [True, False, None]),
    "date": ("date", ["2026-01-02", "1969-12-31", None], [date(2026, 1, 2), date(1969, 12, 31), None]),
    "decimal": ("decimal(10,2)", ["1.50", "0.01", None], [Decimal("1.50"), Decimal("0.01"), None]),
    "float64": ("float64", [1.5, -2.25, None], [1.5, -2.25, None]),
}


@pytest.mark.parametrize("kind", TYPED)
def test_typed_partition_values_read_back(tmp_path: Path, make_options: MakeOptions, kind: str) -> None:
    declared, values, expected = TYPED[kind]
    write(tmp_path / "in", "a.json", [{"id": n, "p": value} for n, value in enumerate(values)])
    fields = SchemaOptions(fields=(FieldOptions("id", "int64"), FieldOptions("p", declared)))
    options: PipelineOptions = make_options(partition_by=("p",), schema=fields)
    assert run_once(options).exit_code == 0
    rows = DeltaTable(options.sinks[0].location).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["p"] for row in rows} == dict(enumerate(expected))


def test_negative_decimal_partition_value(tmp_path: Path, make_options: MakeOptions) -> None:
    """Looked at in the log itself: delta-rs 1.6 reads -0.01 as `0.-1` and fails."""
    write(tmp_path / "in", "a.json", [{"id": 1, "p": "-0.01"}])
    fields = SchemaOptions(fields=(FieldOptions("id", "int64"), FieldOptions("p", "decimal(10,2)")))
    options: PipelineOptions = make_options(partition_by=("p",), schema=fields)
    assert run_once(options).exit_code == 0
    assert [add["partitionValues"] for add in adds(options.sinks[0].location)] == [{"p": "-0.01"}]


def test_timestamp_partition_reads_back(tmp_path: Path, make_options: MakeOptions) -> None:
    write(
        tmp_path / "in", "a.json", [{"id": 1, "p": "2026-01-02T03:04:05Z"}, {"id": 2, "p": "2026-01-02T03:04:05.25Z"}]
    )
    fields = SchemaOptions(fields=(FieldOptions("id", "int64"), FieldOptions("p", "timestamp")))
    options: PipelineOptions = make_options(partition_by=("p",), schema=fields)
    assert run_once(options).exit_code == 0
    rows = DeltaTable(options.sinks[0].location).to_pyarrow_table().to_pylist()
    found = {row["id"]: row["p"].isoformat() for row in rows}
    assert found == {1: "2026-01-02T03:04:05+00:00", 2: "2026-01-02T03:04:05.250000+00:00"}


@pytest.mark.parametrize("name", ["größe", "a/b", "a%b", "a.b", "a-b"])
def test_odd_partition_column_names(tmp_path: Path, make_options: MakeOptions, name: str) -> None:
    write(tmp_path / "in", "a.json", [{"id": 1, name: "x"}, {"id": 2, name: "y"}])
    options: PipelineOptions = make_options(partition_by=(name,))
    assert run_once(options).exit_code == 0
    rows = DeltaTable(options.sinks[0].location).to_pyarrow_table().to_pylist()
    assert {row["id"]: row[name] for row in rows} == {1: "x", 2: "y"}


def test_columns_from_folders(tmp_path: Path, make_options: MakeOptions) -> None:
    write(tmp_path / "in", "x", [])
    (tmp_path / "in" / "x").unlink()
    for number, folder in enumerate(("day=2026-11-01", "day=__HIVE_DEFAULT_PARTITION__", "day=a%20b")):
        (tmp_path / "in" / folder).mkdir()
        write(tmp_path / "in" / folder, "a.json", [{"id": number}])
    options: PipelineOptions = make_options(partition_by=("day",))
    assert run_once(options).exit_code == 0
    rows = DeltaTable(options.sinks[0].location).to_pyarrow_table().to_pylist()
    assert {row["id"]: row["day"] for row in rows} == {0: "2026-11-01", 1: None, 2: "a b"}
