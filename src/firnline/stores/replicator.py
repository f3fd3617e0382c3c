"""Copies checkpoints to a tier in the background, at the tier's own pace.

A replicator gets every checkpoint and copies the newest one once per interval. It skips those in between, since each
checkpoint is complete in itself. After a failure it retries with a back-off until the run ends. Only a clean stop waits
for it, for a limited time.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from firnline.errors import CheckpointError, FirnlineError, StoreUnsafeError
from firnline.faults import fault_point
from firnline.stores.record import CheckpointRecord
from firnline.stores.tiers import CopyStore, NewestCopy

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
PRUNE_EVERY = 16  # versions, by number: a run may be too short to count them
LOG_EVERY = 10  # failures; the first of each group is logged


@dataclass(frozen=True, slots=True)
class Replication:
    """How far a tier is behind. `since`: when its oldest missing checkpoint was made, on the monotonic clock."""

    tier: str  # store, local or remote
    location: str
    epoch: int  # the newest epoch known to be in the tier; 0 while unknown
    epochs_behind: int = 0  # at most: offered, and not known to be in the tier
    since: float | None = None
    reason: str = ""  # why the last attempt failed

    def lag_seconds(self, now: float) -> float:
        """Return how long the tier has lacked a record; 0 if it is in sync."""
        return 0.0 if self.since is None else max(0.0, now - self.since)


class HasEpoch(Protocol):
    """An item that a replicator copies: a checkpoint of an epoch."""

    @property
    def epoch(self) -> int: ...


Item = TypeVar("Item", bound=HasEpoch)


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Item]):
    """The newest item to copy, and the oldest one that it replaces: its epoch, and when it was offered."""

    item: Item
    first: int
    since: float


class Replicator(ABC, Generic[Item]):
    """Copies the newest item once per interval until the tier has it. One thread calls `offer`, any thread the rest.

    A subclass copies one item in `copy`. A newer item replaces a waiting one. One copy runs at a time, so the order is
    kept.
    """

    def __init__(
        self,
        tier: str,
        location: str,
        interval_seconds: float,
        monotonic: Callable[[], float],
        report: Callable[[Replication], None] = lambda _: None,
    ) -> None:
        """Take the tier's name and location; `report` is called after every attempt."""
        self._tier = tier
        self._location = location
        self._interval = interval_seconds
        self._monotonic = monotonic
        self._report = report
        self._changed = threading.Condition()
        self._copying = threading.Lock()  # one copy at a time: order
        self._waiting: _Waiting[Item] | None = None
        self._taken: _Waiting[Item] | None = None
        self._due_at = float("-inf")
        self._failures = 0
        self._reason = ""
        self._hurried = False
        self._closed = False
        self._refused = False  # the tier cannot be used at all: nothing more is copied
        self._held = 0  # the newest epoch known to be in the tier
        self._thread: threading.Thread | None = None

    @abstractmethod
    def copy(self, item: Item) -> str:
        """Copy an item. Returns why the tier lacks it, empty on success. Any exception counts as a failure."""

    # -- what is known --------------------------------------------------------------------------------

    def holds(self, epoch: int) -> None:
        """Record the newest epoch that the tier already has."""
        with self._changed:
            self._held = epoch

    @property
    def epoch(self) -> int:
        """The newest epoch known to be in the tier, without an item being copied."""
        return self._held

    def replication(self) -> Replication:
        """Return how far the tier is behind now, and why the last attempt failed, if it did."""
        with self._changed:
            oldest, newest = self._taken or self._waiting, self._waiting or self._taken
            return Replication(
                tier=self._tier,
                location=self._location,
                epoch=self._held,
                epochs_behind=max(1, newest.item.epoch - oldest.first + 1) if oldest and newest else 0,
                since=oldest.since if oldest else None,
                reason=self._reason,
            )

    # -- copying --------------------------------------------------------------------------------------

    def offer(self, item: Item, *, here: bool = False) -> None:
        """Take an item to copy once the interval has passed. With `here`, copy it before returning if it has."""
        with self._changed:
            before = self._waiting
            first, since = (before.first, before.since) if before else (item.epoch, self._monotonic())
            self._waiting = _Waiting(item, first, since)
            now = here and self._wait_seconds() == 0 and self._copying.acquire(blocking=False)
            if not now:
                self._changed.notify_all()
        if now:
            try:
                self._copy_newest()
            finally:
                self._copying.release()

    def turn(self) -> float | None:
        """Copy if due. Returns the seconds until the next turn; None if nothing waits."""
        wait = self._wait_seconds()
        if wait == 0:
            with self._copying:
                self._copy_newest()
            wait = self._wait_seconds()
        return wait

    def _wait_seconds(self) -> float | None:
        with self._changed:
            if self._waiting is None or self._taken is not None or self._closed or self._refused:
                return None
            return 0 if self._hurried else max(0.0, self._due_at - self._monotonic())

    def _copy_newest(self) -> None:
        """Copy the waiting item. Called under `_copying`."""
        with self._changed:
            taken, self._waiting = self._waiting, None
            self._taken, self._hurried = taken, False
        if taken is None:
            return
        problem = self._try(taken.item)
        with self._changed:
            self._taken, self._reason = None, problem
            now = self._monotonic()
            if problem:
                newest = self._waiting or taken
                self._waiting = _Waiting(newest.item, taken.first, taken.since)
                self._failures += 1
                # The exponent is bounded too: an outage of days must not overflow the number.
                backoff = FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 16)
                self._due_at = now + min(backoff, MAX_BACKOFF_SECONDS)
            else:
                recovered, self._failures = self._failures, 0
                self._due_at = now + self._interval
                self._hurried = self._hurried and self._waiting is not None
                if recovered:
                    self.log_recovery(self._facts(taken.item))
            self._changed.notify_all()
        if not problem:
            self.copied(taken.item)
        self._report(self.replication())

    def _try(self, item: Item) -> str:
        """Copy an item. Returns the error."""
        try:
            reason, unexpected = self.copy(item), False
        except Exception as error:  # whatever it is, the next attempt may succeed, and only this thread makes it
            reason = str(error) or type(error).__name__
            unexpected = not isinstance(error, OSError | FirnlineError)
        if reason and not self._refused and self._failures % LOG_EVERY == 0:
            lag = self.replication()
            behind = {"epochs_behind": lag.epochs_behind, "lag_seconds": round(lag.lag_seconds(self._monotonic()), 1)}
            self.log_failure({**self._facts(item), **behind, "reason": reason}, unexpected=unexpected)
        return reason

    def _facts(self, item: Item) -> dict[str, object]:
        return {"tier": self._tier, "place": self._location, "epoch": item.epoch}

    def copied(self, item: Item) -> None:
        """Called after an item was copied, before the report."""

    @abstractmethod
    def log_failure(self, facts: dict[str, object], *, unexpected: bool) -> None:
        """Log that an item could not be copied; `unexpected`: with the stack of the error."""

    @abstractmethod
    def log_recovery(self, facts: dict[str, object]) -> None:
        """Log that an item was copied after failures."""

    # -- the background -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start copying in the background; repeatable. A closed replicator stays closed."""
        with self._changed:
            if self._thread is None and not self._closed:
                name = f"firnline {type(self).__name__} {self._tier}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self.turn()
            with self._changed:
                if self._closed or self._thread is not threading.current_thread():
                    return
                wait = self._wait_seconds()
                if wait != 0:  # nothing was offered meanwhile
                    self._changed.wait(wait)

    def flush(self, seconds: float) -> bool:
        """Copy the waiting item now, despite interval and back-off. Returns whether the tier is in sync.

        Waits until it is, until a new attempt has failed, or for at most `seconds`.
        """
        with self._changed:
            if self._is_in_sync():
                return True
            if self._refused:
                return False
            failures, was_taken = self._failures, self._taken is not None
            self._hurried = True
            self._changed.notify_all()

        def ended() -> bool:
            return self._is_in_sync() or self._refused or self._failures > failures + was_taken

        if self._thread is None:
            self.turn()
        with self._changed:
            self._changed.wait_for(ended, timeout=seconds)
            return self._is_in_sync()

    def _is_in_sync(self) -> bool:
        return self._waiting is None and self._taken is None

    def close(self, *, drain_seconds: float = 0.0) -> bool:
        """Stop. With `drain_seconds`, copy the waiting item first, for at most that long. Returns whether it is in
        sync.

        Does not wait longer for a running copy: it ends with the process, and the next run repeats it.
        """
        in_sync = self.flush(drain_seconds) if drain_seconds > 0 else self._is_in_sync()
        with self._changed:
            self._closed = True
            self._thread = None
            self._changed.notify_all()
        return in_sync


