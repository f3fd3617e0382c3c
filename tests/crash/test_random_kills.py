"""kill -9 at any moment, not only at named points: the first recovery succeeds, and readers never see a row go.

The seed decides what arrives and when a process is killed within its usual lifetime; what it is doing then is chance.
`FIRNLINE_SEED` repeats a seed; `FIRNLINE_PROOF` makes many more kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.committers import committer_launcher
from tests.support.counters import CounterInput, counter_options, read_counts
from tests.support.pipelines import pipeline_options
from tests.support.processes import KILLED, Child, Launcher
from tests.support.proof import covered
from tests.support.samples import SampleInput, quarantined, table_ids

pytestmark = pytest.mark.crash

KILLS = 400 if os.environ.get("FIRNLINE_PROOF") else 15  # of each kind of pipeline
SEED = int(os.environ.get("FIRNLINE_SEED", "1"))
ROWS = 7  # of every input file; an epoch reads whole files
Content: TypeAlias = Mapping[object, int]  # what a reader sees: a row, or a key, and how often it was counted


class World(ABC):
    """A pipeline, its input, and what its tables must hold."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder = folder
        self.draw = draw
        self.launcher = Launcher(folder / "children")
        self.options = self.make_options()

    @abstractmethod
    def make_options(self) -> PipelineOptions:
        """The pipeline."""

    @abstractmethod
    def add_file(self) -> None:
        """One more input file of so many rows."""

    def start(self) -> list[Child]:
        """Start every process that the pipeline needs."""
        return [self.launcher.start(self.options, threads=2)]

    def recover(self) -> None:
        """Run everything once, to its end."""
        self.launcher.run_until_done(self.options)

    def look(self, table: str) -> Content:
        """What a reader sees in a table now: the log read by delta-rs, the files by Arrow."""
        files = [str(uri) for uri in DeltaTable(table).file_uris()]
        rows = [row for file in files for row in pq.ParquetFile(file).read(columns=["id"]).column("id").to_pylist()]
        return Counter(rows)

    @abstractmethod
    def check(self) -> None:
        """After a recovery: the tables are those of the input."""


class Direct(World):
    """One table, with records that are set aside."""

    def make_options(self) -> PipelineOptions:
        self.sample = SampleInput(self.folder / "in")
        self.numbers = iter(range(10**6))
        return pipeline_options(str(self.folder / "in"), str(self.folder / "one"), max_files=2, **self.settings())

    def settings(self) -> dict[str, Any]:
        return {"partition_by": ("month",)}

    def add_file(self) -> None:
        name = f"{self.draw.choice('abxy')}{next(self.numbers):04}{self.draw.choice(('.json', '.json.gz'))}"
        self.sample.add(name, ROWS, bad=self.draw.randint(0, 1))

    def check(self) -> None:
        for sink in self.options.sinks:
            assert table_ids(sink.location) == self.sample.ids
        assert quarantined(self.options.deciding.location, self.options.name) == self.sample.bad


class TwoSinks(Direct):
    """Two tables, each whole."""

    def settings(self) -> dict[str, Any]:
        one = DeltaSinkOptions("main", str(self.folder / "one"))
        two = DeltaSinkOptions("copy", str(self.folder / "two"), partition_by=("month",))
        return {"sinks": (one, two)}


class Staged(Direct):
    """A staged table, whose committer is killed, too."""

    def settings(self) -> dict[str, Any]:
        return {"mode": "staged"}

    def make_options(self) -> PipelineOptions:
        self.committers = committer_launcher(self.folder / "committers")
        return super().make_options()

    def start(self) -> list[Child]:
        return [*super().start(), self.committers.start(self.options, once=False)]

    def recover(self) -> None:
        super().recover()
        assert self.committers.run(self.options).exit_code == 0


