"""A table that others made is joined only when what Firnline writes fits it; else the run stops before it writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import PrimitiveType

from firnline.options import FieldOptions, PipelineOptions, SchemaOptions
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput, quarantined, table_ids


@pytest.fixture
def table(tmp_path: Path) -> str:
    return str(tmp_path / "out")


def refused(options: PipelineOptions, table: str) -> Any:
    """The run stops with a schema error and has added no row."""
    rows = DeltaTable(table).to_pyarrow_table().num_rows
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "schema"), run.result
    assert DeltaTable(table).to_pyarrow_table().num_rows == rows
    return run.result.error


def test_table_that_fits(sample: SampleInput, make_options: MakeOptions, table: str) -> None:
    write_deltalake(table, pa.table({"id": pa.array([-1], pa.int64()), "other": ["x"]}))
    sample.add("a.json", 3)
    assert run_once(make_options()).exit_code == 0
    sample.ids[-1] += 1
    assert table_ids(table) == sample.ids
    assert set(DeltaTable(table).schema().to_arrow().names) >= {"id", "other", "month", "v"}


def test_other_partitions(sample: SampleInput, make_options: MakeOptions, table: str) -> None:
    write_deltalake(table, pa.table({"id": pa.array([-1], pa.int64()), "month": ["x"]}), partition_by=["month"])
    sample.add("a.json", 3)
    error = refused(make_options(), table)
    assert "partition" in error.message


def test_declared_type_that_differs(sample: SampleInput, make_options: MakeOptions, table: str) -> None:
    write_deltalake(table, pa.table({"id": pa.array(["text"])}))
    sample.add("a.json", 3)
    fields = SchemaOptions(fields=(FieldOptions("id", "int64"),))
    error = refused(make_options(schema=fields), table)
    assert "id" in error.message


def test_inferred_values_that_do_not_fit_are_rescued(
    sample: SampleInput, make_options: MakeOptions, table: str
) -> None:
    """A column keeps its type; what does not fit it is kept beside it, and nothing is lost."""
    write_deltalake(table, pa.table({"id": pa.array([-1], pa.int64()), "month": pa.array([1], pa.int64())}))
    sample.add("a.json", 3)
    assert run_once(make_options()).exit_code == 0
    rows = DeltaTable(table).to_pyarrow_table().to_pylist()
    ours = [row for row in rows if row["id"] > 0]
    assert len(ours) == 3
    assert all("2026" in row["_rescued_data"] for row in ours)


def test_column_that_must_not_be_null(sample: SampleInput, make_options: MakeOptions, table: str) -> None:
    """A record without it can never be a row there: it goes to quarantine, and no null is written."""
    DeltaTable.create(
        table, Schema([Field("id", PrimitiveType("long")), Field("must", PrimitiveType("string"), nullable=False)])
    )
    lines = sample.lines(3)
    sample.path("a.json").write_bytes(b"\n".join(lines))
    sample.forget(lines)
    sample.add("b.json", 2, must="x")
    assert run_once(make_options()).exit_code == 0
    assert table_ids(table) == sample.ids
    assert quarantined(table, "demo") == Counter(lines)


def test_check_constraints(sample: SampleInput, make_options: MakeOptions, table: str) -> None:
    write_deltalake(table, pa.table({"id": pa.array([1000], pa.int64())}))
    DeltaTable(table).alter.add_constraint({"big": "id > 500"})
    sample.add("a.json", 3)
    error = refused(make_options(), table)
    assert "constraint" in error.message


def test_column_mapping(sample: SampleInput, make_options: MakeOptions, table: str) -> None:
    """Physical names differ from logical ones there: rows written by name would read as nulls."""
    import json

    write_deltalake(table, pa.table({"id": pa.array([1000], pa.int64())}))
    path = Path(table) / "_delta_log" / f"{0:020d}.json"
    lines = []
    for line in path.read_text().splitlines():
        action = json.loads(line)
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        if "metaData" in action:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][0]["metadata"] = {
                "delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "id"
            }  # fmt: skip
            action["metaData"]["schemaString"] = json.dumps(schema)
            action["metaData"]["configuration"] = {
                "delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "1"
            }  # fmt: skip
        lines.append(json.dumps(action))
    path.write_text("\n".join(lines) + "\n")
    sample.add("a.json", 3)
    run = run_once(make_options())
    assert run.exit_code in (1, 3), run.result
    assert run.result.error is not None
    assert "column" in run.result.error.message.lower()


def test_append_only_table_is_fine(sample: SampleInput, make_options: MakeOptions, table: str) -> None:
    write_deltalake(table, pa.table({"id": pa.array([-1], pa.int64())}), configuration={"delta.appendOnly": "true"})
    sample.add("a.json", 3)
    assert run_once(make_options()).exit_code == 0
    sample.ids[-1] += 1
    assert table_ids(table) == sample.ids
