"""The folder of a source disappears while a run reads it, and comes back: the run says both, and loses nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from firnline.cli.run_report import RunTotals
from firnline.clock import SystemClock
from firnline.run.observer import EpochFacts, Observers
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.service.health import Health
from firnline.service.metrics import PipelineMetrics
from firnline.testing.local import LocalEngine
from tests.support.pipelines import Recorder, pipeline_options
from tests.support.samples import table_ids


class Mover(Recorder):
    """Takes the folder away after the first epoch, brings it back once the screen says so, and stops at the end."""

    def __init__(self, folder: Path, rows: int) -> None:
        super().__init__()
        self.folder, self.away, self.rows = folder, folder.with_name("away"), rows
        self.seen: list[str | None] = []
        self.runner: Runner | None = None

    def committed(self, facts: EpochFacts) -> None:
        super().committed(facts)
        if facts.epoch == 1:
            self.folder.rename(self.away)
        if sum(epoch.rows for epoch in self.epochs) >= self.rows:
            assert self.runner is not None
            self.runner.stop()

    def sources(self, unreachable: Mapping[str, str | None]) -> None:
        self.seen.append(unreachable["files"])

    def bring_back(self) -> None:
        (self.away / "b.json").write_text('{"id": 100}\n')
        self.away.rename(self.folder)


def test_a_run_warns_when_the_folder_goes_and_when_it_is_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, table = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    (folder / "a.json").write_text("".join(f'{{"id": {number}}}\n' for number in range(10)))
    options = pipeline_options(str(folder), str(table), max_events=4, min_age_secs=0.0, file_attempts=1)
    mover, clock = Mover(folder, 11), SystemClock()
    metrics, health = PipelineMetrics("demo", clock.monotonic), Health("demo", clock.monotonic)
    totals = RunTotals(clock.monotonic)
    shown: list[tuple[str, str]] = []

    class Screen(Recorder):
        def idle(self) -> None:
            if totals.doing.startswith("waits: "):  # once the epoch in flight is committed
                shown.append((totals.doing, generate_latest(metrics.registry()).decode()))
                mover.bring_back()

    mover.runner = Runner(open_pipeline(options), LocalEngine(1), Observers(totals, metrics, health, Screen(), mover))
    rescue = threading.Timer(120, mover.runner.stop)
    rescue.start()
    with caplog.at_level(logging.WARNING, "firnline"):
        result = mover.runner.run()
    rescue.cancel()
    gone = f"the folder {folder} is gone"
    assert mover.seen == [None, gone, None]
    assert (result.exit_code, result.set_aside) == (0, {})
    assert sorted(table_ids(table)) == [*range(10), 100]  # the file in progress is no broken file
    said = [record.getMessage() for record in caplog.records if getattr(record, "source", "") == "files"]
    assert [text.partition(", after ")[0] for text in said] == [
        f"{gone}; waiting for it",
        "the source can be read again",
    ]
    assert {error.message for error in mover.troubles} <= {gone}  # of an epoch that was planned before
    screen, scraped = shown[0]
    assert screen == f"waits: {gone}"
    assert 'firnline_source_up{pipeline="demo",source="files"} 0.0' in scraped
    assert 'firnline_source_up{pipeline="demo",source="files"} 1.0' in generate_latest(metrics.registry()).decode()
    assert health.healthy().facts["sources_unreachable"] == {}


def test_a_run_that_ends_by_itself_fails_instead_of_calling_it_all_read(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.json").write_text("".join(f'{{"id": {number}}}\n' for number in range(10)))
    options = pipeline_options(str(folder), str(tmp_path / "out"), max_events=4, min_age_secs=0.0)

    class Remover(Recorder):
        def committed(self, facts: EpochFacts) -> None:
            if facts.epoch == 1:
                folder.rename(tmp_path / "away")

    result = Runner(open_pipeline(options, once=True), LocalEngine(1), Remover(), once=True).run()
    assert result.exit_code == 3
    assert result.error is not None
    assert result.error.message == f"the folder {folder} is gone, though it was there when the run started"
    (tmp_path / "away").rename(folder)
    assert Runner(open_pipeline(options, once=True), LocalEngine(1), once=True).run().exit_code == 0
    assert sorted(table_ids(tmp_path / "out")) == list(range(10))
