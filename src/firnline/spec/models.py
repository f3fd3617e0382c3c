"""The models of a pipeline file: one per section, each key with its default and meaning."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, SecretStr, ValidationInfo, field_validator, model_validator

from firnline.spec.checkpoint import (
    CheckpointConfig,
    LocalTierConfig,
    RemoteTierConfig,
    StateConfig,
    StoreConfig,
    TriggerConfig,
)
from firnline.spec.fieldtypes import (
    TEXT_IN_YAML,
    ColumnName,
    Config,
    Count,
    Flag,
    Location,
    Name,
    Ratio,
    Retries,
    Seconds,
    Secret,
    fail,
)
from firnline.spec.locations import is_inside, same_place
from firnline.spec.operators import AnyOperatorConfig
from firnline.spec.secrets import has_reference, is_sensitive
from firnline.spec.spark_keys import find_refusal

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "DeltaSinkConfig",
    "FieldConfig",
    "FilesSourceConfig",
    "LocalTierConfig",
    "PipelineSpec",
    "RemoteTierConfig",
    "RestartConfig",
    "SchemaConfig",
    "StagingConfig",
    "StateConfig",
    "StoreConfig",
    "TriggerConfig",
]

_TIME_WITHOUT_ZONE = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?")


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
    return value


SparkValue = Annotated[str | Secret, TEXT_IN_YAML]
SparkKey = Annotated[str, AfterValidator(_spark_key)]


class FieldConfig(Config):
    """One declared column."""

    name: ColumnName = Field(description="Name of the column, as in the records.")
    type: str = Field(
        description="string, int32, int64, float32, float64, decimal(p,s), boolean, timestamp, date, binary, json, "
        "list<T>, map<T> or struct<name:T,...>."
    )
    nullable: Flag = Field(default=True, description="Whether the column may be null.")

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        if value.count("(") != value.count(")") or value.count("<") != value.count(">"):
            raise fail(f'"{value}" is cut off (inside {{ }} put a type that holds a comma in quotes)')
        from firnline.schema import field_from_spec  # loads Arrow, which a spec without columns does not need

        try:
            field_from_spec({"name": "c", "type": value})
        except ValueError as exc:
            words = str(exc).removeprefix("column 'c': ").removeprefix(f"type {value!r}: ")
            raise fail(words.removesuffix(f" at {value!r}")) from None
        return value


class SchemaConfig(Config):
    """The columns of a source, and how the source treats fields that are no columns yet."""

    fields: tuple[FieldConfig, ...] = Field(
        default=(), description="Declared columns; others are inferred from the records (docs/types.md)."
    )
    evolution: Literal["add", "rescue", "fail"] = Field(
        default="add",
        description="How to treat a field that is no column yet: add makes it a column, rescue keeps it in "
        "_rescued_data, fail stops the epoch.",
    )

    @field_validator("fields")
    @classmethod
    def _names_differ(cls, fields: tuple[FieldConfig, ...]) -> tuple[FieldConfig, ...]:
        seen: set[str] = set()
        for index, field in enumerate(fields):
            if field.name.lower() in seen:
                raise fail(f'column "{field.name}" is there twice (upper and lower case are the same)', index, "name")
            seen.add(field.name.lower())
        return fields


class FilesSourceConfig(Config):
    """A file source: reads files in byte order of their names."""

    other_words: ClassVar[dict[str, str]] = {"uri": "path", "url": "path", "folder": "path", "table": "path"}

    type: Literal["files"] = Field(default="files", description="Kind of source.")
    path: Location = Field(
        description="Folder, glob or URI (s3://, gs://, az://, abfs://, file://) of the input; relative to this file."
    )
    format: Literal["ndjson"] = Field(
        default="ndjson", description="Newline-delimited JSON; compression by suffix: .gz, .zst or none."
    )
    poll_interval_secs: Seconds = Field(default=10, description="Seconds between two listings for new files.")
    reconcile_interval_secs: Seconds = Field(
        default=3600, description="Seconds between two full listings, which find late files; --once always makes one."
    )
    start_after: str | None = Field(
        default=None, min_length=1, description="Begin after this file name, or at this time (RFC 3339, with a zone)."
    )
    late_files: Literal["ingest", "ignore", "fail"] = Field(
        default="ingest", description="How to treat a late file: one whose name sorts before files already read."
    )
    file_attempts: Count = Field(default=3, description="Attempts before a broken file is set aside.")
    on_bad_record: Literal["quarantine", "fail"] = Field(
        default="quarantine", description="How to treat a record that can never be decoded."
    )
    max_bad_ratio: Ratio = Field(
        default=0.5,
        description="Stop when more than this share of an epoch's records (once it has 100) is bad; 1.0 never stops.",
    )
    max_record_bytes: Count = Field(default=16 * 1024 * 1024, description="A longer line is a bad record.")
    schema_: SchemaConfig = Field(
        default=SchemaConfig(), alias="schema", description="Columns: inferred by default, or declared."
    )
    lineage: Flag = Field(
        default=False, description="Add the columns _firnline_file, _firnline_record and _firnline_epoch."
    )
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoints of the store; values may be ${env:NAME} or ${file:path}."
    )

    @field_validator("start_after")
    @classmethod
    def _time_has_a_zone(cls, value: str | None) -> str | None:
        if value is not None and _TIME_WITHOUT_ZONE.fullmatch(value):
            raise fail(f'the time "{value}" has no zone (write {value.replace(" ", "T")}Z for UTC)')
        return value


class DeltaSinkConfig(Config):
    """A Delta table."""

    other_words: ClassVar[dict[str, str]] = {
        "uri": "table",
        "url": "table",
        "path": "table",
        "partitions": "partition_by",
    }

    type: Literal["delta"] = Field(default="delta", description="Kind of sink.")
    name: Name | None = Field(
        default=None, description="Unique name, stored in checkpoints; default: type and number, e.g. delta-1."
    )
    table: Location = Field(description="Path or URI of the table, created when missing; relative to this file.")
    input: str = Field(
        default="",
        description="The source or operator to write, or late rows as NAME.late; may be omitted if there is only one "
        "candidate.",
    )
    write: Literal["append", "upsert"] = Field(
        default="append", description="append adds rows; upsert applies inserts, updates and deletes by key."
    )
    key: tuple[ColumnName, ...] = Field(
        default=(), description="Upsert: the columns that identify a row; by default those of the operator."
    )
    required: Flag = Field(
        default=True,
        description="Whether the checkpoint waits for this sink. Rows of an optional sink (false) wait in the deciding "
        "table's outbox, so that its outage does not stop the pipeline.",
    )
    mode: Literal["direct", "staged"] = Field(
        default="direct", description="direct commits each epoch; staged leaves that to `firnline committer`."
    )
    max_pending_units: Count | None = Field(
        default=None, description="Staged: wait while this many epochs are pending; null means no limit."
    )
    max_pending_bytes: Count | None = Field(
        default=None, description="Staged: wait while this many bytes are pending; null means no limit."
    )
    partition_by: tuple[ColumnName, ...] = Field(
        default=(), description="Columns that partition the table, e.g. [month]."
    )
    file_size_mb: Count = Field(default=128, description="Start another Parquet file at about this size.")
    interop: Literal["auto", "blizzard", "none"] = Field(
        default="auto", description="Also write the blizzard: checkpoint; auto: on tables that Firnline created."
    )
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoints of the store; values may be ${env:NAME} or ${file:path}."
    )

    @field_validator("partition_by", "key")
    @classmethod
    def _columns_differ(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        for index, column in enumerate(columns):
            if column.lower() in (other.lower() for other in columns[:index]):
                raise fail(f'column "{column}" is there twice', index)
        return columns

    @model_validator(mode="after")
    def _upsert_fits(self) -> DeltaSinkConfig:
        if self.write == "upsert" and self.mode == "staged":
            raise fail("upsert is not possible with mode: staged", "write", hint="Write `mode: direct`.")
        if self.write == "append" and self.key:
            raise fail("only with write: upsert (here it is append)", "key")
        return self


class BatchConfig(Config):
    """The size of an epoch, and how epochs follow each other."""

    other_words: ClassVar[dict[str, str]] = {"max_records": "max_events", "max_rows": "max_events"}

    max_events: Count = Field(default=5_000_000, description="Maximum number of records per epoch (approximate).")
    max_bytes: Count = Field(
        default=1024 * 1024 * 1024, description="Maximum number of input bytes per epoch (approximate)."
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
    max_ms: Count = Field(
        default=60_000, description="How long an epoch collects input, in milliseconds; never cuts inside a task."
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
    quorum: Count = Field(default=1, description="Number of sinks, with commit_policy: quorum.")

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


class PipelineSpec(Config):
    """One pipeline: file sources, operators, Delta tables."""

    name: Name = Field(description="The pipeline's identity, stored in its sinks; do not change it later.")
    sources: dict[Name, FilesSourceConfig] = Field(min_length=1, description="The sources by name.")
    operators: tuple[AnyOperatorConfig, ...] = Field(
        default=(), description="Transformations between sources and sinks; if empty, sources go straight to sinks."
    )
    sinks: tuple[DeltaSinkConfig, ...] = Field(
        min_length=1, description="The tables to write; the first required sink decides each epoch."
    )
    state: StateConfig = Field(default=StateConfig(), description="How keyed state is spread over tasks.")
    batch: BatchConfig = Field(default=BatchConfig(), description="The size of an epoch.")
    restart: RestartConfig = Field(default=RestartConfig(), description="Retries after a failure.")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Copies and retention of checkpoints.")
    staging: StagingConfig = Field(default=StagingConfig(), description="The committer of two-stage tables.")
    spark: dict[SparkKey, SparkValue] = Field(
        default={}, description="Spark settings, e.g. spark.master; settings that load code are refused."
    )

    @field_validator("sinks")
    @classmethod
    def _sinks_differ(cls, sinks: tuple[DeltaSinkConfig, ...], info: ValidationInfo) -> tuple[DeltaSinkConfig, ...]:
        named = tuple(s if s.name else s.model_copy(update={"name": f"{s.type}-{i}"}) for i, s in enumerate(sinks, 1))
        for index, sink in enumerate(named):
            for other in named[:index]:
                if sink.name == other.name:
                    raise fail(f'two sinks have the name "{sink.name}"', index, "name")
                if same_place(sink.table, other.table):
                    raise fail(f'sink "{other.name}" already writes to this table', index, "table")
            for name, source in (info.data.get("sources") or {}).items():
                if is_inside(sink.table, source.path):
                    raise fail(f'the table lies inside the path of source "{name}"', index, "table")
        if not any(sink.required for sink in named):
            raise fail("at least one sink must be required")
        deciding = next(sink for sink in named if sink.required)
        for index, sink in enumerate(named):
            if deciding.mode == "staged" and sink.mode == "direct":
                raise fail(
                    "cannot be direct behind a staged sink; set mode: staged here, or list this sink first",
                    index,
                    "mode",
                )
        return named

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
