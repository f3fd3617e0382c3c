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
    """A flag that a signal handler sets and one thread waits for.

    An Event would not do: a handler that interrupts the waiting thread could wait for a lock which that thread holds.
    """

    def __init__(self) -> None:
        self._set = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        self._set = True
        self._wake.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait for the given time, or until the flag is set; returns whether it is set."""
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
    stop: Callable[[], None], report: Callable[[], None], at_once: Callable[[], None]
) -> Iterator[StopSignals]:
    """Call `stop` and `report` on the first signal; on the second call `at_once` and end the process.

    An end at any moment is safe: nothing is relied on before it is durable. The JVM exits when its parent has exited.
    """
    state = StopSignals()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if state.asked:
            at_once()
            os._exit(EXIT_AT_ONCE)
        state.asked = True
        stop()
        report()

    before: dict[signal.Signals, Any] = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that this process ends its child processes, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
