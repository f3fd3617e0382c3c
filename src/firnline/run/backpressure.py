"""Back-pressure: delays planning while the run is paused or a staged sink is full, and estimates the backlog."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firnline.errors import FirnlineError
from firnline.process import StopFlag
from firnline.sinks.base import Sink
from firnline.sources.base import Backlog

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5


class Backpressure:
    """Delays planning while the run is paused and while a sink is full.

    The source lane calls `wait` before each plan. Any thread may call `pause`, `resume` and `stop`. `on_full` gets the
    pending units and bytes of a full sink, and None once there is room again. `on_paused` is called when a plan starts
    to wait because the run is paused.
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        on_full: Callable[[tuple[int, int] | None], None] = lambda _: None,
        on_paused: Callable[[], None] = lambda: None,
    ) -> None:
        self._sinks = sinks
        self._on_full = on_full
        self._on_paused = on_paused
        self._stopping = StopFlag()  # a signal handler sets it
        self._going = threading.Event()  # cleared while the run is paused
        self._going.set()
        self._is_full = False  # the last value passed to `on_full`
        self.waiting = False  # a plan has started and has not asked its sources yet

    @property
    def paused(self) -> bool:
        """Whether the run is paused."""
        return not self._going.is_set()

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._stopping.is_set()

    def pause(self) -> bool:
        """Pause planning. Returns False if the run is already paused or is stopping."""
        if self.stopping or self.paused:
            return False
        self._going.clear()
        return True

    def resume(self) -> bool:
        """Resume planning. Returns False if the run is not paused."""
        if not self.paused:
            return False
        self._going.set()
        return True

    def stop(self) -> None:
        """End every wait and all planning. May be called from a signal handler."""
        self._stopping.set()

    def wait(self, is_asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the next epoch may be planned. Returns False if the run stops meanwhile.

        `is_asked` ends a pause for one epoch without input: a topology's snapshot is to be recorded.
        """
        try:
            return self._is_going(is_asked) and self._has_room()
        finally:
            self.waiting = False

    def _is_going(self, is_asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait while the run is paused. Returns False if a stop ended the wait."""
        while not self._going.is_set():
            if self._stopping.is_set():
                return False
            if is_asked():
                return True
            if not self.waiting:
                self.waiting = True
                self._on_paused()
            self._going.wait(POLL_SECONDS)  # with a timeout: a stop may arrive between a pause and its wait
        return not (self.waiting and self._stopping.is_set())

    def _has_room(self) -> bool:
        """Wait while a sink is full. Returns False if a stop ended the wait."""
        while True:
            full = next((pending for sink in self._sinks if (pending := _fullness(sink)) is not None), None)
            if full is None:
                if self._is_full:
                    self._is_full = False
                    self._on_full(None)
                return True
            if not self._is_full:
                logger.warning("waiting for the committer", extra={"pending_units": full[0], "pending_bytes": full[1]})
                self._on_full(full)
                self._is_full = True
            self.waiting = True
            if self._stopping.wait(POLL_SECONDS) or not self._is_going():
                return False


def _fullness(sink: Sink) -> tuple[int, int] | None:
    """Return the units and bytes pending behind a full sink. An unreadable optional sink counts as not full."""
    try:
        return sink.is_full()
    except FirnlineError as error:
        if sink.required:
            raise
        logger.debug("sink not asked whether it is full", extra={"sink": sink.name, "reason": error.message})
        return None


RECOUNT_SECONDS = 30.0
COST_FACTOR = 20  # a slow listing is repeated less often


@dataclass(slots=True)
class BacklogMeter:
    """Estimates the input after the newest committed epoch. Used from one thread; the caller passes the time."""

    _counted: Backlog | None = None
    _counted_on: int = 0  # the epoch that `_counted` starts after
    _next_at: float = float("-inf")
    _counting: bool = False
    _overtaken: bool = False  # the running count is older than the current estimate
    _taken: list[tuple[int, int, int]] = field(default_factory=list)  # epoch, files, bytes

    def is_due(self, now: float) -> bool:
        """Return whether a new count is due. Two counts never overlap."""
        return not self._counting and now >= self._next_at

    def begin(self) -> None:
        """Note that a count has started."""
        self._counting, self._overtaken = True, False

    def end(self, epoch: int, counted: Backlog | None, *, began: float, now: float) -> None:
        """Take the result of a count of the input after `epoch`; None if the count failed."""
        self._counting = False
        self._next_at = now + max(RECOUNT_SECONDS, COST_FACTOR * (now - began))
        if counted is not None and not self._overtaken:
            self._counted, self._counted_on = counted, epoch
            self._taken = [t for t in self._taken if t[0] > epoch]

    def committed(self, epoch: int, files: int, size_bytes: int) -> None:
        """Subtract the input of a committed epoch."""
        self._taken.append((epoch, files, size_bytes))

    def emptied(self) -> None:
        """Set the backlog to zero: a plan returned nothing to read."""
        self._counted, self._taken, self._overtaken = Backlog(0, 0), [], True

    @property
    def current(self) -> Backlog | None:
        """Return the newest estimate; None before the first count."""
        if self._counted is None:
            return None
        taken = [t for t in self._taken if t[0] > self._counted_on]
        files = self._counted.files_outstanding - sum(t[1] for t in taken)
        size = self._counted.bytes_outstanding - sum(t[2] for t in taken)
        return Backlog(max(0, files), max(0, size))
