"""The models of a pipeline file: one per section, each key with its default and meaning; and their JSON Schema."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from datetime import timedelta
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from firnline.config.fields import (
    TEXT_IN_YAML,
    Config,
    Count,
    Duration,
    Flag,
    Location,
    Millis,
    Name,
    Retries,
    Seconds,
    Secret,
    Size,
    Window,
    below,
    fail,
)
from firnline.config.secrets import has_reference, is_sensitive
from firnline.config.units import size_text
from firnline.names import JOURNAL
from firnline.options import find_deciding
from firnline.sinks.config import SinkConfig
from firnline.sinks.registry import config_models as sink_models
from firnline.sources.config import SourceConfig
from firnline.sources.registry import config_models as source_models
from firnline.spec.operators import AnyOperatorConfig
from firnline.spec.problems import unknown_type
from firnline.spec.spark_keys import find_refusal, find_value_problem


class StoreConfig(Config):
    """Where a copy of every checkpoint, the audit trail and the lease are kept."""

    other_words: ClassVar[dict[str, str]] = {"url": "uri", "folder": "path", "file": "path", "kind": "type"}

    type: Literal["file", "sqlite", "postgres", "object", "memory"] = Field(
        default="file", description="file, sqlite, postgres, object or memory; docs/stores.md helps to choose."
    )
    path: Location | None = Field(
        default=None,
        description="file: the folder (data/firnline_checkpoints by default). sqlite: the file. Relative to this file.",
    )
    uri: Location | None = Field(
        default=None, description="object: bucket and prefix (s3://, gs://, az://), or a folder."
    )
    dsn: Secret | None = Field(default=None, description="postgres: connection string, e.g. ${env:CHECKPOINTS_DSN}.")
    compress_above_bytes: Size = Field(default=16 * 1024, description="Compress larger payloads with zstd.")
    keep_versions: Count = Field(default=10_000, description="Minimum number of checkpoint versions to keep.")
    storage_options: dict[str, Secret] = Field(
        default={}, description="object: credentials and endpoint; values may be ${env:NAME} or ${file:path}."
    )

    @model_validator(mode="after")
    def _place_fits_type(self) -> StoreConfig:
        for key, kinds in (("uri", ("object",)), ("dsn", ("postgres",)), ("path", ("file", "sqlite"))):
            given = key in self.model_fields_set
            if given and self.type not in kinds:
                raise fail(f"is for type: {' or '.join(kinds)}, not {self.type}", key)
            if not given and self.type in kinds and (key != "path" or self.type == "sqlite"):
                raise fail(f"type: {self.type} needs it", key)
        return self


class LocalTierConfig(Config):
    """Checkpoint copies on this machine's disk, for fast recovery."""

    path: Location = Field(description="A folder on this machine's own disk.")
    interval_ms: Millis = Field(default=1000, description="Minimum time between two writes, in milliseconds.")

    @field_validator("path")
    @classmethod
    def _is_local(cls, value: str) -> str:
        if "://" in value:
            raise fail("must be a folder on this machine; a bucket belongs to checkpoint.remote")
        return value


class RemoteTierConfig(Config):
    """Checkpoint copies that survive the loss of this machine."""

    other_words: ClassVar[dict[str, str]] = {"path": "uri", "url": "uri"}

    uri: Location = Field(description="Bucket and prefix (s3://, gs://, az://), or a folder on a mounted share.")
    interval_ms: Millis = Field(default=60_000, description="Minimum time between two replications, in milliseconds.")
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoint; values may be ${env:NAME} or ${file:path}."
    )


class TriggerConfig(Config):
    """When to checkpoint state: at the first epoch at which one of these triggers fires."""

    every_epochs: Count | None = Field(
        default=1, description="After this many epochs; off if only other triggers are given."
    )
    every_ms: Millis | None = Field(default=None, description="After this many milliseconds.")
    every_records: Count | None = Field(default=None, description="After this many records.")
    event_time: Duration | None = Field(
        default=None, description="When a watermark passes a multiple of this, e.g. 10m."
    )


