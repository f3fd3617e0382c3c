"""Parquet files: row groups in batches, with the types of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from firnline.ndjson import (
    BadRecord,
    BrokenFileError,
    Decoded,
    MismatchError,
    UnexpectedFieldError,
    apply_kinds,
    find_fitting,
)
from firnline.rescued import UNKNOWN_FIELDS, Rescued, add_rescued, shorten
from firnline.schema import RESCUED_COLUMN, is_column_name_ok, merge, type_to_text
from firnline.sources.decoding import RecordDecoder, find_rows
from firnline.sources.files.formats.arrow_fit import (
    Fitted,
    Mask,
    Misfits,
    add_required,
    fit,
    own_field,
    rescue,
    rescue_unknown,
)
from firnline.sources.files.formats.arrow_json import join_fields, json_texts
from firnline.sources.files.formats.base import Format, Place, RecordReader, StoredFile
from firnline.sources.files.formats.recognise import PARQUET_MAGIC, check_head

BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS = 65_536
READ_BYTES = 1024 * 1024  # of a column at a time


# --- reading -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ParquetPiece:
    """Rows of one row group."""

    batch: pa.RecordBatch
    first_record: int
    consumed_bytes: int

    @property
    def records(self) -> int:
        return int(self.batch.num_rows)

    @property
    def size_bytes(self) -> int:
        return int(self.batch.nbytes)


class _ParquetReader(Iterator[ParquetPiece]):
    """Iterates over the rows of one file."""

    def __init__(self, file: StoredFile, place: Place) -> None:
        self._file = file
        self._access = _RandomAccess(file)
        with self._reading():
            self._parquet = pq.ParquetFile(
                pa.PythonFile(self._access, mode="r"),
                buffer_size=READ_BYTES,
                pre_buffer=False,
                coerce_int96_timestamp_unit="us",
                page_checksum_verification=True,
            )
            self._total = int(self._parquet.metadata.num_rows)
        if place.record > self._total:
            raise BrokenFileError(file.path, f"has {self._total} rows, but {place.record} were read from it before")
        most = self._total if place.max_records is None else place.record + place.max_records
        self._first, self._end = place.record, min(self._total, most)
        self._batches = self._read()
        self.records_read = place.record
        self.end_offset = 0

    @property
    def lines_read(self) -> int:
        return self.records_read

    @property
    def finished(self) -> bool:
        return self.records_read >= self._total

    def __next__(self) -> ParquetPiece:
        with self._reading():
            batch = next(self._batches)
        first = self.records_read
        self.records_read += batch.num_rows
        done = self.records_read - self._first
        return ParquetPiece(batch, first, self._file.size_bytes * done // self._total)

    def _read(self) -> Iterator[pa.RecordBatch]:
        before = 0
        for number in range(self._parquet.metadata.num_row_groups):
            group = self._parquet.metadata.row_group(number)
            start, end = max(self._first - before, 0), min(self._end - before, group.num_rows)
            before += group.num_rows
            if start >= end:
                continue
            size = max(1, group.total_byte_size // group.num_rows)
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES // size))
            at = 0
            for batch in self._parquet.iter_batches(rows, row_groups=[number], use_threads=False):
                wanted = batch.slice(max(start - at, 0), max(0, min(end, at + batch.num_rows) - max(start, at)))
                at += batch.num_rows
                if wanted.num_rows:
                    yield wanted
                if at >= end:
                    break
            else:
                if at < end:
                    raise BrokenFileError(self._file.path, f"row group {number} has fewer rows than the file says")

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Tell damage of the file from a failure of the storage."""
        try:
            yield
        except (BrokenFileError, StopIteration):
            raise
        except (pa.ArrowException, OSError, ValueError) as error:
            if self._access.failure is not None:
                raise self._access.failure from None
            text = " ".join(str(error).split())
            raise BrokenFileError(self._file.path, f"not a valid Parquet file: {shorten(text)}") from error


