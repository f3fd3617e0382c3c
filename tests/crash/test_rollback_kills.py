"""A rollback or a fresh start that dies at any step: whatever comes next, the table equals the input in the end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.options import PipelineOptions
from tests.support.committers import commit_table
from tests.support.history_edits import fresh_launcher, rollback_launcher
from tests.support.pipelines import MakeOptions, two_sinks
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

POINTS = [
    "delta.claim.before",
    "delta.claim.after",
    "storage.put.before",
    "storage.put.after",
    "delta.jump.before",
    "delta.jump.after",
    "delta.sync.after",
]


def prepare(launcher: Launcher, sample: SampleInput, options: PipelineOptions) -> None:
    for number in range(4):
        sample.add(f"f{number}.json", 3, **({"extra": number} if number == 2 else {}))
    assert launcher.run(options).exit_code == 0


def tables(options: PipelineOptions) -> list[Any]:
    return [table_ids(sink.location) for sink in options.sinks]


@pytest.mark.parametrize("repeat", [True, False], ids=["repeated", "left"])
@pytest.mark.parametrize(
    ("point", "count"),
    [*((point, 1) for point in POINTS), *((point, 2) for point in POINTS if not point.startswith("storage."))],
)
def test_killed(
    launcher: Launcher,
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    point: str,
    count: int,
    repeat: bool,
) -> None:
    """`left`: nobody repeats the rollback; what it began in one sink, the next run finishes in the other."""
    options: PipelineOptions = make_options(max_files=1, sinks=two_sinks(tmp_path))
    prepare(launcher, sample, options)
    rollback = rollback_launcher(tmp_path / "rollbacks", 2)
    assert rollback.run(options, f"{point}:{count}:kill").exit_code == KILLED
    if repeat:
        done = rollback.run(options)
        assert done.exit_code == 0 or "is at epoch" in done.message, done
        one, copy = tables(options)
        assert one == copy
        assert sum(one.values()) == 6
    sample.add("g.json", 3)
    launcher.run_until_done(options)
    assert tables(options) == [sample.ids, sample.ids]


@pytest.mark.parametrize(
    "point",
    # The first sync makes durable what the claim builds on; the second is that of the claim itself.
    ["delta.claim.after:1", "delta.jump.before:1", "delta.jump.after:1", "delta.sync.after:2", "delta.sync.after:3"],
)
def test_a_lost_answer_is_asked_after(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, point: str
) -> None:
    options = make_options(max_files=1)
    prepare(launcher, sample, options)
    version = DeltaTable(options.deciding.location).version()
    ended = rollback_launcher(tmp_path / "rollbacks", 2).run(options, f"{point}:raise")
    if point.startswith("delta.jump.before"):
        assert ended.error_code == "commit-unknown", ended
        assert sum(table_ids(options.deciding.location).values()) == 12
    else:
        assert ended.exit_code == 0, ended
        assert DeltaTable(options.deciding.location).version() == version + 2, "one claim, one rollback"
        assert sum(table_ids(options.deciding.location).values()) == 6
    launcher.run_until_done(options)
    assert tables(options) == [sample.ids]


@pytest.mark.parametrize("point", [*POINTS, "storage.delete.before", "storage.delete.after"])
def test_killed_with_units_pending(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, point: str
) -> None:
    options = make_options(max_files=1, mode="staged")
    for number in range(2):
        sample.add(f"f{number}.json", 3)
        assert launcher.run(options).exit_code == 0
        commit_table(options.deciding.location)
    sample.add("f2.json", 3)
    sample.add("f3.json", 3)
    assert launcher.run(options).exit_code == 0
    assert rollback_launcher(tmp_path / "rollbacks", 1).run(options, f"{point}:1:kill").exit_code == KILLED
    commit_table(options.deciding.location)
    launcher.run_until_done(options)
    commit_table(options.deciding.location)
    assert tables(options) == [sample.ids]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("point", POINTS)
def test_fresh_start_killed(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, point: str, truncate: bool
) -> None:
    options = make_options(max_files=1)
    prepare(launcher, sample, options)
    epoch = 4
    fresh = fresh_launcher(tmp_path / "fresh", epoch, truncate=truncate)
    assert fresh.run(options, f"{point}:1:kill").exit_code == KILLED
    assert fresh.run(options).exit_code == 0
    launcher.run_until_done(options)
    assert fresh.run(options).exit_code == 0, "the same words again, as a supervisor would: nothing happens"
    launcher.run_until_done(options)
    times = 1 if truncate else 2
    assert tables(options) == [dict.fromkeys(sample.ids, times)]


def test_an_active_run_is_fenced_and_nothing_is_lost(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1, max_inflight=1)
    prepare(launcher, sample, options)
    sample.add("g1.json", 3)
    sample.add("g2.json", 3)
    active = launcher.start(options, "delta.commit.before:1:stop", once=False)
    active.wait_until_stopped()
    done = rollback_launcher(tmp_path / "rollbacks", 2).run(options)
    assert done.exit_code == 0, done
    active.signal(signal.SIGCONT)
    assert active.wait().exit_code == 5
    launcher.run_until_done(options)
    assert tables(options) == [sample.ids]
