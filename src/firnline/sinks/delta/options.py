"""The options of a Delta table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from firnline.names import JOURNAL
from firnline.options import Home, SinkOptions, StrictColumn, change_columns

DEFAULT_FILE_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class DeltaSinkOptions(SinkOptions):
    """A Delta table."""

    type: ClassVar[str] = "delta"

    table: str  # absolute path or URI
    mode: Literal["direct", "staged"] = "direct"  # staged: a committer commits the staged units
    max_pending_units: int | None = None  # staged: wait while this many units are pending
    max_pending_bytes: int | None = None
    partition_by: tuple[str, ...] = ()
    file_size: int = DEFAULT_FILE_BYTES
    interop: Literal["auto", "blizzard", "none"] = "auto"  # auto: on tables that Firnline created
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    sequence_by: str | None = None  # upsert of records: the column that orders the rows of one key; None: their order
    delete_when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # column -> values of records that delete

    @property
    def location(self) -> str:
        return self.table

    @property
    def home(self) -> Home:
        return Home(self.table, self.storage_options)

    @property
    def is_staged(self) -> bool:
        return self.mode == "staged"

    @property
    def strict_columns(self) -> Mapping[str, StrictColumn]:
        return change_columns(self.sequence_by, self.delete_when) if self.write == "upsert" else {}


@dataclass(frozen=True, slots=True)
class JournalOptions(DeltaSinkOptions):
    """The journal of a pipeline: a Delta table without rows, whose folder is the pipeline's home."""


def journal_in(home: Home) -> JournalOptions:
    """Return the journal that lies in a home."""
    return JournalOptions(JOURNAL, home.root, interop="none", storage_options=home.storage_options)


def delta_tables(sinks: Iterable[SinkOptions]) -> tuple[DeltaSinkOptions, ...]:
    """Return the Delta tables among the sinks of a pipeline, for commands that work on tables only."""
    return tuple(sink for sink in sinks if isinstance(sink, DeltaSinkOptions))
