"""Decides which pending units may be committed now, which wait, which are forks. Pure.

Units of one pipeline form a chain: each names the previous ledger entry. The log has the end of the committed chain,
the generation that owns the pipeline, and the tip that its claim adopted. A unit of that generation counts. A unit of
an earlier one counts only on the path to that tip. Everything else beyond the log is a fork, with its descendants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from firnline.names import entry_txn, epoch_txn, generation_txn, tip_epoch_txn, tip_txn
from firnline.sinks.delta.table import Table


class Link(Protocol):
    """The facts of a unit that the arrangement needs."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def digest(self) -> int: ...
    @property
    def previous_digest(self) -> int | None: ...


U = TypeVar("U", bound=Link)


@dataclass(frozen=True, slots=True)
class LogHead:
    """The log's head of one pipeline, at one version."""

    epoch: int = 0
    entry: int | None = None  # digest of the newest committed entry
    generation: int = 0
    tip_epoch: int = 0  # the tip that the newest claim adopted
    tip: int | None = None


@dataclass(slots=True)
class Arranged(Generic[U]):
    """The pending units of one pipeline, arranged."""

    after_epoch: int = 0  # the log's epoch
    ready: list[U] = field(default_factory=list)  # in order, each onto the one before
    waiting: list[U] = field(default_factory=list)  # valid, but something before them is missing
    forks: list[U] = field(default_factory=list)
    past: list[U] = field(default_factory=list)  # at or below the log's epoch: already committed, or forks
    repeats: list[U] = field(default_factory=list)  # a ready unit's entry again: past once that one is committed

    @property
    def gap(self) -> tuple[int, int] | None:
        """The missing epochs: first and last."""
        if not self.waiting:
            return None
        present = {u.epoch for u in self.waiting}
        first = (self.ready[-1].epoch if self.ready else self.after_epoch) + 1
        while first in present:
            first += 1
        return first, min((epoch for epoch in present if epoch > first), default=first + 1) - 1


def arrange(log_head: LogHead, units: Sequence[U]) -> Arranged[U]:
    """Arrange the pending units of one pipeline. A unit that is missing from a listing may still appear: its successors
    wait."""
    out: Arranged[U] = Arranged(after_epoch=log_head.epoch)
    beyond: list[U] = []
    for unit in sorted(units, key=lambda u: (u.epoch, u.name)):
        (out.past if unit.epoch <= log_head.epoch else beyond).append(unit)
    adopted, unknown_below = _adopted(log_head, beyond)
    onto: dict[tuple[int, int | None], list[U]] = {}
    for unit in beyond:
        if unit.generation >= log_head.generation or unit.digest in adopted:
            onto.setdefault((unit.epoch, unit.previous_digest), []).append(unit)
        elif unit.epoch < unknown_below:
            out.waiting.append(unit)  # may lie on the adopted path, of which a part is not listed
        else:
            out.forks.append(unit)
    at, epoch = log_head.entry, log_head.epoch
    while fitting := onto.pop((epoch + 1, at), None):
        chosen = max(fitting, key=lambda u: (u.generation, u.name))
        out.ready.append(chosen)
        # Two units of one epoch onto one predecessor: one is the chain, the other a fork.
        for unit in fitting:
            if unit is not chosen:
                (out.repeats if unit.digest == chosen.digest else out.forks).append(unit)
        at, epoch = chosen.digest, chosen.epoch
    _split_descendants(out, [unit for left in onto.values() for unit in left])
    return out


def _adopted(log_head: LogHead, units: Sequence[Link]) -> tuple[set[int], int]:
    """Return the digests on the path from the adopted tip of the newest claim down to the log, as far as it is listed.

    Below the second number the path is unknown: a part of it is not listed (yet).
    """
    if log_head.tip is None or log_head.tip_epoch <= log_head.epoch:
        return set(), 0
    by_digest = {u.digest: u for u in units}
    path: set[int] = set()
    at: int | None = log_head.tip
    lowest = log_head.tip_epoch + 1
    while at is not None and at != log_head.entry:
        unit = by_digest.get(at)
        if unit is None:
            return path, lowest
        path.add(at)
        at, lowest = unit.previous_digest, unit.epoch
    return path, 0


def _split_descendants(out: Arranged[U], left: list[U]) -> None:
    """Split units: those after a fork, or beside the committed chain, are forks; the rest waits for missing ones."""
    bad = {u.digest for u in out.forks}
    taken = {u.epoch for u in out.ready}
    for unit in sorted(left, key=lambda u: u.epoch):
        if unit.previous_digest in bad or unit.epoch in taken:
            out.forks.append(unit)
            bad.add(unit.digest)
        else:
            out.waiting.append(unit)


def read_log_head(table: Table, pipeline: str) -> LogHead:
    """Read epoch, entry, generation and adopted tip, all from one snapshot."""
    tip_epoch = table.txn(tip_epoch_txn(pipeline)) or 0
    return LogHead(
        epoch=table.txn(epoch_txn(pipeline)) or 0,
        entry=table.txn(entry_txn(pipeline)),
        generation=table.txn(generation_txn(pipeline)) or 0,
        tip_epoch=tip_epoch,
        tip=table.txn(tip_txn(pipeline)) if tip_epoch else None,
    )
