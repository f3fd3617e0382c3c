"""What a run looks after besides its epochs: late files, staged files that no sink needs any more."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from firnline.errors import LedgerHoleError
from firnline.run.ledger_files import LedgerFiles
from firnline.run.observer import Comparison
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.outbox import Outbox
from firnline.run.progress import EpochInFlight, Progress
from firnline.sources.base import Reconciled, Source
from firnline.sources.group import EpochPlan
from firnline.sources.known import KnownFiles

logger = logging.getLogger(__name__)


CHEAP_SHARE = 0.2  # of the poll interval: a full listing that takes no longer is made at every poll
COST_FACTOR = 20  # a slower one takes at most one part in so many of the time
MAX_INTERVAL_SECONDS = 3600.0
HOLE_SECONDS = 60.0  # a ledger with a hole is read again after this time
RECENT_EPOCHS = 20
MIN_LATE = 5


def reconcile_interval(took_seconds: float, poll_seconds: float) -> float:
    """Return the seconds between two full listings, from how long the last one took."""
    if took_seconds <= CHEAP_SHARE * poll_seconds:
        return poll_seconds
    return max(poll_seconds, min(COST_FACTOR * took_seconds, MAX_INTERVAL_SECONDS))


def names_grow(recent: Iterable[tuple[int, int]]) -> bool:
    """Return whether the names of a source's files grow with time, from the files and late files of recent epochs."""
    counts = list(recent)
    files, late = sum(count[0] for count in counts), sum(count[1] for count in counts)
    return late < MIN_LATE or 10 * late < files


@dataclass(frozen=True, slots=True)
class _Reported:
    """What the last comparison of one source found."""

    late: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    grown: set[str] = field(default_factory=set)
    incomplete: int = 0


@dataclass(slots=True)
class _Looked:
    """The last full listing of one source."""

    at: float
    took: float
    listed: int = 0
    more: bool = False  # late files are left that it could not keep
    hole: bool = False


