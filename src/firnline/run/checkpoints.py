"""Makes checkpoints, each with its floor: the oldest epoch that a rollback may still reach.

The floor is the smallest of these epochs: the start of the rollback window, the oldest head of a sink or copy, the
records of a topology's snapshots and, with state, the oldest snapshot that a restore needs.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta

from firnline.checkpoint.codec import canonical, checksum
from firnline.checkpoint.model import Checkpoint
from firnline.errors import LedgerHoleError
from firnline.graph import follower_ports, operator_ports
from firnline.run.commits import settled_epoch
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.operator_state import OperatorStates
from firnline.run.outbox import Outbox
from firnline.run.progress import Base
from firnline.schema import fingerprint, own_columns, schema_to_json
from firnline.sinks.base import Head
from firnline.sources.group import Positions
from firnline.state.manifest import SnapshotRef
from firnline.topology.decide import limit_floor
from firnline.topology.records import held_records
from firnline.types import Json

logger = logging.getLogger(__name__)

KEPT_FLOORS = 4096  # more units than can ever wait for a working committer


class CheckpointMaker:
    """Makes the checkpoints of one run. `slowest_sink` gives the epoch of the sink that lags most.

    `states` is None for a pipeline without stateful operators.
    """

    def __init__(
        self,
        pipeline: OpenPipeline,
        run: str,
        states: OperatorStates | None,
        slowest_sink: Callable[[], int],
        outbox: Outbox,
    ) -> None:
        self._pipeline = pipeline
        self._states = states
        self._state_floor = StateFloor(states.feeds) if states is not None else None
        self._slowest_sink = slowest_sink
        self._outbox = outbox
        self._run = run
        self._window = RollbackWindow(pipeline.options.checkpoint.rollback_window)
        self._floors: dict[int, int] = {}  # of the newest epochs
        self._positions: dict[int, Positions] = {}  # from the floor on, if a source wants acknowledgements
        self._ports = operator_ports(pipeline.options) | follower_ports(pipeline.options)

    def begin(self, head: Head) -> None:
        """Continue from the head of the deciding sink."""
        keeps_positions = self._pipeline.sources.want_acknowledgement
        needs_history = self._window.needs_history or self._state_floor is not None or keeps_positions
        if head.checkpoint is not None and needs_history:
            past = self._since_floor(head)
            checkpoints = [one for one, _ in past]
            self._positions = {one.epoch: one.positions for one in checkpoints} if keeps_positions else {}
            self._window.begin(past)
            if self._state_floor is not None:
                self._state_floor.begin(checkpoints)

    def note_committed(self, committed: Head) -> None:
        """Record what the log of a staged sink holds. Its floor counts until the committer commits more."""
        self._floors[committed.epoch] = committed.checkpoint.floor if committed.checkpoint else 0

    def make(
        self,
        epoch: int,
        attempt: str,
        generation: int,
        after: Base,
        before: Checkpoint | None,
        *,
        is_idle: bool = False,
    ) -> Checkpoint:
        """Return the checkpoint after an epoch. The floor only rises, and never above the head of a copy or sink.

        `is_idle`: the epoch only moves positions.
        """
        known = {
            port: schema_to_json(own_columns(after.columns[port])) for port in self._ports if port in after.columns
        }
        columns = fingerprint(after.table) if after.table is not None else ""
        if self._pipeline.options.journal is not None:
            columns = checksum(canonical(known))[:16]
        version, floor = (before.schema_version, before.floor) if before else (0, 0)
        if before is None or columns != before.schema_fingerprint:
            version += 1
        now = self._pipeline.clock.now()
        limits = [self._pipeline.recorder.remote_epoch, *(settled_epoch(sink) for sink in self._pipeline.sinks)]
        oldest = min(
            self._window.oldest(epoch, now, is_idle=is_idle),
            self._slowest_sink(),
            *(limit for limit in limits if limit is not None),
        )
        oldest = limit_floor(oldest, held_records(after.topology).values())
        if self._states is not None and self._states.remote is not None:
            oldest = self._states.remote.below(oldest)
        if self._state_floor is not None:
            oldest = self._state_floor.below(oldest, epoch, after.snapshots)
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
            columns=known,
            schema_fingerprint=columns,
            schema_version=version,
            floor=max(floor, oldest),
            deciding=self._pipeline.deciding.identity,
            sinks=self._outbox.remember(before, epoch),
            topology=after.topology,
        )

    def add(self, checkpoint: Checkpoint, *, is_idle: bool = False) -> None:
        """Record the floor of a staged checkpoint."""
        self._window.add(checkpoint, is_idle=is_idle)
        if self._pipeline.sources.want_acknowledgement:
            self._positions[checkpoint.epoch] = checkpoint.positions
        kept = {epoch: floor for epoch, floor in self._floors.items() if epoch > checkpoint.epoch - KEPT_FLOORS}
        self._floors = kept | {checkpoint.epoch: checkpoint.floor}

    def committed_floor(self, tip: Checkpoint) -> int:
        """Return the floor in the deciding sink's newest commit: pending units may still be taken back."""
        settled = self._pipeline.deciding.settled_epoch()
        if settled is None or settled >= tip.epoch:
            return tip.floor
        known = [epoch for epoch in self._floors if epoch <= settled]
        return self._floors[max(known)] if known else 0

    def acknowledged_positions(self, tip: Checkpoint) -> tuple[Positions | None, bool]:
        """Return the positions below which no input is needed any more; None while they are unknown.

        They are the positions of the floor or of the remote tier's epoch, whichever is older. Also returns whether the
        remote tier is the older one: then the positions rise when it catches up, without another epoch.
        """
        remote, floor = self._pipeline.recorder.remote_epoch, self.committed_floor(tip)
        oldest = floor if remote is None else min(floor, remote)
        positions = self._positions  # a claim replaces it
        passed = sorted(epoch for epoch in list(positions) if epoch <= oldest)
        for epoch in passed[:-1]:  # delete in place: another lane adds entries
            del positions[epoch]
        return (positions[passed[-1]] if passed else None), oldest < floor

    def _since_floor(self, head: Head) -> list[tuple[Checkpoint, bool]]:
        """Return the checkpoints that a rollback may still reach, oldest first, without those behind a ledger hole;
        each with whether its epoch only moved positions."""
        found: list[tuple[Checkpoint, bool]] = []
        floor = head.checkpoint.floor if head.checkpoint else 0
        try:
            for entry in self._pipeline.entries(head.entry):
                if entry.epoch < floor:
                    break
                found.append((entry.checkpoint, entry.is_idle))
        except LedgerHoleError as error:
            logger.warning("the ledger has a hole", extra={"reason": error.message})
        return found[::-1]


