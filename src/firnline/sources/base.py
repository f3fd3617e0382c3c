"""The contract of a source: everything that the engine needs from the origin of records.

A source is two classes. `Source` runs in the driver: it plans slices, and it alone makes, compares and opens positions.
`SplitReader` runs in workers: it turns one split of a slice into Arrow batches. `firnline.sources.registry` opens both
by the kind of the source; nothing else in the engine knows a kind.

What happens in an epoch, and what a kill leaves behind:

1. `plan(position)` fixes a slice. Nothing is durable; after a kill another slice may be planned on the same position.
2. A `SplitReader` per split reads the slice in Spark tasks. A task may run twice, at the same time and on other
   machines: readers write nothing, and two readings of one split give the same records in the same order.
3. `advance(plan, outcomes)` returns the position after the slice, and the input records of the ledger entry.
4. The deciding sink commits rows, position and ledger entry at once. Only now is the slice read for good.
5. `acknowledge(position)` says what will never be needed again.

Positions and outcomes are plain JSON, which the engine stores and hands back as it is. A position stays readable for
ever: checkpoints, savepoints and ledgers hold it.

An input is what a source reads one after the other and knows by a name (a file, a partition). An input record is what
the ledger says of an input in one epoch: a JSON object with `path` (its name), `from` and `to` (the records of it that
were read: those after the first `from`, up to the first `to`), `status` (`committed`, `in_progress`, `pending`,
`set_aside`, `dropped`, `replayed`, `refused`), and what else the source wants to find there, such as `etag` and
`size_bytes`.

A port is an output of a source, with columns of its own. Sinks and operators read the main port as `NAME` and any other
as `NAME.port`. All ports of a source share its position: one slice has the rows of all of them. What a run decides for
rows (columns, their types, rescued values) it decides per port. Bad records and `max_bad_ratio` count per source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from firnline.errors import ConfigError, FirnlineError, SourceGapError
from firnline.rescued import Rescued
from firnline.types import Json

if TYPE_CHECKING:
    import pyarrow as pa

    from firnline.sources.columns import Columns
    from firnline.sources.known import KnownFiles
    from firnline.storage import FileStat
    from firnline.topology.records import Marker
    from firnline.topology.topics import TopicChannel

NOT_READ = ("pending", "replayed", "refused")  # statuses of records that tell of no reading of the input itself
MAIN_PORT = ""  # the output that a source's own name stands for


def port_name(source: str, port: str) -> str:
    """Return what sinks, operators and checkpoints call a port of a source: `shop`, or `shop.orders`."""
    return f"{source}.{port}" if port else source


# -- values -------------------------------------------------------------------------------------------


def never_stops(_: Marker) -> bool:
    """No marker ends a slice: the pipeline takes part in no snapshot of a topology."""
    return False


def no_channels(_: str) -> Sequence[TopicChannel]:
    """No topic is a channel."""
    return ()


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one plan may take. The first limit that is reached ends the slice."""

    max_files: int
    max_bytes: int
    max_events: int
    max_ms: int
    max_output_files: int
    parallelism: int  # tasks that can run at once
    files_per_task: int = 1  # Parquet files that a task stages for one table, as far as is known
    any_age: bool = False  # plan input that may be half written, too: only to look at it
    respect_source_tx: bool = True  # keep transactions of the source whole, where it has any
    stops_at: Callable[[Marker], bool] = never_stops  # whether a slice ends at a marker in a channel, which it reaches
    # The topics that a source reads and a member of a topology writes. Ask after the ends of the topics are known.
    channels: Callable[[str], Sequence[TopicChannel]] = no_channels


