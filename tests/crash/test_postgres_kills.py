"""Runs into a Delta table and a PostgreSQL table that are killed, frozen, doubled: every row arrives once in both."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from firnline.history.edits.rollback import Rollback
from firnline.history.edits.sinks import SinkEdit
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.postgres import PostgresServer
from tests.support.postgres_sink import execute, postgres_ids, table_rows
from tests.support.processes import Launcher, wait_until
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

POINTS = ("follower.claim.", "follower.commit.", "postgres.head.", "postgres.commit.", "letter.put.")


def options_of(make_options: MakeOptions, folder: Path, dsn: str, table: str, **settings: Any) -> PipelineOptions:
    delta = DeltaSinkOptions("table", str(folder / "table"))
    return make_options(max_files=1, sinks=(delta, PostgresSinkOptions("copy", dsn, table, **settings)))


def work(options: PipelineOptions) -> None:
    assert run_once(options).exit_code == 0


@pytest.fixture
def names() -> Iterator[str]:
    """Names of tables, each of them new."""
    return (f"lake.t{number}" for number in count())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"write": "upsert", "key": ("id",)},
        {"required": False},
        {"on_bad_row": "dead_letter", "where": "id <> 4"},
    ],
    ids=["append", "upsert", "optional", "dead-letter"],
)
def test_killed_at_every_step_of_a_delivery(
    settings: dict[str, Any],
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    postgres: str,
    names: Iterator[str],
) -> None:
    execute(postgres, "CREATE SCHEMA lake")
    for number in range(3):
        sample.add(f"{number}.json", 20)
    refuses = "on_bad_row" in settings
    bad = Counter([4, 7]) if refuses else Counter[int]()

    def prepare() -> PipelineOptions:
        table = next(names)
        execute(postgres, "DROP SCHEMA IF EXISTS firnline CASCADE")
        if refuses:
            execute(postgres, f"CREATE TABLE {table} (id bigint CHECK (id <> 7), month text, text text)")
        return options_of(make_options, tmp_path / table, postgres, table, **settings)

    def check(options: PipelineOptions, where: str) -> None:
        for _ in range(5):  # a run ends without waiting for an optional sink
            assert run_once(options).exit_code == 0, where
            if len({sink.load().epoch for sink in open_pipeline(options).sinks}) == 1:
                break
        delta, copy = options.sinks
        assert isinstance(copy, PostgresSinkOptions)
        assert table_ids(Path(delta.location)) == sample.ids, where
        assert postgres_ids(postgres, copy.table) == sample.ids - bad, where

    points = [f"{name}{side}" for name in POINTS for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(work), check, points=points, most=in_proof(2))
    assert {f"{name}after" for name in POINTS if name != "letter.put." or refuses} <= reached.keys()


def roll_back(options: PipelineOptions) -> None:
    Rollback(open_pipeline(options), 1).perform("person")


def test_killed_at_every_step_of_a_rollback(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, postgres: str, names: Iterator[str]
) -> None:
    """Both tables go back to the same epoch, or neither; the rows of somebody else stay."""
    for number in range(3):
        sample.add(f"{number}.json", 5)
    execute(postgres, "CREATE SCHEMA lake")
    first = Counter(range(1, 6))

    def prepare() -> PipelineOptions:
        table = next(names)
        execute(postgres, "DROP SCHEMA IF EXISTS firnline CASCADE")
        options = options_of(make_options, tmp_path / table, postgres, table)
        run_to_end(options)
        execute(postgres, f"INSERT INTO {table} (id, _firnline_sink, _firnline_epoch) VALUES (77, 'other/copy', 3)")
        return options

    def check(options: PipelineOptions, where: str) -> None:
        delta, copy = options.sinks
        assert isinstance(copy, PostgresSinkOptions)
        roll_back(options)
        ids = postgres_ids(postgres, copy.table)
        assert ids == first + Counter([77]), where
        assert table_ids(Path(delta.location)) == first, where
        run_to_end(options)
        assert postgres_ids(postgres, copy.table) == sample.ids + Counter([77]), where
        assert table_ids(Path(delta.location)) == sample.ids, where

    points = [f"{name}.{side}" for name in ("follower.edit", "postgres.edit") for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(roll_back), check, points=points)
    assert set(points) <= reached.keys()


@pytest.mark.parametrize("point", ["postgres.commit.before", "postgres.commit.after", "postgres.head.before"])
def test_a_zombie_that_holds_the_lock_blocks_nobody(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, postgres: str, point: str
) -> None:
    """A run is frozen with the checkpoint row locked; its successor ends the backend, delivers; the run wakes up."""
    options = options_of(make_options, tmp_path, postgres, "lake.events", lock_timeout=timedelta(seconds=60))
    sample.add("a1.json", 4)
    assert run_once(options).exit_code == 0
    sample.add("b1.json", 4)
    sample.add("b2.json", 4)
    zombie = launcher.start(options, f"{point}:1:stop")
    zombie.wait_until_stopped()
    assert run_once(options).exit_code == 0
    assert postgres_ids(postgres, "lake.events") == sample.ids
    zombie.signal(signal.SIGCONT)
    ended = zombie.wait()
    assert (ended.exit_code, ended.error_code) == (5, "fenced"), ended
    sample.add("c1.json", 4)
    assert run_once(options).exit_code == 0
    assert postgres_ids(postgres, "lake.events") == table_ids(tmp_path / "table") == sample.ids


def test_two_runs_at_once(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, postgres: str
) -> None:
    options = options_of(make_options, tmp_path, postgres, "lake.events")
    for number in range(8):
        sample.add(f"b{number}.json", 4)
    ends = [child.wait() for child in [launcher.start(options) for _ in range(3)]]
    assert {ended.exit_code for ended in ends} <= {0, 5}, ends
    launcher.run_until_done(options)
    assert postgres_ids(postgres, "lake.events") == table_ids(tmp_path / "table") == sample.ids


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("point", ["postgres.commit.before:2", "postgres.commit.after:2", "postgres.head.before:1"])
def test_the_server_ends_in_the_middle_of_a_transaction(
    launcher: Launcher,
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    postgres_server: PostgresServer,
    point: str,
    how: str,
) -> None:
    """A run waits with its transaction open; the server dies and comes back; the same run goes on."""
    settings = {"attempts": 200}
    options = options_of(partial(make_options, **settings), tmp_path, postgres_server.dsn, "lake.events")
    for number in range(3):
        sample.add(f"a{number}.json", 4)
    child = launcher.start(options, f"{point}:stop")
    child.wait_until_stopped()
    postgres_server.kill() if how == "kill" else postgres_server.stop()
    child.signal(signal.SIGCONT)
    wait_until(lambda: "failed" in child.log() or not child.is_alive, child, 60)
    postgres_server.start()
    ended = child.wait(120)
    assert ended.exit_code == 0, child.log()
    assert postgres_ids(postgres_server.dsn, "lake.events") == table_ids(tmp_path / "table") == sample.ids
    assert {row["_firnline_sink"] for row in table_rows(postgres_server.dsn, "lake.events")} == {"demo/copy"}


def test_a_copy_that_is_killed_takes_the_place_of_the_rows_once(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, postgres: str, names: Iterator[str]
) -> None:
    execute(postgres, "CREATE SCHEMA lake")
    sample.add("0.json", 20)

    def prepare() -> PipelineOptions:
        table = next(names)
        execute(postgres, "DROP SCHEMA IF EXISTS firnline CASCADE")
        options = options_of(make_options, tmp_path / table, postgres, table)
        run_to_end(options)
        SinkEdit(open_pipeline(options), "resync", "copy").perform("person")
        return options

    def check(options: PipelineOptions, where: str) -> None:
        work(options)
        copy = options.sinks[1]
        assert isinstance(copy, PostgresSinkOptions)
        assert postgres_ids(postgres, copy.table) == sample.ids, where

    points = [f"{name}{side}" for name in ("follower.commit.", "postgres.commit.") for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(work), check, points=points)
    assert "postgres.commit.after" in reached
