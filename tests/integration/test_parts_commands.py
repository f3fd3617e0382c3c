"""Commands about a Delta sink with a template: what they say of its tables, and that sweeps know every one of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.testing.local import LocalEngine
from tests.support.ageing import DAY, age_files
from tests.support.samples import SampleInput, table_ids

SPEC = """\
name: orders
sources:
  orders: {type: files, path: in}
sinks:
  - {name: months, table: "lake/{month}"}
batch: {max_files: 1}
"""
OWN = "0123456789abcdef-0000.parquet"
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def firnline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, without Spark, in the test's folder."""
    monkeypatch.setattr("firnline.jobs.spark.SparkEngine", lambda *_, **__: LocalEngine())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "firnline.yml").write_text(SPEC)

    def run(*words: str) -> tuple[int, str]:
        code = run_command(list(words))
        streams = capfd.readouterr()
        return code, streams.out if "--json" in words else streams.out + streams.err

    return run


def answer(found: tuple[int, str]) -> Any:
    assert found[0] == 0, found
    return json.loads(found[1])


@pytest.fixture
def lake(tmp_path: Path, sample: SampleInput, firnline: Command) -> Path:
    """Three tables of which two epochs touch each."""
    for number in (1, 2):
        sample.add(f"day-{number}.json", 6)
    assert firnline("run", "--once")[0] == 0
    return tmp_path / "lake"


def test_dry_run_says_that_it_is_atomic_per_table(firnline: Command, sample: SampleInput) -> None:
    sample.add("day-1.json", 3)
    code, text = firnline("dry-run")
    assert code == 0
    assert "exactly once per table" in text
    assert "atomic per table" in " ".join(text.split())


def test_the_tables_are_counted_and_named(firnline: Command, lake: Path) -> None:
    sinks = {sink["name"]: sink for sink in answer(firnline("sinks", "list", "--json"))["sinks"]}
    assert sinks["months"]["parts"] == [str(lake / f"2026-0{month}") for month in (1, 2, 3)]
    assert (sinks["months"]["epoch"], sinks["journal"]["parts"]) == (2, None)
    status = {sink["name"]: sink for sink in answer(firnline("status", "--json"))["sinks"]}
    assert (status["months"]["parts"], status["journal"]["parts"]) == (3, None)
    assert "in sync at epoch 2, 3 tables" in firnline("status")[1]


def test_a_lost_table_is_seen_without_a_run(firnline: Command, lake: Path, sample: SampleInput) -> None:
    shutil.rmtree(lake / "2026-02")
    sinks = {sink["name"]: sink for sink in answer(firnline("sinks", "list", "--json"))["sinks"]}
    assert (sinks["months"]["epoch"], sinks["months"]["epochs_behind"]) == (0, 2)
    assert firnline("run", "--once")[0] == 0, "it is filled from the outbox, though there is no new input"
    assert sum((table_ids(log.parent) for log in lake.glob("*/_delta_log")), type(sample.ids)()) == sample.ids


def test_sweeps_and_compaction_know_every_table(firnline: Command, lake: Path, sample: SampleInput) -> None:
    for table in lake.glob("2026-*"):
        pq.write_table(pa.table({"id": [0]}), table / OWN)
    age_files(lake, 2 * DAY)
    swept = answer(firnline("gc", "--yes", "--json"))
    assert sum(one["files"] for one in swept["tables"]) == 3
    assert not list(lake.glob(f"*/{OWN}"))
    assert sum((table_ids(log.parent) for log in lake.glob("*/_delta_log")), type(sample.ids)()) == sample.ids
    assert firnline("compact", "--yes")[0] == 0
    assert {len(DeltaTable(str(table)).file_uris()) for table in lake.glob("2026-*")} == {1}
    sample.add("day-3.json", 6)
    assert firnline("run", "--once")[0] == 0
    assert firnline("rollback", "--to", "1", "--yes")[0] == 0, "beyond a compaction, too"
    assert firnline("run", "--once")[0] == 0
    assert sum((table_ids(log.parent) for log in lake.glob("*/_delta_log")), type(sample.ids)()) == sample.ids
