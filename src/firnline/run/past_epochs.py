"""Walks a pipeline's history backwards, epoch by epoch, for a restore of operators' state.

The ledger tells it. Where an entry is missing or damaged, the checkpoint of that epoch is read from another copy that
its checksum proves: the commit in the deciding table's log, the store, a tier. Such a copy names the snapshots and
watermarks of the epoch. What the epoch read stands in the entry alone; an entry whose damage lies in its checkpoint is
made whole with the copy, and proven by its own checksum.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from firnline.checkpoint.codec import canonical, checksum, parse, short_number
from firnline.checkpoint.ledger import JUMPS, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, DamagedError, LedgerHoleError
from firnline.run.open_pipeline import Parts
from firnline.sinks.base import Held
from firnline.sinks.delta.table import Table
from firnline.stores.tiers import Place
from firnline.types import EntryRef, Json

logger = logging.getLogger(__name__)

_GOES_ON = frozenset(JUMPS) - {"fresh"}  # what they leave behind is what they went on from


@dataclass(frozen=True, slots=True)
class PastEpoch:
    """One epoch of the history. `entry` is None where only a copy of its checkpoint is intact."""

    checkpoint: Checkpoint
    kind: str
    previous: EntryRef | None
    jump: dict[str, Json] = field(default_factory=dict)
    entry: LedgerEntry | None = None

    @property
    def epoch(self) -> int:
        return self.checkpoint.epoch

    @property
    def is_read(self) -> bool:
        """Whether it read input: every other kind of epoch folds nothing."""
        return self.kind == "epoch"


class Past:
    """The history from an epoch that a sink holds backwards, read as far as it is needed."""

    def __init__(self, parts: Parts, held: Held) -> None:
        self._ledger = parts.ledger
        self._copies = _Copies(parts, held)
        self._next = held.entry
        self._entries = parts.ledger.entries(held.entry)
        self._ended = False
        self._problem = ""
        self.epochs: list[PastEpoch] = []  # newest first

    def get(self, number: int) -> PastEpoch | None:
        """The epoch that came so many before the newest; None where the history ends, or cannot be read on."""
        while len(self.epochs) <= number and not self._ended:
            found = self._read()
            if found is None:
                self._ended = True
            else:
                self.epochs.append(found)
                self._next = found.previous
        return self.epochs[number] if number < len(self.epochs) else None

    @property
    def reaches_beginning(self) -> bool:
        """Whether it was read to the very first epoch."""
        return self._ended and not self._problem and bool(self.epochs) and self.epochs[-1].previous is None

    @property
    def problem(self) -> str:
        """Why it could not be read to its beginning, for people."""
        return self._problem or "its older entries are folded"

    @property
    def began_afresh(self) -> bool:
        """Whether there is no state after the newest epoch: a fresh start, another tool's progress, or back to one."""
        number = 0
        while (found := self.get(number)) and found.kind in _GOES_ON and not found.checkpoint.state:
            number += 1
        return found is not None and found.kind in ("fresh", "baseline")

    def _read(self) -> PastEpoch | None:
        try:
            entry, _ = next(self._entries)
        except StopIteration:
            if self._next is None:
                return None
            try:  # what comes next is folded, or a repair of the ledger leads over it
                next(self._ledger.chain(self._next))
            except LedgerHoleError as error:
                return self._read_copy(self._next, error)
            return None
        except LedgerHoleError as error:
            assert self._next is not None
            return self._read_copy(self._next, error)
        return PastEpoch(entry.checkpoint, entry.kind, entry.previous, entry.jump, entry)

    def _read_copy(self, ref: EntryRef, error: LedgerHoleError) -> PastEpoch | None:
        found = self._copies.find(ref)
        if found is None:
            self._problem = error.message
            return None
        logger.warning("a copy stands in for a ledger entry", extra={"epoch": found.epoch, "reason": error.message})
        self._entries = self._ledger.entries(found.previous)
        if found.previous is None and found.kind != "fresh":
            self._problem = error.message
        return found


