"""Makes checkpoints, and with each the floor: the oldest epoch that a rollback may still reach."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime, timedelta

from firnline.checkpoint.model import Checkpoint
from firnline.errors import LedgerHoleError
from firnline.run.flight import Base
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.operator_state import StateKeeper
from firnline.schema import fingerprint, schema_to_json
from firnline.sinks.base import Head
from firnline.sources.group import Positions

logger = logging.getLogger(__name__)

KEPT_FLOORS = 4096  # more units than ever wait for a committer that works


class CheckpointMaker:
    """The checkpoints of one run. `slowest` is the epoch of the sink that lags most, kept up to date by the runner."""

    def __init__(self, pipeline: OpenPipeline, run: str, state: StateKeeper) -> None:
        self._state = state
        self._pipeline = pipeline
        self._run = run
        self._window = RollbackWindow(pipeline.options.checkpoint.rollback_window)
        self._floors: dict[int, int] = {}  # of the newest epochs
        self._positions: dict[int, Positions] = {}  # from the floor on, when a source wants to be told
        self._through = {  # sources whose rows go through operators: no table tells their columns
            name
            for operator in pipeline.options.operators
            for name in operator.inputs
            if name in pipeline.sources.names
        }
        self.slowest = 0

    def begin(self, held: Head) -> None:
        """Go on from what the deciding sink holds."""
        keeps_positions = self._pipeline.sources.want_acknowledgement
        if held.checkpoint is not None and (self._window.needs_history or self._state.has_state or keeps_positions):
            past = self._since_floor(held)
            self._positions = {one.epoch: one.positions for one in past} if keeps_positions else {}
            self._window.begin(past)
            self._state.floor.begin(past)

    def note_committed(self, committed: Head) -> None:
        """What a staged sink's log holds: its floor is the one that counts until more is committed."""
        self._floors[committed.epoch] = committed.checkpoint.floor if committed.checkpoint else 0

    def make(
        self,
        epoch: int,
        attempt: str,
        generation: int,
        after: Base,
        before: Checkpoint | None,
    ) -> Checkpoint:
        """The checkpoint after an epoch. The floor only grows, and stays at or below what every copy and sink holds."""
        columns = fingerprint(after.table) if after.table is not None else ""
        version, floor = (before.schema_version, before.floor) if before else (0, 0)
        if before is None or columns != before.schema_fingerprint:
            version += 1
        now = self._pipeline.clock.now()
        settled = [found for sink in self._pipeline.sinks if (found := sink.settled_epoch()) is not None]
        settled += [found for found in (self._pipeline.recorder.remote_epoch,) if found is not None]
        oldest = min(self._window.oldest(epoch, now), self.slowest, *settled)
        if self._state.remote is not None:
            oldest = self._state.remote.below(oldest)
        return Checkpoint(
            pipeline=self._pipeline.options.name,
            epoch=epoch,
            generation=generation,
            run=self._run,
            attempt=attempt,
            created_at=now.isoformat(),
            positions=after.positions,
            state=after.snapshots,
            watermarks=after.watermarks.to_json(),
            columns={name: schema_to_json(after.columns[name]) for name in self._through if name in after.columns},
            schema_fingerprint=columns,
            schema_version=version,
            floor=max(floor, self._state.floor.below(oldest, epoch, after.snapshots)),
            deciding=self._pipeline.deciding.identity,
        )

    def add(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is staged."""
        self._window.add(checkpoint)
        if self._pipeline.sources.want_acknowledgement:
            self._positions[checkpoint.epoch] = checkpoint.positions
        kept = {epoch: floor for epoch, floor in self._floors.items() if epoch > checkpoint.epoch - KEPT_FLOORS}
        self._floors = kept | {checkpoint.epoch: checkpoint.floor}

    def committed_floor(self, tip: Checkpoint) -> int:
        """The floor that the deciding sink's newest commit names: pending units may still be taken back."""
        settled = self._pipeline.deciding.settled_epoch()
        if settled is None or settled >= tip.epoch:
            return tip.floor
        known = [epoch for epoch in self._floors if epoch <= settled]
        return self._floors[max(known)] if known else 0

    def acknowledged_positions(self, tip: Checkpoint) -> Positions | None:
        """The positions below which nothing is needed any more; None while nobody knows them.

        They are those of the floor or of what the remote tier holds, whichever is older.
        """
        remote, floor = self._pipeline.recorder.remote_epoch, self.committed_floor(tip)
        oldest = floor if remote is None else min(floor, remote)
        passed = sorted(epoch for epoch in list(self._positions) if epoch <= oldest)
        for epoch in passed[:-1]:  # in place: another lane adds to it
            del self._positions[epoch]
        return self._positions[passed[-1]] if passed else None

    def _since_floor(self, held: Head) -> list[Checkpoint]:
        """The checkpoints that one may still go back to, oldest first; what a hole hides is not offered."""
        found: list[Checkpoint] = []
        floor = held.checkpoint.floor if held.checkpoint else 0
        try:
            for entry in self._pipeline.entries(held.entry):
                if entry.epoch < floor:
                    break
                found.append(entry.checkpoint)
        except LedgerHoleError as error:
            logger.warning("the ledger has a hole", extra={"reason": error.message})
        return found[::-1]


class RollbackWindow:
    """Tells the oldest epoch that must stay reachable; a part of the floor. Pure: told of every checkpoint."""

    def __init__(self, window: int | timedelta) -> None:
        self._window = window
        self._epochs: list[int] = []
        self._times: list[datetime] = []

    @property
    def needs_history(self) -> bool:
        """Whether it must be told of the checkpoints from the floor on before the first question."""
        return isinstance(self._window, timedelta)

    def begin(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Forget everything and take these, oldest first."""
        self._epochs, self._times = [], []
        for checkpoint in checkpoints:
            self.add(checkpoint)

    def add(self, checkpoint: Checkpoint) -> None:
        """Take the next checkpoint. A clock that goes back never shortens the way: times count as they rise."""
        if self.needs_history:
            made = datetime.fromisoformat(checkpoint.created_at)
            self._times.append(max(made, self._times[-1]) if self._times else made)
            self._epochs.append(checkpoint.epoch)

    def oldest(self, epoch: int, now: datetime) -> int:
        """The oldest epoch that the window keeps when `epoch` is made `now`: the state of any time in it is there."""
        if isinstance(self._window, int):
            return epoch - self._window
        at = bisect_right(self._times, now - self._window)
        if at == 0:
            return 0  # nothing known is that old
        del self._epochs[: at - 1], self._times[: at - 1]
        return self._epochs[0]
