"""Who commits a table: a heartbeat file that spares work. What makes it safe is the committer's transaction.

A second committer watches the file; when its beat has stood still for long enough, by the watcher's own
monotonic clock, it takes over. A holder that wakes up later is refused by the log.
"""

from __future__ import annotations

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.names import COMMITTER
from firnline.process import has_exited, this_process
from firnline.storage import Storage
from firnline.types import Clock, Json

BEATS = 6  # so many fit into the time after which another takes over


class Place:
    """One committer's hold on one table."""

    def __init__(self, storage: Storage, run: str, clock: Clock, takeover_seconds: float) -> None:
        self._storage = storage
        self._run = run
        self._clock = clock
        self._takeover_seconds = takeover_seconds
        self._beat = 0
        self._beat_at = 0.0
        self._watched: tuple[str, int] | None = None
        self._watched_since = 0.0
        self.held = False

    def take(self) -> bool:
        """Hold the place, or see whether its holder is dead; True when it is ours."""
        holder = find_holder(self._storage)
        self.held = holder is None or holder["run"] == self._run or self._is_dead(holder)
        if self.held:
            self._write()
        return self.held

    def beat(self) -> None:
        """Show a sign of life in the middle of long work; nothing when it is too soon, or somebody took over."""
        if not self.held or self._clock.monotonic() - self._beat_at < self._takeover_seconds / BEATS:
            return
        holder = find_holder(self._storage)
        if holder is not None and holder["run"] == self._run:
            self._write()

    def _write(self) -> None:
        self._beat += 1
        self._beat_at = self._clock.monotonic()
        body = {"run": self._run, **this_process().address, "beat": self._beat}
        self._storage.put(COMMITTER, canonical(seal(body)))

    def _is_dead(self, holder: dict[str, Json]) -> bool:
        if has_exited(str(holder["host"]), int(holder["pid"])):
            return True
        sign = (str(holder["run"]), int(holder["beat"]))
        if sign != self._watched:
            self._watched, self._watched_since = sign, self._clock.monotonic()
            return False
        return self._clock.monotonic() - self._watched_since >= self._takeover_seconds

    def release(self) -> None:
        """Let go on a clean stop, so that the next one need not wait."""
        holder = find_holder(self._storage) if self.held else None
        if holder is not None and holder["run"] == self._run:
            self._storage.delete(COMMITTER)
        self.held = False


def find_holder(storage: Storage) -> dict[str, Json] | None:
    """Who holds the place; None when nobody does, or when the file is damaged and so proves nothing."""
    try:
        return unseal(parse(storage.get(COMMITTER), COMMITTER), COMMITTER)
    except (FileNotFoundError, DamagedError):
        return None