class CheckpointConfig(Config):
    """Copies of checkpoints, how recovery finds them, and how far back a rollback can go."""

    recovery_scan_commits: Count = Field(
        default=100, description="Number of commits that a first run searches backwards for another tool's progress."
    )
    rollback_window: Window = Field(
        default=64, description="How far back a rollback can go: a number of epochs, or a time like 12h or 7d."
    )
    store: StoreConfig | None = Field(
        default=None,
        description="A copy of every checkpoint, the audit trail and the lease; files beside the spec by default.",
    )
    local: LocalTierConfig | None = Field(
        default=None, description="Local tier: checkpoint copies on this machine's disk; off by default."
    )
    remote: RemoteTierConfig | None = Field(
        default=None, description="Remote tier: checkpoint copies that survive this machine; off by default."
    )
    lease_seconds: Seconds = Field(
        default=15.0, description="A standby takes over if the active run has not renewed the lease for this long."
    )
    mode: Literal["aligned", "per_operator"] = Field(
        default="aligned",
        description="aligned: snapshot all operators at one epoch; per_operator: each at its own interval_ms.",
    )
    trigger: TriggerConfig = Field(
        default=TriggerConfig(), description="When to checkpoint state: at the first trigger that fires."
    )
    timeout_ms: Millis = Field(
        default=60_000, description="Abort a state checkpoint whose shards have not all reported after this time."
    )
    max_pause_ms: Millis = Field(default=200, description="Warn if a checkpoint pauses the epoch for longer.")
    keep_checkpoints: Count = Field(default=3, description="Minimum number of complete state checkpoints to keep.")
    keep_aborted: Duration = Field(
        default=timedelta(hours=1),
        json_schema_extra={"default": "1h"},
        description="How long to keep the files of an aborted checkpoint, e.g. 1h.",
    )


MAX_KEY_GROUPS = 32_768


class StateConfig(Config):
    """Keyed state: its distribution over tasks, and the reaction to a lost worker."""

    shards: Count | None = Field(
        default=None,
        description="Shards of the state, one task each; by default as many as tasks run at once.",
    )
    key_groups: Annotated[Count, Field(le=MAX_KEY_GROUPS)] = Field(
        default=128, description="Number of key groups; fixed for the life of a pipeline."
    )
    on_worker_loss: Literal["replace", "absorb"] = Field(
        default="replace",
        description="replace waits for a new worker; absorb moves its shards to the other workers until it returns.",
    )
    worker_ping_secs: Seconds = Field(
        default=5.0, description="Heartbeat interval of workers; a worker that misses four heartbeats is lost."
    )
    dropped: tuple[Name, ...] = Field(
        default=(), description="Operators that were removed from this file and whose state may be deleted."
    )

    @model_validator(mode="after")
    def _shards_have_groups(self) -> StateConfig:
        if self.shards is not None and self.shards > self.key_groups:
            raise fail(f"must be at most key_groups ({self.key_groups}), not {self.shards}", "shards")
        return self


def _spark_key(key: str) -> str:
    refusal = find_refusal(key)
    if refusal is not None:
        raise fail(refusal)
    return key


def _spark_value(key: str, value: Any) -> Any:
    if isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, int | float):
        value = str(value)
    if not isinstance(value, str | SecretStr):
        raise fail("must be text: Spark settings are written flat, e.g. spark.master: local[2]", key)
    if isinstance(value, str) and (is_sensitive(key) or has_reference(value)):
        return SecretStr(value)
    problem = find_value_problem(key, value) if isinstance(value, str) else None
    if problem is not None:
        raise fail(problem, key)
    return value


