"""The complete contract of a sink: what runs, their jobs and history edits need from the destination of results.

A sink keeps, beside its rows, the checkpoint of each pipeline that writes to it: its head. One commit makes rows and
checkpoint true together. One sink of a pipeline decides (`options.find_deciding`), or its journal does: that commit
fixes an epoch. Every further sink gets exactly what was decided.

How a run uses a sink:
1. `load` reads the head, `claim` fences every older run and returns the head under the claim.
2. Tasks stage rows with the sink's `Stager`, which `stage_target` describes to them.
3. `commit` makes an epoch true. If the answer is lost, or after a crash, `find_receipt` returns whether it did.
4. `edit` carries out a history edit: an epoch that reads nothing, such as a rollback.
5. `maintain` does housekeeping between commits.

To write a sink, implement the abstract methods and set `capabilities`; the other methods have defaults that fit a sink
without that capability.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import pyarrow as pa

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import Ledger
from firnline.checkpoint.model import Checkpoint
from firnline.errors import ConfigError, FencedError, RollbackRefusedError, SinkError
from firnline.options import SchemaOptions, SinkOptions
from firnline.rescued import Rescued
from firnline.sinks.outbox import deliver, find_missing_staged
from firnline.storage import Storage
from firnline.stores.tiers import Tiers
from firnline.types import Clock, Delivery, EntryRef, Json, Receipt

# -- values -----------------------------------------------------------------------------------------------


FORBIDDEN = "forbidden"  # a field of a SchemaError: the spec forbids the columns, so that planning again does not help


class GoesBack(enum.Enum):
    """Whether a sink can remove rows again."""

    EXACTLY = "exactly"  # to any earlier version that it still has
    NOT_AT_ALL = "not-at-all"  # rows stay; a rollback leaves the sink unchanged, or is refused


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a kind of sink. `open_sinks` checks them against the spec before a run starts."""

    delivery: Delivery
    decides: bool = False  # whether its commit can fix an epoch: atomic with the checkpoint, conditional on the fence
    goes_back: GoesBack = GoesBack.NOT_AT_ALL
    upserts: bool = False  # whether it applies change rows by key (`write: upsert`)
    fed_from_outbox: bool = False  # whether it is delivered from the outbox, see `sinks.follower`
    has_columns: bool = True  # whether it knows its columns, so that `find_schema` returns them
    replaces: bool = False  # whether a copy of a table takes the place of the rows that it wrote before, atomically


# Positions and a ledger entry's inputs, both per source -> positions after that epoch.
Replay: TypeAlias = Callable[[dict[str, Json], dict[str, list[dict[str, Json]]]], dict[str, Json]]

# The attempt and its tasks, plain JSON -> one report per task, in that order. Runs them on the engine.
RunTasks: TypeAlias = Callable[[str, list[dict[str, Json]]], list[dict[str, Json]]]

