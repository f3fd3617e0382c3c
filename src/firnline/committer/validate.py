"""Checks a unit's files right before their commit: present, complete, and with columns that fit the table.

delta-rs would commit a missing file; the error would only appear in a reader. A unit of another program is one Parquet
file without an epoch: its footer gives the statistics and the columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import Schema as DeltaSchema
from isal import isal_zlib

from firnline.errors import SchemaError
from firnline.sinks.delta.contents import missing_fields
from firnline.sinks.delta.stats import file_stats
from firnline.sinks.delta.table import Table
from firnline.sinks.delta.upsert.rewrite import RangeFile
from firnline.sinks.staged.unit import ForeignUnit
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
    """Return the schemas without repeats."""
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


_NANOS = "timestamp[ns"


def check_age(put_at: datetime, now: datetime, retention: timedelta | None) -> None:
    """Refuse a unit that may have been committed so long ago that its transaction expired."""
    if retention is not None and now - put_at > retention / 2:
        raise InvalidUnitError(
            "too old: its transaction may have expired, so it cannot be told whether it was committed"
        )


def foreign_file(table: Table, storage: Storage, unit: ForeignUnit, *, whole: bool) -> dict[str, Json]:
    """Return the file that a commit adds for a foreign unit; statistics come from the file itself.

    With `whole`, every value is decoded: a foreign unit has no checksum to compare.

    Raises:
        InvalidUnitError: the file is missing or not as described, or columns or partition values do not fit.
        OSError: the storage failed; try again.
    """
    metadata, modified_at = _read_metadata(storage, unit)
    columns = footer_schema(metadata, unit.path)
    _check_types(columns)
    _check_partition(table, unit)
    try:
        missing_fields(table.schema(), columns)
    except SchemaError as error:
        raise InvalidUnitError(f"schema incompatible: {error.message}") from error
    if whole:
        _decode_all(storage, unit)
    return {
        "path": unit.path,
        "size_bytes": unit.size_bytes,
        "rows": metadata.num_rows,
        "partition_values": unit.partition_values,
        "modification_time": int(modified_at.timestamp() * 1000),
        "stats": file_stats(metadata, columns),
        "columns": columns,
    }


class _CheckedFile(RangeFile):
    """A stored file that remembers why it could not be read: Arrow raises OSError for a damaged page, too."""

    problem: Exception | None = None

    def read(self, size: int | None = -1, /) -> bytes:
        try:
            return super().read(size)
        except Exception as error:
            self.problem = error
            raise


def _decode_all(storage: Storage, unit: ForeignUnit) -> None:
    """Decode every page of a foreign file, and verify the checksums of pages that have one."""
    stream = _CheckedFile(storage, unit.path, unit.size_bytes)
    try:
        file = pq.ParquetFile(pa.PythonFile(stream, mode="r"), page_checksum_verification=True)
        rows = sum(batch.num_rows for batch in file.iter_batches(use_threads=False))
    except (pa.ArrowException, OSError) as error:
        if stream.problem is not None:
            raise stream.problem from error
        raise InvalidUnitError(f"{unit.path} is damaged: {error}") from error
    if rows != unit.record_count:
        raise InvalidUnitError(f"{unit.path} is damaged: it has {rows} rows, its footer says {unit.record_count}")


def first_columns(storage: Storage, unit: ForeignUnit) -> tuple[pa.Schema, list[str]]:
    """Return the columns of a table that starts with this unit, and its partition columns.

    They are the file's columns, and a text column for each partition value without a column in the file. Partition
    columns are in the order of the folders in the path.

    Raises:
        InvalidUnitError: the file is missing or not as described, or a column has a type that Delta lacks.
        OSError: the storage failed; try again.
    """
    found = footer_schema(_read_metadata(storage, unit)[0], unit.path)
    folders = [part.partition("=")[0] for part in unquote(unit.path).split("/")[:-1]]
    names = list(unit.partition_values)
    names.sort(key=lambda name: folders.index(name) if name in folders else len(folders))
    lacking = [pa.field(name, pa.string()) for name in names if name not in found.names]
    columns = pa.schema([field.with_nullable(True) for field in (*found, *lacking)])
    _check_types(columns)
    return columns, names


def _check_types(columns: pa.Schema) -> None:
    """Refuse columns of a type that Delta lacks, or that a table would return as another type."""
    for field in columns:
        odd = next(
            (kind for kind in _leaves(field.type) if pa.types.is_null(kind) or str(kind).startswith(_NANOS)), None
        )
        if odd is not None:  # delta-rs has its own names for these, which no other reader knows
            raise InvalidUnitError(f"column {field.name} is {odd}, which is no type of Delta")
        try:
            stored = DeltaSchema.from_json(DeltaSchema.from_arrow(pa.schema([field])).to_json())
            missing_fields(pa.schema(stored.to_arrow()), pa.schema([field]))
        except Exception as error:  # delta-rs raises nothing narrower
            reason = error.message if isinstance(error, SchemaError) else "which is no type of Delta"
            raise InvalidUnitError(f"column {field.name} is {field.type}, {reason}") from error


def _leaves(kind: pa.DataType) -> Iterator[pa.DataType]:
    if not pa.types.is_nested(kind):
        yield kind
    for number in range(kind.num_fields):
        yield from _leaves(kind.field(number).type)


def _read_metadata(storage: Storage, unit: ForeignUnit) -> tuple[pq.FileMetaData, datetime]:
    footer, modified_at = read_footer(storage, unit.path, unit.size_bytes)
    metadata = footer_metadata(footer, unit.path)
    if metadata.num_rows != unit.record_count:
        raise InvalidUnitError(f"{unit.path} has {metadata.num_rows} rows, the unit says {unit.record_count}")
    return metadata, modified_at


def _check_partition(table: Table, unit: ForeignUnit) -> None:
    """Check that every partition column has a text that every reader can convert to the column's type."""
    partitions = table.partition_columns()
    if set(unit.partition_values) != set(partitions):
        of_table, of_unit = (", ".join(names) or "nothing" for names in (partitions, sorted(unit.partition_values)))
        raise InvalidUnitError(f"the table is partitioned by {of_table}, the unit has {of_unit}")
    for name in partitions:
        text, kind = unit.partition_values[name], table.schema().field(name).type
        if text and not any(_casts(text, each) for each in (kind, _zoneless(kind))):
            raise InvalidUnitError(f"partition value {text!r} of {name} is not of type {kind}")


def _casts(text: str, kind: pa.DataType) -> bool:
    try:
        pa.array([text], pa.string()).cast(kind)
    except pa.ArrowException:
        return False
    return True


def _zoneless(kind: pa.DataType) -> pa.DataType:
    """Return the type without a zone: Delta writes instants with or without one."""
    return pa.timestamp(kind.unit) if pa.types.is_timestamp(kind) else kind
