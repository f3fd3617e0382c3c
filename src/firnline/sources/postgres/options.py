"""The options of a source that captures changes from PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from firnline.options import Home
from firnline.postgres_client import place_of
from firnline.sources.cdc.options import LogSourceOptions

DEFAULT_SCHEMA = "public"
_NAME_BYTES = 63


@dataclass(frozen=True, slots=True)
class PostgresSourceOptions(LogSourceOptions):
    """A PostgreSQL source: the changes of tables, from the server's log."""

    type: ClassVar[str] = "postgres"

    slot: str | None = field(default=None, kw_only=True)  # None: firnline_<pipeline>_<source>
    publication: str | None = field(default=None, kw_only=True)  # None: the name of the slot, and made by us
    failover: bool = field(default=False, kw_only=True)  # the slot is copied to standbys (PostgreSQL 17)
    max_slot_lag_bytes: int | None = field(default=None, kw_only=True)  # more that the server keeps is an alarm
    on_slot_lag: Literal["warn", "stop"] = field(default="warn", kw_only=True)

    @property
    def location(self) -> str:
        return place_of(self.dsn)

    def for_pipeline(self, name: str, home: Home) -> PostgresSourceOptions:
        signs = f"firnline_{name}_{self.name}".lower()
        default = "".join(sign if sign.isascii() and sign.isalnum() else "_" for sign in signs)[:_NAME_BYTES]
        known = LogSourceOptions.for_pipeline(self, name, home)
        assert isinstance(known, PostgresSourceOptions)
        return replace(known, slot=self.slot if self.slot is not None else default)
