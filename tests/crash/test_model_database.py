"""A model database: random transactions on real servers while the pipeline dies; every table equals the database.

The tables of the current state equal the database row by row, and the histories replay to the state after every
commit. Spool files are small, so that most transactions are spread over several of them.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.clock import monotonic
from firnline.options import PipelineOptions
from firnline.sources.cdc.spooling import SpoolSettings
from tests.support.model_database import (
    BinlogSide,
    ModelDatabase,
    PostgresSide,
    Side,
    check_current,
    check_history,
)
from tests.support.mysql import BinlogServer
from tests.support.postgres import PostgresServer
from tests.support.processes import KILLED, Child, Ended, Launcher
from tests.support.proxy import Proxy, running_proxy

pytestmark = pytest.mark.crash

LONG = bool(os.environ.get("FIRNLINE_PROOF"))
STEPS = 600 if LONG else 30
KILLS = 60 if LONG else 4
SEED = int(os.environ.get("FIRNLINE_SEED", "14"))
# Where runs are killed that begin while tables have rows.
SNAPSHOT_POINTS = (
    "spool.file.before", "spool.file.after", "spool.delete.after", "epoch.plan.after", "epoch.stage.after",
    "stage.file.after", "delta.commit.before", "delta.commit.after", "epoch.acknowledge.after",
)  # fmt: skip
PATCHES = {
    "firnline.sources.cdc.snapshots:CHUNK_ROWS": 20,
    "firnline.sources.cdc.source:SpoolSettings": functools.partial(SpoolSettings, file_bytes=6000),
    "firnline.sources.cdc.spooling:IDLE_SECONDS": 0.5,
    "firnline.sources.cdc.spooling:PIECE_BYTES": 2000,
    "firnline.sources.cdc.spooling:FIRST_PAUSE_SECONDS": 0.05,
}


class Keeper:
    """Keeps a pipeline running in a child, and ends it: at random moments, and at random fault points."""

    def __init__(self, launcher: Launcher, options: PipelineOptions, points: list[str], seed: int) -> None:
        self._launcher = launcher
        self._options = options
        self._points = points
        self._random = random.Random(seed)
        self._child: Child | None = None
        self._started = 0.0
        self._life = 0.0
        self.killed = 0

    def tend(self) -> None:
        """Start a child if there is none; end one that has lived long enough."""
        if self._child is None:
            self._start()
        assert self._child is not None
        if not self._child.is_alive:
            self._bury(self._child)
        elif monotonic() - self._started > self._life:
            self._child.signal(signal.SIGKILL)
            self._bury(self._child)

    def _start(self) -> None:
        fault = ""
        if self._random.random() < 0.6:
            fault = f"{self._random.choice(self._points)}:{self._random.randint(1, 4)}:kill"
        self._child = self._launcher.start(self._options, fault, once=False, patches=PATCHES)
        self._started, self._life = monotonic(), self._random.uniform(0.2, 4.0)

    def _bury(self, child: Child) -> None:
        end = child.wait()
        assert end.exit_code == KILLED, f"the pipeline ended by itself: {end}\n{child.log()[-3000:]}"
        self.killed += 1
        self._child = None

    def stop(self) -> None:
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            self._child.wait()
            self._child = None


def disturb(side: Side, proxy: Proxy, chances: random.Random) -> None:
    """Now and then the connection is cut, or the server is killed and started again."""
    chance = chances.random()
    if chance < 0.08:
        proxy.cut()
    elif chance < (0.10 if LONG else 0.12):
        side.server.kill()
        side.server.start()


def play(side: Side, launcher: Launcher, folder: Path, seed: int, *, is_empty: bool, together: bool = False) -> None:
    """`is_empty`: no table has rows when capture begins; else they are read in chunks meanwhile. `together`: one sink
    has all tables."""
    model = ModelDatabase(side, seed, most_rows=400 if LONG else 40, most_changes=100_000 if LONG else 0)
    model.create()
    chances = random.Random(seed)
    with running_proxy(side.server.port) as proxy:
        options = model.options(folder, proxy.port, together=together)
        if is_empty:
            assert launcher.run(options, patches=PATCHES).exit_code == 0  # begins to capture
            for _ in range(3):
                model.step()
            end = launcher.run(options, patches=PATCHES)
        else:
            for _ in range(25):
                model.step()
            end = launcher.run(options, "delta.commit.after:4:kill", patches=PATCHES)
            assert end.exit_code == KILLED, end
            end = Ended(0, points=Counter(SNAPSHOT_POINTS))
        assert end.exit_code == 0, end
        points = sorted(point for point in end.points if not point.startswith(("storage.", "store.")))
        keeper = Keeper(launcher, options, points, seed)
        try:
            steps = 0
            while steps < STEPS or keeper.killed < KILLS:
                if steps < 3 * STEPS:
                    model.step()
                    steps += 1
                disturb(side, proxy, chances)
                keeper.tend()
                time.sleep(chances.uniform(0, 0.05))
        finally:
            keeper.stop()
        launcher.run_until_done(options, patches=PATCHES)
    check_current(model, folder)
    if is_empty:
        check_history(model, folder)


def test_large_transactions_among_small_ones(
    postgres_server: PostgresServer, launcher: Launcher, tmp_path: Path
) -> None:
    """Each is one epoch, many times larger than `max_events`; a run is killed while it stages one."""
    model = ModelDatabase(PostgresSide(postgres_server), SEED, most_changes=100_000 if LONG else 4_000)
    model.create()
    options = model.options(tmp_path / "lake")
    assert launcher.run(options, patches=PATCHES).exit_code == 0  # begins to capture
    for _ in range(2):
        model.step()
        model.burst()
    end = launcher.run(options, "stage.file.after:2:kill", patches=PATCHES)
    assert end.exit_code == KILLED, end
    launcher.run_until_done(options, patches=PATCHES)
    check_current(model, tmp_path / "lake")
    check_history(model, tmp_path / "lake")
    plain = DeltaTable(str(tmp_path / "lake" / "history-model_plain")).to_pyarrow_dataset()
    assert plain.count_rows() >= model.most_changes // 4  # not all of them were rolled back


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty tables", "tables with rows"])
def test_postgres(postgres_server: PostgresServer, launcher: Launcher, tmp_path: Path, is_empty: bool) -> None:
    play(PostgresSide(postgres_server), launcher, tmp_path / "lake", SEED, is_empty=is_empty)


@pytest.mark.parametrize("is_empty", [True, False] if LONG else [True])
def test_binlog(binlog_server: BinlogServer, launcher: Launcher, tmp_path: Path, is_empty: bool) -> None:
    play(BinlogSide(binlog_server), launcher, tmp_path / "lake", SEED, is_empty=is_empty)


@pytest.mark.parametrize("is_empty", [True, False] if LONG else [False], ids=str)
def test_postgres_in_one_sink(
    postgres_server: PostgresServer, launcher: Launcher, tmp_path: Path, is_empty: bool
) -> None:
    """A sink of all tables, each with its own key."""
    play(PostgresSide(postgres_server), launcher, tmp_path / "lake", SEED, is_empty=is_empty, together=True)


@pytest.mark.skipif(not LONG, reason="only under FIRNLINE_PROOF: PostgreSQL in one sink is always tried")
def test_binlog_in_one_sink(binlog_server: BinlogServer, launcher: Launcher, tmp_path: Path) -> None:
    play(BinlogSide(binlog_server), launcher, tmp_path / "lake", SEED, is_empty=True, together=True)
