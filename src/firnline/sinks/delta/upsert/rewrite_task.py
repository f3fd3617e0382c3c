"""The messages between driver and worker for an upsert: the files to rewrite, and the results."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from firnline.sinks.delta.upsert.changes import Indices
from firnline.types import Json


@dataclass(frozen=True, slots=True, eq=False)
class FileToRewrite:
    """A data file of the table that may hold changed keys."""

    path: str
    size_bytes: int
    rows: int | None  # as the log says
    partition_values: Mapping[str, str | None]
    barred: Indices  # changes whose new row must not go here: another file has it

    def to_json(self) -> dict[str, Json]:
        """Plain JSON, since it travels to workers."""
        return {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "rows": self.rows,
            "partition_values": dict(self.partition_values),
            "barred": pack_indices(self.barred),
        }

    @classmethod
    def from_json(cls, value: Json) -> FileToRewrite:
        """Read what `to_json` wrote."""
        barred = unpack_indices(value["barred"])
        return cls(str(value["path"]), int(value["size_bytes"]), value["rows"], value["partition_values"], barred)


@dataclass(frozen=True, slots=True, eq=False)
class RewriteTask:
    """Apply the changes of an epoch to some files; or, with `insert`, write the new rows of some changes."""

    type: str  # the kind of the sink
    attempt: str
    table: str
    storage_options: Mapping[str, str]
    partition_by: tuple[str, ...]
    key: tuple[str, ...]
    file_size_mb: int
    changes: tuple[dict[str, Json], ...]  # path and crc32 of each file of changes
    schema: pa.Schema
    files: tuple[FileToRewrite, ...] = ()
    insert: Indices | None = None  # numbers of changes

    def to_json(self) -> dict[str, Json]:
        """Plain JSON, since it travels to workers."""
        return {
            "kind": "commit",
            "type": self.type,
            "attempt": self.attempt,
            "table": self.table,
            "storage_options": dict(self.storage_options),
            "partition_by": list(self.partition_by),
            "key": list(self.key),
            "file_size_mb": self.file_size_mb,
            "changes": list(self.changes),
            "schema": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
            "files": [file.to_json() for file in self.files],
            "insert": pack_indices(self.insert) if self.insert is not None else None,
        }

    @classmethod
    def from_json(cls, value: Json) -> RewriteTask:
        """Read what `to_json` wrote."""
        return cls(
            type=str(value["type"]),
            attempt=str(value["attempt"]),
            table=str(value["table"]),
            storage_options=value["storage_options"],
            partition_by=tuple(value["partition_by"]),
            key=tuple(value["key"]),
            file_size_mb=int(value["file_size_mb"]),
            changes=tuple(value["changes"]),
            schema=pa.ipc.read_schema(pa.BufferReader(base64.b64decode(value["schema"]))),
            files=tuple(FileToRewrite.from_json(file) for file in value["files"]),
            insert=unpack_indices(value["insert"]) if value["insert"] is not None else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RewrittenFile:
    """The result for one file. Everything in `staged` is durable."""

    path: str
    staged: list[dict[str, Json]] = field(default_factory=list)  # files in its place
    matched: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # changes whose key it held
    placed: Indices = field(default_factory=lambda: np.empty(0, np.int64))  # changes whose new row is in `staged`

    def to_json(self) -> dict[str, Json]:
        """Plain JSON, since it travels to the driver."""
        return {
            "path": self.path,
            "staged": self.staged,
            "matched": pack_indices(self.matched),
            "placed": pack_indices(self.placed),
        }

    @classmethod
    def from_json(cls, value: Json) -> RewrittenFile:
        """Read what `to_json` wrote."""
        matched, placed = unpack_indices(value["matched"]), unpack_indices(value["placed"])
        return cls(str(value["path"]), list(value["staged"]), matched, placed)


@dataclass(frozen=True, slots=True, eq=False)
class RewriteReport:
    """The report of one task."""

    files: tuple[RewrittenFile, ...] = ()
    inserted: tuple[dict[str, Json], ...] = ()  # files of new rows

    def to_json(self) -> dict[str, Json]:
        """Plain JSON, since it travels to the driver."""
        return {"files": [file.to_json() for file in self.files], "inserted": list(self.inserted)}

    @classmethod
    def from_json(cls, value: Json) -> RewriteReport:
        """Read what `to_json` wrote."""
        return cls(tuple(RewrittenFile.from_json(file) for file in value["files"]), tuple(value["inserted"]))


def pack_indices(numbers: Indices) -> str:
    """Ascending numbers as short text."""
    if not len(numbers):
        return ""
    steps = np.diff(numbers, prepend=0).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes(), 1)).decode()


def unpack_indices(text: str) -> Indices:
    """What `pack_indices` packed."""
    if not text:
        return np.empty(0, np.int64)
    steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8")
    return np.cumsum(steps).astype(np.int64)
