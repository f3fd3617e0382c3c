"""Writes records to a tier at its own cadence: in order, the newest first, again and again until it is there.

A tier is given every record and writes the newest of them once per interval; what lies in between is never
missed, since a record tells the whole of a checkpoint. A failure is tried again with a back-off for as long as
the run lasts; nobody waits for it but a clean stop, and that one not for ever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from firnline.errors import CheckpointError, FirnlineError, StoreUnsafeError
from firnline.faults import fault_point
from firnline.stores.record import CheckpointRecord
from firnline.stores.tiers import Look, Place

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0
PRUNE_EVERY = 16  # versions, by their numbers: a run may be too short to count so many
TOLD_FAILURES = 10  # the first one of so many is logged


@dataclass(frozen=True, slots=True)
class Replication:
    """How far a tier is behind. `since` is when the oldest record that it lacks was made, on the monotonic clock."""

    path: str
    place: str
    epoch: int  # the newest that the tier is known to hold; 0 while that is not known
    epochs_behind: int = 0  # at most: what was given to it and is not known to be there
    since: float | None = None
    reason: str = ""  # why the last try failed

    def lag_seconds(self, now: float) -> float:
        """0 when the tier is level."""
        return 0.0 if self.since is None else max(0.0, now - self.since)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The newest record that is to be written, and the oldest one that it stands for: its epoch, when it was made."""

    record: CheckpointRecord
    first: int
    since: float

    @property
    def epochs(self) -> int:
        return max(1, self.record.epoch - self.first + 1)


