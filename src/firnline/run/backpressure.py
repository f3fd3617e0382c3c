"""Credits for planning: withheld while a run is paused, and while a staged sink holds more than it should."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from firnline.errors import SinkError
from firnline.sinks.base import Sink

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
