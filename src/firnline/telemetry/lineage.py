"""OpenLineage events of a run: START, RUNNING while it commits, then COMPLETE, FAIL or ABORT. Extra `openlineage`."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from firnline.errors import FirnlineError
from firnline.options import PipelineOptions
from firnline.run.observer import EpochFacts, Observer
from firnline.sinks.base import Head
from firnline.telemetry.datasets import inputs_of, output_of
from firnline.types import Clock

if TYPE_CHECKING:
    from openlineage.client.event_v2 import InputDataset, OutputDataset, RunEvent, RunState

logger = logging.getLogger(__name__)

PRODUCER = "urn:firnline"
RUNNING_SECONDS = 60.0  # at most one event in so many seconds says that the run goes on
QUEUED = 100
END_SECONDS = 5.0  # limit for sending what is left, when the run ends
FENCED, STOPPED_AT_ONCE = 5, 130  # exit codes of runs that ended without having failed
_RUNS = uuid.UUID("2f6a1d6e-52c9-5a0e-9a57-6a0f5c7f2b11")  # run ids of Firnline, as UUIDs


def is_lineage_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether the standard variables of OpenLineage name a receiver."""
    if environ.get("OPENLINEAGE_DISABLED", "").lower() in ("true", "1"):
        return False
    return bool(environ.get("OPENLINEAGE_URL") or environ.get("OPENLINEAGE_CONFIG"))


def make_emit() -> Callable[[RunEvent], None]:
    """Return a function that sends an event as the standard variables say; it may take long, and raise.

    Raises:
        ImportError: the extra `openlineage` is not installed.
    """
    from openlineage.client import OpenLineageClient

    client = OpenLineageClient()
    return client.emit


def lineage_id(pipeline: str, run: str) -> str:
    """Return the id of a run in OpenLineage."""
    return str(uuid.uuid5(_RUNS, f"{pipeline}/{run}"))


class RunLineage(Observer):
    """Observes a run and sends its events, from a thread of its own. Events that cannot be sent are lost and logged."""

    def __init__(
        self,
        options: PipelineOptions,
        emit: Callable[[RunEvent], None],
        clock: Clock,
        environ: Mapping[str, str],
    ) -> None:
        self._options = options
        self._emit = emit
        self._clock = clock
        self._namespace = environ.get("OPENLINEAGE_NAMESPACE") or "default"
        self._parent = environ.get("OPENLINEAGE_PARENT_ID", "")
        self._run = ""
        self._rows: Counter[str] = Counter()  # by sink, in this run
        self._records: Counter[str] = Counter()  # by source
        self._error: FirnlineError | None = None
        self._sent_at = 0.0
        self._events: queue.Queue[RunEvent | None] = queue.Queue(QUEUED)
        self._sender: threading.Thread | None = None

    # -- events of the run ----------------------------------------------------------------------------

    def started(self, run: str, held: Head) -> None:
        self._run = run

    def claimed(self, generation: int) -> None:
        if self._sender is None:
            self._sender = threading.Thread(target=self._send, name="firnline lineage", daemon=True)
            self._sender.start()
            self._put("START")

    def committed(self, facts: EpochFacts) -> None:
        self._records.update(facts.sources)
        self._rows.update(facts.sink_rows or {facts.rows_in or facts.sink: facts.rows})
        self._error = None
        if self._clock.monotonic() - self._sent_at >= RUNNING_SECONDS:
            self._put("RUNNING")

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        if not optional:
            self._error = error

    def stopped(self, exit_code: int) -> None:
        if self._sender is None:  # it claimed nothing, so there was no run for others
            return
        if exit_code == 0:
            self._put("COMPLETE")
        else:
            self._put("ABORT" if exit_code in (FENCED, STOPPED_AT_ONCE) else "FAIL")
        with contextlib.suppress(queue.Full):
            self._events.put_nowait(None)
        self._sender.join(END_SECONDS)

    # -- sending --------------------------------------------------------------------------------------

    def _put(self, state: str) -> None:
        from openlineage.client.event_v2 import RunState

        self._sent_at = self._clock.monotonic()
        try:
            self._events.put_nowait(self._make(RunState[state]))
        except queue.Full:
            logger.warning("lineage event dropped", extra={"event": state, "reason": "too many wait to be sent"})

    def _send(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                self._emit(event)
            except Exception as error:  # a receiver that is away holds up no run
                facts = {"event": str(event.eventType), "reason": str(error) or type(error).__name__}
                logger.warning("lineage event not sent", extra=facts)

    def _make(self, state: RunState) -> RunEvent:
        from openlineage.client.event_v2 import Job, Run, RunEvent
        from openlineage.client.facet_v2 import error_message_run, job_type_job, parent_run

        facets: dict[str, Any] = {}
        if state.name == "FAIL" and self._error is not None:
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(
                message=self._error.message, programmingLanguage="Python", producer=PRODUCER
            )
        if self._parent.count("/") >= 2:
            job, _, run = self._parent.rpartition("/")
            namespace, _, name = job.rpartition("/")
            facets["parent"] = parent_run.ParentRunFacet(
                run=parent_run.Run(runId=run), job=parent_run.Job(namespace=namespace, name=name), producer=PRODUCER
            )
        kind = job_type_job.JobTypeJobFacet(
            processingType="STREAMING", integration="FIRNLINE", jobType="JOB", producer=PRODUCER
        )
        return RunEvent(
            eventType=state,
            eventTime=self._clock.now().isoformat(),
            run=Run(runId=lineage_id(self._options.name, self._run), facets=facets),
            job=Job(namespace=self._namespace, name=self._options.name, facets={"jobType": kind}),
            producer=PRODUCER,
            inputs=self._inputs(),
            outputs=self._outputs(),
        )

    def _inputs(self) -> list[InputDataset]:
        from openlineage.client.event_v2 import InputDataset
        from openlineage.client.facet_v2 import input_statistics_input_dataset as statistics

        found = []
        for source in self._options.sources:
            names = inputs_of(source)
            facets: dict[str, Any] = {}
            if len(names) == 1 and source.name in self._records:
                counted = statistics.InputStatisticsInputDatasetFacet(
                    rowCount=self._records[source.name], producer=PRODUCER
                )
                facets["inputStatistics"] = counted
            found += [InputDataset(one.namespace, one.name, inputFacets=facets) for one in names]
        return found

    def _outputs(self) -> list[OutputDataset]:
        from openlineage.client.event_v2 import OutputDataset
        from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

        found = []
        for sink in self._options.sinks:
            name = output_of(sink)
            facets: dict[str, Any] = {}
            if sink.name in self._rows:
                counted = statistics.OutputStatisticsOutputDatasetFacet(
                    rowCount=self._rows[sink.name], producer=PRODUCER
                )
                facets["outputStatistics"] = counted
            found.append(OutputDataset(name.namespace, name.name, outputFacets=facets))
        return found
