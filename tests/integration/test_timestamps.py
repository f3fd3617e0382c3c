"""Time stamps in a pipeline: `schema.infer_timestamps`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from firnline.options import OperatorOptions, PipelineOptions, SchemaOptions, TriggerOptions
from tests.support.keyed import answers, keyed_options
from tests.support.pipelines import pipeline_options, run_once, run_to_end

TIMESTAMP = pa.timestamp("us", "UTC")


def options(folder: Path, infer: bool = True) -> PipelineOptions:
    return pipeline_options(str(folder / "in"), str(folder / "out"), schema=SchemaOptions(infer_timestamps=infer))


def add(folder: Path, name: str, *values: str) -> None:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in" / name).write_text("".join(f'{{"at": "{value}"}}\n' for value in values))


def read(folder: Path) -> pa.Table:
    return DeltaTable(str(folder / "out")).to_pyarrow_table()


def test_time_stamps_become_a_timestamp_column_in_utc(tmp_path: Path) -> None:
    add(tmp_path, "1.json", "2024-05-01T12:30:00+02:00", "2024-05-01 10:30:00.5", "2024-05-01T10:30:00.000001Z")
    run = run_once(options(tmp_path))
    assert run.exit_code == 0
    table = read(tmp_path)
    moment = datetime(2024, 5, 1, 10, 30, tzinfo=UTC)
    expected = [moment, moment.replace(microsecond=500_000), moment.replace(microsecond=1)]
    assert (table.schema.field("at").type, table["at"].to_pylist()) == (TIMESTAMP, expected)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        files = DeltaTable(str(tmp_path / "out")).file_uris()
        found = connection.execute('SELECT "at"::VARCHAR FROM read_parquet($files)', {"files": files}).fetchall()
    assert [text for (text,) in found] == [
        "2024-05-01 10:30:00+00",
        "2024-05-01 10:30:00.5+00",
        "2024-05-01 10:30:00.000001+00",
    ]


def test_files_that_disagree_give_one_type_and_the_odd_values_are_counted(tmp_path: Path) -> None:
    for number in range(20):
        add(tmp_path, f"{number:02}.json", "soon" if number == 3 else f"2024-05-01T12:30:{number:02}Z")
    run = run_once(options(tmp_path))
    table = read(tmp_path)
    assert table.schema.field("at").type == TIMESTAMP
    assert table["_rescued_data"].drop_null().to_pylist() == ['{"at":"soon"}']
    assert [(one.column, one.values) for epoch in run.told.epochs for one in epoch.rescued] == [("at", 1)]


def test_nanoseconds_stay_text(tmp_path: Path) -> None:
    values = [f"2024-05-01T12:30:00.12345678{n}Z" for n in range(1, 9)]
    add(tmp_path, "1.json", *values)
    assert run_once(options(tmp_path)).exit_code == 0
    assert read(tmp_path)["at"].to_pylist() == values


def test_a_column_that_is_text_stays_text(tmp_path: Path) -> None:
    add(tmp_path, "1.json", "2024-05-01T12:30:00Z")
    assert run_once(options(tmp_path, infer=False)).exit_code == 0
    add(tmp_path, "2.json", "2024-05-01T12:30:01Z")
    assert run_once(options(tmp_path)).exit_code == 0
    table = read(tmp_path)
    assert table.schema.field("at").type == pa.string()
    assert sorted(table["at"].to_pylist()) == ["2024-05-01T12:30:00Z", "2024-05-01T12:30:01Z"]


@pytest.mark.parametrize("first", [False, True])
def test_a_replay_takes_the_types_that_the_epoch_chose(tmp_path: Path, first: bool) -> None:
    """The state of the first epoch lies in no snapshot: the second run folds that epoch again."""
    operator = OperatorOptions(
        "totals", "aggregate", ("files",), {"keys": ["at"], "aggregates": [{"name": "n", "function": "count"}]}
    )
    plain = keyed_options(tmp_path, (operator,), trigger=TriggerOptions(every_epochs=100))
    (source,) = plain.sources
    for number, infer in enumerate([first, not first, first]):
        add(tmp_path, f"{number}.json", "2024-05-01T12:30:00Z")
        run_to_end(replace(plain, sources=(replace(source, schema=SchemaOptions(infer_timestamps=infer)),)))
    ((at, rows),) = answers(plain.sinks[0].location)
    assert (type(at) is str, rows) == (not first, 3)