class LateFiles:
    """The full listings of one run. The source lane calls `due` and `look`, the main thread the other methods.

    With `once` every source is listed once, otherwise every `reconcile_interval_secs`.
    """

    def __init__(self, pipeline: OpenPipeline, progress: Progress, *, once: bool) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._once = once
        self._ledger_files = LedgerFiles(pipeline)
        self._looked: dict[str, _Looked] = {}  # by source
        self._requested: set[str] = set()
        self._reported: dict[str, _Reported] = {}  # by source
        self._recent: dict[str, deque[tuple[int, int]]] = {}  # by source: files and late files of each epoch
        self._unordered: set[str] = set()
        self._dropped = 0  # epochs, so far
        self._lock = threading.Lock()
        self.hole: LedgerHoleError | None = None  # why late files cannot be found

    def request(self) -> None:
        """Make a full listing of every source with the next plan, due or not."""
        self._requested |= {s.name for s in self._pipeline.sources if s.reconcile_interval_secs is not None}

    def due(self, *, exhausted: bool = False) -> list[str]:
        """Return the sources whose full listing is due. `exhausted`: nothing else is left to read."""
        now = self._pipeline.clock.monotonic()
        for name in self._pipeline.sources.take_forgotten():
            self._looked.pop(name, None)
        return [
            source.name
            for source in self._pipeline.sources
            if source.reconcile_interval_secs is not None
            and not self._pipeline.sources.is_asked(source.name)
            and (source.name in self._requested or self._is_due(source, now, exhausted=exhausted))
        ]

    def _is_due(self, source: Source, now: float, *, exhausted: bool) -> bool:
        last = self._looked.get(source.name)
        if last is None:
            return True
        if self._once:
            return last.more and exhausted
        return now - last.at >= self._interval(source, last)

    def _interval(self, source: Source, last: _Looked) -> float:
        interval = source.reconcile_interval_secs
        if interval == "auto" or interval is None:
            if source.late_files == "ignore" and source.on_growth == "report":  # nothing to read, only to report
                return max(MAX_INTERVAL_SECONDS, source.poll_interval_secs)
            interval = reconcile_interval(last.took, source.poll_interval_secs)
            return max(interval, HOLE_SECONDS) if last.hole else interval
        return interval

    def look(self, base: str, due: list[str]) -> Comparison | None:
        """Compare full listings with the ledger.

        Returns None if the ledger has a hole: then late files cannot be identified, and `hole` says why.
        """
        requested = self._requested & set(due)
        self._requested -= requested  # before the listing: it does not answer a later request
        try:
            found, is_valid = self._compare(base, due)
        except BaseException:
            self._requested |= requested
            raise
        if not is_valid:
            self._requested |= requested
        return found

    def _compare(self, base: str, due: list[str]) -> tuple[Comparison | None, bool]:
        """Return the comparison, and whether it counts: not if an epoch that was in flight is lost meanwhile."""
        dropped = self._dropped
        began = self._pipeline.clock.monotonic()
        # Read the epochs in flight first: an epoch decided meanwhile is then in the ledger, so neither read misses it.
        in_flight = list(self._progress.epochs.values())
        positions = self._progress.bases[base].positions
        try:
            below = self._ledger_files.load(self._progress.head.entry, self._progress.recent)
        except LedgerHoleError as error:
            now = self._pipeline.clock.monotonic()
            self._looked |= dict.fromkeys(due, _Looked(now, now - began, hole=True))
            if self.hole is None or self.hole.message != error.message:
                logger.error("reconcile stopped: the ledger has a hole", extra={"reason": error.message})
            if any(self._pipeline.sources[name].late_files != "ignore" for name in due):
                self.hole = error
            return None, True
        found, looked = Comparison(), dict[str, _Looked]()
        for name in due:
            with contextlib.closing(self._known(name, in_flight, below[name])) as known:
                began = self._pipeline.clock.monotonic()
                one = self._pipeline.sources[name].reconcile(positions[name], known)
                now = self._pipeline.clock.monotonic()
            looked[name] = _Looked(now, now - began, one.listed, more=one.more_late > 0)
            found = self._add(found, name, one)
        self.hole = None
        with self._lock:
            is_valid = dropped == self._dropped  # otherwise files of a lost epoch counted as known: list again
            if is_valid:
                self._looked |= looked
        return found, is_valid

    def _known(self, name: str, in_flight: Sequence[EpochInFlight], below: KnownFiles) -> KnownFiles:
        """Return the files of the ledger, of epochs in flight and of another tool."""
        known = KnownFiles(below=below)
        for epoch in in_flight:
            for source, split in epoch.plan.splits:
                if source == name:
                    for item in split.inputs:
                        known.add(str(item["path"]), "")
        baseline = self._progress.baseline
        for record in baseline.inputs.get(name, []) if baseline else ():
            known.add(str(record["path"]), str(record["etag"]))
        return known

    def _add(self, total: Comparison, name: str, found: Reconciled) -> Comparison:
        """Add what one source's comparison found. What its last one has reported counts in the totals only."""
        before = self._reported.get(name, _Reported())
        now = _Reported({stat.name for stat in found.late}, set(found.changed), set(found.grown), found.incomplete)
        self._reported[name] = now
        return Comparison(
            late=total.late + len(now.late - before.late) + found.more_late,
            changed=[*total.changed, *(path for path in found.changed if path not in before.changed)],
            grown=[*total.grown, *(path for path in found.grown if path not in before.grown)],
            listed=total.listed + found.listed,
            all_changed=sum(len(one.changed) for one in self._reported.values()),
            all_grown=sum(len(one.grown) for one in self._reported.values()),
            all_incomplete=sum(one.incomplete for one in self._reported.values()),
        )

    def dropped(self, plan: EpochPlan) -> None:
        """Forget the late files of a dropped epoch: late is relative to a base, so they must be found again."""
        with self._lock:
            self._dropped += 1
            for name in self._pipeline.sources.give_back(plan):
                self._looked.pop(name, None)

    def learn(self, epoch: int, plan: EpochPlan) -> list[str]:
        """Learn from a decided epoch. Returns the sources whose names are now known not to grow with time."""
        found = []
        for name, part in plan.plans.items():
            recent = self._recent.setdefault(name, deque(maxlen=RECENT_EPOCHS))
            if part.files and epoch > 1:  # in the first epoch no file is late
                recent.append((part.files, int(part.notes.get("late", 0))))
            if name not in self._unordered and not names_grow(recent):
                self._unordered.add(name)
                found.append(name)
                self._log_unordered(name, recent)
        return found

    def _log_unordered(self, name: str, recent: Iterable[tuple[int, int]]) -> None:
        counts = list(recent)
        last = self._looked.get(name)
        logger.warning(
            "file names do not grow with time: every poll compares a full listing with the ledger; nothing is lost, "
            "and names that begin with the time make it cheaper",
            extra={
                "source": name,
                "files": sum(count[0] for count in counts),
                "late": sum(count[1] for count in counts),
                "listed": last.listed if last else None,
                "seconds": round(last.took, 3) if last else None,
            },
        )

    @property
    def unordered(self) -> list[str]:
        """The sources whose names do not grow with time."""
        return sorted(self._unordered)

    def close(self) -> None:
        """Delete the temporary files."""
        self._ledger_files.close()


class Upkeep:
    """What one run looks after besides its epochs."""

    def __init__(self, pipeline: OpenPipeline, progress: Progress, outbox: Outbox, *, once: bool) -> None:
        self.late_files = LateFiles(pipeline, progress, once=once)
        self.outbox = outbox
