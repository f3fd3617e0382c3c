"""Reads files of lines in blocks of whole lines, in bounded memory; each block says where reading can continue.

A record is a line that is not blank; it counts whether or not it can be decoded. Lines end with LF. All of these are
allowed: a CR before the LF, spaces and tabs around a record, blank lines, a last line without LF, and a UTF-8 byte
order mark at the start of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from firnline.jit import entry, is_compiled
from firnline.ndjson.streams import (
    BrokenFileError,
    ByteStream,
    Compression,
    CountingStream,
    PieceBuffer,
    open_pieces,
)
from firnline.ndjson.text import line_end

BLOCK_BYTES = 4 * 1024 * 1024
MAX_RECORD_BYTES = 16 * 1024 * 1024
MAX_BLOCK_RECORDS = 65_536  # keeps the decoded form of tiny records bounded too
HEAD_BYTES = 64 * 1024
_NO_LIMIT = 1 << 62
_TO_END, _AT_LIMIT, _AT_LONG_LINE = 0, 1, 2  # why `_measure` stopped


@dataclass(frozen=True, slots=True)
class Oversized:
    """A record longer than allowed: its number and line, its first bytes, and its size without the line feed."""

    record: int
    line: int
    head: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A record that its format refuses before it is decoded, with its bytes in the file."""

    record: int
    line: int
    raw: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the lines of a block come from, if they were made from another format. One entry per line.

    Attributes:
        source: bytes of the file.
        lines: the line in the file where the record starts.
        starts, ends: the record's bytes in `source`.
    """

    source: bytes | memoryview
    lines: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    ends: np.ndarray[Any, Any]

    def raw(self, index: int) -> bytes:
        """Return the record of a line as it stands in the file."""
        return bytes(self.source[int(self.starts[index]) : int(self.ends[index])])


@dataclass(frozen=True, slots=True)
class Block:
    """Whole lines of one file.

    Attributes:
        data: the lines; the last may lack its line feed. UTF-8 is not checked.
        first_record: number in the file, from 0, of the first record.
        first_line: number in the file, from 1, of the first line.
        records: how many records, oversized ones included.
        lines: how many lines, blank and oversized ones included.
        end_offset: where in the (unpacked) file this block ends; for a plain file, where reading can continue.
        consumed_bytes: bytes of the stored file read so far, read-ahead included.
        oversized: records that are too long, and not in `data`.
        last: no record follows in the file.
        refused: other records that are not in `data`.
        origins: where the lines come from, if the file has another format; None: they are lines of the file.
    """

    data: bytes | memoryview
    first_record: int
    first_line: int
    records: int
    lines: int
    end_offset: int
    consumed_bytes: int
    oversized: list[Oversized] = field(default_factory=list)
    last: bool = False
    refused: list[Refused] = field(default_factory=list)
    origins: Origins | None = None

    @property
    def size_bytes(self) -> int:
        """The unpacked bytes that were decoded."""
        return len(self.data)

    @property
    def end_record(self) -> int:
        """The number of records in the file up to the end of this block."""
        return self.first_record + self.records

    @property
    def end_line(self) -> int:
        """The number of lines in the file up to the end of this block."""
        return self.first_line + self.lines - 1


class BlockReader(PieceBuffer, Iterator[Block]):
    """Iterates over the blocks of one file, and knows how far it has read.

    Attributes:
        records_read: the number of records in the file up to the end of the last block, skipped ones included.
        lines_read: the same in lines.
        end_offset: the same in (unpacked) bytes.
        finished: no record follows; correct after every block, even one that `max_records` cut short.
    """

    def __init__(
        self,
        stream: ByteStream,
        path: str,
        compression: Compression | None,
        block_bytes: int = BLOCK_BYTES,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self._stream = CountingStream(stream)
        self._path = path
        self._block_bytes = block_bytes
        self._max_record_bytes = max_record_bytes
        super().__init__(open_pieces(self._stream, path, compression, block_bytes))
        self._first_offset = 0
        self._records_left = _NO_LIMIT
        self.records_read = 0
        self.lines_read = 0
        self.finished = False

    def start(self, offset: int, record: int, line: int, skip_records: int, max_records: int | None) -> None:
        """Start at an offset of the file, skip records, and stop after `max_records`."""
        self._first_offset = offset
        self.records_read, self.lines_read, self.end_offset = record, line, offset
        if offset == 0:
            self._skip_bom()
        target = record + skip_records
        while self.records_read < target:
            block = self._next_block(target - self.records_read)
            if block is None:
                raise BrokenFileError(
                    self._path, f"has {self.records_read} records, but {target} were read from it before"
                )
        if max_records is not None:
            self._records_left = max_records
        self.finished = not self._has_more()

    def __next__(self) -> Block:
        if self.finished or self._records_left <= 0:
            raise StopIteration
        block = self._next_block(self._records_left)
        if block is None:
            raise StopIteration
        self._records_left -= block.records
        return block

    def _has_more(self) -> bool:
        """Return whether a record follows; blank lines before it are skipped."""
        while True:
            end, _, lines, why = _measure(self._data, self._at, 0, _NO_LIMIT)
            if why == _AT_LIMIT:
                self._pass(end, 0, lines)
                return True
            # Only blanks are left, and the last line may continue in the next piece.
            end = self._data.rfind(b"\n", self._at) + 1
            if end > self._at:
                _, _, lines, _ = _measure(memoryview(self._data)[:end], self._at, 0, _NO_LIMIT)
                self._pass(end, 0, lines)
            if len(self._data) - self._at > HEAD_BYTES:
                self._pass(len(self._data), 0, 0)  # blanks before a record, too many to keep
            if not self._read_more(1):
                self._pass(len(self._data), 0, 1 if self._at < len(self._data) else 0)
                return False

    def _pass(self, end: int, records: int, lines: int) -> None:
        self._pass_bytes(end)
        self.records_read += records
        self.lines_read += lines

    # --- blocks ----------------------------------------------------------------------------------------

    def _next_block(self, max_records: int) -> Block | None:
        """Return the next block of at most `max_records` records; None at the end of the file."""
        max_records = min(max_records, MAX_BLOCK_RECORDS)
        if not self._has_more():
            self.finished = True
            return None
        have = len(self._data) - self._at
        if have < self._block_bytes:
            self._read_more(self._block_bytes - have)
        stop = self._data.rfind(b"\n", self._at) + 1
        while stop == 0 and not self._ended and len(self._data) - self._at <= self._max_record_bytes:
            self._read_more(self._block_bytes)
            stop = self._data.rfind(b"\n", self._at) + 1
        if self._ended or stop == 0:
            stop = len(self._data)
        start = self._at
        end, records, lines, why = _measure(memoryview(self._data)[:stop], start, max_records, self._max_record_bytes)
        if why == _AT_LONG_LINE and records == 0:
            return self._oversized_block()
        data = self._data if start == 0 and end == len(self._data) else memoryview(self._data)[start:end]
        return self._block(data, end, records, lines, [])

    def _block(self, data: bytes | memoryview, end: int, records: int, lines: int, oversized: list[Oversized]) -> Block:
        first_record, first_line = self.records_read, self.lines_read + 1
        self._pass(end, records, lines)
        offset = self.end_offset
        self.finished = not self._has_more()
        if self.finished:
            offset = self.end_offset  # blank lines after the last record belong to it
        return Block(
            data=data,
            first_record=first_record,
            first_line=first_line,
            records=records,
            lines=lines,
            end_offset=offset,
            consumed_bytes=self._first_offset + self._stream.count,
            oversized=oversized,
            last=self.finished,
        )

    def _oversized_block(self) -> Block:
        """Skip one line that is too long, keeping only its start."""
        head = self._data[self._at : self._at + HEAD_BYTES]
        size = 0
        while (stop := self._data.find(b"\n", self._at)) < 0:
            size += len(self._data) - self._at
            self._pass_bytes(len(self._data))
            if not self._read_more(1):
                stop = self._at
                break
        size += stop - self._at
        oversized = Oversized(self.records_read, self.lines_read + 1, head, size)
        return self._block(b"", min(stop + 1, len(self._data)), 1, 1, [oversized])


def open_blocks(
    stream: ByteStream,
    *,
    path: str,
    compression: Compression | None,
    skip_records: int = 0,
    start_offset: int = 0,
    start_record: int = 0,
    start_line: int = 0,
    max_records: int | None = None,
    block_bytes: int = BLOCK_BYTES,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> BlockReader:
    """Read a file in blocks of whole lines.

    To continue after `n` records: for a plain file, seek to the `end_offset` of the last block and pass it with the
    block's `end_record` and `end_line`; for a compressed file, pass `skip_records=n`.

    Args:
        stream: the file as stored; a plain file is already positioned at `start_offset`.
        skip_records: how many records after `start_offset` to skip.
        start_record: the number of records before `start_offset`.
        start_line: the number of lines before `start_offset`.
        max_records: stop exactly after this number of records.

    Raises:
        BrokenFileError: now or while iterating: damaged data, or fewer records than are to be skipped.
    """
    if compression is not None and start_offset:
        raise ValueError("a compressed file is read from its start; use skip_records")
    reader = BlockReader(stream, path, compression, block_bytes, max_record_bytes)
    reader.start(start_offset, start_record, start_line, skip_records, max_records)
    return reader


# --- lines ---------------------------------------------------------------------------------------------


@entry
def _measure_compiled(data: Any, p: int, n: int, max_records: int, max_line: int) -> tuple[int, int, int, int]:
    records = 0
    lines = 0
    while p < n:
        q = p
        while q < n and (data[q] == 32 or data[q] == 9 or data[q] == 13):
            q += 1
        if q < n and data[q] != 10:
            if records == max_records:
                return p, records, lines, _AT_LIMIT
            end = line_end(data, q, n)
            if end - p > max_line:
                return p, records, lines, _AT_LONG_LINE
            records += 1
        else:
            end = q
        lines += 1
        p = end + 1
    return min(p, n), records, lines, _TO_END


def _measure(data: bytes | memoryview, start: int, max_records: int, max_line: int) -> tuple[int, int, int, int]:
    """Count whole lines and records from `start` on; a line of only spaces, tabs and CR is no record.

    Returns (end, records, lines, why it stopped): at the end of the data, after `max_records` records, or before a
    line of more than `max_line` bytes.
    """
    if len(data) == start:
        return start, 0, 0, _TO_END
    if not is_compiled(_measure_compiled):
        return _measure_plainly(bytes(data), start, max_records, max_line)
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False  # so that all kinds of buffers share one compiled function
    end, records, lines, why = _measure_compiled(array, start, array.size, max_records, max_line)
    return int(end), int(records), int(lines), int(why)


def _measure_plainly(data: bytes, start: int, max_records: int, max_line: int) -> tuple[int, int, int, int]:
    """Do what `_measure_compiled` does, for as long as that is not there."""
    records, lines, position = 0, 0, start
    while position < len(data):
        end = data.find(b"\n", position)
        end = len(data) if end < 0 else end
        if data[position:end].strip(b" \t\r"):
            if records == max_records:
                return position, records, lines, _AT_LIMIT
            if end - position > max_line:
                return position, records, lines, _AT_LONG_LINE
            records += 1
        lines += 1
        position = end + 1
    return min(position, len(data)), records, lines, _TO_END
