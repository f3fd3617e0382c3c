"""The reports of a run. The progress display, the log lines and the metrics are observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from firnline.errors import FirnlineError, LedgerHoleError
from firnline.rescued import Rescued
from firnline.sinks.base import Head
from firnline.sources.base import Backlog, LogLag, SnapshotProgress
from firnline.sources.group import EpochPlan
from firnline.stores.replicator import Replication
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class EpochFacts:
    """One epoch, committed to the deciding sink."""

    epoch: int
    attempt: str
    sink: str
    version: int
    files: int  # inputs that were read or tried; those that the epoch did not reach do not count
    records: int  # read, including bad records
    rows: int  # in the sink `rows_in`
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
    sink_rows: dict[str, int] = field(default_factory=dict)  # by sink, if there are several: rows staged for it
    followers: frozenset[str] = frozenset()  # sinks that get their rows after the commit, from the outbox
    filtered: frozenset[str] = frozenset()  # those of them that deliver only rows that fulfil a condition
    durations_ms: dict[str, int] = field(default_factory=dict)  # plan, run, stage, commit; checkpoint, of state
    sources: dict[str, int] = field(default_factory=dict)  # records by source
    align_ms: int = 0  # from the first source's slice to the boundary
    operators: dict[str, dict[str, Json]] = field(default_factory=dict)  # what each stateful operator did
    rescued: tuple[Rescued, ...] = ()  # values in `_rescued_data`, by source and column
    files_again: int = 0  # of `files`: inputs that an earlier epoch of this run began, too
    files_failed: int = 0  # beside `files`: inputs of which nothing could be read
    rows_in: str = ""  # the deciding sink; if the journal decides, the first sink of the spec
    upserted: frozenset[str] = frozenset()  # sinks whose rows are change rows
    changes: Mapping[str, int] = field(default_factory=dict)  # of an upsert, if known: rows inserted, updated, deleted
    is_staged: bool = False  # in a two-stage table: the committer has not committed it yet


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing full listings with the ledger; `late`, `changed` and `grown` leave out what an earlier
    one reported."""

    late: int = 0
    changed: list[str] = field(default_factory=list)  # replaced after they were read
    grown: list[str] = field(default_factory=list)
    listed: int = 0
    all_changed: int = 0
    all_grown: int = 0
    all_incomplete: int = 0  # files whose last line is left until it is complete


def took_ms(durations_ms: Mapping[str, int]) -> int:
    """Return how long an epoch took, from its steps. The pause for a checkpoint of state is part of `run`."""
    return sum(ms for step, ms in durations_ms.items() if step != "checkpoint")


@dataclass(frozen=True, slots=True)
class SinkLag:
    """How far a sink that follows the deciding one is behind it."""

    sink: str
    epoch: int  # the newest that it holds
    epochs_behind: int
    bytes_behind: int  # in the outbox; 0 if its rows wait elsewhere
    set_aside: bool = False


class Observer:
    """Override the methods that you need. The run calls them from its main thread, so they must not block."""

    def started(self, run: str, held: Head) -> None:
        """The run has read its sinks; `held` is the head of the deciding one."""

    def claimed(self, generation: int) -> None:
        """The run owns the pipeline now."""

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        """A slice is fixed. Its job starts once the previous one has ended."""

    def running(self, epoch: int) -> None:
        """The Spark job of an epoch has started."""

    def ran(self, epoch: int, seconds: float) -> None:
        """The Spark job of an epoch has ended."""

    def committed(self, facts: EpochFacts) -> None:
        """The deciding sink holds an epoch; in a two-stage table it is staged."""

    def recorded(self, epoch: int) -> None:
        """Every checkpoint up to this epoch is recorded: the store has it, and the tiers get it."""

    def delivered(self, sink: str, epoch: int) -> None:
        """A further sink holds an epoch; in a two-stage table it is staged."""

    def values_rescued(self, sink: str, epoch: int, found: Sequence[Rescued]) -> None:
        """A further sink rescued values of an epoch that it holds now, because they do not fit its own columns."""

    def sinks(self, lags: Sequence[SinkLag]) -> None:
        """The deciding sink or another one holds a further epoch; reports how far the others are behind."""

    def log_committed(self, epoch: int) -> None:
        """The committer has committed every epoch of a two-stage table up to this one."""

    def backlog(self, backlog: Backlog) -> None:
        """How much input waits to be read, counted at intervals."""

    def log_lags(self, lags: Mapping[str, LogLag]) -> None:
        """How far sources that read the log of a server are behind it, by source; measured at intervals."""

    def snapshots(self, progress: Mapping[str, Mapping[str, SnapshotProgress]]) -> None:
        """How far the rows of captured tables have been read, by source and table; told at intervals."""

    def reconciled(self, found: Comparison) -> None:
        """A full listing was compared with the ledger."""

    def too_young(self, files: int, seconds: float) -> None:
        """Nothing else is left to read, and the run waits until these files are old enough to be whole."""

    def sources(self, unreachable: Mapping[str, str | None]) -> None:
        """A source cannot be reached, or can be again; by source, why it cannot."""

    def ledger_hole(self, error: LedgerHoleError | None) -> None:
        """A hole in the ledger hides which files are late; None: the hole is closed."""

    def idle(self) -> None:
        """There is nothing to read. The run waits for the next poll."""

    def held_up(self, full: tuple[int, int] | None) -> None:
        """Back-pressure: pending units and bytes that the committer must commit first; None once there is room
        again."""

    def paused(self, paused: bool) -> None:
        """The run was paused or resumed. While paused it plans nothing, and epochs in flight complete."""

    def replication(self, lag: Replication) -> None:
        """A write to the remote tier succeeded or failed; reports how far the tier is behind."""

    def copies(self, lags: Sequence[Replication]) -> None:
        """A write to the store or a tier succeeded or failed; reports how far each copy is behind."""

    def draining(self, lag: Replication) -> None:
        """The run has ended and only waits for this tier to catch up."""

    def worker_lost(self, facts: dict[str, Json]) -> None:
        """A worker died, and its task with it. `facts` has the epoch, the reaction and the new number of shards."""

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        """Something failed. The run retries after a back-off; `optional` is the sink that failed, if it is optional:
        it is tried again whatever the error."""

    def resting(self, seconds: float, failures: int, optional: str = "") -> None:
        """The back-off after `failures` consecutive failures has started; `optional` is the sink that failed, if it
        holds up nobody and is tried without end."""

    def left_staged(self, epochs: int, table: str, behind: list[str]) -> None:
        """The run ends. `epochs` epochs wait for the table's committer; the sinks `behind` wait for the next run."""

    def stopped(self, exit_code: int) -> None:
        """The run is over."""


class Observers(Observer):
    """Combines several observers: every call goes to each of them, in order."""

    def __init__(self, *observers: Observer) -> None:
        for name in vars(Observer):
            if not name.startswith("_"):
                setattr(self, name, partial(_call_each, [getattr(observer, name) for observer in observers]))


def _call_each(methods: Sequence[Callable[..., None]], *arguments: object) -> None:
    for method in methods:
        method(*arguments)
