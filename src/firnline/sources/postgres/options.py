"""The options of a source that captures changes from PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from firnline.names import spool_folder
from firnline.options import Home, SourceOptions
from firnline.postgres_client import place_of

DEFAULT_SCHEMA = "public"


@dataclass(frozen=True, slots=True)
class PostgresSourceOptions(SourceOptions):
    """A PostgreSQL source: the changes of tables, from the server's log."""

    type: ClassVar[str] = "postgres"
    replays_quarantine: ClassVar[bool] = False

    dsn: str = field(repr=False)  # holds the password
    tables: tuple[str, ...] = ()
    slot: str | None = None  # None: firnline_<pipeline>_<source>
    publication: str | None = None  # None: the name of the slot
    include: tuple[str, ...] = ()  # of committed_at, position, transaction, before
    home: Home = field(default_factory=lambda: Home(""))
    folder: str = ""
    poll_interval_secs: float = field(default=0.1, kw_only=True)

    @property
    def location(self) -> str:
        return place_of(self.dsn)

    def for_pipeline(self, name: str, home: Home) -> PostgresSourceOptions:
        default = "".join(sign if sign.isalnum() else "_" for sign in f"firnline_{name}_{self.name}".lower())[:63]
        slot = self.slot if self.slot is not None else default
        return replace(self, slot=slot, home=home, folder=spool_folder(name, self.name))
