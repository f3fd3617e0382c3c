"""Random histories of runs, rollbacks, fresh starts, outages, crashes and compaction: every table equals the input."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

import firnline.checkpoint.ledger as ledger
import firnline.run.steps as steps
from firnline.errors import RollbackRefusedError, SinkError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run import edits
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.committers import commit_table, pending_units
from tests.support.pipelines import pipeline_options, run_once
from tests.support.samples import SampleInput, table_ids

LONG = bool(os.environ.get("FIRNLINE_PROOF"))


class History:
    """One random history; everything that happened is told when it goes wrong."""

    def __init__(self, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch, *, staged: bool) -> None:
        self.random = random.Random(seed)
        self.patch = monkeypatch
        self.patch.setattr(ledger, "FOLD_ENTRIES", self.random.choice([2, 3, 5]))
        self.patch.setattr(steps, "FOLD_EVERY", 1)
        self.sample = SampleInput(folder / "in")
        self.trace: list[Any] = [("seed", seed)]
        self.files = 0
        self.newest = 0
        self.down = False
        self.staged = staged
        main = DeltaSinkOptions("main", str(folder / "one"), mode="staged" if staged else "direct")
        copy = DeltaSinkOptions("copy", str(folder / "two"), required=False, partition_by=("month",))
        self.options: PipelineOptions = pipeline_options(
            str(folder / "in"),
            main.table,
            sinks=(main,) if staged else (main, copy),
            commit_policy="required",
            max_files=self.random.choice([1, 2]),
            max_events=self.random.choice([3, 5, 100]),
            rollback_window=self.random.choice([2, 4, 100]),
        )
        self.log, self.away = folder / "two" / "_delta_log", folder / "two" / "_away"

    def add(self) -> None:
        self.files += 1
        extra = {self.random.choice(["e", "g"]): self.files} if self.random.random() < 0.3 else {}
        name = f"{self.random.choice('amz')}{self.files:03d}.json"  # many are late
        self.sample.add(name, self.random.choice([2, 4, 7]), **extra)
        self.run()

    def run(self) -> None:
        run = run_once(self.options)
        self.trace.append(("run", run.exit_code, self.down))
        assert run.exit_code == 0 or self.down, (self.trace, run.result)

    def commit(self) -> None:
        if self.staged:
            report = commit_table(self.options.deciding.location)
            self.trace.append(("commit", report.units))
            assert not report.alarms, self.trace

    def outage(self) -> None:
        if self.staged:
            return
        if self.down:
            self.log.unlink()
            os.rename(self.away, self.log)
        elif self.log.is_dir():
            os.rename(self.log, self.away)
            self.log.write_text("an outage")
        else:
            return
        self.down = not self.down
        self.trace.append(("down", self.down))

    def compact(self) -> None:
        DeltaTable(self.options.deciding.location).optimize.compact()

    def roll_back(self, *, crash: bool = False) -> None:
        pipeline = open_pipeline(self.options)
        newest, committed = pipeline.deciding.load(), pipeline.deciding.load_committed()
        if committed.checkpoint is None:
            return
        floor = committed.checkpoint.floor
        known = [e.epoch for e in pipeline.entries(newest.entry) if floor <= e.epoch < committed.epoch]
        if not known:
            return
        to = self.random.choice(known)
        with self.patch.context() as patch:
            if crash:
                die = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())  # noqa: E731
                patch.setattr(edits, "_record", die)
                patch.setattr("firnline.sinks.staged.sink.drop_pending", die)
            try:
                Rollback(pipeline, to).perform("test")
                self.trace.append(("rollback", to))
            except KeyboardInterrupt:
                self.trace.append(("rollback", to, "crashed"))
            except (RollbackRefusedError, SinkError) as error:
                self.trace.append(("rollback", to, error.message))
                self.check("together" in error.message)

    def crash(self) -> None:
        self.roll_back(crash=True)

    def fresh(self) -> None:
        if self.random.random() < 0.6:
            return
        pipeline = open_pipeline(self.options)
        epoch = pipeline.deciding.load().epoch
        try:
            start_over(pipeline, epoch, "test", truncate=True)
            self.trace.append(("fresh", epoch))
        except SinkError as error:
            self.trace.append(("fresh", epoch, error.message))
            self.check(False)

    def check(self, expected: bool) -> None:
        """Nothing but an outage, or what is expected, may stand in the way."""
        assert self.down or expected, self.trace

    def live(self, length: int) -> None:
        self.add()
        for _ in range(length):
            act = self.random.choice(
                [self.add, self.add, self.run, self.roll_back, self.roll_back, self.crash, self.outage, self.commit,
                 self.commit, self.fresh, self.compact]
            )  # fmt: skip
            act()
            epoch = open_pipeline(self.options).deciding.load().epoch
            assert epoch >= self.newest, self.trace
            self.newest = epoch
        if self.down:
            self.outage()
        for _ in range(2):
            self.run()
            self.commit()


@pytest.mark.parametrize("staged", [False, True], ids=["two sinks", "staged"])
@pytest.mark.parametrize("seed", range(60 if LONG else 8))
def test_every_history_ends_with_the_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, staged: bool
) -> None:
    history = History(tmp_path, seed, monkeypatch, staged=staged)
    history.live(40 if LONG else 14)
    for sink in history.options.sinks:
        assert table_ids(sink.location) == history.sample.ids, history.trace
    if staged:
        assert pending_units(history.options.deciding.location) == [], history.trace
