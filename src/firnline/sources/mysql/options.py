"""The options of a source that captures changes from MySQL or MariaDB."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from firnline.options import Home
from firnline.sources.cdc.options import LogSourceOptions

_FIRST_ID, _IDS = 1_000_000_000, 3_000_000_000  # of readers that were given none


@dataclass(frozen=True, slots=True)
class MySqlSourceOptions(LogSourceOptions):
    """A MySQL or MariaDB source: the changes of tables, from the server's binary log."""

    type: ClassVar[str] = "mysql"
    logs_statements: ClassVar[bool] = True

    snapshot_dsn: str = field(default="", kw_only=True, repr=False)  # of a replica that tables are read from
    server_id: int | None = field(default=None, kw_only=True)  # None: made from the names of pipeline and source
    accept_cascades: bool = field(default=False, kw_only=True)  # capture tables that cascades change outside the log
    partial_inserts: bool = field(default=False, kw_only=True)  # take inserts whose defaults the log leaves out

    @property
    def location(self) -> str:
        return f"mysql://{urlsplit(self.dsn).netloc.rpartition('@')[2]}"

    @property
    def database(self) -> str:
        """The database of tables that are named without one."""
        return unquote(urlsplit(self.dsn).path.strip("/"))

    def for_pipeline(self, name: str, home: Home) -> MySqlSourceOptions:
        known = LogSourceOptions.for_pipeline(self, name, home)
        assert isinstance(known, MySqlSourceOptions)
        number = _FIRST_ID + zlib.crc32(f"{name}/{self.name}".encode()) % _IDS
        return replace(known, server_id=self.server_id if self.server_id is not None else number)
