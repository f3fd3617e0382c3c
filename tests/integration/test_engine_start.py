"""The engine starts while a run plans and claims; a run that finds nothing to do starts none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.testing.local import LocalEngine
from tests.support.pipelines import Recorder, pipeline_options
from tests.support.samples import SampleInput

WAIT = 60


class CountsStarts(LocalEngine):
    """Notes in which order the run starts the engine, claims, and gives it a job."""

    def __init__(self) -> None:
        super().__init__(1)
        self.calls: list[str] = []
        self.started = threading.Event()

    def start(self) -> None:
        self.calls.append("start")
        self.started.set()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append("run")
        return super().run(*args, **kwargs)


class NotesClaim(Recorder):
    def __init__(self, engine: CountsStarts) -> None:
        super().__init__()
        self.engine = engine
        self.runner: Runner | None = None

    def claimed(self, generation: int) -> None:
        self.engine.calls.append("claimed")

    def idle(self) -> None:
        assert self.runner is not None
        self.runner.stop()


def run(options: PipelineOptions, engine: CountsStarts, *, once: bool) -> None:
    observer = NotesClaim(engine)
    observer.runner = Runner(open_pipeline(options, once=once), engine, observer, once=once)
    assert observer.runner.run().exit_code == 0


@pytest.fixture
def options(tmp_path: Path) -> PipelineOptions:
    SampleInput(tmp_path / "in").add("a.json", 3)
    return pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"))


def test_a_run_with_work_starts_the_engine_before_it_claims(options: PipelineOptions) -> None:
    engine = CountsStarts()
    run(options, engine, once=True)
    assert engine.calls[0] == "start"
    assert engine.calls.index("claimed") < engine.calls.index("run")


def test_a_run_once_with_nothing_to_do_starts_no_engine(options: PipelineOptions) -> None:
    run(options, CountsStarts(), once=True)
    engine = CountsStarts()
    run(options, engine, once=True)
    assert engine.calls == []


def test_a_continuous_run_starts_the_engine_before_it_has_work(options: PipelineOptions) -> None:
    run(options, CountsStarts(), once=True)
    engine = CountsStarts()
    run(options, engine, once=False)
    assert engine.calls == ["start"]


def test_a_slow_plan_starts_the_engine_before_it_ends(
    options: PipelineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firnline.run.runner.SLOW_PLAN_SECONDS", 0.01)
    run(options, CountsStarts(), once=True)
    engine = CountsStarts()
    pipeline = open_pipeline(options, once=True)
    plan = pipeline.sources.plan

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert engine.started.wait(WAIT)
        return plan(*args, **kwargs)

    monkeypatch.setattr(pipeline.sources, "plan", slow)
    assert Runner(pipeline, engine, once=True).run().exit_code == 0
    assert engine.calls == ["start"]
