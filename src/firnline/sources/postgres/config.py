"""The keys of a source in a spec that captures changes from PostgreSQL."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from firnline.config.fields import ReadSecret, Secret, fail
from firnline.options import SourceOptions
from firnline.sources.cdc.config import LogSourceConfig
from firnline.sources.postgres.options import PostgresSourceOptions

_SLOT_SIGNS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


class PostgresSourceConfig(LogSourceConfig):
    """A PostgreSQL source: captures the changes of tables from the server's log."""

    other_words: ClassVar[dict[str, str]] = {"table": "tables", "url": "dsn", "slot_name": "slot"}
    options_class = PostgresSourceOptions

    type: Literal["postgres"] = Field(default="postgres", description="Kind of source.")
    dsn: Secret = Field(
        description="Connection: postgresql://user:password@host:5432/database, best as ${env:NAME} or ${file:path}."
    )
    slot: str | None = Field(
        default=None, description="Replication slot, created if missing. Default: firnline_<pipeline>_<source>."
    )
    publication: str | None = Field(
        default=None,
        description="An existing publication, which is left as it is. Default: one with the name of the slot, to which "
        "the tables are added.",
    )

    @field_validator("slot")
    @classmethod
    def _slot_is_plain(cls, slot: str | None) -> str | None:
        if slot is not None and not (slot and _SLOT_SIGNS.issuperset(slot) and len(slot) <= 63):
            raise fail("a slot has lower-case letters, digits and _ only, at most 63 of them")
        return slot

    def build(self, name: str, read_secret: ReadSecret) -> SourceOptions:
        """Return the options of the source."""
        values: dict[str, Any] = self.plain(read_secret)
        for key in ("type", "schema_"):
            values.pop(key)
        return PostgresSourceOptions(name=name, schema=self.schema_.build(), **values)