@dataclass(frozen=True, slots=True)
class Split:
    """What one Spark task reads: a contiguous range of the slice. Plain JSON, since it travels to workers."""

    inputs: list[dict[str, Json]]  # each has at least `path`; the rest is between the source and its reader
    max_records: int
    max_bytes: int
    max_output_files: int

    def to_json(self) -> dict[str, Json]:
        return {
            "inputs": self.inputs,
            "max_records": self.max_records,
            "max_bytes": self.max_bytes,
            "max_output_files": self.max_output_files,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Split:
        return cls(
            inputs=list(value["inputs"]),
            max_records=int(value["max_records"]),
            max_bytes=int(value["max_bytes"]),
            max_output_files=int(value["max_output_files"]),
        )


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """A slice of input, fixed before the epoch runs. `base` is the position that it builds on."""

    source: str
    base: Json
    splits: list[Split]
    files: int  # inputs in the slice: the inputs of all splits together; shown and counted, never used to read
    size_bytes: int
    constants: tuple[str, ...] = ()  # columns that readers add to the records, the same value in all rows of an input
    notes: dict[str, Any] = field(default_factory=dict)  # the source's own; `late` is the number of late inputs
    markers: tuple[Marker, ...] = ()  # of a topology's snapshots: the slice ends there


@dataclass(frozen=True, slots=True)
class ReadColumns:
    """The columns of the records of one port, after reading them."""

    schema: pa.Schema
    kinds: dict[str, Json] = field(default_factory=dict)  # what values new columns had, for `sources.columns.agree`


@dataclass(frozen=True, slots=True)
class SplitEnd:
    """The end of the reading of a split."""

    outcomes: list[Json]  # for `Source.advance`: one per input that was reached, in order
    columns: Mapping[str, ReadColumns]  # by port; a port without rows may be left out
    failed: Mapping[str, str] = field(default_factory=dict)  # inputs that cannot be read as they are: name -> reason


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of reading some records of a slice, for `dry-run`."""

    columns: Mapping[str, ReadColumns]  # by port; a port without rows may be left out
    files: int  # inputs that were sampled
    records: int
    bad: Mapping[str, int]  # bad records, by reason
    rescued: int  # records with a value or field for `_rescued_data`
    warnings: tuple[str, ...] = ()
    size_bytes: int = 0  # that were read, as stored
    complete: bool = False  # whether every record of the slice was read
    values: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by port and column: values that fit
    rescued_values: tuple[Rescued, ...] = ()  # by column; `source` is the port
    first_bad: tuple[str, ...] = ()  # the first bad records: input, line and reason
    paths: frozenset[str] = frozenset()  # of the inputs that were sampled: two samples may have one in common


@dataclass(frozen=True, slots=True)
class Backlog:
    """The input that waits to be read."""

    files_outstanding: int
    bytes_outstanding: int


@dataclass(frozen=True, slots=True)
class LogLag:
    """How far a source that reads the log of a server is behind the server; None: unknown."""

    server_position: str  # where the server's log ends, in the server's words
    position: str  # up to where it is read for good; empty before the first epoch
    lag_bytes: int | None = None
    lag_seconds: float | None = None  # at most so long ago the server committed the first change that is not read
    retained_bytes: int | None = None  # of its log, which the server keeps for this reader
    alarm: str | None = None  # why an operator should look at it
    unknown: str | None = None  # why the server does not say it: it is away, or a right was lost
    is_away: bool = False  # unknown: the server does not answer, as `unreachable` says

    def to_json(self) -> dict[str, Json]:
        return {
            "server_position": self.server_position,
            "position": self.position,
            "lag_bytes": self.lag_bytes,
            "lag_seconds": self.lag_seconds,
            "retained_bytes": self.retained_bytes,
            "alarm": self.alarm,
            "unknown": self.unknown,
        }


@dataclass(frozen=True, slots=True)
class TooYoung:
    """Input that is there and may be half written."""

    files: int
    seconds: float  # until the first of it is old enough
    all_seconds: float  # until all of it is


@dataclass(frozen=True, slots=True)
class PositionView:
    """A position for people. `facts` is shown in a short listing.

    The fields after `by_input` apply only to a source that reads named inputs one after the other.
    """

    facts: dict[str, Json]
    location: str = ""  # the location of the input
    by_input: bool = False
    last: str | None = None  # the last input below which everything is read; None: none is
    in_progress: Mapping[str, int] = field(default_factory=dict)  # started and not finished: records read so far
    set_aside: Mapping[str, str] = field(default_factory=dict)  # with the reason
    named: int = 0  # inputs that the position names one by one, apart from those set aside


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far the rows of a table have been read that were there before its changes."""

    rows: int
    estimate: int  # of all rows; 0: unknown
    chunks: int
    done: bool
    request: str = ""  # that began it
    is_due: bool = False  # the next epoch begins another one


@dataclass(frozen=True, slots=True)
class CapturedTable:
    """A table whose changes a source captures, as its server describes it now."""

    name: str
    key: tuple[str, ...]  # by which changes name a row; empty: they can only be appended
    would_read: bool  # whether a run reads the rows that are there, or the rest of them
    estimate: int  # of all rows, by the server; 0: it has none
    port: str = ""  # by which inputs name it; without its schema if that is the default one

    def to_json(self) -> dict[str, Json]:
        return {"table": self.name, "key": list(self.key), "would_read": self.would_read, "estimate": self.estimate}


@dataclass(frozen=True, slots=True)
class PositionChange:
    """A position that a person chose, and what it means for the input, in words for the plan.

    `again` and `never` name input (a range of offsets, a version, a file), one line each. Without a change of the
    position there is nothing to do.
    """

    position: Json
    again: tuple[str, ...] = ()  # was read, and is read again
    never: tuple[str, ...] = ()  # was not read, and never is
    again_count: int = 0  # of `unit`, in all of `again`
    never_count: int = 0
    unit: str = "record"  # what is counted
    records: tuple[dict[str, Json], ...] = ()  # input records for the ledger


@dataclass(frozen=True, slots=True)
class Reconciled:
    """The differences between a full listing and the ledger."""

    late: list[FileStat] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)  # inputs that were replaced after they were read
    listed: int = 0
    late_bytes: int = 0  # of all late inputs
    more_late: int = 0  # late inputs beyond those in `late`, found again by the next comparison
    revived: list[str] = field(default_factory=list)  # set aside before a record was read, and changed since
    grown: list[str] = field(default_factory=list)  # inputs that grew after they were read
    rest: int = 0  # inputs of `grown` whose rest a plan will read
    rest_bytes: int = 0
    incomplete: int = 0  # inputs whose last line is left until it is complete

    @property
    def late_count(self) -> int:
        """The number of late inputs."""
        return len(self.late) + self.more_late


