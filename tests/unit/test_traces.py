"""Traces: one span per epoch with its steps, sent by OTLP, and no collector can hold up a run."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from firnline import Pipeline
from firnline.clock import SystemClock
from firnline.errors import SinkError
from firnline.run.observer import EpochFacts
from firnline.sinks.base import Head
from firnline.sources.group import EpochPlan
from firnline.telemetry.opening import open_telemetry
from firnline.telemetry.traces import KEPT_EPOCHS, EpochTraces, are_traces_wanted, find_obstacle
from firnline.testing.local import LocalEngine
from tests.support.receiver import Reply, running_receiver
from tests.support.samples import SampleInput

STEPS = ["plan", "run", "stage", "commit", "record"]


class Clock(SystemClock):
    def __init__(self) -> None:
        self.at = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.at

    def pass_ms(self, ms: int) -> None:
        self.at += timedelta(milliseconds=ms)


class Traced:
    """Epochs by hand, and the spans that they make."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.clock = Clock()
        self.traces = EpochTraces(provider.get_tracer("t"), "flights", self.clock)
        self.traces.started("r1", Head(exists=True, version=0))

    def commit(self, epoch: int, **changes: Any) -> None:
        facts = EpochFacts(
            epoch, "a1", "main", 9, 2, 30, 28, {"not-json": 2}, 1, 1, 1, 1, 0, 1, 0, 0,
            durations_ms={"plan": 10, "run": 100, "stage": 20, "commit": 30}, **changes,
        )  # fmt: skip
        self.traces.committed(facts)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    @property
    def epochs(self) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == "epoch"]


def milliseconds(span: ReadableSpan) -> tuple[int, int]:
    origin = round(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time // 1_000_000 - origin, span.end_time // 1_000_000 - origin


def test_an_epoch_has_a_span_with_its_steps() -> None:
    traced = Traced()
    traced.clock.pass_ms(10)
    traced.traces.planned(7, EpochPlan({}))
    traced.clock.pass_ms(105)
    traced.traces.ran(7, 0.1)
    traced.clock.pass_ms(60)
    traced.commit(7)
    assert traced.spans == []
    traced.clock.pass_ms(5)
    traced.traces.recorded(7)
    found = {span.name: milliseconds(span) for span in traced.spans}
    assert found == {
        "plan": (0, 10), "run": (15, 115), "stage": (115, 135), "commit": (145, 175), "record": (175, 180),
        "epoch": (0, 180),
    }  # fmt: skip
    epoch = traced.epochs[0]
    assert epoch.attributes is not None
    assert epoch.attributes["firnline.epoch"] == 7
    assert epoch.attributes["firnline.rows"] == 28
    assert epoch.attributes["firnline.attempt"] == "a1"
    assert epoch.attributes["firnline.pipeline"] == "flights"
    assert epoch.context is not None
    assert {span.parent.span_id for span in traced.spans if span.parent} == {epoch.context.span_id}


def test_an_epoch_that_is_planned_again_says_why() -> None:
    traced = Traced()
    traced.traces.planned(7, EpochPlan({}))
    traced.traces.trouble(SinkError("away", sink="main"), 1)
    traced.traces.planned(7, EpochPlan({}))
    traced.commit(7)
    traced.traces.recorded(7)
    lost, kept = traced.epochs
    assert (lost.status.description, lost.events[0].name) == ("planned again", "exception")
    assert lost.events[0].attributes is not None
    assert lost.events[0].attributes["exception.message"] == "away"
    assert kept.status.is_unset
    assert not kept.events


def test_a_staged_epoch_does_not_wait_for_the_committer() -> None:
    traced = Traced()
    traced.traces.planned(7, EpochPlan({}))
    traced.commit(7, is_staged=True)
    assert [span.name for span in traced.epochs] == ["epoch"]


def test_a_record_of_several_epochs_ends_each() -> None:
    traced = Traced()
    for epoch in (7, 8, 9):
        traced.traces.planned(epoch, EpochPlan({}))
    traced.commit(7)
    traced.commit(8)
    traced.traces.recorded(8)
    assert len(traced.epochs) == 2
    traced.traces.stopped(3)
    assert traced.epochs[-1].status.description == "the run ended before the commit"


def test_epochs_that_are_never_recorded_do_not_pile_up() -> None:
    traced = Traced()
    for epoch in range(10 * KEPT_EPOCHS):
        traced.traces.planned(epoch, EpochPlan({}))
        traced.commit(epoch)
    assert len(traced.epochs) == 9 * KEPT_EPOCHS


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "otlp"}, False),
    ],
)
def test_the_standard_variables_ask_for_traces(environ: dict[str, str], wanted: bool) -> None:
    assert are_traces_wanted(environ) is wanted


def test_what_cannot_be_sent_is_said_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = Pipeline(
        name="p", sources={"in": {"type": "files", "path": str(tmp_path)}}, sinks=[{"type": "delta", "table": "out"}]
    ).options
    said: list[str] = []
    for environ in (
        {"OTEL_TRACES_EXPORTER": "jaeger"},
        {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ):
        assert find_obstacle(environ)
        assert open_telemetry(options, SystemClock(), environ, said.append) == []
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    assert open_telemetry(options, SystemClock(), {"OTEL_TRACES_EXPORTER": "otlp"}, said.append) == []
    assert len(said) == 3
    assert "http/protobuf" in said[1]
    assert "pip install 'firnline[otel]'" in said[2]


@pytest.fixture
def pipeline(tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    monkeypatch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
    monkeypatch.chdir(tmp_path)
    sample.add("a.json", 3)
    return Pipeline(
        name="flights", sources={"in": {"type": "files", "path": "in"}}, sinks=[{"type": "delta", "table": "out"}]
    )


def test_a_run_sends_its_epochs_to_a_collector(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_receiver(forgets_keys=True) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "lake")
        monkeypatch.setattr("firnline.telemetry.traces.END_SECONDS", 120)
        pipeline.run(once=True)
        bodies = [request.body for request in receiver.requests if request.path == "/v1/traces"]
    spans, services = [], set()
    for body in bodies:
        for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
            services |= {one.value.string_value for one in sent.resource.attributes if one.key == "service.name"}
            spans += [span for scope in sent.scope_spans for span in scope.spans]
    assert services == {"lake"}
    assert sorted(span.name for span in spans) == sorted(["epoch", *STEPS])
    epoch = next(span for span in spans if span.name == "epoch")
    rows = next(one.value.int_value for one in epoch.attributes if one.key == "firnline.rows")
    assert rows == 3
    for span in spans:
        assert epoch.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= epoch.end_time_unix_nano


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_a_collector_that_does_not_answer_holds_up_no_run(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with running_receiver(forgets_keys=True) as receiver:
        receiver.behaviour = lambda *_: Reply(503, hangs=kind == "hangs")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        monkeypatch.setattr("firnline.telemetry.traces.END_SECONDS", 0.2)
        ended = threading.Event()

        def run() -> None:
            pipeline.run(once=True)
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        assert ended.wait(100)  # a hanging answer takes longer
