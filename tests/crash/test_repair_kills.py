"""A repair of the ledger that dies at any step: it is done or it is not, and the same command again does it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.damage import ledger_files
from tests.support.history_edits import repair_launcher
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.processes import KILLED
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

CALLS = ("delta.claim", "storage.put", "delta.jump", "delta.sync")
POINTS = [f"{call}.{side}" for call in CALLS for side in ("before", "after")]


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """Three epochs in two tables, and a late file."""
    sinks = (DeltaSinkOptions("main", str(tmp_path / "one")), DeltaSinkOptions("copy", str(tmp_path / "two")))
    options: PipelineOptions = make_options(max_files=1, sinks=sinks)
    for number in (2, 4, 6):
        sample.add(f"f{number}.json", 3)
    run_to_end(options)
    sample.add("f3.json", 3)
    return options


def is_whole(options: PipelineOptions) -> bool:
    return run_once(options).error_code != "ledger-hole"


def check_tables(options: PipelineOptions, sample: SampleInput) -> None:
    run_to_end(options)
    assert [table_ids(sink.location) for sink in options.sinks] == [sample.ids, sample.ids]


@pytest.mark.parametrize("point", POINTS)
def test_killed(options: PipelineOptions, sample: SampleInput, tmp_path: Path, point: str) -> None:
    ledger_files(options.deciding.location, options.name)[1].unlink()
    repairs = repair_launcher(tmp_path / "repairs", new=["*/f3.json"], processed=["*/f4.json"])
    assert repairs.run(options, f"{point}:1:kill").exit_code == KILLED
    decided = open_pipeline(options).load().epoch == 4
    assert decided == (point == "delta.jump.after")
    assert is_whole(options) == decided
    if not decided:
        done = repairs.run(options)
        assert done.exit_code == 0, done
    check_tables(options, sample)


@pytest.mark.parametrize("point", ["storage.put.before", "storage.put.after"])
@pytest.mark.parametrize("count", [1, 2])
def test_killed_while_copies_are_put_back(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path, point: str, count: int
) -> None:
    backup = tmp_path / "backup"
    shutil.copytree(Path(options.deciding.location) / "_firnline" / options.name / "ledger", backup)
    for damaged in ledger_files(options.deciding.location, options.name)[:2]:
        damaged.write_bytes(b"")
    repairs = repair_launcher(tmp_path / "repairs", copies=[str(backup)])
    assert repairs.run(options, f"{point}:{count}:kill").exit_code == KILLED
    done = repairs.run(options)
    assert done.exit_code == 0, done
    check_tables(options, sample)
