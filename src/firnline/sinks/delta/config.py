"""The keys of a Delta table in a spec."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import ColumnName, Count, Endpoint, Location, ReadSecret, Secret, Size, differ, fail
from firnline.config.units import size_text
from firnline.options import TABLE_PLACES, SinkOptions, names_tables, template_columns
from firnline.sinks.config import DeliveryConfig, RecordsConfig, SinkConfig, check_pattern, check_template
from firnline.sinks.delta.options import (
    DEFAULT_FILE_BYTES,
    ESCAPED,
    MAX_PARTS,
    PARTS_ALLOWED,
    DeltaPartsOptions,
    DeltaSinkOptions,
)

_OF_TEMPLATES = (*(key for key in DeliveryConfig.own_keys() if key != "start"), "parts_allowed", "max_parts")
_NOT_OF_TABLES = ("key", "sequence_by", "delete_when", "partition_by", "columns", "where", "copy_from")
_OF_TABLES = ("mode", "max_pending_units", "max_pending_bytes", "interop")


class DeltaSinkConfig(DeliveryConfig, RecordsConfig):
    """A Delta table, or with a template such as lake/{region} one table for each value of a column."""

    other_words: ClassVar[dict[str, str]] = {
        "uri": "table",
        "url": "table",
        "path": "table",
        "partitions": "partition_by",
    }
    options_class = DeltaSinkOptions

    type: Literal["delta"] = Field(default="delta", description="Kind of sink.")
    table: Location = Field(
        description="Path or URI of the table, created when missing; relative to this file. With a template such as "
        "lake/{region} each value of the column has a table of its own (docs/sinks/delta.md); with the input shop.* "
        "and lake/{table} each captured table."
    )
    parts_allowed: str = Field(
        default=PARTS_ALLOWED,
        description="Template: a regular expression that the value of each of its columns must match as a whole; a row "
        "with another value is a bad row. Odd characters in the names of captured tables are escaped.",
    )
    max_parts: Count = Field(
        default=MAX_PARTS, description="Template: a row that would create more tables than this stops the sink."
    )
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
    evolution: Literal["add", "fail"] = Field(
        default="add",
        description="A column that the table lacks is added, and one that needs a wider type gets it; or (fail) the "
        "epoch is not committed, and the sink stops. schema.evolution of the source says what becomes a column at all.",
    )
    start: Literal["now", "beginning", "snapshot"] = Field(  # type: ignore[assignment]  # more than other sinks have
        default="now",
        description="What a table gets if it is added to a pipeline with history. now: every later epoch. snapshot: "
        "the captured tables that it reads are also read again; it is the default if no other sink gets their rows a "
        "second time. Other sources need `now`. A table with this key never decides. With a template: now (default), "
        "or beginning: every epoch since the first, made again from its input.",
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

    @field_validator("table")
    @classmethod
    def _table_is_a_template_or_none(cls, table: str) -> str:
        check_template(table)
        return table

    @field_validator("parts_allowed")
    @classmethod
    def _pattern_is_valid(cls, pattern: str) -> str:
        return check_pattern(pattern)

    @field_validator("partition_by")
    @classmethod
    def _partitions_differ(cls, columns: tuple[str, ...]) -> tuple[str, ...]:
        return differ(columns, "column")

    @model_validator(mode="after")
    def _mode_fits(self) -> DeltaSinkConfig:
        if self.write == "upsert" and self.mode == "staged":
            raise fail("upsert is not possible with mode: staged", "write", hint="Write `mode: direct`.")
        if self.evolution == "fail" and self.mode == "staged":
            hint = "Write `mode: direct`, or `schema: {evolution: fail}` at the source."
            raise fail("not with mode: staged, where the committer adds columns", "evolution", hint=hint)
        return self

    @model_validator(mode="after")
    def _sequence_is_no_partition(self) -> DeltaSinkConfig:
        if self.sequence_by in self.partition_by:
            raise fail("cannot be a column of partition_by", "sequence_by", hint="Name another column.")
        return self

    @model_validator(mode="after")
    def _keys_fit_the_table(self) -> DeltaSinkConfig:
        columns = template_columns(self.table)
        wrong = [key for key in (_OF_TABLES if columns else _OF_TEMPLATES) if key in self.model_fields_set]
        if wrong and columns:
            raise fail("not with a template in table", wrong[0])
        if wrong:
            raise fail("only with a template in table, such as lake/{region}", wrong[0])
        if self.start == ("snapshot" if columns else "beginning"):
            other = "not with a template" if columns else "only with a template"
            raise fail(f"{self.start} is possible {other} in table", "start")
        root = self.table.partition("{")[0].rpartition("/")[0]
        if columns and not re.match(r"[a-z0-9+.-]+://[^/]|/+[^/]", root):
            raise fail("a template needs a folder, or a bucket, that all its tables lie in", "table")
        if names_tables(self.input):
            self._check_tables(columns)
        else:
            self.check_delivered("table", columns)
        self.check_delivered("partition_by", self.partition_by)
        self.check_delivered("sequence_by", [self.sequence_by] if self.sequence_by else [])
        self.check_delivered("delete_when", self.delete_when)
        return self

    def _check_tables(self, places: list[str]) -> None:
        """Check the settings of a sink that has a table for each table of a captured database."""
        hint = "Write for example `table: lake/{table}`; {schema} or {database} may be part of it."
        if TABLE_PLACES[0] not in places:
            raise fail(f'"{self.input}" are many tables, so each needs a table of its own', "table", hint=hint)
        if unknown := next((place for place in places if place not in TABLE_PLACES), None):
            raise fail(f"{{{unknown}}} is not known of a captured table", "table", hint=hint)
        for key in _NOT_OF_TABLES:
            if key in self.model_fields_set:
                words = "each has its own key" if key == "key" else "they have different columns"
                hint = "Give the table that needs it a sink of its own."
                raise fail(f'not with "{self.input}", which are many tables: {words}', key, hint=hint)

    @property
    def takes_tables(self) -> bool:
        return self.is_template

    @property
    def is_template(self) -> bool:
        """Whether the sink has a table for each value of a column."""
        return bool(template_columns(self.table))

    @property
    def can_decide(self) -> bool:
        return not self.is_template and "start" not in self.model_fields_set

    def may_write_to(self, location: str) -> bool:
        allowed = f"{self.parts_allowed}|{ESCAPED}" if names_tables(self.input) else self.parts_allowed
        return self.is_template and find_part(self.table, allowed, location)

    def build(self, input_name: str, read_secret: ReadSecret) -> SinkOptions:
        values = {**self.follower_values(read_secret), "input": input_name}
        if not self.is_template and "start" not in self.model_fields_set:
            values["start"] = ""
        chosen, other = (DeltaPartsOptions, _OF_TABLES) if self.is_template else (DeltaSinkOptions, _OF_TEMPLATES)
        return chosen(**{key: value for key, value in values.items() if key not in other})

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("table", self.table)

    @property
    def is_staged(self) -> bool:
        return self.mode == "staged"

    def check_behind(self, deciding: SinkConfig) -> None:
        if deciding.is_staged and not self.is_staged:
            raise fail("cannot be direct behind a staged sink; set mode: staged here, or list this sink first", "mode")


def find_part(template: str, allowed: str, location: str) -> bool:
    """Return whether a template can name a table at a location, above it or below it."""
    pieces = re.split(r"\{[^{}]+\}", template)
    pattern = f"(?:{allowed})".join(re.escape(piece) for piece in pieces)
    folders = location.rstrip("/").split("/")
    tables = ["/".join(folders[: depth + 1]) for depth in range(len(folders))]
    return any(re.fullmatch(pattern, table) for table in tables)
