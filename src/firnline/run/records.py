"""Makes the records of epochs from the ledger's entries and from the run's own facts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping

from firnline.checkpoint.ledger import Fold, Ledger, LedgerEntry
from firnline.errors import CheckpointError, LedgerHoleError
from firnline.sinks.base import Head
from firnline.stores.record import CheckpointRecord
from firnline.types import EntryRef, Json, Receipt

logger = logging.getLogger(__name__)

WALKED_ENTRIES = 16  # up to this many are read one by one; a whole chain is read in batches
KEPT_FACTS = 64

Entries = Mapping[int, tuple[LedgerEntry, EntryRef]]


class Records:
    """The records of one pipeline's epochs; at most `most` at a time."""

    def __init__(self, ledger: Ledger, most: int) -> None:
        self._ledger = ledger
        self._most = most
        self._facts: dict[int, tuple[dict[str, int], dict[str, dict[str, Json]]]] = {}
        self._lock = threading.Lock()

    def note_receipt(self, receipt: Receipt) -> None:
        """Keep a sink's receipt for the record of the epoch."""
        facts = {
            "version": receipt.version,
            "rows": receipt.rows,
            "size_bytes": receipt.size_bytes,
            "run": receipt.run,
            "attempt": receipt.attempt,
        }
        with self._lock:
            self._facts_of(receipt.epoch)[1][receipt.sink] = facts

    def note_durations(self, epoch: int, durations_ms: Mapping[str, int]) -> None:
        """Keep the duration of each step for the record of the epoch."""
        with self._lock:
            self._facts_of(epoch)[0].update(durations_ms)

    def _facts_of(self, epoch: int) -> tuple[dict[str, int], dict[str, dict[str, Json]]]:
        for old in [known for known in self._facts if known <= epoch - KEPT_FACTS]:
            del self._facts[old]
        return self._facts.setdefault(epoch, ({}, {}))

    def between(self, held: Head, after: int, upto: int, recent: Entries) -> list[CheckpointRecord]:
        """Return the records of the epochs in between, oldest first, as far back as the ledger has them."""
        wanted = range(max(after, upto - self._most) + 1, upto + 1)
        if all(epoch in recent for epoch in wanted):
            return [self._record_of(*recent[epoch]) for epoch in wanted]
        if held.entry is None or held.checkpoint is None or held.epoch < 1:
            return []
        found: list[CheckpointRecord] = []
        ref: EntryRef | None = held.entry
        try:
            for link in self._walk(held.entry, held.epoch - wanted.start):
                if isinstance(link, Fold) or link.epoch < wanted.start or ref is None:
                    break
                if link.epoch in wanted:
                    found.append(self._record_of(link, ref))
                ref = link.previous
        except LedgerHoleError as error:
            logger.warning("epochs before a hole are not recorded", extra={"reason": error.message})
        if held.epoch in wanted and not any(record.epoch == held.epoch for record in found):
            found.insert(0, CheckpointRecord(held.checkpoint, held.entry))  # known from another copy than its entry
        return found[::-1]

    def _walk(self, tip: EntryRef, back: int) -> Iterator[LedgerEntry | Fold]:
        if back > WALKED_ENTRIES:
            yield from self._ledger.chain(tip)
            return
        ref: EntryRef | None = tip
        while ref is not None:
            entry = self._ledger.load(ref)
            yield entry
            ref = entry.previous

    def _record_of(self, entry: LedgerEntry, ref: EntryRef) -> CheckpointRecord:
        with self._lock:
            durations, sinks = self._facts.get(entry.epoch, ({}, {}))
            return CheckpointRecord(
                checkpoint=entry.checkpoint,
                entry=ref,
                kind=entry.kind,
                sinks=dict(sinks),
                durations_ms={**entry.durations_ms, **durations},
            )

    def is_of_chain(self, record: CheckpointRecord, tip: EntryRef) -> bool:
        """Return whether a record's entry is the tip or shortly before it; also False if that is expensive to find
        out."""
        back = tip.epoch - record.epoch
        if back <= 0:
            return record.entry.checksum == tip.checksum
        if back > WALKED_ENTRIES:
            return False
        try:
            for link in self._walk(tip, back):
                before = link.previous if isinstance(link, LedgerEntry) else None
                if before is None or before.epoch <= record.epoch:
                    return before is not None and before.checksum == record.entry.checksum
        except (CheckpointError, OSError) as error:
            logger.warning("ledger not read back to a tier's record", extra={"reason": str(error)})
        return False
