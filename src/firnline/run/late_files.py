"""Finds late files: compares full listings of the sources with the ledger at intervals."""

from __future__ import annotations

import logging
import threading

from firnline.errors import LedgerHoleError
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import Progress
from firnline.sources.group import EpochPlan
from firnline.sources.known import KnownFiles

logger = logging.getLogger(__name__)


class LateFiles:
    """The full listings of one run. The source lane calls `look`, the main thread calls `dropped`.

    With `once` every source is listed once, otherwise every `reconcile_interval_secs`.
    """

    def __init__(self, pipeline: OpenPipeline, progress: Progress, *, once: bool) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._once = once
        self._looked_at: dict[str, float] = {}  # by source
        self._dropped = 0  # epochs, so far
        self._lock = threading.Lock()
        self.hole: LedgerHoleError | None = None  # why late files cannot be found

    def due(self) -> list[str]:
        """Return the sources whose full listing is due."""
        now = self._pipeline.clock.monotonic()
        for name in self._pipeline.sources.take_forgotten():
            self._looked_at.pop(name, None)
        return [
            source.name
            for source in self._pipeline.sources
            if source.reconcile_interval_secs is not None
            and not self._pipeline.sources.is_asked(source.name)
            and self._is_due(self._looked_at.get(source.name), source.reconcile_interval_secs, now)
        ]

    def _is_due(self, last: float | None, interval: float, now: float) -> bool:
        if last is None:
            return self._once or interval > 0
        return not self._once and now - last >= interval

    def look(self, base: str, due: list[str]) -> tuple[int, list[str], int] | None:
        """Compare full listings with the ledger. Returns the number of late files, the changed ones and the number
        listed.

        Returns None if the ledger has a hole: then late files cannot be identified, and `hole` says why.
        """
        dropped = self._dropped
        # Read the epochs in flight first: an epoch decided meanwhile is then in the ledger, so neither read misses it.
        in_flight = list(self._progress.epochs.values())
        positions = self._progress.bases[base].positions
        known = {name: KnownFiles() for name in self._pipeline.sources.names}
        try:
            for name, split in (split for epoch in in_flight for split in epoch.plan.splits):
                for item in split.inputs:
                    known[name].add(str(item["path"]), "")
            for name, records in (self._progress.baseline.inputs if self._progress.baseline else {}).items():
                for record in records:
                    known[name].add(str(record["path"]), str(record["etag"]))
            self._pipeline.add_known(known, self._progress.head.entry)
            reconciled = self._pipeline.sources.reconcile(positions, known, due)
        except LedgerHoleError as error:
            self._note(due)
            logger.error("reconcile stopped: the ledger has a hole", extra={"reason": error.message})
            if any(self._pipeline.sources[name].late_files != "ignore" for name in due):
                self.hole = error
            return None
        finally:
            for files in known.values():
                files.close()
        self.hole = None
        with self._lock:
            if dropped == self._dropped:  # otherwise files of an epoch that is now lost counted as known: list again
                self._note(due)
        return len(reconciled.late), reconciled.changed, reconciled.listed

    def _note(self, names: list[str]) -> None:
        self._looked_at |= dict.fromkeys(names, self._pipeline.clock.monotonic())

    def dropped(self, plan: EpochPlan) -> None:
        """Forget the late files of a dropped epoch: late is relative to a base, so they must be found again."""
        with self._lock:
            self._dropped += 1
            for name in self._pipeline.sources.give_back(plan):
                self._looked_at.pop(name, None)
