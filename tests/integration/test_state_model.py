"""Random histories of a pipeline with state: whatever happens, its answers are those of a run without trouble."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import firnline.checkpoint.ledger as ledger
import firnline.run.steps as steps
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.rollback import Rollback
from firnline.maintenance.gc import gc
from firnline.maintenance.state import sweep_state
from firnline.options import OperatorOptions, StateOptions, TriggerOptions
from firnline.run import edits
from firnline.run.open_pipeline import open_pipeline
from tests.support.keyed import GRAPHS, KeyedInput, answers, answers_without_trouble, keyed_options
from tests.support.pipelines import run_once

LONG = bool(os.environ.get("FIRNLINE_PROOF"))


class History:
    """One random history; everything that happened is told when it goes wrong."""

    def __init__(
        self, folder: Path, seed: int, patch: pytest.MonkeyPatch, operators: tuple[OperatorOptions, ...]
    ) -> None:
        self.random = random.Random(seed)
        self.patch = patch
        self.patch.setattr(ledger, "FOLD_ENTRIES", self.random.choice([2, 3, 5]))
        self.patch.setattr(steps, "FOLD_EVERY", 1)
        self.input = KeyedInput(folder / "in", seed)
        self.trace: list[Any] = [("seed", seed)]
        self.rollbacks = 0
        self.options = keyed_options(
            folder,
            operators,
            shards=self.random.choice([1, 2, 3]),
            trigger=TriggerOptions(every_epochs=self.random.choice([1, 1, 2, 4])),
            rollback_window=self.random.choice([1, 3, 6, 100]),
            keep_checkpoints=self.random.choice([0, 1, 3]),
            keep_aborted_secs=0.0,
        )

    def add(self) -> None:
        for _ in range(self.random.choice([1, 1, 2, 4])):
            self.input.add(self.random.choice([1, 4, 9]))
        self.run()

    def run(self) -> None:
        run = run_once(self.options)
        self.trace.append(("run", run.exit_code, run.pipeline.load().epoch))
        assert run.exit_code == 0, (self.trace, run.result)

    def rescale(self) -> None:
        shards = self.random.choice([1, 2, 3, 5])
        self.options = replace(self.options, state=StateOptions(shards=shards))
        self.trace.append(("rescale", shards))

    def roll_back(self, *, crash: bool = False) -> None:
        pipeline = open_pipeline(self.options)
        held = pipeline.deciding.load()
        floor = held.checkpoint.floor if held.checkpoint else 0
        known = [e.epoch for e in pipeline.entries(held.entry) if floor <= e.epoch < held.epoch]
        if not known:
            return
        to = self.random.choice(known)
        with self.patch.context() as patch:
            if crash:
                patch.setattr(edits, "_record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
            try:
                Rollback(pipeline, to).perform("test")
            except KeyboardInterrupt:
                assert crash
        self.rollbacks += 1
        self.trace.append(("rollback", to, crash))

    def crash(self) -> None:
        self.roll_back(crash=True)

    def fresh(self) -> None:
        if self.random.random() < 0.7:
            return
        pipeline = open_pipeline(self.options)
        done = start_over(pipeline, pipeline.deciding.load().epoch, "test", truncate=True)
        assert pipeline.deciding.load().checkpoint.state == {}  # type: ignore[union-attr]  # it has just been written
        self.trace.append(("fresh", done.epoch))

    def sweep(self) -> None:
        gc(self.options.deciding.location, grace_seconds=0)
        (home,) = sweep_state(open_pipeline(self.options), grace_seconds=0)
        self.trace.append(("sweep", home.checkpoints, home.files, home.kept))

    def check(self) -> None:
        """One may go back to every epoch from the floor on, whatever was swept."""
        pipeline = open_pipeline(self.options)
        held = pipeline.deciding.load()
        floor = held.checkpoint.floor if held.checkpoint else 0
        for entry in pipeline.entries(held.entry):
            if floor <= entry.epoch < held.epoch:
                refusals = Rollback(open_pipeline(self.options), entry.epoch).plan().refusals
                assert not refusals, (self.trace, entry.epoch, refusals)

    def live(self, length: int) -> None:
        self.add()
        for _ in range(length):
            act = self.random.choice(
                [self.add, self.add, self.add, self.roll_back, self.roll_back, self.crash, self.rescale, self.fresh,
                 self.sweep, self.sweep]
            )  # fmt: skip
            act()
        self.sweep()
        self.check()
        self.run()


@pytest.mark.parametrize("graph", list(GRAPHS))
@pytest.mark.parametrize("seed", range(40 if LONG else 5))
def test_every_history_ends_with_the_answers_of_a_run_without_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, graph: str
) -> None:
    history = History(tmp_path, seed, monkeypatch, GRAPHS[graph])
    history.live(40 if LONG else 14)
    found = answers(history.options.deciding.location)
    assert found == answers_without_trouble(tmp_path, history.options), history.trace
