"""Files that grow after they were read: where a reading ended, and the proof that what was read is still there.

A reader of a plain file writes down where it ended, and the checksum of the last bytes before that place. A file that
is larger now and has the same bytes there has grown: the rest can be read. This proves the last `TAIL_BYTES` that were
read and their place in the file, not the bytes before them: an editor that replaces earlier bytes by others of the same
length is not noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from firnline.storage import FileStat, Readable, Storage
from firnline.types import Json

TAIL_BYTES = 4096
MAX_PROOFS = 1000  # grown files that one comparison looks into; the others count as grown by their size
_READ_BYTES = 64 * 1024
_BLANKS = b" \t\r"


@dataclass(frozen=True, slots=True)
class FileEnd:
    """Where the reading of a plain file ended."""

    offset: int = 0  # the byte after what was read
    line: int = 0  # lines before that byte
    tail: str = ""  # `BYTES:CHECKSUM` of the last bytes before `offset`
    open_line: bool = False  # the last record has no line feed: what is appended may belong to it
    incomplete_line: bool = False  # a line begins at `offset` that was left because it is incomplete

    def to_json(self) -> dict[str, Json]:
        flags = {"open_line": self.open_line, "incomplete_line": self.incomplete_line}
        return {
            "offset": self.offset,
            "line": self.line,
            "tail": self.tail,
            **{key: value for key, value in flags.items() if value},
        }

    @classmethod
    def from_json(cls, value: Json) -> FileEnd:
        return cls(**value)


class Change(Enum):
    """How a file differs from what was read of it."""

    GROWN = "grown"  # what was read is still there, and more follows
    BLANK = "blank"  # it has grown by blanks that may be followed by the rest of a record
    CONTINUED = "continued"  # the last line was read as a record, and has been continued
    REPLACED = "replaced"  # anything else


@dataclass(frozen=True, slots=True)
class Growth:
    """How a file has changed, and where the rest begins."""

    change: Change
    offset: int = 0


def describe_tail(data: bytes) -> str:
    """Return the length and checksum of the last bytes that were read."""
    return f"{len(data)}:{_checksum(data)}"


def has_open_line(tail: bytes) -> bool:
    """Return whether the last line, which is not blank, lacks its line feed."""
    last = tail[tail.rfind(b"\n") + 1 :]
    # Blanks alone, longer than the tail, may follow a record on the same line.
    return bool(last.strip(_BLANKS)) or (len(last) == TAIL_BYTES and not last.endswith(b"\n"))


def read_tail(storage: Storage, key: str, offset: int) -> bytes:
    """Return the last bytes of a file before `offset`."""
    size = min(TAIL_BYTES, offset)
    stream = storage.open_read(key, offset - size)
    try:
        return _read(stream, size)
    finally:
        stream.close()


@dataclass(frozen=True, slots=True)
class ReadFile:
    """What was read of a file."""

    etag: str  # and the size, at that time
    size_bytes: int
    records: int
    end: FileEnd | None  # None: not a plain file, or read before ends were recorded
    rest_bytes: int = 0  # added since

    @classmethod
    def of_record(cls, record: Mapping[str, Json]) -> ReadFile:
        """Return what the ledger says."""
        end = FileEnd.from_json(record["end"]) if record.get("end") else None
        return cls(str(record.get("etag", "")), int(record.get("size_bytes", 0)), int(record.get("to", 0)), end)

    def to_text(self) -> str:
        """Return everything but the etag as a short text."""
        return json.dumps([self.size_bytes, self.records, self.end.to_json() if self.end else None])

    @staticmethod
    def is_incomplete(text: str) -> bool:
        """Return whether the last line was left because it is incomplete, without parsing the text."""
        return '"incomplete_line"' in text

    @classmethod
    def from_text(cls, etag: str, text: str) -> ReadFile:
        size_bytes, records, end = json.loads(text) if text else (0, 0, None)
        return cls(etag, size_bytes, records, FileEnd.from_json(end) if end else None)


class GrownFiles:
    """Collects files that grew after they were read; `find` reads a few KiB of one, and is called for a bounded
    number."""

    def __init__(self, find: Callable[[FileStat, ReadFile], Growth]) -> None:
        self._find = find
        self._looked = 0
        self.grown: list[str] = []
        self.rest: dict[str, ReadFile] = {}  # those whose rest can be read

    def add(self, stat: FileStat, read: ReadFile) -> bool:
        """Add a file that changed. Returns False if it has not grown: it was replaced."""
        if stat.size_bytes <= read.size_bytes or not (read.size_bytes or read.end):
            return False
        if read.end is not None and self._looked < MAX_PROOFS:
            self._looked += 1
            change = self._find(stat, read).change
            if change is Change.REPLACED:
                return False
            if change is not Change.BLANK:
                self.rest[stat.name] = replace(read, rest_bytes=stat.size_bytes - read.end.offset)
        self.grown.append(stat.name)
        return True


def find_growth(storage: Storage, key: str, size_bytes: int, read: ReadFile) -> Growth:
    """Return how a file of `size_bytes` differs from what was read of it. Reads a few KiB.

    Raises:
        OSError: the file cannot be read.
    """
    end = read.end
    if end is None or size_bytes <= read.size_bytes:
        return Growth(Change.REPLACED)
    length, _, checksum = end.tail.partition(":")
    stream = storage.open_read(key, end.offset - int(length))
    try:
        if _checksum(_read(stream, int(length))) != checksum:
            return Growth(Change.REPLACED)
        return _skip_open_line(stream, end.offset) if end.open_line else Growth(Change.GROWN, end.offset)
    finally:
        stream.close()


def _skip_open_line(stream: Readable, offset: int) -> Growth:
    """Return where the line after the open one begins; nothing but blanks may follow on the open one."""
    while data := stream.read(_READ_BYTES):
        end = data.find(b"\n")
        if data[: end if end >= 0 else len(data)].strip(_BLANKS):
            return Growth(Change.CONTINUED)
        if end >= 0:
            return Growth(Change.GROWN, offset + end + 1)
        offset += len(data)
    return Growth(Change.BLANK)


def _read(stream: Readable, size: int) -> bytes:
    """Read `size` bytes, or all there are."""
    parts = []
    while size > 0 and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class TailStream:
    """A stream that remembers its last bytes."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.tail = b""

    def read(self, size: int = -1, /) -> bytes:
        data = self._stream.read(size)
        self.tail = data[-TAIL_BYTES:] if len(data) >= TAIL_BYTES else (self.tail + data)[-TAIL_BYTES:]
        return data

    def close(self) -> None:
        self._stream.close()
