"""What the commands for topologies say when something is in the way: what, which member, and what to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firnline.cli.main import INTERRUPTED, run_command
from firnline.history.topology.snapshot import Snapshots
from firnline.run.standby import editing_history
from firnline.spec.build import load_options
from firnline.topology.records import Order
from tests.support.pipelines import run_to_end
from tests.support.samples import SampleInput, table_ids

BRONZE = """\
name: bronze
sources: {files: {path: in, min_age_secs: 0}}
sinks: [{name: bronze, type: delta, table: out/bronze}]
spark: {spark.master: "local[1]"}
"""
SILVER = """\
name: silver
sources: {bronze: {type: delta, table: out/bronze, poll_interval_secs: 1}}
sinks: [{name: silver, type: delta, table: out/silver}]
spark: {spark.master: "local[1]"}
"""


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bronze.yml").write_text(BRONZE)
    (tmp_path / "silver.yml").write_text(SILVER)
    (tmp_path / "topology.yml").write_text("name: lake\npipelines: [bronze.yml, silver.yml]\n")
    monkeypatch.chdir(tmp_path)
    SampleInput(tmp_path / "in").add("a.json", 3)
    return tmp_path


def run_all() -> None:
    for name in ("bronze", "silver"):
        run_to_end(load_options(f"{name}.yml", environ={}))


def take(capsys: pytest.CaptureFixture[str]) -> str:
    """Take a snapshot of the stopped pipelines; returns its id."""
    assert run_command(["topology", "snapshot", "--include-stopped", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["id"])


def words_of(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return what was written to stdout and stderr, without line breaks."""
    out, err = capsys.readouterr()
    return " ".join(out.split()), " ".join(err.split())


def test_members_without_a_commit_are_named_with_their_commands(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["topology", "snapshot"]) == 2
    _, err = words_of(capsys)
    assert "bronze and silver have committed nothing yet" in err
    assert "firnline run bronze.yml; firnline run silver.yml" in err


