"""Orders and reports between the driver and the tasks that read survive the way as JSON text."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from firnline.exchange import Edge
from firnline.jobs.read_orders import ReadOrder, ReadReport
from firnline.sources.base import Split, SplitEnd
from firnline.sources.columns import Columns
from firnline.sources.files.messages import FileOutcome, FileReaderSettings

SCHEMA = pa.schema([("id", pa.int64()), ("tags", pa.list_(pa.string())), ("at", pa.timestamp("us", "UTC"))])
COLUMNS = Columns(SCHEMA, frozenset({"id"}), {"day": "date"}, frozenset({"day"}), {"tags": "json"}, "rescue")
ORDER = ReadOrder(
    source_kind="files",
    settings=FileReaderSettings("/in", {"region": "x"}, 1024, "fail").to_json(),
    split=Split([{"path": "/in/day=1/a.json", "from": 0, "offset": 0, "line": 0}], 10, 20, 30),
    columns=COLUMNS,
    epoch=7,
    attempt="abc",
    targets=[{"sink": "out", "partition_by": ["day"]}],
    quarantine={"root": "/out", "storage_options": {}, "folder": "q"},
    edges=[Edge("orders", ("id",), ((0, 63), (64, 127)), 128, "at")],
    exchange={"root": "/out", "storage_options": {}, "folder": "x"},
    lineage=True,
    replay=True,
)
REPORT = ReadReport(
    end=SplitEnd([FileOutcome("/in/a.json", 3, 40, 3, finished=True).to_json()], SCHEMA, {"tags": {"text": 2}}),
    staged={"out": [{"path": "f.parquet", "rows": 3, "size_bytes": 99}]},
    exchanged={"orders": {"files": [], "rows": 0, "latest": None}},
    quarantine=[{"name": "q.parquet", "rows": 1, "reasons": {"not JSON": 1}}],
    rescues=True,
    records=4,
    bad=1,
    bytes_read=40,
    raw_bytes=41,
)


def test_an_order_survives_the_way() -> None:
    assert ReadOrder.from_json(json.loads(json.dumps(ORDER.to_json()))) == ORDER
    plain = replace(ORDER, edges=[], lineage=False, replay=False)
    assert ReadOrder.from_json(json.loads(json.dumps(plain.to_json()))) == plain
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