@dataclass(frozen=True, slots=True)
class InputStatus:
    """The status of one input, for `firnline files`."""

    record: dict[str, Json]  # what the ledger says, or, of an input that no epoch has read, path and size
    status: str  # pending, in_progress, committed, grown, changed, late, set_aside, ignored, dropped
    reason: str | None = None


class InputTracker:
    """Derives the status of every input: `add` takes the ledger's records, newest first, then `unread` returns the
    rest."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # inputs whose newest record was added

    def add(self, record: dict[str, Json]) -> InputStatus | None:
        """Return the status of a record's input; None if a newer record has given it, or nothing was read."""
        path = str(record["path"])
        if record["status"] in NOT_READ or path in self._known:
            return None
        self._known.add(path)
        return InputStatus(record, str(record["status"]))

    def unread(self) -> Iterator[InputStatus]:
        """Return the inputs that no record names."""
        return iter(())


def processed_record(stat: FileStat) -> dict[str, Json]:
    """Return the input record of an input that counts as read although no epoch of this pipeline read it."""
    return {
        "path": stat.name,
        "size_bytes": stat.size_bytes,
        "etag": stat.etag,
        "create_time": stat.modified_at.isoformat(),
        "discovery_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "from": 0,
        "to": 0,
        "status": "committed",
        "baseline": True,
    }


# -- the driver's side --------------------------------------------------------------------------------


