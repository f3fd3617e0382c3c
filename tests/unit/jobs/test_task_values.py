"""What driver and worker say to each other survives the way there and back as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from firnline.errors import SourceError, StagingError, error_report, rebuild_error
from firnline.exchange import Edge
from firnline.jobs.engine import Output, Ping, SqlTable, SqlTask
from firnline.jobs.fold_job import FoldReport, FoldTask, add_up
from firnline.operators.loading import OwnCode
from firnline.options import OperatorOptions
from firnline.state.home import StateHome
from firnline.state.manifest import SegmentRef, ShardState, TimerRef

FOLDER = {"root": "/table", "storage_options": {"region": "x"}, "folder": "_firnline/p/exchange/a1"}
FILES = ({"key": "k.arrow", "shards": {"0": 0}, "rows": 3},)
OUTPUT = Output(
    ({"sink": "out", "write": "append"},),
    (Edge("totals<files", keys=("k",), ranges=((0, 3), (4, 7)), groups=8, time="at"), Edge("sql<files")),
)
SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("n", pa.int64())])
SEGMENT = SegmentRef("a/b.arrow", 10, 7, 3, 0, 3, 4)
STATE = ShardState((SEGMENT,), (TimerRef(SEGMENT, 5), TimerRef(SEGMENT)))

FOLD = FoldTask(
    pipeline="p",
    epoch=4,
    attempt="a1",
    epoch_time="2026-01-01T00:00:00+00:00",
    operator=OperatorOptions("totals", "aggregate", ("files",), {"keys": ["k"]}),
    code=OwnCode("mine.py", "class Mine: ..."),
    files={"files": list(FILES)},
    schemas={"files": SCHEMA},
    unordered=("files",),
    exchange=FOLDER,
    home=StateHome("/state", {"a": "b"}, StateHome("s3://far")),
    folder="ckpt_4_a1",
    key_groups=8,
    late_before=None,
    watermark=12,
    ports={"totals": OUTPUT},
    shard=1,
    groups=(4, 7),
    state=STATE,
    is_listed=True,
    others={"firsts": ShardState()},
)
REPORT = FoldReport(
    shard=0,
    state=STATE,
    staged={"out": [{"path": "x.parquet", "rows": 2}]},
    exchanged={"totals<files": {"files": [], "rows": 0, "latest": None}},
    rows=3,
    late=1,
    keys=2,
    changed=2,
    removed=1,
    bytes_written=100,
    out={"totals": 2},
    seconds={"fold": 0.5},
)


@pytest.mark.parametrize(
    "value",
    [
        FOLD,
        replace(FOLD, code=None, schemas=None, others=None, is_listed=False, late_before=3, watermark=None),
        REPORT,
        replace(REPORT, checksum="c"),
        OUTPUT,
        Ping(FOLDER, "shard 1 of operator totals", 0.5),
        SqlTable(SCHEMA, FOLDER, FILES),
        SqlTask("a1", OUTPUT, FOLDER, Ping(FOLDER, "a task", 1.0)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_survives_the_way_to_a_worker(value: Any) -> None:
    assert type(value).from_json(json.loads(json.dumps(value.to_json()))) == value


def test_a_report_without_a_snapshot_has_no_checksum() -> None:
    assert "checksum" not in REPORT.to_json()


def test_reports_of_all_shards_add_up() -> None:
    slower = replace(REPORT, shard=1, state=ShardState(), rows=4, seconds={"fold": 0.7}, checksum="c")
    folded = add_up([REPORT, slower], ((0, 3), (4, 7)), 4)
    assert (folded.rows, folded.late, folded.out, folded.seconds) == (7, 2, {"totals": 4}, {"fold": 0.7})
    assert folded.checksums == {1: "c"}
    assert folded.state.shards == ((0, 3, STATE), (4, 7, ShardState()))


def test_an_error_of_a_task_arrives_with_its_class_and_facts() -> None:
    """The driver parks the rows of an optional sink by these facts."""
    error = StagingError("the stager failed", hint="look", sink="copy", kind="delta", method="write", optional=True)
    report = json.loads(json.dumps(error_report(error)))
    rebuilt = rebuild_error(report)
    assert type(rebuilt) is StagingError
    assert (rebuilt.message, rebuilt.hint, rebuilt.fields) == (error.message, "look", error.fields)


def test_an_error_whose_class_has_no_code_of_its_own_arrives_as_the_class_of_its_code() -> None:
    class RefusedError(SourceError):
        def __init__(self, number: int) -> None:
            super().__init__(f"refused ({number})", hint="look")

    assert str(rebuild_error(error_report(RefusedError(7)))) == "refused (7)"
    assert type(rebuild_error(error_report(SourceError("gone")))) is SourceError
