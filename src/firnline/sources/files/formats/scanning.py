"""Text formats whose records are not lines: a compiled scan turns them into lines of JSON, in bounded memory."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from firnline.ndjson import (
    Block,
    BrokenFileError,
    CountingStream,
    Origins,
    Oversized,
    Refused,
    compression_of,
    open_pieces,
)
from firnline.ndjson.streams import PieceBuffer
from firnline.sources.files.formats.base import Place, StoredFile
from firnline.sources.files.formats.scan_codes import (
    CONTROL_SIZE,
    CUT,
    FULL,
    LIMIT,
    LINE,
    LONG,
    ROW_END,
    ROW_LINE,
    ROW_REASON,
    ROW_START,
    SKIPPING,
)

BLOCK_BYTES = 4 * 1024 * 1024
MAX_BLOCK_RECORDS = 65_536
HEAD_BYTES = 64 * 1024  # of a record that is too long
SEEN_BYTES = 4096  # to recognise the format

Array = np.ndarray[Any, Any]


class ScanReader(PieceBuffer, ABC, Iterator[Block]):
    """Iterates over the blocks of one file; a `RecordReader`.

    A format gives `_scan`, which turns records into lines, and `_skip`, which passes over a record that is too long.
    """

    reasons: tuple[str, ...] = ("",)  # by the number in the table of records

    def __init__(self, file: StoredFile, place: Place, encoding: str = "utf-8") -> None:
        self._path = file.path
        self._place = place
        self._block_bytes = block_bytes = BLOCK_BYTES
        self._stream = CountingStream(file.open(place.offset))
        pieces = open_pieces(self._stream, file.path, compression_of(file.path), block_bytes)
        super().__init__(pieces if encoding == "utf-8" else _transcoded(pieces, file.path, encoding), place.offset)
        self._out = np.empty(2 * block_bytes, np.uint8)
        self._rows = np.zeros((MAX_BLOCK_RECORDS, 4), np.int64)
        self._control = np.zeros(CONTROL_SIZE, np.int64)
        self._records_left = 1 << 62
        self.records_read = 0
        self.finished = False
        if place.offset == 0:
            self._skip_bom()

    @abstractmethod
    def _scan(self, data: Array, at: int, max_records: int) -> tuple[int, int, int, int]:
        """Scan from `at` on. Returns the next index, the bytes written to `_out`, the records, and why it stopped."""

    @abstractmethod
    def _skip(self, data: Array, at: int) -> tuple[int, bool]:
        """Pass over a record that is too long. Returns the next index, and whether the record ended."""

    @abstractmethod
    def _broken(self, why: int) -> str:
        """Return the reason why the file is broken."""

    @property
    def lines_read(self) -> int:
        return int(self._control[LINE])

    def start(self) -> None:
        """Go to the place where reading starts.

        Raises:
            BrokenFileError: the file has fewer records than were read of it before.
        """
        place = self._place
        if place.offset:
            self.records_read, self._control[LINE] = place.record, place.line
        while self.records_read < place.record:
            if self._next_block(place.record - self.records_read) is None:
                raise BrokenFileError(
                    self._path, f"has {self.records_read} records, but {place.record} were read from it before"
                )
        if place.max_records is not None:
            self._records_left = place.max_records
        self.finished = not self._has_more()

    def __next__(self) -> Block:
        if self.finished or self._records_left <= 0:
            raise StopIteration
        block = self._next_block(self._records_left)
        if block is None:
            raise StopIteration
        self._records_left -= block.records
        return block

    def head(self) -> bytes:
        """Return the first bytes of the unpacked file."""
        while len(self._data) - self._at < SEEN_BYTES and self._read_more(1):
            pass
        return self._data[self._at : self._at + SEEN_BYTES]

    # --- bytes -----------------------------------------------------------------------------------------

    def _array(self) -> Array:
        array = np.frombuffer(self._data, np.uint8)
        array.flags.writeable = False
        return array

    def _run(self, max_records: int) -> tuple[int, int, int, int]:
        found = tuple(int(value) for value in self._scan(self._array(), self._at, max_records))
        if found[3] >= CUT and found[2] == 0:
            raise BrokenFileError(self._path, self._broken(found[3]))
        return found[0], found[1], found[2], found[3]

    def _has_more(self) -> bool:
        """Return whether a record follows; what stands before it is passed over."""
        while True:
            end, _, _, why = self._run(0)
            self._pass_bytes(end)
            if why == LIMIT:
                return True
            if not self._read_more(1):
                # The scan has seen the end only now; it may find the file broken.
                end, _, _, why = self._run(0)
                self._pass_bytes(end)
                return why == LIMIT

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
        first_line = self.lines_read + 1
        while True:
            end, size, records, why = self._run(max_records)
            if records:
                return self._block(end, size, records, first_line)
            if why == FULL:  # says nothing of the record's length: more records may be buffered behind it
                self._out = np.empty(2 * self._out.size, np.uint8)
            elif why == LONG or len(self._data) - self._at > self._place.max_record_bytes:
                return self._oversized_block(first_line)
            elif not self._read_more(max(self._block_bytes, len(self._data) - self._at)):
                self._ended = True

    def _block(self, end: int, size: int, records: int, first_line: int) -> Block:
        rows = self._rows[:records]
        good = rows[:, ROW_REASON] == 0
        refused = [
            Refused(
                self.records_read + int(number),
                int(rows[number, ROW_LINE]),
                self._data[int(rows[number, ROW_START]) : int(rows[number, ROW_END])],
                self.reasons[int(rows[number, ROW_REASON])],
            )
            for number in np.flatnonzero(~good)
        ]
        kept = rows[good]
        origins = Origins(self._data, kept[:, ROW_LINE].copy(), kept[:, ROW_START].copy(), kept[:, ROW_END].copy())
        data = self._out[:size].tobytes()
        return self._end_block(data, end, records, first_line, refused=refused, origins=origins)

    def _end_block(self, data: bytes, end: int, records: int, first_line: int, **rest: Any) -> Block:
        first_record = self.records_read
        self._pass_bytes(end)
        self.records_read += records
        lines = self.lines_read - first_line + 1
        offset = self.end_offset
        self.finished = not self._has_more()
        return Block(
            data=data,
            first_record=first_record,
            first_line=first_line,
            records=records,
            lines=lines,
            end_offset=self.end_offset if self.finished else offset,
            consumed_bytes=self._place.offset + self._stream.count,
            last=self.finished,
            **rest,
        )

    def _oversized_block(self, first_line: int) -> Block:
        """Skip one record that is too long, keeping only its start."""
        head = self._data[self._at : self._at + HEAD_BYTES]
        self._control[SKIPPING] = 0
        size = 0
        while True:
            end, ended = self._skip(self._array(), self._at)
            size += end - self._at
            self._pass_bytes(end)
            if ended:
                break
            if not self._read_more(1):
                raise BrokenFileError(self._path, self._broken(CUT))
        oversized = [Oversized(self.records_read, first_line, head, size)]
        origins = Origins(b"", *(np.zeros(0, np.int64) for _ in range(3)))
        return self._end_block(b"", self._at, 1, first_line, oversized=oversized, origins=origins)


def _transcoded(pieces: Iterator[bytes], path: str, encoding: str) -> Iterator[bytes]:
    """Yield the pieces in UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for piece in pieces:
            if text := decoder.decode(piece):
                yield text.encode()
        if text := decoder.decode(b"", True):
            yield text.encode()
    except UnicodeError as error:
        raise BrokenFileError(path, f"is not {encoding} text: {error}") from error
