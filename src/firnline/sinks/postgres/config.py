"""The keys of a PostgreSQL table in a spec."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import Duration, Flag, Secret, fail
from firnline.options import OP
from firnline.sinks.config import FollowerConfig, RecordsConfig
from firnline.sinks.postgres.options import LOCK_TIMEOUT, NAME_BYTES, STATEMENT_TIMEOUT, PostgresSinkOptions


class PostgresSinkConfig(FollowerConfig, RecordsConfig):
    """A PostgreSQL table."""

    other_words: ClassVar[dict[str, str]] = {"url": "dsn", "uri": "dsn", "connection": "dsn"}
    options_class = PostgresSinkOptions

    type: Literal["postgres"] = Field(default="postgres", description="Kind of sink.")
    dsn: Secret = Field(
        description="Connection: postgresql://user:password@host:5432/database, best as ${env:NAME} or ${file:path}."
    )
    table: str = Field(description="The table as schema.table, created when missing; without a schema: public.")
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
        parts = table.split(".")
        if len(parts) > 2 or not all(parts):
            raise fail("must be schema.table, or a table of the schema public")
        for part in parts:
            if "\0" in part or len(part.encode()) > NAME_BYTES:
                raise fail(f"a name has at most {NAME_BYTES} bytes")
        if parts[0] == "firnline" and len(parts) == 2:
            raise fail("the schema firnline is for checkpoints", hint="Choose another schema.")
        return table

    @model_validator(mode="after")
    def _needed_columns_are_delivered(self) -> PostgresSinkConfig:
        needed = {"sequence_by": [self.sequence_by] if self.sequence_by else [], "delete_when": list(self.delete_when)}
        for setting, names in needed.items():
            for name in names:
                if name in self.exclude or (self.columns and name not in self.columns):
                    raise fail(f'the column "{name}" is not delivered', setting)
        if self.write == "upsert" and OP in self.exclude:
            raise fail(f"an upsert needs the column {OP}", "exclude")
        return self