class RollbackWindow:
    """Finds the oldest epoch that must stay reachable, one part of the floor. Pure; it needs every checkpoint.

    A window in epochs does not count those that only moved positions.
    """

    def __init__(self, window: int | timedelta) -> None:
        self._window = window
        self._epochs: list[int] = []
        self._times: list[datetime] = []
        self._idle: list[int] = []  # epochs that only moved positions, in order

    @property
    def needs_history(self) -> bool:
        """Return whether it needs the checkpoints from the floor on before `oldest` is called."""
        return isinstance(self._window, timedelta)

    def begin(self, checkpoints: Iterable[tuple[Checkpoint, bool]]) -> None:
        """Start over with these checkpoints, oldest first; each with whether its epoch only moved positions."""
        self._epochs, self._times, self._idle = [], [], []
        for checkpoint, is_idle in checkpoints:
            self.add(checkpoint, is_idle=is_idle)

    def add(self, checkpoint: Checkpoint, *, is_idle: bool = False) -> None:
        """Add the next checkpoint. Times never decrease, so a clock that goes back does not shorten the window."""
        if not self.needs_history:
            kept = [epoch for epoch in self._idle if checkpoint.floor < epoch < checkpoint.epoch]
            self._idle = [*kept, checkpoint.epoch] if is_idle else kept
        if self.needs_history:
            made = datetime.fromisoformat(checkpoint.created_at)
            self._times.append(max(made, self._times[-1]) if self._times else made)
            self._epochs.append(checkpoint.epoch)

    def oldest(self, epoch: int, now: datetime, *, is_idle: bool = False) -> int:
        """Return the oldest epoch that the window keeps if `epoch` is made at `now`.

        The window covers the state at every time within it.
        """
        if isinstance(self._window, int):
            found = epoch - self._window - is_idle
            for idle in reversed(self._idle):
                if idle <= found:
                    break
                found -= 1
            return found
        at = bisect_right(self._times, now - self._window)
        if at == 0:
            return 0  # every known checkpoint is newer
        del self._epochs[: at - 1], self._times[: at - 1]
        return self._epochs[0]


class StateFloor:
    """Keeps the floor at or below every epoch whose state a later restore needs.

    An operator restores its newest snapshot that is no newer than those of the operators it feeds. An epoch may
    therefore depend on snapshots older than the newest ones of its time.
    """

    def __init__(self, feeds: Mapping[str, Iterable[str]]) -> None:
        """Take the stateful operators in topological order, each with the stateful operators that its rows reach."""
        self._feeds = {name: list(fed) for name, fed in feeds.items()}
        self._snapshots: dict[str, list[int]] = {name: [] for name in feeds}  # ascending epochs
        self._stands_on: dict[int, int] = {}

    def begin(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Start over with the known checkpoints, oldest first."""
        self._snapshots = {name: [] for name in self._feeds}
        self._stands_on = {}
        for one in checkpoints:
            self._add(one.epoch, one.state)

    def below(self, floor: int, epoch: int, snapshots: Mapping[str, Json]) -> int:
        """Return the newest epoch at or below `floor` that keeps everything a restore needs.

        Called once for every checkpoint, with its state references.
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
                elif made < known[-1]:  # after a rollback, later snapshots are no longer part of the history
                    self._snapshots[name] = [*known[: bisect_right(known, made)]]
        self._stands_on[epoch] = self._oldest(epoch)

    def _oldest(self, epoch: int) -> int:
        """Return the oldest snapshot, over all operators, that a restore after this epoch starts from."""
        bases: dict[str, int] = {}
        for name in reversed(list(self._feeds)):
            limit = min((bases[fed] for fed in self._feeds[name] if fed in bases), default=epoch)
            known = self._snapshots[name]
            at = bisect_right(known, limit)
            bases[name] = known[at - 1] if at else 0
        return min(bases.values(), default=epoch)
