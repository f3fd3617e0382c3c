"""`firnline rollback`: the plan first, the deed with --yes, refusals in two lines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.history.edits.rollback import position_text
from firnline.sources.base import PositionView
from firnline.spec.build import load_options
from tests.support.pipelines import run_once
from tests.support.samples import SampleInput, table_ids

RunJson = Callable[..., Any]


def version(folder: Path) -> int:
    return DeltaTable(str(folder / "out")).version()


def test_the_plan_changes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = version(finished.parent)
    assert run_command(["rollback", "--to", "1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "epoch 3 will equal epoch 1" in out
    assert "read again" in out
    assert out.endswith("nothing was changed; add --yes to do it\n")
    assert run_command(["rollback", "--to", "1", "--yes", "--dry-run"]) == 0
    assert version(finished.parent) == before


def test_yes_does_it_and_a_run_reads_the_rest_again(
    finished: Path, sample: SampleInput, run_json: RunJson, capsys: pytest.CaptureFixture[str]
) -> None:
    table = str(finished.parent / "out")
    found = run_json("rollback", "--to", "1", "--yes")
    assert (found["done"], found["from_epoch"], found["to_epoch"], found["new_epoch"]) == (True, 2, 1, 3)
    assert found["sinks"][0]["rows_removed"] == 5
    assert found["refusals"] == []
    assert sum(table_ids(table).values()) == 10
    assert run_once(load_options(finished, environ={})).exit_code == 0
    assert table_ids(table) == sample.ids
    trail = run_json("checkpoints", "--audit")
    text = json.dumps(trail)
    assert '"what": "rollback"' in text
    assert '"outcome": "done"' in text


def test_a_refusal_shows_the_plan_then_two_lines(
    finished: Path, sample: SampleInput, capsys: pytest.CaptureFixture[str]
) -> None:
    sample.path("b2.json").unlink()
    before = version(finished.parent)
    assert run_command(["rollback", "--to", "1", "--yes"]) == 1
    streams = capsys.readouterr()
    assert "read again" in streams.out
    assert streams.err.startswith("Error: cannot go back to epoch 1: the source no longer has 1 file(s)")
    assert "\nTry: Bring the files back" in streams.err
    assert version(finished.parent) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name the target of the rollback"),
        (["--to", "1", "--to-time", "1h"], "--to and --to-time exclude each other"),
        (["--to-time", "yesterday"], "not a time with a zone"),
        (["--to-time", "2026-11-16T08:00:00"], "not a time with a zone"),
        (["--to", "-1"], "--to"),
    ],
)
def test_wrong_words(finished: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str) -> None:
    assert run_command(["rollback", *words]) == 2
    assert told in capsys.readouterr().err


def test_by_time(finished: Path, run_json: RunJson, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["rollback", "--to-time", "1d"]) == 1
    assert "no epoch was committed by" in capsys.readouterr().err
    first = run_json("checkpoints")["checkpoints"][-1]
    found = run_json("rollback", "--to-time", first["latest_ack_timestamp"], "--dry-run")
    assert (found["to_epoch"], found["done"]) == (1, False)


def test_an_epoch_beyond_the_newest_does_not_exist_yet(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["rollback", "--to", "7"]) == 1
    assert capsys.readouterr().err.startswith("Error: epoch 7 does not exist yet: the table is at epoch 2\n")


def test_a_sink_that_cannot_be_left_is_answered_with_those_that_can(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["rollback", "--to", "1", "--leave", "nosuch"]) == 1
    assert "\nTry: There is no further sink; delta-1 decides, and cannot be left.\n" in capsys.readouterr().err
    finished.write_text(
        finished.read_text().replace("batch:", "  - {type: delta, name: more, table: more, required: false}\nbatch:")
    )
    assert run_command(["rollback", "--to", "1", "--leave", "nosuch"]) == 1
    told = capsys.readouterr().err
    assert "\nTry: Sinks that can be left: more; delta-1 decides, and cannot be left.\n" in told


@pytest.mark.parametrize("words", [["--to", "1"], ["--to-time", "1h"]])
def test_a_table_that_is_gone_is_no_new_pipeline(
    finished: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    shutil.rmtree(finished.parent / "out")
    assert run_command(["rollback", *words]) == 1
    told = capsys.readouterr().err
    assert "the table is gone: nothing is at" in told
    assert "holds epoch 2\nTry: Bring the right table back" in told


@pytest.mark.parametrize("words", [["--to", "1"], ["--to-time", "1h"]])
def test_before_the_first_run(spec: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run_command(["rollback", *words]) == 1
    assert capsys.readouterr().err == (
        "Error: there is no epoch to go back from\nTry: `firnline run` makes the first.\n"
    )


def test_positions_of_sources_that_are_not_read_by_input_are_shown_by_their_facts() -> None:
    assert position_text(PositionView({"lines_read": 40}, "app.log")) == "lines_read 40"
    assert position_text(PositionView({}, "in", by_input=True, last="in/f1.json")) == "in/f1.json"
    assert position_text(PositionView({}, "in", by_input=True)) == position_text(None) == "the beginning"


@pytest.mark.parametrize("verb", ["rollback", "run", "compact"])
def test_help_offers_no_empty_options_and_one_default(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([verb, "--help"]) == 0
    out = capsys.readouterr().out
    assert "--empty-" not in out
    assert "()" not in out


def test_copies_that_are_passed_over_are_told_with_the_reason(spec: Path) -> None:
    spec.write_text(spec.read_text() + "checkpoint: {local: {path: near}, remote: {uri: far}}\n")
    assert run_once(load_options(spec, environ={})).exit_code == 0
    for folder in ("near", "far"):
        for path in (spec.parent / folder).rglob("*.json"):
            path.write_bytes(b"{}")
    words = [sys.executable, "-m", "firnline.cli", "rollback", "--to", "1", "--yes"]
    done = subprocess.run(words, cwd=spec.parent, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if "copy passed over" in line]
    assert len(lines) == 2, done.stderr
    assert [line.split("  ")[:2] for line in lines] == [
        ["warning: copy passed over", "tier=local"], ["warning: copy passed over", "tier=remote"],
    ]  # fmt: skip
    assert all("  reason=" in line for line in lines)
