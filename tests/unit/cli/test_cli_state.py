"""What commands tell of operators' state: `status`, `checkpoints`, `rollback`, `savepoint`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.spec.build import load_options
from tests.support.commands import run_plainly
from tests.support.keyed import KeyedInput, answers, answers_without_trouble
from tests.support.pipelines import run_to_end
from tests.support.processes import Child, Launcher

SPEC = """\
name: demo
sources:
  files:
    path: in
    schema: {fields: [{name: k, type: string}, {name: v, type: int64}, {name: at, type: timestamp}]}
operators:
  - name: windows
    type: aggregate
    inputs: [files]
    keys: [k]
    time: at
    delay: 5s
    window: {size: 1m}
    aggregates: [{name: n, function: count}]
sinks:
  - {type: delta, name: delta, table: out, input: windows, write: upsert}
state: {shards: 2}
batch: {max_files: 1}
"""
SPARSE = SPEC + "checkpoint: {trigger: {every_epochs: 4}}\n"


def prepare(folder: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch, text: str = SPEC) -> PipelineOptions:
    """A pipeline after three epochs, in the current folder."""
    (folder / "firnline.yml").write_text(text)
    monkeypatch.chdir(folder)
    options = load_options(folder / "firnline.yml", environ={})
    for _ in range(3):
        keyed.add()
        run_to_end(options)
    return options


@pytest.fixture
def options(tmp_path: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch) -> PipelineOptions:
    return prepare(tmp_path, keyed, monkeypatch)


def said(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    assert run_command(list(tokens)) == 0
    return capsys.readouterr().out


def test_status_tells_the_state_and_where_the_run_took_up(
    options: PipelineOptions, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = open_pipeline(options)
    held = pipeline.load().checkpoint
    assert held is not None
    found = run_json("status")
    ref = held.state["windows"]
    (operator,) = found["operators"]
    assert operator == {
        "operator": "windows", "epoch": 3, "checkpoint": ref["checkpoint"], "shards": 2,
        "size_bytes": ref["size_bytes"], "rows": ref["rows"], "watermark": operator["watermark"],
        "idle_inputs": [],
    }  # fmt: skip
    assert operator["watermark"].startswith("2026-01-01T00:01:")
    assert found["shards"] == 2
    assert found["state_recovery_path"] == "sink"
    second = next(entry for entry in pipeline.entries(pipeline.load().entry) if entry.epoch == 2)
    assert found["restored_position"] == {"epoch": 2, "positions": second.checkpoint.positions}
    shown = said(capsys, "status")
    assert "snapshot of epoch 3, watermark 2026-01-01T00:01:" in shown
    assert "state from sink" in shown
    assert "resumed after" in shown


def test_checkpoints_tell_the_size_of_the_state(
    options: PipelineOptions, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = open_pipeline(options)
    sizes = [e.checkpoint.state["windows"]["size_bytes"] for e in pipeline.entries(pipeline.load().entry)]
    assert [row["state_size_bytes"] for row in run_json("checkpoints")["checkpoints"]] == sizes
    assert all(size > 0 for size in sizes)
    for row, entry in zip(run_json("checkpoints")["checkpoints"], pipeline.entries(pipeline.load().entry), strict=True):
        steps = {step: ms for step, ms in entry.durations_ms.items() if step != "checkpoint"}
        assert row["end_to_end_duration_ms"] == sum(steps.values())  # the pause is a part of the run
    assert " state " in said(capsys, "checkpoints").splitlines()[0]


def test_show_and_diff_tell_state_and_watermarks_in_words(
    options: PipelineOptions, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json("checkpoints", "show", "3")
    assert found["sizes"]["state_bytes"] == found["operators"][0]["size_bytes"] > 0
    assert "state of windows" in said(capsys, "checkpoints", "show", "3")
    moved = run_json("checkpoints", "diff", "1", "3")
    assert (moved["state"]["windows"]["from"]["epoch"], moved["state"]["windows"]["to"]["epoch"]) == (1, 3)
    assert moved["watermarks"]["windows"]["from"] < moved["watermarks"]["windows"]["to"]
    shown = said(capsys, "checkpoints", "diff", "1", "3")
    assert "watermark of windows: 2026-01-01T00:00:" in shown
    assert "(epoch 1) -> " in shown


def test_the_plan_of_a_rollback_tells_the_state(
    options: PipelineOptions, run_json: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = run_json("rollback", "--to", "1", "--dry-run")
    assert [one["epoch"] for one in plan["state_then"]] == [1]
    assert plan["state_replayed"] == []
    assert "from epoch 3 back to epoch 1: " in said(capsys, "rollback", "--to", "1", "--dry-run")


# -- savepoints where snapshots are rare ------------------------------------------------------------------


def test_without_a_run_a_savepoint_tells_what_is_folded_again(
    tmp_path: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path, keyed, monkeypatch, SPARSE)
    shown = said(capsys, "savepoint", "create", "--path", str(tmp_path / "saved"))
    assert "a restore replays 2 epochs: keep the input from epoch 2 on" in shown
    assert "of state pinned" in shown
    plan = json.loads(said(capsys, "rollback", "--to", "2", "--json", "--dry-run"))
    assert plan["state_replayed"] == [2]
    assert "replayed" in said(capsys, "rollback", "--to", "2", "--dry-run")


@pytest.fixture
def running(
    tmp_path: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Child, PipelineOptions]]:
    """A run that has read everything, and whose newest epochs no checkpoint of state holds."""
    made = prepare(tmp_path, keyed, monkeypatch, SPARSE)
    slow = replace(made, sources=(replace(made.sources[0], poll_interval_secs=3600),))
    keyed.add()
    child = Launcher(tmp_path / "children", run_plainly).start(slow, once=False)
    try:
        child.wait_for("epoch 4 committed")
        child.wait_for("all read; waiting for new files")
        yield child, slow
    finally:
        if child.is_alive:
            child.signal(signal.SIGKILL)
            child.wait()


def test_a_run_is_asked_for_a_checkpoint_first(
    tmp_path: Path,
    keyed: KeyedInput,
    running: tuple[Child, PipelineOptions],
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, options = running
    made = json.loads(said(capsys, "savepoint", "create", "--copy", "--path", str(tmp_path / "saved"), "--json"))
    assert (made["epoch"], made["state_replayed"]) == (5, [])
    assert made["state_size_bytes"] > 0
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
