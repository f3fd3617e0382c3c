"""How far back the state of an epoch reaches: the oldest snapshot that it would be made from again. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from firnline.checkpoint.model import Checkpoint
from firnline.state.manifest import SnapshotRef
from firnline.types import Json


class StateFloor:
    """Keeps the floor at or below what the state of every later epoch needs.

    An operator restores its newest snapshot that is no newer than those of the operators it feeds, so an epoch may
    stand on snapshots that are older than the newest ones at that time.
    """

    def __init__(self, feeds: Mapping[str, Iterable[str]]) -> None:
        """Take the stateful operators, each after those it reads, with the stateful operators that its rows reach."""
        self._feeds = {name: list(fed) for name, fed in feeds.items()}
        self._snapshots: dict[str, list[int]] = {name: [] for name in feeds}  # epochs, rising
        self._stands_on: dict[int, int] = {}

    def begin(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Forget everything and take the checkpoints that are known, oldest first."""
        self._snapshots = {name: [] for name in self._feeds}
        self._stands_on = {}
        for one in checkpoints:
            self._add(one.epoch, one.state)

    def below(self, floor: int, epoch: int, snapshots: Mapping[str, Json]) -> int:
        """The newest epoch at or below `floor` from which on everything is kept that a restore would need.

        Called once for every checkpoint, with what it says of the state.
        """
        if not self._feeds:
            return floor
        self._add(epoch, snapshots)
        known = [made for made in self._stands_on if made <= floor]
        if not known:
            return 0
        found = max(known)
        self._stands_on = {made: on for made, on in self._stands_on.items() if made >= found}
        on = min(self._stands_on[made] for made in self._stands_on)
        for name, epochs in self._snapshots.items():
            self._snapshots[name] = epochs[max(0, bisect_right(epochs, on) - 1) :]
        return min(found, on)

    def _add(self, epoch: int, snapshots: Mapping[str, Json]) -> None:
        for name in self._feeds:
            if name in snapshots:
                made, known = SnapshotRef.from_json(snapshots[name]).epoch, self._snapshots[name]
                if not known or known[-1] < made:
                    known.append(made)
                elif made < known[-1]:  # a rollback: what was made since is no part of the history any more
                    self._snapshots[name] = [*known[: bisect_right(known, made)]]
        self._stands_on[epoch] = self._oldest(epoch)

    def _oldest(self, epoch: int) -> int:
        """What a restore after this epoch would begin from, over all operators."""
        bases: dict[str, int] = {}
        for name in reversed(list(self._feeds)):
            limit = min((bases[fed] for fed in self._feeds[name] if fed in bases), default=epoch)
            known = self._snapshots[name]
            at = bisect_right(known, limit)
            bases[name] = known[at - 1] if at else 0
        return min(bases.values(), default=epoch)
