"""The options of a PostgreSQL table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal

from firnline.options import FollowerOptions, StrictColumn, change_columns, template_columns
from firnline.postgres_client import place_of

DEFAULT_SCHEMA = "public"
STATEMENT_TIMEOUT = timedelta(minutes=5)
LOCK_TIMEOUT = timedelta(seconds=30)
NAME_BYTES = 63  # PostgreSQL cuts longer names off
PARTS_ALLOWED = "[A-Za-z0-9_]+"
MAX_PARTS = 1_000


@dataclass(frozen=True, slots=True)
class PostgresSinkOptions(FollowerOptions):
    """A PostgreSQL table."""

    type: ClassVar[str] = "postgres"

    dsn: str = field(repr=False)
    table: str  # schema.table, or a table of the schema `public`; with {column}, a table for each value
    parts_allowed: str = field(default=PARTS_ALLOWED, kw_only=True)  # template: a pattern for the values of the columns
    max_parts: int = field(default=MAX_PARTS, kw_only=True)
    evolution: Literal["add", "fail"] = field(default="add", kw_only=True)  # what a column becomes that the table lacks
    event_id: bool = field(default=False, kw_only=True)  # whether the column _firnline_id gets the id of each row
    statement_timeout: timedelta = field(default=STATEMENT_TIMEOUT, kw_only=True)
    lock_timeout: timedelta = field(default=LOCK_TIMEOUT, kw_only=True)
    sequence_by: str | None = field(default=None, kw_only=True)  # upsert of records: the column that orders rows
    delete_when: Mapping[str, tuple[str, ...]] = field(default_factory=dict, kw_only=True)  # records that delete

    @property
    def location(self) -> str:
        return f"{place_of(self.dsn)}/{'.'.join(self.table_name)}"

    @property
    def table_name(self) -> tuple[str, str]:
        """Schema and name of the table; of a template, both may have columns."""
        return split_table(self.table)

    @property
    def strict_columns(self) -> Mapping[str, StrictColumn]:
        return change_columns(self.sequence_by, self.delete_when) if self.write == "upsert" else {}

    @property
    def named_columns(self) -> Mapping[str, tuple[str, ...]]:
        order = (self.sequence_by,) if self.sequence_by else ()
        return {"key": self.key, "sequence_by": order, "table": tuple(template_columns(self.table))}

    def own_shape(self) -> dict[str, Any]:
        return {
            "write": self.write,
            "key": list(self.key),
            "sequence_by": self.sequence_by,
            "delete_when": {name: list(values) for name, values in self.delete_when.items()},
            "event_id": self.event_id,
            **({"parts_allowed": self.parts_allowed} if template_columns(self.table) else {}),
        }


def split_table(table: str) -> tuple[str, str]:
    """Return schema and name of a table, or of a template of tables."""
    parts = re.findall(r"(?:\{[^{}]*\}|[^.{}])+", table)
    return (parts[0], parts[1]) if len(parts) == 2 else (DEFAULT_SCHEMA, table)
