"""The options of a pipeline as plain values: what the spec becomes for the core."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from firnline.errors import ConfigError

MEBIBYTE = 1024 * 1024

# The columns that make a row a change by key, and the words of the first.
OP = "_op"
SEQUENCE = "_sequence"
MISSING = "_missing"  # of a change row: the columns whose values it does not have; the row keeps the old ones
MOVED = "_moved"  # of a change row that lacks values: the key changed, and the row before it deletes the old key
DELETE = "delete"  # the word of `_op` of a change row that deletes its key
TRUNCATE = "truncate"  # the word of `_op` of a change row without a key: all rows before it are gone
LINEAGE = ("_firnline_file", "_firnline_record", "_firnline_epoch")  # optional columns of a record: where it is from
FACTS = ("_committed_at", "_position", "_transaction")  # optional columns of a captured change: its transaction
OPERATIONS = ("insert", "update", DELETE, "read", TRUNCATE)  # words of `_op`; read: the row of a snapshot


@dataclass(frozen=True, slots=True)
class FieldOptions:
    """One declared column. `type` is written as in the spec, e.g. `decimal(18,2)` or `list<string>`."""

    name: str
    type: str
    nullable: bool = True


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """The columns of a source, and how the source treats fields that are no columns yet."""

    fields: tuple[FieldOptions, ...] = ()  # empty: inferred
    evolution: Literal["add", "rescue", "fail"] = "add"
    on_widen: Literal["rewrite", "rescue", "fail"] = "rewrite"
    infer_timestamps: bool = True


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options that every kind of source has."""

    type: ClassVar[str]  # the kind of source, see `firnline.sources.registry`
    replays_quarantine: ClassVar[bool] = True  # whether `Source.replay_quarantined` reads records again
    counts: ClassVar[str] = "file"  # what people call one input
    waits_for: ClassVar[str] = "file"  # what people call what comes next

    name: str
    poll_interval_secs: float = field(default=10, kw_only=True)
    on_bad_record: Literal["quarantine", "fail"] = field(default="quarantine", kw_only=True)
    max_bad_ratio: float = field(default=0.5, kw_only=True)  # of an epoch's records, once it has 100; 1.0 never stops
    schema: SchemaOptions = field(default=SchemaOptions(), kw_only=True)
    lineage: bool = field(default=False, kw_only=True)

    @property
    def replay_obstacle(self) -> str:
        """Why quarantined records cannot be read again with these options; empty if they can."""
        return ""

    def for_pipeline(self, name: str, home: Home) -> SourceOptions:
        """The options in the pipeline of this name and home, where a default depends on them."""
        return self

    def schema_of(self, port: str) -> SchemaOptions:
        """The declared columns of an output; `schema` has those of the main one."""
        return replace(self.schema, fields=()) if port else self.schema

    @property
    def location(self) -> str:
        """Where the input lies, for logs; without credentials."""
        return self.name


@dataclass(frozen=True, slots=True)
class Home:
    """Where a pipeline keeps its ledger, outbox, operator state and requests: a folder that every worker reaches."""

    root: str  # absolute path or URI
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class StrictColumn:
    """A column of records in which a value that does not fit makes the record bad; elsewhere the value is rescued."""

    type: str | None = None  # its type, as in the spec; None: that of any other column, which may get wider
    words: tuple[str, ...] | None = None  # the only values


def change_columns(sequence_by: str | None, delete_when: Mapping[str, object]) -> dict[str, StrictColumn]:
    """Return the columns of records on which an upsert relies apart from the key, for `SinkOptions.strict_columns`."""
    words = None if OP in delete_when else OPERATIONS  # else the spec says which words delete
    names = [*([sequence_by] if sequence_by else []), *delete_when]
    return {
        **{name: StrictColumn() for name in names},
        OP: StrictColumn("string", words),
        SEQUENCE: StrictColumn("int64"),
    }


_PLACEHOLDER = re.compile(r"\{([^{}]+)\}")


def template_columns(text: str) -> list[str]:
    """Return the columns that a template such as `orders.{region}` names; none for a plain name."""
    return _PLACEHOLDER.findall(text)


