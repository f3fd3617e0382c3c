"""The lock of a table's committer: a heartbeat file that saves work. The committer's transaction is what makes it safe.

A second committer watches the file. When the heartbeat has not changed for long enough, by the watcher's own monotonic
clock, the second one takes over. The log refuses a former holder that wakes up later.
"""

from __future__ import annotations

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.names import COMMITTER
from firnline.process import has_exited, this_process
from firnline.storage import Storage
from firnline.types import Clock, Json

BEATS = 6  # heartbeats within the time after which another committer takes over


class CommitterLock:
    """One committer's side of the lock of one table."""

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
        """Take or keep the lock, also from a dead holder. Returns whether this committer has it."""
        holder = find_holder(self._storage)
        self.held = holder is None or holder["run"] == self._run or self._is_dead(holder)
        if self.held:
            self._write()
        return self.held

    def beat(self) -> None:
        """Write a heartbeat during long work, unless it is too soon or another committer took over."""
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
        """Release the lock on a clean stop, so that the next committer need not wait."""
        holder = find_holder(self._storage) if self.held else None
        if holder is not None and holder["run"] == self._run:
            self._storage.delete(COMMITTER)
        self.held = False


def find_holder(storage: Storage) -> dict[str, Json] | None:
    """Return the holder of the lock; None if there is none, or if the file is damaged."""
    try:
        return unseal(parse(storage.get(COMMITTER), COMMITTER), COMMITTER)
    except (FileNotFoundError, DamagedError):
        return None
