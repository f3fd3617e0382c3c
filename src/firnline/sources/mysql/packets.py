"""Packets of the replication stream: raw reads into a large buffer, cut into events."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from firnline.clock import monotonic
from firnline.errors import SourceError
from firnline.sources.cdc.frames import SLACK
from firnline.sources.mysql import events as ev
from firnline.sources.mysql.connect import RETRY_HINT
from firnline.sources.mysql.server import Server, as_log_error

LARGEST = 0xFFFFFF  # a packet of this length goes on in the next one
BUFFER_BYTES = LARGEST + 4 + (1 << 20)
GATHERED = 1 << 18  # bytes that one `fill` reads if they are there; a read of an encrypted socket gives 16 KiB at most


class PacketReader:
    """Reads the packets that a server sends after the command that begins the stream."""

    def __init__(self, db: Any, server: Server, silence_seconds: float) -> None:
        self._db = db  # keeps the connection open
        self._socket: Any = db._sock
        # Of an encrypted socket this is what `recv_into` calls: a read gives 16 KiB at most, so there are many.
        self._read: Callable[[int, memoryview], Any] = (
            self._socket.read if isinstance(self._socket, ssl.SSLSocket) else self._read_plain
        )
        self._server = server
        self._silence = silence_seconds
        self.data: npt.NDArray[np.uint8] = np.empty(BUFFER_BYTES + SLACK, np.uint8)  # what was read, for compiled code
        self._buffer = self.data.data[:BUFFER_BYTES]
        self._start = self._end = 0
        self._timeout = -1.0  # of the socket
        self._heard = monotonic()
        self._closed = threading.Event()

    def close(self) -> None:
        """Close the connection. Called by any thread; wakes one that reads."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, ValueError):
            self._socket.close()

    def has_packet(self) -> bool:
        """Return whether the buffer holds a whole packet, which the next event begins with."""
        if self._end - self._start < 4:
            return False
        return self._end - self._start >= 4 + self._size()

    def _size(self) -> int:
        at = self._start
        return self._buffer[at] | self._buffer[at + 1] << 8 | self._buffer[at + 2] << 16

    def peek_size(self) -> int:
        """Return the length of the packet at the front of the buffer."""
        return self._size()

    def is_event_of(self, kind: int) -> bool:
        """Return whether the packet at the front begins an event of this type."""
        return self._size() > ev.HEADER_SIZE and self._buffer[self._start + 9] == kind

    def rows_at_front(self) -> tuple[int, int] | None:
        """Return type and table id of the event at the front if it holds rows and does not end its statement."""
        at = self._start
        kind = self._buffer[at + 9]
        if kind not in ev.ROWS or self._size() < ev.HEADER_SIZE + 10 or self._buffer[at + 30] & ev.STATEMENT_END:
            return None
        return kind, int.from_bytes(self._buffer[at + 24 : at + 30], "little")

    @property
    def bounds(self) -> tuple[int, int]:
        """Where the packet at the front begins in `data`, and where the bytes end that were read."""
        return self._start, self._end

    def drop_to(self, start: int) -> None:
        """Drop the packets before `start`, one of which begins there."""
        self._start = start

    def take(self) -> tuple[memoryview, bool]:
        """Return the packet at the front, and whether it goes on in the next one. Valid until the next `fill`."""
        size = self._size()
        at = self._start + 4
        self._start = at + size
        return self._buffer[at : at + size], size == LARGEST

    def next_packet(self) -> tuple[memoryview, bool]:
        """Return the next packet; waits for it."""
        while not self.has_packet():
            self.fill(1.0)
        return self.take()

    def take_event(self) -> memoryview:
        """Return the next event whole, of which the first packet is at the front.

        Raises:
            SourceError, SourceGapError, ConfigError: the server ended the stream.
        """
        packet, goes_on = self.take()
        self.check(packet)
        if not goes_on:
            return packet[1:]
        parts = bytearray(packet[1:])
        while goes_on:
            packet, goes_on = self.next_packet()
            parts += packet
        return memoryview(parts)

    def check(self, packet: memoryview) -> None:
        """Raise the error that a packet tells."""
        mark = packet[0] if len(packet) else 0xFE
        if mark == 0xFF:
            code = int.from_bytes(packet[1:3], "little")
            words = bytes(packet[3:]).decode("utf-8", "replace")
            raise as_log_error(code, words[6:] if words.startswith("#") else words, self._server)
        if mark == 0xFE and len(packet) < 9:
            raise self._lost("the server ended the stream")
        if mark != 0:
            raise ev.damaged(f"a packet begins with {mark}")

    def fill(self, seconds: float) -> bool:
        """Read more bytes; return whether there were any within so many seconds.

        Raises:
            SourceError: the connection is lost, closed, or silent for too long.
        """
        if self._closed.is_set():
            raise self._lost("the stream was closed")
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start >= GATHERED or (
            self._end - self._start >= 4 and self._start + 4 + self._size() > len(self._buffer)
        ):
            left = self._end - self._start
            self._buffer[:left] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, left
        count = self._receive(seconds)
        if count is None:
            if monotonic() - self._heard > self._silence:
                raise self._lost(f"nothing came for {self._silence:.0f} s, not even a heartbeat")
            return False
        self._heard = monotonic()
        most = min(self._end - count + GATHERED, len(self._buffer) - (1 << 16))
        with contextlib.suppress(SourceError):  # what came before the end may say why; the next call raises it again
            while self._end < most and self._receive(0.0):
                pass
        return True

    def _receive(self, seconds: float) -> int | None:
        """Read once; return how many bytes came, None if none came in time."""
        try:
            if seconds != self._timeout:
                self._socket.settimeout(seconds)
                self._timeout = seconds
            count = int(self._read(len(self._buffer) - self._end, self._buffer[self._end :]))
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return None
        except (OSError, ValueError) as error:
            raise self._lost(str(error)) from error
        if not count:
            raise self._lost("the server closed the connection")
        self._end += count
        return count

    def _read_plain(self, _size: int, buffer: memoryview) -> int:
        return int(self._socket.recv_into(buffer))

    def _lost(self, why: str) -> SourceError:
        host, port = self._server.host
        return SourceError(f"the stream of server {host}:{port} is lost: {why}", hint=RETRY_HINT)