_SOURCES = "The sources by name."
_SINKS = (
    "The sinks; the first required Delta table with mode: direct decides each epoch, and without one the pipeline's "
    "journal does."
)
SparkValue = Annotated[str | Secret, TEXT_IN_YAML]
SparkKey = Annotated[str, AfterValidator(_spark_key)]


class BatchConfig(Config):
    """The size of an epoch, and how epochs follow each other."""

    other_words: ClassVar[dict[str, str]] = {"max_records": "max_events", "max_rows": "max_events"}

    max_events: Count = Field(
        default=5_000_000,
        description="Maximum number of records per epoch (approximate). Default with a Kafka source: 100000; with a "
        "database whose changes are captured: 500000.",
    )
    max_bytes: Size = Field(
        default=1024 * 1024 * 1024,
        description="Maximum number of input bytes per epoch (approximate). Default with a Kafka source: 64 MiB; with "
        "a database whose changes are captured: 256 MiB.",
    )
    max_files: Count = Field(default=1000, description="Maximum number of input files per epoch.")
    max_output_files: Count = Field(
        default=1000,
        description="Maximum number of Parquet files that one epoch stages for one table, over all partitions and "
        "tasks. No more tasks than that read, and a task that exceeds its share ends after its current file. If the "
        "first rows of a task (a file, or its first 48 MiB) alone fall into more partitions, the limit cannot be kept: "
        "the run logs this and uses fewer tasks from then on. The limit applies where a source goes straight to a "
        "table; behind operators the number of Spark tasks decides.",
    )
    max_ms: Millis = Field(
        default=60_000,
        description="How long an epoch collects input, in milliseconds; never cuts inside a task. Default with a Kafka "
        "source: 200, and only while records keep coming.",
    )
    respect_source_tx: Flag = Field(
        default=True,
        description="Whether a transaction of the source stays in one epoch. Those of captured databases always do: "
        "`false` changes nothing there. Files have none, and Kafka does not tell where one ends.",
    )
    max_inflight: Count = Field(default=2, description="Maximum number of epochs in flight; commits stay in order.")
    job_timeout_secs: Seconds = Field(
        default=3600.0,
        description="Timeout of a job that reads, runs a query or rewrites files; the job is cancelled and run again. "
        "Jobs of stateful operators use checkpoint.timeout_ms.",
    )
    commit_policy: Literal["all", "required", "quorum"] = Field(
        default="all",
        description="Which sinks must hold an epoch before the checkpoint advances: all and required mean every sink "
        "that is not optional (required: false); quorum means the number in `quorum`.",
    )
    quorum: Count = Field(
        default=1,
        description="Number of sinks, with commit_policy: quorum. A sink that is set aside holds nothing: it never "
        "makes a quorum easier to reach.",
    )

    @field_validator("quorum")
    @classmethod
    def _only_with_its_policy(cls, value: int, info: ValidationInfo) -> int:
        policy = info.data.get("commit_policy", "quorum")
        if policy != "quorum":
            raise fail(f"only with commit_policy: quorum (here it is {policy})")
        return value


class RestartConfig(Config):
    """Retries after a failure."""

    attempts: Retries = Field(default=5, description="Number of retries of a failed epoch; 0 means none.")
    backoff_secs: Seconds = Field(default=1.0, description="Delay before the first retry; doubles with each.")
    max_backoff_secs: Seconds = Field(
        default=60.0, validate_default=True, description="Longest delay between two retries."
    )

    @field_validator("max_backoff_secs")
    @classmethod
    def _not_below_the_first(cls, value: float, info: ValidationInfo) -> float:
        first = info.data.get("backoff_secs", value)
        if value < first:
            raise fail(f"must be at least backoff_secs ({first:g}), not {value:g}")
        return value


class StagingConfig(Config):
    """The committer of two-stage tables."""

    poll_interval_secs: Seconds = Field(
        default=10, description="Seconds between two listings of staged units by `firnline committer`."
    )


