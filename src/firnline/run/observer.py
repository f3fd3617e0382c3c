"""What a run tells about itself while it runs: the progress display, log lines and metrics listen here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from firnline.errors import FirnlineError, LedgerHoleError
from firnline.sinks.base import Head
from firnline.sources.base import Backlog
from firnline.sources.group import EpochPlan
from firnline.stores.replicator import Replication
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """One epoch, committed to one sink."""

    epoch: int
    attempt: str
    sink: str
    version: int
    files: int
    records: int  # read, bad ones included
    rows: int
    bad: dict[str, int]  # reason -> records
    bytes_read: int
    raw_bytes: int
    staged_files: int
    staged_bytes: int
    late_files: int
    checkpoint_bytes: int
    state_files: int  # entries in the source's position
    set_aside: int
    lag_seconds: float = 0.0  # from the arrival of its oldest file to the commit
    durations_ms: dict[str, int] = field(default_factory=dict)  # plan, run, stage, commit; checkpoint, of state
    sources: dict[str, int] = field(default_factory=dict)  # records by source
    align_ms: int = 0  # from the first source's slice to the boundary
    operators: dict[str, dict[str, Json]] = field(default_factory=dict)  # what each stateful operator did
    is_staged: bool = False  # in a two-stage table: a committer has yet to commit it


def took_ms(durations_ms: Mapping[str, int]) -> int:
    """How long an epoch took, from its steps; the pause for a checkpoint of state is a part of `run`."""
    return sum(ms for step, ms in durations_ms.items() if step != "checkpoint")


class Observer:
    """Override what you want to hear of. Calls come from the run's main thread, and must not block."""

    def started(self, run: str, held: Head) -> None:
        """The sinks have been read; `held` is what the deciding one holds."""

    def claimed(self, generation: int) -> None:
        """The run owns the pipeline now."""

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        """A slice is fixed; its job starts when the one before has ended."""

    def running(self, epoch: int) -> None:
        """The Spark job of an epoch has started."""

    def ran(self, epoch: int, seconds: float) -> None:
        """The Spark job of an epoch has ended."""

    def committed(self, facts: EpochFacts) -> None:
        """The deciding sink holds an epoch; in a two-stage table it is staged."""

    def log_committed(self, epoch: int) -> None:
        """The committer has committed every epoch of a two-stage table up to this one."""

    def backlog(self, backlog: Backlog) -> None:
        """What waits to be read, counted now and then."""

    def reconciled(self, late: int, changed: list[str], listed: int) -> None:
        """A full listing was compared with the ledger."""

    def ledger_hole(self, error: LedgerHoleError | None) -> None:
        """Late files cannot be told from processed ones, because of a hole in the ledger; None: they can again."""

    def idle(self) -> None:
        """Nothing to read; waits for the next poll."""

    def held_up(self, full: tuple[int, int] | None) -> None:
        """Back-pressure: pending units and bytes that the committer must take first; None when there is room again."""

    def paused(self, paused: bool) -> None:
        """The run was paused: nothing more is planned, what is in flight completes; or it was resumed."""

    def replication(self, lag: Replication) -> None:
        """The remote tier was written, or could not be: how far it is behind."""

    def copies(self, lags: Sequence[Replication]) -> None:
        """The store or a tier was written, or could not be: how far each of them is behind."""

    def draining(self, lag: Replication) -> None:
        """The run is over but for a tier that it waits for."""

    def worker_lost(self, facts: dict[str, Json]) -> None:
        """A task was lost with its worker: the epoch, what is done about it, and how many shards there are now."""

    def trouble(self, error: FirnlineError, failures: int) -> None:
        """Something failed and is tried again after a back-off."""

    def resting(self, seconds: float, failures: int) -> None:
        """The back-off after so many failures in a row has begun."""

    def left_staged(self, epochs: int, table: str, behind: list[str]) -> None:
        """The run ends while so many epochs wait for the committer of a table, and these sinks for the next run."""

    def stopped(self, exit_code: int) -> None:
        """The run is over."""


class Observers(Observer):
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, run: str, held: Head) -> None:
        for o in self._observers:
            o.started(run, held)

    def claimed(self, generation: int) -> None:
        for o in self._observers:
            o.claimed(generation)

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        for o in self._observers:
            o.planned(epoch, plan)

    def running(self, epoch: int) -> None:
        for o in self._observers:
            o.running(epoch)

    def ran(self, epoch: int, seconds: float) -> None:
        for o in self._observers:
            o.ran(epoch, seconds)

    def committed(self, facts: EpochFacts) -> None:
        for o in self._observers:
            o.committed(facts)

    def log_committed(self, epoch: int) -> None:
        for o in self._observers:
            o.log_committed(epoch)

    def backlog(self, backlog: Backlog) -> None:
        for o in self._observers:
            o.backlog(backlog)

    def reconciled(self, late: int, changed: list[str], listed: int) -> None:
        for o in self._observers:
            o.reconciled(late, changed, listed)

    def ledger_hole(self, error: LedgerHoleError | None) -> None:
        for o in self._observers:
            o.ledger_hole(error)

    def idle(self) -> None:
        for o in self._observers:
            o.idle()

    def held_up(self, full: tuple[int, int] | None) -> None:
        for o in self._observers:
            o.held_up(full)

    def paused(self, paused: bool) -> None:
        for o in self._observers:
            o.paused(paused)

    def replication(self, lag: Replication) -> None:
        for o in self._observers:
            o.replication(lag)

    def copies(self, lags: Sequence[Replication]) -> None:
        for o in self._observers:
            o.copies(lags)

    def draining(self, lag: Replication) -> None:
        for o in self._observers:
            o.draining(lag)

    def worker_lost(self, facts: dict[str, Json]) -> None:
        for o in self._observers:
            o.worker_lost(facts)

    def trouble(self, error: FirnlineError, failures: int) -> None:
        for o in self._observers:
            o.trouble(error, failures)

    def resting(self, seconds: float, failures: int) -> None:
        for o in self._observers:
            o.resting(seconds, failures)

    def left_staged(self, epochs: int, table: str, behind: list[str]) -> None:
        for o in self._observers:
            o.left_staged(epochs, table, behind)

    def stopped(self, exit_code: int) -> None:
        for o in self._observers:
            o.stopped(exit_code)
