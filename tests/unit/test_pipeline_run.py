"""`Pipeline.run` from Python: the lease, the control channel, and stopping, pausing and resuming from other threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from firnline import Pipeline
from firnline.errors import AlreadyRunningError, FencedError, NotRunningError
from firnline.run.control import ask
from firnline.run.observer import EpochFacts, Observer
from firnline.run.runner import RunResult
from firnline.stores import open_store
from firnline.stores.lease import LeaseRecord
from firnline.testing.local import LocalEngine
from tests.support.samples import SampleInput, table_ids


class Told(Observer):
    """Lets a test wait for what a run tells."""

    def __init__(self) -> None:
        self.has_committed = threading.Event()

    def committed(self, facts: EpochFacts) -> None:
        self.has_committed.set()


@pytest.fixture
def pipeline(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
    monkeypatch.chdir(tmp_path)
    sample.add("a.json", 3)
    return make()


def make() -> Pipeline:
    source = {"type": "files", "path": "in", "poll_interval_secs": 0.05}
    return Pipeline(name="flights", sources={"in": source}, sinks=[{"type": "delta", "table": "out"}])


def start(pipeline: Pipeline) -> Future[RunResult]:
    """Run on a thread of its own; returns when the first epoch is committed."""
    told, answer = Told(), Future[RunResult]()

    def run() -> None:
        try:
            answer.set_result(pipeline.run(observer=told))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    assert told.has_committed.wait(60)
    return answer


def lease_of(pipeline: Pipeline) -> LeaseRecord:
    store = pipeline.options.checkpoint.store
    assert store is not None
    found = open_store(store).get("flights/lease", LeaseRecord)
    assert found is not None
    return found


def test_a_run_on_a_thread_holds_the_lease_and_is_controlled(pipeline: Pipeline, tmp_path: Path) -> None:
    for call in (pipeline.stop, pipeline.pause, pipeline.resume):
        with pytest.raises(NotRunningError):
            call()
    answer = start(pipeline)
    seen = ask(pipeline.options, {"command": "status"}, os.environ)
    lease = lease_of(pipeline)
    assert (lease.holder, lease.released) == (seen["run"], False)
    assert pipeline.pause()
    assert not pipeline.pause()
    assert ask(pipeline.options, {"command": "status"}, os.environ)["state"] in ("pausing", "paused")
    assert pipeline.resume()
    assert not pipeline.resume()
    pipeline.stop()
    result = answer.result(60)
    assert (result.run, result.exit_code, result.epochs) == (seen["run"], 0, 1)
    assert lease_of(pipeline).released
    with pytest.raises(NotRunningError):
        ask(pipeline.options, {"command": "status"}, os.environ)
    with pytest.raises(NotRunningError):
        pipeline.stop()
    assert table_ids(tmp_path / "out").total() == 3


def test_a_run_on_the_main_thread_is_stopped_by_its_observer(pipeline: Pipeline, sample: SampleInput) -> None:
    class Stopping(Observer):
        def committed(self, facts: EpochFacts) -> None:
            pipeline.stop()

    result = pipeline.run(observer=Stopping())
    assert (result.exit_code, result.epochs) == (0, 1)


def test_a_newer_run_takes_the_lease_and_the_former_one_is_fenced(pipeline: Pipeline, sample: SampleInput) -> None:
    answer = start(pipeline)
    with pytest.raises(AlreadyRunningError, match="pipeline 'flights' is already running: run "):
        make().run()
    pipeline.pause()  # so that the other run finds the file
    sample.add("b.json", 3)
    with pytest.raises(AlreadyRunningError):
        make().run(once=True)
    assert make().run(once=True, take_over=True).exit_code == 0
    with pytest.raises(FencedError):
        answer.result(60)
    assert table_ids(sample.folder.parent / "out").total() == 6