class _RandomAccess:
    """A stored file that can be read from any place, as Arrow needs it; remembers the error of a failed read."""

    closed = False

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._at = 0
        self._stream: Any = None  # a `Readable` that can also seek
        self._stream_at = 0
        self.failure: BaseException | None = None

    def read(self, size: int = -1, /) -> bytes:
        wanted = self._file.size_bytes - self._at if size < 0 else size
        parts = []
        try:
            while wanted > 0 and (data := self._open().read(wanted)):
                parts.append(data)
                wanted -= len(data)
                self._at += len(data)
                self._stream_at = self._at
        except BaseException as error:
            self.failure = error
            raise
        return b"".join(parts)

    def _open(self) -> Any:
        if self._stream is None:
            self._stream = self._file.open(self._at)
        elif self._stream_at != self._at:
            self._stream.seek(self._at)
        self._stream_at = self._at
        return self._stream

    def seek(self, offset: int, whence: int = 0, /) -> int:
        base = {0: 0, 1: self._at, 2: self._file.size_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._file.size_bytes

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        """Do nothing: nothing is written."""

    def close(self) -> None:
        """Do nothing: the stored file closes its streams."""


# --- decoding ------------------------------------------------------------------------------------------


class ParquetDecoder(RecordDecoder[ParquetPiece]):
    """Fits the columns of files to the columns of the table, by name."""

    def reset(self, schema: pa.Schema) -> None:
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def decode(self, piece: ParquetPiece) -> Decoded:
        batch = piece.batch
        target = self.grow(batch.schema)
        arrays: dict[str, pa.Array] = {}
        parts: list[pa.Array] = []
        whole = Fitted(pa.nulls(batch.num_rows))
        names = batch.schema.names
        is_row = find_rows(batch)
        present = None if is_row is None else is_row.to_numpy(zero_copy_only=False)
        for column in target:
            if column.name == RESCUED_COLUMN:
                continue
            if column.name in names and column.name not in self._columns.reserved:
                values = batch.column(names.index(column.name))
                fitted = fit(values, column, f"{column.name}.")
                parts += rescue(fitted, column, column.name, values)
            else:
                fitted = Fitted(pa.nulls(batch.num_rows, column.type))
            if column.name not in self._columns.reserved:
                add_required(fitted, column, present)
            arrays[column.name] = fitted.values
            whole.found += fitted.found
            if fitted.missing is not None:
                whole.missing = fitted.missing if whole.missing is None else whole.missing | fitted.missing
        for number, name in enumerate(names):
            if name not in arrays or name in self._columns.reserved or names.index(name) != number:
                unknown, part = rescue_unknown(name, name, batch.column(number))
                if unknown is not None:
                    whole.found.append(unknown)
                    parts.append(part)
        self._check(whole.found, piece.first_record)
        return self._decoded(piece, target, arrays, parts, whole)

    def grow(self, found: pa.Schema) -> pa.Schema:
        """Return the columns with those that a file adds, or whose types it widens."""
        columns = self._columns
        if columns.evolution != "add":
            return self._schema
        lower = {field.name.lower(): field.name for field in self._schema}
        fields: list[pa.Field] = []
        for field in found:
            if not is_column_name_ok(field.name) or field.name in columns.reserved:
                continue
            if lower.setdefault(field.name.lower(), field.name) != field.name:
                continue
            own = own_field(field.name, field.type)
            if own is not None and own.name not in {other.name for other in fields}:
                fields.append(own)
        new = apply_kinds(pa.schema(fields), columns.kinds)
        required = {field.name for field in self._schema if not field.nullable}
        grown = merge(self._schema, new, frozen=columns.frozen)
        fields = [field.with_nullable(field.nullable and field.name not in required) for field in grown]
        self._schema = pa.schema(fields, metadata=self._schema.metadata)
        return self._schema

    def _check(self, found: list[Misfits], first_record: int) -> None:
        if self._columns.evolution != "fail":
            return
        for one in found:
            record = first_record + int(np.argmax(one.mask))
            error = UnexpectedFieldError if one.field is None else MismatchError
            raise error(one.path, record, str(one.values.type))

    def _decoded(
        self, piece: ParquetPiece, target: pa.Schema, arrays: dict[str, pa.Array], parts: list[pa.Array], whole: Fitted
    ) -> Decoded:
        rows = piece.records
        keep = np.ones(rows, np.bool_) if whole.missing is None else ~whole.missing
        lacks = ~keep
        for one in whole.found:
            if one.path in self._columns.strict:
                keep &= ~one.mask
        held = [name for name in self._columns.strict if name in arrays]
        fits = find_fitting(pa.RecordBatch.from_pydict({n: arrays[n] for n in held}), self._columns.strict)
        keep = keep if fits is None else keep & fits
        has_rescued = bool(parts) and any((one.mask & keep).any() for one in whole.found)
        if has_rescued and RESCUED_COLUMN not in target.names:
            target = self._schema = target.append(pa.field(RESCUED_COLUMN, pa.string()))
        if RESCUED_COLUMN in target.names:
            arrays[RESCUED_COLUMN] = join_fields(parts) if parts else pa.nulls(rows, pa.string())
        if target.names:
            batch = pa.RecordBatch.from_arrays([arrays[name] for name in target.names], schema=target)
        else:
            batch = pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
        numbers = pa.array(np.arange(piece.first_record, piece.first_record + rows, dtype=np.int64))
        bad: list[BadRecord] = []
        if not keep.all():
            bad = _bad_records(piece, ~keep, lacks)
            batch, numbers = batch.filter(pa.array(keep)), numbers.filter(pa.array(keep))
        return Decoded(batch, numbers, bad, _counts(whole.found, keep, piece.first_record))


def _bad_records(piece: ParquetPiece, bad: Mask, lacks: Mask) -> list[BadRecord]:
    """Return bad rows; those that lack a required value are named so, the others do not fit."""
    rows = np.flatnonzero(bad)
    texts = json_texts(piece.batch.take(pa.array(rows)).to_struct_array()).to_pylist()
    return [
        BadRecord(
            piece.first_record + int(row),
            piece.first_record + int(row) + 1,
            text.encode(),
            "missing-required" if lacks[row] else "does-not-fit",
        )
        for row, text in zip(rows, texts, strict=True)
    ]


def _counts(found: list[Misfits], keep: Mask, first_record: int) -> list[Rescued]:
    """Count what was rescued, by column."""
    counts = []
    for one in found:
        mask = one.mask & keep
        values = int(np.count_nonzero(mask))
        if not values:
            continue
        row = int(np.argmax(mask))
        text, line = str(one.texts[row].as_py()), first_record + row + 1
        if one.field is None:
            first = shorten(f'{{"{one.path}":{text}}}')
            counts.append(Rescued(UNKNOWN_FIELDS, values, first=first, line=line))
            continue
        expected = type_to_text(one.field)
        counts.append(Rescued(one.path, values, expected, shorten(text), line=line, wider=_wider(one, values)))
    return add_rescued(counts)


def _wider(one: Misfits, values: int) -> dict[str, int]:
    """Return how many of these values a wider column would hold."""
    kind: Any = one.values.type
    assert one.field is not None
    if not pa.types.is_integer(one.field.type) or "." in one.path:
        return {}
    if pa.types.is_integer(kind):
        return {"int64": values} if kind != pa.uint64() else {"float64": values}
    return {"float64": values} if pa.types.is_floating(kind) or pa.types.is_decimal(kind) else {}


class ParquetFormat(Format[ParquetPiece]):
    """Records are rows. Their numbers say which row groups to skip."""

    decoder_class = ParquetDecoder

    def open(self, file: StoredFile, place: Place) -> RecordReader[ParquetPiece]:
        head = file.head()
        if not head.startswith(PARQUET_MAGIC):
            check_head(head, file.path, "parquet")
            reason = "is an encrypted Parquet file" if head.startswith(b"PARE") else "is not a Parquet file"
            raise BrokenFileError(file.path, reason if head else "is empty, and so not a Parquet file")
        return _ParquetReader(file, place)

    def offset_of(self, file: StoredFile, reader: RecordReader[ParquetPiece]) -> int:
        return 0
