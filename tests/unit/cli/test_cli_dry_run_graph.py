"""`dry-run` of pipelines with several sources and operators; without SQL no JVM is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command

SPEC = """\
name: shop
sources:
  orders:
    path: in/orders
    schema: {fields: [{name: at, type: timestamp}, {name: amount, type: int64}]}
  clicks: {path: in/clicks}
operators:
  - name: once
    type: deduplicate
    inputs: [clicks]
    keys: [id]
  - name: totals
    type: aggregate
    inputs: [orders]
    keys: [id]
    aggregates: [{name: total, function: sum, column: amount}]
    time: at
    window: {size: 10m}
sinks:
  - {table: out/totals, input: totals, write: upsert}
  - {table: out/late, input: totals.late}
  - {table: out/clicks, input: once}
state: {shards: 3}
batch: {max_files: 4}
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = {"orders": {"id": "a", "amount": 5, "at": "2026-11-16T12:00:00Z"}, "clicks": {"id": 1, "page": "x"}}
    for number, (name, row) in enumerate(rows.items(), 1):
        (tmp_path / "in" / name).mkdir(parents=True)
        for file in range(3 * number):
            (tmp_path / "in" / name / f"{file}.json").write_text(json.dumps(row) + "\n")
    (tmp_path / "firnline.yml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "firnline.yml"


def test_every_source_is_told(shop: Path, run_json: Any) -> None:
    found = run_json("dry-run")
    assert found["source"] is None
    assert [(s["name"], s["files_outstanding"], s["late_files"]) for s in found["sources"]] == [
        ("orders", 3, 0),
        ("clicks", 6, 0),
    ]
    assert found["first_epoch"]["files"] == 4
    assert found["epochs_about"] == 3
    sample = found["sample"]
    assert (sample["files"], sample["of_files"], sample["records"], sample["complete"]) == (9, 9, 9, True)
    assert (sample["bad"], sample["rescued"], sample["size_bytes"]) == (0, 0, sample["of_bytes"])
    assert found["warnings"] == []


def test_the_columns_of_operators_and_ports_are_told(shop: Path, run_json: Any) -> None:
    found = run_json("dry-run")
    columns = {s["name"]: [(c["name"], c["type"]) for c in s["columns"]] for s in found["schemas"]}
    assert columns == {
        "orders": [("at", "timestamp"), ("amount", "int64"), ("id", "string")],
        "clicks": [("id", "int64"), ("page", "string")],
        "once": [("id", "int64"), ("page", "string")],
        "totals": [("id", "string"), ("window_start", "timestamp"), ("window_end", "timestamp"), ("total", "int64"),
                   ("_op", "string"), ("_sequence", "int64")],
        "totals.late": [("at", "timestamp"), ("amount", "int64"), ("id", "string"), ("_watermark", "timestamp")],
    }  # fmt: skip
    assert [(c["name"], c["origin"]) for c in found["schema"]] == [
        ("id", "new"), ("window_start", "new"), ("window_end", "new"), ("total", "new"),
    ]  # fmt: skip
    assert [(s["input"], s["write"]) for s in found["sinks"]] == [
        ("totals", "upsert"),
        ("totals.late", "append"),
        ("once", "append"),
    ]


def test_the_graph_is_shown(shop: Path, run_json: Any, capsys: pytest.CaptureFixture[str]) -> None:
    graph = run_json("dry-run")["graph"]
    assert [(n["name"], n["shards"]) for n in graph["nodes"] if n["kind"] == "operator"] == [("once", 3), ("totals", 3)]
    assert run_command(["dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "               orders ---> | totals               | ---> delta-1\n" in shown
    assert "| aggregate, 3 shards  | ---> delta-2 (late)\n" in shown
    assert "once      deduplicate  id int64, page string\n" in shown


def test_a_plain_pipeline_is_not_drawn(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop.write_text("name: p\nsources: {clicks: {path: in/clicks}}\nsinks: [{table: out}]\n")
    assert run_command(["dry-run"]) == 0
    assert "--->" not in capsys.readouterr().out


def test_an_operator_that_does_not_fit_its_columns_is_refused(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shop.write_text(SPEC.replace("keys: [id]\n    aggregates", "keys: [idd]\n    aggregates"))
    assert run_command(["dry-run"]) == 2
    assert "operator 'totals': input 'orders' has no column 'idd'" in capsys.readouterr().err


def test_an_operator_whose_input_has_no_rows_yet_is_told(shop: Path, run_json: Any) -> None:
    for file in (shop.parent / "in" / "clicks").iterdir():
        file.unlink()
    found = run_json("dry-run")
    assert [s["name"] for s in found["schemas"]] == ["orders", "totals", "totals.late"]
    assert found["warnings"] == [
        "the columns of operator once are unknown: it has no input yet",
        f"there is nothing to read below {shop.parent}/in/clicks",
    ]


def test_a_class_of_ones_own_tells_its_columns(shop: Path, run_json: Any) -> None:
    (shop.parent / "operators").mkdir()
    (shop.parent / "operators" / "seen.py").write_text(
        """
import pyarrow as pa
from firnline.operators.base import Operator, Result


class Seen(Operator):
    ports = ("", "odd")
    keys = ("id",)
    state_schema = pa.schema([("n", pa.int64())])

    def output_schema(self, port=""):
        return pa.schema([("id", pa.int64()), ("odd" if port else "n", pa.int64())])

    def fold(self, batch, context):
        raise AssertionError("nothing runs")
"""
    )
    shop.write_text(
        SPEC.replace("type: deduplicate", "type: seen:Seen").replace("    keys: [id]\n  - name", "  - name")
    )
    found = run_json("dry-run")
    columns = {s["name"]: [c["name"] for c in s["columns"]] for s in found["schemas"]}
    assert (columns["once"], columns["once.odd"]) == (["id", "n"], ["id", "odd"])


def test_looking_at_a_graph_writes_nothing(shop: Path) -> None:
    before = sorted(shop.parent.rglob("*"))
    assert run_command(["dry-run"]) == 0
    assert sorted(shop.parent.rglob("*")) == before
