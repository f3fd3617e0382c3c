"""Reads plain, gzip and zstd files in pieces of bounded size; a damaged file raises an error, never ends early."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import pyarrow as pa


def _fastest_zlib() -> Any:
    """Return the fastest installed library with the interface of `zlib`."""
    for name in ("isal.isal_zlib", "zlib_ng.zlib_ng"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return zlib


_zlib = _fastest_zlib()

Compression = Literal["gz", "zst"]

_READ_BYTES = 256 * 1024  # compressed bytes per read; small enough to stay in the CPU cache while it is unpacked
BOM = b"\xef\xbb\xbf"
_GZIP_WINDOW = 31  # zlib requires a gzip header and trailer, and checks them


class ByteStream(Protocol):
    """A binary file open for reading."""

    def read(self, size: int, /) -> bytes: ...


class BrokenFileError(Exception):
    """The file cannot be read to its end: truncated, corrupt, or shorter than it was."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def compression_of(path: str) -> Compression | None:
    """Return the compression of a file by its suffix; None for a plain file."""
    lower = path.lower()
    if lower.endswith((".gz", ".gzip")):
        return "gz"
    if lower.endswith((".zst", ".zstd")):
        return "zst"
    return None


class CountingStream:
    """A stream that counts the bytes read, and remembers the error of a failed read."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self.count = 0
        self.failure: BaseException | None = None
        self.closed = False

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._stream.read(size if size > 0 else _READ_BYTES)
        except BaseException as exc:
            self.failure = exc
            raise
        self.count += len(data)
        return data

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: the owner closes the stream."""


def open_pieces(stream: CountingStream, path: str, compression: Compression | None, size: int) -> Iterator[bytes]:
    """Yield the unpacked bytes in pieces of at most `size` bytes.

    Raises:
        BrokenFileError: while iterating, where the damage is detected; at the end at the latest.
    """
    if compression == "gz":
        return _gzip_pieces(stream, path, size)
    if compression == "zst":
        return _zstd_pieces(stream, path, size)
    return _plain_pieces(stream, size)


def _plain_pieces(stream: CountingStream, size: int) -> Iterator[bytes]:
    while data := stream.read(size):
        yield data


def _gzip_pieces(stream: CountingStream, path: str, size: int) -> Iterator[bytes]:
    packed = stream.read(_READ_BYTES)
    while packed:
        member = _zlib.decompressobj(_GZIP_WINDOW)
        while not member.eof:
            try:
                data = member.decompress(packed, size)
            except (_zlib.error, zlib.error) as exc:
                raise BrokenFileError(path, f"not valid gzip data near byte {stream.count}: {exc}") from exc
            if data:
                yield data
            packed = member.unconsumed_tail
            if not packed and not member.eof and len(data) < size:
                packed = stream.read(_READ_BYTES)
                if not packed:
                    raise BrokenFileError(path, f"the gzip data ends in the middle, at byte {stream.count}")
        packed = member.unused_data or stream.read(_READ_BYTES)


def _zstd_pieces(stream: CountingStream, path: str, size: int) -> Iterator[bytes]:
    head = stream.read(_READ_BYTES)
    if not head:
        return
    unpacked = pa.CompressedInputStream(pa.PythonFile(_Rejoined(head, stream), mode="r"), "zstd")
    while True:
        try:
            data = unpacked.read(size)
        except OSError as exc:
            if stream.failure is not None:
                raise stream.failure from None  # the file could not be read, which says nothing about its content
            raise BrokenFileError(path, f"not valid zstd data near byte {stream.count}: {exc}") from exc
        if not data:
            return
        yield data


class _Rejoined(CountingStream):
    """A stream whose first bytes were already read."""

    def __init__(self, head: bytes, stream: ByteStream) -> None:
        super().__init__(stream)
        self._head = head

    def read(self, size: int = -1, /) -> bytes:
        if self._head:
            size = size if size > 0 else len(self._head)
            data, self._head = self._head[:size], self._head[size:]
            return data
        return super().read(size)


class PieceBuffer:
    """Bytes of a file that were read in pieces, and of which a reader has not yet returned all.

    Attributes:
        end_offset: bytes of the unpacked file that were passed.
    """

    def __init__(self, pieces: Iterator[bytes], end_offset: int = 0) -> None:
        self._pieces = pieces
        self._data = b""  # the bytes from _at on are not yet passed
        self._at = 0
        self._ended = False  # no piece is left
        self.end_offset = end_offset

    def _skip_bom(self) -> None:
        while len(self._data) < len(BOM) and self._read_more(1):
            pass
        if self._data.startswith(BOM):
            self._pass_bytes(len(BOM))

    def _read_more(self, wanted: int) -> bool:
        """Append at least `wanted` bytes, or all that is left. Returns False if nothing was left."""
        if self._ended:
            return False
        parts = [self._data[self._at :]] if self._at < len(self._data) else []
        got = 0
        while got < wanted:
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
                break
            parts.append(piece)
            got += len(piece)
        self._data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._at = 0
        return got > 0

    def _pass_bytes(self, end: int) -> None:
        self.end_offset += end - self._at
        self._at = end
