"""Every deletion leaves a record that `firnline checkpoints --audit` shows: who, when, and how much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import firnline.maintenance.state
import firnline.run.runner
from firnline.cli.main import run_command
from firnline.history.store import open_for_writing
from firnline.options import StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.spec.build import load_options
from firnline.stores.audit import load_audit
from tests.support.ageing import age_files
from tests.support.keyed import KeyedInput, keyed_options
from tests.support.pipelines import run_to_end
from tests.support.samples import SampleInput

DAY = 86_400


@pytest.fixture
def spec(tmp_path: Path, sample: SampleInput) -> Path:
    sample.add("a.json", 5)
    path = tmp_path / "pipe.yaml"
    path.write_text(
        f"name: demo\nsources: {{flights: {{type: files, path: {tmp_path / 'in'}}}}}\n"
        f"sinks:\n  - {{type: delta, name: one, table: {tmp_path / 'one'}, mode: staged}}\n"
        f"checkpoint: {{store: {{type: file, path: {tmp_path / 'store'}}}}}\n"
    )
    run_to_end(load_options(path, environ={}))
    return path


def trail(spec: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run_command(["checkpoints", str(spec), "--audit", "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["audit"]
    return found


def test_gc_compact_and_discard_are_on_record(spec: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orphan = tmp_path / "one" / "part-0.parquet"
    orphan.write_bytes(b"nobody names it")
    age_files(tmp_path / "one", 2 * DAY)
    assert run_command(["gc", str(spec), "--dry-run"]) == 0
    assert trail(spec, capsys) == [], "a look deletes nothing"
    assert run_command(["gc", str(spec), "--yes"]) == 0
    assert run_command(["compact", str(spec), "--vacuum"]) == 0
    assert run_command(["staging", str(spec), "--discard-from", "1", "--yes"]) == 0
    found = trail(spec, capsys)
    assert [(one["what"], one["outcome"]) for one in reversed(found)] == [
        (what, outcome) for what in ("gc", "compact", "discard") for outcome in ("begun", "done")
    ]
    done = {one["what"]: one["details"] for one in found if one["outcome"] == "done"}
    assert (done["gc"]["files"], done["gc"]["size_bytes"]) == (1, len(b"nobody names it"))
    assert (done["discard"]["pending"], done["discard"]["from_epoch_on"]) == (1, 1)
    assert done["compact"]["vacuum"] is True


def test_a_deletion_that_cannot_be_put_on_record_is_not_made(spec: Path, tmp_path: Path) -> None:
    orphan = tmp_path / "one" / "part-0.parquet"
    orphan.write_bytes(b"nobody names it")
    age_files(tmp_path / "one", 2 * DAY)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("no folder")
    assert run_command(["gc", str(spec), "--yes"]) != 0
    assert orphan.exists()


def test_what_a_run_sweeps_of_its_state_is_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_upkeep: None
) -> None:
    monkeypatch.setattr(firnline.run.runner, "SWEEP_EVERY", 4)
    monkeypatch.setattr(firnline.run.runner, "RUN_GRACE_SECONDS", 0.0)
    keyed = KeyedInput(tmp_path / "in")
    store = StoreOptions(path=str(tmp_path / "store"))
    options = keyed_options(tmp_path, rollback_window=1, keep_checkpoints=0, store=store)
    for _ in range(24):
        keyed.add()
    run_to_end(options)
    records = [entry.record for entry in load_audit(open_for_writing(open_pipeline(options)), "demo")]
    assert records
    assert all(
        record is not None and record.what == "state-sweep" and record.details["files"] > 0 for record in records
    )
