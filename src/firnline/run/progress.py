"""The state of a run between its steps: the head, the epochs in flight, and the base of each plan.

Steps run on several lanes and exchange values here. An epoch in flight is found by its attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.jobs.read_job import Produced
from firnline.jobs.watermarks import Watermarks
from firnline.run.requests import FileRequest
from firnline.sinks.base import Head
from firnline.sources.group import EpochPlan, Positions, Records, Sources
from firnline.state.manifest import OperatorState
from firnline.types import EntryRef, Json, Receipt

KEPT_ENTRIES = 8
KEPT_RECEIPTS = 8


@dataclass(frozen=True, slots=True)
class MissingEpoch:
    """An epoch that the restored state lacks and that must be folded again: its entry, and the base of its plan."""

    entry: LedgerEntry
    watermarks: Watermarks  # before it
    columns: dict[str, pa.Schema]  # before it
    columns_after: dict[str, pa.Schema]
    skip: frozenset[str] = frozenset()  # operators whose snapshot already includes it


@dataclass(slots=True)
class Base:
    """The base of a plan: an epoch that is committed or in flight."""

    epoch: int
    entry: EntryRef | None
    checkpoint: Checkpoint | None
    positions: Positions
    table: pa.Schema | None  # the deciding table's columns, None before it exists
    columns: dict[str, pa.Schema] = field(default_factory=dict)  # of each source, as far as they are known
    state: dict[str, OperatorState] = field(default_factory=dict)  # of each operator
    watermarks: Watermarks = field(default_factory=Watermarks)
    snapshots: dict[str, Json] = field(default_factory=dict)  # where each operator's newest complete snapshot lies
    topology: dict[str, Json] = field(default_factory=dict)  # the snapshots of topologies that it has recorded
    missing_epochs: list[MissingEpoch] = field(default_factory=list)  # epochs that the state lacks, oldest first


@dataclass(slots=True)
class EpochInFlight:
    """One epoch on its way from plan to commit."""

    epoch: int
    attempt: str
    base: str
    plan: EpochPlan
    epoch_time: str  # RFC 3339: the value of `epoch_time()`, also on every replay
    requests: list[FileRequest]  # that its plan answers
    topology: dict[str, Json] = field(default_factory=dict)  # what its checkpoint remembers of topologies' snapshots
    produced: Produced = field(default_factory=Produced)
    operators: dict[str, dict[str, Json]] = field(default_factory=dict)  # what each did, for people
    advanced: tuple[Positions, Records] | None = None  # see `advance`
    records: Records = field(default_factory=dict)
    entry: LedgerEntry | None = None
    ref: EntryRef | None = None
    durations_ms: dict[str, int] = field(default_factory=dict)

    def advance(self, sources: Sources, base: Base, produced: Produced) -> tuple[Positions, Records]:
        """Return the positions after this epoch, and the ledger's records of its input.

        Called once per epoch at the source, which remembers the files that failed.
        """
        if self.advanced is None:
            self.advanced = sources.advance(self.plan, base.positions, produced.outcomes, self.epoch)
        return self.advanced


class Progress:
    """The progress of one run. Several lanes use it at once, so each change is one assignment or one dict operation."""

    def __init__(self) -> None:
        self.bases: dict[str, Base] = {}
        self.epochs: dict[str, EpochInFlight] = {}
        self.generation = 0
        self.head = Head(exists=False, version=-1)
        self.baseline: LedgerEntry | None = None  # another tool's progress, before our first claim
        self.receipts: list[Receipt] = []
        self.recent: dict[int, tuple[LedgerEntry, EntryRef]] = {}  # decided entries that a further sink commits next
        self.reruns: set[str] = set()  # attempts that make rows of decided epochs again
        self.refs: dict[int, EntryRef] = {}  # older ones, read once a lagging sink needs one

    def in_flight(self, epoch: int) -> EpochInFlight:
        """Return the epoch in flight with this number."""
        return next(e for e in list(self.epochs.values()) if e.epoch == epoch)

    def decide(self, epoch: int, attempt: str) -> tuple[EpochInFlight | None, Receipt | None]:
        """Make an epoch that the deciding sink holds the head, and remove it from the epochs in flight."""
        receipt = next((r for r in reversed(self.receipts) if r.epoch == epoch), None)
        base = self.bases.get(attempt)
        if base is not None and base.entry is not None:
            self.head = Head(
                exists=True,
                version=receipt.version if receipt else self.head.version,
                generation=self.generation,
                epoch=epoch,
                entry=base.entry,
                checkpoint=base.checkpoint,
                path=self.head.path,
            )
        decided = self.epochs.pop(attempt, None)  # only now: until here a full listing sees it in flight
        if decided is not None and decided.entry is not None and decided.ref is not None:
            kept = {number: entry for number, entry in self.recent.items() if number > epoch - KEPT_ENTRIES}
            self.recent = {**kept, epoch: (decided.entry, decided.ref)}
        for known, old in list(self.bases.items()):  # delete in place: the next job may end now and add its own
            if old.epoch < epoch - 1:
                del self.bases[known]
        del self.receipts[:-KEPT_RECEIPTS]
        return decided, receipt
