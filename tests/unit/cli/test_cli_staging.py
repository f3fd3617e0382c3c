"""`firnline committer` and `firnline staging`: what they say, what they refuse, what they must not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command
from firnline.committer.service import CommitterService
from firnline.spec.build import load_options
from tests.support.committers import PENDING, bring_file, commit_table, pending_units, put_unit
from tests.support.pipelines import run_once
from tests.support.samples import SampleInput, table_ids

SPEC = """\
name: flights
sources:
  flights: {type: files, path: in}
sinks:
  - {type: delta, table: out, mode: staged}
batch: {max_files: 1}
staging: {poll_interval_secs: 0.1}
"""
HEAVY = ("pyspark", "py4j", "numba", "firnline.ndjson", "duckdb", "pandas", "prometheus_client", "obstore")


@pytest.fixture
def table(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table with three units pending, and nothing committed yet."""
    (tmp_path / "firnline.yml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        sample.add(f"{name}.json", 4)
    assert run_once(load_options(tmp_path / "firnline.yml", environ={})).exit_code == 0
    return tmp_path / "out"


def said(capsys: pytest.CaptureFixture[str], *tokens: str) -> Any:
    assert run_command([*tokens, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_once_commits_what_is_pending(table: Path, sample: SampleInput, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = said(capsys, "commit", "--once")["tables"]
    assert (found["units"], found["commits"], found["rows"], found["pending"]) == (3, 1, 12, 0)
    assert found["rejected"] == []
    assert table_ids(table) == sample.ids
    assert run_command(["commit", str(table), "--once"]) == 0
    assert "0 units in 0 commits" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [["commit", "--once"], ["staging", "out"], ["staging", "out", "--json"]])
def test_no_jvm_and_nothing_heavy(table: Path, tokens: list[str]) -> None:
    code = (
        "import sys\nfrom firnline.cli.main import run_command\n"
        f"code = run_command({tokens!r})\n"
        f"print('IMPORTED', code, *[m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=table.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "IMPORTED 0"


def test_staging_shows_what_waits(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring_file(table, "foreign", {"id": [900]})
    put_unit(table, "odd", b"{not json")
    found = said(capsys, "staging", "out")
    assert (found["units_pending"], found["committer"], len(found["unreadable"])) == (5, None, 1)
    own, foreign = found["pipelines"]
    assert own == own | {"pipeline": "flights", "units": 3, "first_epoch": 1, "last_epoch": 3, "ready": 3, "forks": 0}
    assert (foreign["pipeline"], foreign["units"]) == (None, 1)
    assert run_command(["staging", "out"]) == 0
    out = capsys.readouterr().out
    assert "flights" in out
    assert "5 units" in out


def test_status_tells_what_is_staged_from_what_is_committed(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "status")
    assert (found["epoch"], found["sinks"][0]["epoch"], found["sinks"][0]["epochs_pending"]) == (3, 3, 3)
    assert run_command(["status"]) == 0
    assert "3 epochs staged" in capsys.readouterr().out
    commit_table(table)
    assert said(capsys, "status")["sinks"][0]["epochs_pending"] == 0


def test_a_dead_committer_is_not_shown_as_active(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, sys\nfrom firnline.clock import SystemClock\nfrom firnline.committer.service import CommitterLock\n"
        "from firnline.storage import open_storage\n"
        f"CommitterLock(open_storage({str(table)!r}), 'x', SystemClock(), 30).take()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (table / "_staging/committer.json").exists()
    assert said(capsys, "staging", "out")["committer"] is None


def test_retry_and_discard(table: Path, sample: SampleInput, capsys: pytest.CaptureFixture[str]) -> None:
    second = next(p for p in (table / PENDING).iterdir() if json.loads(p.read_bytes())["epoch"] == 2)
    (table / json.loads(second.read_bytes())["files"][0]["path"]).unlink()
    commit_table(table)
    found = said(capsys, "staging", "out")
    assert [(r["epoch"], r["pipeline"]) for r in found["rejected"]] == [(2, "flights")]
    assert found["rejected"][0]["reason"].startswith("file missing")
    assert found["pipelines"][0]["waits_for_epochs"] == [2, 2]
    name = found["rejected"][0]["unit"]
    assert run_command(["staging", "out", "--retry", name]) == 0
    assert name in pending_units(table)
    commit_table(table)
    capsys.readouterr()
    planned = said(capsys, "staging", "out", "--discard-from", "2", "--dry-run")
    assert (planned["done"], planned["resumes_after_epoch"], planned["rejected"]) == (False, 1, [name])
    assert len(pending_units(table)) == 1, "without --yes nothing goes"
    assert said(capsys, "staging", "out", "--discard-from", "2", "--yes")["done"] is True
    assert pending_units(table) == []
    assert run_once(load_options(table.parent / "firnline.yml", environ={})).exit_code == 0
    commit_table(table)
    assert table_ids(table) == sample.ids


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--retry", "nothing"], "no unit 'nothing'"),
        (["--retry", "../pending/x"], "no unit"),
        (["--discard-from", "1", "--pipeline", "flights"], "is committed"),
        (["--discard-from", "4"], "no pipeline has units"),
    ],
)
def test_what_is_refused(table: Path, capsys: pytest.CaptureFixture[str], tokens: list[str], words: str) -> None:
    commit_table(table)
    assert run_command(["staging", "out", *tokens]) == 2
    assert words in capsys.readouterr().err


def test_a_table_named_twice_is_served_once(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "commit", "out", f"{table}/", f"file://{table}", "firnline.yml", "--once")
    assert len(found["tables"]) == 1


def test_a_spec_without_a_staged_sink_is_refused(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (table.parent / "firnline.yml").write_text(SPEC.replace(", mode: staged", ""))
    assert run_command(["commit", "--once"]) == 2
    assert "no staged sink" in capsys.readouterr().err


def test_another_active_committer_is_told(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from firnline.clock import SystemClock
    from firnline.committer.service import TableRef

    service = CommitterService([TableRef(str(table))], "other", SystemClock())
    assert service._served[0].lock.take()
    assert run_command(["commit", "out", "--once"]) == 5
    assert "another committer is active" in capsys.readouterr().err


def test_the_service_starts_quickly_commits_and_stops_on_a_signal(table: Path, sample: SampleInput) -> None:
    command = [sys.executable, "-m", "firnline.cli", "commit", "firnline.yml", "--metrics-port", "0"]
    with subprocess.Popen(command, cwd=table.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 120
        while table_ids(table) != sample.ids or pending_units(table):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, b"stopped cleanly\n")
    assert b"3 units in 1 commit" in err
    assert not (table / "_staging/committer.json").exists()
