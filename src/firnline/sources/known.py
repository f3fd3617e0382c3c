"""The inputs in a ledger, sorted by the bytes of their names; many are sorted on disk, in bounded memory."""

from __future__ import annotations

import heapq
import marshal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import IO

IN_MEMORY = 50_000  # files that are sorted in memory; more are written to a temporary file
_PAGE = 500  # files that are read back at once
_OLDER = 1 << 40  # added to the numbers of files below: they are older than all others

_Row = tuple[bytes, int, str, str]  # name, number in the order of adding, etag, end


class KnownFiles:
    """Collects files, newest first: for each name, the first one added counts. They can be walked repeatedly.

    `below` are files that these ones hide; closing does not close them. Of every file it keeps the etag at the time of
    reading (empty if that does not matter) and its end, a text of the source that says where the reading ended.
    """

    def __init__(self, files: Iterable[tuple[str, str]] = (), *, below: KnownFiles | None = None) -> None:
        self._below = below
        self._rows: list[_Row] = []
        self._segments: list[IO[bytes]] = []
        self._added = 0
        self._newer = 0
        for path, etag in files:
            self.add(path, etag)

    def add(self, path: str, etag: str, end: str = "") -> None:
        """Add a file."""
        self._put(path, self._added, etag, end)
        self._added += 1

    def add_newer(self, path: str, etag: str, end: str = "") -> None:
        """Add a file that counts instead of every one of the same name added so far."""
        self._newer -= 1
        self._put(path, self._newer, etag, end)

    def _put(self, path: str, place: int, etag: str, end: str) -> None:
        self._rows.append((path.encode(), place, etag, end))
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
        return ((path, etag) for path, etag, _ in self.with_ends())

    def with_ends(self) -> Iterator[tuple[str, str, str]]:
        """Yield every file once, with its etag and end, in byte order of the names."""
        if self._below is None:
            return self._walk()
        return _first_of_each(
            heapq.merge(
                ((path.encode(), 0, etag, end) for path, etag, end in self._walk()),
                ((path.encode(), 1, etag, end) for path, etag, end in self._below.with_ends()),
            )
        )

    def _walk(self) -> Iterator[tuple[str, str, str]]:
        self._rows.sort()
        return _first_of_each(heapq.merge(*(_read(segment) for segment in self._segments), self._rows))

    def renamed(self, rename: Callable[[str], str]) -> KnownFiles:
        """Return the same files under other names. Of two names that become one, the newer file counts."""
        renamed = KnownFiles()
        for name, number, etag, end in self._numbered():
            renamed._put(rename(name.decode()), number, etag, end)
            renamed._added += 1
        return renamed

    def _numbered(self) -> Iterator[_Row]:
        """Yield all rows, also of the files below, with numbers that order the rows of one name: the newest first."""
        yield from heapq.merge(*(_read(segment) for segment in self._segments), self._rows)
        if self._below is not None:
            for name, number, etag, end in self._below._numbered():
                yield name, number + _OLDER, etag, end

    def close(self) -> None:
        """Close and thereby delete the temporary files."""
        for segment in self._segments:
            segment.close()


def _first_of_each(rows: Iterable[_Row]) -> Iterator[tuple[str, str, str]]:
    """Yield the first row of each name."""
    last = None
    for name, _, etag, end in rows:
        if name != last:
            last = name
            yield name.decode(), etag, end


def _read(segment: IO[bytes]) -> Iterator[_Row]:
    """Yield the rows of one sorted temporary file; only one walk at a time may read it."""
    segment.seek(0, 2)
    end, at = segment.tell(), 0
    while at < end:
        segment.seek(at)
        rows: list[_Row] = marshal.load(segment)  # noqa: S302  # a file that only this process has open
        at = segment.tell()
        yield from rows
