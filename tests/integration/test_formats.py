"""Files of every format into a table: each record once, wherever files are cut; broken files and odd values apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from firnline.errors import BadRecordsError
from firnline.history.status import load_files
from firnline.options import FieldOptions, PipelineOptions, SchemaOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.files.options import CsvOptions
from firnline.testing.sources import LIMITS, SourceDriver
from firnline.types import RandomIds
from tests.support.formats import FORMATS, encode, parquet_bytes
from tests.support.pipelines import checkpoint_of, file_source, pipeline_options, run_once, run_to_end, run_until_epoch
from tests.support.samples import quarantined, table_rows

Name = Literal["ndjson", "json", "csv", "parquet"]


class Folder:
    """A folder of files of one format, and the table that a pipeline writes."""

    def __init__(self, root: Path, name: Name = "ndjson") -> None:
        self.folder, self.table, self.format = root / "in", root / "out", name
        self.folder.mkdir()

    def options(self, **settings: Any) -> PipelineOptions:
        return pipeline_options(str(self.folder), str(self.table), **{"format": self.format, **settings})

    def add(self, name: str, first: int, count: int) -> Path:
        records = [{"id": number, "v": f"v{number}"} for number in range(first, first + count)]
        return self.put(name, encode(self.format, records))

    def put(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def rows(self) -> list[dict[str, Any]]:
        return sorted(table_rows(self.table), key=lambda row: int(row["id"]))

    def ids(self) -> Counter[int]:
        return Counter(row["id"] for row in table_rows(self.table))

    def status(self) -> dict[str, tuple[str, str | None]]:
        rows = load_files(open_pipeline(self.options()))
        return {Path(row["path"]).name: (row["status"], row["reason"]) for row in rows}


@pytest.fixture(params=FORMATS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    return Folder(tmp_path, request.param)


def test_files_are_cut_by_the_limit_and_go_on_exactly_there(folder: Folder) -> None:
    folder.add("a", 0, 10)
    folder.add("b", 10, 5)
    options = folder.options(max_events=4, lineage=True)
    run = run_once(options)
    assert run.exit_code == 0
    assert [epoch.records for epoch in run.told.epochs] == [4, 4, 4, 3]
    rows = folder.rows()
    assert [row["id"] for row in rows] == list(range(15))
    assert [row["_firnline_record"] for row in rows] == [*range(10), *range(5)]
    assert [Path(row["_firnline_file"]).name for row in rows] == ["a"] * 10 + ["b"] * 5
    assert [row["v"] for row in rows] == [f"v{number}" for number in range(15)]
    assert run_once(options).result.epochs == 0


def test_a_late_file_is_read(folder: Folder) -> None:
    folder.add("b", 0, 3)
    run_to_end(folder.options())
    folder.add("a", 3, 3)
    run_to_end(folder.options())
    assert folder.ids() == Counter(range(6))


def test_a_broken_file_is_set_aside_and_read_when_it_is_whole(folder: Folder) -> None:
    broken = {
        "ndjson": b"id,v\n1,x\n",
        "json": b'[{"id": 1}',
        "csv": b'id,v\n1,"x\n',
        "parquet": b"PAR1 and no more",
    }[folder.format]
    folder.add("a", 0, 3)
    path = folder.put("b", broken)
    options = folder.options(file_attempts=1)
    run_to_end(options)
    status, reason = folder.status()["b"]
    assert status == "set_aside"
    assert reason
    assert folder.ids() == Counter(range(3))
    folder.add(path.name, 3, 3)
    open_pipeline(options).requests.ask_retry(str(path), changed=True, ids=RandomIds())
    run_to_end(options)
    assert folder.ids() == Counter(range(6))


def test_bad_records_go_to_quarantine_with_their_bytes(tmp_path: Path) -> None:
    for name, data, bad in (
        ("json", b'[{"id": 1}, 5, {"id": 2}]', {b"5": 1}),
        ("csv", b"id,v\n1,x\n2\n2,y\n", {b"2": 1}),
    ):
        root = tmp_path / name
        root.mkdir()
        folder = Folder(root, name)  # type: ignore[arg-type]
        folder.put("a", data)
        run_to_end(folder.options())
        assert folder.ids() == Counter([1, 2])
        assert quarantined(folder.table, "demo") == bad
        run = run_once(pipeline_options(str(folder.folder), str(root / "other"), format=name, on_bad_record="fail"))
        assert isinstance(run.result.error, BadRecordsError)


@pytest.mark.parametrize("later", FORMATS)
def test_a_file_that_was_begun_in_one_format_is_finished_in_it(folder: Folder, later: Name) -> None:
    """The spec names another format between two runs: record numbers are those of the first one."""
    folder.add("a", 0, 7)
    run_until_epoch(folder.options(max_events=3), 1)
    assert len(folder.ids()) == 3
    others = Folder.__new__(Folder)
    others.folder, others.table, others.format = folder.folder, folder.table, later
    others.add("b", 7, 3)
    run_to_end(others.options(max_events=100))
    assert folder.ids() == Counter(range(10))
    progress = checkpoint_of(others.options()).positions["files"]
    assert progress["files"] == {}
    run_to_end(others.options())
    assert folder.ids() == Counter(range(10))


@pytest.mark.parametrize("later", FORMATS)
def test_the_ledger_reads_the_same_records_again_whatever_the_spec_says(folder: Folder, later: Name) -> None:
    folder.add("a", 0, 7)
    source = file_source(folder.options())
    driver = SourceDriver(source)
    first = driver.step(driver.source.start(None), replace(LIMITS, max_events=3))
    assert first is not None
    second = driver.step(first.after, replace(LIMITS, max_events=3))
    assert second is not None
    other = SourceDriver(replace(source, format=later))
    rebuilt = other.source.replay(first.before, first.records)
    assert rebuilt["files"] == first.after["files"] == {str(folder.folder / "a"): {"RecordsRead": 3}}
    for found in (first, second):
        rows, _ = other.read(other.source.replan(found.after, found.records, parallelism=1))
        assert rows == found.rows
    rest = [number for found in other.steps(rebuilt) for number in found.ids]
    assert rest == [3, 4, 5, 6]


# -- types --------------------------------------------------------------------------------------------


def test_parquet_numbers_widen_the_column(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "parquet")
    for number, price in enumerate((pa.array([1, 2], pa.int32()), pa.array([2**40, 4]), pa.array([0.5, 6.0]))):
        ids = pa.array([2 * number, 2 * number + 1], pa.int32())
        folder.put(f"{number}.parquet", parquet_bytes(pa.table({"id": ids, "price": price})))
        run_to_end(folder.options())
    table = DeltaTable(str(folder.table)).to_pyarrow_table().sort_by("id")
    assert table.schema.field("price").type == pa.float64()
    assert table["price"].to_pylist() == [1.0, 2.0, float(2**40), 4.0, 0.5, 6.0]
    assert "_rescued_data" not in table.schema.names


def test_parquet_files_of_one_epoch_agree_on_types(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "parquet")
    folder.put("a", parquet_bytes(pa.table({"id": pa.array([1], pa.int32()), "x": pa.array([1], pa.int32())})))
    folder.put("b", parquet_bytes(pa.table({"id": pa.array([2], pa.int32()), "x": [1.5]})))
    folder.put("c", parquet_bytes(pa.table({"x": ["text"], "id": pa.array([3], pa.int64()), "y": [[1]]})))
    run_once(folder.options(), threads=3)
    assert [(row["id"], row["x"], row["y"]) for row in folder.rows()] == [
        (1, "1", None),
        (2, "1.5", None),
        (3, "text", [1]),
    ]


def test_parquet_that_does_not_widen_is_rescued(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "parquet")
    options = folder.options(schema=SchemaOptions(on_widen="rescue"))
    folder.put("a", parquet_bytes(pa.table({"id": [1], "x": pa.array([1], pa.int32())})))
    run_to_end(options)
    folder.put("b", parquet_bytes(pa.table({"id": [2], "x": [2**40]})))
    run = run_once(options)
    assert folder.rows()[1]["_rescued_data"] == '{"x":1099511627776}'
    assert run.exit_code == 0


def test_csv_types_are_inferred_as_those_of_ndjson(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "csv")
    folder.put("a.csv", b"id,zip,price,ok,at\n1,007,1.50,true,2026-05-01T10:00:00Z\n2,12345,2,false,\n")
    folder.put("b.csv", b"price,id\n3.5,3\n")
    run_to_end(folder.options())
    types = {field.name: field.type for field in DeltaTable(str(folder.table)).to_pyarrow_table().schema}
    assert types == {
        "id": pa.int64(),
        "zip": pa.string(),
        "price": pa.float64(),
        "ok": pa.bool_(),
        "at": pa.timestamp("us", "UTC"),
    }
    assert [(row["id"], row["zip"], row["price"]) for row in folder.rows()] == [
        (1, "007", 1.5),
        (2, "12345", 2.0),
        (3, None, 3.5),
    ]


def test_declared_csv_columns_and_other_delimiters(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "csv")
    folder.put("a.csv", "1;0042;TRUE;Käse\n".encode("latin-1"))
    fields = [("id", "int64"), ("n", "int64"), ("ok", "boolean"), ("t", "string")]
    schema = SchemaOptions(tuple(FieldOptions(name, kind, True) for name, kind in fields))
    csv = CsvOptions(delimiter=";", header=False, encoding="latin-1")
    run_to_end(folder.options(schema=schema, csv=csv))
    assert folder.rows() == [{"id": 1, "n": 42, "ok": True, "t": "Käse"}]


def test_a_csv_file_without_a_header_beside_files_with_one_is_set_aside_and_named(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "csv")
    folder.put("1.csv", b"id,name,paid\n1,Ann,1.5\n2,Bob,2.5\n")
    folder.put("2.csv", b"3,Cid,3.5\n4,Dan,4.5\n")
    folder.put("3.csv", b"Eve;x\n")  # one line only: nothing tells that it is no header
    options = folder.options(file_attempts=1)
    for _ in range(2):  # alone in its task, and beside known columns
        assert run_once(options, threads=4).exit_code == 0
    status, reason = folder.status()["2.csv"]
    assert status == "set_aside"
    assert reason is not None
    assert reason.startswith('its first line looks like a record, not like a header ("3"): ')
    assert "csv: {header: false}" in reason
    assert set(DeltaTable(str(folder.table)).to_pyarrow_table().column_names) == {"id", "name", "paid"}
    folder.put("4.csv", b"5,Fay,5.5\n")  # the table's columns tell
    assert run_once(options).exit_code == 0
    assert folder.status()["4.csv"][0] == "set_aside"
    assert sorted(folder.ids()) == [1, 2]
    folder.put("4.csv", b"id,name,paid\n5,Fay,5.5\n")  # mended: tried again by itself
    assert run_once(options).exit_code == 0
    assert sorted(folder.ids()) == [1, 2, 5]


def test_columns_that_are_called_like_values_pass_if_the_spec_says_so(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "csv")
    folder.put("1.csv", b"2024-01-01,id\n2024-02-01,1\n")
    assert run_once(folder.options(file_attempts=1)).exit_code == 0
    assert folder.status()["1.csv"][0] == "set_aside"
    folder.table = tmp_path / "other"
    assert run_once(folder.options(csv=CsvOptions(check_header=False))).exit_code == 0
    assert list(folder.ids()) == [1]
