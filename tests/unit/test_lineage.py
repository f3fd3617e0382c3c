"""Lineage: events of a run with its datasets, by the naming rules of OpenLineage; no receiver can hold up a run."""

from __future__ import annotations

import json
import logging
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

from firnline import Pipeline
from firnline.clock import SystemClock
from firnline.errors import FirnlineError, SinkError
from firnline.run.observer import EpochFacts
from firnline.sinks.base import Head
from firnline.telemetry.datasets import DatasetName, inputs_of, output_of
from firnline.telemetry.lineage import QUEUED, RunLineage, is_lineage_wanted
from firnline.telemetry.opening import open_telemetry
from firnline.testing.local import LocalEngine
from tests.support.receiver import Receiver, Reply, running_receiver
from tests.support.samples import SampleInput

FILES = {"type": "files", "path": "/data/in"}
DELTA = {"type": "delta", "table": "/lake/out"}
SECRET = "pa55word"


def make(source: dict[str, Any], sink: dict[str, Any] | None = None) -> Pipeline:
    return Pipeline(name="p", sources={"in": source}, sinks=[sink or DELTA])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (FILES, [("file", "/data/in")]),
        ({"type": "files", "path": "s3://bucket/a/b"}, [("s3://bucket", "a/b")]),
        ({"type": "files", "path": "gs://bucket"}, [("gs://bucket", "/")]),
        ({"type": "delta", "table": "/lake/orders"}, [("file", "/lake/orders")]),
        (
            {"type": "kafka", "brokers": "one:9092,two:9092", "topics": ["b", "a"]},
            [("kafka://one:9092", "a"), ("kafka://one:9092", "b")],
        ),
        (
            {"type": "postgres", "dsn": f"postgresql://me:{SECRET}@db/shop", "tables": ["orders", "other.items"]},
            [("postgres://db:5432", "shop.public.orders"), ("postgres://db:5432", "shop.other.items")],
        ),
        (
            {"type": "mysql", "dsn": f"mysql://me:{SECRET}@db/shop", "tables": ["orders", "other.items"]},
            [("mysql://db:3306", "shop.orders"), ("mysql://db:3306", "other.items")],
        ),
    ],
)
def test_inputs_are_named_by_the_rules(source: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert inputs_of(make(source).options.sources[0]) == [DatasetName(*one) for one in expected]


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        (DELTA, ("file", "/lake/out")),
        ({"type": "delta", "table": "s3://bucket/lake/out"}, ("s3://bucket", "lake/out")),
        (
            {"name": "t", "type": "kafka", "brokers": "one:9092", "topic": "orders", "key": ["id"]},
            ("kafka://one:9092", "orders"),
        ),
        (
            {"name": "t", "type": "postgres", "dsn": f"postgresql://me:{SECRET}@db:5433/shop", "table": "orders"},
            ("postgres://db:5433", "shop.public.orders"),
        ),
        (
            {"name": "t", "type": "redis", "url": f"redis://me:{SECRET}@localhost:6379", "stream": "orders"},
            ("redis://localhost:6379", "0/orders"),
        ),
        ({"name": "t", "type": "http", "url": f"https://hooks/rows?key={SECRET}"}, ("https://hooks:443", "rows")),
    ],
)
def test_outputs_are_named_by_the_rules_without_secrets(sink: dict[str, Any], expected: tuple[str, str]) -> None:
    home = {} if sink["type"] == "delta" else {"home": "/home-of-p"}
    options = Pipeline(name="p", sources={"in": FILES}, sinks=[sink], **home).options
    assert output_of(options.sinks[0]) == DatasetName(*expected)


def facts(epoch: int) -> EpochFacts:
    return EpochFacts(
        epoch, "a1", "main", 9, 2, 30, 28, {}, 1, 1, 1, 1, 0, 1, 0, 0, rows_in="delta-1", sources={"in": 30}
    )


