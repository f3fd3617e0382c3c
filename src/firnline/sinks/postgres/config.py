"""The keys of a PostgreSQL table in a spec."""

from __future__ import annotations

import re
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import Count, Duration, Endpoint, Flag, Secret, fail
from firnline.options import template_columns
from firnline.postgres_client import place_of
from firnline.sinks.config import FollowerConfig, RecordsConfig, check_pattern, check_template
from firnline.sinks.postgres.options import (
    LOCK_TIMEOUT,
    MAX_PARTS,
    NAME_BYTES,
    PARTS_ALLOWED,
    STATEMENT_TIMEOUT,
    PostgresSinkOptions,
    split_table,
)


class PostgresSinkConfig(FollowerConfig, RecordsConfig):
    """A PostgreSQL table."""

    other_words: ClassVar[dict[str, str]] = {"url": "dsn", "uri": "dsn", "connection": "dsn"}
    options_class = PostgresSinkOptions

    type: Literal["postgres"] = Field(default="postgres", description="Kind of sink.")
    dsn: Secret = Field(
        description="Connection: postgresql://user:password@host:5432/database, best as ${env:NAME} or ${file:path}."
    )
    table: str = Field(
        description="The table as schema.table, created when missing; without a schema: public. With a template such "
        "as lake.{region} each value of the column has a table of its own."
    )
    parts_allowed: str = Field(
        default=PARTS_ALLOWED,
        description="Template: a regular expression that the value of each of its columns must match as a whole; a row "
        "with another value is a bad row.",
    )
    max_parts: Count = Field(
        default=MAX_PARTS, description="Template: a row that would create more tables than this stops the sink."
    )
    evolution: Literal["add", "fail"] = Field(
        default="add", description="A column that the table lacks is added, or stops the sink."
    )
    event_id: Flag = Field(
        default=False, description="Whether the column _firnline_id holds the id of each row (firnline trace)."
    )
    statement_timeout: Duration = Field(
        default=STATEMENT_TIMEOUT,
        json_schema_extra={"default": "5m"},
        description="The longest that one statement may take, for example a COPY of 64 MiB; a server that is silent "
        "for longer counts as lost.",
    )
    lock_timeout: Duration = Field(
        default=LOCK_TIMEOUT,
        json_schema_extra={"default": "30s"},
        description="The longest wait for a lock, e.g. of a table that somebody alters.",
    )

    @field_validator("table")
    @classmethod
    def _table_is_a_name(cls, table: str) -> str:
        check_template(table)
        parts = re.sub(r"\{[^{}]+\}", "x", table).split(".")
        if len(parts) > 2 or not all(parts):
            raise fail("must be schema.table, or a table of the schema public")
        for part in parts:
            if "\0" in part or len(part.encode()) > NAME_BYTES:
                raise fail(f"a name has at most {NAME_BYTES} bytes")
        if parts[0] == "firnline" and len(parts) == 2:
            raise fail("the schema firnline is for checkpoints", hint="Choose another schema.")
        return table

    @field_validator("parts_allowed")
    @classmethod
    def _pattern_is_valid(cls, pattern: str) -> str:
        return check_pattern(pattern)

    @model_validator(mode="after")
    def _template_fits(self) -> PostgresSinkConfig:
        columns = template_columns(self.table)
        wrong = [key for key in ("parts_allowed", "max_parts") if key in self.model_fields_set and not columns]
        if wrong:
            raise fail("only with a template in table, such as lake.{region}", wrong[0])
        self.check_delivered("table", columns)
        return self

    @model_validator(mode="after")
    def _needed_columns_are_delivered(self) -> PostgresSinkConfig:
        self.check_delivered("sequence_by", [self.sequence_by] if self.sequence_by else [])
        self.check_delivered("delete_when", self.delete_when)
        return self

    @property
    def endpoint(self) -> Endpoint:
        dsn = self.dsn.get_secret_value()
        server = dsn if dsn.startswith("${") else place_of(dsn)
        return Endpoint("table", f"{server}/{'.'.join(split_table(self.table))}")
