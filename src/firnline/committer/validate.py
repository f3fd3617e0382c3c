"""Checks a unit's files right before their commit: present, complete, and with columns that fit the table.

delta-rs would commit a missing file; the error would only appear in a reader.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
from isal import isal_zlib

from firnline.errors import SchemaError
from firnline.sinks.delta.contents import missing_fields
from firnline.storage import Storage
from firnline.types import Json

_MAGIC = b"PAR1"
_TAIL = 64 * 1024


class InvalidUnitError(Exception):
    """A unit that can never be committed as it is; the message gives the reason. I/O errors are never this."""


class Columns:
    """The columns of a table, and those that units will add before they are committed. Caches its comparisons."""

    def __init__(self, table: pa.Schema) -> None:
        self._table = table
        self._fitting: list[pa.Schema] = []
        self.wanted: list[pa.Schema] = []  # to be added, in this order

    def check(self, schema: pa.Schema, what: str) -> bool:
        """Return whether every column exists. Raises InvalidUnitError if one has another type."""
        if any(schema.equals(known) for known in self._fitting):
            return True
        try:
            if missing_fields(self._table, schema):
                return False
        except SchemaError as error:
            raise InvalidUnitError(f"schema incompatible: {what}: {error.message}") from error
        self._fitting = [schema, *self._fitting[:3]]
        return True

    def widen(self, schemas: list[pa.Schema]) -> None:
        """Add the columns of a unit that is about to be committed; all or none."""
        table = self._table
        try:
            for schema in schemas:
                fields = {f.name: f for f in table} | {f.name: f for f in missing_fields(table, schema)}
                table = pa.schema(list(fields.values()))
        except SchemaError as error:
            raise InvalidUnitError(f"schema incompatible: the files of the unit differ: {error.message}") from error
        self._table = table
        self.wanted += schemas


def distinct(schemas: Iterable[pa.Schema]) -> list[pa.Schema]:
    """Each once."""
    found: list[pa.Schema] = []
    for schema in schemas:
        if not any(schema.equals(known) for known in found):
            found.append(schema)
    return found


def check_files(
    storage: Storage, files: list[dict[str, Json]], columns: Columns, declared: pa.Schema, *, whole: bool
) -> None:
    """Validate every file of a unit against the unit's metadata and the table's columns at its commit.

    Raises:
        InvalidUnitError: a file is missing, has another size or checksum, or columns that do not fit.
        OSError: the storage failed; try again.
    """
    wider = [] if columns.check(declared, "the unit") else [declared]
    for file in files:
        path = str(file["path"])
        footer, _ = read_footer(storage, path, int(file["size_bytes"]))
        expected = file.get("footer_checksum")
        if expected is not None and hashlib.sha256(footer).hexdigest() != expected:
            raise InvalidUnitError(f"checksum wrong: the footer of {path} is not what was staged")
        if whole and "crc32" in file and file_crc32(storage, path) != file["crc32"]:
            raise InvalidUnitError(f"checksum wrong: {path} is not what was staged")
        found = footer_schema(footer_metadata(footer, path), path)
        if not columns.check(found, path) and not any(found.equals(known) for known in wider):
            wider.append(found)
    if wider:
        columns.widen(wider)  # only now: a unit that is set aside adds nothing


def read_footer(storage: Storage, path: str, size_bytes: int) -> tuple[bytes, datetime]:
    """Return the footer of a Parquet file, which must exist and have this size, and its modification time."""
    try:
        found = storage.stat(path)
        if found.size_bytes != size_bytes:
            raise InvalidUnitError(f"size wrong: {path} has {found.size_bytes} bytes, the unit says {size_bytes}")
        tail = _read(storage, path, max(0, size_bytes - _TAIL))
        if len(tail) < 12 or tail[-4:] != _MAGIC:
            raise InvalidUnitError(f"{path} is not a Parquet file")
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if length > size_bytes:
            raise InvalidUnitError(f"{path} is not a Parquet file")
        footer = tail[-length:] if length <= len(tail) else _read(storage, path, size_bytes - length)
        return footer, found.modified_at
    except FileNotFoundError as error:
        raise InvalidUnitError(f"file missing: {path}") from error


def _read(storage: Storage, path: str, offset: int) -> bytes:
    stream = storage.open_read(path, offset)
    try:
        parts = []
        while data := stream.read(1024 * 1024):
            parts.append(data)
        return b"".join(parts)
    finally:
        stream.close()


def footer_metadata(footer: bytes, path: str) -> pq.FileMetaData:
    """Return the metadata of a Parquet file, from its footer alone."""
    try:
        return pq.read_metadata(pa.BufferReader(_MAGIC + footer))
    except (pa.ArrowException, OSError) as error:  # all in memory: the file is at fault, not the storage
        raise InvalidUnitError(f"the footer of {path} is unreadable: {error}") from error


def footer_schema(metadata: pq.FileMetaData, path: str) -> pa.Schema:
    """Return the columns of a Parquet file."""
    try:
        return metadata.schema.to_arrow_schema()
    except pa.ArrowException as error:
        raise InvalidUnitError(f"the columns of {path} are unreadable: {error}") from error


def file_crc32(storage: Storage, path: str) -> int:
    """Return the CRC-32 of a whole file."""
    found = 0
    stream = storage.open_read(path)
    try:
        while data := stream.read(1024 * 1024):
            found = isal_zlib.crc32(data, found)
    finally:
        stream.close()
    return found
