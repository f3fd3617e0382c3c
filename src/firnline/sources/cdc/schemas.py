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

from firnline.schema import type_to_text
from firnline.sources.cdc.log import Column, Decoded, TableSchema
from firnline.sources.files.formats.arrow_fit import own_field
from firnline.types import Json

VERSIONS = "schemas"  # of an input record: the versions that begin in the file
SILENT = "silent"  # of an input record: changes of rows which are not in the log, by what the file has
_SHAPE_SIGNS = 8  # of a column


@dataclass(frozen=True, slots=True)
class VersionColumn:
    """A column of a table in one version of its schema."""

    name: str
    native: str  # its type in the database
    type: str  # its type in tables
    is_key: bool

    def to_json(self) -> dict[str, Json]:
        return {"name": self.name, "native": self.native, "type": self.type, "key": self.is_key}

    @property
    def shape(self) -> str:
        """What tells columns apart by name (the first half) and by the type in the database (the second)."""
        return _short_hash(self.name) + _short_hash(self.native)

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> VersionColumn:
        return cls(str(value["name"]), str(value["native"]), str(value["type"]), bool(value["key"]))


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A schema of a table, and where in the log it was first used."""

    table: str
    columns: tuple[VersionColumn, ...]
    position: str  # of the first transaction that used it, in the database's own words
    committed_at: int  # of that transaction, microseconds since 1970; 0: unknown

    @property
    def fingerprint(self) -> str:
        """What identifies the content, without the place."""
        text = json.dumps([self.table, [one.to_json() for one in self.columns]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def shape(self) -> str:
        """The names and types of the columns in few signs, for `compare_shapes`: a position has it."""
        return "".join(column.shape for column in self.columns)

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


@dataclass(frozen=True, slots=True)
class SilentChange:
    """A change of rows that the log does not have: of a statement, or of a column that is new or has another type."""

    table: str
    reason: str
    position: str  # where in the log, in the database's own words
    again: str = "read"  # as in `SilentEffect`
    asked: bool = False  # the next epoch begins a snapshot of the table

    @property
    def command(self) -> str:
        """What a person types to bring the rows up to date; empty if nothing helps."""
        return f"firnline snapshot --table {self.table}{' --empty' * self.empties}" if self.again else ""

    @property
    def empties(self) -> bool:
        """Whether sinks have rows that are gone."""
        return self.again in ("empty", "replace")

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
    parts = [before[start : start + _SHAPE_SIGNS] for start in range(0, len(before), _SHAPE_SIGNS)]
    old = {part[: _SHAPE_SIGNS // 2]: part for part in parts}
    reasons = []
    for column in after.columns:
        part = column.shape
        known = old.get(part[: _SHAPE_SIGNS // 2])
        if known is None:
            reasons.append(f"column {column.name} is new: rows from before lack its values")
        elif known != part:
            reasons.append(f"column {column.name} became {column.native}: rows from before keep their old value")
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
    return tuple(VersionColumn(one.name, one.native, _type_here(one), one.is_key) for one in schema.columns)


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
