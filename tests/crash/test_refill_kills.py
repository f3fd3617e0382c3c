"""A run that dies while it makes rows again, for a damaged outbox or a new sink: every row arrives once, in order."""

from __future__ import annotations

import signal
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import registry
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import pipeline_options, run_once, run_to_end
from tests.support.postgres_sink import postgres_ids
from tests.support.processes import Launcher
from tests.support.samples import SampleInput, make_old, table_ids
from tests.support.sqlite_sink import DOWN, SqliteSinkOptions, register_sqlite, sqlite_ids, sqlite_rows

pytestmark = pytest.mark.crash

MOST = in_proof(None)
POINTS = ("epoch.commit.", "outbox.write.", "outbox.rebuild.", "outbox.release.", "follower.claim.", "follower.commit.")


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)


def run(options: PipelineOptions) -> None:
    """Run until the input is exhausted, in a child."""
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    assert run_once(options).exit_code == 0


def finish(options: PipelineOptions, where: str) -> None:
    """Run until every sink is in sync; a run ends without waiting for an optional one that rests."""
    for _ in range(5):
        assert run_once(options).exit_code == 0, where
        if len({sink.load().epoch for sink in open_pipeline(options).sinks}) == 1:
            return


def damage(path: Path, number: int) -> None:
    if number % 2:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-7])


def test_a_repair_that_is_killed_is_made_again(tmp_path: Path) -> None:
    worlds = count()

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        sample = SampleInput(folder / "in")
        copy = SqliteSinkOptions("copy", str(folder / "copy.db"), required=False, ranges=True)
        options = pipeline_options(
            str(sample.folder), "", max_files=2, sinks=(DeltaSinkOptions("table", str(folder / "table")), copy)
        )
        Path(f"{copy.path}{DOWN}").touch()
        for number in range(4):
            sample.add(f"{number}.json", 150)
        run_to_end(options)
        Path(f"{copy.path}{DOWN}").unlink()
        for number, path in enumerate(sorted((folder / "table").rglob("outbox/**/*.arrow"))):
            damage(path, number)
        return options

    def check(options: PipelineOptions, where: str) -> None:
        finish(options, where)
        table, copy = (Path(sink.location) for sink in options.sinks)
        assert sqlite_ids(copy) == table_ids(table), where
        assert [row["id"] for row in sqlite_rows(copy)] == sorted(table_ids(table)), where
        assert not list(table.rglob("rerun/*/*.arrow")), where

    points = [f"{name}{side}" for name in POINTS for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(run), check, points=points, most=MOST)
    assert {"outbox.rebuild.after", "outbox.write.after", "follower.commit.after"} <= reached.keys()


FILL_POINTS = (
    "delta.commit.",  # the epoch that decides it, too
    "fill.list.",
    "fill.release.",
    "outbox.write.",
    "outbox.release.",
    "follower.claim.",
    "follower.edit.",
    "follower.commit.",
)


@pytest.mark.parametrize("way", [{"start": "beginning"}, {"copy_from": "table"}], ids=["beginning", "copy"])
def test_a_sink_whose_filling_is_killed_gets_every_row_once(tmp_path: Path, way: dict[str, str]) -> None:
    worlds = count()

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        sample = SampleInput(folder / "in")
        alone = pipeline_options(
            str(sample.folder), "", max_files=1, sinks=(DeltaSinkOptions("table", str(folder / "table")),)
        )
        for number in range(2):
            sample.add(f"{number}.json", 150)
        run_to_end(alone)
        sample.add("later.json", 30)
        copy = SqliteSinkOptions("copy", str(folder / "copy.db"), ranges=True, **way)  # type: ignore[arg-type]
        return replace(alone, sinks=(*alone.sinks, copy))

    def check(options: PipelineOptions, where: str) -> None:
        finish(options, where)
        table, copy = (Path(sink.location) for sink in options.sinks)
        assert sqlite_ids(copy) == table_ids(table), where
        if "start" in way:
            assert [row["id"] for row in sqlite_rows(copy)] == sorted(table_ids(table)), where
        SampleInput(table.parent / "in").path("last.json").write_text('{"id": 1000}\n')
        make_old(table.parent / "in" / "last.json")
        finish(options, where)
        assert sqlite_ids(copy) == table_ids(table), where
        assert not [path for path in table.rglob("_firnline/demo/rerun/**/*") if path.is_file()], where

    points = [f"{name}{side}" for name in FILL_POINTS for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(run), check, points=points, most=MOST)
    assert {"fill.list.after", "fill.release.after", "outbox.write.after", "follower.commit.after"} <= reached.keys()


@pytest.mark.parametrize(
    ("way", "point"),
    [
        ({"start": "beginning"}, "outbox.write.after:1"),
        ({"start": "beginning"}, "fill.list.before:1"),
        ({"start": "beginning"}, "postgres.commit.before:2"),
        ({"copy_from": "table"}, "fill.list.after:1"),
        ({"copy_from": "table"}, "fill.release.before:1"),
    ],
    ids=str,
)
def test_a_run_that_wakes_while_its_successor_fills_adds_nothing(
    launcher: Launcher, tmp_path: Path, postgres: str, way: dict[str, str], point: str
) -> None:
    sample = SampleInput(tmp_path / "in")
    alone = pipeline_options(
        str(sample.folder), "", max_files=1, sinks=(DeltaSinkOptions("table", str(tmp_path / "table")),)
    )
    for number in range(2):
        sample.add(f"{number}.json", 30)
    run_to_end(alone)
    copy = PostgresSinkOptions("copy", postgres, "lake.events", lock_timeout=timedelta(seconds=5), **way)  # type: ignore[arg-type]
    options = replace(alone, sinks=(*alone.sinks, copy))
    zombie = launcher.start(options, f"{point}:stop")
    zombie.wait_until_stopped()
    sample.add("later.json", 10)
    finish(options, point)
    assert postgres_ids(postgres, "lake.events") == sample.ids
    zombie.signal(signal.SIGCONT)
    assert zombie.wait().exit_code == (0 if "release" in point else 5), "it had nothing left to do, or is fenced"
    assert postgres_ids(postgres, "lake.events") == sample.ids
    sample.add("last.json", 10)
    finish(options, point)
    assert postgres_ids(postgres, "lake.events") == table_ids(tmp_path / "table") == sample.ids
