"""Runs committers: one process serves one table or many, polls, stands by when fenced, stops cleanly.

The lock of a table is a heartbeat file. It only saves work: the committer's transaction makes commits safe. A second
committer watches the file. When the heartbeat has not changed for long enough, by the watcher's own monotonic clock,
the second one takes over. The log refuses a former holder that wakes up later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.committer.committer import Committer, CycleReport
from firnline.errors import DamagedError, FencedError, FirnlineError, SinkError
from firnline.names import COMMITTER
from firnline.process import StopFlag, has_exited, this_process
from firnline.sinks.delta.table import Table
from firnline.storage import Storage, normalise, open_storage
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)

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
        self.is_held = False

    def take(self) -> bool:
        """Take or keep the lock, also from a dead holder. Returns whether this committer has it."""
        holder = find_holder(self._storage)
        self.is_held = holder is None or holder["run"] == self._run or self._is_dead(holder)
        if self.is_held:
            self._write()
        return self.is_held

    def beat(self) -> None:
        """Write a heartbeat during long work, unless it is too soon or another committer took over."""
        if not self.is_held or self._clock.monotonic() - self._beat_at < self._takeover_seconds / BEATS:
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
        holder = find_holder(self._storage) if self.is_held else None
        if holder is not None and holder["run"] == self._run:
            self._storage.delete(COMMITTER)
        self.is_held = False


def find_holder(storage: Storage) -> dict[str, Json] | None:
    """Return the holder of the lock; None if there is none, or if the file is damaged."""
    try:
        return unseal(parse(storage.get(COMMITTER), COMMITTER), COMMITTER)
    except (FileNotFoundError, DamagedError):
        return None


MIN_TAKEOVER_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class TableRef:
    """A table to commit for."""

    uri: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


class CommitterObserver:
    """Override the methods that you need."""

    def cycled(self, table: str, report: CycleReport) -> None:
        """A cycle ended."""

    def standing_by(self, table: str, holder: str) -> None:
        """Another committer is active."""

    def trouble(self, table: str, error: FirnlineError) -> None:
        """A cycle failed; it is retried at the next poll."""


@dataclass(slots=True)
class _Served:
    ref: TableRef
    committer: Committer
    lock: CommitterLock

    def beat(self, _: int) -> None:
        self.lock.beat()


class CommitterService:
    """Serves tables until stopped, or once."""

    def __init__(
        self,
        tables: list[TableRef],
        run: str,
        clock: Clock,
        observer: CommitterObserver | None = None,
        *,
        poll_interval_secs: float = 10.0,
        takeover_seconds: float | None = None,
        whole_file_checksums: bool = False,
    ) -> None:
        self._observer = observer or CommitterObserver()
        self._poll = poll_interval_secs
        self._stop = StopFlag()
        takeover = takeover_seconds or max(MIN_TAKEOVER_SECONDS, 3 * poll_interval_secs)
        self._served = []
        for ref in tables:
            storage = open_storage(ref.uri, ref.storage_options)
            table = Table(normalise(ref.uri), ref.storage_options)
            committer = Committer(table, storage, run, clock, whole_file_checksums=whole_file_checksums)
            self._served.append(_Served(ref, committer, CommitterLock(storage, run, clock, takeover)))

    def stop(self) -> None:
        """End after the current cycle. May be called from a signal handler."""
        self._stop.set()

    def run_once(self) -> list[CycleReport]:
        """Commit everything that is pending in every table now.

        Raises:
            FencedError: another committer is active on a table.
        """
        reports: list[CycleReport] = []
        failures: list[FirnlineError] = []
        try:
            for served in self._served:
                try:
                    if not served.lock.take():
                        raise FencedError(f"another committer is active on {served.ref.uri} ({_who(served)})")
                    report = served.committer.cycle(served.beat)
                except (FirnlineError, OSError) as error:  # raised after the other tables had their turn
                    failures.append(error if isinstance(error, FirnlineError) else _storage_failed(error))
                    continue
                self._observer.cycled(served.ref.uri, report)
                reports.append(report)
        finally:
            self._release()
        if failures:
            raise failures[0]
        return reports

    def run(self) -> None:
        """Poll until stopped. A failing table blocks no other."""
        try:
            while not self._stop.is_set():
                for served in self._served:
                    self._cycle(served)
                self._stop.wait(self._poll)
        finally:
            self._release()

    def _cycle(self, served: _Served) -> None:
        try:
            if not served.lock.take():
                self._observer.standing_by(served.ref.uri, _who(served))
                return
            self._observer.cycled(served.ref.uri, served.committer.cycle(served.beat))
        except FirnlineError as error:
            if isinstance(error, FencedError):
                served.lock.is_held = False
            self._observer.trouble(served.ref.uri, error)
        except OSError as error:
            self._observer.trouble(served.ref.uri, _storage_failed(error))

    def _release(self) -> None:
        for served in self._served:
            _quietly(served.lock.release)


def _who(served: _Served) -> str:
    holder = find_holder(open_storage(served.ref.uri, served.ref.storage_options)) or {}
    return f"host {holder.get('host', '?')}, process {holder.get('pid', '?')}"


def _storage_failed(error: OSError) -> SinkError:
    failed = SinkError(f"storage failed: {error}")
    failed.__cause__ = error
    return failed


def _quietly(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        logger.warning("committer's lock not released", extra={"reason": str(error)})
