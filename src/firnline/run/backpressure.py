"""Back-pressure: when planning waits (paused, a full staged sink), and how much input waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firnline.errors import SinkError
from firnline.sinks.base import Sink
from firnline.sources.base import Backlog

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Credits:
    """Asked before each plan, on the source lane; paused, resumed and stopped from any thread."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self.stopping = threading.Event()
        self.going = threading.Event()  # not set while the run is paused
        self.going.set()
        self._told = False  # that there is no room
        self.waiting = False  # a plan is under way that has not looked at its source yet: paused, or no room
        self.tell_waiting: Callable[[tuple[int, int] | None], None] = lambda _: None  # set by the runner
        self.tell_still: Callable[[], None] = lambda: None  # set by the runner

    @property
    def paused(self) -> bool:
        return not self.going.is_set()

    def wait(self) -> bool:
        """Wait for a credit; False when the run is told to stop meanwhile."""
        try:
            return self._going_on() and self._room()
        finally:
            self.waiting = False

    def _going_on(self) -> bool:
        """Wait while paused; False when a stop ended that."""
        while not self.going.is_set():
            if self.stopping.is_set():
                return False
            if not self.waiting:
                self.waiting = True
                self.tell_still()
            self.going.wait(POLL_SECONDS)  # not for ever: a stop may come between a pause and its wait
        return not (self.waiting and self.stopping.is_set())

    def _room(self) -> bool:
        """Back-pressure."""
        while True:
            full = next((found for sink in self._sinks if (found := _fullness(sink)) is not None), None)
            if full is None:
                if self._told:
                    self._told = False
                    self.tell_waiting(None)
                return True
            if not self._told:
                logger.warning("waiting for the committer", extra={"pending_units": full[0], "pending_bytes": full[1]})
                self.tell_waiting(full)
                self._told = True
            self.waiting = True
            if self.stopping.wait(POLL_SECONDS) or not self._going_on():
                return False


def _fullness(sink: Sink) -> tuple[int, int] | None:
    """What waits downstream of a sink; an optional one that cannot be asked holds up nobody."""
    try:
        return sink.is_full()
    except (SinkError, OSError):
        if sink.required:
            raise
        return None


RECOUNT_SECONDS = 30.0
COST_FACTOR = 20  # a listing that takes long is repeated less often


@dataclass(slots=True)
class BacklogMeter:
    """What lies after the newest committed epoch. Used from one thread; times are passed in."""

    _counted: Backlog | None = None
    _counted_on: int = 0  # the epoch after which `_counted` lay
    _next_at: float = float("-inf")
    _counting: bool = False
    _overtaken: bool = False  # the count under way is older than what is known
    _taken: list[tuple[int, int, int]] = field(default_factory=list)  # epoch, files, bytes

    def is_due(self, now: float) -> bool:
        """Whether a new count should begin; never two at once."""
        return not self._counting and now >= self._next_at

    def begin(self) -> None:
        self._counting, self._overtaken = True, False

    def end(self, epoch: int, counted: Backlog | None, *, began: float, now: float) -> None:
        """A count of what lies after `epoch` has ended; None when it failed."""
        self._counting = False
        self._next_at = now + max(RECOUNT_SECONDS, COST_FACTOR * (now - began))
        if counted is not None and not self._overtaken:
            self._counted, self._counted_on = counted, epoch
            self._taken = [t for t in self._taken if t[0] > epoch]

    def committed(self, epoch: int, files: int, size_bytes: int) -> None:
        self._taken.append((epoch, files, size_bytes))

    def emptied(self) -> None:
        """A plan found nothing to read."""
        self._counted, self._taken, self._overtaken = Backlog(0, 0), [], True

    @property
    def current(self) -> Backlog | None:
        """The newest estimate; None before the first count."""
        if self._counted is None:
            return None
        taken = [t for t in self._taken if t[0] > self._counted_on]
        files = self._counted.files_outstanding - sum(t[1] for t in taken)
        size = self._counted.bytes_outstanding - sum(t[2] for t in taken)
        return Backlog(max(0, files), max(0, size))
