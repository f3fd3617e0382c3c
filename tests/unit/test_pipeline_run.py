"""`Pipeline.run` from Python: the lease, the control channel, and stopping, pausing and resuming from other threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from firnline import Pipeline
from firnline.clock import SystemClock
from firnline.errors import AlreadyRunningError, FencedError, NotRunningError
from firnline.run.control import ask
from firnline.run.events import KEPT_EVENTS, EventLog
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


def test_a_run_on_a_thread_of_its_own(pipeline: Pipeline, sample: SampleInput) -> None:
    with pipeline.start() as run:
        kinds = []
        for event in run.events(timeout=60):
            kinds.append(event.kind)
            if event.kind == "idle":
                break
        assert kinds[0] == "started"
        assert {"claimed", "planned", "committed"} <= set(kinds)
        assert run.pause()
        assert not run.pause()
        assert run.resume()
        assert run.status().epoch == 1
        assert not run.is_done
        with pytest.raises(TimeoutError):
            run.wait(0.01)
    assert run.is_done
    result = run.wait()
    assert (result.exit_code, result.epochs) == (0, 1)
    assert [event.facts for event in run.events()][-1] == {"exit_code": 0}
    assert run.status().state == "ended"


def test_a_run_that_cannot_begin_says_so_at_once_and_one_that_fails_when_it_is_waited_for(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pipeline.start() as run:
        for event in run.events(timeout=60):
            if event.kind == "committed":
                break
        with pytest.raises(AlreadyRunningError, match="this process runs"):
            make().start()
        assert run.status().state != "ended"  # the first run goes on
    monkeypatch.setattr("firnline.pipeline.open_pipeline", _refuse)
    with pytest.raises(NotRunningError):
        pipeline.start()


def test_a_second_start_is_refused_until_the_first_run_has_ended(pipeline: Pipeline) -> None:
    for _ in range(2):  # the end of a run lets the pipeline be started again at once
        run = pipeline.start()
        with pytest.raises(AlreadyRunningError, match="this process runs"):
            pipeline.start()
        run.stop()
        run.wait(120)


def _refuse(*_: object, **__: object) -> None:
    raise NotRunningError("refused")


def test_the_error_of_a_block_is_not_hidden_by_the_run(pipeline: Pipeline) -> None:
    with pytest.raises(ZeroDivisionError), pipeline.start() as run:
        raise ZeroDivisionError
    assert run.is_done


def test_a_slow_reader_of_events_misses_some_and_sees_the_gap() -> None:
    log = EventLog(SystemClock())
    reader = log.read()
    log.idle()
    assert next(reader).number == 1
    for _ in range(KEPT_EVENTS + 5):
        log.idle()
    assert next(reader).number == 7
    log.close()
    assert sum(1 for _ in reader) == KEPT_EVENTS - 1


def test_history_as_methods(pipeline: Pipeline, sample: SampleInput, tmp_path: Path) -> None:
    for number in range(3):
        sample.add(f"b{number}.json", 2)
        pipeline.run(once=True)
    assert [row["epoch"] for row in pipeline.checkpoints()] == [3, 2, 1]
    assert [row["epoch"] for row in pipeline.checkpoints(limit=1, before=3)] == [2]
    place = pipeline.create_savepoint(str(tmp_path / "saved"))
    assert [one.path for one in pipeline.savepoints()] == [place]
    assert pipeline.plan_rollback(1).new_epoch == 4
    assert pipeline.rollback(1).to_epoch == 1
    assert pipeline.status().epoch == 4
    pipeline.run(once=True)
    assert len(table_ids(tmp_path / "out")) == 3 + 3 * 2


def test_a_notebook_shows_the_status_as_a_table(pipeline: Pipeline) -> None:
    pipeline.run(once=True)
    shown = pipeline.status()._repr_html_()
    assert shown.startswith("<table>")
    assert "<td>flights</td>" in shown
