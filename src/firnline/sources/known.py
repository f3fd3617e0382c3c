"""The inputs in a ledger, sorted by the bytes of their names; many are sorted on disk, in bounded memory."""

from __future__ import annotations

import heapq
import marshal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO

IN_MEMORY = 50_000  # files that are sorted in memory; more are written to a temporary file
_PAGE = 500  # files that are read back at once

_Row = tuple[bytes, int, str]  # name, number in the order of adding, etag


class KnownFiles:
    """Collects files, newest first: for each name, the first one added counts. They can be walked repeatedly.

    `below` are files that these ones hide; closing does not close them.
    """

    def __init__(self, files: Iterable[tuple[str, str]] = (), *, below: KnownFiles | None = None) -> None:
        self._below = below
        self._rows: list[_Row] = []
        self._segments: list[IO[bytes]] = []
        self._added = 0
        self._newer = 0
        for path, etag in files:
            self.add(path, etag)

    def add(self, path: str, etag: str) -> None:
        """Add a file with its etag at the time of reading; empty if that does not matter."""
        self._put(path, self._added, etag)
        self._added += 1

    def add_newer(self, path: str, etag: str) -> None:
        """Add a file that counts instead of every one of the same name added so far."""
        self._newer -= 1
        self._put(path, self._newer, etag)

    def _put(self, path: str, place: int, etag: str) -> None:
        self._rows.append((path.encode(), place, etag))
        if len(self._rows) >= IN_MEMORY:
            self._spill()

    def _spill(self) -> None:
        self._rows.sort()
        segment = tempfile.TemporaryFile(prefix="firnline-")  # noqa: SIM115  # closed by close(), gone with the process
        for at in range(0, len(self._rows), _PAGE):
            marshal.dump(self._rows[at : at + _PAGE], segment)
        self._segments.append(segment)
        self._rows = []

    def __bool__(self) -> bool:
        return self._added > 0 or self._newer < 0 or bool(self._below)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield every file once, with its etag, in byte order of the names."""
        if self._below is None:
            return self._walk()
        return _first_of_each(
            heapq.merge(
                ((path.encode(), 0, etag) for path, etag in self._walk()),
                ((path.encode(), 1, etag) for path, etag in self._below),
            )
        )

    def _walk(self) -> Iterator[tuple[str, str]]:
        self._rows.sort()
        return _first_of_each(heapq.merge(*(_read(segment) for segment in self._segments), self._rows))

    def renamed(self, rename: Callable[[str], str]) -> KnownFiles:
        """Return the same files under other names."""
        return KnownFiles((rename(path), etag) for path, etag in self)

    def close(self) -> None:
        """Close and thereby delete the temporary files."""
        for segment in self._segments:
            segment.close()


def _first_of_each(rows: Iterable[_Row]) -> Iterator[tuple[str, str]]:
    """Yield the first row of each name."""
    last = None
    for name, _, etag in rows:
        if name != last:
            last = name
            yield name.decode(), etag


def _read(segment: IO[bytes]) -> Iterator[_Row]:
    """Yield the rows of one sorted temporary file; only one walk at a time may read it."""
    segment.seek(0, 2)
    end, at = segment.tell(), 0
    while at < end:
        segment.seek(at)
        rows: list[_Row] = marshal.load(segment)  # noqa: S302  # a file that only this process has open
        at = segment.tell()
        yield from rows
