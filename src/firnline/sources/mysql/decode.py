"""Decodes events of the binary log into Arrow; see `kernel` for the compiled part.

Frames are looked at one by one, rows are not: a frame of rows is only noted under its table. At the end `kernel.walk`
finds the values of all rows of a table, and each column is converted as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.sources.cdc.log import (
    Changes,
    ChunkRows,
    Ddl,
    Decoded,
    LogDecoder,
    Op,
    SinkKeys,
    TableSchema,
    Transaction,
    lacks_key,
    other_key,
)
from firnline.sources.mysql import chunk, kernel, stream_kernel
from firnline.sources.mysql import events as ev
from firnline.sources.mysql.convert import ColumnValues, convert
from firnline.sources.mysql.events import Header, damaged, read_length
from firnline.sources.mysql.statements import Kind, Statement, classify
from firnline.sources.mysql.tables import Table, read_table
from firnline.types import Json

MAX_BATCH_BYTES = 1 << 28  # of the events of one batch; so no column has more bytes than Arrow's offsets can count
KEPT_TABLES = 256  # descriptions of tables that a process keeps

_tables: dict[tuple[bytes, bool], Table] = {}
_KINDS = {
    **dict.fromkeys(ev.WRITES, kernel.INSERT), **dict.fromkeys(ev.UPDATES, kernel.UPDATE),
    **dict.fromkeys(ev.DELETES, kernel.DELETE),
}  # fmt: skip


@dataclass(slots=True)
class _Batch:
    """Events of one table under one schema."""

    table: Table
    events: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # see `kernel.START`
    transactions: list[int] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)  # of every event: its number among all
    bytes: int = 0


@dataclass(slots=True)
class _Frames:
    """What is known while frames are looked at."""

    is_mariadb: bool = False
    file: str = ""
    high: int = 0  # the part of a position that 32 bits of a header cannot hold
    begin: tuple[Header, memoryview] | None = None  # the GTID event of the open transaction
    transaction: int = -1  # its index, once it has a row
    maps: dict[int, Table] = field(default_factory=dict)
    transactions: list[Transaction] = field(default_factory=list)
    batches: list[_Batch] = field(default_factory=list)
    open: dict[str, _Batch] = field(default_factory=dict)  # by table
    emptied: list[tuple[str, int, int]] = field(default_factory=list)  # table, transaction, number of the event
    ddl: list[tuple[Statement, str, int, int]] = field(default_factory=list)
    count: int = 0  # events with changes


class MySqlDecoder(LogDecoder):
    """Decodes what `MySqlStream` gives, of MySQL and of MariaDB.

    Args:
        with_before: Also give the row before the change.
        keys: By table, the columns by which sinks upsert its rows.
    """

    def __init__(self, *, with_before: bool = False, keys: SinkKeys | None = None) -> None:
        self._with_before = with_before
        self._keys = keys or {}

    def decode(self, context: bytes, frames: bytes | memoryview) -> Decoded:
        state = _Frames()
        warnings: dict[str, None] = {}
        for at, header, body in _events(context):
            if header.type in ev.ROWS or header.type == ev.QUERY:
                raise damaged("the context of frames holds rows or statements")
            self._note(state, at, header, body)
        for at, header, body in _events(frames):
            self._note(state, at, header, body)
        data = np.frombuffer(frames, np.uint8)
        data.flags.writeable = False  # whatever the frames lie in: the compiled functions are made for this
        found = [self._rows(data, batch, lambda text: warnings.setdefault(text)) for batch in state.batches]
        # Every event with changes has its number; so every change has one, whatever its table.
        counts = np.zeros(state.count + 1, np.int64)
        for batch, rows in zip(state.batches, found, strict=True):
            counts[np.array(batch.sequence) + 1] = rows.per_event
        for _, _, number in state.emptied:
            counts[number + 1] = 1
        starts = np.cumsum(counts)
        changes = []
        for batch, rows in zip(state.batches, found, strict=True):
            if len(rows.ops):
                order = _orders(batch, rows, starts)
                changes.append(
                    Changes(
                        batch.table.schema,
                        rows.ops,
                        rows.rows,
                        rows.missing,
                        order,
                        rows.transaction,
                        _before(rows),
                        rows.odd,
                        rows.moved,
                    )
                )
        for table, index, number in state.emptied:
            changes.append(_emptied(state, table, index, int(starts[number]), self._with_before))
        changes.sort(key=lambda one: int(one.order[0]))
        ddl = [
            Ddl(statement.tables, text, index, int(starts[number]), dict(statement.effects))
            for statement, text, index, number in state.ddl
        ]
        return Decoded(changes, state.transactions, int(starts[-1]), tuple(warnings), ddl)

    def decode_chunk(self, context: bytes, content: bytes | memoryview) -> ChunkRows:
        return chunk.decode_chunk(context, content)

    def sees(self, snapshot: Json, transactions: Sequence[Transaction]) -> npt.NDArray[np.bool_]:
        return chunk.sees(snapshot, transactions)

    def place_of_chunk(self, high: Json) -> Transaction:
        return Transaction("", 0, f"{high['file']}:{high['pos']}")

    def _note(self, state: _Frames, at: int, header: Header, body: memoryview) -> None:
        kind = header.type
        if kind in _KINDS:
            self._note_rows(state, at, header, body)
        elif kind == ev.TABLE_MAP:
            state.maps[int.from_bytes(body[:6], "little")] = _table(body, state.is_mariadb)
        elif kind in ev.GTIDS:
            state.begin, state.transaction = (header, body), -1
        elif kind == ev.XID:
            state.begin, state.transaction = None, -1
            state.maps.clear()
        elif kind == ev.QUERY:
            self._note_statement(state, header, body)
        elif kind == ev.ROTATE:
            state.file, place = ev.read_rotate(body)
            state.high = place >> 32 << 32
        elif kind == ev.FORMAT_DESCRIPTION:
            state.is_mariadb = b"MariaDB" in bytes(body[2:52])
        else:
            raise damaged(f"a frame has the type {kind}, which the stream does not pass on")

    def _note_statement(self, state: _Frames, header: Header, body: memoryview) -> None:
        query = ev.read_query(body)
        statement = classify(query.statement, query.database, sql_mode=query.sql_mode, folds_names=query.folds_names)
        if statement.kind in (Kind.COMMIT, Kind.ROLLBACK):
            state.begin, state.transaction = None, -1
            state.maps.clear()
        elif statement.kind is Kind.TRUNCATE:
            state.open.clear()  # rows that follow stand behind it
            state.emptied.append((statement.tables[0], self._transaction(state), state.count))
            state.count += 1
        elif statement.kind is Kind.DDL:
            state.ddl.append((statement, query.statement, self._transaction(state), state.count))
            state.count += 1  # without changes: only its place counts

    def _note_rows(self, state: _Frames, at: int, header: Header, body: memoryview) -> None:
        """Note where the rows of an event lie; `at` is where its body begins."""
        table_id = int.from_bytes(body[:6], "little")
        is_second = header.type >= ev.WRITE
        if table_id == ev.DUMMY_TABLE:
            state.maps.clear()
            return
        table = state.maps.get(table_id)
        if table is None:
            raise damaged(f"rows of table id {table_id}, which no TABLE_MAP event describes")
        try:
            place = 8
            if is_second:
                place += int.from_bytes(body[8:10], "little")
                if place < 10:
                    raise ValueError("its header is cut off")
            columns, place = read_length(body, place)
            if columns != len(table.types):
                raise ValueError(f"{columns} columns instead of {len(table.types)}")
            width, kind = (columns + 7) >> 3, _KINDS[header.type]
            first = place
            second = first + width if kind == kernel.UPDATE else first
            start = second + width
            if start > len(body):
                raise ValueError("its columns are cut off")
        except ValueError as error:
            raise damaged(f"rows of {table.schema.table} cannot be read: {error}") from error
        batch = state.open.get(table.schema.table)
        if batch is None or batch.table is not table or batch.bytes > MAX_BATCH_BYTES:
            batch = state.open[table.schema.table] = _Batch(table)
            state.batches.append(batch)
        batch.events.append((at + start, at + len(body), kind, at + first, at + second))
        batch.transactions.append(self._transaction(state))
        batch.sequence.append(state.count)
        batch.bytes += len(body)
        state.count += 1
        if int.from_bytes(body[6:8], "little") & ev.STATEMENT_END:
            state.maps.clear()

    def _transaction(self, state: _Frames) -> int:
        """Return the index of the open transaction."""
        if state.transaction < 0:
            if state.begin is None:
                raise damaged("rows outside of a transaction")
            header, body = state.begin
            gtid = ev.read_gtid(header, body)
            place = header.log_pos
            if gtid.length:
                place = header.log_pos - header.size + gtid.length
            position = f"{state.file}:{state.high + place}"
            state.transactions.append(Transaction(gtid.id or position, gtid.committed_at, position))
            state.transaction = len(state.transactions) - 1
        return state.transaction

    def _rows(self, data: npt.NDArray[np.uint8], batch: _Batch, warn: Callable[[str], object]) -> _Rows:
        table = batch.table
        columns = len(table.types)
        events = np.array(batch.events, np.int64)
        fixed = (
            data, events, table.layout, self._find_key(data, events, table), np.zeros((4, columns), np.int64),
            np.zeros((2, columns), np.uint8),
        )  # fmt: skip
        count = kernel.walk(*fixed, *_room(columns, 0), *_room(columns, 0), *_owners(0), False, False)
        if count < 0:
            raise damaged(f"rows of {table.schema.table} do not end where their event does")
        after, before = _room(columns, count), _room(columns, count if self._with_before else 0)
        ops, owners = _owners(count)
        kernel.walk(*fixed, *after, *before, ops, owners, self._with_before, True)
        flags = [states == kernel.MISSING for states in after[2][: len(table.schema.columns)]]
        for text in table.warnings:
            warn(text)
        odd: dict[str, dict[int, str]] = {}
        return _Rows(
            ops=ops,
            rows=_convert(data, table, after, warn, odd),
            missing=[flag if flag.any() else None for flag in flags],
            transaction=np.array(batch.transactions, np.int32)[owners],
            owners=owners,
            per_event=np.bincount(owners, minlength=len(batch.events)),
            before=_convert(data, table, before, warn, {}) if self._with_before else None,
            odd=odd,
            moved=(ops == Op.INSERT) & (events[owners, kernel.KIND] == kernel.UPDATE),
        )

    def _find_key(
        self, data: npt.NDArray[np.uint8], events: npt.NDArray[np.int64], table: Table
    ) -> npt.NDArray[np.uint8]:
        """Return which columns identify a row, here or in a sink.

        Raises:
            SchemaError: an event does not have the old values of a column that identifies a row in a sink.
        """
        names = other_key(table.schema, self._keys)
        if not names:
            return table.is_key
        is_key = table.is_key.copy()
        bitmaps = events[events[:, kernel.KIND] != kernel.INSERT, kernel.BITMAP]  # of the rows before the changes
        for index, column in enumerate(table.schema.columns):
            if column.name in names:
                is_key[index] = 1
                if not ((data[bitmaps + index // 8] >> (index % 8)) & 1).all():
                    raise lacks_key(table.schema, self._keys, "log whole rows: SET GLOBAL binlog_row_image = 'FULL'")
        return is_key


@dataclass(frozen=True, slots=True)
class _Rows:
    """The changes of a batch."""

    ops: npt.NDArray[np.uint8]
    rows: pa.RecordBatch
    missing: list[npt.NDArray[np.bool_] | None]
    transaction: npt.NDArray[np.int32]
    owners: npt.NDArray[np.int32]  # of every change: its event in the batch
    per_event: npt.NDArray[np.int64]  # changes
    before: pa.RecordBatch | None
    odd: dict[str, dict[int, str]]
    moved: npt.NDArray[np.bool_]


_Room = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.uint8]]


def _room(columns: int, count: int) -> _Room:
    """Return room for the places, lengths and states of values."""
    shape = (columns, count)
    return np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.uint8)


def _owners(count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    return np.empty(count, np.uint8), np.empty(count, np.int32)


def _events(frames: bytes | memoryview) -> Iterator[tuple[int, Header, memoryview]]:
    """Yield the events of frames: where the body begins, the header, and the body without its checksum.

    Raises:
        DamagedError: a frame is not whole, or does not match its checksum.
    """
    view, at, end = memoryview(frames), 0, len(frames)
    least = ev.HEADER_SIZE + ev.CHECKSUM_SIZE
    while at < end:
        size = int.from_bytes(view[at : at + 4], "little")
        start, at = at + 4, at + 4 + size
        if at > end or size < least:
            raise damaged(f"the frame at byte {start - 4} is cut off")
        header = Header(*ev.HEADER.unpack_from(view, start))
        stop = at - ev.CHECKSUM_SIZE
        if header.size != size or ev.checksum(view[start:stop]) != int.from_bytes(view[stop:at], "little"):
            raise damaged(f"the frame at byte {start - 4} does not match its checksum")
        yield start + ev.HEADER_SIZE, header, view[start + ev.HEADER_SIZE : stop]


def _table(body: memoryview, is_mariadb: bool) -> Table:
    """Return the table that a TABLE_MAP event describes; the same one for the same description."""
    key = (bytes(body[8:]), is_mariadb)
    table = _tables.get(key)
    if table is None:
        if len(_tables) >= KEPT_TABLES:
            _tables.clear()
        table = _tables[key] = read_table(body, is_mariadb)
    return table


def _convert(
    data: npt.NDArray[np.uint8],
    table: Table,
    room: _Room,
    warn: Callable[[str], object],
    odd: dict[str, dict[int, str]],
) -> pa.RecordBatch:
    arrays = []
    for c, (one, column) in enumerate(zip(table.types, table.schema.columns, strict=False)):
        values = ColumnValues(data, room[0][c], room[1][c], room[2][c])
        texts: dict[int, str] = {}
        arrays.append(convert(one, values, f"{table.schema.table}.{column.name}", warn, texts))
        if texts:
            odd[column.name] = texts
    fields = [pa.field(column.name, column.type) for column in table.schema.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def _orders(batch: _Batch, rows: _Rows, starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of a batch's changes among all."""
    firsts = np.cumsum(rows.per_event) - rows.per_event  # of every event: the number of its first change in the batch
    shift = starts[np.array(batch.sequence)] - firsts
    order: npt.NDArray[np.int64] = np.arange(len(rows.ops), dtype=np.int64) + shift[rows.owners]
    return order


