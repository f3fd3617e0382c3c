"""Chunks of a table, and how their rows and the changes around them become one: the rows lie under the changes. Pure.

A chunk is one SELECT in one snapshot of the database. It is given on in an epoch whose log reaches the place that was
read after the SELECT, before the log of that epoch. So all that the snapshot sees is in the log of this epoch or of one
before. What epochs before gave on and the snapshot does not surely see, the window, is newer than the chunk: a row that
was inserted or deleted there does not count, and of an updated row only the values that no update of the window has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.sources.cdc.log import Changes, ChunkRows, Op, TableSchema
from firnline.types import Json

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SnapshotBegin:
    """The begin of a snapshot of a table, as ledger entries and splits name it."""

    table: str
    snapshot: str  # the id: others of the same table have other ids
    estimate: int  # of the table's rows
    where: str = ""  # only rows for which this condition in SQL holds
    request: str = ""  # of the person who asked for it
    empties: bool = False  # sinks lose what they have of the table first
    # Of a table without a key, which is read whole in this epoch: what its snapshot sees, and where the log was then.
    sees: Json = None
    high: Json = None
    identity: str = ""  # of the table, as in `TableFacts`
    logged: str = ""  # of the table, as in `TableFacts`; empty: the server does not say

    @property
    def path(self) -> str:
        return f"{self.snapshot}.begin"

    def to_json(self) -> dict[str, Json]:
        begins = {"table": self.table, "snapshot": self.snapshot, "estimate": self.estimate, "where": self.where}
        more = {"request": self.request, "empties": self.empties, "sees": self.sees, "high": self.high}
        logged = {"logged": self.logged} if self.logged else {}
        return {"path": self.path, "begins": {**begins, **more, "identity": self.identity, **logged}}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> SnapshotBegin:
        begins = value["begins"]
        return cls(
            str(begins["table"]),
            str(begins["snapshot"]),
            int(begins["estimate"]),
            str(begins["where"]),
            str(begins["request"]),
            bool(begins["empties"]),
            begins["sees"],
            begins["high"],
            str(begins.get("identity", "")),
            str(begins.get("logged", "")),
        )


def sees_epoch(begins: Mapping[str, Json]) -> bool:
    """Return whether a snapshot has all rows of its table as they are after the epoch in which it begins."""
    return not begins["where"] and begins["sees"] is None


@dataclass(frozen=True, slots=True)
class SnapshotPassed:
    """The log has passed the snapshot of a table without a key: no change of it is left out any more."""

    table: str
    snapshot: str

    def to_json(self) -> dict[str, Json]:
        return {"path": f"{self.snapshot}.passed", "passed": {"table": self.table, "snapshot": self.snapshot}}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> SnapshotPassed:
        return cls(str(value["passed"]["table"]), str(value["passed"]["snapshot"]))


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """What every chunk that is still to be read sees: the window need not keep spool files that have nothing more."""

    sees: Json  # as in `Chunk`
    window: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        return {"path": f"{self.window[-1]}.seen", "trims": {"sees": self.sees, "window": list(self.window)}}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> WindowSeen:
        return cls(value["trims"]["sees"], tuple(value["trims"]["window"]))


@dataclass(frozen=True, slots=True)
class TableLeft:
    """The spec does not name a table any more: what was read of it is of no use if it is named again."""

    table: str

    def to_json(self) -> dict[str, Json]:
        return {"path": f"{self.table}.left", "left": {"table": self.table}}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> TableLeft:
        return cls(str(value["left"]["table"]))


@dataclass(frozen=True, slots=True)
class TableLogged:
    """What makes the log have the changes of a table from here on, as in `TableFacts`."""

    table: str
    logged: str
    reason: str = ""  # why changes before may be missing, and the table is not read again

    def to_json(self) -> dict[str, Json]:
        logged = {"table": self.table, "logged": self.logged, "reason": self.reason}
        return {"path": f"{self.table}.logged", "logged": logged}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> TableLogged:
        logged = value["logged"]
        return cls(str(logged["table"]), str(logged["logged"]), str(logged["reason"]))


@dataclass(frozen=True, slots=True)
class ChunkFile:
    """A chunk in its file, as ledger entries and splits name it."""

    name: str
    table: str
    snapshot: str
    number: int  # in its snapshot, from 1
    again: int  # how many chunks of the snapshot had to be read again before it
    key: tuple[str, ...]
    last: Json
    is_last: bool
    sees: Json
    high: Json
    rows: int
    size_bytes: int
    checksum: str
    window: tuple[str, ...] = ()  # spool files that epochs before gave on, in order
    order: Json = None  # as in `Chunk`

    def to_json(self) -> dict[str, Json]:
        chunk = {
            "table": self.table,
            "snapshot": self.snapshot,
            "number": self.number,
            "again": self.again,
            "key": list(self.key),
            "last": self.last,
            "is_last": self.is_last,
            "sees": self.sees,
            "high": self.high,
            "rows": self.rows,
            "window": list(self.window),
            "order": self.order,
        }
        return {"path": self.name, "size_bytes": self.size_bytes, "checksum": self.checksum, "chunk": chunk}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> ChunkFile:
        chunk = value["chunk"]
        return cls(
            str(value["path"]),
            str(chunk["table"]),
            str(chunk["snapshot"]),
            int(chunk["number"]),
            int(chunk["again"]),
            tuple(chunk["key"]),
            chunk["last"],
            bool(chunk["is_last"]),
            chunk["sees"],
            chunk["high"],
            int(chunk["rows"]),
            int(value["size_bytes"]),
            str(value["checksum"]),
            tuple(chunk["window"]),
            chunk.get("order"),
        )

    def under(self, window: Sequence[str]) -> ChunkFile:
        """Return the chunk with its window."""
        return replace(self, window=tuple(window))


def find_again(chunk: ChunkRows, window: Iterable[Changes]) -> str:
    """Return why a chunk must be read again; empty if it need not.

    `window` has changes of the chunk's table that its snapshot does not surely see.
    """
    shape = _shape(chunk.schema)
    for changes in window:
        if _shape(changes.schema) != shape:
            return "the table was changed meanwhile"
        if lost_values(changes):
            return "a row moved to another key meanwhile, and the log does not have all of its values"
    return ""


def _shape(schema: TableSchema) -> list[tuple[str, pa.DataType, bool]]:
    return [(column.name, column.type, column.is_key) for column in schema.columns]


def lost_values(changes: Changes) -> bool:
    """Return whether rows moved from another key without all of their values: the row with the old key has the rest.

    If that row was still to be read, no later chunk has it: the snapshot of the table begins again. An insert that
    lacks values is something else: its columns got their defaults, which no row of a chunk has either.
    """
    moved = changes.moved
    if moved is None:
        return False
    return any(mask is not None and bool((mask & moved).any()) for mask in changes.missing)


@dataclass(frozen=True, slots=True)
class Remaining:
    """What is left of a chunk."""

    kept: npt.NDArray[np.int64]  # of every row: its number in the chunk
    rows: pa.RecordBatch
    missing: Sequence[Flags | None]  # of every column: rows whose value a change of the window has; null here


def lay_under(
    chunk: pa.RecordBatch, key: Sequence[str], window: Sequence[Changes], sink_key: Collection[str] = ()
) -> Remaining:
    """Return the rows of a chunk under the changes of its window, which have the chunk's schema.

    The changes have the rows before them, as far as the log has them. What is left of a row has its key, and the
    columns of `sink_key`: an update that changes one of them is a delete and an insert.
    """
    count, names = chunk.num_rows, chunk.schema.names
    if not window:
        return Remaining(np.arange(count), chunk, [None] * len(names))
    alive = np.ones(count, np.bool_)
    covered = np.zeros((len(names), count), np.bool_)  # values that a change of the window has
    known = key_texts(chunk.to_struct_array(), key) if count else pa.array([], pa.binary())
    for changes in window:
        if not count:
            break
        if (changes.ops == Op.TRUNCATE).any():
            alive[:] = False
            continue
        texts = key_texts(changes.rows.to_struct_array(), key)
        places = _find(texts, known)
        has_row = places >= 0
        resets = np.isin(changes.ops, (Op.INSERT, Op.DELETE))
        moved = np.zeros(len(places), np.bool_)
        if changes.before is not None:
            old = key_texts(changes.before, key)
            moved = (changes.ops == Op.UPDATE) & _differ(old, texts)
            gone = np.where(moved, _find(old, known), -1)
            alive[gone[gone >= 0]] = False
        alive[places[has_row & (resets | moved)]] = False
        updates = has_row & (changes.ops == Op.UPDATE)
        for index, name in enumerate(names):
            lacks = changes.missing[changes.rows.schema.get_field_index(name)]
            covered[index, places[updates if lacks is None else updates & ~lacks]] = True
    values = [index for index, name in enumerate(names) if name not in key and name not in sink_key]
    if values:
        alive &= ~covered[values].all(axis=0)
    else:  # an update of a row that has a key alone leaves the row as it is
        covered[:] = False
    return _remaining(chunk, np.flatnonzero(alive), covered, values)


def _remaining(chunk: pa.RecordBatch, kept: npt.NDArray[np.int64], covered: Flags, values: Sequence[int]) -> Remaining:
    columns, missing = [], list[Flags | None]()
    for index in range(chunk.num_columns):
        array = chunk.column(index).take(pa.array(kept))
        gone = covered[index, kept]
        if index not in values or not gone.any():
            columns.append(array)
            missing.append(None)
            continue
        columns.append(pc.if_else(pa.array(gone), pa.scalar(None, array.type), array))
        missing.append(gone)
    return Remaining(kept, pa.RecordBatch.from_arrays(columns, schema=chunk.schema), missing)


def key_texts(rows: pa.StructArray, key: Sequence[str]) -> pa.Array:
    """Return the keys of rows as bytes that differ where the keys differ; null where a part of the key is."""
    parts = []
    for name in key:
        values = rows.field(name)
        if not (pa.types.is_binary(values.type) or pa.types.is_string(values.type)):
            values = values.cast(pa.string())
        plain = values.cast(pa.binary())
        parts += [pc.binary_length(plain).cast(pa.string()).cast(pa.binary()), plain]
    return pc.binary_join_element_wise(*parts, pa.scalar(b":", pa.binary()))


def _find(texts: pa.Array, known: pa.Array) -> npt.NDArray[np.int64]:
    """Return for every text where it is among the known ones; -1 if it is not."""
    found = pc.index_in(texts, known, skip_nulls=True)
    places: npt.NDArray[np.int64] = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
    return places


def _differ(one: pa.Array, other: pa.Array) -> Flags:
    flags: Flags = pc.fill_null(pc.not_equal(one, other), False).to_numpy(zero_copy_only=False)
    return flags
