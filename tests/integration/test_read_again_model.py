"""Random requests to read again, compared with a model: every record is in the table as often as the model says."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import ConfigError
from firnline.history.edits.rollback import Rollback
from firnline.history.quarantine import load_quarantine_files
from firnline.history.reread import plan_reread
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.read_again import expand
from firnline.run.requests import Requests
from tests.support.pipelines import pipeline_options, run_once
from tests.support.upserts import read_by_duckdb

SEEDS = range(40) if os.environ.get("FIRNLINE_PROOF") else range(3)
STEPS = 12
STRICT: dict[str, Any] = {"write": "upsert", "key": ("v",)}  # a record without `v` is bad


@dataclass
class State:
    """What an epoch leaves behind."""

    rows: Counter[int] = field(default_factory=Counter)  # id -> rows in the table
    waiting: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)  # in quarantine -> file, record
    readings: dict[str, int] = field(default_factory=dict)  # file -> its newest reading


@dataclass(frozen=True)
class Asked:
    """A request that waits; made once or, from an old plan, again."""

    rows: frozenset[tuple[str, int]] = frozenset()
    discard: bool = False
    path: str = ""
    reading: int = 0


class Model:
    """A pipeline, and what its table must hold."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.folder, self.table = root / "in", str(root / "out")
        self.folder.mkdir()
        self.files: dict[str, list[tuple[int, bool]]] = {}  # name -> id, and whether it has `v`
        self.ids = self.reading = 0
        self.state = State()
        self.history: list[tuple[int, State]] = []  # epochs that a rollback may go to
        self.open: dict[str, Asked] = {}
        self.plans: list[tuple[Asked, dict[str, Any]]] = []  # every request ever made, to be made again

    def pipeline(self, **settings: Any) -> OpenPipeline:
        return open_pipeline(pipeline_options(str(self.folder), self.table, **settings))

    def add_file(self) -> None:
        name = f"{len(self.files):03d}.json"
        count = self.random.randint(1, 4)
        records = [(self.ids + n, self.random.random() < 0.5) for n in range(count)]
        self.ids += count
        self.files[name] = records
        lines = [f'{{"id": {n}, "v": "{n}"}}' if has_v else f'{{"id": {n}}}' for n, has_v in records]
        (self.folder / name).write_text("\n".join(lines) + "\n")

    # -- requests -------------------------------------------------------------------------------------

    def ask_replay(self) -> None:
        files = []
        for file in load_quarantine_files(self.pipeline()):
            rows = [number for number, _ in file.rows if self.random.random() < 0.7]
            files += [file.describe(rows)] if rows else []
        if files:
            chosen = frozenset((str(f["name"]), row) for f in files for row in expand(f["rows"]))
            self._ask(Asked(rows=chosen, discard=self.random.random() < 0.3), {"files": files})

    def ask_reread(self) -> None:
        if self.state.readings:
            name = self.random.choice(sorted(self.state.readings))
            plan = plan_reread(self.pipeline(), name)
            asked = Asked(path=name, reading=self.state.readings[name])
            self._ask(asked, {"path": plan.path, "reading": plan.reading})

    def ask_again(self) -> None:
        if self.plans:
            self._ask(*self.random.choice(self.plans))

    def _ask(self, asked: Asked, body: dict[str, Any]) -> None:
        pipeline = self.pipeline()
        if asked.path:
            pipeline.requests.ask_reread(body["path"], "files", reading=body["reading"], ids=pipeline.ids)
        else:
            pipeline.requests.ask_replay("files", body["files"], discard=asked.discard, ids=pipeline.ids)
        (new,) = {request.id for request in pipeline.requests.load()} - self.open.keys()
        self.open[new] = asked
        self.plans.append((asked, body))

    # -- runs -----------------------------------------------------------------------------------------

    def run(self, *, crash: bool) -> None:
        # An upsert of records that are read twice would overwrite rows; the model counts rows that are appended.
        strict = not any(asked.path for asked in self.open.values()) and self.random.random() < 0.6
        settings: dict[str, Any] = {**(STRICT if strict else {}), "max_files": self.random.choice([1, 100])}
        options = pipeline_options(str(self.folder), self.table, **settings)
        if crash:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Requests, "done", _fail)
                run_once(options)
        run = run_once(options)
        assert run.exit_code == 0, run.result.error
        fresh = self._expect(strict)
        assert self.pipeline().requests.load() == []
        rows = {
            (file.name, number): (Path(str(row["file"])).name, int(row["record"]))
            for file in load_quarantine_files(self.pipeline())
            for number, row in file.rows
        }
        assert sorted(rows.values()) == sorted([*self.state.waiting.values(), *fresh])
        assert rows.items() >= self.state.waiting.items()
        self.state.waiting = rows
        self.remember()

    def _expect(self, strict: bool) -> list[tuple[str, int]]:
        """Answer the requests and read new files. Returns the records that are quarantined newly."""
        state, fresh = self.state, list[tuple[str, int]]()

        def read(name: str, numbers: list[int]) -> None:
            for number in numbers:
                record, has_v = self.files[name][number]
                if strict and not has_v:
                    fresh.append((name, number))
                else:
                    state.rows[record] += 1

        asked = [self.open[request] for request in sorted(self.open)]
        self.open = {}
        for one in asked:
            for row in sorted(one.rows & state.waiting.keys()):
                name, number = state.waiting.pop(row)
                if not one.discard:
                    read(name, [number])
        unread = [name for name in sorted(self.files) if name not in state.readings]
        for one in asked:
            if one.path and state.readings.get(one.path) == one.reading:
                state.waiting = {row: where for row, where in state.waiting.items() if where[0] != one.path}
                self._read_file(one.path, read)
        for name in unread:
            self._read_file(name, read)
        return fresh

    def _read_file(self, name: str, read: Any) -> None:
        self.reading += 1
        self.state.readings[name] = self.reading
        read(name, list(range(len(self.files[name]))))

    def rollback(self) -> None:
        if len(self.history) > 1:
            at = self.random.randrange(len(self.history) - 1)
            epoch, state = self.history[at]
            if epoch < self.history[-1][0]:
                Rollback(self.pipeline(), epoch).perform("test")
                del self.history[at + 1 :]
                self.state = deepcopy(state)
                self.remember()

    def remember(self) -> None:
        self.history.append((self.pipeline().load().epoch, deepcopy(self.state)))

    def check(self, done: list[str]) -> None:
        found = Counter(row[0] for row in read_by_duckdb(self.table, ["id"]))
        assert found == self.state.rows, done


def _fail(_: Requests, __: object) -> None:
    raise ConfigError("killed between the commit and the deletion of a request")


@pytest.mark.parametrize("seed", SEEDS)
def test_every_record_is_in_the_table_as_often_as_the_model_says(tmp_path: Path, seed: int) -> None:
    model = Model(tmp_path, seed)
    model.add_file()
    model.add_file()
    model.run(crash=False)
    actions: dict[str, Callable[[], None]] = {
        "file": model.add_file,
        "replay": model.ask_replay,
        "reread": model.ask_reread,
        "again": model.ask_again,
        "rollback": model.rollback,
        "run": lambda: model.run(crash=False),
        "crash": lambda: model.run(crash=True),
    }
    done: list[str] = []
    for _ in range(STEPS):
        done += model.random.choices(list(actions), weights=[2, 3, 1, 2, 2, 3, 1])
        actions[done[-1]]()
        model.check(done)
    model.run(crash=False)
    model.check(done)
