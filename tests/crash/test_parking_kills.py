"""A run that dies while rows of an optional sink are parked, staged again or committed: none is lost, none doubled."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.base import Stager
from firnline.sinks.delta import kind
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.types import Json
from tests.support.kills import kill_at_every_point
from tests.support.pipelines import MakeOptions, run_once
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

POINTS = [f"outbox.{step}.{side}" for step in ("write", "restage", "copy") for side in ("before", "after")]


def run_with_failing_stager(failures: int, options: PipelineOptions) -> None:
    """Run until the optional sink has every epoch, in a child; its first stagers cannot be opened."""
    real, left = kind.open_stager, [failures]

    def open_stager(target: dict[str, Json], attempt: str) -> Stager:
        if target["sink"] == "copy" and left[0]:
            left[0] -= 1
            raise OSError("the driver of this sink is broken")
        return real(target, attempt)

    kind.open_stager = open_stager
    for _ in range(100):  # a run ends without waiting for an optional sink
        assert run_once(options).exit_code == 0
        heads = [sink.load().epoch for sink in open_pipeline(options).sinks]
        if len(set(heads)) == 1:
            return
    raise AssertionError(f"the optional sink stays behind: {heads}")


@pytest.mark.parametrize("failures", [1, 3])
def test_parked_rows_arrive_once(failures: int, sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    for number in range(3):
        sample.add(f"{number}.json", 2)
    worlds = iter(range(1000))

    def prepare() -> PipelineOptions:
        folder = tmp_path / str(next(worlds))
        sinks = (
            DeltaSinkOptions("table", str(folder / "table")),
            DeltaSinkOptions("copy", str(folder / "copy"), required=False),
        )
        return make_options(max_files=1, sinks=sinks)

    def check(options: PipelineOptions, where: str) -> None:
        run_with_failing_stager(0, options)
        for sink in options.sinks:
            assert table_ids(Path(sink.location)) == sample.ids, (where, sink.name)

    reached = kill_at_every_point(prepare, partial(run_with_failing_stager, failures), check, points=POINTS, most=1)
    assert all(reached[f"outbox.{name}.after"] for name in ("write", "restage")), reached
