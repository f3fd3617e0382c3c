"""Copies of checkpoints beside the sink: makes records, compares copies with the sink, and writes those in the store.

The sink holds the truth. A store that fails or hangs never stops a run: an epoch that cannot be recorded now is
recorded later from the ledger. A copy that is ahead of the sink stops the run, and so does a store that lacks the
guarantees that it needs.

A live run may write a copy after this run has read the sink, and that copy then seems to be ahead. The sink is
therefore read again before a run is refused. What a tier's thread reads counts only after the claim: from then on, no
other run can commit to the sink.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from firnline.checkpoint.ledger import Fold, Ledger, LedgerEntry
from firnline.errors import (
    CheckpointError,
    FirnlineError,
    LedgerHoleError,
    SinkError,
    StoreAheadError,
    StoreUnsafeError,
)
from firnline.process import TimedCalls
from firnline.sinks.base import Head
from firnline.stores.record import CheckpointRecord
from firnline.stores.replicator import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Replication
from firnline.stores.tiers import WAIT_SECONDS, CopyStore, NewestCopy, entry_digest, same_entry
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


Reload = Callable[[], Head]


class CopyCheck:
    """Compares the copies of one pipeline with the sink. The tiers' threads also call `check` and `refuse`."""

    def __init__(self, pipeline: str, deciding: str, location: str) -> None:
        self._pipeline = pipeline
        self._deciding = deciding
        self._sink_location = location
        self._base: Head | None = None  # the sink's head before this run committed
        self._own: tuple[int, str] | None = None  # generation and run id, set by the claim
        self._suspects: dict[str, NewestCopy] = {}
        self._refused: FirnlineError | None = None
        self._lock = threading.Lock()

    def confirm(self, copies: Callable[[Head], Sequence[NewestCopy]], held: Head, reload: Reload | None) -> Head:
        """Compare the copies read at the start. Returns the sink's head, which may be newer by now.

        Raises:
            StoreAheadError: a copy is ahead of the sink, also after the sink was read again.
            SinkError: the sink holds no epoch, and a copy that might cannot be read now.
        """
        try:
            self._compare_all(copies(held), held)
        except StoreAheadError:
            if reload is None:
                raise
            held = reload()
            self._compare_all(copies(held), held)
        with self._lock:
            self._base, self._own = held, None
            self._suspects.clear()  # a copy that is still ahead is seen again
        return held

    def before_claim(self, reload: Reload) -> None:
        """Compare the copies read since the start with the sink's current head.

        Raises:
            FirnlineError: a store or tier cannot be used at all, or is ahead of the sink.
        """
        with self._lock:
            suspects = list(self._suspects.values())
            self._suspects.clear()
            refused = self._refused
        if refused is not None:
            raise refused
        if suspects:
            self._compare_all(suspects, reload())

    def claimed(self, held: Head, run: str) -> None:
        """From now on, compare every copy with the sink's head under this run's claim."""
        with self._lock:
            self._own = (held.generation, run)
            self._base = replace(held, generation=held.generation - 1)

    def check(self, copy: NewestCopy) -> None:
        """Compare a copy read while the run is active; `raise_found` raises the error in the run.

        Raises:
            StoreAheadError: the copy is ahead of the sink, and no newer run wrote it.
        """
        try:
            self._check(copy)
        except StoreAheadError:
            with self._lock:
                self._suspects[copy.tier] = copy
            raise

    def _check(self, copy: NewestCopy) -> None:
        with self._lock:
            base, own = self._base, self._own
        if base is None or copy.record is None:
            return
        made = copy.record.checkpoint
        if own is not None and (made.generation > own[0] or (made.generation, made.run) == own):
            return
        self.compare(copy, base)

    def refuse(self, error: FirnlineError) -> None:
        """Record that a store or tier cannot be used at all."""
        with self._lock:
            self._refused = error

    def raise_found(self) -> None:
        """Raise the first recorded error.

        Raises:
            FirnlineError: a store or tier cannot be used, or is ahead of the sink.
        """
        with self._lock:
            refused, suspects = self._refused, list(self._suspects.values())
            self._suspects.clear()
        if refused is not None:
            raise refused
        for copy in suspects:
            self.check(copy)

    # -- one copy -------------------------------------------------------------------------------------

    def _compare_all(self, copies: Sequence[NewestCopy], held: Head) -> None:
        if held.checkpoint is None:
            self._check_never_seen(copies)
            return
        for copy in copies:
            self.compare(copy, held)

    def _way_back(self, copy: NewestCopy) -> str:
        """Return what to do about a sink that knows nothing of the epochs in a copy."""
        decided = copy.record.checkpoint.deciding.get("sink", "") if copy.record is not None else ""
        if decided and decided != self._deciding:
            return (
                f"Sink {decided!r} decided so far, and goes on deciding. A table that was added needs `start` in the "
                "spec (now, or snapshot): then it does not decide. If sinks were renamed or reordered, change it back."
            )
        recover = "Bring the right table back; a lost journal comes back by firnline recover --from SINK. "
        return recover + self._start_over(copy)

    def _start_over(self, copy: NewestCopy) -> str:
        """Return how to start over without this copy."""
        if copy.tier == "store":
            return "To start over without it, delete the store's copy: firnline checkpoints delete --yes"
        return f"To start over, delete {self._pipeline!r} from {copy.location}."

    def _check_never_seen(self, copies: Sequence[NewestCopy]) -> None:
        for copy in copies:
            if copy.record is not None or copy.damaged:
                found = f"epoch {copy.epoch}" if copy.record else f"traces ({copy.damaged})"
                raise StoreAheadError(
                    f"{_name(copy)} holds {found} of {self._pipeline!r}, but {self._sink_location} knows nothing of it",
                    hint=self._way_back(copy),
                    store=copy.location,
                    epoch=copy.epoch,
                )
        for copy in copies:
            if copy.unreachable:
                raise SinkError(
                    f"{self._sink_location} knows nothing of {self._pipeline!r}, and {_name(copy)} cannot be asked:"
                    f" {copy.unreachable}",
                    hint="A first start needs every store and tier to answer; make it reachable, then run again.",
                )

    def compare(self, copy: NewestCopy, held: Head) -> None:
        """Refuse a copy that is ahead of the sink, unless the sink has rolled those epochs back."""
        facts = {"tier": copy.tier, "place": copy.location}
        if copy.unreachable or copy.damaged:
            if copy.tier == "store":  # for a tier this was logged when the copy was skipped
                logger.warning("store not read", extra={**facts, "reason": copy.unreachable or copy.damaged})
            return
        if copy.record is None or copy.epoch < held.epoch or fits(copy.record, held):
            return
        made_by = copy.record.checkpoint.generation
        if copy.epoch > held.epoch:
            taken_back = held.committed is not None and made_by < held.generation  # a pending epoch was set aside
        else:
            taken_back = held.checkpoint is not None and made_by < held.checkpoint.generation
        if not taken_back:
            raise self._ahead(copy, held)
        logger.warning("copy holds an epoch that was rolled back", extra={**facts, "epoch": copy.epoch})

    def _ahead(self, copy: NewestCopy, held: Head) -> StoreAheadError:
        other = " (another one)" if copy.epoch == held.epoch else ""
        hint = f"Bring the right table back, or delete {self._pipeline!r} from {copy.location} if the table is right."
        if held.committed is not None:
            hint += f" Units that were set aside: firnline staging --discard-from {held.epoch + 1}."
        return StoreAheadError(
            f"{_name(copy)} holds epoch {copy.epoch} of {self._pipeline!r}{other},"
            f" but {self._sink_location} holds epoch {held.epoch}",
            hint=hint,
            store=copy.location,
            epoch=copy.epoch,
            sink_epoch=held.epoch,
        )


