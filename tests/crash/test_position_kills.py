"""A change of a position that dies at any step, is repeated, or meets another one: it is made once, or not at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from firnline.errors import CheckpointError, FencedError
from firnline.history.edits.position import PositionEdit
from firnline.options import PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import registry
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import make_epochs, pipeline_options, run_to_end
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import SqliteSinkOptions, register_sqlite, sqlite_ids

pytestmark = pytest.mark.crash


@dataclass(frozen=True)
class World:
    options: PipelineOptions
    expected: Counter[int]


def skip(world: World) -> None:
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    PositionEdit(open_pipeline(world.options), "skip", "files", "g2.json").perform("person")


def prepare(folder: Path) -> World:
    sample = SampleInput(folder / "in")
    sinks = (DeltaSinkOptions("table", str(folder / "table")), SqliteSinkOptions("copy", str(folder / "copy.db")))
    store = StoreOptions(path=str(folder / "store"))
    options = pipeline_options(str(folder / "in"), "", max_files=1, sinks=sinks, store=store)
    make_epochs(sample, options, 1)
    sample.add("g1.json", 2)
    expected = sample.ids.copy()
    sample.add("g2.json", 2)
    after = sample.ids.copy()
    sample.add("g3.json", 2)
    return World(options, expected + (sample.ids - after))


def check(world: World, where: str) -> None:
    skip(world)  # the same command ends it, or finds it done
    for _ in range(2):
        run_to_end(world.options)
    assert table_ids(world.options.sinks[0].location) == world.expected, where
    assert sqlite_ids(Path(world.options.sinks[1].location)) == world.expected, where


def test_killed_at_every_step_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)
    worlds = iter(range(1000))
    reached = kill_at_every_point(
        lambda: prepare(tmp_path / str(next(worlds))), skip, check, most=in_proof(2), helpers=False
    )
    assert {"delta.claim.after", "delta.jump.before", "delta.jump.after", "follower.edit.after"} <= reached.keys()


def test_of_two_at_once_one_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register_sqlite(monkeypatch)
    world = prepare(tmp_path)
    first = PositionEdit(open_pipeline(world.options), "skip", "files", "g2.json")
    read = first._read
    calls = iter(range(10))

    def overtaken() -> object:
        if next(calls) == 1:  # the first has claimed; the second takes over and decides
            PositionEdit(open_pipeline(world.options), "skip", "files", "g2.json").perform("second")
        return read()

    first._read = overtaken  # type: ignore[method-assign,assignment]
    with pytest.raises((CheckpointError, FencedError)):
        first.perform("first")
    check(world, "after two at once")
