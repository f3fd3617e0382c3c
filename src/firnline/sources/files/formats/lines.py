"""Newline-delimited JSON, and what all formats of text share: they become lines of JSON, which one decoder reads."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa

from firnline.ndjson import (
    Block,
    BrokenFileError,
    CountingStream,
    compression_of,
    open_blocks,
    open_pieces,
)
from firnline.sources.columns import Columns
from firnline.sources.decoding import LineDecoder
from firnline.sources.files.formats.base import HEAD_BYTES, Format, Place, RecordReader, StoredFile
from firnline.sources.files.formats.recognise import check_head
from firnline.sources.files.growth import TAIL_BYTES, FileEnd, describe_tail, has_open_line


class OneFile:
    """A storage with one file."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open_read(self, key: str, offset: int = 0) -> io.BytesIO:
        return io.BytesIO(self._data)


class TextFormat(Format[Block]):
    """A format of text. Compression is known by the suffix of the name."""

    decoder_class = LineDecoder
    sample = b'{"a":"b"}\n'  # a file of the format

    def warm_up(self) -> None:
        sample: Any = OneFile(self.sample)
        schema = pa.schema([])
        decoder = LineDecoder(schema, Columns(schema, frozenset(), {}))
        for block in self.open(StoredFile(sample, "", "", len(self.sample)), Place()):
            decoder.count(decoder.decode(block).batch)

    def offset_of(self, file: StoredFile, reader: RecordReader[Block]) -> int:
        return 0 if compression_of(file.path) else reader.end_offset


class NdjsonFormat(TextFormat):
    """Newline-delimited JSON: one object per line."""

    def open(self, file: StoredFile, place: Place) -> RecordReader[Block]:
        if place.record == 0:
            check_head(_unpacked_head(file), file.path, "ndjson")
        return open_blocks(
            file.open_growing(place.offset),
            path=file.path,
            compression=compression_of(file.path),
            start_offset=place.offset,
            start_record=place.record if place.offset else 0,
            start_line=place.line if place.offset else 0,
            skip_records=0 if place.offset else place.record,
            max_records=place.max_records,
            max_record_bytes=place.max_record_bytes,
        )

    def incomplete_bytes(self, file: StoredFile, piece: Block, bad_record: int) -> int:
        if not piece.last or compression_of(file.path) or bad_record != piece.end_record - 1:
            return 0
        if not has_open_line(file.tail):
            return 0
        oversized = piece.oversized[-1].size_bytes if piece.oversized else 0
        return oversized or len(piece.data) - bytes(piece.data).rfind(b"\n") - 1

    def end_of(self, file: StoredFile, reader: RecordReader[Block], incomplete_bytes: int) -> FileEnd | None:
        if compression_of(file.path):
            return None
        offset, line, tail = reader.end_offset - incomplete_bytes, reader.lines_read, file.tail
        if not reader.finished or incomplete_bytes or len(tail) < min(TAIL_BYTES, offset):
            tail = file.read_tail(offset)  # beyond what the stream remembers
        is_open = reader.finished and has_open_line(tail)
        if incomplete_bytes or (reader.finished and not is_open and tail and not tail.endswith(b"\n")):
            line -= 1  # the last line is incomplete, or it is blank and may be continued
        return FileEnd(offset, line, describe_tail(tail), is_open, bool(incomplete_bytes))


def _unpacked_head(file: StoredFile) -> bytes:
    """Return the first bytes of a file, unpacked."""
    stream = CountingStream(io.BytesIO(file.head()))
    try:
        return next(open_pieces(stream, file.path, compression_of(file.path), HEAD_BYTES), b"")
    except BrokenFileError:
        return b""  # reading the file says more
