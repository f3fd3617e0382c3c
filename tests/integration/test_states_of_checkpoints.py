"""What users are told of epochs: staged, committed, failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firnline.errors import EngineError
from firnline.history.checkpoints import load_checkpoints
from firnline.history.status import load_status
from firnline.run.open_pipeline import open_pipeline
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.committers import commit_table
from tests.support.pipelines import Recorder, pipeline_options, run_once
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput


def _states(options: Any) -> list[tuple[int, str, str | None]]:
    rows = load_checkpoints(open_pipeline(options), 20).checkpoints
    return [(row["epoch"], row["status"], row["reason"]) for row in rows]


def test_a_staged_epoch_is_in_progress_until_the_committer_has_committed_it(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"), max_files=1, mode="staged")
    sample.add("a.json", 3)
    sample.add("b.json", 3)
    assert [facts.is_staged for facts in run_once(options).told.epochs] == [True, True]
    waits = "staged, waits for the committer"
    assert _states(options) == [(2, "IN_PROGRESS", waits), (1, "IN_PROGRESS", waits)]
    found = load_status(open_pipeline(options))
    assert (found.epoch, found.committed_epoch) == (2, 0)
    commit_table(tmp_path / "out")
    assert _states(options) == [(2, "COMPLETED", None), (1, "COMPLETED", None)]
    assert load_status(open_pipeline(options)).committed_epoch == 2


def test_an_epoch_whose_run_was_killed_before_the_commit_is_failed(tmp_path: Path) -> None:
    sample = SampleInput(tmp_path / "in")
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"), max_files=1)
    sample.add("a.json", 3)
    sample.add("b.json", 3)
    assert Launcher(tmp_path / "child").run(options, "epoch.commit.before:2:kill").exit_code == KILLED
    assert _states(options) == [(2, "FAILED", "its run ended before the commit"), (1, "COMPLETED", None)]
    assert run_once(options).exit_code == 0
    assert (2, "COMPLETED", None) in _states(options)


class _FailsOnce(LocalEngine):
    failed = False

    def run(
        self, tag: str, orders: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        if not self.failed:
            self.failed = True
            raise EngineError("Spark stumbled")
        return super().run(tag, orders, timeout_seconds)


def test_an_attempt_that_failed_is_listed_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline.run.runner import Runner

    sample = SampleInput(tmp_path / "in")
    sample.add("a.json", 3)
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"))
    assert Runner(open_pipeline(options, once=True), _FailsOnce(1), Recorder(), once=True).run().exit_code == 0
    assert _states(options) == [(1, "COMPLETED", None), (1, "FAILED", "Spark stumbled")]
