"""Lanes: one thread each. A lane performs its calls in order, and a slow lane blocks no other."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Callable

from firnline.clock import monotonic

logger = logging.getLogger(__name__)

END_SECONDS = 10.0  # how long a process at exit waits for lanes that were closed without waiting

ASIDE = ("backlog", "log", "upkeep", "flush")  # nothing waits for these lanes, not even a clean stop

_left: list[threading.Thread] = []  # closed, and not yet ended


@atexit.register
def _await_left() -> None:
    """Wait for lanes before the interpreter exits: a daemon thread returning from native code would abort the process.

    A lane that hangs is abandoned.
    """
    until = monotonic() + END_SECONDS
    for thread in _left:
        thread.join(max(0.0, until - monotonic()))


class Lane:
    """One thread that performs calls in order. It never keeps the process alive."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"firnline {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Perform a call after all earlier ones."""
        self._queue.put(call)

    def close(self, *, wait: bool) -> None:
        """End after the current call. With `wait`, perform all submitted calls first and return afterwards."""
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

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            try:
                call()
            except BaseException:  # callers handle their own failures; a lane goes on
                logger.exception("work on a lane failed")


class Lanes:
    """Lanes by name. Only the main thread starts them, on first use."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}

    def submit(self, name: str, call: Callable[[], None]) -> None:
        """Perform a call on a lane."""
        if name not in self._lanes:
            self._lanes[name] = Lane(name)
        self._lanes[name].submit(call)

    def close(self, *, wait: bool) -> None:
        """End all lanes. With `wait`, perform all submitted calls first, except on lanes that nothing waits for."""
        for name, lane in self._lanes.items():
            lane.close(wait=wait and name not in ASIDE)
