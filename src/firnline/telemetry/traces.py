"""OpenTelemetry traces: one span per epoch, with a child for each of its steps. Needs the extra `otel`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firnline.errors import FirnlineError
from firnline.run.observer import EpochFacts, Observer
from firnline.sinks.base import Head
from firnline.sources.group import EpochPlan
from firnline.types import Clock

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

KEPT_EPOCHS = 64  # that are in flight or wait for their record; older ones end without it
KEPT_FAILURES = 20  # of one epoch
END_SECONDS = 5.0  # limit for sending what is left, when the run ends
_EXPORTER, _PROTOCOL = "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
HTTP = "http/protobuf"


def are_traces_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether the standard variables ask for traces: an endpoint, or an exporter by name."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get(_EXPORTER) == "none":
        return False
    return bool(environ.get(_EXPORTER)) or any(environ.get(name) for name in _ENDPOINTS)


def find_obstacle(environ: Mapping[str, str]) -> str:
    """Return why traces that the variables ask for cannot be sent; empty if they can."""
    if (exporter := environ.get(_EXPORTER) or "otlp") != "otlp":
        return f"{_EXPORTER}={exporter} is not supported; set it to otlp"
    protocol = environ.get(_PROTOCOL) or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or HTTP
    if protocol != HTTP:
        return f"the protocol {protocol} is not supported; set {_PROTOCOL}={HTTP}"
    return ""


def make_provider() -> TracerProvider:
    """Return a provider as the standard variables describe it: endpoint, headers, sampler, resource.

    Spans are sent by a thread of its own, from a queue with a limit; spans that do not fit are dropped.

    Raises:
        ImportError: the extra `otel` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # A collector that is away is one line per batch that is lost, not one per try.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    named = {"service.name": "firnline"}
    resource = Resource.create(named).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


@dataclass(slots=True)
class _Epoch:
    """An epoch that has not ended. Times are nanoseconds since 1970; 0: not yet."""

    planned: int
    ran: int = 0
    committed: int = 0
    durations_ms: Mapping[str, int] = field(default_factory=dict)
    attributes: dict[str, str | int | float] = field(default_factory=dict)
    failures: list[tuple[int, dict[str, str | int]]] = field(default_factory=list)


class EpochTraces(Observer):
    """Observes a run and makes a span for each epoch. Pass `provider` to shut it down with the run."""

    def __init__(self, tracer: Tracer, pipeline: str, clock: Clock, provider: TracerProvider | None = None) -> None:
        self._tracer = tracer
        self._pipeline = pipeline
        self._clock = clock
        self._provider = provider
        self._run = ""
        self._open: dict[int, _Epoch] = {}

    def _now(self) -> int:
        return round(self._clock.now().timestamp() * 1_000_000) * 1000

    # -- events of the run ----------------------------------------------------------------------------

    def started(self, run: str, held: Head) -> None:
        self._run = run

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        if epoch in self._open:
            self._end(epoch, error="planned again")
        for old in sorted(self._open)[: -KEPT_EPOCHS + 1]:
            self._end(old)
        named: dict[str, str | int | float] = {
            "pipeline": self._pipeline,
            "run": self._run,
            "epoch": epoch,
            "files_planned": plan.files,
        }
        self._open[epoch] = _Epoch(self._now(), attributes=named)

    def ran(self, epoch: int, seconds: float) -> None:
        if epoch in self._open:
            self._open[epoch].ran = self._now()

    def committed(self, facts: EpochFacts) -> None:
        one = self._open.get(facts.epoch)
        if one is None:
            return
        one.committed, one.durations_ms = self._now(), facts.durations_ms
        one.attributes |= {
            "attempt": facts.attempt,
            "sink": facts.sink,
            "version": facts.version,
            "files": facts.files,
            "records": facts.records,
            "rows": facts.rows,
            "quarantined": sum(facts.bad.values()),
            "bytes_read": facts.bytes_read,
            "lag_seconds": facts.lag_seconds,
        }
        if facts.is_staged:  # its record waits for the committer
            self._end(facts.epoch)

    def recorded(self, epoch: int) -> None:
        now = self._now()
        for number in [number for number, one in self._open.items() if number <= epoch and one.committed]:
            self._end(number, recorded=now)

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        facts: dict[str, str | int] = {
            "firnline.code": error.code,
            "firnline.failures": failures,
            "exception.message": error.message,
        }
        if optional:
            facts["firnline.sink"] = optional
        for one in self._open.values():
            one.failures.append((self._now(), facts))
            del one.failures[:-KEPT_FAILURES]

    def stopped(self, exit_code: int) -> None:
        for number in list(self._open):
            self._end(number, error="" if self._open[number].committed else "the run ended before the commit")
        if self._provider is not None:
            sender = threading.Thread(target=self._provider.shutdown, name="firnline traces", daemon=True)
            sender.start()
            sender.join(END_SECONDS)

    # -- spans ----------------------------------------------------------------------------------------

    def _end(self, epoch: int, *, recorded: int = 0, error: str = "") -> None:
        """Make the span of an epoch and those of its steps, from the ends and durations of the steps."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        one = self._open.pop(epoch)
        took = {step: ms * 1_000_000 for step, ms in one.durations_ms.items()}
        began = one.planned - took.get("plan", 0)
        ended = max(recorded or one.committed or self._now(), one.planned)
        attributes = {f"firnline.{name}": value for name, value in one.attributes.items()}
        span = self._tracer.start_span("epoch", start_time=began, attributes=attributes)
        ends = {
            "plan": one.planned,
            "run": one.ran,
            "stage": one.ran + took.get("stage", 0) if one.ran else 0,
            "commit": one.committed,
        }
        steps = [(step, at - took[step], at) for step, at in ends.items() if at and step in took]
        if recorded:
            steps.append(("record", one.committed, recorded))
        shared = {name: value for name, value in attributes.items() if name in ("firnline.epoch", "firnline.attempt")}
        for step, start, end in steps:
            start = min(max(start, began), ended)
            child = self._tracer.start_span(
                step, context=set_span_in_context(span), start_time=start, attributes=shared
            )
            child.end(end_time=max(start, min(end, ended)))
        for at, facts in one.failures:
            span.add_event("exception", facts, timestamp=at)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(end_time=ended)
