"""The keys of a Delta table in a spec."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from firnline.config.fields import ColumnName, Count, Endpoint, Location, Secret, Size, differ, fail
from firnline.config.units import size_text
from firnline.sinks.config import SinkConfig
from firnline.sinks.delta.options import DEFAULT_FILE_BYTES, DeltaSinkOptions


def _texts(value: Any) -> Any:
    """Return values that mark a delete as a list of texts: `D`, `[D, 4]`, `true`."""
    values = value if isinstance(value, list | tuple) else [value]
    return [str(one).lower() if isinstance(one, bool) else str(one) if isinstance(one, int) else one for one in values]


_SCALAR = {"type": ["string", "integer", "boolean"]}
DeleteValues = Annotated[
    tuple[str, ...],
    Field(min_length=1),
    BeforeValidator(_texts),
    WithJsonSchema({"anyOf": [_SCALAR, {"type": "array", "items": _SCALAR, "minItems": 1}]}),
]


class DeltaSinkConfig(SinkConfig):
    """A Delta table."""

    other_words: ClassVar[dict[str, str]] = {
        "uri": "table",
        "url": "table",
        "path": "table",
        "partitions": "partition_by",
    }
    options_class = DeltaSinkOptions
    upserts_records = True

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

    sequence_by: ColumnName | None = Field(
        default=None,
        description="Upsert of a source: the column that orders the rows of one key, e.g. updated_at; without it, the "
        "later row counts.",
    )
    delete_when: dict[ColumnName, DeleteValues] = Field(
        default={},
        description="Upsert of a source: column and value of the records that delete their key, e.g. {op: D}.",
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
    def _records_fit_write(self) -> DeltaSinkConfig:
        for name in ("sequence_by", "delete_when"):
            if getattr(self, name) and self.write != "upsert":
                raise fail("only with write: upsert (here it is append)", name)
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