class HomeConfig(Config):
    """Where a pipeline that decides in its journal keeps everything of its own."""

    other_words: ClassVar[dict[str, str]] = {"uri": "path", "url": "path", "folder": "path"}

    path: Location = Field(description="Folder or URI, created when missing; relative to this file.")
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoints of the store; values may be ${env:NAME} or ${file:path}."
    )


def _path_alone(value: Any) -> Any:
    """Return the mapping that a path alone stands for."""
    return {"path": value} if isinstance(value, str) else value


GIBIBYTE = 1024**3


class OutboxConfig(Config):
    """The outbox: rows that wait for sinks which are not Delta tables, or are optional."""

    max_bytes: Size = Field(
        default=10 * GIBIBYTE,
        json_schema_extra={"default": size_text(10 * GIBIBYTE)},
        description="Most bytes that may wait for one sink.",
    )
    reserve: Size = Field(
        default=2 * GIBIBYTE,
        json_schema_extra={"default": size_text(2 * GIBIBYTE)},
        description="Free space that the outbox leaves on a local disk.",
    )
    keep: Duration = Field(
        default=timedelta(hours=1), description="How long delivered rows stay, in case that a sink goes back."
    )
    on_full: Literal["set_aside", "stop"] = Field(
        default="set_aside",
        description="When the outbox is full: set_aside gives the slowest sink up until `firnline sinks resync`; "
        "stop ends the run.",
    )


class PipelineSpec(Config):
    """One pipeline: sources, operators, sinks."""

    name: Name = Field(description="The pipeline's identity, stored in its sinks; do not change it later.")
    sources: dict[Name, SourceConfig] = Field(min_length=1, description=_SOURCES)
    operators: tuple[AnyOperatorConfig, ...] = Field(
        default=(), description="Transformations between sources and sinks; if empty, sources go straight to sinks."
    )
    sinks: tuple[SinkConfig, ...] = Field(min_length=1, description=_SINKS)
    home: Annotated[HomeConfig, BeforeValidator(_path_alone, json_schema_input_type=str | HomeConfig)] | None = Field(
        default=None,
        description="Folder or URI of the journal, ledger, outbox, state and run history, if no Delta table decides; "
        "relative to this file, default: data/NAME beside it. A path, or a mapping.",
    )
    state: StateConfig = Field(default=StateConfig(), description="How keyed state is distributed over tasks.")
    batch: BatchConfig = Field(default=BatchConfig(), description="The size of an epoch.")
    restart: RestartConfig = Field(default=RestartConfig(), description="Retries after a failure.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Copies and retention of checkpoints.")
    staging: StagingConfig = Field(default=StagingConfig(), description="The committer of two-stage tables.")
    outbox: OutboxConfig = Field(default=OutboxConfig(), description="Rows that wait for sinks.")
    spark: dict[SparkKey, SparkValue] = Field(
        default={}, description="Spark settings, e.g. spark.master; settings that load code are refused."
    )

    @field_validator("sinks")
    @classmethod
    def _sinks_differ(cls, sinks: tuple[SinkConfig, ...]) -> tuple[SinkConfig, ...]:
        named = tuple(s if s.name else s.model_copy(update={"name": f"{s.type}-{i}"}) for i, s in enumerate(sinks, 1))
        for index, sink in enumerate(named):
            if any(sink.name == other.name for other in named[:index]):
                raise fail(f'two sinks have the name "{sink.name}"', index, "name")
            if str(sink.name).lower() == JOURNAL:
                raise fail(f'the name "{sink.name}" is reserved for the pipeline\'s journal', index, "name")
        deciding = find_deciding(named)
        for index, sink in enumerate(named):
            try:
                if deciding is not None and sink is not deciding:
                    sink.check_behind(deciding)
            except PydanticCustomError as error:
                raise below(error, index) from None
        return named

    @field_validator("home")
    @classmethod
    def _home_is_needed(cls, home: HomeConfig | None, info: ValidationInfo) -> HomeConfig | None:
        deciding = find_deciding(info.data.get("sinks", ()))
        if home is not None and deciding is not None:
            raise fail(
                f'not used: sink "{deciding.name}" decides, and its table holds what would be in the home',
                hint="Remove `home`; or write `required: false` on that sink, and the journal in the home decides.",
            )
        return home

    @field_validator("batch")
    @classmethod
    def _quorum_can_be_met(cls, batch: BatchConfig, info: ValidationInfo) -> BatchConfig:
        sinks = info.data.get("sinks")
        if sinks is not None and batch.quorum > len(sinks):
            raise fail(f"must be at most the number of sinks ({len(sinks)}), not {batch.quorum}", "quorum")
        return batch

    @field_validator("spark", mode="before")
    @classmethod
    def _spark_values(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: _spark_value(str(key), item) for key, item in value.items() if item is not None}


