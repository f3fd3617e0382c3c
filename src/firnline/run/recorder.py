"""Records checkpoints after the commit: a version in the store, a copy in each tier; compares them at the start."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

from firnline.checkpoint.ledger import Ledger
from firnline.errors import StoreAheadError, StoreUnsafeError
from firnline.options import PipelineOptions, StoreOptions
from firnline.process import HungError, TimedCalls
from firnline.run.copy_check import CopyCheck, Reload, fits
from firnline.run.records import Entries, Records
from firnline.run.store_copy import StoreCopy
from firnline.sinks.base import Head
from firnline.stores.base import CheckpointStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.replicator import Replication, TierWriter
from firnline.stores.tiers import WAIT_SECONDS, Look, Path, Place, Tiers
from firnline.types import Clock, Receipt

logger = logging.getLogger(__name__)


LOCAL_VERSIONS = 10
REMOTE_VERSIONS = 100


def open_places(options: PipelineOptions) -> tuple[Place | None, Place | None, Place | None]:
    """Store, local tier and remote tier, where the options name them."""
    store, near, far = options.checkpoint.store, options.checkpoint.local, options.checkpoint.remote
    local = remote = None
    if near is not None:
        wanted = StoreOptions(type="file", path=near.path, keep_versions=LOCAL_VERSIONS)
        local = _place("local", wanted, options)
    if far is not None:
        wanted = StoreOptions(
            type="object", uri=far.uri, storage_options=far.storage_options, keep_versions=REMOTE_VERSIONS
        )
        remote = _place("remote", wanted, options)
    return _place("store", store, options) if store else None, local, remote


def _place(path: Path, options: StoreOptions, pipeline: PipelineOptions) -> Place:
    held_by = pipeline.deciding.name

    def open_it() -> CheckpointStore:
        from firnline.stores import open_store  # each kind brings its own libraries

        return open_store(options, held_by=held_by)

    def look_at_it() -> CheckpointStore:
        from firnline.stores import open_store

        return open_store(options, held_by=held_by, looking=True)

    where = options.path or options.uri or options.type  # never the DSN: it holds a secret
    return Place(path, where, open_it, pipeline.name, options.keep_versions, look_at_it)


LEVELLED_EPOCHS = 1000
NEAR_SECONDS = 15.0  # for the local tier to be written
FAR_WAIT_SECONDS = 5.0  # for the remote tier's answer before a claim, when the local one fits
DRAIN_SECONDS = 30.0


def _ignore() -> None:
    """Nobody waits for changes."""


class Recorder:
    """What one run records, and where. `place` names the deciding sink's table in messages."""

    def __init__(
        self, options: PipelineOptions, ledger: Ledger, clock: Clock, place: str, *, strict_store: bool = False
    ) -> None:
        self._clock = clock
        self._check = CopyCheck(options.name, place)
        self._on_change: Callable[[], None] = _ignore
        self.store, local, remote = open_places(options)
        kept = options.checkpoint.store.keep_versions if options.checkpoint.store else LEVELLED_EPOCHS
        self._records = Records(ledger, min(LEVELLED_EPOCHS, kept))
        self._store: StoreCopy | None = None
        if self.store is not None:
            self._store = StoreCopy(
                self.store,
                self._records,
                self._check,
                clock.monotonic,
                lambda: self._on_change(),
                keep_versions=kept,
                strict=strict_store,
            )
        self.tiers = Tiers(local, remote)
        self._local, self._remote = self._make_writers(options)
        self._near_calls = TimedCalls(NEAR_SECONDS)
        self._looks: dict[str, Look] | None = None  # what was compared; None: nothing yet
        self._far_looked = threading.Event()
        self._far_looked.set()

    def _make_writers(self, options: PipelineOptions) -> tuple[TierWriter | None, TierWriter | None]:
        def make(place: Place | None, interval_ms: int) -> TierWriter | None:
            if place is None:
                return None
            return TierWriter(
                place,
                interval_ms / 1000,
                self._clock.monotonic,
                lambda _: self._on_change(),
                check=self._check.check,
                refuse=self._check.refuse,
            )

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

    def lags(self) -> list[Replication]:
        """How far the store and the tiers are behind."""
        return [copy.replication() for copy in (self._store, self._local, self._remote) if copy is not None]

    # -- at the start ---------------------------------------------------------------------------------

    def look(self, on_change: Callable[[], None] = _ignore) -> None:
        """Read what store and local tier hold. Called before the sink is read, which can only be further by then.

        From now on `on_change` is called, from any thread, when a copy was written or could not be.

        Raises:
            StoreUnsafeError: one of them cannot keep what it is trusted with.
        """
        self._on_change = on_change
        self._looks = None
        if self._store is not None:
            self._store.look()
        self.tiers.look_again(prove=True)

    def confirm(self, held: Head, reload: Reload | None = None) -> Head:
        """Compare with what the sink holds; returns what it holds by now, if it was read again with `reload`.

        Raises:
            StoreAheadError: a copy tells of more than the sink does.
            SinkError: the sink knows nothing, and whether a copy does cannot be found out now.
        """
        held = self._check.confirm(self._find_looks, held, reload)
        self._looks = {look.path: look for look in self._find_looks(held)}
        return held

    def inspect(self, held: Head, reload: Reload) -> list[Look]:
        """What the store and the tiers hold, read only, and refused as a start of a run would refuse it.

        Raises:
            StoreAheadError, SinkError: as in `confirm`.
        """
        looks = [place.look_within(WAIT_SECONDS) for place in self.places]
        self._check.confirm(lambda _: looks, held, reload)
        return looks

    def begin(self, held: Head) -> int | None:
        """Bring the copies level with the sink, once they are compared; returns what the store holds, if known.

        Raises:
            StoreAheadError, SinkError: as in `confirm`, if that was not called before.
        """
        if self._looks is None:
            held = self.confirm(held)
        if held.checkpoint is None:
            return None
        looks = self._looks or {}
        self._begin_tiers(held, looks)
        if self.tiers.remote is not None and "remote" not in looks:
            self._look_far(self.tiers.remote)
        return self._store.level(held) if self._store is not None else None

    def _find_looks(self, held: Head) -> list[Look]:
        """What the copies hold; the remote tier is left to the background when the local one fits."""
        found = [self._store.seen] if self._store is not None and self._store.seen is not None else []
        for look in self.tiers.looks():
            found.append(look)
            if held.checkpoint is not None and look.record is not None and fits(look.record, held):
                break
        return found

    def _look_far(self, remote: Place) -> None:
        """Look at the remote tier in the background; what is wrong there ends the run before it claims or records."""
        self._far_looked = looked = threading.Event()

        def look() -> None:
            try:
                self._check.check(self.tiers.look(remote))
            except StoreAheadError:
                pass  # the check keeps it
            except StoreUnsafeError as error:
                self._check.refuse(error)
            except Exception as error:
                facts = {"tier": remote.path, "place": remote.place, "reason": str(error) or type(error).__name__}
                logger.warning("tier not read", extra=facts)
            finally:
                looked.set()

        threading.Thread(target=look, name="firnline far look", daemon=True).start()

    def before_claim(self, reload: Reload) -> None:
        """Wait for the remote tier before the claim: if it is ahead of the sink, nothing may be added there.

        Raises:
            StoreAheadError: it does. If it answers later, `record` raises this.
            StoreUnsafeError: a tier cannot keep what it is trusted with.
        """
        self._far_looked.wait(FAR_WAIT_SECONDS)
        self._check.before_claim(reload)

    def claimed(self, held: Head, run: str) -> None:
        """Keep what the sink holds under the claim of this run."""
        self._check.claimed(held, run)
        if self._store is not None:
            self._store.claimed()

    def _begin_tiers(self, held: Head, looks: Mapping[str, Look]) -> None:
        """Start the writers. What a tier lacks is given to it; where it fits already, that is found out there."""
        if held.checkpoint is None or held.entry is None or held.epoch < 1:
            return
        tip = CheckpointRecord(held.checkpoint, held.entry)
        for path, writer in (("local", self._local), ("remote", self._remote)):
            if writer is None:
                continue
            look = looks.get(path)
            record = look.record if look else None
            known = record is not None and self._records.is_of_chain(record, held.entry)
            writer.holds(record.epoch if record is not None and known else 0)
            if record is None or (record.epoch <= held.epoch and not fits(record, held)):
                writer.offer(tip)
            writer.start()

    # -- after the commit -----------------------------------------------------------------------------

    def note_receipt(self, receipt: Receipt) -> None:
        """Keep what a sink answered for the epoch's record."""
        self._records.note_receipt(receipt)

    def note_durations(self, epoch: int, durations_ms: Mapping[str, int]) -> None:
        """Keep how long each step took for the epoch's record."""
        self._records.note_durations(epoch, durations_ms)

    def record(self, epoch: int, held: Head, recent: Entries) -> None:
        """Record every epoch up to this one: the tiers first, since they are not waited for.

        Raises:
            SinkError: `strict_store`, and the store cannot be written; repeatable.
            StoreAheadError: the store or a tier turned out to be ahead of the sink.
            StoreUnsafeError: a tier turned out not to keep its promises.
        """
        self._check.raise_found()
        self._offer(epoch, held, recent)
        self._check.raise_found()
        if self._store is not None:
            self._store.record(epoch, held, recent)

    def catch_up(self, *, now: bool = False) -> None:
        """Record in the store what it lacks, if it lacks something and the next try is due, or `now`.

        Raises:
            StoreAheadError, StoreUnsafeError: as in `record`.
        """
        if self._store is not None:
            self._store.catch_up(now=now)

    def _offer(self, epoch: int, held: Head, recent: Entries) -> None:
        writers = [w for w in (self._local, self._remote) if w is not None]
        if not writers:
            return
        for record in self._records.between(held, epoch - 1, epoch, recent):
            for writer in writers:
                writer.start()
                self._offer_one(writer, record)

    def _offer_one(self, writer: TierWriter, record: CheckpointRecord) -> None:
        """The local tier is written at once; one that hangs is left to its own thread."""
        if writer is self._local and not self._near_calls.busy:
            with contextlib.suppress(HungError):
                self._near_calls.call(lambda: writer.offer(record, here=True))
        else:
            writer.offer(record)

    # -- now and then ---------------------------------------------------------------------------------

    def prune_due(self) -> bool:
        """Whether so much was put that old versions should go; said once."""
        return self._store is not None and self._store.prune_due()

    def prune(self) -> None:
        """Delete the store's oldest versions."""
        if self._store is not None:
            self._store.prune()

    def flush(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Write to both tiers what waits there, now; whether both are level."""
        level = [writer.flush(seconds) for writer in (self._local, self._remote) if writer is not None]
        return all(level)

    def close(self, *, drain: bool, on_drain: Callable[[Replication], None] = lambda _: None) -> None:
        """End. With `drain`, what waits for a tier is written first; `on_drain` gets the tier that is waited for."""
        for writer in (self._local, self._remote):
            if writer is None:
                continue
            left = writer.replication()
            if drain and left.since is not None:
                on_drain(left)
                if not writer.flush(DRAIN_SECONDS):
                    left = writer.replication()
                    facts = {"tier": left.path, "place": left.place, "epoch": left.epoch, "reason": left.reason}
                    logger.warning("tier is behind; the next run brings it in sync", extra=facts)
            writer.close()
        if self._store is not None:
            self._store.close(drain=drain)
        for place in self.tiers.places:
            place.close()