class Observed:
    """A run by hand, and the events that it sent."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self.events: list[Any] = []
        self.lineage = RunLineage(make(FILES).options, self.events.append, SystemClock(), environ or {})
        self.lineage.started("r1", Head(exists=True, version=0))

    def states(self) -> list[str]:
        return [event.eventType.name for event in self.events]


@pytest.mark.parametrize(("code", "last"), [(0, "COMPLETE"), (1, "FAIL"), (3, "FAIL"), (5, "ABORT"), (130, "ABORT")])
def test_a_run_begins_and_ends(monkeypatch: pytest.MonkeyPatch, code: int, last: str) -> None:
    monkeypatch.setattr("firnline.telemetry.lineage.END_SECONDS", 120)
    run = Observed({"OPENLINEAGE_NAMESPACE": "lake", "OPENLINEAGE_PARENT_ID": f"airflow/dag.task/{uuid.uuid4()}"})
    run.lineage.claimed(1)
    run.lineage.claimed(2)
    run.lineage.trouble(SinkError("away"), 1)
    run.lineage.stopped(code)
    assert run.states() == ["START", last]
    assert len({event.run.runId for event in run.events}) == 1
    event = run.events[-1]
    assert (event.job.namespace, event.job.name) == ("lake", "p")
    assert event.run.facets["parent"].job.name == "dag.task"
    assert ("errorMessage" in event.run.facets) == (last == "FAIL")


def test_a_run_that_goes_on_says_so_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.telemetry.lineage.END_SECONDS", 120)
    run = Observed()
    run.lineage.claimed(1)
    run.lineage.committed(facts(1))
    monkeypatch.setattr("firnline.telemetry.lineage.RUNNING_SECONDS", 0)
    run.lineage.committed(facts(2))
    run.lineage.stopped(0)
    assert run.states() == ["START", "RUNNING", "COMPLETE"]
    assert run.events[1].outputs[0].outputFacets["outputStatistics"].rowCount == 56
    assert run.events[1].inputs[0].inputFacets["inputStatistics"].rowCount == 60


def test_a_run_that_claims_nothing_sends_nothing() -> None:
    run = Observed()
    run.lineage.stopped(0)
    assert run.events == []


def test_a_receiver_that_hangs_costs_events_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("firnline.telemetry.lineage.END_SECONDS", 0.05)
    monkeypatch.setattr("firnline.telemetry.lineage.RUNNING_SECONDS", 0)
    answers = threading.Event()

    def hang(_: object) -> None:
        answers.wait()

    lineage = RunLineage(make(FILES).options, hang, SystemClock(), {})
    lineage.claimed(1)
    with caplog.at_level(logging.WARNING):
        for epoch in range(2 * QUEUED):
            lineage.committed(facts(epoch))
        lineage.stopped(0)
    answers.set()
    assert "lineage event dropped" in caplog.text


def test_the_standard_variables_ask_for_lineage(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_lineage_wanted({})
    assert is_lineage_wanted({"OPENLINEAGE_URL": "http://localhost:5000"})
    assert not is_lineage_wanted({"OPENLINEAGE_URL": "http://localhost:5000", "OPENLINEAGE_DISABLED": "true"})
    said: list[str] = []
    monkeypatch.setitem(__import__("sys").modules, "openlineage.client", None)
    assert open_telemetry(make(FILES).options, SystemClock(), {"OPENLINEAGE_URL": "http://x"}, said.append) == []
    assert said == ["warning: no lineage is sent: the library is missing; pip install 'firnline[openlineage]'"]


@pytest.fixture
def pipeline(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
    monkeypatch.chdir(tmp_path)
    sample.add("a.json", 3)
    return Pipeline(
        name="flights", sources={"in": {"type": "files", "path": "in"}}, sinks=[{"type": "delta", "table": "out"}]
    )


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in receiver.requests if request.path == "/api/v1/lineage"]


def test_a_run_sends_its_events_to_a_receiver(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("firnline.telemetry.lineage.END_SECONDS", 120)
    with running_receiver(forgets_keys=True) as receiver:
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{receiver.port}")
        pipeline.run(once=True)
        found = bodies(receiver)
    assert [event["eventType"] for event in found] == ["START", "COMPLETE"]
    last = found[-1]
    assert [(one["namespace"], one["name"]) for one in last["inputs"]] == [("file", str(tmp_path / "in"))]
    assert [(one["namespace"], one["name"]) for one in last["outputs"]] == [("file", str(tmp_path / "out"))]
    assert last["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] == 3
    assert uuid.UUID(last["run"]["runId"])


def test_a_failed_run_says_why(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("firnline.telemetry.lineage.END_SECONDS", 120)
    (tmp_path / "in" / "b.json").write_text("not json\n" * 200)
    with running_receiver(forgets_keys=True) as receiver:
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{receiver.port}")
        with pytest.raises(FirnlineError) as failed:
            pipeline.run(once=True)
        last = bodies(receiver)[-1]
    assert last["eventType"] == "FAIL"
    assert last["run"]["facets"]["errorMessage"]["message"] == failed.value.message


def test_a_receiver_that_does_not_answer_holds_up_no_run(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.telemetry.lineage.END_SECONDS", 0.2)
    with running_receiver(forgets_keys=True) as receiver:
        receiver.behaviour = lambda *_: Reply(200, hangs=True)
        monkeypatch.setenv("OPENLINEAGE_URL", f"http://127.0.0.1:{receiver.port}")
        ended = threading.Event()

        def run() -> None:
            pipeline.run(once=True)
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        assert ended.wait(100)
