"""Checks a unit's files right before their commit: present, whole, and of columns that fit the table.

delta-rs would commit a file that is missing; nobody would notice until a reader fails.
"""

from __future__ import annotations

import hashlib
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
from isal import isal_zlib

from firnline.errors import SchemaError
from firnline.sinks.delta.columns import missing_fields
from firnline.storage import Storage
from firnline.types import Json

_MAGIC = b"PAR1"
_TAIL = 64 * 1024


class InvalidUnitError(Exception):
    """A unit can never be committed as it is; the reason is for people. I/O errors are never this."""


def check_files(
    storage: Storage, files: list[dict[str, Json]], table: pa.Schema, declared: pa.Schema, *, whole: bool
) -> list[pa.Schema]:
    """Validate every file of a unit against what the unit says and what the table has.

    Returns:
        The columns that the table must have before the commit: what the unit says, and what its files have.

    Raises:
        InvalidUnitError: a file is missing, has another size or checksum, or columns that do not fit.
        OSError: the storage failed; try again.
    """
    _check_columns(table, declared, "the unit")
    wanted = [declared]
    for file in files:
        path = str(file["path"])
        footer, _ = read_footer(storage, path, int(file["size_bytes"]))
        expected = file.get("footer_checksum")
        if expected is not None and hashlib.sha256(footer).hexdigest() != expected:
            raise InvalidUnitError(f"checksum wrong: the footer of {path} is not what was staged")
        if whole and "crc32" in file and file_crc32(storage, path) != file["crc32"]:
            raise InvalidUnitError(f"checksum wrong: {path} is not what was staged")
        columns = footer_schema(footer_metadata(footer, path), path)
        _check_columns(table, columns, path)
        if _missing(declared, columns, path):
            wanted.append(columns)
    return wanted


def read_footer(storage: Storage, path: str, size_bytes: int) -> tuple[bytes, datetime]:
    """The footer of a Parquet file, which must exist and have this size, and when the file was written."""
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
    """What a Parquet file says of itself, from its footer alone."""
    try:
        return pq.read_metadata(pa.BufferReader(_MAGIC + footer))
    except (pa.ArrowException, OSError) as error:  # all in memory: this is the file's fault, not the storage's
        raise InvalidUnitError(f"the footer of {path} is unreadable: {error}") from error


def footer_schema(metadata: pq.FileMetaData, path: str) -> pa.Schema:
    """The columns of a Parquet file."""
    try:
        return metadata.schema.to_arrow_schema()
    except pa.ArrowException as error:
        raise InvalidUnitError(f"the columns of {path} are unreadable: {error}") from error


def file_crc32(storage: Storage, path: str) -> int:
    """CRC-32 of a whole file."""
    found = 0
    stream = storage.open_read(path)
    try:
        while data := stream.read(1024 * 1024):
            found = isal_zlib.crc32(data, found)
    finally:
        stream.close()
    return found


def _check_columns(table: pa.Schema, wanted: pa.Schema, what: str) -> None:
    try:
        missing_fields(table, wanted)
    except SchemaError as error:
        raise InvalidUnitError(f"schema incompatible: {what}: {error.message}") from error


def _missing(declared: pa.Schema, columns: pa.Schema, path: str) -> bool:
    try:
        return bool(missing_fields(declared, columns))
    except SchemaError as error:
        raise InvalidUnitError(f"schema incompatible: {path} is not what the unit says: {error.message}") from error
