"""The options of a Delta table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from firnline.names import JOURNAL
from firnline.options import (
    FollowerOptions,
    Home,
    SinkOptions,
    StrictColumn,
    change_columns,
    names_tables,
    template_columns,
)

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
    # What it gets if it is added to a pipeline with history; empty: a snapshot of the captured tables that it reads, if
    # nothing stands against it. A table with `start` never decides.
    start: Literal["", "now", "snapshot"] = field(default="", kw_only=True)
    evolution: Literal["add", "fail"] = field(default="add", kw_only=True)  # what a new or wider column does

    @property
    def location(self) -> str:
        return self.table

    @property
    def home(self) -> Home:
        return Home(self.table, self.storage_options)

    @property
    def can_decide(self) -> bool:
        return not self.start

    @property
    def joins(self) -> str | None:
        return None if self.is_staged else self.start

    @property
    def is_staged(self) -> bool:
        return self.mode == "staged"

    @property
    def strict_columns(self) -> Mapping[str, StrictColumn]:
        return change_columns(self.sequence_by, self.delete_when) if self.write == "upsert" else {}


PARTS_ALLOWED = "[A-Za-z0-9][A-Za-z0-9._-]*"
ESCAPED = "[A-Za-z0-9._~-]+"  # names of captured tables with odd characters
MAX_PARTS = 1_000


@dataclass(frozen=True, slots=True)
class DeltaPartsOptions(FollowerOptions):
    """Delta tables with a template, such as `lake/{region}`: one table, a part of the sink, for each value.

    If the input is a pattern of captured tables (`shop.*`), one for each of them: `lake/{table}`.
    """

    type: ClassVar[str] = "delta"

    table: str  # the template: absolute path or URI with {column}
    parts_allowed: str = field(default=PARTS_ALLOWED, kw_only=True)  # a pattern for the values of the columns
    max_parts: int = field(default=MAX_PARTS, kw_only=True)
    partition_by: tuple[str, ...] = field(default=(), kw_only=True)
    file_size: int = field(default=DEFAULT_FILE_BYTES, kw_only=True)
    storage_options: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    sequence_by: str | None = field(default=None, kw_only=True)
    delete_when: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)
    evolution: Literal["add", "fail"] = field(default="add", kw_only=True)  # as of a table

    @property
    def location(self) -> str:
        return self.table

    @property
    def root(self) -> str:
        """The folder that all parts lie in, and the sink's head: the template up to the segment of its first column."""
        return self.table.partition("{")[0].rpartition("/")[0]

    @property
    def template(self) -> str:
        """The template below `root`, which gives a part its name."""
        return self.table[len(self.root) + 1 :]

    @property
    def takes_tables(self) -> bool:
        """Whether each part has the rows of one captured table."""
        return names_tables(self.input)

    @property
    def strict_columns(self) -> Mapping[str, StrictColumn]:
        upserts_records = self.write == "upsert" and not self.takes_tables
        return change_columns(self.sequence_by, self.delete_when) if upserts_records else {}

    @property
    def named_columns(self) -> Mapping[str, tuple[str, ...]]:
        if self.takes_tables:
            return {}
        order = (self.sequence_by,) if self.sequence_by else ()
        return {"key": self.key, "sequence_by": order, "table": tuple(template_columns(self.table))}

    def own_shape(self) -> dict[str, Any]:
        return {
            "parts_allowed": self.parts_allowed,
            "write": self.write,
            "key": list(self.key),
            "sequence_by": self.sequence_by,
            "delete_when": {name: list(values) for name, values in self.delete_when.items()},
        }


@dataclass(frozen=True, slots=True)
class JournalOptions(DeltaSinkOptions):
    """The journal of a pipeline: a Delta table without rows, whose folder is the pipeline's home."""


def journal_in(home: Home) -> JournalOptions:
    """Return the journal that lies in a home."""
    return JournalOptions(JOURNAL, home.root, interop="none", storage_options=home.storage_options)


def delta_tables(sinks: Iterable[SinkOptions]) -> tuple[DeltaSinkOptions, ...]:
    """Return the Delta tables among the sinks of a pipeline, for commands that work on tables only."""
    return tuple(sink for sink in sinks if isinstance(sink, DeltaSinkOptions))
