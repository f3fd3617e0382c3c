"""Records checkpoints after the commit: a version in the store, a copy in each tier; compares them when a run starts.

The sink's own commit is the truth; store and tiers are copies of it. So they may be brought level without a claim: what
is put was made true by the sink before, and `Place.put` never puts an older record over a newer one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping

from firnline.checkpoint.ledger import Fold, Ledger, LedgerEntry
from firnline.checkpoint.record import CheckpointRecord
from firnline.checkpoint.replication import Replication, TierWriter
from firnline.checkpoint.tiers import Look, Place, Tiers, entry_digest, same_entry
from firnline.engine.places import open_places
from firnline.errors import LedgerHoleError, SinkError, StoreAheadError
from firnline.options import PipelineOptions
from firnline.sinks.base import Held
from firnline.types import Clock, EntryRef, Json, Receipt

logger = logging.getLogger(__name__)

LEVELLED_EPOCHS = 1000
WALKED_ENTRIES = 16  # so few are read one by one; the whole chain is read many at a time
KEPT_FACTS = 64
PRUNE_EVERY = 100
DRAIN_SECONDS = 30.0

Entries = Mapping[int, tuple[LedgerEntry, EntryRef]]


class Recorder:
    """What one run records, and where. `place` names the deciding sink's table in messages."""

    def __init__(self, options: PipelineOptions, ledger: Ledger, clock: Clock, place: str) -> None:
        self._pipeline = options.name
        self._staged = options.deciding.mode == "staged"
        self._ledger = ledger
        self._clock = clock
        self._sink_place = place
        self._levelled = LEVELLED_EPOCHS
        self.tell: Callable[[Replication], None] = lambda _: None  # set by the runner
        self.store, local, remote = open_places(options)
        if options.checkpoint.store is not None:
            self._levelled = min(LEVELLED_EPOCHS, options.checkpoint.store.keep_versions)
        self.tiers = Tiers(local, remote)
        self._local, self._remote = self._make_writers(options)
        self._seen: Look | None = None
        self._recorded: int | None = None  # the newest epoch that the store holds; None: not known
        self._puts = 0
        self._facts: dict[int, tuple[dict[str, int], dict[str, dict[str, Json]]]] = {}
        self._lock = threading.Lock()

    def _make_writers(self, options: PipelineOptions) -> tuple[TierWriter | None, TierWriter | None]:
        def make(place: Place | None, interval_ms: int) -> TierWriter | None:
            if place is None:
                return None
            return TierWriter(place, interval_ms / 1000, self._clock.monotonic, lambda lag: self.tell(lag))

        near, far = options.checkpoint.local, options.checkpoint.remote
        return (
            make(self.tiers.local, near.interval_ms if near else 0),
            make(self.tiers.remote, far.interval_ms if far else 0),
        )

    @property
    def places(self) -> tuple[Place, ...]:
        """The store and the tiers, where there are any."""
        return (*([self.store] if self.store else []), *self.tiers.places)

    @property
    def remote_epoch(self) -> int | None:
        """The newest epoch that the remote tier is known to hold; None when there is no such tier.

        The floor stays at or below it: what lies above may only be forgotten once it outlives this machine.
        """
        return self._remote.epoch if self._remote else None

    def replication(self) -> Replication | None:
        """How far the remote tier is behind; None without one."""
        return self._remote.replication() if self._remote else None

    # -- at the start ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what store and local tier hold. Before the sink is read: it can only be further by then."""
        self.tiers.prove = True
        self._seen = self.store.look() if self.store else None
        self.tiers.look_again()

    def begin(self, held: Held) -> int | None:
        """Compare with what the sink holds, and bring the copies level; returns what the store holds, if known.

        Raises:
            StoreAheadError: a copy tells of more than the sink does.
            SinkError: the sink knows nothing, and whether a copy does cannot be found out now.
        """
        if held.checkpoint is None:
            self._check_never_seen()
            return None
        looks = list(self._looks(held))
        for look in looks:
            self._compare(look, held)
        self._begin_tiers(held, {look.path: look for look in looks})
        return self._level(held)

    def _looks(self, held: Held) -> Iterator[Look]:
        """What the copies hold; the remote tier is left to the background when the local one fits."""
        if self._seen is not None:
            yield self._seen
        for look in self.tiers.looks():
            yield look
            if look.record is not None and _fits(look.record, held):
                return

    def _check_never_seen(self) -> None:
        looks = [*([self._seen] if self._seen else []), *self.tiers.looks()]
        for look in looks:
            if look.record is not None or look.damaged:
                found = f"epoch {look.epoch}" if look.record else f"traces ({look.damaged})"
                raise StoreAheadError(
                    f"{_name(look)} holds {found} of {self._pipeline!r}, but {self._sink_place} knows nothing of it",
                    hint=f"Bring the right table back. To start over, delete {self._pipeline!r} from {look.place}.",
                    store=look.place,
                    epoch=look.epoch,
                )
        for look in looks:
            if look.unreachable:
                raise SinkError(
                    f"{self._sink_place} knows nothing of {self._pipeline!r}, and {_name(look)} cannot be asked:"
                    f" {look.unreachable}",
                    hint="A first start needs every store and tier to answer; make it reachable, then run again.",
                )

    def _compare(self, look: Look, held: Held) -> None:
        """Refuse a copy that tells of more than the sink does, unless that was taken back in the sink."""
        facts = {"tier": look.path, "place": look.place}
        if look.unreachable or look.damaged:
            if look.path == "store":  # of a tier it was said when it was passed over
                logger.warning("store not read", extra={**facts, "reason": look.unreachable or look.damaged})
            return
        if look.record is None or look.epoch < held.epoch or _fits(look.record, held):
            return
        made_by = look.record.checkpoint.generation
        if look.epoch > held.epoch:
            taken_back = self._staged and made_by < held.generation
        else:
            taken_back = held.checkpoint is not None and made_by < held.checkpoint.generation
        if not taken_back:
            raise self._ahead(look, held)
        logger.warning("copy tells of an epoch that was taken back", extra={**facts, "epoch": look.epoch})

    def _ahead(self, look: Look, held: Held) -> StoreAheadError:
        other = " (another one)" if look.epoch == held.epoch else ""
        hint = f"Bring the right table back, or delete {self._pipeline!r} from {look.place} if the table is right."
        if self._staged:
            hint += f" Units that were set aside: firnline staging --discard-from {held.epoch + 1}."
        return StoreAheadError(
            f"{_name(look)} holds epoch {look.epoch} of {self._pipeline!r}{other},"
            f" but {self._sink_place} holds epoch {held.epoch}",
            hint=hint,
            store=look.place,
            epoch=look.epoch,
            sink_epoch=held.epoch,
        )

    def _begin_tiers(self, held: Held, looks: Mapping[str, Look]) -> None:
        """Start the writers. What a tier lacks is given to it; where it fits already, that is found out there."""
        if held.checkpoint is None or held.entry is None or held.epoch < 1:
            return
        tip = CheckpointRecord(held.checkpoint, held.entry)
        for path, writer in (("local", self._local), ("remote", self._remote)):
            if writer is None:
                continue
            look = looks.get(path)
            if look is None or look.epoch <= held.epoch:
                writer.holds(look.epoch if look else 0)
                if look is None or look.record is None or not _fits(look.record, held):
                    writer.offer(tip)
            writer.start()

    def _level(self, held: Held) -> int | None:
        """Give the store the epochs that it lacks, oldest first; None when that must wait."""
        look, self._recorded = self._seen, None
        if self.store is None or look is None or look.unreachable:
            return None
        try:
            self._catch_up(self.store, look, held, held.epoch, {})
        except OSError as error:
            logger.warning("store not brought level", extra={"place": look.place, "reason": str(error)})
            return None
        return self._recorded

    def _catch_up(self, store: Place, look: Look, held: Held, epoch: int, recent: Entries) -> None:
        taken_back = look.epoch > held.epoch  # else `_compare` had refused it
        other = look.record is not None and look.epoch == held.epoch and not _fits(look.record, held)
        if look.damaged or taken_back or other:
            records = self._records(held, epoch - 1, epoch, recent)
        else:
            records = self._records(held, look.epoch, epoch, recent)
        for record in records:
            store.put(record, f"epoch {record.epoch}, brought level", replace=taken_back)
        if records:
            logger.info("store brought level", extra={"place": store.place, "epochs": len(records)})
        self._recorded = epoch

    # -- after the commit -----------------------------------------------------------------------------

    def note_receipt(self, receipt: Receipt) -> None:
        """Keep what a sink answered for the epoch's record."""
        told = {
            "version": receipt.version,
            "rows": receipt.rows,
            "size_bytes": receipt.size_bytes,
            "run": receipt.run,
            "attempt": receipt.attempt,
        }
        with self._lock:
            self._facts_of(receipt.epoch)[1][receipt.sink] = told

    def note_durations(self, epoch: int, durations_ms: Mapping[str, int]) -> None:
        """Keep how long each step took for the epoch's record."""
        with self._lock:
            self._facts_of(epoch)[0].update(durations_ms)

    def _facts_of(self, epoch: int) -> tuple[dict[str, int], dict[str, dict[str, Json]]]:
        for old in [known for known in self._facts if known <= epoch - KEPT_FACTS]:
            del self._facts[old]
        return self._facts.setdefault(epoch, ({}, {}))

    def record(self, epoch: int, held: Held, recent: Entries) -> None:
        """Record every epoch up to this one: the tiers first, since they are not waited for.

        Raises:
            SinkError: the store cannot be written; repeatable.
        """
        self._offer(epoch, held, recent)
        if self.store is None:
            return
        try:
            self._put(self.store, epoch, held, recent)
        except OSError as error:
            self._recorded = None  # the outcome is not known: looked at before the next put
            raise SinkError(
                f"epoch {epoch} is committed, but cannot be recorded in {self.store.place}: {error}",
                hint="Check that the checkpoint store can be reached and written, then run again; nothing was lost.",
            ) from error

    def _put(self, store: Place, epoch: int, held: Held, recent: Entries) -> None:
        if self._recorded is None:
            look = store.known or store.look()
            if look.unreachable:
                raise OSError(look.unreachable)
            if look.record is not None and look.record.checkpoint.generation > held.generation:
                logger.warning("another run records in this store", extra={"place": store.place, "epoch": look.epoch})
                self._recorded = epoch
                return
            self._compare(look, held)
            self._catch_up(store, look, held, epoch, recent)
            return
        for record in self._records(held, self._recorded, epoch, recent):
            # Its record names the epoch: a note would only cost one more durable write.
            if not store.put(record, "" if record.kind == "epoch" else f"{record.kind}, epoch {record.epoch}"):
                logger.warning("store holds a newer record; left as it is", extra={"place": store.place})
            self._puts += 1
            self._recorded = record.epoch
        self._recorded = max(self._recorded, epoch)

    def _offer(self, epoch: int, held: Held, recent: Entries) -> None:
        writers = [w for w in (self._local, self._remote) if w is not None]
        if not writers:
            return
        for record in self._records(held, epoch - 1, epoch, recent):
            for writer in writers:
                writer.start()
                writer.offer(record, here=writer is self._local)

    def _records(self, held: Held, after: int, upto: int, recent: Entries) -> list[CheckpointRecord]:
        """The records of the epochs in between, oldest first: as far back as the ledger knows them."""
        wanted = range(max(after, upto - self._levelled) + 1, upto + 1)
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

    # -- now and then ---------------------------------------------------------------------------------

    def prune_due(self) -> bool:
        """Whether so much was put that old versions should go; said once."""
        due = self._puts >= PRUNE_EVERY
        if due:
            self._puts = 0
        return due

    def prune(self) -> None:
        """Delete the store's oldest versions."""
        if self.store is None:
            return
        try:
            self.store.prune()
        except OSError as error:
            logger.warning("old versions not deleted", extra={"place": self.store.place, "reason": str(error)})

    def flush(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Write to both tiers what waits there, now; whether both are level."""
        level = [writer.flush(seconds) for writer in (self._local, self._remote) if writer is not None]
        return all(level)

    def close(self, *, drain: bool, tell: Callable[[Replication], None] = lambda _: None) -> None:
        """End. With `drain`, what waits for a tier is written first; `tell` hears what is waited for."""
        for writer in (self._local, self._remote):
            if writer is None:
                continue
            left = writer.replication()
            if drain and left.since is not None:
                tell(left)
                if not writer.flush(DRAIN_SECONDS):
                    left = writer.replication()
                    facts = {"tier": left.path, "place": left.place, "epoch": left.epoch, "reason": left.reason}
                    logger.warning("tier left behind; the next run brings it level", extra=facts)
            writer.close()
        for place in self.places:
            place.close()


def _fits(record: CheckpointRecord, held: Held) -> bool:
    """Whether a record is of the very epoch and entry that the sink holds."""
    return held.entry is not None and record.epoch == held.epoch and same_entry(record.entry, entry_digest(held.entry))


def _name(look: Look) -> str:
    return f"the checkpoint store {look.place}" if look.path == "store" else f"the {look.path} tier {look.place}"
