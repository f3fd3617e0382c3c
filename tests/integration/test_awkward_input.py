"""Input that is legal but awkward: rows of partitions alone, folders that do not fit, names that clash, odd types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from firnline.options import SchemaOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.keyed import keyed_options
from tests.support.pipelines import LocalRun, MakeOptions, run_once


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir(exist_ok=True)
    return tmp_path / "in"


def write(path: Path, *records: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def count(table: Path) -> int:
    """Rows that the log promises, and that DuckDB finds in the files."""
    promised = sum(DeltaTable(str(table)).get_add_actions(flatten=True).column("num_records").to_pylist())
    found = 0
    for file in DeltaTable(str(table)).file_uris():
        found += duckdb.execute("select count(*) from read_parquet(?)", [file]).fetchall()[0][0]
    assert found == promised
    return int(promised)


def ended(run: LocalRun) -> tuple[int, str]:
    return run.exit_code, run.result.error.code if run.result.error else ""


def test_rows_of_partition_columns_alone_are_kept(folder: Path, tmp_path: Path, make_options: MakeOptions) -> None:
    write(folder / "a.json", *[{"month": "a"}] * 5)
    write(folder / "b.json", *[{"month": "b", "id": 1}] * 5)
    assert ended(run_once(make_options(partition_by=("month",)))) == (0, "")
    assert count(tmp_path / "out") == 10


def test_empty_records_below_a_partition_folder_are_kept(
    folder: Path, tmp_path: Path, make_options: MakeOptions
) -> None:
    write(folder / "month=1" / "a.json", {}, {}, {})
    assert ended(run_once(make_options(partition_by=("month",)))) == (0, "")
    assert count(tmp_path / "out") == 3


def test_a_folder_that_does_not_fit_its_type_is_rescued(
    folder: Path, tmp_path: Path, make_options: MakeOptions, int_day: Any
) -> None:
    write(folder / "day=7" / "a.json", {"id": 1})
    write(folder / "day=x" / "b.json", {"id": 2}, {"id": "odd"})
    assert ended(run_once(make_options(schema=int_day))) == (0, "")
    rows = duckdb.execute(
        "select id, day, _rescued_data from read_parquet(?, union_by_name=true) order by id",
        [DeltaTable(str(tmp_path / "out")).file_uris()],
    ).fetchall()
    assert rows[:2] == [(1, 7, None), (2, None, '{"day": "x"}')]
    assert json.loads(rows[2][2]) == {"day": "x", "id": "odd"}


@pytest.fixture
def int_day() -> Any:
    from firnline.options import FieldOptions, SchemaOptions

    return SchemaOptions((FieldOptions("id", "int64"), FieldOptions("day", "int64")))


def test_names_that_differ_in_case_alone_are_a_clear_error(folder: Path, make_options: MakeOptions) -> None:
    write(folder / "a.json", {"Month": "a"})
    assert ended(run_once(make_options(partition_by=("month",)))) == (1, "schema")


def test_a_partition_of_objects_is_a_clear_error(folder: Path, make_options: MakeOptions) -> None:
    write(folder / "a.json", {"month": {"name": "may"}})
    assert ended(run_once(make_options(partition_by=("month",)))) == (1, "schema")


def test_a_column_that_turns_to_json_holds_json_throughout(
    folder: Path, tmp_path: Path, make_options: MakeOptions
) -> None:
    write(folder / "a.json", {"v": "x"}, {"v": "5"})
    write(folder / "b.json", {"v": {"q": 1}}, {"v": 5})
    assert ended(run_once(make_options(max_output_files=1))) == (0, "")
    files = DeltaTable(str(tmp_path / "out")).file_uris()
    rows = duckdb.execute("select v from read_parquet(?)", [files]).fetchall()
    values = [json.loads(row[0]) for row in rows]
    assert sorted(values, key=repr) == sorted(["x", "5", {"q": 1}, 5], key=repr)


@pytest.mark.parametrize("evolution", ["fail", "rescue"])
def test_a_new_table_infers_its_columns_whatever_happens_to_later_ones(
    folder: Path, tmp_path: Path, make_options: MakeOptions, evolution: Any
) -> None:
    from firnline.options import SchemaOptions

    write(folder / "a.json", {"id": 1, "name": "x"})
    options = make_options(schema=SchemaOptions((), evolution))
    assert ended(run_once(options)) == (0, "")
    assert DeltaTable(str(tmp_path / "out")).schema().to_arrow().names == ["id", "name"]
    write(folder / "b.json", {"id": 2, "extra": True})
    assert ended(run_once(options)) == ((1, "schema") if evolution == "fail" else (0, ""))


@pytest.mark.parametrize("body", ["", "\n\n", "not json\n"])
@pytest.mark.parametrize("evolution", ["add", "rescue"])
def test_a_first_file_without_a_record_tells_no_columns(
    tmp_path: Path, folder: Path, body: str, evolution: Any
) -> None:
    """Neither an operator nor a table that takes the rows as they are is held up, or misled, by it."""
    rows = DeltaSinkOptions("rows", str(tmp_path / "rows"), input="files")
    counted = DeltaSinkOptions("counted", str(tmp_path / "out"), input="totals")
    options = keyed_options(
        tmp_path, schema=SchemaOptions(evolution=evolution), max_bad_ratio=1.0, sinks=(rows, counted)
    )
    (folder / "a.json").write_text(body)
    assert ended(run_once(options)) == (0, "")
    write(folder / "b.json", {"k": "x", "v": 1})
    assert ended(run_once(options)) == (0, "")
    write(folder / "c.json", {"k": "x", "v": 2, "new": 1})
    assert ended(run_once(options)) == (0, "")
    found = DeltaTable(str(tmp_path / "rows")).to_pyarrow_table().to_pylist()
    rescued = '{"new":1}' if evolution == "rescue" else None
    assert {(row["k"], row["v"], row["_rescued_data"]) for row in found} == {("x", 1, None), ("x", 2, rescued)}
    totals = DeltaTable(str(tmp_path / "out")).to_pyarrow_table().to_pylist()
    assert {(row["k"], row["n"], row["total"]) for row in totals} == {("x", 1, 1), ("x", 2, 3)}


def test_a_missing_folder_is_an_error_not_an_empty_run(tmp_path: Path, make_options: MakeOptions) -> None:
    run = run_once(make_options(path=str(tmp_path / "nowhere")))
    assert ended(run) == (2, "config")
    assert not (tmp_path / "out").exists()


def test_old_files_alone_do_not_end_a_listing(folder: Path, tmp_path: Path, make_options: MakeOptions) -> None:
    import os

    for number in range(300):
        write(folder / f"a{number:03}.json", {"id": number})
        os.utime(folder / f"a{number:03}.json", (1_000_000_000, 1_000_000_000))
    write(folder / "b.json", {"id": 1000})
    assert ended(run_once(make_options(start_after="2020-01-01T00:00:00Z", max_ms=1))) == (0, "")
    assert count(tmp_path / "out") == 1


def test_the_log_of_a_table_that_forbids_it_is_not_cleaned_up(
    folder: Path, tmp_path: Path, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    import firnline.sinks.delta.table as table

    monkeypatch.setitem(table.CREATED_WITH, "delta.enableExpiredLogCleanup", "false")
    called: list[int] = []
    monkeypatch.setattr(DeltaTable, "cleanup_metadata", lambda self: called.append(1))
    for number in range(25):
        write(folder / f"{number:02}.json", {"id": number})
    assert ended(run_once(make_options(max_files=1))) == (0, "")
    assert list((tmp_path / "out" / "_delta_log").glob("*.checkpoint.parquet"))
    assert called == []
