"""Savepoints, restores, rollbacks and sweeps of a pipeline with state, killed at every point that they reach.

Whatever is left behind, the same command ends it, and the pipeline's answers are those of a run without trouble.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.catalog import dispose_savepoint, list_savepoints
from firnline.history.savepoints.create import create_savepoint
from firnline.maintenance.state import sweep_state
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.keyed import KeyedInput, answers, answers_without_trouble, keyed_options
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import delta_table, run_to_end

pytestmark = pytest.mark.crash

MOST_KILLS = in_proof(None)
NEEDED = {
    "create": "savepoint.copy",
    "dispose": "savepoint.delete",
    "restore": "state.replicate",
    "rollback": "delta.jump",
    "sweep": "state.sweep",
}


@dataclass(frozen=True)
class Stage:
    """A pipeline after six epochs, with a savepoint of its second; `keep` holds it all as it was made."""

    options: PipelineOptions
    folder: Path
    keep: Path
    answers: list[tuple[Any, ...]]

    @property
    def target(self) -> PipelineOptions:
        """The same pipeline, into a table that does not exist yet."""
        return replace(self.options, sinks=(replace(delta_table(self.options), table=str(self.folder / "new")),))

    def start_over(self) -> Stage:
        shutil.rmtree(self.folder)
        shutil.copytree(self.keep, self.folder)
        return self


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    folder, keep = tmp_path / "world", tmp_path / "keep"
    keyed = KeyedInput(folder / "in")
    options = keyed_options(folder, rollback_window=2, keep_checkpoints=0, keep_aborted_secs=0.0)
    for epoch in range(1, 7):
        keyed.add()
        run_to_end(options)
        if epoch == 2:
            create_savepoint(open_pipeline(options), str(folder / "saved"), copy=True)
    expected = answers_without_trouble(folder, options)
    shutil.rmtree(folder / "untroubled-delta")
    shutil.copytree(folder, keep)
    return Stage(options, folder, keep, expected)


def operate(name: str, stage: Stage) -> None:
    pipeline = open_pipeline(stage.target if name == "restore" else stage.options)
    if name == "create":
        create_savepoint(pipeline, str(stage.folder / "another"), copy=True)
    elif name == "dispose":
        dispose_savepoint(pipeline, str(stage.folder / "saved"))
    elif name == "restore":
        restore_savepoint(pipeline, str(stage.folder / "saved"), "test")
    elif name == "rollback":
        Rollback(pipeline, 5).perform("test")
    else:
        sweep_state(pipeline, grace_seconds=0)


def finish(name: str, stage: Stage) -> None:
    """Do it again until it is done; what a killed `create` left is disposed of first."""
    if name == "create":
        for found in list_savepoints(open_pipeline(stage.options)):
            if found.state == "incomplete":
                dispose_savepoint(open_pipeline(stage.options), found.id)
                left = [path for path in (stage.folder / "another").rglob("*") if path.is_file()]
                assert [path for path in left if path.suffix != ".tmp"] == [], "a kill may leave a temporary file"
        if (stage.folder / "another" / "savepoint.json").exists():
            return
    if (
        name == "dispose"
        and not (stage.folder / "saved").exists()
        and not list_savepoints(open_pipeline(stage.options))
    ):
        return
    if name == "rollback" and open_pipeline(stage.options).load().epoch > 6:
        return
    operate(name, stage)


@pytest.mark.parametrize("name", list(NEEDED))
def test_killed_anywhere_it_is_ended_by_the_same_command(stage: Stage, name: str) -> None:
    def check(stage: Stage, where: str) -> None:
        finish(name, stage)
        options = stage.target if name == "restore" else stage.options
        run_to_end(options)
        assert answers(options.deciding.location) == stage.answers, where

    points = kill_at_every_point(stage.start_over, partial(operate, name), check, most=MOST_KILLS)
    assert points[f"{NEEDED[name]}.before"] > 0