def _before(rows: _Rows) -> pa.StructArray | None:
    """Return the rows before their changes; null for an insert, which has none."""
    if rows.before is None:
        return None
    mask = pa.array(rows.ops == Op.INSERT)
    return pa.StructArray.from_arrays(rows.before.columns, fields=list(rows.before.schema), mask=mask)


def _emptied(state: _Frames, table: str, transaction: int, order: int, with_before: bool) -> Changes:
    """Return the change row of a TRUNCATE, with the columns that the table had last, if frames tell them."""
    schemas = [batch.table.schema for batch in state.batches if batch.table.schema.table == table]
    schema = schemas[-1] if schemas else TableSchema(table, ())
    fields = [pa.field(column.name, column.type) for column in schema.columns]
    rows = pa.RecordBatch.from_struct_array(pa.array([{}], pa.struct(fields)))
    return Changes(
        schema, np.array([Op.TRUNCATE], np.uint8), rows, [None] * len(fields), np.array([order], np.int64),
        np.array([transaction], np.int32), pa.nulls(1, pa.struct(list(rows.schema))) if with_before else None,
    )  # fmt: skip


def warm_up() -> None:
    """Compile everything, or load what is compiled."""
    data = np.frombuffer(bytes(64), np.uint8)
    scratch, flags = np.zeros((4, 1), np.int64), np.zeros((2, 1), np.uint8)
    events, layout = np.zeros((0, kernel.EVENT_COLUMNS), np.int64), np.zeros((1, 2), np.int64)
    room = _room(1, 1)
    kernel.walk(data, events, layout, np.zeros(1, np.uint8), scratch, flags, *room, *room, *_owners(1), False, True)
    values = ColumnValues(data, room[0][0], room[1][0], room[2][0])
    values.words(1)
    values.raw()
    kernel.times(data, values.offsets, values.states, kernel.DATE, 0, np.empty(1, np.int64))
    kernel.clocks(data, values.offsets, values.states, False, 0, np.empty(2, np.int32), np.empty(18, np.uint8))
    kernel.decimals(data, values.offsets, values.states, 9, 0, np.empty((1, 2), np.uint64))
    chunk.warm_up()
    stream_kernel.warm_up()
