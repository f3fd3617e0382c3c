"""Commands that take long: SIGINT and SIGTERM stop them cleanly, and they show their progress on stderr."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from firnline.cli import logs
from firnline.cli.output import say, say_from_handler, size_text
from firnline.cli.text import safe
from firnline.clock import monotonic
from firnline.process import StopFlag

EXIT_AT_ONCE = 130
EXIT_TERMINATED = 128 + signal.SIGTERM


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


EVERY_SECONDS = 0.2  # on a terminal
QUIET_EVERY_SECONDS = 10.0
COPY_EVERY_SECONDS = 2.0


class LongTask:
    """Shows the progress of a long task, and whether it should stop."""

    def __init__(self) -> None:
        self._stop = StopFlag()
        self._shown_at = 0.0
        self._live = sys.stderr.isatty() and not logs.is_json()

    def progress(self, what: str, finished: int, total: int) -> None:
        """Show how much of the total is finished, not too often."""
        now = monotonic()
        if now - self._shown_at < (EVERY_SECONDS if self._live else QUIET_EVERY_SECONDS):
            return
        self._shown_at = now
        text = f"{what}: {finished:,} of {total:,}" if total else f"{what}: {finished:,}"
        if not self._live:
            say(text)
            return
        sys.stderr.write(f"\r\x1b[2K{safe(text)}")
        sys.stderr.flush()

    def stopping(self) -> bool:
        """Whether a signal asked for a stop."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask the task to stop after its current step."""
        self._stop.set()

    def clear(self) -> None:
        """Remove the progress line from a terminal."""
        if self._live and self._shown_at:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _say_stopping() -> None:
    say_from_handler("stopping after this step")


@contextlib.contextmanager
def long_task() -> Iterator[LongTask]:
    """Show progress, and stop between two steps on a signal."""
    task = LongTask()
    with stop_on_signals(task.stop, _say_stopping, task.clear):
        try:
            yield task
        finally:
            task.clear()


class CopyProgress:
    """Reports every few seconds how much is copied; a copy that was reported once is reported at its end."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._say = say
        self._clock = clock
        self._reported_at = clock()
        self._reported: set[str] = set()

    def __call__(self, what: str, copied: int, total: int) -> None:
        is_due = self._clock() - self._reported_at >= COPY_EVERY_SECONDS
        if is_due or (copied >= total and what in self._reported):
            self._reported_at = self._clock()
            self._reported.add(what)
            self._say(f"{what}: {size_text(copied)} of {size_text(total)}")
