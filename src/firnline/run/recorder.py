"""Records checkpoints after the commit: a version in the store, a copy in each tier. Compares them at the start."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping

from firnline.checkpoint.ledger import Ledger
from firnline.errors import StoreAheadError, StoreUnsafeError
from firnline.options import PipelineOptions, StoreOptions
from firnline.process import HungError, TimedCalls
from firnline.run.copies import CopyCheck, Entries, Records, Reload, StoreCopy, fits
from firnline.sinks.base import Head
from firnline.stores.base import CheckpointStore
from firnline.stores.record import CheckpointRecord
from firnline.stores.replicator import Replication, TierWriter
from firnline.stores.tiers import WAIT_SECONDS, CopyStore, NewestCopy, Tier, Tiers
from firnline.types import Clock, Receipt

logger = logging.getLogger(__name__)


LOCAL_VERSIONS = 10
REMOTE_VERSIONS = 100


def open_copy_stores(options: PipelineOptions) -> tuple[CopyStore | None, CopyStore | None, CopyStore | None]:
    """Open the store, the local tier and the remote tier that the options name."""
    store, near, far = options.checkpoint.store, options.checkpoint.local, options.checkpoint.remote
    local = remote = None
    if near is not None:
        wanted = StoreOptions(type="file", path=near.path, keep_versions=LOCAL_VERSIONS)
        local = _copy_store("local", wanted, options)
    if far is not None:
        wanted = StoreOptions(
            type="object", uri=far.uri, storage_options=far.storage_options, keep_versions=REMOTE_VERSIONS
        )
        remote = _copy_store("remote", wanted, options)
    return _copy_store("store", store, options) if store else None, local, remote


def _copy_store(tier: Tier, options: StoreOptions, pipeline: PipelineOptions) -> CopyStore:
    held_by = pipeline.deciding.name

    def open_it() -> CheckpointStore:
        from firnline.stores import open_store  # each kind imports its own libraries

        return open_store(options, held_by=held_by)

    def open_read_only() -> CheckpointStore:
        from firnline.stores import open_store

        return open_store(options, held_by=held_by, read_only=True)

    location = options.path or options.uri or options.type  # never the DSN: it holds a secret
    return CopyStore(tier, location, open_it, pipeline.name, options.keep_versions, open_read_only)


CATCH_UP_EPOCHS = 1000
NEAR_SECONDS = 15.0  # limit for a write of the local tier
FAR_WAIT_SECONDS = 5.0  # limit for the remote tier's answer before a claim, if the local tier fits
DRAIN_SECONDS = 30.0


def _ignore() -> None:
    """Ignore changes."""


class Recorder:
    """Records the epochs of one run in store and tiers. `location` names the deciding sink's table in messages."""

    def __init__(
        self, options: PipelineOptions, ledger: Ledger, clock: Clock, location: str, *, strict_store: bool = False
    ) -> None:
        self._clock = clock
        self._check = CopyCheck(options.name, options.deciding.name, location)
        self._on_change: Callable[[], None] = _ignore
        self.store, local, remote = open_copy_stores(options)
        kept = options.checkpoint.store.keep_versions if options.checkpoint.store else CATCH_UP_EPOCHS
        self._records = Records(ledger, min(CATCH_UP_EPOCHS, kept))
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
        self._copies: dict[str, NewestCopy] | None = None  # the result of the comparison; None before it
        self._far_looked = threading.Event()
        self._far_looked.set()

    def _make_writers(self, options: PipelineOptions) -> tuple[TierWriter | None, TierWriter | None]:
        def make(store: CopyStore | None, interval_ms: int) -> TierWriter | None:
            if store is None:
                return None
            return TierWriter(
                store,
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
    def stores(self) -> tuple[CopyStore, ...]:
        """The store and the tiers that exist."""
        return (*([self.store] if self.store else []), *self.tiers.stores)

    @property
    def remote_epoch(self) -> int | None:
        """The newest epoch known to be in the remote tier; None without that tier.

        The floor stays at or below it: input above it may only be forgotten once it survives the loss of this machine.
        """
        return self._remote.epoch if self._remote else None

    def replication(self) -> Replication | None:
        """How far the remote tier is behind; None without one."""
        return self._remote.replication() if self._remote else None

    def lags(self) -> list[Replication]:
        """Return how far the store and the tiers are behind."""
        return [copy.replication() for copy in (self._store, self._local, self._remote) if copy is not None]

    # -- at the start ---------------------------------------------------------------------------------

    def read_copies(self, on_change: Callable[[], None] = _ignore) -> None:
        """Read the heads of store and local tier. Called before the sink is read, so the sink can only be newer.

        From now on `on_change` is called, from any thread, after every successful or failed write of a copy.

        Raises:
            StoreUnsafeError: one of them does not give the guarantees that it needs.
        """
        self._on_change = on_change
        self._copies = None
        if self._store is not None:
            self._store.read()
        self.tiers.read_again(prove=True)

    def confirm(self, held: Head, reload: Reload | None = None) -> Head:
        """Compare the copies with the sink's head. Returns the head, read again with `reload` if needed.

        Raises:
            StoreAheadError: a copy is ahead of the sink.
            SinkError: the sink holds no epoch, and a copy that might cannot be read now.
        """
        held = self._check.confirm(self._find_copies, held, reload)
        self._copies = {copy.tier: copy for copy in self._find_copies(held)}
        return held

    def inspect(self, held: Head, reload: Reload) -> list[NewestCopy]:
        """Read the store and the tiers, read-only, with the same checks as the start of a run.

        Raises:
            StoreAheadError, SinkError: as in `confirm`.
        """
        copies = [store.read_within(WAIT_SECONDS) for store in self.stores]
        self._check.confirm(lambda _: copies, held, reload)
        return copies

    def begin(self, held: Head) -> int | None:
        """Bring the copies in sync with the sink after the comparison. Returns the store's head, if known.

        Raises:
            StoreAheadError, SinkError: as in `confirm`, if that was not called before.
        """
        if self._copies is None:
            held = self.confirm(held)
        if held.checkpoint is None:
            return None
        copies = self._copies or {}
        self._begin_tiers(held, copies)
        if self.tiers.remote is not None and "remote" not in copies:
            self._check_remote(self.tiers.remote)
        return self._store.complete(held) if self._store is not None else None

    def _find_copies(self, held: Head) -> list[NewestCopy]:
        """Return the heads of the copies. If the local tier fits, the remote tier is read in the background."""
        found = [self._store.seen] if self._store is not None and self._store.seen is not None else []
        for copy in self.tiers.read_all():
            found.append(copy)
            if held.checkpoint is not None and copy.record is not None and fits(copy.record, held):
                break
        return found

    def _check_remote(self, remote: CopyStore) -> None:
        """Read the remote tier in the background. An error there ends the run before it claims or records."""
        self._far_looked = looked = threading.Event()

        def check() -> None:
            try:
                self._check.check(self.tiers.read(remote))
            except StoreAheadError:
                pass  # the check records it
            except StoreUnsafeError as error:
                self._check.refuse(error)
            except Exception as error:
                facts = {"tier": remote.tier, "place": remote.location, "reason": str(error) or type(error).__name__}
                logger.warning("tier not read", extra=facts)
            finally:
                looked.set()

        threading.Thread(target=check, name="firnline check of remote", daemon=True).start()

    def before_claim(self, reload: Reload) -> None:
        """Wait for the remote tier before the claim: if it is ahead of the sink, nothing may be committed.

        Raises:
            StoreAheadError: it is ahead. If it answers later, `record` raises this.
            StoreUnsafeError: a tier does not give the guarantees that it needs.
        """
        self._far_looked.wait(FAR_WAIT_SECONDS)
        self._check.before_claim(reload)

    def claimed(self, held: Head, run: str) -> None:
        """Keep the sink's head under the claim of this run."""
        self._check.claimed(held, run)
        if self._store is not None:
            self._store.claimed()

    def _begin_tiers(self, held: Head, copies: Mapping[str, NewestCopy]) -> None:
        """Start the tier writers. Each tier gets what it lacks; its writer checks whether it already fits."""
        if held.checkpoint is None or held.entry is None or held.epoch < 1:
            return
        tip = CheckpointRecord(held.checkpoint, held.entry)
        for path, writer in (("local", self._local), ("remote", self._remote)):
            if writer is None:
                continue
            copy = copies.get(path)
            record = copy.record if copy else None
            known = record is not None and self._records.is_of_chain(record, held.entry)
            writer.holds(record.epoch if record is not None and known else 0)
            if record is None or (record.epoch <= held.epoch and not fits(record, held)):
                writer.offer(tip)
            writer.start()

    # -- after the commit -----------------------------------------------------------------------------

    def note_receipt(self, receipt: Receipt) -> None:
        """Keep a sink's receipt for the record of the epoch."""
        self._records.note_receipt(receipt)

    def note_durations(self, epoch: int, durations_ms: Mapping[str, int]) -> None:
        """Keep the duration of each step for the record of the epoch."""
        self._records.note_durations(epoch, durations_ms)

    def record(self, epoch: int, held: Head, recent: Entries) -> None:
        """Record every epoch up to this one. The tiers come first, because the run does not wait for them.

        Raises:
            SinkError: `strict_store` is set and the store cannot be written; repeatable.
            StoreAheadError: the store or a tier is ahead of the sink.
            StoreUnsafeError: a tier broke its guarantees.
        """
        self._check.raise_found()
        self._offer(epoch, held, recent)
        self._check.raise_found()
        if self._store is not None:
            self._store.record(epoch, held, recent)

    def catch_up(self, *, now: bool = False) -> None:
        """Record the missing epochs in the store, if the next attempt is due or with `now`.

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
        """Write the local tier at once. A tier that hangs continues on its own thread."""
        if writer is self._local and not self._near_calls.busy:
            with contextlib.suppress(HungError):
                self._near_calls.call(lambda: writer.offer(record, here=True))
        else:
            writer.offer(record)

    # -- now and then ---------------------------------------------------------------------------------

    def prune_due(self) -> bool:
        """Return, once per interval, whether enough versions were put that old ones should be pruned."""
        return self._store is not None and self._store.prune_due()

    def prune(self) -> None:
        """Delete the store's oldest versions."""
        if self._store is not None:
            self._store.prune()

    def flush(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Write what waits for both tiers now. Returns whether both are in sync."""
        flushed = [writer.flush(seconds) for writer in (self._local, self._remote) if writer is not None]
        return all(flushed)

    def close(self, *, drain: bool, on_drain: Callable[[Replication], None] = lambda _: None) -> None:
        """Close. With `drain`, write what waits for a tier first; `on_drain` gets the tier that the run waits for."""
        for writer in (self._local, self._remote):
            if writer is None:
                continue
            left = writer.replication()
            if drain and left.since is not None:
                on_drain(left)
                if not writer.flush(DRAIN_SECONDS):
                    left = writer.replication()
                    facts = {"tier": left.tier, "place": left.location, "epoch": left.epoch, "reason": left.reason}
                    logger.warning("tier is behind; the next run brings it in sync", extra=facts)
            writer.close()
        if self._store is not None:
            self._store.close(drain=drain)
        for store in self.tiers.stores:
            store.close()
