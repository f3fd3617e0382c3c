"""Long work on a table: a progress line on stderr, and a stop that leaves nothing half done."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from firnline.cli.output import safe
from firnline.cli.signals import stop_on_signals
from firnline.clock import monotonic

EVERY_SECONDS = 0.2  # on a terminal; elsewhere a line every ten seconds
QUIET_EVERY_SECONDS = 10.0


class Working:
    """Given to long work: what is done of how much, and whether to stop."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._told_at = 0.0
        self._live = sys.stderr.isatty()

    def progress(self, what: str, done: int, total: int) -> None:
        now = monotonic()
        if now - self._told_at < (EVERY_SECONDS if self._live else QUIET_EVERY_SECONDS):
            return
        self._told_at = now
        text = f"{what}: {done:,} of {total:,}" if total else f"{what}: {done:,}"
        sys.stderr.write(f"\r\x1b[2K{safe(text)}" if self._live else f"{safe(text)}\n")
        sys.stderr.flush()

    def stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        self._stop.set()

    def clear(self) -> None:
        if self._live and self._told_at:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _say_stopping() -> None:
    sys.stderr.write("stopping after this step\n")


@contextlib.contextmanager
def working() -> Iterator[Working]:
    """Show progress, and stop between two steps on a signal."""
    work = Working()
    with stop_on_signals(work.stop, _say_stopping, work.clear):
        try:
            yield work
        finally:
            work.clear()
