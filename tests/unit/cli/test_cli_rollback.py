"""`firnline rollback`: the plan first, the deed with --yes, refusals in two lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.cli.main import run_command
from firnline.spec.build import load_options
from firnline.testing.pipelines import run_once
from firnline.testing.samples import SampleInput, table_ids

RunJson = Callable[..., Any]


def version(folder: Path) -> int:
    return DeltaTable(str(folder / "out")).version()


def test_the_plan_changes_nothing(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = version(finished.parent)
    assert run_command(["rollback", "--to", "1"]) == 0
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
        ([], "say where to go back to"),
        (["--to", "1", "--to-time", "1h"], "say where to go back to"),
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
    found = run_json("rollback", "--to-time", first["latest_ack_timestamp"])
    assert (found["to_epoch"], found["done"]) == (1, False)
