"""The files that a ledger knows, in byte order of their names, whatever their number: sorted on disk when many."""

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
    """Add files, the newest first: of one name, the first that was added counts. Then walk them, as often as wanted."""

    def __init__(self, files: Iterable[tuple[str, str]] = ()) -> None:
        self._rows: list[_Row] = []
        self._runs: list[IO[bytes]] = []
        self._added = 0
        for path, etag in files:
            self.add(path, etag)

    def add(self, path: str, etag: str) -> None:
        """A file, and its etag as it was read; empty when that does not matter."""
        self._rows.append((path.encode(), self._added, etag))
        self._added += 1
        if len(self._rows) >= HELD:
            self._spill()

    def _spill(self) -> None:
        self._rows.sort()
        run = tempfile.TemporaryFile(prefix="firnline-")  # noqa: SIM115  # closed by close(), gone with the process
        for at in range(0, len(self._rows), _PAGE):
            marshal.dump(self._rows[at : at + _PAGE], run)
        self._runs.append(run)
        self._rows = []

    def __bool__(self) -> bool:
        return self._added > 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Every file once, with its etag, in byte order of the names."""
        self._rows.sort()
        last = None
        for name, _, etag in heapq.merge(*(_read(run) for run in self._runs), self._rows):
            if name != last:
                last = name
                yield name.decode(), etag

    def renamed(self, rename: Callable[[str], str]) -> KnownFiles:
        """The same files under other names."""
        return KnownFiles((rename(path), etag) for path, etag in self)

    def close(self) -> None:
        """Let go of temporary files."""
        for run in self._runs:
            run.close()


def _read(run: IO[bytes]) -> Iterator[_Row]:
    """The rows of a run; `run` is read by one walk at a time."""
    run.seek(0, 2)
    end, at = run.tell(), 0
    while at < end:
        run.seek(at)
        rows: list[_Row] = marshal.load(run)  # noqa: S302  # a file that only this process has open
        at = run.tell()
        yield from rows
