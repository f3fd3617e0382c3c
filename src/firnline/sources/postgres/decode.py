"""Decodes frames of `pgoutput` into change rows: one compiled walk, then one conversion per column."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.errors import DamagedError
from firnline.sources.cdc.log import (
    Changes,
    Column,
    Decoded,
    LogDecoder,
    Op,
    TableSchema,
    Transaction,
    pack_frame,
    unpack_frames,
)
from firnline.sources.postgres import kernel as k
from firnline.sources.postgres import messages as m
from firnline.sources.postgres.types import convert, native_type

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

_OPS = {m.INSERT: Op.INSERT, m.UPDATE: Op.UPDATE, m.DELETE: Op.DELETE}
_SMALLEST_ROW = 4 + 1 + 4 + 1 + 2  # bytes of the smallest frame of a row
_SMALLEST_OTHER = 4 + 1


@dataclass(frozen=True, slots=True)
class _Table:
    """A table under one description of the stream."""

    relation: m.Relation
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class _Values:
    """Decoded tuples."""

    rows: pa.RecordBatch
    missing: list[Flags | None]
    odd: dict[str, dict[int, str]]


class PostgresDecoder(LogDecoder):
    """Decodes the frames of one spool file. `before`: also the old rows, as far as the log has them."""

    def __init__(self, *, before: bool = False) -> None:
        self._before = before

    def decode(self, context: bytes, frames: bytes) -> Decoded:
        return _Pass(frames, before=self._before).run(context)


class _Pass:
    """One pass over a spool file."""

    def __init__(self, frames: bytes, *, before: bool) -> None:
        self._data: Bytes = np.frombuffer(frames, np.uint8)
        self._before = before
        self._tables: dict[int, _Table] = {}
        self._types: dict[int, str] = {}
        self._transactions: list[Transaction] = []
        self._warnings: dict[str, None] = {}

    def run(self, context: bytes) -> Decoded:
        began = self._take_context(context)
        rows, others = self._walk()
        changes: list[tuple[int, Changes]] = []
        order = 0  # change rows so far
        segment = 0  # the first row of the walk that is not decoded yet
        shift = 1 if began else 0  # the transaction of the context comes before those of the frames

        def decode_up_to(end: int) -> None:
            nonlocal segment, order
            if end > segment:
                made, count = self._decode_rows(rows[segment:end], order, shift)
                changes.extend(made)
                order += count
            segment = end

        for start, stop, row in others.tolist():
            message = self._data[start:stop].tobytes()
            if message[0] == m.RELATION:
                known = self._tables.get(int.from_bytes(message[1:5], "big"))
                relation = m.Relation.parse(message)
                if known is None or known.relation != relation:
                    decode_up_to(row)
                    self._set_table(relation)
            elif message[0] == m.TYPE:
                self._note_type(message)
            elif message[0] == m.TRUNCATE:
                decode_up_to(row)
                for number in m.Truncate.parse(message).relations:
                    if number in self._tables:
                        changes.append((order, self._truncate(self._tables[number].schema, order)))
                        order += 1
            elif message[0] == m.BEGIN:
                self._begin(message)
            else:
                m.Commit.parse(message)
        decode_up_to(len(rows))
        changes.sort(key=lambda item: item[0])
        return Decoded([one for _, one in changes], self._transactions, order, tuple(self._warnings))

    # -- context --------------------------------------------------------------------------------------

    def _take_context(self, context: bytes) -> bool:
        """Take what was in force before the first frame; returns whether a transaction goes on."""
        began = False
        try:
            for view in unpack_frames(context):
                message = bytes(view)
                if message[:1] == b"R":
                    self._set_table(m.Relation.parse(message))
                elif message[:1] == b"Y":
                    self._note_type(message)
                elif message[:1] == b"B":
                    self._begin(message)
                    began = True
                else:
                    raise DamagedError(f"the context of a spool file has a message of kind {message[:1]!r}")
        except ValueError as error:
            raise DamagedError(f"the context of a spool file cannot be read: {error}") from error
        return began

    def _begin(self, message: bytes) -> None:
        begin = m.Begin.parse(message)
        self._transactions.append(Transaction(str(begin.xid), begin.committed_at, m.format_lsn(begin.commit_lsn)))

    def _note_type(self, message: bytes) -> None:
        parts = message[5:].split(b"\0")
        if len(message) < 7 or len(parts) != 3 or parts[2]:
            raise DamagedError("a type message cannot be read")
        try:
            schema, name = parts[0].decode(), parts[1].decode()
        except UnicodeDecodeError as error:
            raise DamagedError(f"a type message cannot be read: {error}") from error
        self._types[int.from_bytes(message[1:5], "big")] = f"{schema}.{name}" if schema else name

    def _set_table(self, relation: m.Relation) -> None:
        columns = []
        for column in relation.columns:
            native = native_type(column.oid, column.modifier, self._types)
            if not native.is_known:
                self._warnings[f"{relation.table}.{column.name}: {native.name} is read as text"] = None
            # With identity `full`, all columns are marked, and the log does not say which identify a row.
            is_key = column.is_key and relation.identity != "f"
            columns.append(Column(column.name, native.arrow, native.name, is_key))
        self._tables[relation.id] = _Table(relation, TableSchema(relation.table, tuple(columns)))

    # -- rows -----------------------------------------------------------------------------------------

    def _walk(self) -> tuple[Numbers, Numbers]:
        size = len(self._data)
        rows: Numbers = np.empty((size // _SMALLEST_ROW + 1, k.ROW_COLUMNS), np.int64)
        others: Numbers = np.empty((size // _SMALLEST_OTHER + 1, 3), np.int64)
        status, count, other_count, at = k.find_rows(self._data, rows, others)
        if status < 0:
            raise DamagedError(f"frame at byte {at} cannot be read")
        return rows[:count], others[:other_count]

    def _decode_rows(self, rows: Numbers, order: int, shift: int) -> tuple[list[tuple[int, Changes]], int]:
        """Decode rows under the tables in force; returns their changes, each with its first place, and their number.

        An update that changes the key counts as two.
        """
        moved = self._find_moved(rows)
        places: Numbers = np.arange(len(rows), dtype=np.int64) + np.concatenate(([0], np.cumsum(moved)[:-1])) + order
        made: list[tuple[int, Changes]] = []
        for number in np.unique(rows[:, k.RELATION]).tolist():
            chosen = np.flatnonzero(rows[:, k.RELATION] == number)
            changes = self._decode_table(self._table(number), rows[chosen], moved[chosen], places[chosen], shift)
            made.append((int(places[chosen[0]]), changes))
        return made, len(rows) + int(moved.sum())

    def _find_moved(self, rows: Numbers) -> Flags:
        """Find updates that change the key: their message has the old key."""
        moved: Flags = (rows[:, k.KIND] == m.UPDATE) & (rows[:, k.OLD_KIND] == ord("K"))
        return moved

    def _table(self, number: int) -> _Table:
        if number not in self._tables:
            raise DamagedError(f"a row belongs to table {number}, which the spool file does not describe")
        return self._tables[number]

    def _decode_table(self, table: _Table, rows: Numbers, moved: Flags, places: Numbers, shift: int) -> Changes:
        count = len(rows) + int(moved.sum())
        if moved.any():  # the delete of the old key stands before the insert of the new one
            index = np.repeat(np.arange(len(rows)), 1 + moved)
            is_delete = np.concatenate(([False], index[1:] == index[:-1]))
            is_delete = np.roll(is_delete, -1)  # the first of two
            rows, places = rows[index], places[index] + (~is_delete & moved[index])
            ops = _ops(rows[:, k.KIND])
            ops[moved[index]] = Op.INSERT
            ops[is_delete] = Op.DELETE
        else:
            is_delete = np.zeros(len(rows), np.bool_)
            ops = _ops(rows[:, k.KIND])
        is_delete |= ops == Op.DELETE
        starts = np.where(is_delete, rows[:, k.OLD], rows[:, k.NEW])
        has_old, has_key = rows[:, k.OLD_KIND] == ord("O"), rows[:, k.OLD_KIND] == ord("K")
        old = np.where(has_old & ~is_delete, rows[:, k.OLD], 0) if (has_old & ~is_delete).any() else None
        values = self._values(table.schema, starts, only_key=is_delete & has_key, instead=old)
        before = None
        if self._before:
            old_rows = self._values(table.schema, rows[:, k.OLD], only_key=has_key).rows
            fields, nothing = list(old_rows.schema), pa.array(rows[:, k.OLD] == 0)
            before = pa.StructArray.from_arrays(old_rows.columns, fields=fields, mask=nothing)
        transaction = (rows[:, k.TRANSACTION] + shift).astype(np.int32)
        if len(transaction) and transaction.min() < 0:
            raise DamagedError("a row stands outside of a transaction")
        assert len(ops) == count
        return Changes(table.schema, ops, values.rows, values.missing, places, transaction, before, values.odd)

    def _truncate(self, schema: TableSchema, order: int) -> Changes:
        values = [pa.nulls(1, column.type) for column in schema.columns]
        fields = [pa.field(column.name, column.type) for column in schema.columns]
        batch = pa.RecordBatch.from_arrays(values, schema=pa.schema(fields))
        transaction = np.array([len(self._transactions) - 1], np.int32)
        return Changes(
            schema,
            np.array([Op.TRUNCATE], np.uint8),
            batch,
            [None] * len(schema.columns),
            np.array([order], np.int64),
            transaction,
        )

    # -- values ---------------------------------------------------------------------------------------

    def _values(
        self, schema: TableSchema, starts: Numbers, *, only_key: Flags, instead: Numbers | None = None
    ) -> _Values:
        """Decode tuples. `only_key`: tuples that have values of the key alone, and nulls elsewhere; `instead`: tuples
        with the values that are unchanged."""
        offsets, lengths = self._find_values(schema, starts)
        if instead is not None:
            old_offsets, old_lengths = self._find_values(schema, instead)
            unchanged = lengths == k.UNCHANGED
            offsets, lengths = np.where(unchanged, old_offsets, offsets), np.where(unchanged, old_lengths, lengths)
        found = _Values(pa.RecordBatch.from_arrays([], names=[]), [], {})
        arrays: list[pa.Array] = []
        for index, column in enumerate(schema.columns):
            absent = lengths[index] == k.UNCHANGED
            if not column.is_key and only_key.any():
                absent |= only_key
            found.missing.append(absent if absent.any() else None)
            converted = convert(self._gather(offsets[index], lengths[index]), column.type)
            arrays.append(converted.values)
            if converted.odd:
                found.odd[column.name] = converted.odd
        fields = [pa.field(column.name, column.type) for column in schema.columns]
        return replace(found, rows=pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))

    def _find_values(self, schema: TableSchema, starts: Numbers) -> tuple[Numbers, Numbers]:
        columns = len(schema.columns)
        if not columns:
            raise DamagedError(f"{schema.table} has no columns")
        offsets: Numbers = np.empty((columns, len(starts)), np.int64)
        lengths: Numbers = np.empty((columns, len(starts)), np.int64)
        if k.find_values(self._data, starts, columns, offsets, lengths) < 0:
            raise DamagedError(f"a row of {schema.table} has another number of columns than the table")
        return offsets, lengths

    def _gather(self, offsets: Numbers, lengths: Numbers) -> Any:
        count = len(lengths)
        ends: npt.NDArray[np.int32] = np.empty(count + 1, np.int32)
        absent = k.measure(lengths, ends)
        text: Bytes = np.empty(max(1, int(ends[-1])), np.uint8)
        valid: Bytes = np.zeros((count + 7) // 8 or 1, np.uint8)
        k.gather(self._data, offsets, lengths, ends, text, valid)
        buffers = [pa.py_buffer(valid) if absent else None, pa.py_buffer(ends), pa.py_buffer(text)]
        return pa.Array.from_buffers(pa.string(), count, buffers, null_count=int(absent))


def _ops(kinds: Numbers) -> npt.NDArray[np.uint8]:
    ops: npt.NDArray[np.uint8] = np.zeros(len(kinds), np.uint8)
    for kind, op in _OPS.items():
        ops[kinds == kind] = op
    return ops


def warm_up() -> None:
    """Compile everything, or load what is compiled."""
    bytea = 17
    begin = b"B" + bytes(20)
    relation = b"R" + (1).to_bytes(4, "big") + b"public\0t\0d\0\1\1c\0" + bytea.to_bytes(4, "big") + b"\xff\xff\xff\xff"
    row = b"I" + (1).to_bytes(4, "big") + b"N\0\1t" + (4).to_bytes(4, "big") + b"\\x0a"
    PostgresDecoder().decode(b"", b"".join(pack_frame(message) for message in (begin, relation, row)))
