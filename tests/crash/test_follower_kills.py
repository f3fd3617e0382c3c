"""A run that dies while it stages, claims, delivers or sets rows aside for a follower: none is lost, none doubled."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks import registry
from firnline.sinks.dead_letters import list_dead_letters, read_letters
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.kills import in_proof, kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput, table_ids
from tests.support.sqlite_sink import SqliteSinkOptions, register_sqlite, sqlite_ids

pytestmark = pytest.mark.crash

REFUSED = 3
POINTS = (
    "epoch.commit.",
    "epoch.stage.",
    "epoch.record.",
    "outbox.write.",
    "follower.claim.",
    "follower.commit.",
    "letter.put.",
)


def run(options: PipelineOptions) -> None:
    """Run until the input is exhausted, in a child."""
    registry.KINDS["sqlite"] = "tests.support.sqlite_sink"
    assert run_once(options).exit_code == 0


@pytest.mark.parametrize("settings", [{"ranges": True}, {"required": False}, {"refused": REFUSED}], ids=str)
def test_rows_of_a_follower_arrive_once(
    settings: dict[str, object],
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register_sqlite(monkeypatch)
    for number in range(3):
        sample.add(f"{number}.json", 150)
    worlds = iter(range(1000))

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        copy = SqliteSinkOptions("copy", str(folder / "copy.db"), on_bad_row="dead_letter", **settings)  # type: ignore[arg-type]
        return make_options(max_files=1, sinks=(DeltaSinkOptions("table", str(folder / "table")), copy))

    def check(options: PipelineOptions, where: str) -> None:
        for _ in range(5):  # a run ends without waiting for an optional sink
            assert run_once(options).exit_code == 0, where
            if len({sink.load().epoch for sink in open_pipeline(options).sinks}) == 1:
                break
        refused = Counter([REFUSED]) if "refused" in settings else Counter[int]()
        assert table_ids(Path(options.sinks[0].location)) == sample.ids, where
        assert sqlite_ids(Path(options.sinks[1].location)) == sample.ids - refused, where
        storage = open_pipeline(options).storage
        letters = {
            letter.row: letter for key in list_dead_letters(storage, "demo") for letter in read_letters(storage, key)
        }
        assert Counter(letter.values["id"] for letter in letters.values()) == refused, where

    points = [f"{name}{side}" for name in POINTS for side in ("before", "after")]
    reached = kill_at_every_point(prepare, partial(run), check, points=points, most=in_proof(3))
    wanted = {f"{name}after" for name in POINTS if name != "letter.put." or "refused" in settings}
    assert wanted <= reached.keys()