class TierWriter(Replicator[CheckpointRecord]):
    """Writes checkpoint records to one tier.

    `check` gets the tier's content before a record replaces it, and raises to keep it. `refuse` gets the error of a
    tier that cannot be used at all; then nothing more is written.
    """

    def __init__(
        self,
        store: CopyStore,
        interval_seconds: float,
        monotonic: Callable[[], float],
        report: Callable[[Replication], None] = lambda _: None,
        *,
        check: Callable[[NewestCopy], None] | None = None,
        refuse: Callable[[FirnlineError], None] = lambda _: None,
    ) -> None:
        super().__init__(store.tier, store.location, interval_seconds, monotonic, report)
        self._store = store
        self._check = check
        self._refuse = refuse

    def start(self) -> None:
        """Start writing in the background, also after `close`."""
        with self._changed:
            self._closed = False
        super().start()

    def copy(self, item: CheckpointRecord) -> str:
        try:
            if self._store.tier == "local":
                fault_point("tier.local.before")
                newer = self._store.put(item, check=self._check)
                fault_point("tier.local.after")
            else:
                fault_point("tier.remote.before")
                newer = self._store.put(item, check=self._check)
                fault_point("tier.remote.after")
        except StoreUnsafeError as error:
            self._refused = True
            self._refuse(error)
            logger.error("tier cannot be used", extra={**self._facts(item), "reason": error.message})
            return error.message
        if newer is None:
            self._held = item.epoch
            self._prune(item)
        elif newer.checkpoint.generation > item.checkpoint.generation:
            return f"it holds epoch {newer.epoch} of a newer run; left as it is"
        return ""

    def log_failure(self, facts: dict[str, object], *, unexpected: bool) -> None:
        logger.warning("tier not written", extra=facts, exc_info=unexpected)

    def log_recovery(self, facts: dict[str, object]) -> None:
        logger.info("tier in sync again", extra=facts)

    def _prune(self, item: CheckpointRecord) -> None:
        known = self._store.known
        if known is None or known.version % PRUNE_EVERY:
            return
        try:
            self._store.prune()
        except (OSError, CheckpointError) as error:
            logger.warning("old versions not deleted", extra={**self._facts(item), "reason": str(error)})