# -- the kinds of sources and sinks -----------------------------------------------------------------------

DEFAULT_SOURCE = "files"  # the kind of a section without `type`
DEFAULT_SINK = "delta"


def pipeline_model() -> type[PipelineSpec]:
    """Return the model of a pipeline file, with the keys of every kind of source and sink that is registered."""
    parts = [
        tuple(part.items()) for kinds in (source_models(), sink_models()) for part in (kinds.models, kinds.problems)
    ]
    return _pipeline_model(*parts)


@functools.cache
def _pipeline_model(
    sources: tuple[tuple[str, type[SourceConfig]], ...],
    source_problems: tuple[tuple[str, str], ...],
    sinks: tuple[tuple[str, type[SinkConfig]], ...],
    sink_problems: tuple[tuple[str, str], ...],
) -> type[PipelineSpec]:
    source = _one_of(dict(sources), dict(source_problems), DEFAULT_SOURCE)
    sink = _one_of(dict(sinks), dict(sink_problems), DEFAULT_SINK)
    fields: dict[str, Any] = {
        "sources": (GenericAlias(dict, (Name, source)), Field(min_length=1, description=_SOURCES)),
        "sinks": (GenericAlias(tuple, (sink, ...)), Field(min_length=1, description=_SINKS)),
    }
    return create_model("PipelineSpec", __base__=PipelineSpec, __doc__=PipelineSpec.__doc__, **fields)


def _one_of(
    models: Mapping[str, type[SourceConfig] | type[SinkConfig]], problems: Mapping[str, str], default: str
) -> Any:
    """Return a type for a section that one of these models checks: the one of its `type`."""

    def check_type(value: Any) -> Any:
        """Check the type first: under a wrong type, every key looks wrong."""
        if isinstance(value, dict) and tag_of(value) in problems:
            raise fail(problems[tag_of(value)], "type")
        if isinstance(value, dict) and value.get("type") is not None and value["type"] not in list(models):
            raise fail(unknown_type(value["type"], list(models)), "type")
        return value

    def tag_of(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return str(kind or default)

    check = BeforeValidator(check_type)
    if len(models) == 1:  # pydantic has no union of one
        return Annotated[next(iter(models.values())), check]
    choices: Any = functools.reduce(operator.or_, (Annotated[model, Tag(kind)] for kind, model in models.items()))
    return Annotated[choices, Discriminator(tag_of), check]


_VARIABLE = {"type": "string", "pattern": r"\$\{[^}]+\}"}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12). Numbers and booleans may also be written as `${NAME}`."""
    schema = pipeline_model().model_json_schema(by_alias=True, mode="validation")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_with_variables(schema),
        "title": "Firnline pipeline",
    }


def _with_variables(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_variables(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _with_variables(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}
    if kept.get("type") not in ("integer", "number", "boolean"):
        return kept
    typed = {key: kept.pop(key) for key in ("type", *_BOUNDS) if key in kept}
    return {**kept, "anyOf": [typed, _VARIABLE]}
