"""Schema versions: every schema of a captured table that was in force, by a fingerprint of its content.

The ledger entry of the first epoch that uses a version has it, in the input record of the spool file where it begins.
So schema, position and rows become true together, and go back together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from firnline.schema import type_to_text
from firnline.sources.cdc.log import Column, Decoded, TableSchema
from firnline.sources.files.formats.arrow_fit import own_field
from firnline.types import Json

VERSIONS = "schemas"  # of an input record: the versions that begin in the file


@dataclass(frozen=True, slots=True)
class VersionColumn:
    """A column of a table in one version of its schema."""

    name: str
    native: str  # its type in the database
    type: str  # its type in tables
    is_key: bool

    def to_json(self) -> dict[str, Json]:
        return {"name": self.name, "native": self.native, "type": self.type, "key": self.is_key}

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
