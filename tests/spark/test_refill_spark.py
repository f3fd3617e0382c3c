"""Rows of a query that are made again on real Spark: for a damaged outbox, and for a sink from the beginning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from firnline.jobs.spark import SparkEngine
from firnline.options import OperatorOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.pipelines import pipeline_options
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSinkOptions, register_sqlite, sqlite_ids

pytestmark = pytest.mark.spark

QUERY = "SELECT id, month, v * 2 AS twice, epoch_time() AS made FROM files WHERE id % 3 <> 0"


def test_rows_of_a_query_are_made_again(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)
    copy = SqliteSinkOptions("copy", str(tmp_path / "copy.db"), required=False, input="some")
    late = SqliteSinkOptions("late", str(tmp_path / "late.db"), input="some", start="beginning")
    options = pipeline_options(
        str(sample.folder),
        "",
        max_files=2,
        operators=[OperatorOptions("some", "sql", ("files",), {"query": QUERY})],
        sinks=[DeltaSinkOptions("table", str(tmp_path / "table"), input="some"), copy],
    )
    engine = SparkEngine("refill", {"spark.master": "local[2]"})

    def run(what: PipelineOptions) -> None:
        result = Runner(open_pipeline(what, once=True), engine, once=True).run()
        assert result.exit_code == 0, result

    try:
        down = tmp_path / f"copy.db{DOWN}"
        down.touch()
        for number in range(4):
            sample.add(f"{number}.json", 50)
        run(options)
        down.unlink()
        damaged = list((tmp_path / "table").rglob("outbox/**/*.arrow"))
        assert damaged
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-5])
        run(options)
        assert sqlite_ids(tmp_path / "copy.db") == table_ids(tmp_path / "table")
        run(replace(options, sinks=(*options.sinks, late)))
        assert sqlite_ids(tmp_path / "late.db") == table_ids(tmp_path / "table")
    finally:
        engine.stop()