class Upsert(Direct):
    """Rows are inserted and updated by key."""

    def settings(self) -> dict[str, Any]:
        return {"write": "upsert", "key": ("id",)}

    def add_file(self) -> None:
        """New rows, and an update of one that is there or comes in the same epoch."""
        number = next(self.numbers)
        lines = self.sample.lines(ROWS, _op="insert", _sequence=number)
        old = {**json.loads(lines[-1]), "id": self.draw.choice(list(self.sample.ids)), "_op": "update"}
        (self.folder / "in" / f"{number:04}.json").write_bytes(b"\n".join([*lines, json.dumps(old).encode(), b""]))


class State(World):
    """Counters per key, in an upserted table; the operator notes every update that is lost or doubled."""

    def make_options(self) -> PipelineOptions:
        self.counted = CounterInput(self.folder / "in", self.draw.randint(0, 99))
        return counter_options(self.counted.folder, self.folder / "table")

    def add_file(self) -> None:
        self.counted.add(rows=ROWS)

    def look(self, table: str) -> Content:
        return {key: count for key, count, *_ in read_counts(table)}

    def check(self) -> None:
        assert read_counts(self.options.deciding.location) == self.counted.expected()


KINDS: dict[str, type[World]] = {
    "direct": Direct,
    "two-sinks": TwoSinks,
    "staged": Staged,
    "upsert": Upsert,
    "state": State,
}


class Reader(threading.Thread):
    """Reads a table all the time: what it has seen stays, and it never sees a part of an input file."""

    def __init__(self, table: str, look: Callable[[str], Content]) -> None:
        super().__init__(name=f"reader of {table}", daemon=True)
        self._table, self._look = table, look
        self._seen: Content = {}
        self._ended = threading.Event()
        self.looks = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ended.wait(0.05):
                self._check()
        except BaseException as error:
            self.error = error

    def _check(self) -> None:
        now = self._look(self._table)
        gone = {row: count for row, count in self._seen.items() if now.get(row, 0) < count}
        assert not gone, f"seen in {self._table}, and gone again: {gone}"
        assert sum(now.values()) % ROWS == 0, f"{self._table} shows a part of an epoch: {sum(now.values())} rows"
        self._seen = now
        self.looks += 1

    def end(self) -> None:
        self._ended.set()
        self.join(60)
        if self.error is not None:
            raise self.error
        assert self.looks > 0, f"{self._table} was never read"


@contextmanager
def readers(world: World) -> Iterator[None]:
    found = [Reader(sink.location, world.look) for sink in world.options.sinks]
    for reader in found:
        reader.start()
    yield
    for reader in found:
        reader.end()


def kill_one(world: World, lifetime: float) -> int:
    """Start the pipeline and kill one of its processes, or all; returns how many were killed."""
    children = world.start()
    time.sleep(world.draw.uniform(0, lifetime))
    for child in world.draw.choice([children, children[:1], children[-1:]]):
        child.signal(signal.SIGKILL)
    ends = []
    for child in children[::-1]:  # whoever was spared ends as it is told to
        child.signal(signal.SIGTERM)
        ends.append(child.wait())
    # SIGTERM is the end of a child that was told to end before it could listen.
    assert {end.exit_code for end in ends} <= {KILLED, 0, -signal.SIGTERM}, f"a recovery failed: {ends}"
    return sum(end.exit_code == KILLED for end in ends)


@pytest.mark.timeout(3600 if os.environ.get("FIRNLINE_PROOF") else 900)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_moment(tmp_path: Path, kind: str) -> None:
    world = KINDS[kind](tmp_path, random.Random(f"{SEED}-{kind}"))
    world.add_file()
    world.recover()  # also warms up
    kills = tries = recoveries = 0
    lifetime = 0.5
    with readers(world):
        while kills < KILLS:
            for _ in range(world.draw.randint(1, 4)):
                for _ in range(world.draw.randint(0, 3)):
                    world.add_file()
                kills += kill_one(world, lifetime)
                tries += 1
            began = time.monotonic()
            world.add_file()
            world.recover()
            lifetime = 0.5 * lifetime + 0.5 * (time.monotonic() - began)
            recoveries += 1
            world.check()
            assert tries < 10 * KILLS, f"only {kills} of {tries} processes lived long enough to be killed"
    covered["random kills"] += kills
    covered["first recoveries"] += recoveries
