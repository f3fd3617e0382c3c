"""`firnline savepoint` and `firnline run --from-savepoint`: what they show, and that a repeat is harmless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command
from firnline.cli.savepoint import CREATE_EPILOGUE, DISPOSE_EPILOGUE, LIST_EPILOGUE
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.usefixtures("no_spark")


@pytest.mark.parametrize("verb", ["create", "list", "dispose"])
def test_help_fits_80_columns_and_has_examples(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = {"create": CREATE_EPILOGUE, "list": LIST_EPILOGUE, "dispose": DISPOSE_EPILOGUE}[verb]
    assert text.split("Examples:")[1].count(f"firnline savepoint {verb}") >= 2
    assert all(len(line) <= 80 for line in text.splitlines())
    assert run_command(["savepoint", verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: firnline savepoint {verb}" in shown
    assert "Examples:" in shown


def test_made_listed_restored_and_disposed_of(
    finished: Path, sample: SampleInput, capfd: pytest.CaptureFixture[str]
) -> None:
    def run_json(*tokens: str) -> Any:
        assert run_command([*tokens, "--json"]) == 0
        return json.loads(capfd.readouterr().out)

    table = str(finished.parent / "out")
    before = table_ids(table)
    made = run_json("savepoint", "create", "--copy")
    assert [key for key in made if key not in CREATE_EPILOGUE] == []
    assert (made["epoch"], made["copied"], made["rows"]) == (2, True, 15)
    assert Path(made["path"]).is_relative_to(finished.parent)
    listed = run_json("savepoint", "list")["savepoints"]
    assert [key for key in listed[0] if key not in LIST_EPILOGUE] == []
    assert [(row["id"], row["state"]) for row in listed] == [(made["id"], "complete")]
    sample.add("c1.json", 4)
    assert run_command(["run", "--once"]) == 0
    capfd.readouterr()
    words = ["run", "--once", "--from-savepoint", made["path"]]
    assert run_command(words) == 2
    shown_plan = capfd.readouterr().out
    assert "plan: the restore of epoch 2 after epoch 3" in shown_plan
    assert "4 rows removed" in shown_plan
    assert "then read: all input after the savepoint: 1 file, " in shown_plan
    assert table_ids(table) == sample.ids
    words.append("--yes")
    assert run_command(words) == 0
    shown = capfd.readouterr().err
    assert f"restored savepoint {made['id']} of epoch 2 as epoch 4: 15 rows in" in shown
    assert table_ids(table) == sample.ids
    assert sum(before.values()) == 15
    assert run_command(words) == 0, "a supervisor's restart"
    shown = capfd.readouterr().err
    assert f"savepoint {made['id']} was restored as epoch 4 already; going on" in shown
    assert table_ids(table) == sample.ids
    audit = run_json("checkpoints", "--audit")["audit"]
    assert [(row["what"], row["outcome"]) for row in audit] == [
        ("restore", "done"), ("restore", "begun"), ("savepoint-create", "done"), ("savepoint-create", "begun"),
    ]  # fmt: skip
    would = run_json("savepoint", "dispose", made["id"], "--dry-run")
    assert [key for key in would if key not in DISPOSE_EPILOGUE] == []
    assert (would["dry_run"], Path(made["path"]).exists()) == (True, True)
    assert run_json("savepoint", "dispose", made["id"], "--yes")["dry_run"] is False
    assert not Path(made["path"]).exists()
    assert run_json("savepoint", "list")["savepoints"] == []


def test_text_output(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["savepoint", "list"]) == 0
    assert capsys.readouterr().out.startswith("no savepoints")
    assert run_command(["savepoint", "create", "--path", str(tmp_path / "mine")]) == 0
    first, place = capsys.readouterr().out.splitlines()
    assert "of epoch 2: " in first
    assert first.endswith("pinned")
    assert place == str(tmp_path / "mine")
    assert run_command(["savepoint", "list"]) == 0
    assert "complete" in capsys.readouterr().out
    assert run_command(["savepoint", "dispose", str(tmp_path / "mine"), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was changed; add --yes to do it"
    assert run_command(["savepoint", "dispose", str(tmp_path / "mine"), "--yes"]) == 0
    assert capsys.readouterr().out.startswith("deleted savepoint ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--once", "--from-savepoint", "nowhere"], "is no savepoint"),
        (["run", "--once", "--from-savepoint", "x", "--fresh-after", "2"], "exclude each other"),
        (["run", "--once", "--accept", "x"], "--accept is a part of --from-savepoint"),
        (["savepoint", "dispose", "nowhere", "--yes"], "is no savepoint"),
        (["savepoint", "create", "--path", "in"], "is not empty"),
    ],
)
def test_mistakes_are_told_in_two_lines(
    finished: Path, capfd: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert run_command(words) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(("Error: ", "Try: "))]
    assert len(lines) == 2
    assert message in lines[0]


def test_failures_are_told_as_json_of_the_run(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["savepoint", "create", "--json"]) == 0
    made = json.loads(capfd.readouterr().out)
    path = Path(made["path"]) / "savepoint.json"
    path.write_text(path.read_text().replace('"epoch":2', '"epoch":3'))
    assert run_command(["run", "--once", "--from-savepoint", made["path"]]) == 1
    assert "does not match its checksum" in capfd.readouterr().err