TABLE_PLACES = ("table", "schema", "database")  # of a template for captured tables; the last two are the same


def names_tables(port: str) -> bool:
    """Return whether an input names tables of a captured database by a pattern, such as `shop.*`."""
    return "*" in port or "?" in port


def split_template(text: str) -> list[tuple[str, str]]:
    """Return the pieces of a template: each a text, followed by a column, which is empty at the end."""
    pieces = _PLACEHOLDER.split(text)
    return list(zip(pieces[::2], [*pieces[1::2], ""], strict=True))


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Options that every kind of sink has."""

    type: ClassVar[str]  # the kind of sink, as the spec and `sinks.registry` name it

    name: str
    input: str = field(default="", kw_only=True)  # a source, an operator or one of its ports; empty: the only source
    write: Literal["append", "upsert"] = field(default="append", kw_only=True)  # upsert: applies a changelog by key
    key: tuple[str, ...] = field(default=(), kw_only=True)  # upsert: the columns that identify a row
    required: bool = field(default=True, kw_only=True)

    @property
    def location(self) -> str:
        """Where the sink lies, for logs; without credentials."""
        return self.name

    @property
    def fed_from_outbox(self) -> bool:
        """Whether tasks stage its rows in the outbox, though it is required."""
        return False

    @property
    def home(self) -> Home | None:
        """The pipeline's home if this sink decides; None: a sink of this kind has no room for one."""
        return None

    @property
    def can_decide(self) -> bool:
        """Whether a sink of this kind can decide."""
        return self.home is not None

    @property
    def is_staged(self) -> bool:
        """Whether another process commits what this sink stages."""
        return False

    @property
    def joins(self) -> str | None:
        """What a sink that is no follower gets if it is added to a pipeline with history: `now`, `snapshot`, or empty
        if the spec does not say it. None: it cannot be added."""
        return None

    @property
    def strict_columns(self) -> Mapping[str, StrictColumn]:
        """The columns of records on which the sink relies apart from `key`."""
        return {}


class MayDecide(Protocol):
    """The facts about a sink, in a spec or in options, that say whether it decides."""

    @property
    def required(self) -> bool: ...
    @property
    def can_decide(self) -> bool: ...
    @property
    def is_staged(self) -> bool: ...


AnySink = TypeVar("AnySink", bound=MayDecide)


def find_deciding(sinks: Sequence[AnySink]) -> AnySink | None:
    """Return the sink of a pipeline that decides; None: the pipeline's journal does.

    The first required sink that can decide and commits directly. Without one, a pipeline all of whose sinks can decide
    takes the first required one, which is staged.
    """
    required = [sink for sink in sinks if sink.required and sink.can_decide]
    direct = next((sink for sink in required if not sink.is_staged), None)
    if direct is not None or not required:
        return direct
    return required[0] if all(sink.can_decide for sink in sinks) else None