class Source(ABC):
    """The origin of records, in the driver.

    `open_source(options, once=..., moved=...)` of its kind makes one. With `once`, a run reads what is there and ends:
    the source then waits for nothing. `moved` is a pair of locations, old and new: the same input has moved, and
    `start` accepts positions of the old location.

    Six methods must be written; the others have defaults that suit a source whose input never comes late, never
    changes and is never given up. `start`, `plan` and `give_back` are never called at the same time, though by
    different threads; other threads may call the other methods meanwhile. Opening a source reads nothing.

    SourceError says that the source does not answer now: the run retries with back-off, `restart.attempts` times in a
    row. An exception that is not in `firnline.errors` counts as a SourceError that names the source and the method
    (`sources.guard`), in the driver and in workers.
    """

    name: str
    ports: tuple[str, ...] = (MAIN_PORT,)  # the outputs that are known by name; see `has_port`
    poll_interval_secs: float = 10.0  # how long a run waits after a plan without input
    # Between two calls of `reconcile`: seconds; "auto": every poll while that is cheap; None: input never comes late.
    reconcile_interval_secs: float | Literal["auto"] | None = None
    late_files: Literal["ingest", "ignore", "fail"] = "ignore"  # how late input is treated
    on_growth: Literal["report", "read_rest", "fail"] = "report"  # how input is treated that grew after it was read
    inputs_are: str = "file"  # what people call one input
    # Only the run that owns the pipeline may open the source: a plan before `claimed` has nothing to read.
    claims_first: bool = False
    has_log: bool = False  # whether it reads the log of a server, so that `log_lag` has an answer

    # -- to be written --

    @abstractmethod
    def start(self, position: Json | None) -> Json:
        """Check a restored position against the settings and return the position to plan after.

        Called once when a run begins, again when it takes the pipeline up after a failure, and by commands that only
        read. None is a first start. Changes nothing outside the process.

        Raises:
            SourceMovedError: the position was made on another location.
            ConfigError: the location does not exist.
            DamagedError: the position is unreadable.
        """

    @abstractmethod
    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        """Propose the next slice after `position`, or None when there is nothing to read now.

        Looks at listings and offsets only, reads no records, and returns within about `limits.max_ms`. Called again
        with the same position after a failure; the slice may then differ, since only a committed ledger entry fixes
        it. Several epochs may be in flight: `position` is then what `advance` returned for one that is not committed.

        A slice, and each of its splits, ends only where the source allows a cut. A source with transactions never
        ends a slice inside one, even when that exceeds `limits`; if `limits.respect_source_tx` is false, it may, but
        need not. `limits` are goals: a slice has at least one input.

        Raises:
            SourceError: listing failed; the run tries again.
        """

    @abstractmethod
    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        """Return the position after the splits of `plan` ended as reported, and the ledger's input records.

        `outcomes` are those of all splits, in the order of the slice. Input that a reader did not reach has none: the
        new position must not pass it. Called once per epoch in flight; the result depends on the arguments alone.

        A reader may end early, because its budget is full, while the readers of later splits reach their end. The
        epoch commits the rows of all of them. A source that plans several splits therefore keeps the end of each in
        its position: the next plans read the gap, and do not read again what lies after it.
        """

    @abstractmethod
    def replay(self, position: Json, records: Sequence[dict[str, Json]]) -> Json:
        """Return the position after an epoch, from the position before it and the ledger's input records. Pure.

        Called when a checkpoint is lost and must be rebuilt from the ledger.
        """

    @abstractmethod
    def replan(self, position: Json, records: Sequence[dict[str, Json]], parallelism: int) -> SourcePlan:
        """Return the slice that an epoch read, from the ledger's input records, to read it again for operator state.

        Readers must give the same records in the same order on the same ports as the first time, also if other ports
        are wanted now. `position` is the one after that epoch.
        Nothing is checked here: if input is gone, the reader fails.
        """

    @abstractmethod
    def backlog(self, position: Json) -> Backlog:
        """Count the input after `position`, and the late input that `reconcile` has found and no plan has taken up.

        Called every few seconds, by another thread than `plan`, for display.

        Raises:
            SourceError, OSError: it cannot be counted now.
        """

    has_keys = False  # whether `find_key` says what identifies the rows of an output

    # -- ports --

    def has_port(self, port: str) -> bool:
        """Return whether the source has an output of this name: one of `ports`, unless the kind says otherwise.

        Called when a pipeline is opened, for every port that a sink or operator reads: the pipeline is refused if the
        answer is False. A source whose ports are not known by then (one per table, also of later tables) accepts any
        name that may be one. A port may stay without rows, and its columns unknown until the first one.
        """
        return port in self.ports

    def known_ports(self) -> list[str]:
        """Return the outputs that can be named before the source is read, for people."""
        return list(self.ports)

    # -- positions, for people and other tools --

    @property
    def location(self) -> str:
        """The location of the input, for messages."""
        return self.name

    def describe(self, position: Json) -> PositionView:
        """Return a position in a form for people. Pure; may be called for positions of any age.

        Raises:
            DamagedError: the position is not one of this kind of source.
        """
        return PositionView(facts=position if isinstance(position, dict) else {"position": position})

    def current_name(self, position: Json, path: str) -> str:
        """Return the current name of an input, which an old input record may name differently."""
        return path

    def interchange(self, position: Json) -> Json:
        """Return `position` in the format that other tools read in the table's log; None if there is no such format."""
        return None

    def adopt(self, foreign: Json) -> tuple[Json, list[dict[str, Json]]]:
        """Take over another tool's progress: the position, and input records of what that tool has read.

        Raises:
            ConfigError: this kind of source cannot.
        """
        raise ConfigError(f"source {self.name!r} cannot take over another tool's progress")

    def set_position(self, position: Json, words: str) -> PositionChange:
        """Return the position that a person asks for: `words` is a position in JSON, or in the words of this kind.

        `position` is the newest one. Looks at listings and offsets, reads no records, changes nothing.

        Raises:
            ConfigError: this kind of source cannot, the words mean nothing to it, or the input has no such place.
            SourceError: the source does not answer.
        """
        raise ConfigError(
            f"source {self.name!r} cannot be set to a position by hand",
            hint="Go back to an earlier epoch with `firnline rollback`, or start over with `firnline run "
            "--fresh-after EPOCH`.",
        )

    def skip(self, position: Json, words: str) -> PositionChange:
        """Return the position that passes over the input which `words` names. Otherwise like `set_position`."""
        raise ConfigError(
            f"source {self.name!r} cannot skip input",
            hint="Take the input away where it comes from, or start over: `firnline run --fresh-after EPOCH`.",
        )

    def find_key(self, port: str) -> tuple[str, ...] | None:
        """Return the columns that identify a row of an output; None if the source does not say that of any. May ask a
        server, and remembers its answer.

        Raises:
            ConfigError: the rows of this output have no key.
            SourceError: the server does not answer.
        """
        return None

    def watch_keys(self, ports: Collection[str]) -> None:  # noqa: B027
        """Take note of the ports of many tables that sinks upsert: a table whose key changes is read again for them."""

    def remarks(self) -> Sequence[str]:
        """Return sentences for `dry-run`: what people should know before a run. Looks, and changes nothing.

        Raises:
            SourceError: the source does not answer.
            ConfigError: a first run would refuse it.
        """
        return ()

    def check(self) -> None:  # noqa: B027
        """Check that the input can be reached. Called by commands before they plan.

        Raises:
            SourceError: it cannot.
        """

    def log_lag(self, position: Json) -> LogLag:
        """Return how far a source with a log is behind its server at `position`. Asks the server; changes nothing.

        Called by `status`, and by a run every few seconds, by another thread than `plan`. A server that does not answer
        is no failure: the answer says why the lag is unknown.

        Raises:
            ConfigError: the source has no log.
        """
        raise ConfigError(f"source {self.name!r} reads no log of a server")

    # -- the run that owns the pipeline --

    def claimed(self, check_holder: Callable[[], None]) -> None:  # noqa: B027
        """Take note that this run owns the pipeline. Called after every claim, before the next plan.

        `check_holder` raises FencedError once another run owns it. A source that keeps something open outside of the
        process (a replication stream) calls it before it opens it again, from any one thread.
        """

    def decided(self, position: Json) -> None:  # noqa: B027
        """Take note that the epoch after `position` is decided and recorded: `position` is that of the one before.

        Called in the order of epochs, after each. A source whose own files hold what a rollback needs may release its
        server up to here. Returns at once.
        """

    def close(self) -> None:  # noqa: B027
        """End what the source keeps open. Called once, when the run ends."""

    # -- after the commit --

    def acknowledge(self, position: Json) -> None:  # noqa: B027
        """Release input before `position`, which is no longer needed: it may be deleted, or acknowledged to a broker.

        `position` is that of the oldest checkpoint that a rollback may still reach and that every sink and copy of
        the truth (the remote tier included) holds. Called when a run starts and after commits, with a position that
        never goes back in one run. Calls may be skipped, and after a kill repeated, also with an older position: the
        call is idempotent. A failure is logged and holds up nothing; the run repeats the call with back-off, also while
        it is idle. A call that takes long holds up no epoch: until it returns, later calls are skipped.

        Savepoints do not hold it back. A restore needs the input since its savepoint; `find_unavailable` names what is
        gone by then.
        """

    def find_unavailable(
        self,
        position: Json,
        records: Sequence[Mapping[str, Json]],
        back_to: Json | None = None,
    ) -> list[str]:
        """Return those of the ledger's `records` that could not be read again unchanged, each with its reason.

        Called before a rollback, and before lost state is rebuilt from the input. `position` is the current one;
        `back_to` is the target of a rollback, and input that was partly read there is needed, too.
        """
        return []

    # -- late input, and input that is set aside --

    def find_late(self, position: Json, known: KnownFiles) -> Reconciled:
        """Compare all existing input with the ledger and the epochs in flight. Changes nothing."""
        return Reconciled()

    def known_end(self, record: Mapping[str, Json]) -> str:
        """Return where the reading of an input ended, from its record, for `KnownFiles`; empty if it never grows."""
        return ""

    def reconcile(self, position: Json, known: KnownFiles) -> Reconciled:
        """Find late and grown input like `find_late`; the next plans read it, if the settings say so.

        Called every `reconcile_interval_secs`, for a requested checkpoint, and once by a run with `once`; by another
        thread than `plan`, but never while `plan` runs. Its result is a proposal, found again after a kill.

        Raises:
            LateFileError: there is late input, and the settings say that this stops the run.
            GrownFileError: the same for input that grew after it was read.
        """
        return self.find_late(position, known)

    def too_young(self) -> TooYoung | None:
        """Return the input that the last plan left because it may be half written; None if there was none.

        A run with `once` and a requested checkpoint wait for all of it; any other run looks again when the first of it
        is old enough.
        """
        return None

    def unreachable(self) -> str | None:
        """Return why the last plan could not see any input, if the source waits for it instead of failing.

        A run warns when a reason appears, once a minute, and when it is gone, and continues with its other sources.
        """
        return None

    def is_reading(self) -> bool:
        """Return whether there is input that the last plan could not have yet, though nothing new comes."""
        return False

    def give_back(self, plan: SourcePlan) -> bool:
        """Give back a lost epoch in flight. Returns True if `reconcile` must find late input again."""
        return False

    def retry(self, path: str, *, changed: bool) -> None:  # noqa: B027
        """Request another read of an input that was set aside; `changed` accepts that it changed.

        Sources that do not have the input ignore the call. The next plan reads it. The call is repeated until
        `forget_requests`, also after a kill.
        """

    def drop(self, path: str) -> None:  # noqa: B027
        """Request to drop an input that was set aside. Otherwise like `retry`."""

    def reread(self, request: str, path: str, *, refused: str = "") -> None:  # noqa: B027
        """Request to read an input from its beginning that was read to its end.

        `request` is used once: the position of the epoch that answers it names it, so that a call repeated after that
        commit changes nothing. With `refused`, a reason, the next plan reads nothing for it and only names it as
        answered. The call before a plan is the one that counts. Otherwise like `retry`.
        """

    def replay_quarantined(self, request: str, files: Sequence[Mapping[str, Json]], *, discard: bool) -> None:  # noqa: B027
        """Request to read quarantined records again, in an epoch of their own. Otherwise like `reread`.

        `files` are files of the quarantine: `name`, `rows` (ranges of row numbers), `records`, `size_bytes` and
        `folders`, those of the inputs that the records came from. With `discard` the records are not read: they only
        count as dealt with. A file without rows is no longer in quarantine: its records are not read. No row is in two
        requests, and a plan takes requests in the order of their names.
        """

    def snapshot(self, request: str, table: str, *, where: str, empties: bool) -> None:  # noqa: B027
        """Request to read the rows of a table again, while its changes go on. Otherwise like `reread`.

        With `where`, a condition in the database's SQL, only rows for which it holds. With `empties` a change row comes
        first that empties the table in sinks that hold its state.
        """

    def find_gap(self, position: Json) -> SourceGapError | None:
        """Return why the input does not continue behind a position, and behind what was read and not decided; None if
        it does. Asks the server. Called while no other run of the pipeline is active.

        Raises:
            SourceError: the server does not answer, or another reader holds its log.
        """
        return None

    def find_losing(self, position: Json, port: str = MAIN_PORT) -> Sequence[CapturedTable]:
        """Return the tables of a port that lose changes if a gap behind a position is accepted: not those that are read
        for the first time anyway. Asks the server.

        Raises:
            SourceError, ConfigError: as `find_captured`.
        """
        return []

    def accept_gap(self, reads: Collection[str] = ()) -> None:
        """Read on where the input begins now, if it does not continue: a person accepts that what lies between is lost.
        Called before `start`, for one run, and for one gap: of the input that there is when the run begins.

        Args:
            reads: Tables, by full name, that are emptied and read again behind the gap. Gap and tables become durable
                at once.

        Raises:
            ConfigError: this kind of source cannot.
        """
        raise ConfigError(f"source {self.name!r} reads no log, and so has no gap that could be accepted")

    def table_name(self, words: str) -> str | None:
        """Return the full name of a table whose changes the source captures; None if it captures no such table."""
        return None

    def check_snapshot(self, table: str) -> None:  # noqa: B027
        """Check that a table, by its full name, can be read again. Asks the server.

        Raises:
            ConfigError: it does not exist, or its rows would come twice.
            SourceError: the server does not answer.
        """

    def snapshots(self, position: Json) -> Mapping[str, SnapshotProgress]:
        """Return, by table, how far the snapshots have come that a position names. Pure."""
        return {}

    def find_captured(self, position: Json) -> Sequence[CapturedTable] | None:
        """Return the tables that a run behind `position` captures; None if the source captures none. Asks the server.

        Raises:
            SourceError, ConfigError: the server does not answer, or a table cannot be read.
        """
        return None

    def table_states(self) -> Mapping[str, Literal["keyed", "unkeyed"]]:
        """Return the captured tables that exist now, each `keyed` or `unkeyed`. Asks the server.

        Raises:
            SourceError, ConfigError: the server does not answer.
        """
        return {}

    def find_unread(self, position: Json) -> Mapping[str, FirnlineError | None]:
        """Return the tables whose rows a run behind `position` has still to read, each with the reason why it cannot,
        such as a right that is missing. Asks the server.

        Raises:
            SourceError, ConfigError: the server does not answer.
        """
        return {}

    def answered(self, position: Json) -> frozenset[str]:
        """Return the requests of `reread`, `replay_quarantined` and `snapshot` that a position names as answered.
        Pure."""
        return frozenset()

    def has_answered(self, plan: SourcePlan, request: str) -> bool:
        """Return whether a plan answers a request of `reread`, `replay_quarantined` or `snapshot`, even by refusing
        it."""
        return True

    def refused(self) -> frozenset[str]:
        """Return the requests of `snapshot` that no plan will answer; the source has logged why. They are dropped."""
        return frozenset()

    def forget_requests(self, names: Iterable[str]) -> None:  # noqa: B027
        """Forget these requests, by path or by request: the epoch that answers them, of this run or another, is
        committed."""

    # -- inputs one by one --

    def list_inputs(self) -> Iterator[FileStat]:
        """Yield all input that the source covers now, read or not."""
        return iter(())

    def track(self, position: Json) -> InputTracker:
        """Return a tracker for the status of every input, for a source at `position`."""
        return InputTracker()

    def restrict(self, names: Iterable[str]) -> None:
        """Read only these inputs. Called before `start`, by drills.

        Raises:
            ConfigError: this kind of source cannot.
        """
        raise ConfigError(f"a drill cannot limit source {self.name!r} to what lies there now")

    # -- reading --

    def reader_settings(self) -> dict[str, Json]:
        """Return the settings that the `SplitReader` of this kind needs beside the split, in plain JSON for the
        workers."""
        return {}

    def sample(self, plan: SourcePlan, columns: Mapping[str, Columns]) -> Sample | None:
        """Decode records of a slice in the driver, like a reader; None if only a run finds the columns.

        `columns` has the columns of each wanted port, as for a reader. The sample is bounded in bytes, and spread over
        the inputs of the slice.

        Raises:
            SchemaError, BadRecordsError: a record does not fit, and the settings make this an error.
        """
        return None

    def inputs_after(self, first: SourcePlan, everything: SourcePlan) -> list[dict[str, Json]]:
        """Return the inputs of a plan of everything that a plan of the first epoch leaves; for samples."""
        taken = {str(item["path"]) for split in first.splits for item in split.inputs}
        return [item for split in everything.splits for item in split.inputs if str(item["path"]) not in taken]


