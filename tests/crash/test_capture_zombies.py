"""Two runs that capture one database: the one that claimed last goes on, the other ends as fenced; no row is lost,
none comes twice."""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from firnline.sources.cdc.spooling import SpoolSettings
from tests.support.captured import delta_rows
from tests.support.model_database import BinlogSide, ModelDatabase, PostgresSide, Side, check_current, check_history
from tests.support.mysql import MySqlServer
from tests.support.postgres import PostgresServer
from tests.support.processes import Launcher, wait_until

pytestmark = pytest.mark.crash

LONG = bool(os.environ.get("FIRNLINE_PROOF"))
# Where the first run sleeps while the second one does all the work.
POINTS = (
    "spool.file.before:2",
    "spool.file.after:2",
    "epoch.plan.after:2",
    "delta.commit.before:2",
    "epoch.acknowledge.before:2",
)
SMALL = {
    "firnline.sources.cdc.source:SpoolSettings": functools.partial(SpoolSettings, file_bytes=6000),
    "firnline.sources.cdc.spooling:IDLE_SECONDS": 0.5,
    "firnline.sources.cdc.spooling:PIECE_BYTES": 2000,
    "firnline.sources.cdc.spooling:FIRST_PAUSE_SECONDS": 0.05,
}


def overtake(side: Side, launcher: Launcher, lake: Path, point: str) -> None:
    model = ModelDatabase(side, seed=5, most_rows=10)
    model.create()
    options = model.options(lake)
    assert launcher.run(options).exit_code == 0
    for _ in range(3):
        model.step()
    zombie = launcher.start(options, f"{point}:stop", once=False, patches=SMALL)
    steps = iter(range(200))

    def is_asleep() -> bool:
        if next(steps, None) is not None:
            model.step()
        return zombie.is_stopped

    wait_until(is_asleep, zombie)
    for _ in range(3):
        model.step()
    assert launcher.run(options, patches=SMALL).exit_code == 0
    check_current(model, lake)
    zombie.signal(signal.SIGCONT)
    for _ in range(3):
        model.step()
    end = zombie.wait()
    assert (end.exit_code, end.error_code) == (5, "fenced"), end
    assert launcher.run(options, patches=SMALL).exit_code == 0
    check_current(model, lake)
    check_history(model, lake)
    ops = Counter(op for (op,) in delta_rows(lake / "history-model_orders", "_op"))
    assert ops


@pytest.mark.parametrize("point", POINTS)
def test_postgres(postgres_server: PostgresServer, launcher: Launcher, tmp_path: Path, point: str) -> None:
    overtake(PostgresSide(postgres_server), launcher, tmp_path / "lake", point)


@pytest.mark.parametrize("point", POINTS if LONG else POINTS[1:2])
def test_mysql(mysql: MySqlServer, launcher: Launcher, tmp_path: Path, point: str) -> None:
    overtake(BinlogSide(mysql), launcher, tmp_path / "lake", point)
