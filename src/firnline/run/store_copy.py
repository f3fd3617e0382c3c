"""The checkpoint store of a run: every epoch becomes a version there. A store that fails or hangs never stops the run.

The sink holds the truth. An epoch that cannot be recorded now is recorded later from the ledger. Only a store that
contradicts the sink, or lacks the guarantees that it needs, ends a run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from firnline.errors import CheckpointError, SinkError, StoreAheadError, StoreUnsafeError
from firnline.process import TimedCalls
from firnline.run.copy_check import CopyCheck, fits
from firnline.run.records import Entries, Records
from firnline.sinks.base import Head
from firnline.stores.replicator import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, Replication
from firnline.stores.tiers import WAIT_SECONDS, Look, Place

logger = logging.getLogger(__name__)

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
        place: Place,
        records: Records,
        check: CopyCheck,
        monotonic: Callable[[], float],
        on_change: Callable[[], None],
        *,
        keep_versions: int,
        strict: bool = False,
    ) -> None:
        self._place = place
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
        self.seen: Look | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the store lacks epochs."""
        return self._since is not None

    def replication(self) -> Replication:
        """Return how far the store is behind."""
        behind = max(1, self._wanted.epoch - self._stored) if self.is_behind and self._wanted else 0
        return Replication("store", self._place.place, self._stored, behind, self._since, self._reason)

    # -- at the start ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Read the head of the store."""
        self._claimed = False
        self.seen = self._place.look_within(WAIT_SECONDS, prove=True)

    def claimed(self) -> None:
        """Continue under the claim: the check now has the sink's head under that claim."""
        self._claimed = True

    def level(self, held: Head) -> int | None:
        """Put the epochs that the store lacks, oldest first. Returns None if that must wait."""
        look, self._recorded = self.seen, None
        if look is None:
            return None
        self._wanted, self._stored = _Wanted(held.epoch, held, {}), look.epoch
        if look.unreachable:
            self._fail(OSError(look.unreachable), due_seconds=0.0)
            return None
        try:
            self._call(lambda: self._catch_up(look, held, held.epoch, {}))
        except (OSError, CheckpointError) as error:
            self._fail(error, due_seconds=0.0)
            return None
        self._succeed()
        return self._recorded

    def _catch_up(self, look: Look, held: Head, epoch: int, recent: Entries) -> None:
        taken_back = look.epoch > held.epoch  # otherwise the check has refused it
        other = look.record is not None and look.epoch == held.epoch and not fits(look.record, held)
        if look.damaged or taken_back or other:
            records = self._records.between(held, epoch - 1, epoch, recent)
        else:
            records = self._records.between(held, look.epoch, epoch, recent)
        for record in records:
            self._place.put(record, f"epoch {record.epoch}, brought level", replace=taken_back)
            self._note_put()
        if records:
            logger.info("store in sync", extra={"place": self._place.place, "epochs": len(records)})
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
                    f"epoch {wanted.epoch} is committed, but cannot be recorded in {self._place.place}: {error}",
                    hint="Check that the checkpoint store can be reached and written, then run again, or run without "
                    "--strict-store; nothing was lost.",
                ) from error
        else:
            self._succeed()

    def _call(self, work: Callable[[], object]) -> None:
        with self._calling:
            self._calls.call(work, STORE_SECONDS)

    def _put(self, wanted: _Wanted) -> None:
        place, held, epoch = self._place, wanted.held, wanted.epoch
        if self._recorded is None:
            look = place.known or place.look()
            if look.unreachable:
                raise OSError(look.unreachable)
            if look.record is not None and look.record.checkpoint.generation > held.generation:
                logger.warning("another run records in this store", extra={"place": place.place, "epoch": look.epoch})
                self._recorded = epoch
                return
            if self._claimed:
                self._check.check(look)
            else:
                self._check.compare(look, held)
            self._catch_up(look, held, epoch, wanted.recent)
            return
        for record in self._records.between(held, self._recorded, epoch, wanted.recent):
            # Its record names the epoch: a note would only cost another durable write.
            note = "" if record.kind == "epoch" else f"{record.kind}, epoch {record.epoch}"
            if place.put(record, note, check=self._check.check if self._claimed else None) is not None:
                logger.warning("store holds a newer record; left as it is", extra={"place": place.place})
            self._note_put()
            self._recorded = record.epoch
        self._recorded = max(self._recorded, epoch)

    def _succeed(self) -> None:
        failing = bool(self._reason)
        self._failures, self._reason, self._since, self._due_at = 0, "", None, float("-inf")
        self._stored = self._recorded or self._stored
        if failing:
            logger.info("store is in sync again", extra={"place": self._place.place, "epoch": self._stored})
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
        facts = {"place": self._place.place, "epoch": self._wanted.epoch if self._wanted else 0}
        log = logger.debug if is_known else logger.warning  # an outage is logged once, not with every attempt
        log("epoch not recorded in the store; going on, trying again", extra={**facts, "reason": self._reason})
        self._on_change()

    # -- now and then ---------------------------------------------------------------------------------

    def _note_put(self) -> None:
        if self._place.known is not None and self._place.known.version % self._prune_every == 0:
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
            self._call(self._place.prune)
        except (OSError, CheckpointError) as error:
            logger.warning("old versions not deleted", extra={"place": self._place.place, "reason": str(error)})

    def close(self, *, drain: bool) -> None:
        """Close. With `drain`, retry missing epochs once more."""
        if drain:
            self.catch_up(now=True)
            if self.is_behind:
                facts = {"place": self._place.place, "epoch": self._stored, "reason": self._reason}
                logger.warning("store is behind; the next run brings it in sync", extra=facts)
            elif self._prune_due:
                self.prune()
        self._place.close()
