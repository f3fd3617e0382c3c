"""Runs into tables with a template that are killed, frozen, doubled: every row arrives once, in its own table."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from firnline.history.edits.rollback import Rollback
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.postgres_sink import execute, postgres_ids
from tests.support.processes import Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

MOST = in_proof(None)
POINTS = (
    "parts.head",
    "follower.claim",
    "follower.commit",
    "delta.create",
    "delta.commit",
    "delta.evolve",
    "stage.file",
)


def options_of(make_options: MakeOptions, folder: Path, **settings: Any) -> PipelineOptions:
    """A pipeline that decides in its journal, and has one table for each month."""
    sink = DeltaPartsOptions("months", f"{folder}/lake/{{month}}", **settings)
    return make_options(max_files=1, sinks=(sink,), home=folder / "home")


def work(options: PipelineOptions) -> None:
    assert run_once(options).exit_code == 0


def found_in(options: PipelineOptions) -> dict[str, Counter[int]]:
    """Return the ids in each table, read by DuckDB."""
    lake = Path(options.sinks[0].location).parent
    return {log.parent.name: table_ids(log.parent) for log in lake.glob("*/_delta_log")}


def expected(ids: Counter[int]) -> dict[str, Counter[int]]:
    months: dict[str, Counter[int]] = {}
    for number, times in ids.items():
        months.setdefault(f"2026-{number % 3 + 1:02d}", Counter())[number] += times
    return months


@pytest.mark.parametrize(
    "settings", [{}, {"write": "upsert", "key": ("id",)}, {"required": False}], ids=["append", "upsert", "optional"]
)
def test_killed_at_every_step_of_a_delivery(
    settings: dict[str, Any], sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    for number in range(2):
        sample.add(f"{number}.json", 7, **({"late": True} if number else {}))
    worlds = count()

    def prepare() -> PipelineOptions:
        return options_of(make_options, tmp_path / str(next(worlds)), **settings)

    def check(options: PipelineOptions, where: str) -> None:
        for _ in range(5):  # a run ends without waiting for an optional sink
            assert run_once(options).exit_code == 0, where
            if len({sink.load().epoch for sink in open_pipeline(options).sinks}) == 1:
                break
        assert found_in(options) == expected(sample.ids), where

    points = [f"{name}.{side}" for name in POINTS for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(work), check, points=points, most=MOST)
    assert set(points) <= reached.keys()


def roll_back(options: PipelineOptions) -> None:
    Rollback(open_pipeline(options), 1).perform("person")


@pytest.mark.parametrize("write", ["append", "upsert"])
def test_killed_at_every_step_of_a_rollback(
    write: str, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    """Every table goes back exactly; one that was born later is empty."""
    first = Counter[int]()
    for number in range(3):
        sample.add(f"{number}.json", 2)  # the third month comes with the second file
        first = first or Counter(sample.ids)
    worlds = count()
    settings: dict[str, Any] = {"write": write, "key": ("id",)} if write == "upsert" else {}

    def prepare() -> PipelineOptions:
        options = options_of(make_options, tmp_path / str(next(worlds)), **settings)
        run_to_end(options)
        return options

    def check(options: PipelineOptions, where: str) -> None:
        roll_back(options)
        assert {name: ids for name, ids in found_in(options).items() if ids} == expected(first), where
        assert len(found_in(options)) == 3, where
        run_to_end(options)
        assert found_in(options) == expected(sample.ids), where

    points = [
        f"{name}.{side}" for name in ("follower.edit", "parts.head", "delta.jump") for side in ("before", "after")
    ]
    reached = kill_at_every_point(prepare, partial(roll_back), check, points=points, most=MOST)
    assert set(points) <= reached.keys()


def test_killed_between_two_parts_and_rolled_back(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    """A rollback undoes an epoch that only some of its tables hold."""
    options = options_of(make_options, tmp_path)
    sample.add("a.json", 3)
    first = expected(sample.ids)
    run_to_end(options)
    sample.add("b.json", 6)
    for fault in ("delta.commit.after@firnline parts_0:1:kill", "delta.commit.before@firnline parts_0:1:kill"):
        assert launcher.run(options, fault).exit_code == -signal.SIGKILL
        epoch = open_pipeline(options).deciding.load().epoch
        Rollback(open_pipeline(options), 1).perform("person")
        assert found_in(options) == first
        assert open_pipeline(options).sinks[1].load().epoch == epoch + 1
    run_to_end(options)
    assert found_in(options) == expected(sample.ids)


@pytest.mark.parametrize("point", ["delta.commit.before", "delta.commit.after"])
@pytest.mark.parametrize("edit", [False, True], ids=["goes on", "rolled back"])
def test_a_zombie_wakes_up_between_two_parts(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, point: str, edit: bool
) -> None:
    options = options_of(make_options, tmp_path)
    sample.add("a.json", 3)
    run_to_end(options)
    sample.add("b.json", 6)
    zombie = launcher.start(options, f"{point}@firnline parts_0:1:stop")
    zombie.wait_until_stopped()
    if edit:
        Rollback(open_pipeline(options), 1).perform("person")
    assert run_once(options).exit_code == 0
    assert found_in(options) == expected(sample.ids)
    zombie.signal(signal.SIGCONT)
    ended = zombie.wait()
    assert (ended.exit_code, ended.error_code) == (5, "fenced"), ended
    sample.add("c.json", 6)
    assert run_once(options).exit_code == 0
    assert found_in(options) == expected(sample.ids)


def test_two_runs_at_once(launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    options = options_of(make_options, tmp_path)
    for number in range(4):
        sample.add(f"{number}.json", 6)
    children = [launcher.start(options) for _ in range(3)]
    codes = [child.wait().exit_code for child in children]
    assert set(codes) <= {0, 5, 6}, codes
    run_to_end(options)
    assert found_in(options) == expected(sample.ids)


@pytest.mark.parametrize("how", ["deleted", "old copy"])
def test_a_table_that_went_back_is_filled_again(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, how: str
) -> None:
    """From the outbox; the other tables, which hold those epochs, get nothing twice."""
    options = options_of(make_options, tmp_path)
    sample.add("a.json", 6)
    run_to_end(options)
    table = tmp_path / "lake" / "2026-02"
    shutil.copytree(table, tmp_path / "backup")
    sample.add("b.json", 6)
    run_to_end(options)
    shutil.rmtree(table)
    if how == "old copy":
        shutil.copytree(tmp_path / "backup", table)
    sample.add("c.json", 6)
    run_to_end(options)
    assert found_in(options) == expected(sample.ids)


def test_a_table_that_went_back_without_an_outbox(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    """The input gives the same rows again; without the input the run stops, and nothing else changes."""
    options = options_of(make_options, tmp_path)
    path = sample.add("a.json", 6)
    run_to_end(options)
    for has_input in (True, False):
        shutil.rmtree(tmp_path / "lake" / "2026-02")
        shutil.rmtree(tmp_path / "home" / "_firnline" / "demo" / "outbox")
        if not has_input:
            path.unlink()
        before = found_in(options)
        run = run_once(options)
        if has_input:
            assert run.exit_code == 0
            assert found_in(options) == expected(sample.ids)
        else:
            assert run.exit_code != 0
            assert run.result.error is not None
            assert found_in(options) == before
            assert open_pipeline(options).sinks[1].load().epoch == 0


# -- PostgreSQL -------------------------------------------------------------------------------------------


def test_postgres_tables_killed_at_every_step(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, postgres: str
) -> None:
    """All tables of an epoch are in one transaction; a rollback takes every one back."""
    for number in range(3):
        sample.add(f"{number}.json", 5)
    worlds = count()

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        execute(postgres, "DROP SCHEMA IF EXISTS lake CASCADE", "DROP SCHEMA IF EXISTS firnline CASCADE")
        delta = DeltaSinkOptions("table", str(folder / "table"))
        copy = PostgresSinkOptions("copy", postgres, "lake.{month}", parts_allowed="[0-9-]+")
        return make_options(max_files=1, sinks=(delta, copy))

    def check(options: PipelineOptions, where: str) -> None:
        for ids in (sample.ids, Counter(range(1, 6)), sample.ids):
            if ids == sample.ids:
                assert run_once(options).exit_code == 0, where
            else:
                roll_back(options)
            months = expected(ids)
            assert {name: postgres_ids(postgres, f"lake.{name}") for name in months} == months, where

    points = [f"{name}.{side}" for name in ("postgres.commit", "postgres.head") for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(work), check, points=points, most=MOST)
    assert set(points) <= reached.keys()