class _Copies:
    """Copies of checkpoints outside the ledger, each proven by its own checksum."""

    def __init__(self, parts: Parts, held: Held) -> None:
        self._parts = parts
        self._held = held
        self._commits: Iterator[dict[str, Json]] | None = None
        self._known: dict[int, dict[str, Json]] = {}  # by epoch: what the commit says

    def find(self, ref: EntryRef) -> PastEpoch | None:
        """The epoch whose ledger entry this was; None when no copy is intact, or what came before it is not known."""
        info = self._commit_of(ref.epoch) or {}
        checkpoint = self._checkpoint(ref, info)
        if checkpoint is None:
            return None
        entry = self._mend(ref, checkpoint)
        if entry is not None:
            return PastEpoch(checkpoint, entry.kind, entry.previous, entry.jump, entry)
        kind, jump = str(info.get("kind") or self._kind(ref)), dict(info.get("jump") or {})
        return PastEpoch(checkpoint, kind, self._previous(ref.epoch, kind, jump, info), jump)

    def _mend(self, ref: EntryRef, checkpoint: Checkpoint) -> LedgerEntry | None:
        """The entry with this checkpoint in the place of its own; None unless that gives the checksum that it had."""
        ledger, what = self._parts.ledger, f"ledger entry {ref.name}"
        data = next((data for found, data in ledger.candidates(ref.epoch) if found.name == ref.name), b"")
        try:
            mended = canonical({**parse(data, what), "checkpoint": checkpoint.to_json()})
            return LedgerEntry.from_bytes(mended, what) if checksum(mended) == ref.checksum else None
        except (CheckpointError, OSError, TypeError):
            return None

    def _checkpoint(self, ref: EntryRef, info: dict[str, Json]) -> Checkpoint | None:
        if self._held.entry == ref and self._held.checkpoint is not None:
            return self._held.checkpoint
        with contextlib.suppress(DamagedError, KeyError):
            found = Checkpoint.from_json(info["checkpoint"], f"the commit of epoch {ref.epoch}")
            if (found.pipeline, found.epoch) == (self._parts.options.name, ref.epoch):
                return found
        record = self._recorded(ref)
        return record[0] if record else None

    def _kind(self, ref: EntryRef) -> str:
        record = self._recorded(ref)
        return record[1] if record else ""

    def _recorded(self, ref: EntryRef) -> tuple[Checkpoint, str] | None:
        """What the store or a tier kept of the very entry."""
        places: tuple[Place, ...] = self._parts.recorder.places
        for place in places:
            with contextlib.suppress(OSError, CheckpointError, ValueError):
                found = place.search(ref.epoch, short_number(ref.checksum))
                if found is not None:
                    return found.checkpoint, found.kind
        return None

    def _previous(self, epoch: int, kind: str, jump: dict[str, Json], info: dict[str, Json]) -> EntryRef | None:
        """The entry that the history goes on from. A commit of an older Firnline does not name it, but its epoch."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return EntryRef.from_json(info["previous"])
        if kind in ("fresh", ""):
            return None
        before = self._commit_of(int(jump["to_epoch"]) if "to_epoch" in jump else epoch - 1) or {}
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return EntryRef.from_json(before["entry"])
        return None

    def _commit_of(self, epoch: int) -> dict[str, Json] | None:
        """What the deciding table's log says of an epoch; numbers are never used twice."""
        if self._commits is None:
            self._commits = self._scan()
        while epoch not in self._known:
            info = next(self._commits, None)
            if info is None:
                return None
            self._known.setdefault(int(info["epoch"]), info)
        return self._known[epoch]

    def _scan(self) -> Iterator[dict[str, Json]]:
        sink = self._parts.deciding
        table = Table(sink.table.uri, sink.table.storage_options or {})  # a handle of its own: others commit by theirs
        if not table.refresh():
            return
        for commit in sink.log.backwards(table.version):
            info = commit.find_info(self._parts.options.name)
            if info is not None and isinstance(info.get("epoch"), int) and "checkpoint" in info:
                yield info
