"""Reads the binary log of a test's server with Firnline's stream and decoder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from firnline.clock import monotonic
from firnline.sources.cdc.log import Changes, Cut, Decoded, Op
from firnline.sources.mysql.decode import MySqlDecoder
from firnline.sources.mysql.stream import MySqlStream
from tests.support.mysql import BinlogServer
from tests.support.processes import wait_until

WAIT_SECONDS = 120.0  # for what a server has committed to come


def stream_of(server: BinlogServer, *, dsn: str = "", server_id: int = 4711, **settings: Any) -> MySqlStream:
    """A stream of the tables of the database `shop`."""
    is_captured = settings.pop("is_captured", lambda table: table.startswith("shop."))
    return MySqlStream(dsn or server.dsn, is_captured, server_id, **settings)


class Reading:
    """What a stream has given since it was opened."""

    def __init__(self, stream: MySqlStream) -> None:
        self.stream = stream
        self.context = stream.context(at_cut=True)
        self.frames = b""
        self.cuts: list[Cut] = []

    def read(self, cuts: int, max_bytes: int = 1 << 20) -> Reading:
        """Read until so many transactions have come."""
        deadline = monotonic() + WAIT_SECONDS
        while len(self.cuts) < cuts:
            piece = self.stream.read(max_bytes, 1.0)
            self.cuts += [
                Cut(cut.offset + len(self.frames), cut.position, cut.transaction, cut.committed_at, cut.rows)
                for cut in piece.cuts
            ]
            self.frames += piece.frames
            assert monotonic() < deadline, f"{len(self.cuts)} of {cuts} transactions came"
        return self

    def decode(self, **settings: Any) -> Decoded:
        return MySqlDecoder(**settings).decode(self.context, self.frames)


@contextlib.contextmanager
def reading(server: BinlogServer, position: Any, **settings: Any) -> Iterator[Reading]:
    """Open a stream at a position."""
    with contextlib.closing(stream_of(server, **settings)) as stream:
        stream.open(position)
        yield Reading(stream)


def end_of(server: BinlogServer) -> Any:
    """The position where the log ends now."""
    with contextlib.closing(stream_of(server)) as stream:
        return stream.end_position()


def log_of(server: BinlogServer, work: Callable[[], object], cuts: int, **settings: Any) -> Decoded:
    """What work on a server left in its log, decoded."""
    start = end_of(server)
    work()
    with reading(server, start, **settings) as log:
        return log.read(cuts).decode()


def flat(decoded: Decoded) -> list[tuple[str, str, dict[str, Any]]]:
    """All changes in the order of the log: table, operation, and the values that the log has."""
    found: list[tuple[int, str, str, dict[str, Any]]] = []
    for changes in decoded.changes:
        for number, row in enumerate(changes.rows.to_pylist()):
            kept = {name: value for (name, value), gone in zip(row.items(), changes.missing, strict=True)
                    if gone is None or not gone[number]}  # fmt: skip
            found.append((int(changes.order[number]), changes.schema.table, Op(changes.ops[number]).name, kept))
    assert sorted(one[0] for one in found) == list(range(decoded.count))
    return [one[1:] for one in sorted(found, key=lambda one: one[0])]


def apply(decoded: Decoded, tables: dict[str, dict[Any, dict[str, Any]]]) -> None:
    """Fold changes into tables, by key."""
    keys = {changes.schema.table: changes.schema.key for changes in decoded.changes if changes.schema.key}
    for table, op, row in flat(decoded):
        rows = tables.setdefault(table, {})
        if op == "TRUNCATE":
            rows.clear()
            continue
        key = tuple(row[name] for name in keys[table])
        if op == "DELETE":
            del rows[key]
        else:
            rows[key] = {**rows.get(key, {}), **row}


def only(decoded: Decoded) -> Changes:
    """The changes of a log that has those of one table under one schema."""
    (changes,) = decoded.changes
    return changes


def purge(server: BinlogServer, file: str) -> None:
    """Remove all files of the log before this one. A file is kept while a reader that has left seems to read it."""

    def is_gone() -> bool:
        server.run(f"PURGE BINARY LOGS TO '{file}'")
        return str(server.run("SHOW BINARY LOGS")[0][0]) == file

    wait_until(is_gone)
