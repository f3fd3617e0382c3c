"""The keys that all sources have which capture changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import Config, ReadSecret, Seconds, Size, differ, fail
from firnline.options import SourceOptions
from firnline.sources.cdc.options import LogSourceOptions, SpoolOptions
from firnline.sources.config import SourceConfig

Included = Literal["committed_at", "position", "transaction", "before"]


class SpoolConfig(Config):
    """The spool of a source that captures changes."""

    max_bytes: Size = Field(
        default=256 * 1024 * 1024,
        json_schema_extra={"default": "256 MiB"},
        description="Most bytes of spool files that wait for an epoch: then the reader stops reading until there is "
        "room. A single transaction may be larger.",
    )


class LogSourceConfig(SourceConfig):
    """A source that captures the changes of tables from a server's log."""

    has_keys: ClassVar[bool] = True
    ports: ClassVar[tuple[str, ...] | None] = None
    batch_defaults: ClassVar[Mapping[str, int]] = {"max_events": 500_000, "max_bytes": 256 << 20, "max_ms": 200}

    tables: tuple[str, ...] = Field(
        description="Tables to capture: schema.table (of MySQL database.table), with * and ? for any characters. "
        "Without a schema: in public, or in the database of the dsn. A leading ! excludes."
    )
    include: tuple[Included, ...] = Field(
        default=(),
        description="Facts about changes that become columns: committed_at, position, transaction and before, in "
        "_committed_at, _position, _transaction and _before.",
    )
    snapshot: Literal["initial", "never", "always"] = Field(
        default="initial",
        description="Rows that are in a table before its changes are captured. initial: they are read once, also of a "
        "table that is added later. never: only changes are captured. always: every run reads the tables again.",
    )
    on_ddl: Literal["warn", "resnapshot"] = Field(
        default="warn",
        description="DDL that changes rows without row events, such as a new column with a default or a changed type. "
        "warn: the log, status and dry-run name the table and the command that reads it again. resnapshot: the next "
        "epoch begins to read the table again.",
    )
    poll_interval_secs: Seconds = Field(default=0.1, description="Seconds between two looks for new transactions.")
    spool: SpoolConfig = Field(default=SpoolConfig(), description="Spool files, in the pipeline's home.")

    @field_validator("tables")
    @classmethod
    def _some_tables(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        if not any(not table.startswith("!") for table in tables):
            raise fail("name at least one table")
        return differ(tables, "table")

    @model_validator(mode="after")
    def _may_read(self) -> Self:
        if self.on_ddl == "resnapshot" and self.snapshot == "never":
            raise fail("on_ddl: resnapshot reads tables, and snapshot: never forbids it", "on_ddl")
        return self

    def build(self, name: str, read_secret: ReadSecret) -> SourceOptions:
        """Return the options of the source."""
        options = super().build(name, read_secret)
        assert isinstance(options, LogSourceOptions)
        return replace(options, spool=SpoolOptions(**self.spool.plain(read_secret)))
