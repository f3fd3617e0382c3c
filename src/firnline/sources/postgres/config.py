"""The keys of a source in a spec that captures changes from PostgreSQL."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from firnline.config.fields import Secret, Size, fail
from firnline.sources.cdc.config import LogSourceConfig, SpoolConfig
from firnline.sources.postgres.options import PostgresSourceOptions

_SLOT_SIGNS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


class PostgresSpoolConfig(SpoolConfig):
    """The spool of a PostgreSQL source."""

    keep: Literal["durable", "cache"] = Field(
        default="durable",
        description="durable: the spool is the only copy of what was read, and the server may forget its log up to the "
        "newest epoch but one. cache: the server keeps its log for the whole rollback window, so that a lost spool can "
        "be read again.",
    )


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
    failover: bool = Field(
        default=False,
        description="true: the slot is created as a failover slot, which standbys copy, so that reading goes on after "
        "a promotion. Needs PostgreSQL 17 or later.",
    )
    publication: str | None = Field(
        default=None,
        description="An existing publication, which is left as it is. Default: one with the name of the slot, to which "
        "the tables are added.",
    )
    spool: PostgresSpoolConfig = Field(
        default=PostgresSpoolConfig(), description="Spool files, in the pipeline's home."
    )
    max_slot_lag_bytes: Size | None = Field(
        default=None, description="Alarm when the slot makes the server keep more of its log. Default: never."
    )
    on_slot_lag: Literal["warn", "stop"] = Field(
        default="warn",
        description="When the slot keeps more than max_slot_lag_bytes: warn shows it in status, log and metrics; stop "
        "also ends the run.",
    )

    @field_validator("slot")
    @classmethod
    def _slot_is_plain(cls, slot: str | None) -> str | None:
        if slot is not None and not (slot and _SLOT_SIGNS.issuperset(slot) and len(slot) <= 63):
            raise fail("a slot has lower-case letters, digits and _ only, at most 63 of them")
        return slot
