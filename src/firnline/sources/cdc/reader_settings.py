"""What the driver tells the readers of spool files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from firnline.types import Json

WARNINGS = "warnings"  # of the outcome of a file: what the run warns of; not kept in the ledger


@dataclass(frozen=True, slots=True)
class LogReaderSettings:
    """What a reader needs beside its split."""

    root: str
    storage_options: dict[str, str]
    folder: str
    default_schema: str
    include: tuple[str, ...] = ()  # of committed_at, position, transaction, before
    unkeyed: tuple[str, ...] = ()  # tables of which no key tells the rows of now from those of the past

    def to_json(self) -> dict[str, Json]:
        return {
            "root": self.root,
            "storage_options": self.storage_options,
            "folder": self.folder,
            "default_schema": self.default_schema,
            "include": list(self.include),
            "unkeyed": list(self.unkeyed),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> LogReaderSettings:
        return cls(
            str(value["root"]),
            dict(value["storage_options"]),
            str(value["folder"]),
            str(value["default_schema"]),
            tuple(value["include"]),
            tuple(value.get("unkeyed", ())),
        )

    @property
    def wants_before(self) -> bool:
        return "before" in self.include
