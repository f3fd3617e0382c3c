"""Sweeps the outbox: deletes staged files that no sink needs any more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from firnline.checkpoint.ledger import Fold
from firnline.errors import LedgerHoleError
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.progress import Progress
from firnline.sinks.outbox import list_outbox, sweep_outbox, waiting_for

logger = logging.getLogger(__name__)


class OutboxSweep:
    """The sweeps of one run. `slowest_sink` gives the epoch of the sink that lags most."""

    def __init__(self, pipeline: OpenPipeline, progress: Progress, slowest_sink: Callable[[], int]) -> None:
        self._pipeline = pipeline
        self._progress = progress
        self._slowest_sink = slowest_sink
        self._spared: set[str] = set()  # sinks with waiting rows that the spec does not have

    def sweep(self) -> None:
        """Delete the files of lost attempts and of epochs that every sink holds.

        Files for a sink that was removed from the spec stay, in case it returns. Files of epochs that a ledger hole
        hides stay, too.

        The outbox is listed first. An attempt that writes by then is in flight here, or the deciding table holds a
        newer generation, and then nothing is deleted. The epochs in flight are read before the chain, so an epoch
        decided meanwhile is in one of the two.

        Raises:
            FencedError: another run owns the pipeline.
        """
        pipeline = self._pipeline
        listed = list_outbox(pipeline.storage, pipeline.options.name)
        if not listed:
            return
        pipeline.open_readers()[0].check_holder(self._progress.generation)
        needed = set(self._progress.epochs)
        needed |= self._needed_by_sinks({attempt: keys for attempt, keys in listed.items() if attempt not in needed})
        gone = sweep_outbox(pipeline.storage, listed, needed)
        if gone:
            logger.info("outbox swept", extra={"files": gone})

    def _needed_by_sinks(self, listed: dict[str, list[str]]) -> set[str]:
        """Return the listed attempts that some sink still lacks, in the spec or not, and those that a hole hides.

        No sink can need anything below a fold.
        """
        settled = [sink.settled_epoch() for sink in self._pipeline.sinks[1:]]
        held = min([self._slowest_sink(), *(epoch for epoch in settled if epoch is not None)])
        names = {sink.name for sink in self._pipeline.sinks}
        needed: set[str] = set()
        unknown = set(listed)
        try:
            for link in self._pipeline.ledger.chain(self._progress.head.entry) if self._progress.head.entry else ():
                if isinstance(link, Fold):
                    if link.is_bridge:
                        raise LedgerHoleError(f"ledger entry {link.last.name} is lost", epoch=link.last.epoch)
                    break
                attempt = link.checkpoint.attempt
                if attempt in unknown:
                    unknown.remove(attempt)
                    absent = [sink for sink in sorted(waiting_for(link.staged, listed[attempt])) if sink not in names]
                    self._log_spared(absent)
                    if link.epoch > held or absent:
                        needed.add(attempt)
                if not unknown:
                    break
        except LedgerHoleError as error:
            logger.warning("outbox not swept behind a hole", extra={"reason": error.message, "attempts": len(unknown)})
            needed |= unknown
        return needed

    def _log_spared(self, sinks: Iterable[str]) -> None:
        """Log, once per run, that rows wait for a sink that the spec does not have."""
        for name in sinks:
            if name not in self._spared:
                self._spared.add(name)
                logger.warning("rows wait in the outbox for a sink that the spec does not have", extra={"sink": name})
