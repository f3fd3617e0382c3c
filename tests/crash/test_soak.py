"""Hundreds of epochs in one process: memory, threads, open files and what is stored level off."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from firnline.checkpoint.codec import canonical
from firnline.history.status import load_files
from firnline.options import PipelineOptions
from firnline.run.observer import EpochFacts
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sources.base import Limits
from firnline.sources.files import planning
from firnline.sources.files.position import FileState
from firnline.storage import FileStat
from firnline.testing.local import LocalEngine
from tests.support.pipelines import MakeOptions, Recorder, known_files, run_once
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

EPOCHS = int(os.environ.get("FIRNLINE_SOAK_EPOCHS", "300"))


class Meter(Recorder):
    """Measures the process as epochs go by."""

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[tuple[int, int, int]] = []

    def committed(self, facts: EpochFacts) -> None:
        super().committed(facts)
        if facts.epoch % 25 == 0:
            gc.collect()
            process = psutil.Process()
            self.readings.append((process.memory_info().rss, threading.active_count(), process.num_fds()))


def test_one_long_run(sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.checkpoint.ledger.FOLD_ENTRIES", 40)
    options: PipelineOptions = make_options(max_files=1, partition_by=("month",), rollback_window=20)
    for number in range(EPOCHS):
        sample.add(f"{number:05d}.json", 3, bad=number % 2)
    meter = Meter()
    runner = Runner(open_pipeline(options, once=True), LocalEngine(1), meter, once=True)
    assert runner.run().exit_code == 0
    assert len(meter.epochs) == EPOCHS
    assert table_ids(options.sinks[0].location) == sample.ids

    half = len(meter.readings) // 2
    settled, last = meter.readings[half], meter.readings[-1]
    assert last[0] < settled[0] * 1.15 + 20 * 2**20, meter.readings  # memory
    assert last[1] <= settled[1] + 1, meter.readings  # threads
    assert last[2] <= settled[2] + 2, meter.readings  # open files
    assert max(facts.checkpoint_bytes for facts in meter.epochs) < 4096
    assert max(facts.state_files for facts in meter.epochs) <= 10

    ledger = Path(options.sinks[0].location) / "_firnline" / options.name / "ledger"
    names = [path.name for path in ledger.iterdir()]
    assert any(name.startswith("fold-") for name in names)
    assert len(names) < EPOCHS / 2
    known = known_files(open_pipeline(options), open_pipeline(options).load().entry)
    assert len(known) == EPOCHS
    rows = list(load_files(open_pipeline(options)))
    assert {row["status"] for row in rows} == {"committed"}
    sample.add("00007b.json", 2)  # late, far back in what is folded
    late = run_once(options)
    assert late.told.late == 1
    assert table_ids(options.sinks[0].location) == sample.ids


def test_commits_stay_flat(sample: SampleInput, make_options: MakeOptions) -> None:
    options: PipelineOptions = make_options(max_files=1)
    for number in range(120):
        sample.add(f"{number:05d}.json", 1)
    run = run_once(options)
    times = [facts.durations_ms["commit"] for facts in run.told.epochs]
    early, late = sorted(times[5:45])[20], sorted(times[-40:])[20]
    assert late <= early * 1.5 + 10, (early, late)


def test_log_stays_bounded_over_many_short_runs(sample: SampleInput, make_options: MakeOptions) -> None:
    """Delta's own checkpoint is written on schedule also when every run makes one commit."""
    options: PipelineOptions = make_options()
    for number in range(24):
        sample.add(f"{number:05d}.json", 1)
        assert run_once(options).exit_code == 0
    log = Path(options.sinks[0].location) / "_delta_log"
    assert (log / "_last_checkpoint").exists()
    assert table_ids(options.sinks[0].location) == sample.ids


@pytest.mark.parametrize("kill", ["storage.put", "storage.delete"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_killed_while_it_folds(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, kill: str, side: str
) -> None:
    patches = {"firnline.checkpoint.ledger:FOLD_ENTRIES": 4, "firnline.run.steps:FOLD_EVERY": 2}
    options: PipelineOptions = make_options(max_files=1, rollback_window=3)
    for number in range(16):
        sample.add(f"{number:05d}.json", 2)
    faults = [f"{kill}.{side}:{count}:kill" for count in (3, 9, 14, 20, 26)]
    codes = [launcher.run(options, fault, patches=patches).exit_code for fault in faults]
    assert set(codes) <= {KILLED, 0}, f"a recovery failed: {codes}"
    assert codes[0] == KILLED
    launcher.run_until_done(options, patches=patches)
    assert table_ids(options.sinks[0].location) == sample.ids
    pipeline = open_pipeline(options)
    assert len(known_files(pipeline, pipeline.load().entry)) == 16
    sample.add("00003b.json", 2)
    assert run_once(options).told.late == 1
    assert table_ids(options.sinks[0].location) == sample.ids


def test_position_stays_small_over_100_000_files() -> None:
    """Simulated: planning and advancing only."""
    limits = Limits(1000, 1 << 40, 1 << 40, 60_000, 10, 2)
    state = FileState("/data")
    moment = __import__("datetime").datetime(2026, 1, 1, tzinfo=__import__("datetime").UTC)
    names = [f"/data/2026/{number:08d}.json.gz" for number in range(100_000)]
    done = 0
    largest = 0
    while done < len(names):
        listed = (FileStat(name, 100, "e", moment) for name in names[max(0, done - 5) : done + 1100])
        chosen = planning.choose(state, [], listed, limits)
        tasks = planning.deal(chosen, limits, "now")
        outcomes: list[Any] = [
            {"path": i["path"], "to": 10, "offset": 0, "line": 10, "finished": True} for t in tasks for i in t.inputs
        ]
        state, records = planning.advance(chosen.base, tasks, outcomes, 3, 1)
        done += len(records)
        largest = max(largest, len(state.files), len(state.set_aside))
        assert len(canonical(state.to_json())) < 4096
    assert done == len(names)
    assert largest <= 10
    assert state.mark == names[-1]


def test_listing_a_large_folder_is_not_slow(sample: SampleInput, make_options: MakeOptions) -> None:
    """A plan lists after the mark only, and an idle pipeline costs little."""
    options: PipelineOptions = make_options(max_files=2000)
    for number in range(2000):
        sample.path(f"{number:06d}.json").write_bytes(b"")
    assert run_once(options, threads=2).exit_code == 0
    began = time.process_time()
    assert run_once(options).exit_code == 0
    assert time.process_time() - began < 3  # of this process: a busy machine does not count