@dataclass(frozen=True, slots=True)
class FollowerOptions(SinkOptions):
    """Options that every kind of follower has."""

    columns: tuple[str, ...] = field(default=(), kw_only=True)  # the only columns to deliver; none: all
    exclude: tuple[str, ...] = field(default=(), kw_only=True)  # columns that are not delivered
    mask: Mapping[str, Literal["hash", "redact", "null"]] = field(default_factory=dict, kw_only=True)  # by column
    where: str = field(default="", kw_only=True)  # a condition: rows that do not fulfil it are not delivered
    on_bad_row: Literal["stop", "dead_letter"] = field(default="stop", kw_only=True)
    start: Literal["now", "beginning"] = field(default="now", kw_only=True)  # if added to a pipeline with history
    copy_from: str = field(default="", kw_only=True)  # the sink whose rows a new sink gets first
    renamed_from: str = field(default="", kw_only=True)  # the former name, under which the target knows the sink

    @property
    def head_name(self) -> str:
        """The name that the target knows the sink by: its first one."""
        return self.renamed_from or self.name

    @property
    def target(self) -> str:
        """The identity of the target, without credentials: a sink is its name plus this."""
        return self.location

    @property
    def fed_from_outbox(self) -> bool:
        return True

    @property
    def named_columns(self) -> Mapping[str, tuple[str, ...]]:
        """The columns that settings of the kind name, by setting: without one of them no row can be delivered."""
        return {"key": self.key}

    def own_shape(self) -> dict[str, Any]:
        """The kind's settings that shape delivery, in plain JSON; every epoch keeps those it was made with."""
        return {}


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """One operator: SQL, a built-in stateful one, or a user's own class.

    `settings` is plain JSON, checked by the spec's model of the type; it is sent to workers.
    """

    name: str
    type: str  # sql, aggregate, deduplicate, correlate, or module:Class
    inputs: tuple[str, ...]  # sources, operators, or ports of them: `totals.late`
    settings: Mapping[str, Any] = field(default_factory=dict)
    interval_ms: int | None = None  # checkpoint.mode per_operator: time between snapshots; None: every epoch
    initial_state: str = ""  # an exported state to start from, if the operator has none
    renamed_from: str = ""  # the operator's former name, under which checkpoints hold its state
    idle_after: timedelta | None = None  # an input without rows for this long no longer holds the watermark back

    @property
    def is_sql(self) -> bool:
        """Whether this is a query, which Spark runs and which keeps no state."""
        return self.type == "sql"

    @property
    def keys(self) -> tuple[str, ...]:
        """The columns that decide a row's shard; in the settings of every stateful operator."""
        return tuple(str(key) for key in self.settings.get("keys") or ())


@dataclass(frozen=True, slots=True)
class StateOptions:
    """Keyed state: its distribution over tasks, and the reaction to a lost worker."""

    shards: int | None = None  # None: as many as tasks run at once in the pipeline's first run
    key_groups: int = 128  # fixed for the life of a pipeline
    on_worker_loss: Literal["replace", "absorb"] = "replace"
    worker_ping_secs: float = 5.0
    dropped: tuple[str, ...] = ()  # operators that were removed from the spec and whose state may be deleted


@dataclass(frozen=True, slots=True)
class TriggerOptions:
    """When to checkpoint state: at the first epoch at which one of these triggers fires."""

    every_epochs: int | None = 1
    every_ms: int | None = None
    every_records: int | None = None
    event_time_ms: int | None = None  # when a watermark passes a multiple of this


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """The size of an epoch, and how epochs follow each other."""

    max_events: int = 5_000_000
    max_bytes: int = 1024 * MEBIBYTE
    max_files: int = 1000
    max_output_files: int = 1000
    max_ms: int = 60_000
    respect_source_tx: bool = True
    max_inflight: int = 2
    job_timeout_secs: float = 3600.0
    commit_policy: Literal["all", "required", "quorum"] = "all"
    quorum: int = 1


@dataclass(frozen=True, slots=True)
class RestartOptions:
    """Retries after a failure."""

    attempts: int = 5
    backoff_secs: float = 1.0
    max_backoff_secs: float = 60.0


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The checkpoint store: a copy of every checkpoint, the audit trail and the lease."""

    type: Literal["file", "sqlite", "postgres", "object", "memory"] = "file"
    path: str = ""  # file: a folder; sqlite: a file; absolute
    uri: str = ""  # object: a bucket and prefix, or an absolute folder
    dsn: str = field(default="", repr=False)  # postgres: holds a secret
    compress_above_bytes: int = 16 * 1024
    keep_versions: int = 10_000
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class LocalTierOptions:
    """The local tier: checkpoint copies on this machine's disk, for fast recovery."""

    path: str  # an absolute folder
    interval_ms: int = 1000


