"""The options that all sources have which capture changes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from firnline.names import spool_folder
from firnline.options import Home, SourceOptions


@dataclass(frozen=True, slots=True)
class SpoolOptions:
    """What is spooled, and what the server keeps beside it."""

    max_bytes: int = 256 << 20  # of files that wait for an epoch
    keep: Literal["durable", "cache"] = "durable"  # the only copy of what was read, or one beside the server's log


@dataclass(frozen=True, slots=True)
class LogSourceOptions(SourceOptions):
    """A source that captures the changes of tables from a server's log."""

    replays_quarantine: ClassVar[bool] = False
    counts: ClassVar[str] = "spool file"
    waits_for: ClassVar[str] = "transaction"
    logs_statements: ClassVar[bool] = False  # whether the server's log has statements that change tables

    dsn: str = field(repr=False)  # holds the password
    tables: tuple[str, ...] = ()
    include: tuple[str, ...] = field(default=(), kw_only=True)  # of committed_at, position, transaction, before
    snapshot: Literal["initial", "never", "always"] = field(default="initial", kw_only=True)
    on_ddl: Literal["warn", "resnapshot"] = field(default="warn", kw_only=True)
    home: Home = field(default_factory=lambda: Home(""), kw_only=True)
    folder: str = field(default="", kw_only=True)  # of the spool, in the home
    poll_interval_secs: float = field(default=0.1, kw_only=True)
    spool: SpoolOptions = field(default=SpoolOptions(), kw_only=True)

    def for_pipeline(self, name: str, home: Home) -> LogSourceOptions:
        return replace(self, home=home, folder=spool_folder(name, self.name))
