"""`firnline topology` as a command: what it prints, what it returns, and what it goes on after."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from firnline.cli.main import run_command
from firnline.errors import SinkError
from firnline.history.topology.snapshot import Snapshots
from firnline.spec.build import load_options
from firnline.testing.local import run_locally
from firnline.topology.records import Order


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The topology file of bronze and silver, which have an epoch each, and no run."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.ndjson").write_text('{"a": 1}\n{"a": 2}\n')
    for name, reads in {"bronze": "", "silver": "bronze"}.items():
        source = {"type": "delta", "table": f"out/{reads}"} if reads else {"type": "files", "path": "in"}
        body = {"name": name, "sources": {"rows": source}, "sinks": [{"type": "delta", "table": f"out/{name}"}]}
        (tmp_path / f"{name}.yml").write_text(json.dumps(body))
        run_locally(load_options(tmp_path / f"{name}.yml", environ={}))
    found = tmp_path / "topology.yml"
    found.write_text("name: lake\npipelines: [bronze.yml, silver.yml]\nsnapshots: {include_stopped: true}\n")
    monkeypatch.chdir(tmp_path)
    return found


def firnline(*words: str) -> int:
    return int(run_command(["topology", *words]))


def test_snapshots_of_an_interval_go_on_after_one_that_failed(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    orders: list[object] = []
    real = Snapshots.order

    def order(self: Snapshots, timeout: timedelta, max_hold: timedelta | None = None) -> Order:
        orders.append(timeout)
        if len(orders) == 2:
            raise SinkError("the storage does not answer")
        if len(orders) == 4:
            raise KeyboardInterrupt
        return real(self, timeout, max_hold)

    monkeypatch.setattr(Snapshots, "order", order)
    assert firnline("snapshot", "--every", "1ms") == 130
    assert "the storage does not answer" in capsys.readouterr().err
    assert firnline("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)["snapshots"]
    assert [one["status"] for one in listed] == ["COMPLETED", "COMPLETED"]
    assert firnline("list", "--limit", "1") == 0
    out = capsys.readouterr().out
    assert listed[0]["id"] in out
    assert listed[1]["id"] not in out
    assert "--limit 0 lists all" in out


def test_a_snapshot_that_is_aborted_says_why(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("name: lake\npipelines: [bronze.yml, silver.yml]\n")
    assert firnline("snapshot", "--timeout", "1ms") == 1
    error = capsys.readouterr().err
    assert "was aborted: the time limit has passed, and these have no record: bronze, silver" in error
    assert "\nTry: " in error
