"""The inputs in a ledger, sorted by the bytes of their names; many are sorted on disk, in bounded memory."""

from __future__ import annotations

import heapq
import marshal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO

HELD = 50_000  # files that are sorted in memory; more are written to a temporary file
_PAGE = 500  # of them are read back at once

_Row = tuple[bytes, int, str]  # name, place in the order of adding, etag


class KnownFiles:
    """Collects files, newest first: for each name, the first one added counts. Afterwards they can be walked
    repeatedly."""

    def __init__(self, files: Iterable[tuple[str, str]] = ()) -> None:
        self._rows: list[_Row] = []
        self._segments: list[IO[bytes]] = []
        self._added = 0
        for path, etag in files:
            self.add(path, etag)

    def add(self, path: str, etag: str) -> None:
        """Add a file with its etag at the time of reading; empty if that does not matter."""
        self._rows.append((path.encode(), self._added, etag))
        self._added += 1
        if len(self._rows) >= HELD:
            self._spill()

    def _spill(self) -> None:
        self._rows.sort()
        segment = tempfile.TemporaryFile(prefix="firnline-")  # noqa: SIM115  # closed by close(), gone with the process
        for at in range(0, len(self._rows), _PAGE):
            marshal.dump(self._rows[at : at + _PAGE], segment)
        self._segments.append(segment)
        self._rows = []

    def __bool__(self) -> bool:
        return self._added > 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield every file once, with its etag, in byte order of the names."""
        self._rows.sort()
        last = None
        for name, _, etag in heapq.merge(*(_read(segment) for segment in self._segments), self._rows):
            if name != last:
                last = name
                yield name.decode(), etag

    def renamed(self, rename: Callable[[str], str]) -> KnownFiles:
        """Return the same files under other names."""
        return KnownFiles((rename(path), etag) for path, etag in self)

    def close(self) -> None:
        """Close and thereby delete the temporary files."""
        for segment in self._segments:
            segment.close()


def _read(segment: IO[bytes]) -> Iterator[_Row]:
    """Yield the rows of one sorted temporary file; only one walk at a time may read it."""
    segment.seek(0, 2)
    end, at = segment.tell(), 0
    while at < end:
        segment.seek(at)
        rows: list[_Row] = marshal.load(segment)  # noqa: S302  # a file that only this process has open
        at = segment.tell()
        yield from rows
