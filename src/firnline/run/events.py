"""The events of a run as plain values, for readers on other threads: what happened, when, and its facts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from firnline.errors import FirnlineError
from firnline.run.observer import EpochFacts, Observer, took_ms
from firnline.sinks.base import Head
from firnline.sources.group import EpochPlan
from firnline.types import Clock, Json

KEPT_EVENTS = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a run.

    Attributes:
        number: Counts from 1; a gap means that the reader was too slow, and events between were dropped.
        at: RFC 3339, UTC.
        kind: started, claimed, planned, committed, delivered, idle, paused, resumed, trouble, worker_lost or ended.
        facts: What belongs to the kind, for example `epoch` and `rows` of committed.
    """

    number: int
    at: str
    kind: str
    facts: dict[str, Json] = field(default_factory=dict)


class EventLog(Observer):
    """Observes a run and keeps its newest events. A reader never holds up the run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._count = 0
        self._changed = threading.Condition()
        self._closed = False

    def read(self, timeout: float | None = None) -> Iterator[Event]:
        """Yield the events that are kept, then each new one, until the run has ended.

        Args:
            timeout: End if nothing happens for so many seconds; None waits for the end of the run.
        """
        seen = 0
        while True:
            fresh = self._wait_beyond(seen, timeout)
            if not fresh:
                return
            yield from fresh
            seen = fresh[-1].number

    def _wait_beyond(self, seen: int, timeout: float | None) -> list[Event]:
        """Wait for events after a number; none if nothing happens in time, or if the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen or self._closed, timeout)
            return [event for event in self._events if event.number > seen]

    def close(self) -> None:
        """End every reader once it has read what is kept."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add(self, kind: str, **facts: Json) -> None:
        with self._changed:
            self._count += 1
            self._events.append(Event(self._count, self._clock.now().isoformat(), kind, facts))
            self._changed.notify_all()

    # -- events of the run ----------------------------------------------------------------------------

    def started(self, run: str, held: Head) -> None:
        self._add("started", run=run, epoch=held.epoch)

    def claimed(self, generation: int) -> None:
        self._add("claimed", generation=generation)

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        self._add("planned", epoch=epoch)

    def committed(self, facts: EpochFacts) -> None:
        self._add(
            "committed",
            epoch=facts.epoch,
            id=facts.attempt,
            files=facts.files,
            records=facts.records,
            rows=facts.rows,
            quarantined=sum(facts.bad.values()),
            duration_ms=took_ms(facts.durations_ms),
            durations_ms=dict(facts.durations_ms),
            lag_seconds=facts.lag_seconds,
        )

    def delivered(self, sink: str, epoch: int) -> None:
        self._add("delivered", sink=sink, epoch=epoch)

    def idle(self) -> None:
        self._add("idle")

    def paused(self, paused: bool) -> None:
        self._add("paused" if paused else "resumed")

    def worker_lost(self, facts: dict[str, Json]) -> None:
        self._add("worker_lost", **facts)

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        self._add("trouble", code=error.code, message=error.message, hint=error.hint, failures=failures, sink=optional)

    def stopped(self, exit_code: int) -> None:
        self._add("ended", exit_code=exit_code)
