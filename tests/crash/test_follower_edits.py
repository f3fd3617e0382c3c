"""Followers of a pipeline whose spec is edited between kills: renamed, away, collected by gc, with dead letters.

The seed decides what is edited and where a process is killed. In the end every follower has each row once.
`FIRNLINE_SEED` repeats a seed; `FIRNLINE_PROOF` makes many more edits.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import ConfigError
from firnline.faults import POINTS
from firnline.history.edits.dead_letters import LetterEdit
from firnline.maintenance.gc import gc
from firnline.options import OutboxOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import registry
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.http.options import HttpSinkOptions
from tests.support.pipelines import pipeline_options, run_once
from tests.support.processes import KILLED, Launcher, RunOrder
from tests.support.receiver import Receiver, running_receiver
from tests.support.samples import SampleInput
from tests.support.sqlite_sink import DOWN, SqliteSinkOptions, sqlite_ids

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3600)]

STEPS = 400 if os.environ.get("FIRNLINE_PROOF") else 15
SEED = int(os.environ.get("FIRNLINE_SEED", "120"))
KILLS = tuple(
    point
    for point in POINTS
    if point.startswith(("epoch.", "follower.", "outbox.", "letter.", "delta.commit", "http.", "storage."))
)
# Entries are folded early, so that what a follower lacks would be missing soon.
PATCHES = {"firnline.checkpoint.ledger:FOLD_ENTRIES": 4, "firnline.run.steps:FOLD_EVERY": 3}
NOTHING_LEFT = 9


def run(order: RunOrder) -> int:
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    return run_once(order.options).exit_code


def collect(order: RunOrder) -> int:
    if Path(order.options.home.root, "_delta_log").exists():
        gc(order.options.home.root, grace_seconds=0)
    return 0


def retry(order: RunOrder) -> int:
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    try:
        LetterEdit(open_pipeline(order.options), "retry").perform("person")
    except ConfigError:
        return NOTHING_LEFT
    return 0


class Editor:
    """A pipeline with three followers, and somebody who edits it."""

    def __init__(self, folder: Path, receiver: Receiver, draw: random.Random) -> None:
        self.folder = folder
        self.sample = SampleInput(folder / "in")
        self.log: list[Any] = []
        self._draw = draw
        self._sinks: dict[str, Any] = {
            "all": SqliteSinkOptions("all", str(folder / "all.db"), required=False),
            "even": SqliteSinkOptions("even", str(folder / "even.db"), on_bad_row="dead_letter", where="id % 2 = 0"),
            "hook": HttpSinkOptions("hook", receiver.url, required=False, max_rows=7),
        }
        self._keep = timedelta(hours=1)
        self._launchers = {work: Launcher(folder / work.__name__, work) for work in (run, collect, retry)}

    @property
    def options(self) -> PipelineOptions:
        table = DeltaSinkOptions("table", str(self.folder / "table"))
        options = pipeline_options(
            str(self.folder / "in"), "", max_files=1, rollback_window=2, sinks=(table, *self._sinks.values())
        )
        return replace(options, outbox=OutboxOptions(keep=self._keep))

    def do(self, work: Any, *, killed: bool = True) -> int:
        draw = self._draw
        fault = f"{draw.choice(KILLS)}:{draw.randint(1, 4)}:kill" if killed and draw.random() < 0.6 else ""
        ended = self._launchers[work].run(self.options, fault, patches=PATCHES)
        self.log.append((work.__name__, fault, ended.exit_code))
        allowed = {run: (0, 3, 4), collect: (0,), retry: (0, 3, NOTHING_LEFT, 70)}[work]
        assert ended.exit_code in (*allowed, KILLED), (self.log, ended)
        return ended.exit_code

    def step(self) -> None:
        draw = self._draw
        edit = draw.choices(["run", "down", "gc", "rename", "keep", "refuse", "retry"], [10, 3, 3, 2, 1, 1, 1])[0]
        if edit == "run":
            for _ in range(draw.randint(0, 3)):
                self.sample.add(f"f{len(self.sample.ids):06d}.json", draw.randint(1, 20))
            self.do(run)
        elif edit == "down":
            down = self.folder / f"{draw.choice(['all', 'even'])}.db{DOWN}"
            down.unlink() if down.exists() else down.touch()
        elif edit == "gc":
            self.do(collect)
        elif edit == "rename":
            first = draw.choice(list(self._sinks))
            name = draw.choice([first, f"{first}1", f"{first}2"])
            former = "" if name == first else first
            self._sinks[first] = replace(self._sinks[first], name=name, renamed_from=former)
        elif edit == "keep":
            self._keep = draw.choice([timedelta(0), timedelta(hours=1)])
        elif edit == "refuse":
            self._sinks["even"] = replace(self._sinks["even"], refused=draw.choice([None, 2 * draw.randint(1, 40)]))
        else:
            self.do(retry)
        if edit not in ("run", "gc", "retry"):
            self.log.append((edit, [(sink.name, sink.renamed_from) for sink in self._sinks.values()], self._keep))

    def finish(self) -> None:
        """Bring everything back, and run until nothing is left."""
        for name in ("all", "even"):
            (self.folder / f"{name}.db{DOWN}").unlink(missing_ok=True)
        self._sinks["even"] = replace(self._sinks["even"], refused=None)
        ends = [self.do(run, killed=False) for _ in range(3)]  # a run ends without waiting for optional sinks
        while self.do(retry, killed=False) != NOTHING_LEFT and len(ends) < 9:
            ends.append(self.do(run, killed=False))
        assert ends[-1] == 0, self.log


def test_every_row_arrives_once_whatever_is_edited_between_kills(tmp_path: Path) -> None:
    with running_receiver() as receiver:
        editor = Editor(tmp_path, receiver, random.Random(SEED))
        for _ in range(STEPS):
            editor.step()
        editor.finish()
        expected, told = editor.sample.ids, f"repeat: FIRNLINE_SEED={SEED}; {editor.log}"
        assert sqlite_ids(tmp_path / "all.db") == expected, told
        assert sqlite_ids(tmp_path / "even.db") == Counter(i for i in expected.elements() if i % 2 == 0), told
        assert receiver.ids == expected, told
