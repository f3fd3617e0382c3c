"""`firnline run --fresh-after`: over again for one named epoch, and never twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.cli.main import run_command
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.usefixtures("no_spark")


def test_truncated_and_read_again_once(finished: Path, sample: SampleInput, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--once", "--fresh-after", "2", "--truncate", "--yes"]
    assert run_command(words) == 0
    shown = capfd.readouterr()
    assert "started over after epoch 2 as epoch 3; rows removed" in shown.err
    assert table_ids(str(finished.parent / "out")) == sample.ids
    assert run_command(words) == 0, "a supervisor's restart"
    shown = capfd.readouterr()
    assert "started over after epoch 2 already, as epoch 3; going on" in shown.err
    assert shown.out.startswith("nothing to do; the table is at epoch")
    assert table_ids(str(finished.parent / "out")) == sample.ids


def test_rows_stay_without_truncate(finished: Path, sample: SampleInput, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--once", "--fresh-after", "2", "--yes"]) == 0
    assert "rows stay" in capfd.readouterr().err
    assert table_ids(str(finished.parent / "out")) == dict.fromkeys(sample.ids, 2)


def test_another_epoch_is_refused(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--once", "--fresh-after", "1"]) == 1
    assert "Error: the table holds epoch 2, not 1\nTry: " in capfd.readouterr().err


def test_truncate_alone_makes_no_sense(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "--once", "--truncate"]) == 2
    assert "--truncate is a part of --fresh-after" in capfd.readouterr().err


def test_without_yes_the_plan_is_shown_and_nothing_changes(
    finished: Path, sample: SampleInput, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["run", "--once", "--fresh-after", "2"]) == 2
    shown = capfd.readouterr()
    rows = sample.ids.total()
    assert f"{rows} rows stay, up to {rows} rows come twice" in shown.out
    assert "then read: all input from the beginning: " in shown.out
    assert "Error: nothing was changed" in shown.err
    assert run_command(["run", "--once", "--fresh-after", "2", "--truncate", "--yes", "--dry-run"]) == 0
    assert f"{rows} rows removed" in capfd.readouterr().out
    assert table_ids(str(finished.parent / "out")) == sample.ids
    assert run_command(["run", "--once", "--yes"]) == 2
    assert "--yes and --dry-run belong to" in capfd.readouterr().err