class TierWriter:
    """Writes one tier. `offer` is called from the epoch loop, everything else from whichever thread.

    `check` is shown what is in the tier before anything is put over it, and raises to keep it. `refuse` is told of a
    tier that cannot be used at all: then nothing more is written.
    """

    def __init__(
        self,
        place: Place,
        interval_seconds: float,
        monotonic: Callable[[], float],
        tell: Callable[[Replication], None] = lambda _: None,
        *,
        check: Callable[[Look], None] | None = None,
        refuse: Callable[[FirnlineError], None] = lambda _: None,
    ) -> None:
        self._place = place
        self._interval = interval_seconds
        self._monotonic = monotonic
        self.tell = tell
        self._check = check
        self._refuse = refuse
        self._refused = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()  # one write at a time: order
        self._waiting: _Waiting | None = None
        self._taken: _Waiting | None = None
        self._due_at = float("-inf")
        self._failures = 0
        self._reason = ""
        self._hurried = False
        self._closed = False
        self._held = 0  # the newest epoch of this pipeline's own chain that the tier is known to hold
        self._thread: threading.Thread | None = None

    # -- from the epoch loop --------------------------------------------------------------------------

    def holds(self, epoch: int) -> None:
        """Take note of what the tier already holds of the chain that the sink holds."""
        with self._changed:
            self._held = epoch

    def offer(self, record: CheckpointRecord, *, here: bool = False) -> None:
        """Take a record, to be written once the interval has passed; `here`: if it has, before this returns."""
        with self._changed:
            before = self._waiting
            if before is None:
                self._waiting = _Waiting(record, record.epoch, self._monotonic())
            else:
                self._waiting = _Waiting(record, before.first, before.since)
            now = here and self._wait_seconds() == 0 and self._writing.acquire(blocking=False)
            if not now:
                self._changed.notify_all()
        if now:
            try:
                self._write()
            finally:
                self._writing.release()

    # -- what is known --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The newest epoch of the sink's chain that the tier holds; it never counts what is only on its way."""
        return self._held

    def replication(self) -> Replication:
        """How far the tier is behind now."""
        with self._changed:
            oldest = self._taken or self._waiting
            lacking = oldest.epochs if oldest else 0
            if self._taken and self._waiting:
                lacking = max(1, self._waiting.record.epoch - self._taken.first + 1)
            return Replication(
                path=self._place.path,
                place=self._place.place,
                epoch=self._held,
                epochs_behind=lacking,
                since=oldest.since if oldest else None,
                reason=self._reason,
            )

    # -- writing --------------------------------------------------------------------------------------

    def turn(self) -> float | None:
        """Write if that is due; returns the seconds until the next turn, None when nothing waits."""
        wait = self._wait_seconds()
        if wait == 0:
            with self._writing:
                self._write()
            wait = self._wait_seconds()
        return wait

    def _wait_seconds(self) -> float | None:
        with self._changed:
            if self._waiting is None or self._taken is not None or self._closed or self._refused:
                return None
            return 0 if self._hurried else max(0.0, self._due_at - self._monotonic())

    def _write(self) -> None:
        """Write the newest record that waits. Called under `_writing`."""
        with self._changed:
            taken, self._waiting = self._waiting, None
            self._taken = taken
            self._hurried = False
        if taken is None:
            return
        problem = self._put(taken.record)
        with self._changed:
            self._taken = None
            now = self._monotonic()
            if problem:
                newer = self._waiting or taken
                self._waiting = _Waiting(newer.record, taken.first, taken.since)
                self._failures += 1
                backoff = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 16), MAX_BACKOFF_SECONDS)
                self._due_at = now + backoff
            else:
                recovered, self._failures = self._failures, 0
                self._due_at = now + self._interval
                if recovered:
                    logger.info("tier is level again", extra=self._facts(taken.record.epoch))
            self._reason = problem
            self._changed.notify_all()
        self.tell(self.replication())

    def _put(self, record: CheckpointRecord) -> str:
        """Put a record; returns what went wrong."""
        facts = self._facts(record.epoch)
        try:
            if self._place.path == "local":
                fault_point("tier.local.before")
                newer = self._place.put(record, check=self._check)
                fault_point("tier.local.after")
            else:
                fault_point("tier.remote.before")
                newer = self._place.put(record, check=self._check)
                fault_point("tier.remote.after")
        except StoreUnsafeError as error:
            self._refused = True
            self._refuse(error)
            logger.error("tier cannot be used", extra={**facts, "reason": error.message})
            return error.message
        except Exception as error:  # whatever it is, the next try may go well, and nobody else would make one
            reason = str(error) or type(error).__name__
            self._tell_failure(facts, reason, unexpected=not isinstance(error, OSError | FirnlineError))
            return reason
        if newer is None:
            self._held = record.epoch
            self._prune()
        elif newer.checkpoint.generation > record.checkpoint.generation:
            reason = f"it holds epoch {newer.epoch} of a newer run; left as it is"
            self._tell_failure(facts, reason)
            return reason
        return ""

    def _tell_failure(self, facts: dict[str, object], reason: str, *, unexpected: bool = False) -> None:
        if self._failures % TOLD_FAILURES:
            return
        lag = self.replication()
        behind = {"epochs_behind": lag.epochs_behind, "lag_seconds": round(lag.lag_seconds(self._monotonic()), 1)}
        logger.warning("tier not written", extra={**facts, **behind, "reason": reason}, exc_info=unexpected)

    def _prune(self) -> None:
        known = self._place.known
        if known is None or known.version % PRUNE_EVERY:
            return
        try:
            self._place.prune()
        except (OSError, CheckpointError) as error:
            logger.warning("old versions not deleted", extra={**self._facts(self._held), "reason": str(error)})

    def _facts(self, epoch: int) -> dict[str, object]:
        return {"tier": self._place.path, "place": self._place.place, "epoch": epoch}

    # -- the background -------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to write in the background; repeatable."""
        if self._thread is None:
            self._closed = False
            self._thread = threading.Thread(target=self._run, name=f"firnline {self._place.path} tier", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self.turn()
            with self._changed:
                if self._closed or self._thread is not threading.current_thread():
                    return
                wait = self._wait_seconds()
                if wait != 0:  # nothing came in the meantime
                    self._changed.wait(wait)

    def flush(self, seconds: float) -> bool:
        """Write what waits now, whatever the interval and the back-off say; whether the tier is level.

        Waits until it is, until a try from now on has failed, or for so long at most.
        """
        with self._changed:
            if self._waiting is None and self._taken is None:
                return True
            if self._refused:
                return False
            failures, was_taken = self._failures, self._taken is not None
            self._hurried = True
            self._changed.notify_all()

        def ended() -> bool:
            level = self._waiting is None and self._taken is None
            return level or self._refused or self._failures > failures + was_taken

        if self._thread is None:
            self.turn()
        with self._changed:
            self._changed.wait_for(ended, timeout=seconds)
            return self._waiting is None and self._taken is None

    def close(self) -> None:
        """Write nothing more; does not wait for a write that is under way."""
        with self._changed:
            self._closed = True
            self._thread = None
            self._changed.notify_all()