@dataclass(frozen=True, slots=True)
class RemoteTierOptions:
    """The remote tier: checkpoint copies that survive the loss of this machine."""

    uri: str  # a bucket and prefix, or an absolute folder (a mounted share)
    interval_ms: int = 60_000
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Copies of checkpoints, how recovery finds them, and how far back a rollback can go."""

    recovery_scan_commits: int = 100
    rollback_window: int | timedelta = 64  # how far the floor is behind the newest epoch: epochs, or time
    store: StoreOptions | None = None
    local: LocalTierOptions | None = None
    remote: RemoteTierOptions | None = None
    lease_seconds: float = 15.0
    mode: Literal["aligned", "per_operator"] = "aligned"
    trigger: TriggerOptions = TriggerOptions()
    timeout_ms: int = 60_000  # a state checkpoint that is not complete after this time is aborted
    max_pause_ms: int = 200  # a longer pause is logged as a warning
    keep_checkpoints: int = 3  # minimum number of complete state checkpoints to keep
    keep_aborted_secs: float = 3600.0


@dataclass(frozen=True, slots=True)
class OutboxOptions:
    """How much may wait in the outbox for sinks that lag, and how long delivered files stay."""

    max_bytes: int = 10 * 1024 * MEBIBYTE  # of one sink
    reserve: int = 2 * 1024 * MEBIBYTE  # free space that the outbox leaves on a local disk
    keep: timedelta = timedelta(hours=1)
    on_full: Literal["set_aside", "stop"] = "set_aside"


@dataclass(frozen=True, slots=True)
class StagingOptions:
    """The committer of two-stage tables."""

    poll_interval_secs: float = 10


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """One pipeline: sources, operators, sinks. The journal decides if there is one, else a sink (`find_deciding`)."""

    name: str
    sources: tuple[SourceOptions, ...]
    sinks: tuple[SinkOptions, ...]
    operators: tuple[OperatorOptions, ...] = ()  # in the order of the spec
    state: StateOptions = StateOptions()
    batch: BatchOptions = BatchOptions()
    restart: RestartOptions = RestartOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    staging: StagingOptions = StagingOptions()
    outbox: OutboxOptions = OutboxOptions()
    spark: Mapping[str, str] = field(default_factory=dict)
    operator_paths: tuple[str, ...] = ()  # folders from which a user's own operators are loaded
    journal: SinkOptions | None = None  # decides if it is given; takes no rows, and is not one of `sinks`

    @property
    def deciding(self) -> SinkOptions:
        """The sink that commits first and so fixes an epoch's boundaries."""
        return self.journal or find_deciding(self.sinks) or next((s for s in self.sinks if s.required), self.sinks[0])

    @property
    def ordered_sinks(self) -> tuple[SinkOptions, ...]:
        """The sinks, the deciding one first; the journal is the first of them if it decides."""
        deciding = self.deciding
        return (deciding, *(sink for sink in self.sinks if sink is not deciding))

    @property
    def home(self) -> Home:
        """Where the pipeline keeps its ledger, outbox, operator state and requests: with the deciding sink or journal.

        Raises:
            ConfigError: the deciding sink has no room for them.
        """
        deciding = self.deciding
        home = deciding.home
        if home is None:
            raise ConfigError(
                f"sink {deciding.name!r} ({deciding.type}) is the first required sink, so it would decide, but a sink "
                "of this kind has no folder for the pipeline's ledger",
                hint="List a sink that can decide before it, for example a Delta table. (A kind that can decide "
                "returns that folder from `home` of its options.)",
            )
        return home

    @property
    def input_words(self) -> tuple[str, str]:
        """What people call one input, and what comes next: `input` for both if sources differ."""
        words = ({source.counts for source in self.sources}, {source.waits_for for source in self.sources})
        counts, waits_for = (one.pop() if len(one) == 1 else "input" for one in words)
        return counts, waits_for

    @property
    def followers(self) -> tuple[FollowerOptions, ...]:
        """The sinks that are delivered from the outbox."""
        return tuple(sink for sink in self.sinks if isinstance(sink, FollowerOptions))

    def describe(self) -> dict[str, Any]:
        """Facts for logs and `--json`, without secrets."""
        return {
            "pipeline": self.name,
            "sources": {s.name: s.location for s in self.sources},
            "operators": [o.name for o in self.operators],
            "sinks": [s.location for s in self.sinks],
            **({"journal": self.journal.location} if self.journal is not None else {}),
        }
