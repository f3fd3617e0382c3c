"""Rows of a SELECT by the binary protocol, taken from the socket as they are, without an object per row."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from firnline.errors import FirnlineError, SourceError
from firnline.sources.mysql import select_kernel
from firnline.sources.mysql.connect import RETRY_HINT
from firnline.sources.mysql.events import read_length
from firnline.sources.mysql.server import Server, send

COM_STMT_PREPARE, COM_STMT_EXECUTE, COM_STMT_CLOSE = 0x16, 0x17, 0x19
SILENCE_SECONDS = 600.0  # for the first row, or the next one
FIRST_BYTES = 1 << 20
NO_LIMIT = 1 << 62
_ERROR, _EOF = 0xFF, 0xFE
_FIXED = {1: 1, 2: 2, 13: 2, 3: 4, 9: 4, 8: 8, 4: 4, 5: 8}  # bytes of a value, by the type that the server names
_TEMPORAL = frozenset({7, 10, 11, 12, 14})


class ServerError(SourceError):
    """The server refused a statement.

    Attributes:
        number: The server's number of the error.
    """

    def __init__(self, number: int, words: str, server: Server) -> None:
        super().__init__(f"{words} ({number}; server {server.host[0]}:{server.host[1]})", hint=RETRY_HINT)
        self.number = number


def error_number(error: FirnlineError) -> int:
    """Return the server's number of an error; 0 if it is none of the server."""
    if isinstance(error, ServerError):
        return error.number
    words = getattr(error.__cause__, "args", ())
    return words[0] if words and isinstance(words[0], int) else 0


@dataclass(frozen=True, slots=True)
class Result:
    """Rows of a SELECT."""

    content: bytes  # the rows, each with its length in four bytes
    rows: int
    last: int  # where the last row begins in the content
    layouts: tuple[int, ...]  # of every column; see `select_kernel`
    is_whole: bool  # the server had no more rows; otherwise they are read, or the connection is closed


