"""The keys of a Delta table in a spec."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import ColumnName, Count, Endpoint, Location, Secret, Size, differ, fail
from firnline.config.units import size_text
from firnline.sinks.config import RecordsConfig, SinkConfig
from firnline.sinks.delta.options import DEFAULT_FILE_BYTES, DeltaSinkOptions


class DeltaSinkConfig(RecordsConfig):
    """A Delta table."""

    other_words: ClassVar[dict[str, str]] = {
        "uri": "table",
        "url": "table",
        "path": "table",
        "partitions": "partition_by",
    }
    options_class = DeltaSinkOptions

    type: Literal["delta"] = Field(default="delta", description="Kind of sink.")
    table: Location = Field(description="Path or URI of the table, created when missing; relative to this file.")
    mode: Literal["direct", "staged"] = Field(
        default="direct", description="direct commits each epoch; staged leaves that to `firnline committer`."
    )
    max_pending_units: Count | None = Field(
        default=None, description="Staged: wait while this many epochs are pending; null means no limit."
    )
    max_pending_bytes: Size | None = Field(
        default=None, description="Staged: wait while this many bytes are pending; null means no limit."
    )
    partition_by: tuple[ColumnName, ...] = Field(
        default=(), description="Columns that partition the table, e.g. [month]."
    )
    file_size: Size = Field(
        default=DEFAULT_FILE_BYTES,
        json_schema_extra={"default": size_text(DEFAULT_FILE_BYTES)},
        description="Start another Parquet file at about this size. The older key file_size_mb (a number of MiB) still "
        "works.",
    )
    interop: Literal["auto", "blizzard", "none"] = Field(
        default="auto",
        description="Also write the blizzard: checkpoint (docs/interop.md): auto on tables that Firnline created, "
        "blizzard always, none never.",
    )
    storage_options: dict[str, Secret] = Field(
        default={}, description="Credentials and endpoints of the store; values may be ${env:NAME} or ${file:path}."
    )

    @model_validator(mode="before")
    @classmethod
    def _older_file_size(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("file_size_mb") is None:
            return data
        mebibytes = data["file_size_mb"]
        if isinstance(mebibytes, bool) or not isinstance(mebibytes, int) or mebibytes < 1:
            raise fail("must be a whole number, at least 1; or write file_size: 128MiB", "file_size_mb")
        if data.get("file_size") is not None:
            raise fail("is the older word for file_size; write only one of them", "file_size_mb")
        rest = {key: value for key, value in data.items() if key != "file_size_mb"}
        return {**rest, "file_size": mebibytes * 1024 * 1024}

    @field_validator("partition_by")
    @classmethod
    def _partitions_differ(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        return differ(columns, "column")

    @model_validator(mode="after")
    def _no_staged_upsert(self) -> DeltaSinkConfig:
        if self.write == "upsert" and self.mode == "staged":
            raise fail("upsert is not possible with mode: staged", "write", hint="Write `mode: direct`.")
        return self

    @model_validator(mode="after")
    def _sequence_is_no_partition(self) -> DeltaSinkConfig:
        if self.sequence_by in self.partition_by:
            raise fail("cannot be a column of partition_by", "sequence_by", hint="Name another column.")
        return self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("table", self.table)

    @property
    def is_staged(self) -> bool:
        return self.mode == "staged"

    def check_behind(self, deciding: SinkConfig) -> None:
        if deciding.is_staged and not self.is_staged:
            raise fail("cannot be direct behind a staged sink; set mode: staged here, or list this sink first", "mode")
