"""Schema versions: every schema of a captured table that was in force, by a fingerprint of its content.

The ledger entry of the first epoch that uses a version has it, in the input record of the spool file where it begins.
So schema, position and rows become true together, and go back together.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from firnline.schema import type_to_text
from firnline.sources.cdc.log import Column, Decoded, TableSchema
from firnline.sources.cdc.tables import snapshot_command
from firnline.sources.files.formats.arrow_fit import own_field
from firnline.types import Json

VERSIONS = "schemas"  # of an input record: the versions that begin in the file
SILENT = "silent"  # of an input record: changes of rows which are not in the log, by what the file has
# Of an outcome, by table: the keys that its rows for ports of many tables name, in their order. Of an input record, by
# table: the key by which sinks upsert it from here on.
KEYS = "keys"
_SHAPE_SIGNS = 8  # of a column


@dataclass(frozen=True, slots=True)
class VersionColumn:
    """A column of a table in one version of its schema."""

    name: str
    native: str  # its type in the database
    type: str  # its type in tables
    is_key: bool
    number: int = 0  # as in `Column`

    def to_json(self) -> dict[str, Json]:
        found = {"name": self.name, "native": self.native, "type": self.type, "key": self.is_key}
        return {**found, "number": self.number} if self.number else found

    @property
    def shape(self) -> str:
        """What tells columns apart by name (the first half) and by the type in the database (the second)."""
        return _short_hash(self.name) + _short_hash(self.native)

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> VersionColumn:
        known = str(value["name"]), str(value["native"]), str(value["type"]), bool(value["key"])
        return cls(*known, int(value.get("number", 0)))


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A schema of a table, and where in the log it was first used."""

    table: str
    columns: tuple[VersionColumn, ...]
    position: str  # of the first transaction that used it, in the database's own words
    committed_at: int  # of that transaction, microseconds since 1970; 0: unknown

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns if column.is_key)

    @property
    def fingerprint(self) -> str:
        """What identifies the content, without the place."""
        text = json.dumps([self.table, [one.to_json() for one in self.columns]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def shape(self) -> str:
        """The names, types and numbers of the columns in few signs, for `compare_shapes`: a position has it."""
        numbers = [column.number for column in self.columns]
        more = "#" + ",".join(map(str, numbers)) if any(numbers) else ""
        return "".join(column.shape for column in self.columns) + more

    def to_json(self) -> dict[str, Json]:
        return {
            "table": self.table,
            "columns": [one.to_json() for one in self.columns],
            "position": self.position,
            "committed_at": self.committed_at,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> SchemaVersion:
        columns = tuple(VersionColumn.from_json(one) for one in value["columns"])
        return cls(str(value["table"]), columns, str(value["position"]), int(value["committed_at"]))


TableState = Literal["keyed", "unkeyed", "gone"]  # as the server has a table now

UNKEYED_WAY = (
    "a table without a key is read again only as a new one: leave it out of `tables`, run once, then name it again"
)


@dataclass(frozen=True, slots=True)
class WayOut:
    """What brings the rows of a table up to date: a command to paste, or words; neither if nothing helps."""

    command: str = ""
    words: str = ""

    @property
    def text(self) -> str:
        return f"to read the table again: {self.command}" if self.command else self.words


@dataclass(frozen=True, slots=True)
class SilentChange:
    """A change of rows that the log does not have: of a statement, or of a column that is new or has another type."""

    table: str
    reason: str
    position: str  # where in the log, in the database's own words
    again: str = "read"  # as in `SilentEffect`; `key`: as `replace`, since rows have another key than sinks have
    asked: bool = False  # the next epoch begins a snapshot of the table

    def way_out(self, source: str, state: TableState) -> WayOut:
        """Return what a person does to bring the rows up to date, for a table in this state."""
        if self.asked:
            return WayOut()
        if state == "gone":
            return WayOut(words="the server has no such table now")
        if not self.again:
            return WayOut()
        if state == "unkeyed":
            return WayOut(words=UNKEYED_WAY)
        return WayOut(snapshot_command(source, self.table, empties=self.empties))

    @property
    def empties(self) -> bool:
        """Whether sinks have rows that are gone."""
        return self.again in ("empty", "replace", "key")

    def to_json(self) -> dict[str, Json]:
        found = {"table": self.table, "reason": self.reason, "position": self.position}
        return {**found, "again": self.again, "asked": self.asked}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> SilentChange:
        known = str(value["table"]), str(value["reason"]), str(value["position"])
        return cls(*known, str(value.get("again", "read")), bool(value.get("asked", False)))


def silent_changes(decoded: Decoded) -> list[SilentChange]:
    """Return what statements did to rows that are not in the log."""
    return [
        SilentChange(table, effect.reason, decoded.transactions[one.transaction].position, effect.again)
        for one in decoded.ddl
        for table, effect in one.silent.items()
    ]


def compare_shapes(before: str, after: SchemaVersion) -> SilentChange | None:
    """Return how rows that were there before a schema may differ from the log, where the log has no statements.

    `before` is the shape of the schema before it.
    """
    signs, _, numbers = before.partition("#")  # positions of older versions have no numbers
    parts = [signs[start : start + _SHAPE_SIGNS] for start in range(0, len(signs), _SHAPE_SIGNS)]
    old = {part[: _SHAPE_SIGNS // 2]: part for part in parts}
    names = [part[: _SHAPE_SIGNS // 2] for part in parts]
    old_numbers = dict(zip(names, map(int, filter(None, numbers.split(","))), strict=False))
    reasons = []
    for column in after.columns:
        part = column.shape
        known = old.get(part[: _SHAPE_SIGNS // 2])
        if known is None:
            reasons.append(f"column {column.name} is new: rows from before lack its values")
        elif known != part:
            reasons.append(f"column {column.name} became {column.native}: rows from before keep their old value")
        elif column.number and old_numbers.get(part[: _SHAPE_SIGNS // 2], 0) not in (0, column.number):
            reasons.append(f"column {column.name} was dropped and added again: rows from before have its old values")
    return SilentChange(after.table, "; ".join(reasons), after.position) if reasons else None


def versions_of(decoded: Decoded) -> list[SchemaVersion]:
    """Return the schemas that change rows use, in the order of their first rows."""
    found: list[SchemaVersion] = []
    for changes in decoded.changes:
        transaction = decoded.transactions[int(changes.transaction[0])]
        found.append(
            SchemaVersion(
                changes.schema.table, _columns(changes.schema), transaction.position, transaction.committed_at
            )
        )
    return found


def _short_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()[:3]).decode()


def _columns(schema: TableSchema) -> tuple[VersionColumn, ...]:
    return tuple(VersionColumn(one.name, one.native, _type_here(one), one.is_key, one.number) for one in schema.columns)


def _type_here(column: Column) -> str:
    """Return the type that a column gets in a table."""
    own = own_field(column.name, column.type)
    return type_to_text(own) if own is not None else str(column.type)


def new_versions(known: dict[str, str], used: Iterable[SchemaVersion]) -> list[SchemaVersion]:
    """Return the versions that differ from the one in force; `known`, fingerprints by table, is brought up to date."""
    found = []
    for version in used:
        if version.columns and known.get(version.table) != version.fingerprint:
            known[version.table] = version.fingerprint
            found.append(version)
    return found
