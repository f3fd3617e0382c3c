"""The system clock: the time in UTC, seconds that never go back, random pauses, and how long ago a moment was."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

RESTART_SECONDS = 1.0  # a step back of at least this much is a clock that began anew


class SteadySeconds:
    """Seconds that never go back, for all threads of this process.

    On some virtual machines the system's monotonic clock differs by milliseconds between two cores, so a thread that
    moves to another core sees it step back. This clock then stands still until the system's has caught up. After a
    step back of a second or more it goes on from where it was, because waiting for the system could take for ever.

    Args:
        read: The clock to read.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:  # noqa: TID251  # the one place to read it
        self._read = read
        self._ahead = 0.0
        self._latest = float("-inf")
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._after_fork)

    def __call__(self) -> float:
        with self._lock:
            now = self._read() + self._ahead
            if now < self._latest:
                if self._latest - now >= RESTART_SECONDS:
                    self._ahead += self._latest - now
                now = self._latest
            self._latest = now
            return now

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it


monotonic = SteadySeconds()
_CHANCE = random.SystemRandom()


def jitter(shortest: float, longest: float) -> float:
    """Return a random number between two, for pauses that processes must not share.

    It leaves the generator of the module `random` alone: its state and its seed belong to the user's program, and two
    programs with one seed would wait for the same times.
    """
    return _CHANCE.uniform(shortest, longest)


class SystemClock:
    """Real time; implements `types.Clock`."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def seconds_since(moment: str, now: datetime) -> float | None:
    """Return the seconds since a recorded time; None if the text is not a time with a zone."""
    try:
        return round((now - datetime.fromisoformat(moment)).total_seconds(), 1)
    except (ValueError, TypeError, OverflowError):
        return None


def ago_text(moment: str, now: datetime | None = None) -> str:
    """How long ago a moment was, in the largest unit: `12 s ago`, `12 min ago`, `3 h ago`, `5 days ago`."""
    seconds = ((now or datetime.now(UTC)) - datetime.fromisoformat(moment)).total_seconds()
    if seconds < 1:
        return "just now"
    for unit, of in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < of:
            return f"{int(seconds)} {unit} ago"
        seconds /= 24 if unit == "h" else of
    return f"{int(seconds)} days ago"
