"""One session serves a run: it starts in the background, outlives failed jobs, and is replaced when its JVM died."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import pytest

from firnline.errors import ConfigError, EngineError, WorkerLostError
from firnline.jobs.spark import LISTEN_KEY, OPTIONS_KEY, SparkEngine, open_session

WAIT = 30


class FakeSession:
    """A session whose jobs fail, and whose JVM may be dead. Like Spark's, it keeps the first answer of `version`."""

    def __init__(self, stopped: threading.Event) -> None:
        self.alive = True
        self.stopped = stopped

    @cached_property
    def version(self) -> str:
        return str(self._jsparkSession.version())

    @property
    def _jsparkSession(self) -> Any:  # noqa: N802 - Spark's name
        class Java:
            version = staticmethod(self._answer)

        return Java()

    def _answer(self) -> str:
        if not self.alive:
            raise ConnectionError("no JVM")
        return "4"

    @property
    def sparkContext(self) -> Any:  # noqa: N802 - Spark's name
        class Context:
            addJobTag = removeJobTag = staticmethod(lambda _: None)  # noqa: N815 - Spark's names

        return Context()

    def range(self, *_: int) -> Any:
        raise RuntimeError("a job failed")

    def stop(self) -> None:
        self.stopped.set()


class Starts:
    """Replaces `open_session`: a start waits until it may end, and may fail."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.stopped = threading.Event()
        self.failures: list[Exception] = []
        self.sessions: list[FakeSession] = []

    def __call__(self, _name: str, _settings: Mapping[str, str]) -> FakeSession:
        self.begun.set()
        assert self.may_end.wait(WAIT)
        if self.failures:
            raise self.failures.pop()
        self.sessions.append(FakeSession(self.stopped))
        return self.sessions[-1]


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    starts = Starts()
    monkeypatch.setattr("firnline.jobs.spark.open_session", starts)
    return starts


def in_thread(call: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.parametrize(("master", "at"), [("local[*]", "127.0.0.1"), ("spark://h:7077", None)])
def test_pages_of_spark_that_a_spec_turns_on_listen_on_loopback(
    master: str, at: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen with Spark 4.2: without the variable they listen on every address, whatever `spark.driver.bindAddress`."""
    found: list[str | None] = []

    def start(_: Mapping[str, str]) -> None:
        found.append(os.environ.get(LISTEN_KEY))
        raise EngineError("far enough")

    monkeypatch.setenv(LISTEN_KEY, "")  # so that it is put back afterwards
    monkeypatch.delenv(LISTEN_KEY)
    monkeypatch.setattr("firnline.jobs.spark.find_java", lambda: "java")
    monkeypatch.setattr("firnline.jobs.spark._start_jvm", start)
    settings = {"spark.master": master, "spark.ui.enabled": "true", OPTIONS_KEY: ""}
    with pytest.raises(EngineError, match="far enough"):
        open_session("p", settings)
    assert found == [at]
    assert ("without a password" in caplog.text) == (at is None)  # executors elsewhere must reach the driver


@pytest.mark.parametrize("missing", ["the package", "Spark"])
def test_pyspark_that_is_not_whole_is_named_with_the_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark itself ends the process then (`sys.exit(-1)`), which looked like a bug of Firnline."""

    def start(_: Mapping[str, str]) -> None:
        raise SystemExit(-1)

    monkeypatch.setattr("firnline.jobs.spark.find_java", lambda: "java")
    monkeypatch.setattr("firnline.jobs.spark._start_jvm", start)
    if missing == "the package":
        monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(ConfigError, match=r"PySpark of .* no Spark can start") as caught:
        open_session("p", {"spark.master": "local[1]", OPTIONS_KEY: ""})
    assert f"{sys.executable} -m pip install --force-reinstall " in caught.value.hint


def test_spark_connect_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:1")
    with pytest.raises(ConfigError, match="Spark Connect is not supported"):
        SparkEngine("p", {}).run("tag", [{"kind": "read"}])


def test_a_start_goes_on_in_the_background_and_the_first_job_waits_for_it(starts: Starts) -> None:
    engine = SparkEngine("p", {})
    engine.start()
    engine.start()
    assert starts.begun.wait(WAIT)
    assert starts.sessions == []
    got: list[Any] = []
    job = in_thread(lambda: got.append(engine.session))
    starts.may_end.set()
    job.join(WAIT)
    engine.start()
    got.append(engine.session)
    assert got == starts.sessions * 2
    assert len(starts.sessions) == 1


def test_the_first_job_raises_the_failure_of_a_start_and_the_next_one_tries_again(starts: Starts) -> None:
    starts.failures.append(EngineError("Spark does not start: no memory"))
    starts.may_end.set()
    engine = SparkEngine("p", {})
    engine.start()
    with pytest.raises(EngineError, match="no memory"):
        engine.run("tag", [{"kind": "read"}])
    assert starts.sessions == []
    assert engine.session is not None
    assert len(starts.sessions) == 1


def test_a_stop_waits_for_no_start_and_ends_the_session_that_comes_of_it(starts: Starts) -> None:
    engine = SparkEngine("p", {})
    engine.start()
    assert starts.begun.wait(WAIT)
    engine.stop()
    assert starts.sessions == []
    starts.may_end.set()
    assert starts.stopped.wait(WAIT)


def test_a_jvm_that_hangs_does_not_hold_the_end_of_a_run(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("firnline.jobs.spark.STOP_SECONDS", 0.01)
    starts.may_end.set()
    engine = SparkEngine("p", {})
    ended = threading.Event()
    monkeypatch.setattr(engine.session, "stop", lambda: ended.wait(WAIT))
    engine.stop()
    ended.set()
    assert "spark does not stop" in caplog.text


def test_a_failed_job_keeps_the_session_and_a_dead_jvm_is_replaced(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    for name in ("_active_spark_context", "_gateway", "_jvm"):
        monkeypatch.setattr(SparkContext, name, getattr(SparkContext, name))
    monkeypatch.setattr(SparkSession, "_instantiatedSession", SparkSession._instantiatedSession)
    starts.may_end.set()
    engine = SparkEngine("p", {})
    for _ in range(3):
        with pytest.raises(EngineError, match="a Spark job failed: a job failed"):
            engine.run("tag", [{"kind": "read"}])
    assert len(starts.sessions) == 1
    starts.sessions[0].alive = False
    with pytest.raises(WorkerLostError, match="Spark is gone"):
        engine.run("tag", [{"kind": "read"}])
    assert engine.session is starts.sessions[1]  # type: ignore[comparison-overlap]