def fits(record: CheckpointRecord, held: Head) -> bool:
    """Return whether a record has exactly the epoch and entry of the sink's head."""
    return held.entry is not None and record.epoch == held.epoch and same_entry(record.entry, entry_digest(held.entry))


def _name(copy: NewestCopy) -> str:
    return f"the checkpoint store {copy.location}" if copy.tier == "store" else f"the {copy.tier} tier {copy.location}"


STORE_SECONDS = 15.0  # for one record; a slower store is left alone until it answers
PRUNE_EVERY = 100  # versions, by number: a run may be too short to count them


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The target contents of the store."""

    epoch: int
    held: Head
    recent: Entries


class StoreCopy:
    """The store of one run. With `strict`, an epoch that cannot be recorded is an error, like a failed commit."""

    def __init__(
        self,
        store: CopyStore,
        records: Records,
        check: CopyCheck,
        monotonic: Callable[[], float],
        on_change: Callable[[], None],
        *,
        keep_versions: int,
        strict: bool = False,
    ) -> None:
        self._store = store
        self._records = records
        self._check = check
        self._monotonic = monotonic
        self._on_change = on_change
        self._strict = strict
        self._prune_every = max(1, min(PRUNE_EVERY, keep_versions))
        self._prune_due = self._prune_reported = False
        self._calls = TimedCalls(STORE_SECONDS)
        self._calling = threading.Lock()
        self._claimed = False
        self._recorded: int | None = None  # the store's newest epoch; None: read it before the next put
        self._stored = 0  # its last known value
        self._wanted: _Wanted | None = None
        self._since: float | None = None  # when the oldest missing epoch should have been recorded
        self._failures = 0
        self._due_at = float("-inf")
        self._reason = ""
        self.seen: NewestCopy | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the store lacks epochs."""
        return self._since is not None

    def replication(self) -> Replication:
        """Return how far the store is behind."""
        behind = max(1, self._wanted.epoch - self._stored) if self.is_behind and self._wanted else 0
        return Replication("store", self._store.location, self._stored, behind, self._since, self._reason)

    # -- at the start ---------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the head of the store."""
        self._claimed = False
        self.seen = self._store.read_within(WAIT_SECONDS, prove=True)

    def claimed(self) -> None:
        """Continue under the claim: the check now has the sink's head under that claim."""
        self._claimed = True

    def complete(self, held: Head) -> int | None:
        """Put the epochs that the store lacks, oldest first. Returns None if that must wait."""
        copy, self._recorded = self.seen, None
        if copy is None:
            return None
        self._wanted, self._stored = _Wanted(held.epoch, held, {}), copy.epoch
        if copy.unreachable:
            self._fail(OSError(copy.unreachable), due_seconds=0.0)
            return None
        try:
            self._call(lambda: self._catch_up(copy, held, held.epoch, {}))
        except (OSError, CheckpointError) as error:
            self._fail(error, due_seconds=0.0)
            return None
        self._succeed()
        return self._recorded

    def _catch_up(self, copy: NewestCopy, held: Head, epoch: int, recent: Entries) -> None:
        taken_back = copy.epoch > held.epoch  # otherwise the check has refused it
        other = copy.record is not None and copy.epoch == held.epoch and not fits(copy.record, held)
        if copy.damaged or taken_back or other:
            records = self._records.between(held, epoch - 1, epoch, recent)
        else:
            records = self._records.between(held, copy.epoch, epoch, recent)
        for record in records:
            self._store.put(record, f"epoch {record.epoch}, caught up", replace=taken_back)
            self._note_put()
        if records:
            logger.info("store in sync", extra={"place": self._store.location, "epochs": len(records)})
        self._recorded = epoch

    # -- after the commit -----------------------------------------------------------------------------

    def record(self, epoch: int, held: Head, recent: Entries) -> None:
        """Record every epoch up to this one, now or once the store is writable again.

        Raises:
            StoreAheadError: the store is ahead of the sink.
            StoreUnsafeError: the store broke its guarantees.
            SinkError: strict, and the store cannot be written; repeatable.
        """
        self._wanted = _Wanted(epoch, held, dict(recent))
        if self._strict or (not self._calls.busy and self._monotonic() >= self._due_at):
            self._write()
        elif self._since is None:
            self._since = self._monotonic()
        if self.is_behind:
            self._on_change()

    def catch_up(self, *, now: bool = False) -> None:
        """Retry to record missing epochs, if due.

        Raises:
            StoreAheadError, StoreUnsafeError: as in `record`.
        """
        if self._strict:  # then the run itself retries
            return
        if self.is_behind and not self._calls.busy and (now or self._monotonic() >= self._due_at):
            self._write()
            self._on_change()

    def _write(self) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        try:
            self._call(lambda: self._put(wanted))
        except (StoreAheadError, StoreUnsafeError):
            raise
        except CheckpointError as error:  # the sink is the truth, and holds the epoch
            self._fail(error)
        except OSError as error:
            self._fail(error)
            if self._strict:
                raise SinkError(
                    f"epoch {wanted.epoch} is committed, but cannot be recorded in {self._store.location}: {error}",
                    hint="Check that the checkpoint store can be reached and written, then run again, or run without "
                    "--strict-store; nothing was lost.",
                ) from error
        else:
            self._succeed()

    def _call(self, work: Callable[[], object]) -> None:
        with self._calling:
            self._calls.call(work, STORE_SECONDS)

    def _put(self, wanted: _Wanted) -> None:
        store, held, epoch = self._store, wanted.held, wanted.epoch
        if self._recorded is None:
            copy = store.known or store.read()
            if copy.unreachable:
                raise OSError(copy.unreachable)
            if copy.record is not None and copy.record.checkpoint.generation > held.generation:
                logger.warning(
                    "another run records in this store", extra={"place": store.location, "epoch": copy.epoch}
                )
                self._recorded = epoch
                return
            if self._claimed:
                self._check.check(copy)
            else:
                self._check.compare(copy, held)
            self._catch_up(copy, held, epoch, wanted.recent)
            return
        for record in self._records.between(held, self._recorded, epoch, wanted.recent):
            # Its record names the epoch: a note would only cost another durable write.
            note = "" if record.kind == "epoch" else f"{record.kind}, epoch {record.epoch}"
            if store.put(record, note, check=self._check.check if self._claimed else None) is not None:
                logger.warning("store holds a newer record; left as it is", extra={"place": store.location})
            self._note_put()
            self._recorded = record.epoch
        self._recorded = max(self._recorded, epoch)

    def _succeed(self) -> None:
        failing = bool(self._reason)
        self._failures, self._reason, self._since, self._due_at = 0, "", None, float("-inf")
        self._stored = self._recorded or self._stored
        if failing:
            logger.info("store is in sync again", extra={"place": self._store.location, "epoch": self._stored})
        self._on_change()

    def _fail(self, error: OSError | CheckpointError, due_seconds: float | None = None) -> None:
        """Handle a put with unknown outcome: back off, then read the store before the next put."""
        now, is_known = self._monotonic(), self._failures > 0
        self._stored = self._recorded or self._stored
        self._recorded = None
        self._failures += 1
        self._reason = str(error) or type(error).__name__
        self._since = now if self._since is None else self._since
        if due_seconds is None:
            due_seconds = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 16), MAX_BACKOFF_SECONDS)
        self._due_at = now + due_seconds
        facts = {"place": self._store.location, "epoch": self._wanted.epoch if self._wanted else 0}
        log = logger.debug if is_known else logger.warning  # an outage is logged once, not with every attempt
        log("epoch not recorded in the store; going on, trying again", extra={**facts, "reason": self._reason})
        self._on_change()

    # -- now and then ---------------------------------------------------------------------------------

    def _note_put(self) -> None:
        if self._store.known is not None and self._store.known.version % self._prune_every == 0:
            self._prune_due = True

    def prune_due(self) -> bool:
        """Return, once per interval, whether enough versions were put that old ones should be pruned."""
        due = self._prune_due and not self._prune_reported
        self._prune_reported = self._prune_due
        return due

    def prune(self) -> None:
        """Delete the oldest versions. A failing store keeps them."""
        self._prune_due = self._prune_reported = False
        try:
            self._call(self._store.prune)
        except (OSError, CheckpointError) as error:
            logger.warning("old versions not deleted", extra={"place": self._store.location, "reason": str(error)})

    def close(self, *, drain: bool) -> None:
        """Close. With `drain`, retry missing epochs once more."""
        if drain:
            self.catch_up(now=True)
            if self.is_behind:
                facts = {"place": self._store.location, "epoch": self._stored, "reason": self._reason}
                logger.warning("store is behind; the next run brings it in sync", extra=facts)
            elif self._prune_due:
                self.prune()
        self._store.close()