class RowReader:
    """Selects rows on one connection; keeps its buffer."""

    def __init__(self, db: Any, server: Server) -> None:
        self._db = db
        self._socket: Any = db._sock
        self._server = server
        self._data: Any = np.empty(FIRST_BYTES, np.uint8)
        self._start = self._end = 0  # what is received and not taken yet
        self._sequence = 0

    def select(self, statement: str, max_bytes: int) -> Result:
        """Run a statement and return its rows, as many as `max_bytes` allow; a single larger row comes alone.

        Raises:
            ServerError: the server refuses the statement.
            SourceError: the connection is lost.
        """
        return next(self.select_parts(statement, NO_LIMIT, max_bytes))

    def select_parts(self, statement: str, max_rows: int, max_bytes: int) -> Iterator[Result]:
        """Run a statement and yield its rows in parts, each with up to `max_rows` rows and as many as `max_bytes`
        allow; only the last one, which may have no row, `is_whole`. Raises as `select`."""
        self._command(bytes([COM_STMT_PREPARE]) + statement.encode())
        prepared = self._packet()
        number, columns, parameters = struct.unpack_from("<IHH", prepared, 1)
        if parameters:
            raise SourceError(f"the statement has {parameters} parameters: {statement[:200]}")
        self._columns(columns)
        self._command(struct.pack("<BIBI", COM_STMT_EXECUTE, number, 0, 1))
        count, _ = read_length(memoryview(self._packet()), 0)
        layouts = self._columns(count)
        is_whole = False
        while not is_whole:
            rows, last, is_whole = self._rows(max_rows, max_bytes)
            content = self._data[: self._start].tobytes()
            if is_whole:
                self._command(struct.pack("<BI", COM_STMT_CLOSE, number))
            yield Result(content, rows, last, layouts, is_whole)

    def _command(self, command: bytes) -> None:
        self._start = self._end = 0
        self._sequence = 1
        send(self._db, command)

    def _columns(self, count: int) -> tuple[int, ...]:
        """Read the descriptions of columns, and what ends them."""
        found = []
        for _ in range(count):
            packet, at = self._packet(), 0
            for _ in range(6):  # catalogue, database, table twice, name twice
                size, at = read_length(memoryview(packet), at)
                at += size
            code = packet[at + 7]
            if code in _TEMPORAL:
                found.append(select_kernel.WITH_BYTE)
            else:
                found.append(_FIXED.get(code, select_kernel.WITH_LENGTH))
        if count and self._packet()[0] != _EOF:
            raise self._lost("descriptions of columns have no end")
        return tuple(found)

    def _rows(self, max_rows: int, max_bytes: int) -> tuple[int, int, bool]:
        """Read rows to the front of the buffer, up to `self._start`; return how many, where the last one begins, and
        whether these are all."""
        left = self._end - self._start
        self._data[:left] = self._data[self._start : self._end].copy()
        self._start, self._end = 0, left
        found = np.zeros(4, np.int64)
        rows = last = 0
        while True:
            state = select_kernel.split(self._data, self._start, self._end, self._sequence, max_rows - rows, found)
            self._start, self._sequence = int(found[0]), int(found[1])
            if found[2]:
                rows, last = rows + int(found[2]), int(found[3])
            if state == select_kernel.END:
                end = self._start
                if self._packet()[0] != _EOF:
                    raise self._lost("a packet is no row")
                self._start = end
                return rows, last, True
            if state == select_kernel.LOST:
                raise self._lost("packets are not in order")
            if rows >= max_rows or (rows and self._start >= max_bytes):
                return rows, last, False
            if state == select_kernel.LARGE:
                last = self._start
                self._join()
                rows += 1
            else:
                self._fill()

    def _join(self) -> None:
        """Put the packets of one row behind each other, without their headers."""
        begin = source = self._start
        target = begin + 4
        while True:
            while self._end - source < 4 or self._end - source < 4 + self._size(source):
                self._fill()
            size = self._size(source)
            if self._data[source + 3] != self._sequence:
                raise self._lost("packets are not in order")
            self._sequence = (self._sequence + 1) & 255
            self._data[target : target + size] = self._data[source + 4 : source + 4 + size].copy()
            source, target = source + 4 + size, target + size
            if size < select_kernel.LARGEST:
                break
        length = target - begin - 4
        self._data[begin : begin + 4] = np.frombuffer(length.to_bytes(4, "little"), np.uint8)
        left = self._end - source
        self._data[target : target + left] = self._data[source : self._end].copy()
        self._start, self._end = target, target + left

    def _packet(self) -> bytes:
        """Return the next packet.

        Raises:
            ServerError: it is an error.
        """
        while self._end - self._start < 4 or self._end - self._start < 4 + self._size(self._start):
            self._fill()
        at, size = self._start + 4, self._size(self._start)
        if self._data[self._start + 3] != self._sequence or not size:
            raise self._lost("packets are not in order")
        self._sequence = (self._sequence + 1) & 255
        self._start = at + size
        packet: bytes = self._data[at : at + size].tobytes()
        self._check(packet)
        return packet

    def _check(self, packet: bytes) -> None:
        if packet[:1] == bytes([_ERROR]):
            words = packet[3:].decode("utf-8", "replace")
            number = int.from_bytes(packet[1:3], "little")
            raise ServerError(number, words[6:] if words.startswith("#") else words, self._server)

    def _size(self, at: int) -> int:
        return int(self._data[at]) | int(self._data[at + 1]) << 8 | int(self._data[at + 2]) << 16

    def _fill(self) -> None:
        """Read more bytes."""
        if len(self._data) - self._end < FIRST_BYTES // 2:
            larger = np.empty(2 * len(self._data), np.uint8)
            larger[: self._end] = self._data[: self._end]
            self._data = larger
        try:
            self._socket.settimeout(SILENCE_SECONDS)
            count = self._socket.recv_into(memoryview(self._data)[self._end :])
        except (OSError, ValueError) as error:
            raise self._lost(str(error)) from error
        if not count:
            raise self._lost("the server closed the connection")
        self._end += count

    def _lost(self, why: str) -> SourceError:
        host, port = self._server.host
        return SourceError(f"the connection to server {host}:{port} is lost: {why}", hint=RETRY_HINT)