# -- the worker's side --------------------------------------------------------------------------------


class BadRecord(Protocol):
    """A record that can never be decoded; it goes to quarantine."""

    @property
    def line(self) -> int:
        """Its line, or what stands for a line in this input."""

    @property
    def record(self) -> int:
        """Its number within the input."""

    @property
    def reason(self) -> str:
        """Why, in a few words of which there are not many: they are counted."""

    @property
    def raw(self) -> bytes | memoryview:
        """The record itself."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Records of one input and one port, decoded: `bad` ones apart, the others as rows in the order of the input."""

    origin: str  # the input
    batch: pa.RecordBatch  # columns of the records alone
    record_numbers: pa.Array  # int64, of every row: its number within the input
    bad: Sequence[BadRecord] = ()
    constants: Mapping[str, str | None] = field(default_factory=dict)  # column -> value, as text
    port: str = MAIN_PORT
    rescued: Sequence[Rescued] = ()  # by column: values of these rows that are in `_rescued_data` instead
    header: bytes | None = None  # of the input: without it a bad record alone cannot be decoded; None: it can


class Budget:
    """How much of its split a reader may still read. Counts only, no clock: a second reading ends at the same place."""

    def __init__(self, split: Split, has_output_left: Callable[[], bool] = lambda: True) -> None:
        self._split = split
        self._has_output_left = has_output_left
        self.records = 0
        self.bytes_read = 0
        self.raw_bytes = 0  # after decompression

    @property
    def records_left(self) -> int:
        return self._split.max_records - self.records

    @property
    def is_full(self) -> bool:
        """Whether the reader must end at the next place where a cut is allowed."""
        if self.records >= self._split.max_records or self.bytes_read >= self._split.max_bytes:
            return True
        return not self._has_output_left()


