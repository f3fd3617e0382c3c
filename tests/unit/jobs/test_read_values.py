"""Tasks and reports between the driver and the workers that read survive the way as JSON text."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from firnline.exchange import Edge
from firnline.jobs.engine import Output
from firnline.jobs.read_job import ReadPort, ReadReport, ReadTask
from firnline.rescued import Rescued
from firnline.sources.base import ReadColumns, Split, SplitEnd
from firnline.sources.columns import Columns
from firnline.sources.files.messages import FileOutcome, FileReaderSettings

SCHEMA = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string())), ("at", pa.timestamp("us", "UTC"))])
COLUMNS = Columns(SCHEMA, frozenset({"id"}), {"day": "date"}, frozenset({"day"}), {"tags": "json"}, "rescue")
TASK = ReadTask(
    source="events",
    source_kind="files",
    settings=FileReaderSettings("/in", {"region": "x"}, 1024, "fail").to_json(),
    split=Split([{"path": "/in/day=1/a.json", "from": 0, "offset": 0, "line": 0}], 10, 20, 30),
    ports={
        "": ReadPort(COLUMNS, Output(({"sink": "out", "partition_by": ["day"]},))),
        "orders": ReadPort(COLUMNS, Output(edges=(Edge("orders", ("id",), ((0, 63), (64, 127)), 128, "at"),))),
    },
    epoch=7,
    attempt="abc",
    quarantine={"root": "/out", "storage_options": {}, "folder": "q"},
    exchange={"root": "/out", "storage_options": {}, "folder": "x"},
    lineage=True,
    replay=True,
)
REPORT = ReadReport(
    end=SplitEnd(
        [FileOutcome("/in/a.json", 3, 40, 3, finished=True).to_json()],
        {"": ReadColumns(SCHEMA, {"tags": {"text": 2}}), "orders": ReadColumns(SCHEMA)},
        {"/in/b.json": "is missing"},
    ),
    rows={"": 3, "orders": 0},
    rescues=["orders"],
    staged={"out": [{"path": "f.parquet", "rows": 3, "size_bytes": 99}]},
    exchanged={"orders": {"files": [], "rows": 0, "latest": None}},
    quarantine=[{"name": "q.parquet", "rows": 1, "reasons": {"not JSON": 1}}],
    records=4,
    bad=1,
    dropped=2,
    bytes_read=40,
    raw_bytes=41,
    filled={"": ["day"]},
    rescued=[Rescued("id", 2, "int64", '"x"', "/in/a.json", 3), Rescued("tags", 1)],
)


def test_a_task_survives_the_way() -> None:
    assert ReadTask.from_json(json.loads(json.dumps(TASK.to_json()))) == TASK
    plain = replace(TASK, ports={}, lineage=False, replay=False)
    assert ReadTask.from_json(json.loads(json.dumps(plain.to_json()))) == plain
    assert plain.to_json()["kind"] == "read"  # what a worker looks for


def test_a_report_survives_the_way() -> None:
    assert ReadReport.from_json(json.loads(json.dumps(REPORT.to_json()))) == REPORT


@pytest.mark.parametrize(
    "outcome",
    [FileOutcome("a", 3, 40, 3, finished=True), FileOutcome("a", 3, 0, 3), FileOutcome("a", failed="missing")],
)
def test_an_outcome_survives_the_way(outcome: FileOutcome) -> None:
    assert FileOutcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


def test_the_settings_of_a_reader_survive_the_way() -> None:
    settings = FileReaderSettings("/in", {"region": "x"}, 1024, "quarantine")
    assert FileReaderSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