def test_stopped_members_are_named_while_the_snapshot_waits(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all()
    assert run_command(["topology", "snapshot", "--timeout", "1ms", "topology.yml"]) == 1
    _, err = words_of(capsys)
    said = "bronze and silver have no run: start them (firnline run bronze.yml; firnline run silver.yml), or record"
    assert said in err
    assert "Without a run when it was ordered: bronze, silver." in err
    assert err.count("firnline topology snapshot --include-stopped --file topology.yml") == 2  # at once, and at the end


def test_a_completed_snapshot_names_the_way_back(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all()
    assert run_command(["topology", "snapshot", "--include-stopped"]) == 0
    out, _ = words_of(capsys)
    assert "To go back to it: firnline topology restore " in out
    assert "+00:00" not in out  # moments are for people


def test_an_interrupted_snapshot_says_what_becomes_of_it(
    lake: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all()

    def interrupt(_snapshots: Snapshots, _order: Order) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Snapshots, "settle", interrupt)
    assert run_command(["topology", "snapshot"]) == INTERRUPTED
    _, err = words_of(capsys)
    assert "stays open until" in err
    assert "See it: firnline topology list; end it: firnline topology drop " in err
    assert run_command(["topology", "list"]) == 0
    out, _ = words_of(capsys)
    assert "is in progress:" in out
    assert "bronze has no run: firnline run bronze.yml" in out


def test_runs_are_named_by_the_plan_and_refuse_the_restore(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all()
    snapshot = take(capsys)
    SampleInput(lake / "in").add("b.json", 3)
    run_all()
    stop = "firnline stop bronze.yml; firnline stop silver.yml"
    bronze, silver = (load_options(f"{name}.yml", environ={}) for name in ("bronze", "silver"))
    with (
        editing_history(bronze, "one", print, take_over=False),  # the lease that a run holds
        editing_history(silver, "two", print, take_over=False),
    ):
        capsys.readouterr()
        assert run_command(["topology", "restore", snapshot, "--dry-run"]) == 0
        out, _ = words_of(capsys)
        assert f"refused while bronze and silver have runs. Stop them first: {stop}." in out
        assert "not undone" not in out  # members go back together
        assert run_command(["topology", "restore", snapshot, "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["running"] == ["bronze", "silver"]
        assert run_command(["topology", "restore", snapshot, "--yes"]) == 6
        _, err = words_of(capsys)
        assert "pipeline 'bronze' is already running" in err
        assert "pipeline 'silver' is already running" in err
        assert f"Stop them first: {stop}." in err
    capsys.readouterr()
    assert run_command(["topology", "restore", snapshot, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["running"] == []
    assert table_ids(lake / "out/silver").total() == 6


def test_a_snapshot_behind_which_a_restore_went_is_listed_as_undone(
    lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_all()
    first = take(capsys)
    SampleInput(lake / "in").add("b.json", 3)
    run_all()
    second = take(capsys)
    assert run_command(["topology", "restore", first, "--yes"]) == 0
    capsys.readouterr()
    assert run_command(["topology", "list", "--json"]) == 0
    reasons = {one["id"]: one["reason"] for one in json.loads(capsys.readouterr().out)["snapshots"]}
    assert reasons[first] == ""
    assert "undone" in reasons[second]
    assert run_command(["topology", "restore", second, "--dry-run"]) == 1
    _, err = words_of(capsys)
    assert "bronze: epoch" in err
    assert "no longer belongs to the history" in err
    assert "firnline topology list" in err
    third = take(capsys)  # of the history since the restore
    assert run_command(["topology", "restore", third, "--dry-run"]) == 0


def test_a_time_goes_with_a_topology_file_and_not_with_a_snapshot(
    lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_all()
    snapshot = take(capsys)
    assert run_command(["topology", "restore", "--at", "1ms", "topology.yml", "--dry-run"]) == 0
    capsys.readouterr()
    for words, said in (
        ([snapshot, "--at", "1ms"], "name a snapshot or a time, not both"),
        (["--at", "2999-01-01T00:00:00Z"], "is in the future"),
    ):
        assert run_command(["topology", "restore", *words, "--dry-run"]) == 2
        assert said in words_of(capsys)[1]
    assert run_command(["topology", "restore", "--at", "2001-01-01T00:00:00Z", "--dry-run"]) == 1
    _, err = words_of(capsys)
    assert "bronze: no epoch was committed by 2001-01-01T00:00:00+00:00" in err
    assert "firnline topology list" in err


def test_ids_that_begin_alike_are_named(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_all()
    ids = sorted([take(capsys), take(capsys)])
    assert run_command(["topology", "drop", "", "--yes"]) == 2
    _, err = words_of(capsys)
    for one in ids:
        assert one in err


def test_a_start_that_cannot_be_done_is_refused_by_its_plan_and_writes_nothing(
    lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_all()
    snapshot = take(capsys)
    assert run_command(["topology", "savepoint", snapshot, "--path", "save"]) == 0
    new = lake / "new"
    new.mkdir()
    for name in ("bronze.yml", "silver.yml", "topology.yml"):
        (new / name).write_text((lake / name).read_text())
    command = ["topology", "restore", "--from-savepoint", "save", "new/topology.yml"]
    for folder in (None, new / "in"):  # no folder; another folder than that of the savepoint
        if folder is not None:
            folder.mkdir()
        for flag in ("--dry-run", "--yes"):
            capsys.readouterr()
            assert run_command([*command, flag]) != 0
            assert not (new / "out").exists()
    _, err = words_of(capsys)
    assert "bronze: the source 'files' is not the one of the savepoint" in err
    assert "Write the old location in the file of bronze" in err
    assert run_command(["topology", "restore", "--from-savepoint", "save", "--dry-run"]) == 1
    assert "there is a table at" in words_of(capsys)[1]