class RestartError(Exception):
    """A reader that has handed on rows which do not count asks to begin again; the task discards what it wrote."""


class SplitReader(ABC):
    """Reads one split in a worker.

    `open_reader(settings, split, columns)` of its kind makes one per task, from the source's `reader_settings`, the
    split, and the `sources.columns.Columns` of each wanted port that are known so far. The wanted ports are those that
    a sink or operator reads; the main port if there are none, so that a source without other ports always finds it. The
    reader keeps what it learns between two calls of `read`. Memory stays bounded: batches, never a whole input.
    """

    @abstractmethod
    def read(self, schemas: Mapping[str, pa.Schema], budget: Budget) -> Iterator[Sequence[Rows]]:
        """Read the split from its beginning, and hand rows on when they are known to count.

        `schemas` has, for each wanted port, the columns of records that are known, with the types to use. The reader
        passes over records of other ports and does not count them as records; rows that it hands on there are dropped.
        It counts in `budget` what it has read: as records exactly the rows and bad records that it hands on. It ends
        when the budget is full, at the next place where a cut is allowed. The task writes what is handed on before it
        asks for more. Called again from the beginning, with a wider schema, when a column changes its type on the way.

        Raises:
            RestartError: rows that were handed on do not count; the next call leaves them out.
            SourceError: the source does not answer; the epoch is tried again.
            SchemaError, BadRecordsError: a record does not fit, and the settings say that this stops the run.
        """

    @abstractmethod
    def end(self) -> SplitEnd:
        """How the last call of `read` ended. Called once, after its iterator is exhausted.

        An input that cannot be read as it is, is no failure of the task: its outcome says so, and `failed` names it.
        Operator state cannot be rebuilt from an epoch with such an input.
        """
