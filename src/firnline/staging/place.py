"""Who commits a table: a heartbeat file that spares work. What makes it safe is the committer's transaction.

A second committer watches the file; when its beat has stood still for long enough, by the watcher's own
monotonic clock, it takes over. A holder that wakes up later is refused by the log.
"""

from __future__ import annotations

import os
import socket

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.storage import Storage
from firnline.types import Clock, Json

KEY = "_staging/committer.json"


class Place:
    """One committer's hold on one table."""

    def __init__(self, storage: Storage, run: str, clock: Clock, takeover_seconds: float) -> None:
        self._storage = storage
        self._run = run
        self._clock = clock
        self._takeover_seconds = takeover_seconds
        self._beat = 0
        self._watched: tuple[str, int] | None = None
        self._watched_since = 0.0
        self.held = False

    def take(self) -> bool:
        """Hold the place, or see whether its holder is dead; True when it is ours."""
        holder = find_holder(self._storage)
        if holder is None or holder["run"] == self._run or self._is_dead(holder):
            self._beat += 1
            body = {"run": self._run, "host": socket.gethostname(), "pid": os.getpid(), "beat": self._beat}
            self._storage.put(KEY, canonical(seal(body)))
            self.held = True
        else:
            self.held = False
        return self.held

    def _is_dead(self, holder: dict[str, Json]) -> bool:
        sign = (str(holder["run"]), int(holder["beat"]))
        if holder["host"] == socket.gethostname() and not _is_alive(int(holder["pid"])):
            return True
        if sign != self._watched:
            self._watched, self._watched_since = sign, self._clock.monotonic()
            return False
        return self._clock.monotonic() - self._watched_since >= self._takeover_seconds

    def release(self) -> None:
        """Let go on a clean stop, so that the next one need not wait."""
        holder = find_holder(self._storage) if self.held else None
        if holder is not None and holder["run"] == self._run:
            self._storage.delete(KEY)
        self.held = False


def find_holder(storage: Storage) -> dict[str, Json] | None:
    """Who holds the place; None when nobody does, or when the file is damaged and so proves nothing."""
    try:
        return unseal(parse(storage.get(KEY), KEY), KEY)
    except (FileNotFoundError, DamagedError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
