"""Which pending units may be committed now, which wait, which are forks. Pure.

Units of one pipeline form a chain: each names the ledger entry before it. The log says where the chain stands, which
generation holds the pipeline, and the tip that its claim adopted. A unit of that generation counts; a unit of an
earlier one counts only on the path to that tip. Everything else beyond the log is a fork, with its descendants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from firnline.staging.unit import Unit


@dataclass(frozen=True, slots=True)
class Standing:
    """What the log holds of one pipeline, under one version."""

    epoch: int = 0
    entry: int | None = None  # digest of the newest committed entry
    generation: int = 0
    tip_epoch: int = 0  # what the newest claim adopted
    tip: int | None = None


@dataclass(slots=True)
class Arranged:
    """The pending units of one pipeline, sorted out."""

    ready: list[Unit] = field(default_factory=list)  # in order, each onto the one before
    waiting: list[Unit] = field(default_factory=list)  # valid, but something before them is missing
    forks: list[Unit] = field(default_factory=list)
    past: list[Unit] = field(default_factory=list)  # at or below the log's epoch: committed already, or forks

    @property
    def gap(self) -> tuple[int, int] | None:
        """The epochs that are waited for: first and last."""
        if not self.waiting:
            return None
        reached = self.ready[-1].epoch if self.ready else self.waiting[0].epoch - 1
        first = min(u.epoch for u in self.waiting)
        return (reached + 1, first - 1) if first - 1 >= reached + 1 else (first, first)


def arrange(standing: Standing, units: Sequence[Unit]) -> Arranged:
    """Sort the pending units of one pipeline out."""
    out = Arranged()
    beyond: list[Unit] = []
    for unit in sorted(units, key=lambda u: (u.epoch, u.name)):
        (out.past if unit.epoch <= standing.epoch else beyond).append(unit)
    adopted = _adopted(standing, beyond)
    valid = [u for u in beyond if u.generation >= standing.generation or u.name in adopted]
    out.forks = [u for u in beyond if u.generation < standing.generation and u.name not in adopted]
    at = standing.entry
    left = list(valid)
    epoch = standing.epoch
    while True:
        fitting = [u for u in left if u.epoch == epoch + 1 and u.previous_digest == at]
        if not fitting:
            break
        chosen = max(fitting, key=lambda u: (u.generation, u.name))
        out.ready.append(chosen)
        # Two units of one epoch onto one predecessor: one is the chain, the other a fork.
        out.forks += [u for u in fitting if u is not chosen]
        left = [u for u in left if u not in fitting]
        at, epoch = chosen.digest, chosen.epoch
    _split_descendants(out, left)
    return out


def _adopted(standing: Standing, units: Sequence[Unit]) -> set[str]:
    """Names of the units on the path from the log to the tip that the newest claim adopted."""
    if standing.tip is None or standing.tip_epoch <= standing.epoch:
        return set()
    by_digest = {u.digest: u for u in units}
    path: set[str] = set()
    at: int | None = standing.tip
    while at is not None and at != standing.entry:
        unit = by_digest.get(at)
        if unit is None:
            return path  # the rest of the path is not listed yet; what is known of it still counts
        path.add(unit.name)
        at = unit.previous_digest
    return path


def _split_descendants(out: Arranged, left: list[Unit]) -> None:
    """What stands on a fork, or beside the committed chain, is a fork; the rest waits for what is missing."""
    bad = {u.digest for u in out.forks}
    taken = {u.epoch for u in out.ready}
    for unit in sorted(left, key=lambda u: u.epoch):
        if unit.previous_digest in bad or unit.epoch in taken:
            out.forks.append(unit)
            bad.add(unit.digest)
        else:
            out.waiting.append(unit)
