"""Decodes frames of `pgoutput` into change rows: one compiled walk, then one conversion per column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import DamagedError
from firnline.sources.cdc.column_names import column_names
from firnline.sources.cdc.log import (
    Changes,
    ChunkRows,
    Column,
    Decoded,
    LogDecoder,
    Op,
    SinkKeys,
    TableSchema,
    Transaction,
    lacks_key,
    other_key,
    pack_frame,
    unpack_frames,
)
from firnline.sources.postgres import kernel as k
from firnline.sources.postgres import messages as m
from firnline.sources.postgres import stream_kernel
from firnline.sources.postgres.position import LogPlace
from firnline.sources.postgres.types import convert, native_type
from firnline.sources.postgres.visibility import Snapshot
from firnline.types import Json

Numbers = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]

_OPS = {m.INSERT: Op.INSERT, m.UPDATE: Op.UPDATE, m.DELETE: Op.DELETE}
_SMALLEST_ROW = 4 + 1 + 4 + 1 + 2  # bytes of the smallest frame of a row
_SMALLEST_OTHER = 4 + 1
_MOST_BYTES = (1 << 31) - 1  # that the offsets of an Arrow array can count


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
    """Decodes the frames of one spool file. `before`: also the old rows, as far as the log has them. `keys`: by table,
    the columns by which sinks upsert its rows."""

    def __init__(self, *, before: bool = False, keys: SinkKeys | None = None) -> None:
        self._before = before
        self._keys = keys or {}

    def decode(self, context: bytes, frames: bytes | memoryview) -> Decoded:
        return _Pass(frames, before=self._before, keys=self._keys).run(context)

    def decode_chunk(self, context: bytes, content: bytes | memoryview) -> ChunkRows:
        return _Pass(content, before=False, keys={}).copied(context)

    def sees(self, snapshot: Json, transactions: Sequence[Transaction]) -> Flags:
        return Snapshot.parse(str(snapshot)).sees([int(one.id) for one in transactions])

    def place_of_chunk(self, high: Json) -> Transaction:
        return Transaction("", 0, m.format_lsn(LogPlace.from_json(high).lsn))


class _Pass:
    """One pass over a spool file."""

    def __init__(self, frames: bytes | memoryview, *, before: bool, keys: SinkKeys) -> None:
        self._data: Bytes = np.frombuffer(frames, np.uint8)
        self._more: Bytes = np.empty(0, np.uint8)  # values that had escapes; offsets count on behind `_data`
        self._before = before
        self._keys = keys
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
                made, count = self._decode_rows(rows[:, segment:end], order, shift)
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
        decode_up_to(rows.shape[1])
        changes.sort(key=lambda item: item[0])
        return Decoded([one for _, one in changes], self._transactions, order, tuple(self._warnings))

    def copied(self, context: bytes) -> ChunkRows:
        """Decode rows that COPY gave, of the one table that the context describes."""
        self._take_context(context)
        if len(self._tables) != 1:
            raise DamagedError("a chunk does not say of which table it is")
        (table,) = self._tables.values()
        columns = len(table.schema.columns)
        rows = int(k.count_lines(self._data))  # those in values are escaped
        offsets: Numbers = np.empty((columns, rows), np.int64)
        lengths: Numbers = np.empty((columns, rows), np.int64)
        self._more = np.empty(len(self._data), np.uint8)
        if not columns or k.find_copied(self._data, columns, self._more, offsets, lengths) != rows:
            raise DamagedError(f"a chunk of {table.schema.table} cannot be read")
        values = self._values(table.schema, (offsets, lengths), None)
        return ChunkRows(table.schema, values.rows, values.odd, tuple(self._warnings))

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
        names = column_names([column.name for column in relation.columns])
        for column, name in zip(relation.columns, names, strict=True):
            if name != column.name:
                self._warnings[f"{relation.table}.{column.name}: the column is named {name} here"] = None
            native = native_type(column.oid, column.modifier, self._types)
            if not native.is_known:
                self._warnings[f"{relation.table}.{column.name}: {native.name} is read as text"] = None
            # With identity `full`, all columns are marked: those of the primary key identify a row.
            is_key = column.is_primary if relation.identity == "f" else column.is_key
            columns.append(Column(name, native.arrow, native.name, is_key, column.number))
        self._tables[relation.id] = _Table(relation, TableSchema(relation.table, tuple(columns)))

    # -- rows -----------------------------------------------------------------------------------------

    def _walk(self) -> tuple[Numbers, Numbers]:
        size = len(self._data)
        rows: Numbers = np.empty((k.ROW_LINES, size // _SMALLEST_ROW + 1), np.int64)
        others: Numbers = np.empty((size // _SMALLEST_OTHER + 1, 3), np.int64)
        status, count, other_count, at = k.find_rows(self._data, rows, others)
        if status < 0:
            raise DamagedError(f"frame at byte {at} cannot be read")
        return rows[:, :count], others[:other_count]

    def _decode_rows(self, rows: Numbers, order: int, shift: int) -> tuple[list[tuple[int, Changes]], int]:
        """Decode rows under the tables in force; returns their changes, each with its first place, and their number.

        An update that changes the key counts as two.
        """
        moved: Flags = (rows[k.KIND] == m.UPDATE) & (rows[k.OLD_KIND] == ord("K"))  # it has the old key: that changed
        whole: Flags = (rows[k.KIND] == m.UPDATE) & (rows[k.OLD_KIND] == ord("O"))  # it has the old row
        for number in np.unique(rows[k.RELATION, whole]).tolist() if whole.any() else ():
            table, chosen = self._table(number), np.flatnonzero(whole & (rows[k.RELATION] == number))
            moved[chosen] = self._find_moved(table.schema, _pick(rows, chosen))
        many = len(moved) + int(np.count_nonzero(moved))
        places: Numbers = np.arange(order, order + len(moved), dtype=np.int64)
        if many > len(moved):
            places[1:] += np.cumsum(moved[:-1])
        relations = rows[k.RELATION]
        if (relations == relations[0]).all():
            return [(order, self._decode_table(self._table(int(relations[0])), rows, moved, places, shift))], many
        made: list[tuple[int, Changes]] = []
        for number in np.unique(relations).tolist():
            chosen = np.flatnonzero(relations == number)
            changes = self._decode_table(self._table(number), _pick(rows, chosen), moved[chosen], places[chosen], shift)
            made.append((int(places[chosen[0]]), changes))
        return made, many

    def _find_moved(self, schema: TableSchema, rows: Numbers) -> Flags:
        """Return which updates with a whole old row change the key. A row whose key had a null is in no sink."""
        moved: Flags = np.zeros(rows.shape[1], np.bool_)
        others = other_key(schema, self._keys)
        keys = [index for index, column in enumerate(schema.columns) if column.is_key or column.name in others]
        if not keys:
            return moved
        old = self._find_values(schema, rows[k.OLD], rows[k.END], is_whole=False)
        new = self._find_values(schema, rows[k.NEW], rows[k.END], is_whole=True)
        for index in keys:
            before, after = (self._gather(found[0][index], found[1][index]) for found in (old, new))
            differs = pc.fill_null(pc.not_equal(before, after), True).to_numpy(zero_copy_only=False)
            moved |= differs & (old[1][index] >= 0) & (new[1][index] != k.UNCHANGED)
        return moved

    def _table(self, number: int) -> _Table:
        if number not in self._tables:
            raise DamagedError(f"a row belongs to table {number}, which the spool file does not describe")
        return self._tables[number]

    def _decode_table(self, table: _Table, rows: Numbers, moved: Flags, places: Numbers, shift: int) -> Changes:
        has_old = table.relation.identity == "f" or not other_key(table.schema, self._keys)
        if not has_old and (rows[k.KIND] != m.INSERT).any():
            way_out = f"log whole rows: ALTER TABLE {table.schema.table} REPLICA IDENTITY FULL, and of every partition"
            raise lacks_key(table.schema, self._keys, way_out)
        inserted: Flags | None = None
        if moved.any():  # the delete of the old key stands before the insert of the new one
            index = np.repeat(np.arange(len(moved)), 1 + moved)
            is_delete = np.append(index[1:] == index[:-1], False)  # the first of two
            rows, places = _pick(rows, index), places[index] + (~is_delete & moved[index])
            ops = _ops(rows[k.KIND])
            ops[moved[index]] = Op.INSERT
            ops[is_delete] = Op.DELETE
            inserted = moved[index] & ~is_delete
        else:
            ops = _ops(rows[k.KIND])
        transaction = rows[k.TRANSACTION].astype(np.int32) + np.int32(shift)
        if transaction.min() < 0:
            raise DamagedError("a row stands outside of a transaction")
        values = self._new_values(table, rows, ops == Op.DELETE)
        before = self._old_values(table.schema, rows) if self._before else None
        return Changes(
            table.schema, ops, values.rows, values.missing, places, transaction, before, values.odd, inserted
        )

    def _new_values(self, table: _Table, rows: Numbers, is_delete: Flags) -> _Values:
        """Decode what rows hold after the change; of a delete, what the log has of the row.

        An old row of a partition may have the key alone though the log calls it whole: its nulls say nothing.
        """
        schema = table.schema
        news, ends, olds = rows[k.NEW], rows[k.END], rows[k.OLD]
        if not olds.any():
            return self._values(schema, self._find_values(schema, news, ends, is_whole=True), None)
        # The new tuple of an update is checked even where the old one is wanted: the delete of a key that changed.
        found = self._find_values(schema, news, ends, is_whole=True)
        old = self._find_values(schema, olds, ends, is_whole=False)
        whole_old = (rows[k.OLD_KIND] == ord("O")) & ~is_delete
        chosen = is_delete | ((found[1] == k.UNCHANGED) & whole_old & (old[1] >= 0))
        offsets, lengths = np.where(chosen, old[0], found[0]), np.where(chosen, old[1], found[1])
        if table.relation.identity != "f":
            lengths[is_delete & (rows[k.OLD_KIND] == ord("O")) & (lengths < 0)] = k.UNCHANGED
        return self._values(schema, (offsets, lengths), is_delete & (rows[k.OLD_KIND] == ord("K")))

    def _old_values(self, schema: TableSchema, rows: Numbers) -> pa.StructArray:
        """Decode what rows held before the change, as far as the log has it."""
        found = self._find_values(schema, rows[k.OLD], rows[k.END], is_whole=False)
        values = self._values(schema, found, rows[k.OLD_KIND] == ord("K")).rows
        return pa.StructArray.from_arrays(values.columns, fields=list(values.schema), mask=pa.array(rows[k.OLD] == 0))

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

    def _values(self, schema: TableSchema, found: tuple[Numbers, Numbers], only_key: Flags | None) -> _Values:
        """Decode the values of tuples. `only_key`: tuples that have values of the key alone, and nulls elsewhere."""
        offsets, lengths = found
        made = _Values(pa.RecordBatch.from_arrays([], names=[]), [], {})
        arrays: list[pa.Array] = []
        for index, column in enumerate(schema.columns):
            texts = self._gather(offsets[index], lengths[index])
            absent: Flags | None = None
            if texts.null_count:
                absent = lengths[index] == k.UNCHANGED
            if only_key is not None and not column.is_key:
                absent = only_key if absent is None else absent | only_key
            made.missing.append(absent if absent is not None and absent.any() else None)
            converted = convert(texts, column.type)
            arrays.append(converted.values)
            if converted.odd:
                made.odd[column.name] = converted.odd
        fields = [pa.field(column.name, column.type) for column in schema.columns]
        return replace(made, rows=pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))

    def _find_values(
        self, schema: TableSchema, starts: Numbers, ends: Numbers, *, is_whole: bool
    ) -> tuple[Numbers, Numbers]:
        """Return where the values of tuples lie, and how long they are."""
        columns = len(schema.columns)
        if not columns:
            raise DamagedError(f"{schema.table} has no columns")
        offsets: Numbers = np.empty((columns, len(starts)), np.int64)
        lengths: Numbers = np.empty((columns, len(starts)), np.int64)
        status = k.find_values(self._data, starts, ends, columns, is_whole, offsets, lengths)
        if status == k.BAD_COLUMNS:
            raise DamagedError(f"a row of {schema.table} has another number of columns than the table")
        if status < 0:
            raise DamagedError(f"a row of {schema.table} cannot be read")
        return offsets, lengths

    def _gather(self, offsets: Numbers, lengths: Numbers) -> Any:
        count = len(lengths)
        ends: npt.NDArray[np.int32] = np.empty(count + 1, np.int32)
        size, absent = k.measure(lengths, ends)
        if size > _MOST_BYTES:
            raise DamagedError(f"the values of a column have {size} bytes, more than Arrow can hold in one array")
        text: Bytes = np.empty(size + k.SLACK, np.uint8)
        k.gather(self._data, self._more, offsets, lengths, ends, text)
        valid = pa.py_buffer(np.packbits(lengths >= 0, bitorder="little")) if absent else None
        buffers = [valid, pa.py_buffer(ends), pa.py_buffer(text).slice(0, size)]
        return pa.Array.from_buffers(pa.string(), count, buffers, null_count=absent)


def _pick(rows: Numbers, index: Numbers) -> Numbers:
    """Return rows of the table of rows, its lines contiguous again, as compiled functions want them."""
    picked: Numbers = np.take(rows, index, axis=1)
    return picked


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
    PostgresDecoder().decode_chunk(pack_frame(relation), b"\\\\x0a\n")
    stream_kernel.warm_up()
