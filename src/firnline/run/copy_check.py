"""Compares the copies in store and tiers with the sink. A copy that is ahead of the sink stops the run.

A live run may write a copy after this run has read the sink, and that copy then seems to be ahead. The sink is
therefore read again before a run is refused. What a tier's thread reads counts only after the claim: from then on, no
other run can commit to the sink.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from firnline.errors import FirnlineError, SinkError, StoreAheadError
from firnline.sinks.base import Head
from firnline.stores.record import CheckpointRecord
from firnline.stores.tiers import Look, entry_digest, same_entry

logger = logging.getLogger(__name__)

Reload = Callable[[], Head]


class CopyCheck:
    """Compares the copies of one pipeline with the sink. The tiers' threads also call `check` and `refuse`."""

    def __init__(self, pipeline: str, place: str) -> None:
        self._pipeline = pipeline
        self._sink_place = place
        self._base: Head | None = None  # the sink's head before this run committed
        self._own: tuple[int, str] | None = None  # generation and run id, set by the claim
        self._suspects: dict[str, Look] = {}
        self._refused: FirnlineError | None = None
        self._lock = threading.Lock()

    def confirm(self, looks: Callable[[Head], Sequence[Look]], held: Head, reload: Reload | None) -> Head:
        """Compare the copies read at the start. Returns the sink's head, which may be newer by now.

        Raises:
            StoreAheadError: a copy is ahead of the sink, also after the sink was read again.
            SinkError: the sink holds no epoch, and a copy that might cannot be read now.
        """
        try:
            self._compare_all(looks(held), held)
        except StoreAheadError:
            if reload is None:
                raise
            held = reload()
            self._compare_all(looks(held), held)
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

    def check(self, look: Look) -> None:
        """Compare a copy read while the run is active; `raise_found` raises the error in the run.

        Raises:
            StoreAheadError: the copy is ahead of the sink, and no newer run wrote it.
        """
        try:
            self._check(look)
        except StoreAheadError:
            with self._lock:
                self._suspects[look.path] = look
            raise

    def _check(self, look: Look) -> None:
        with self._lock:
            base, own = self._base, self._own
        if base is None or look.record is None:
            return
        made = look.record.checkpoint
        if own is not None and (made.generation > own[0] or (made.generation, made.run) == own):
            return
        self.compare(look, base)

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
        for look in suspects:
            self.check(look)

    # -- one copy -------------------------------------------------------------------------------------

    def _compare_all(self, looks: Sequence[Look], held: Head) -> None:
        if held.checkpoint is None:
            self._check_never_seen(looks)
            return
        for look in looks:
            self.compare(look, held)

    def _check_never_seen(self, looks: Sequence[Look]) -> None:
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

    def compare(self, look: Look, held: Head) -> None:
        """Refuse a copy that is ahead of the sink, unless the sink has rolled those epochs back."""
        facts = {"tier": look.path, "place": look.place}
        if look.unreachable or look.damaged:
            if look.path == "store":  # for a tier this was logged when the copy was skipped
                logger.warning("store not read", extra={**facts, "reason": look.unreachable or look.damaged})
            return
        if look.record is None or look.epoch < held.epoch or fits(look.record, held):
            return
        made_by = look.record.checkpoint.generation
        if look.epoch > held.epoch:
            taken_back = held.committed is not None and made_by < held.generation  # a pending epoch was set aside
        else:
            taken_back = held.checkpoint is not None and made_by < held.checkpoint.generation
        if not taken_back:
            raise self._ahead(look, held)
        logger.warning("copy holds an epoch that was rolled back", extra={**facts, "epoch": look.epoch})

    def _ahead(self, look: Look, held: Head) -> StoreAheadError:
        other = " (another one)" if look.epoch == held.epoch else ""
        hint = f"Bring the right table back, or delete {self._pipeline!r} from {look.place} if the table is right."
        if held.committed is not None:
            hint += f" Units that were set aside: firnline staging --discard-from {held.epoch + 1}."
        return StoreAheadError(
            f"{_name(look)} holds epoch {look.epoch} of {self._pipeline!r}{other},"
            f" but {self._sink_place} holds epoch {held.epoch}",
            hint=hint,
            store=look.place,
            epoch=look.epoch,
            sink_epoch=held.epoch,
        )


def fits(record: CheckpointRecord, held: Head) -> bool:
    """Return whether a record has exactly the epoch and entry of the sink's head."""
    return held.entry is not None and record.epoch == held.epoch and same_entry(record.entry, entry_digest(held.entry))


def _name(look: Look) -> str:
    return f"the checkpoint store {look.place}" if look.path == "store" else f"the {look.path} tier {look.place}"
