"""Lanes: one thread each, so that what is done on one keeps its order and a slow one holds up no other."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable

from firnline.clock import monotonic

logger = logging.getLogger(__name__)

END_SECONDS = 10.0  # how long an exiting process waits for lanes that nobody waited for

ASIDE = ("backlog", "upkeep", "flush")  # nothing waits for what is done here, not even a clean stop


_left: list[threading.Thread] = []  # told to end, and not waited for


@atexit.register
def _await_left() -> None:
    """Let lanes end before the interpreter does: a daemon thread that returns from native code then aborts the process.

    One that hangs is given up.
    """
    until = monotonic() + END_SECONDS
    for thread in _left:
        thread.join(max(0.0, until - monotonic()))


class Lane:
    """One thread that does what it is given, in order. It never keeps the process from ending."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"firnline {name}", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def close(self, *, wait: bool) -> None:
        """End after what is being done; with `wait`, after everything that was given, and return then."""
        if not wait:
            while True:
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    break
        self._queue.put(None)
        if wait:
            self._thread.join()
        else:
            _left.append(self._thread)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:  # whoever gives work tells its failure; a lane goes on
                logger.exception("work on a lane failed")


class Lanes:
    """Lanes by name; made by the main thread alone, when they are first used."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}

    def submit(self, name: str, work: Callable[[], None]) -> None:
        if name not in self._lanes:
            self._lanes[name] = Lane(name)
        self._lanes[name].submit(work)

    def close(self, *, wait: bool) -> None:
        for name, lane in self._lanes.items():
            lane.close(wait=wait and name not in ASIDE)
