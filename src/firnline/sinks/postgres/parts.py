"""The tables of an epoch: one, or those that the rows name by a template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.sinks.follower import EpochRows
from firnline.sinks.postgres.options import NAME_BYTES
from firnline.sinks.templates import NameTemplate, Share, too_many_parts

GATHERED_BYTES = 64 * 1024 * 1024  # of an epoch's files in the outbox: rows of a larger one are read once per table


def refuse_name(name: str) -> str:
    """Return why `schema.table` cannot be a table of a sink with a template; empty if it can."""
    pieces = name.split(".")
    if len(pieces) != 2 or not all(pieces):
        return f"table {name!r}: a dot separates schema and table, and cannot be part of their names"
    if any(len(piece.encode()) > NAME_BYTES for piece in pieces):
        return f"table {name!r} has a name of more than {NAME_BYTES} bytes"
    if pieces[0] in ("firnline", "information_schema") or pieces[0].startswith("pg_"):
        return f"table {name!r} is in a schema of the system"
    return ""


@dataclass(slots=True)
class EpochTables:
    """The rows of an epoch, by table."""

    epoch: EpochRows
    names: list[str]
    template: NameTemplate | None = None
    most: int = 0
    upserts: bool = False
    gathered: dict[str, list[tuple[pa.RecordBatch, pa.Array]]] | None = None
    bad: dict[int, str] = field(default_factory=dict)  # rows that name no table, by number

    def rows_of(self, name: str) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Yield the rows of one table, with their numbers."""
        if self.gathered is not None:
            yield from self.gathered[name]
            return
        for rows in self.epoch.read():
            if self.template is None:
                yield rows.batch, rows.numbers
                continue
            for batch, numbers, is_for_all in self.template.cut(rows.batch, rows.numbers, upserts=self.upserts):
                if is_for_all:
                    yield batch, numbers
                    continue
                shares, _ = self.template.split(batch, numbers, self.most)
                yield from ((share.batch, share.numbers) for share in shares if share.name == name)


def split_rows(
    epoch: EpochRows, template: NameTemplate, most: int, known: Iterable[str], *, upserts: bool
) -> EpochTables:
    """Find the tables that the rows of an epoch name; a change row that concerns all of them goes to each `known` one.

    Raises:
        SinkError: they name more than `most`.
    """
    fits = sum(int(file["size_bytes"]) for file in epoch.files) <= GATHERED_BYTES
    found: dict[str, list[tuple[pa.RecordBatch, pa.Array]]] = {}
    tables = EpochTables(epoch, [], template, most, upserts, found if fits else None)
    for rows in epoch.read():
        if not rows.batch.num_rows:
            continue
        for batch, numbers, is_for_all in template.cut(rows.batch, rows.numbers, upserts=upserts):
            shares = [Share(name, batch, numbers) for name in {*known, *found}] if is_for_all else []
            if not is_for_all:
                shares, bad = template.split(batch, numbers, most)
                tables.bad |= bad
            for share in shares:
                found.setdefault(share.name, []).extend([(share.batch, share.numbers)] if fits else [])
        if len(found) > most:
            raise too_many_parts(len(found), most)
    tables.names = sorted(found)
    return tables
