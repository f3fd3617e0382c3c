"""SIGINT and SIGTERM: the first stops a run cleanly, the second at once."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

EXIT_AT_ONCE = 130
EXIT_TERMINATED = 128 + signal.SIGTERM


class StopFlag:
    """Whether to stop, to be waited for by one thread. An Event would not do: set by a handler that interrupts the
    very thread that waits, it may wait for a lock which that thread holds.
    """

    def __init__(self) -> None:
        self._set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._set = True
        self._wake.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until it is set; says whether it is."""
        if not self._set:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=seconds)
        return self._set


class StopSignals:
    """Whether a stop was asked for."""

    def __init__(self) -> None:
        self.asked = False


@contextlib.contextmanager
def stop_on_signals(
    stop: Callable[[], None], told: Callable[[], None], at_once: Callable[[], None]
) -> Iterator[StopSignals]:
    """Call `stop` and `told` on the first signal; on the second call `at_once` and end the process.

    Everything that is durable is so before it is relied on, so an end at any moment is safe; the JVM ends by
    itself when its parent is gone.
    """
    state = StopSignals()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if state.asked:
            at_once()
            os._exit(EXIT_AT_ONCE)
        state.asked = True
        stop()
        told()

    before: dict[signal.Signals, Any] = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that what this process has started is ended too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
