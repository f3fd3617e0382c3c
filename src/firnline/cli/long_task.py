"""Long tasks on a table: a progress line on stderr, and a clean stop between two steps."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from firnline.cli.output import safe
from firnline.cli.signals import stop_on_signals
from firnline.clock import monotonic

EVERY_SECONDS = 0.2  # on a terminal
QUIET_EVERY_SECONDS = 10.0


class LongTask:
    """Shows the progress of a long task, and whether it should stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._shown_at = 0.0
        self._live = sys.stderr.isatty()

    def progress(self, what: str, finished: int, total: int) -> None:
        """Show how much of the total is finished, not too often."""
        now = monotonic()
        if now - self._shown_at < (EVERY_SECONDS if self._live else QUIET_EVERY_SECONDS):
            return
        self._shown_at = now
        text = f"{what}: {finished:,} of {total:,}" if total else f"{what}: {finished:,}"
        sys.stderr.write(f"\r\x1b[2K{safe(text)}" if self._live else f"{safe(text)}\n")
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
    sys.stderr.write("stopping after this step\n")


@contextlib.contextmanager
def long_task() -> Iterator[LongTask]:
    """Show progress, and stop between two steps on a signal."""
    task = LongTask()
    with stop_on_signals(task.stop, _say_stopping, task.clear):
        try:
            yield task
        finally:
            task.clear()
