"""Records checkpoints after the commit: a version in the store, a copy in each tier; compares them when a run starts.

The sink's own commit is the truth; store and tiers are copies of it. So they may be brought level without a claim: what
is put was made true by the sink before, and `Place.put` never puts an older record over a newer one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from firnline.checkpoint.ledger import Ledger
from firnline.checkpoint.record import CheckpointRecord
from firnline.checkpoint.replication import Replication, TierWriter
from firnline.checkpoint.tiers import WAIT_SECONDS, Look, Place, Tiers
from firnline.engine.judging import Judge, Reload, fits
from firnline.engine.places import open_places
from firnline.engine.records import Entries, Records
from firnline.errors import (
    CheckpointError,
    DamagedError,
    NewerFormatError,
    SinkError,
    StoreAheadError,
    StoreUnsafeError,
)
from firnline.options import PipelineOptions
from firnline.sinks.base import Held
from firnline.types import Clock, Receipt

logger = logging.getLogger(__name__)

LEVELLED_EPOCHS = 1000
PRUNE_EVERY = 100  # versions, by their numbers: a run may be too short to count so many
FAR_WAIT_SECONDS = 5.0  # for the remote tier's answer before a claim, when the local one fits
DRAIN_SECONDS = 30.0


class Recorder:
    """What one run records, and where. `place` names the deciding sink's table in messages."""

    def __init__(self, options: PipelineOptions, ledger: Ledger, clock: Clock, place: str) -> None:
        self._clock = clock
        self._judge = Judge(options.name, place, staged=options.deciding.mode == "staged")
        self.tell: Callable[[Replication], None] = lambda _: None  # set by the runner
        self.store, local, remote = open_places(options)
        levelled, self._prune_every = LEVELLED_EPOCHS, PRUNE_EVERY
        if options.checkpoint.store is not None:
            levelled = min(LEVELLED_EPOCHS, options.checkpoint.store.keep_versions)
            self._prune_every = max(1, min(PRUNE_EVERY, options.checkpoint.store.keep_versions))
        self._records = Records(ledger, levelled)
        self.tiers = Tiers(local, remote)
        self._local, self._remote = self._make_writers(options)
        self._seen: Look | None = None
        self._claimed = False
        self._looks: dict[str, Look] | None = None  # what was compared; None: nothing yet
        self._far_looked = threading.Event()
        self._far_looked.set()
        self._recorded: int | None = None  # the newest epoch that the store holds; None: not known
        self._prune_due = self._prune_told = False

    def _make_writers(self, options: PipelineOptions) -> tuple[TierWriter | None, TierWriter | None]:
        def make(place: Place | None, interval_ms: int) -> TierWriter | None:
            if place is None:
                return None
            return TierWriter(
                place,
                interval_ms / 1000,
                self._clock.monotonic,
                lambda lag: self.tell(lag),
                check=self._judge.check,
                refuse=self._judge.refuse,
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

    # -- at the start ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Read what store and local tier hold. Before the sink is read: it can only be further by then.

        Raises:
            StoreUnsafeError: one of them cannot keep what it is trusted with.
        """
        self.tiers.prove = True
        self._looks, self._claimed = None, False
        self._seen = self.store.look_within(WAIT_SECONDS, prove=True) if self.store else None
        self.tiers.look_again()

    def confirm(self, held: Held, reload: Reload | None = None) -> Held:
        """Compare with what the sink holds; returns what it holds by now, if it was read again with `reload`.

        Raises:
            StoreAheadError: a copy tells of more than the sink does.
            SinkError: the sink knows nothing, and whether a copy does cannot be found out now.
        """
        held = self._judge.confirm(self._find_looks, held, reload)
        self._looks = {look.path: look for look in self._find_looks(held)}
        return held

    def begin(self, held: Held) -> int | None:
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
        return self._level(held)

    def _find_looks(self, held: Held) -> list[Look]:
        """What the copies hold; the remote tier is left to the background when the local one fits."""
        found = [self._seen] if self._seen is not None else []
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
                self._judge.check(self.tiers.look(remote))
            except StoreAheadError:
                pass  # the judge keeps it
            except StoreUnsafeError as error:
                self._judge.refuse(error)
            except Exception as error:
                facts = {"tier": remote.path, "place": remote.place, "reason": str(error) or type(error).__name__}
                logger.warning("tier not read", extra=facts)
            finally:
                looked.set()

        threading.Thread(target=look, name="firnline far look", daemon=True).start()

    def before_claim(self, reload: Reload) -> None:
        """Give the remote tier a last chance to tell of more than the sink holds, before anything is added there.

        Raises:
            StoreAheadError: it does. If it answers later, `record` raises this.
            StoreUnsafeError: a tier cannot keep what it is trusted with.
        """
        self._far_looked.wait(FAR_WAIT_SECONDS)
        self._judge.before_claim(reload)

    def claimed(self, held: Held, run: str) -> None:
        """Take note of what stands under the claim of this run."""
        self._judge.claimed(held, run)
        self._claimed = True

    def _begin_tiers(self, held: Held, looks: Mapping[str, Look]) -> None:
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

    def _level(self, held: Held) -> int | None:
        """Give the store the epochs that it lacks, oldest first; None when that must wait."""
        look, self._recorded = self._seen, None
        if self.store is None or look is None:
            return None
        if look.unreachable:
            logger.warning("store stays behind until the next epoch is recorded", extra={"place": look.place})
            return None
        try:
            self._catch_up(self.store, look, held, held.epoch, {})
        except (OSError, CheckpointError) as error:
            logger.warning("store not brought level", extra={"place": look.place, "reason": str(error)})
            return None
        return self._recorded

    def _catch_up(self, store: Place, look: Look, held: Held, epoch: int, recent: Entries) -> None:
        taken_back = look.epoch > held.epoch  # else the judge had refused it
        other = look.record is not None and look.epoch == held.epoch and not fits(look.record, held)
        if look.damaged or taken_back or other:
            records = self._records.between(held, epoch - 1, epoch, recent)
        else:
            records = self._records.between(held, look.epoch, epoch, recent)
        for record in records:
            store.put(record, f"epoch {record.epoch}, brought level", replace=taken_back)
            self._note_put(store)
        if records:
            logger.info("store brought level", extra={"place": store.place, "epochs": len(records)})
        self._recorded = epoch

    # -- after the commit -----------------------------------------------------------------------------

    def note_receipt(self, receipt: Receipt) -> None:
        """Keep what a sink answered for the epoch's record."""
        self._records.note_receipt(receipt)

    def note_durations(self, epoch: int, durations_ms: Mapping[str, int]) -> None:
        """Keep how long each step took for the epoch's record."""
        self._records.note_durations(epoch, durations_ms)

    def record(self, epoch: int, held: Held, recent: Entries) -> None:
        """Record every epoch up to this one: the tiers first, since they are not waited for.

        Raises:
            SinkError: the store cannot be written; repeatable.
            StoreAheadError: the store or a tier turned out to tell of more than the sink did.
            StoreUnsafeError: a tier turned out not to keep its promises.
        """
        self._judge.raise_found()
        self._offer(epoch, held, recent)
        self._judge.raise_found()
        if self.store is None:
            return
        try:
            self._put(self.store, epoch, held, recent)
        except (DamagedError, NewerFormatError) as error:  # the sink is the truth, and holds the epoch
            self._recorded = None
            facts = {"place": self.store.place, "epoch": epoch, "reason": error.message}
            logger.warning("epoch not recorded in the store", extra=facts)
        except OSError as error:
            self._recorded = None  # the outcome is not known: looked at before the next put
            raise SinkError(
                f"epoch {epoch} is committed, but cannot be recorded in {self.store.place}: {error}",
                hint="Check that the checkpoint store can be reached and written, then run again; nothing was lost.",
            ) from error

    def _put(self, store: Place, epoch: int, held: Held, recent: Entries) -> None:
        if self._recorded is None:
            look = store.known or store.look_within(WAIT_SECONDS)
            if look.unreachable:
                raise OSError(look.unreachable)
            if look.record is not None and look.record.checkpoint.generation > held.generation:
                logger.warning("another run records in this store", extra={"place": store.place, "epoch": look.epoch})
                self._recorded = epoch
                return
            if self._claimed:
                self._judge.check(look)
            else:
                self._judge.compare(look, held)
            self._catch_up(store, look, held, epoch, recent)
            return
        for record in self._records.between(held, self._recorded, epoch, recent):
            # Its record names the epoch: a note would only cost one more durable write.
            note = "" if record.kind == "epoch" else f"{record.kind}, epoch {record.epoch}"
            if store.put(record, note, check=self._judge.check if self._claimed else None) is not None:
                logger.warning("store holds a newer record; left as it is", extra={"place": store.place})
            self._note_put(store)
            self._recorded = record.epoch
        self._recorded = max(self._recorded, epoch)

    def _note_put(self, store: Place) -> None:
        if store.known is not None and store.known.version % self._prune_every == 0:
            self._prune_due = True

    def _offer(self, epoch: int, held: Held, recent: Entries) -> None:
        writers = [w for w in (self._local, self._remote) if w is not None]
        if not writers:
            return
        for record in self._records.between(held, epoch - 1, epoch, recent):
            for writer in writers:
                writer.start()
                writer.offer(record, here=writer is self._local)

    # -- now and then ---------------------------------------------------------------------------------

    def prune_due(self) -> bool:
        """Whether so much was put that old versions should go; said once."""
        due = self._prune_due and not self._prune_told
        self._prune_told = self._prune_due
        return due

    def prune(self) -> None:
        """Delete the store's oldest versions."""
        self._prune_due = self._prune_told = False
        if self.store is None:
            return
        try:
            self.store.prune()
        except (OSError, CheckpointError) as error:
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
        if drain and self._prune_due:
            self.prune()
        for place in self.places:
            place.close()