# An epoch -> the digests (`short_number`) of the entries above it that the deciding sink holds.
Decided: TypeAlias = Callable[[int], set[int]]


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The facts about its pipeline that a sink gets when it is opened."""

    pipeline: str
    ledger: Ledger  # of the pipeline; it is with the deciding sink
    clock: Clock
    replay: Replay  # rebuilds a damaged checkpoint from the one before
    decides: bool = False  # whether this sink is the deciding one
    copies: Tiers = field(default_factory=Tiers)  # copies of checkpoints outside the sink; for the deciding sink only
    outbox: Mapping[str, Json] | None = None  # followers, optional sinks: where tasks stage (root, options, folder)
    input_port: str = ""  # the source, operator or port that the sink reads, for ids of events
    input_key: tuple[str, ...] = ()  # the columns that identify a row of its input, where an operator names them
    input_is_source: bool = False  # whether its input is a source: rows are records, not changes of an operator
    find_input_key: Callable[[], tuple[str, ...]] | None = None  # asks the source for the key of a captured table
    input_schema: SchemaOptions = field(default_factory=SchemaOptions)  # its source's rules about new columns

    def key_of(self, options: SinkOptions) -> tuple[str, ...]:
        """Return the columns that identify a row of an upsert: those of the spec, else those of its input.

        Raises:
            ConfigError: nothing says what identifies a row.
            SourceError: the source must say, and does not answer.
        """
        key = options.key or self.input_key or (self.find_input_key() if self.find_input_key is not None else ())
        if not key:
            raise ConfigError(
                f"sink {options.name!r} upserts, and no column identifies a row",
                hint="Set `key` to the columns that do.",
            )
        return key

    def check_key(self, options: SinkOptions) -> None:
        """Refuse an upsert if nothing can ever say what identifies a row. Asks nobody.

        Raises:
            ConfigError: neither the spec nor the input has a key.
        """
        if self.find_input_key is None:
            self.key_of(options)


@dataclass(frozen=True, slots=True)
class Head:
    """What a sink holds of one pipeline, read at one version.

    `epoch` 0 without an entry is a pipeline that has committed nothing here.
    """

    exists: bool
    version: int
    generation: int = 0
    epoch: int = 0
    entry: EntryRef | None = None
    checkpoint: Checkpoint | None = None
    committed: int | None = None  # the epoch that can no longer be set aside; None: no epoch is ever pending here
    repairs: tuple[str, ...] = ()  # damaged copies that another copy replaced
    partial: int = 0  # the epoch of which the sink holds some rows; 0: none
    partial_entry: EntryRef | None = None  # its ledger entry
    path: str = "fresh"  # where the checkpoint was read: local, remote (a tier), sink; fresh when there is none

    @property
    def attempt(self) -> str:
        """The attempt of the newest epoch, which the next plan builds on."""
        return self.checkpoint.attempt if self.checkpoint else ""


@dataclass(frozen=True, slots=True)
class Fence:
    """The part of a head that fences runs, without the checkpoint. Pending epochs do not count."""

    version: int = -1  # -1: the sink does not exist yet
    epoch: int = 0
    digest: int | None = None  # of the newest epoch's ledger entry (`short_number`)
    generation: int = 0
    partial: int = 0  # the epoch of which the sink holds some rows; 0: none

    @property
    def exists(self) -> bool:
        return self.version >= 0


@dataclass(frozen=True, slots=True)
class EpochCommit:
    """Everything that one commit makes true."""

    checkpoint: Checkpoint
    entry: EntryRef
    previous: EntryRef | None
    files: list[dict[str, Json]]
    schema: pa.Schema
    previous_checkpoint: str = ""  # checksum of the previous checkpoint
    source_state: Json = None  # the interchange form of the one file source
    facts: dict[str, Json] = field(default_factory=dict)  # for people who read the log
    kind: str = "epoch"  # or one of the ledger's HISTORY_EDITS
    shape: Mapping[str, Json] = field(default_factory=dict)  # what `Sink.shape` was when the epoch was made

    @property
    def rows(self) -> int:
        return sum(int(f["rows"]) for f in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(int(f["size_bytes"]) for f in self.files)


@dataclass(frozen=True, slots=True)
class KeepRows:
    """Effect of a history edit: rows stay as they are; only the progress moves. Every sink supports it."""


@dataclass(frozen=True, slots=True)
class RestoreVersion:
    """Effect of a history edit: data and columns as they were at an earlier version of the sink."""

    version: int


@dataclass(frozen=True, slots=True)
class ReplaceRows:
    """Effect of a history edit: exactly these files; none empties the sink."""

    files: tuple[dict[str, Json], ...] = field(default=())


Effect: TypeAlias = KeepRows | RestoreVersion | ReplaceRows


@dataclass(frozen=True, slots=True)
class SinkReturn:
    """One sink's part of a rollback. Without `version_then` its rows do not change."""

    name: str
    table: str
    epoch: int
    version_now: int | None
    version_then: int | None = None
    files_removed: int = 0
    rows_removed: int = 0
    files_restored: int = 0
    rows_restored: int = 0
    columns_removed: list[str] = field(default_factory=list)
    properties_changed: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # others that changed rows since
    foreign_commits: int = 0  # of these others
    left: bool = False
    restored: tuple[str, ...] = ()  # the files that come back


@dataclass(slots=True)
class Stranger:
    """Another writer that changed rows since a version."""

    name: str
    versions: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoggedCommit:
    """One commit of this pipeline in a sink's own log."""

    version: int
    time: str  # RFC 3339; empty if the log has no time
    epoch: int | None  # the sink's epoch after the commit; None for a claim. Also known if `info` is unreadable
    info: dict[str, Json]  # kind, epoch, entry, previous, checkpoint, rows, size_bytes, jump, units, as far as known
    problem: str = ""  # why `info` is unreadable, and therefore empty


def find_birth(info: Mapping[str, Json] | None) -> int:
    """Return the epoch after which a table begins that was added later, from the commit that says so; else 0."""
    return int(((info or {}).get("baseline") or {}).get("epoch", 0))


# -- tasks ------------------------------------------------------------------------------------------------


