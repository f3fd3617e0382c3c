"""History edits of a pipeline whose sinks have different columns: none gets those of the sink that decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.position import PositionEdit
from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from tests.support.pipelines import pipeline_options, run_to_end

EDITS: dict[str, Callable[[OpenPipeline], object]] = {
    "position": lambda pipeline: PositionEdit(pipeline, "set", "a", "x.json").perform("test"),
    "fresh": lambda pipeline: start_over(pipeline, 2, "test", truncate=True),
    "rollback": lambda pipeline: Rollback(pipeline, 1).perform("test"),
}


def add(folder: Path, source: str, name: str, **row: object) -> None:
    (folder / source).mkdir(exist_ok=True)
    (folder / source / name).write_text(json.dumps(row) + "\n")


def make(folder: Path) -> PipelineOptions:
    return pipeline_options(
        "",
        "",
        sources=[FileSourceOptions(name, str(folder / name), poll_interval_secs=0.05) for name in ("a", "b")],
        sinks=[DeltaSinkOptions(f"to_{name}", str(folder / f"to_{name}"), input=name) for name in ("a", "b")],
        max_files=1,
    )


def columns(folder: Path, table: str) -> set[str]:
    return {field.name for field in DeltaTable(str(folder / table)).schema().fields} - {"_rescued_data"}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("has_rows", [False, True], ids=["no table yet", "with a table"])
def test_a_sink_keeps_its_own_columns(tmp_path: Path, edit: str, has_rows: bool) -> None:
    (tmp_path / "b").mkdir()
    for name in ("p.json", "q.json"):
        add(tmp_path, "a", name, left=1)
        if has_rows:
            add(tmp_path, "b", name, right=1)
    options = make(tmp_path)
    run_to_end(options)
    EDITS[edit](open_pipeline(options))
    add(tmp_path, "b", "z.json", right=2)
    run_to_end(options)
    assert columns(tmp_path, "to_a") == {"left"}
    assert columns(tmp_path, "to_b") == {"right"}
