"""Files in every format, and what a reader makes of their bytes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.sources.columns import Columns
from firnline.sources.files.formats import open_format
from firnline.sources.files.formats.base import Place, StoredFile
from firnline.storage import Readable
from firnline.types import Json

START = Place()
FORMATS = ("ndjson", "json", "csv", "parquet")


def encode(name: str, records: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a file of a format. Records of CSV have the columns of the first one."""
    if name == "ndjson":
        return b"".join(json.dumps(record).encode() + b"\n" for record in records)
    if name == "json":
        return json.dumps(list(records), indent=2).encode() + b"\n"
    if name == "parquet":
        return parquet_bytes(pa.Table.from_pylist([dict(record) for record in records]), rows_per_group=3)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(records[0]))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue().encode()


def parquet_bytes(table: pa.Table, rows_per_group: int = 1000, **settings: Any) -> bytes:
    """Return a Parquet file."""
    stream = io.BytesIO()
    pq.write_table(table, stream, row_group_size=rows_per_group, **settings)
    return stream.getvalue()


class OneFile:
    """A storage with one file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open_read(self, key: str, offset: int = 0) -> Readable:
        stream = io.BytesIO(self._data)
        stream.seek(offset)
        return stream


@dataclass(slots=True)
class ReadFile:
    """What was read of a file, and where reading ended."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    bad: list[tuple[int, int, str, bytes]] = field(default_factory=list)  # record, line, reason, bytes
    rescued: list[tuple[str, int]] = field(default_factory=list)  # column, values
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    place: Place = field(default_factory=Place)
    finished: bool = False


def read_bytes(
    data: bytes,
    read_as: Mapping[str, Json],
    place: Place = START,
    *,
    path: str = "f",
    columns: Columns | None = None,
) -> ReadFile:
    """Read a file from a place on."""
    file_format = open_format(read_as)
    stored: Any = OneFile(data)
    file = StoredFile(stored, path, path, len(data))
    columns = columns or Columns(pa.schema([]), frozenset(), {})
    decoder = file_format.decoder_class(columns.decoded, columns)
    reader = file_format.open(file, place)
    found = ReadFile()
    for piece in reader:
        decoded = decoder.decode(piece)
        assert len(decoded.record_numbers) == decoded.batch.num_rows == piece.records - len(decoded.bad)
        found.rows += decoded.batch.to_pylist()
        found.numbers += decoded.record_numbers.to_pylist()
        found.bad += [(bad.record, bad.line, bad.reason, bytes(bad.raw)) for bad in decoded.bad]
        found.rescued += [(one.column, one.values) for one in decoded.rescued]
    found.schema = decoder.schema
    found.finished = reader.finished
    found.place = Place(reader.records_read, file_format.offset_of(file, reader), reader.lines_read)
    return found