class Stager(ABC):
    """Writes the rows of one task for one sink, in the worker. They are invisible until a commit names them.

    The names of its files contain the attempt, so two attempts never write to the same path.

    If the stager of an optional sink raises or hangs, the run repeats the epoch without it and keeps the rows in the
    outbox. Later it hands them to the stager again, in the driver, before it commits the epoch to that sink.
    """

    @property
    @abstractmethod
    def files_done(self) -> int:
        """The number of complete files."""

    @property
    @abstractmethod
    def files(self) -> int:
        """The number of files if no more rows arrive."""

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. They are complete in a file only after `close`."""

    def note_origin(self, origin: str, record_numbers: pa.Array) -> None:  # noqa: B027  # most keep no origins
        """Learn which records of an input the rows of the next `write` come from. Default: nothing."""

    @abstractmethod
    def close(self) -> list[dict[str, Json]]:
        """Make everything durable, and describe each file in plain JSON: `path`, `rows` and `size_bytes` at least.

        The ledger keeps the descriptions, and `EpochCommit.files` passes them to `Sink.commit`.
        """

    @abstractmethod
    def discard(self) -> None:
        """Delete the files of this stager after a failure of the task."""


# -- the contract -----------------------------------------------------------------------------------------


class Sink(ABC):
    """Where results become true. One instance serves one run of one pipeline.

    Calls that read or write the sink come one at a time, though from different threads. `is_full`, `settled_epoch`,
    `stage_target`, `columns_of` and `refuse_widening` may be called meanwhile.

    Unless a method says otherwise, it raises SinkError if the sink cannot be reached, and the run retries. An exception
    that is not in `firnline.errors` counts as a SinkError that names the sink and the method (`sinks.guard`).

    A required sink that fails is retried until `restart.attempts` are used up; then the run ends. An optional sink that
    fails, or takes too long, never stops the others: it falls behind, and the run retries it with back-off. A call that
    took too long goes on; the next one is made after it has returned.
    """

    capabilities: ClassVar[Capabilities]
    name: str
    required: bool
    uri: str  # its location, for messages; without credentials
    former_name: str = ""  # the name that older epochs staged its rows under, if it was renamed
    can_empty: bool = True  # upsert: a change row can empty the target
    storage: Storage | None = None  # the location of its files, if it has files; pins and a ledger may be there, too

    # -- the head -----------------------------------------------------------------------------------------

    @abstractmethod
    def load(self) -> Head:
        """Read the head, including pending epochs. Writes nothing.

        Raises:
            CheckpointLostError: it holds an epoch that no intact copy describes.
            DecidingSinkError: it would decide, and its checkpoint names another sink.
        """

    def load_committed(self) -> Head:
        """Read the head without pending epochs, which may still be set aside."""
        return self.load()

    def read_fence(self) -> Fence:
        """Read the fence of the committed head, as cheaply as possible."""
        head = self.load_committed()
        if not head.exists:
            return Fence()
        digest = short_number(head.entry.checksum) if head.entry else None
        return Fence(head.version, head.epoch, digest, head.generation, head.partial)

    def make_durable(self) -> None:  # noqa: B027
        """Make durable what was last read, because its writer may have been killed before the fsync. Default: nothing
        to do.

        Raises:
            NotDurableError: it may not be durable; nothing may build on what was read.
        """

    def end_unfinished(self) -> None:  # noqa: B027
        """End transactions that an earlier run left open, if they hide the head. Called before `load` by a run that is
        about to claim the sink, and only by such a run. Default: nothing is ever open.
        """

    def check_lost(self, epoch: int) -> None:  # noqa: B027
        """Refuse to be given the epochs after this one again while their rows are still there. Read-only; called if the
        head of a follower is lower than it was, or gone. Default: what the head does not name is not there, or cannot
        be told.

        Raises:
            SinkWentBackError: it names the rows.
        """

    def check_whole(self) -> None:  # noqa: B027
        """Refuse a damaged sink before a run builds on it or copies it; called once, before `load`.

        Raises:
            TornCommitError: it names the damage, and the command that repairs it.
        """

    def check(self) -> None:  # noqa: B027
        """Refuse a sink that does not fit the spec's settings. Read-only.

        Raises:
            SchemaError: it names the setting.
        """

    def find_caveats(self) -> list[str]:
        """Return what weakens the delivery guarantee of this sink, in words for a dry run. Default: nothing."""
        return []

    @property
    def identity(self) -> dict[str, Json]:
        """The sink's identity in a checkpoint, as the deciding one."""
        return {"sink": self.name}

    def find_foreign(self, version: int, scan_commits: int, *, accept_older: bool) -> Json | None:
        """Return another tool's progress at a version; None if there is none. Called for a sink without a head.

        Raises:
            CheckpointError: it is damaged, or part of the log is gone, and `accept_older` is not set.
        """
        return None

    # -- claim and fence ----------------------------------------------------------------------------------

    @abstractmethod
    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
        decided: Decided | None = None,
    ) -> Head:
        """Claim a generation, conditionally on the version read, and return the head under the claim.

        Called when a run starts, when it joins the sink again after a failure, and by every history edit. From then on
        every commit of an older generation fails. A repeat by the same run returns the same generation.

        Args:
            run: The run that claims.
            generation: None takes the next free one (the deciding sink). A further sink registers the given one, unless
                it has a newer one.
            baseline: The ledger entry of what another tool had committed, read from version `onto`. For a further sink
                without a head: the entry after which it begins.
            onto: See `baseline`.
            again: The run has claimed before, and may only claim again if no other run has since.
            decided: For a further sink that has pending epochs: it adopts only those whose entry was decided.

        A sink that does not exist yet is claimed by the commit that creates it.

        Raises:
            FencedError: the sink holds a newer generation, or, with `again`, that of another run.
            CommitConflictError: with a baseline: the sink is no longer at the version `onto`.
        """

    def check_holder(self, generation: int) -> None:
        """Raise FencedError if a newer generation owns the sink."""
        owner = self.read_fence().generation
        if owner > generation:
            raise FencedError(f"generation {owner} took {self.name} over", generation=owner)

    # -- staging ------------------------------------------------------------------------------------------

    @abstractmethod
    def stage_target(self) -> dict[str, Json]:
        """Describe to tasks where and how to stage, in plain JSON for the workers.

        The kind's `open_stager` gets it. Every target has these keys: `type`, the kind; `sink`, the name of the sink;
        `partition_by`, the columns that select the partition of a row, often none. The run adds `optional` if the sink
        is optional.

        `shape` may have the settings of the spec that decide what the rows become, such as a key. If a stager fails,
        the ledger keeps it with the parked rows, and a later stager gets that `shape`, whatever the spec says by then.
        It must hold no secrets.
        """

    def shape(self) -> dict[str, Json]:
        """Return the settings that shape what is delivered, in plain JSON: the ledger entry of each epoch keeps them.

        `EpochCommit.shape` passes them to `commit`: an epoch is delivered by the settings that it was made with, and
        new ones hold from the next epoch on. Default: nothing but the staged files matters.
        """
        return {}

    def columns_of(self, rows: pa.Schema) -> pa.Schema:
        """Return the sink's columns for rows with these columns."""
        return rows

    def refuse_widening(self, types: Mapping[str, pa.DataType]) -> dict[str, str]:
        """Return which of these columns cannot get the given wider type in a commit, each with the reason.

        A column that is not refused may have that type in the `schema` of the next `EpochCommit`, and in its files.
        That commit then also changes the rows that the sink holds, at once with the epoch. Default: refuse all.
        """
        return dict.fromkeys(types, f"sink {self.name!r} cannot change the type of a column")

    def fetch_staged(self, outbox: Storage, files: Sequence[dict[str, Json]]) -> None:
        """Move files from the outbox to where `commit` reads them. Called before each commit of a decided epoch.

        After a crash it is called again; files already moved stay.

        Raises:
            DamagedError: a file differs from what was staged, or is missing.
        """
        if self.storage is not None:
            deliver(outbox, self.storage, files)

    def find_missing_staged(self, files: Sequence[dict[str, Json]], outbox: Storage | None = None) -> list[str]:
        """Return the paths of staged files that are neither with the sink nor in the given outbox."""
        return find_missing_staged(self.storage, files, outbox) if self.storage is not None else []

    # -- commit -------------------------------------------------------------------------------------------

    @abstractmethod
    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        """Make an epoch visible, atomically with its checkpoint.

        Called again with the same epoch after a crash or a lost answer; the repeat returns the first receipt and writes
        nothing. Requires, at exactly the version it commits onto, that the sink holds our generation and the previous
        entry. `run_tasks` runs work that the commit needs as tasks on the engine; without it the sink does that work in
        this process.

        Raises:
            FencedError: it does not; another run owns the pipeline.
            SchemaError: the sink's columns changed and the staged files no longer fit.
            CommitUnknownError: the answer was lost; ask `find_receipt`.
        """

    @abstractmethod
    def find_receipt(self, epoch: int) -> Receipt | None:
        """Return the receipt of an epoch, whoever committed it; None if the sink does not hold it."""

    @abstractmethod
    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None, version: int | None = None) -> Receipt:
        """Commit a history edit: its effect on the rows and its checkpoint become true together.

        Requires, at exactly the version it commits onto, our generation and the entry `onto`; epoch numbers may have a
        gap. With `version`, it commits onto that version only, so the checks made there stay valid. Pending epochs up
        to that of the edit are dropped. A repeat returns the first receipt.

        Raises:
            FencedError: another run owns the pipeline.
            CommitConflictError: the sink is no longer at `version`, or no longer holds `onto`; nothing was written.
            RollbackRefusedError: the sink does not support this effect.
        """

    def is_full(self) -> tuple[int, int] | None:
        """Return the units and bytes that wait downstream if planning should pause; None if there is room."""
        return None

    def settled_epoch(self) -> int | None:
        """Return the newest epoch that can no longer be set aside; None: every epoch that the sink holds."""
        return None

    def read_settled(self) -> int | None:
        """Read again, and return the new value of `settled_epoch`.

        Raises:
            FencedError: another generation, or another chain than ours, owns the sink.
        """
        return self.settled_epoch()

    def maintain(self) -> None:  # noqa: B027
        """Housekeeping between commits; safe to skip, safe at every kill point. Default: nothing to do."""

    # -- columns and rows ---------------------------------------------------------------------------------

    @abstractmethod
    def find_schema(self) -> pa.Schema | None:
        """Return the current columns of the sink, including those that pending epochs add; None before it exists."""

    def find_committed_schema(self) -> pa.Schema | None:
        """Return the columns without those of pending epochs."""
        return self.find_schema()

    def check_columns(self, rows: pa.Schema) -> None:  # noqa: B027
        """Raise SchemaError for rows with columns that the sink cannot take."""

    def find_parts(self) -> list[str] | None:
        """Return the places that a sink with a template writes to, such as tables; None for a sink without one."""
        return None

    def find_rescued(self) -> list[tuple[int, Rescued]]:
        """Return what the sink itself rescued, each with its epoch: values that only its own columns do not fit."""
        return []

    def find_values(self, column: str) -> set[str]:
        """Return the distinct values of a text column over all rows; empty if rows cannot be read back."""
        return set()

    def read_rows(self, epoch: int | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all rows that readers see now, or saw after an epoch, for a copy into another sink.

        Raises:
            RollbackRefusedError: the sink no longer has that epoch.
            SinkError: they cannot be read, or a sink of this kind cannot give rows back.
        """
        raise SinkError(f"sink {self.name!r} cannot be copied from", hint="Name a Delta table.")

    # -- history ------------------------------------------------------------------------------------------

    @property
    def has_log(self) -> bool:
        """Whether the sink has a log of its own, so that `read_log` yields commits."""
        return type(self).read_log is not Sink.read_log

    def read_log(self, version: int | None = None, limit: int | None = None) -> Iterator[LoggedCommit]:
        """Yield the commits of this pipeline in the sink's own log, newest first; none for a sink without a log.

        From `version` (None: the newest) down, over at most `limit` versions, until the log ends. May be called from
        any thread.
        """
        return iter(())

    def commit_times(self, version: int, limit: int) -> dict[int, tuple[int, str]]:
        """Return version and commit time of the newest epochs, by epoch."""
        return {
            int(logged.info["epoch"]): (logged.version, logged.time)
            for logged in self.read_log(version, limit)
            if "checkpoint" in logged.info
        }

    def version_of(self, epoch: int) -> int:
        """Return the version whose newest epoch is `epoch`.

        Raises:
            RollbackRefusedError: it no longer exists, or the sink cannot go back at all.
        """
        raise self._no_way_back()

    def plan_return(self, to_epoch: int, accept: Collection[str]) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        """Plan the return to an epoch, with all obstacles. Writes nothing.

        Called if the sink holds a later epoch. `accept` names others whose rows may be lost.
        """
        fence = self.read_fence()
        return SinkReturn(self.name, self.uri, fence.epoch, fence.version), [self._no_way_back()]

    def find_strangers(self, since: int) -> list[Stranger]:
        """Return others that changed rows after the version `since`; at any time, if the sink's version is older than
        that.

        Raises:
            RollbackRefusedError: the log no longer has the commits.
        """
        return []

    def find_missing(self, effect: Effect) -> list[str]:
        """Return descriptions of what an effect needs and the sink no longer has: files, or a version."""
        return []

    def _no_way_back(self) -> RollbackRefusedError:
        return RollbackRefusedError(f"{self.name} cannot take rows back", hint="Keep the rows that are there.")
