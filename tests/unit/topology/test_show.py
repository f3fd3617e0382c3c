"""`firnline topology show`, on real tables that local runs filled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from firnline.cli.main import run_command
from firnline.spec.build import load_options
from tests.support.pipelines import run_to_end
from tests.support.samples import SampleInput, table_ids

BRONZE = """\
name: bronze
sources: {files: {path: in, min_age_secs: 0}}
sinks: [{name: bronze, type: delta, table: out/bronze}]
"""
SILVER = """\
name: silver
sources: {bronze: {type: delta, table: out/bronze}}
sinks: [{name: silver, type: delta, table: out/silver}]
"""


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bronze.yml").write_text(BRONZE)
    (tmp_path / "silver.yml").write_text(SILVER)
    (tmp_path / "topology.yml").write_text("name: lake\npipelines: [bronze.yml, silver.yml]\n")
    monkeypatch.chdir(tmp_path)
    sample = SampleInput(tmp_path / "in")
    sample.add("a.json", 3)
    run_to_end(load_options("bronze.yml", environ={}))
    return tmp_path


def show(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run_command(["topology", "show", *words])
    return code, capsys.readouterr().out


def test_members_channels_and_lag(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = show(capsys, "--json")
    found = json.loads(text)
    assert code == 0
    assert [(m["name"], m["epoch"]) for m in found["members"]] == [("bronze", 1), ("silver", 0)]
    (channel,) = found["channels"]
    assert (channel["writer"], channel["reader"], channel["place"]) == ("bronze", "silver", str(lake / "out/bronze"))
    assert (channel["epoch"], channel["files_behind"]) == (1, 1)
    run_to_end(load_options("silver.yml", environ={}))
    (channel,) = json.loads(show(capsys, "bronze.yml", "silver.yml", "--json")[1])["channels"]
    assert channel["files_behind"] == 0
    code, text = show(capsys)
    assert code == 0
    assert text.startswith("bronze\n`-> silver\n")
    assert "bronze -> silver" in text


def test_several_writers_end_with_exit_code_1(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lake / "other.yml").write_text(BRONZE.replace("name: bronze\ns", "name: other\ns"))
    code, text = show(capsys, "bronze.yml", "silver.yml", "other.yml")
    assert code == 1
    assert "several writers" in text
    assert "'bronze' (sink 'bronze') and 'other' (sink 'bronze')" in " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: lake\npipelines: [none.yml]\n", "none.yml: no such file"),
        ("name: lake\npipelinez: [bronze.yml]\n", "pipelinez"),
        ("", "name"),
        ("name: lake\npipelines: [bronze.yml]\nsnapshots: {max_hold: 7}\n", "a time like 7d or a size like 50GB"),
        ("name: lake\npipelines: [bronze.yml]\nsnapshots: {evry: 10m}\n", "every"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(
    lake: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    (lake / "topology.yml").write_text(text)
    assert run_command(["topology", "show"]) == 2
    message = capsys.readouterr().err
    assert "topology.yml" in message
    assert words in message


def test_snapshot_list_restore_and_drop(lake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_to_end(load_options("silver.yml", environ={}))
    for name in ("bronze", "silver"):
        (lake / f"{name}.yml").write_text((lake / f"{name}.yml").read_text() + "spark: {spark.master: 'local[1]'}\n")
    settings = "snapshots: {every: 10m, keep: 2, include_stopped: true, max_hold: 7d, copy: true}\n"
    (lake / "topology.yml").write_text((lake / "topology.yml").read_text() + settings)
    assert run_command(["topology", "snapshot", "--once", "--json"]) == 0
    taken = json.loads(capsys.readouterr().out)
    copy = lake / f"data/lake/_topology/lake/copies/{taken['id']}"
    assert (copy / "topology.json").exists()
    assert (taken["status"], taken["acknowledged"]) == ("COMPLETED", "2/2")
    assert list(taken)[:8] == [
        "id",
        "status",
        "trigger_timestamp",
        "latest_ack_timestamp",
        "end_to_end_duration_ms",
        "checkpointed_size_bytes",
        "state_size_bytes",
        "acknowledged",
    ]
    assert taken["checkpointed_size_bytes"] > 0
    assert taken["copy"] == str(copy)
    assert {member["name"]: member["epoch"] for member in taken["members"]} == {"bronze": 2, "silver": 2}
    assert taken["restorable_until"] > taken["trigger_timestamp"]
    SampleInput(lake / "in").add("b.json", 3)
    for name in ("bronze", "silver"):
        run_to_end(load_options(f"{name}.yml", environ={}))
    assert run_command(["topology", "restore", taken["id"][:8], "--dry-run"]) == 0
    assert "silver" in capsys.readouterr().out
    assert run_command(["topology", "restore", taken["id"][:8], "--yes", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["done"], done["epochs"]) == (True, {"bronze": 4, "silver": 4})
    assert run_command(["topology", "list"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "2/2" in text
    assert f"firnline topology restore --from-savepoint {copy} FILE" in text
    check_savepoint(lake, taken["id"], capsys)
    assert run_command(["topology", "restore", taken["id"], "--without", "silver", "--dry-run"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "silver stays as it is" in text
    assert run_command(["topology", "restore", taken["id"], "--without", "gold", "--dry-run"]) == 2
    assert "--without gold: no such member" in capsys.readouterr().err
    assert run_command(["topology", "drop", taken["id"], "--yes", "--json"]) == 0
    assert not [path for path in copy.rglob("*") if path.is_file()]
    capsys.readouterr()
    assert run_command(["topology", "list", "--json"]) == 0
    (dropped,) = json.loads(capsys.readouterr().out)["snapshots"]
    assert (dropped["status"], dropped["copy"]) == ("DROPPED", None)
    capsys.readouterr()
    assert run_command(["topology", "restore", taken["id"], "topology.yml", "--yes"]) == 2
    assert "firnline topology list --file topology.yml" in " ".join(capsys.readouterr().err.split())
    assert run_command(["topology", "list", "--file", "topology.yml"]) == 0
    assert run_command(["topology", "restore", "--file", "topology.yml", "none", "--yes"]) == 2
    assert "no snapshot begins with 'none'" in capsys.readouterr().err


def check_savepoint(lake: Path, snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A new lake starts from a savepoint, and has the rows of the old one."""
    assert run_command(["topology", "savepoint", snapshot, "--path", str(lake / "save"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == {"bronze": 2, "silver": 2}
    (lake / "new").mkdir()
    for name in ("bronze", "silver"):
        text = (lake / f"{name}.yml").read_text().replace("path: in", f"path: {lake / 'in'}")
        (lake / f"new/{name}.yml").write_text(text)
    shutil.copy(lake / "topology.yml", lake / "new/topology.yml")
    command = ["topology", "restore", "--from-savepoint", str(lake / "save"), "new/topology.yml"]
    assert run_command([*command, "--dry-run"]) == 0
    assert not (lake / "new/out").exists()
    assert run_command([*command, "--yes"]) == 0
    capsys.readouterr()
    for name in ("bronze", "silver"):
        run_to_end(load_options(f"new/{name}.yml", environ={}))
        assert table_ids(lake / f"new/out/{name}").total() == 6
