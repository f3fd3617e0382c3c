"""The keys of a source in a spec that captures changes from PostgreSQL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from firnline.config.fields import ReadSecret, Seconds, Secret, differ, fail
from firnline.options import SourceOptions
from firnline.sources.config import SourceConfig
from firnline.sources.postgres.options import PostgresSourceOptions

Included = Literal["committed_at", "position", "transaction", "before"]


class PostgresSourceConfig(SourceConfig):
    """A PostgreSQL source: captures the changes of tables from the server's log."""

    other_words: ClassVar[dict[str, str]] = {"table": "tables", "url": "dsn", "slot_name": "slot"}
    options_class = PostgresSourceOptions
    ports: ClassVar[tuple[str, ...] | None] = None
    batch_defaults: ClassVar[Mapping[str, int]] = {"max_events": 100_000, "max_bytes": 64 * 1024 * 1024, "max_ms": 200}

    type: Literal["postgres"] = Field(default="postgres", description="Kind of source.")
    dsn: Secret = Field(
        description="Connection: postgresql://user:password@host:5432/database, best as ${env:NAME} or ${file:path}."
    )
    tables: tuple[str, ...] = Field(
        description="Tables to capture: schema.table, with * and ? for any characters; without a schema in public. "
        "A leading ! excludes."
    )
    slot: str | None = Field(
        default=None, description="Replication slot, created if missing. Default: firnline_<pipeline>_<source>."
    )
    publication: str | None = Field(
        default=None,
        description="An existing publication, which is left as it is. Default: one with the name of the slot, to which "
        "the tables are added.",
    )
    include: tuple[Included, ...] = Field(
        default=(),
        description="Facts about changes that become columns: committed_at, position, transaction and before, in "
        "_committed_at, _position, _transaction and _before.",
    )
    poll_interval_secs: Seconds = Field(default=0.1, description="Seconds between two looks for new transactions.")

    @field_validator("tables")
    @classmethod
    def _some_tables(cls, tables: tuple[str, ...]) -> tuple[str, ...]:
        if not any(not table.startswith("!") for table in tables):
            raise fail("name at least one table")
        return differ(tables, "table")

    @field_validator("slot")
    @classmethod
    def _slot_is_plain(cls, slot: str | None) -> str | None:
        if slot is not None and not all(sign in "abcdefghijklmnopqrstuvwxyz0123456789_" for sign in slot):
            raise fail("a slot has lower-case letters, digits and _ only")
        return slot

    def build(self, name: str, read_secret: ReadSecret) -> SourceOptions:
        """Return the options of the source."""
        values: dict[str, Any] = self.plain(read_secret)
        for key in ("type", "schema_"):
            values.pop(key)
        return PostgresSourceOptions(name=name, schema=self.schema_.build(), **values)
