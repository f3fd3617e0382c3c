"""Reads spool files and chunks in a worker: the change rows of each table, and the envelope of all changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import DamagedError, SchemaError, SourceGapError
from firnline.ndjson import MismatchError, UnexpectedFieldError
from firnline.options import FACTS, MISSING, MOVED, OP, names_tables
from firnline.rescued import Rescued, shorten
from firnline.sinks.table_rows import COMMON_COLUMNS, SourceTable, mark_table
from firnline.sources.base import MAIN_PORT, Budget, ReadColumns, Rows, Split, SplitEnd, SplitReader
from firnline.sources.cdc.chunks import ChunkFile, SnapshotBegin, WindowSeen, find_again, lay_under, lost_values
from firnline.sources.cdc.column_names import BEFORE
from firnline.sources.cdc.evolution import new_names, spelled_first
from firnline.sources.cdc.log import (
    Changes,
    Ddl,
    Decoded,
    LogDecoder,
    Op,
    SinkKeys,
    TableSchema,
    Transaction,
    check_table_key,
)
from firnline.sources.cdc.reader_settings import WARNINGS, LogReaderSettings
from firnline.sources.cdc.schemas import (
    KEYS,
    SILENT,
    VERSIONS,
    SchemaVersion,
    new_versions,
    silent_changes,
    versions_of,
)
from firnline.sources.cdc.spool import UNLESS_KEYED, Content, SpoolFile, read_file
from firnline.sources.cdc.tables import port_of, tables_of_port
from firnline.sources.columns import Columns
from firnline.sources.decoding import with_rescued
from firnline.sources.files.formats.arrow_json import json_texts
from firnline.sources.files.formats.parquet import ParquetDecoder, ParquetPiece
from firnline.storage import open_storage
from firnline.types import Json

BATCH_ROWS = 65_536
COMMITTED_AT, POSITION, TRANSACTION = FACTS
TABLE, AFTER_JSON, BEFORE_JSON = "_table", "after", "before"  # of the envelope, beside those above
_MICROS = pa.timestamp("us", "UTC")
_WORDS = pa.array([op.name.lower() for op in Op])
WINDOW_HINT = (
    "The rows of tables that are being read lie under the changes in this file. Restore it from a backup; or go back "
    "to an epoch before their snapshots began, if `firnline checkpoints` has one: firnline rollback --to EPOCH"
)
_NO_COLUMNS = Columns(pa.schema([]), frozenset(), {})


@dataclass(slots=True)
class _Read:
    """How the reading of one file ended."""

    path: str
    rows: int = 0
    schemas: list[SchemaVersion] = field(default_factory=list)  # used by change rows, in order
    # Of a chunk: why it must be read `again` (empty: it counts). Of a chunk and a window: `seen`, how many files at the
    # begin of the window hold only what is seen. Of a spool file: the tables in which rows `moved` to keys with values
    # missing, and `silent` changes, which the log does not have.
    facts: dict[str, Json] = field(default_factory=dict)

    def warn(self, warnings: Sequence[str]) -> None:
        """Take note of what the run is to warn of."""
        if warnings:
            self.facts[WARNINGS] = list(warnings)

    def to_json(self) -> dict[str, Json]:
        return {"path": self.path, "rows": self.rows, VERSIONS: [one.to_json() for one in self.schemas], **self.facts}


@dataclass(slots=True)
class _Window:
    """A spool file of a window: its transactions, and its changes of the tables that chunks of the split have."""

    transactions: Sequence[Transaction]
    changes: list[Changes]


class LogReader(SplitReader):
    """Reads the inputs of one split, one after the other."""

    def __init__(
        self,
        settings: dict[str, Json],
        split: Split,
        ports: Mapping[str, Columns],
        open_decoder: Callable[[bool, SinkKeys], LogDecoder],
    ) -> None:
        self._settings = LogReaderSettings.from_json(settings)
        self._inputs = split.inputs
        self._ports = {port: columns for port, columns in ports.items() if not names_tables(port)}
        schema = self._settings.default_schema
        self._patterns = {port: tables_of_port(port, schema) for port in ports if names_tables(port)}
        self._keys = {
            port if "." in port else f"{schema}.{port}": columns.keys for port, columns in self._ports.items()
        }
        self._decoder = open_decoder(self._settings.wants_before or MAIN_PORT in ports, self._keys)
        self._window_decoder = open_decoder(True, self._keys)
        self._windows: dict[str, _Window] = {}
        self._spelled: dict[str, dict[str, str]] = {}  # by port: columns of the rows so far, by lower case
        self._chunked = {str(item["chunk"]["table"]) for item in split.inputs if "chunk" in item}
        self._storage = open_storage(self._settings.root, self._settings.storage_options)

    def read(self, schemas: Mapping[str, pa.Schema], budget: Budget) -> Iterator[Sequence[Rows]]:
        self._outcomes: list[_Read] = []
        self._fitters = {port: ParquetDecoder(schemas[port], columns) for port, columns in self._ports.items()}
        for item in self._inputs:
            if "begins" in item:
                yield from self._begin_snapshot(SnapshotBegin.from_json(item), budget)
            elif "passed" in item or "left" in item or "logged" in item:
                self._outcomes.append(_Read(str(item["path"])))
            elif "trims" in item:
                seen = self._count_seen(WindowSeen.from_json(item))
                self._outcomes.append(_Read(str(item["path"]), facts={"seen": seen}))
            elif "chunk" in item:
                yield from self._read_chunk(ChunkFile.from_json(item), budget)
            else:
                yield from self._read_log(SpoolFile.from_json(item), budget)

    def _read_log(self, file: SpoolFile, budget: Budget) -> Iterator[Sequence[Rows]]:
        content = self._content(file.name)
        decoded = self._leave_out(file, self._decoder.decode(content.context, content.frames))
        outcome = _Read(file.name)
        yield from self._hand_on(file.name, decoded, outcome, budget)
        outcome.schemas = new_versions({}, versions_of(decoded))
        outcome.warn(decoded.warnings)
        if silent := silent_changes(decoded):
            outcome.facts[SILENT] = [one.to_json() for one in silent]
        moved = {changes.schema.table for changes in decoded.changes if lost_values(changes)}
        if moved:
            outcome.facts["moved"] = sorted(moved)
        budget.bytes_read += file.size_bytes
        budget.raw_bytes += len(content.frames)
        self._outcomes.append(outcome)

    def _leave_out(self, file: SpoolFile, decoded: Decoded) -> Decoded:
        """Leave out changes that the snapshot of a table without a key has, or will have."""
        if not file.left_out:
            return decoded
        every = np.ones(len(decoded.transactions), np.bool_)
        # A truncate has no columns, so it does not say whether there is a key.
        unkeyed = {one.schema.table for one in decoded.changes if one.schema.columns and not one.schema.key}
        sees = {
            table: every if one in (None, UNLESS_KEYED) else self._decoder.sees(one, decoded.transactions)
            for table, one in file.left_out.items()
            if one != UNLESS_KEYED or table in unkeyed
        }
        kept: list[Changes] = []
        for changes in decoded.changes:
            if changes.schema.table in sees:
                chosen = np.flatnonzero(~sees[changes.schema.table][changes.transaction])
                if not len(chosen):
                    continue
                changes = _take(changes, chosen) if len(chosen) < len(changes.ops) else changes
            kept.append(changes)
        return replace(decoded, changes=kept, ddl=[_without_seen(one, sees) for one in decoded.ddl])

    def _hand_on(self, origin: str, decoded: Decoded, outcome: _Read, budget: Budget) -> Iterator[Sequence[Rows]]:
        self._note_keys(decoded, outcome)
        for rows in self._rows(origin, decoded):
            outcome.rows += rows.batch.num_rows
            budget.records += rows.batch.num_rows + len(rows.bad)
            yield [rows]

    def _note_keys(self, decoded: Decoded, outcome: _Read) -> None:
        """Take note of the keys that rows for ports of many tables name."""
        keys: dict[str, list[Json]] = {}
        for changes in decoded.changes:
            table, key = changes.schema.table, self._key_of(changes.schema)
            if key is None or not any(tables.covers(table) for tables in self._patterns.values()):
                continue
            known = keys.setdefault(table, [])
            if not known or known[-1] != list(key):
                known.append(list(key))
        if keys:
            outcome.facts[KEYS] = keys

    def _key_of(self, schema: TableSchema) -> tuple[str, ...] | None:
        """Return the key of a table for sinks of many tables; None if the log does not describe the table."""
        if schema.table in self._settings.unkeyed:
            return ()
        return schema.key if schema.columns else None

    def _content(self, name: str) -> Content:
        return read_file(self._storage, self._settings.folder, name)

    def end(self) -> SplitEnd:
        columns = {port: ReadColumns(fitter.schema) for port, fitter in self._fitters.items()}
        columns |= {port: ReadColumns(COMMON_COLUMNS) for port in self._patterns}
        return SplitEnd([outcome.to_json() for outcome in self._outcomes], columns)

    # -- chunks ---------------------------------------------------------------------------------------

    def _begin_snapshot(self, begin: SnapshotBegin, budget: Budget) -> Iterator[Sequence[Rows]]:
        outcome = _Read(begin.path)
        self._outcomes.append(outcome)
        if begin.empties:
            empty = Changes(
                TableSchema(begin.table, ()),
                np.array([Op.TRUNCATE], np.uint8),
                pa.RecordBatch.from_arrays([], names=[]),
                [],
                np.zeros(1, np.int64),
                np.zeros(1, np.int32),
                anew=not begin.where,
            )
            yield from self._hand_on(begin.path, Decoded([empty], [Transaction("", 0, "")], 1), outcome, budget)

    def _read_chunk(self, file: ChunkFile, budget: Budget) -> Iterator[Sequence[Rows]]:
        outcome = _Read(file.name, facts={"again": "", "seen": 0})
        self._outcomes.append(outcome)
        content = self._content(file.name)
        budget.bytes_read += file.size_bytes
        budget.raw_bytes += len(content.frames)
        if not content.context:  # the table is gone
            return
        chunk = self._decoder.decode_chunk(content.context, content.frames)
        if chunk.rows.num_rows != file.rows:
            raise DamagedError(f"the chunk {file.name} has {chunk.rows.num_rows} rows instead of {file.rows}")
        unseen: list[Changes] = []
        if file.key:
            unseen, outcome.facts["seen"] = self._find_unseen(file)
        outcome.facts["again"] = find_again(chunk, unseen)
        if outcome.facts["again"]:
            return
        left = lay_under(chunk.rows, file.key, unseen, self._keys.get(file.table, frozenset()))
        changes = Changes(
            chunk.schema,
            np.full(len(left.kept), Op.READ, np.uint8),
            left.rows,
            left.missing,
            left.kept,
            np.zeros(len(left.kept), np.int32),
            odd=_of_rows(chunk.odd, left.kept),
        )
        decoded = Decoded([changes], [self._decoder.place_of_chunk(file.high)], file.rows, chunk.warnings)
        if len(left.kept):
            outcome.schemas = versions_of(decoded)
            outcome.warn(chunk.warnings)
            yield from self._hand_on(file.name, decoded, outcome, budget)

    def _find_unseen(self, file: ChunkFile) -> tuple[list[Changes], int]:
        """Return the changes of the chunk's table, in its window, that its snapshot does not surely see; and how many
        files at the begin of the window have nothing but what it sees."""
        unseen: list[Changes] = []
        seen, is_all_seen = 0, True
        for name in file.window:
            window = self._open_window(name)
            sees = self._decoder.sees(file.sees, window.transactions)
            is_all_seen = is_all_seen and bool(sees.all())
            seen += is_all_seen
            if sees.all():
                continue
            for changes in window.changes:
                if changes.schema.table == file.table:
                    chosen = np.flatnonzero(~sees[changes.transaction])
                    unseen += [_take(changes, chosen)] if len(chosen) else []
        return unseen, seen

    def _count_seen(self, seen: WindowSeen) -> int:
        """Return how many files at the begin of a window have nothing but what is seen."""
        for count, name in enumerate(seen.window):
            if not self._decoder.sees(seen.sees, self._open_window(name).transactions).all():
                return count
        return len(seen.window)

    def _open_window(self, name: str) -> _Window:
        if name not in self._windows:
            try:
                content = self._content(name)
            except (DamagedError, SourceGapError) as error:
                raise type(error)(error.message, hint=WINDOW_HINT) from error
            decoded = self._window_decoder.decode(content.context, content.frames)
            wanted = [changes for changes in decoded.changes if changes.schema.table in self._chunked]
            self._windows[name] = _Window(decoded.transactions, wanted)
        return self._windows[name]

    # -- rows -----------------------------------------------------------------------------------------

    def _rows(self, origin: str, decoded: Decoded) -> Iterator[Rows]:
        ends: dict[str, int] = {}
        for changes in decoded.changes:
            port = port_of(changes.schema.table, self._settings.default_schema)
            if changes.order[0] < ends.get(port, 0):
                raise DamagedError(f"{origin}: the changes of {port} are not in the order of the log")
            ends[port] = int(changes.order[-1])
            self._check_keys(changes)
            if port in self._ports:
                rows = self._change_rows(changes, decoded, self._new_names(port, changes.schema))
                yield from self._fit(origin, port, rows, changes)
            for pattern, tables in self._patterns.items():
                if tables.covers(changes.schema.table):
                    yield from self._table_rows(origin, pattern, changes, decoded)
        if MAIN_PORT in self._ports and decoded.changes:
            batch, order = self._envelope(decoded)
            yield from self._fit(origin, MAIN_PORT, batch, order)

    def _new_names(self, port: str, schema: TableSchema) -> dict[str, str]:
        """Return the columns of a table that get another name at its port."""
        columns = self._ports[port]
        renamed = new_names(schema, columns)
        if columns.evolution != "add":
            return renamed
        spelled = self._spelled.setdefault(port, {})
        return spelled_first([one.name for one in schema.columns], renamed, spelled)

    def _check_keys(self, changes: Changes) -> None:
        """Refuse rows that a sink cannot identify: of a table without a key of its own, or with a value in the key that
        its type cannot hold, which would be null.

        Raises:
            SchemaError: it names the table, and the column and the value.
        """
        schema = changes.schema
        port = port_of(schema.table, self._settings.default_schema)
        if port in self._ports:
            check_table_key(schema, self._ports[port].table_key)
        if schema.table in self._settings.unkeyed and self._keys.get(schema.table):
            raise SchemaError(
                f"table {schema.table} is system-versioned, and a sink upserts it: the log has rows of the past beside "
                "those of now, and the sink could not tell them apart",
                hint="Write `write: append` for the sinks of the table. Or ALTER TABLE ... DROP SYSTEM VERSIONING, and "
                "read the table again.",
            )
        for name in sorted(changes.odd.keys() & self._keys.get(schema.table, frozenset())):
            text = next(iter(changes.odd[name].values()))
            raise SchemaError(
                f"table {schema.table}: a row has {shorten(text)} in {name}, a column of the key, and no sink can hold "
                "this value: the row could not be told from others",
                hint="Correct the value in the database. If the log has it already, pass over its transaction with "
                "`firnline position`, and read the table again. Or append the table, or leave it out of `tables`.",
            )

    def _change_rows(self, changes: Changes, decoded: Decoded, renamed: Mapping[str, str]) -> pa.RecordBatch:
        """Return the rows of a table, with the columns that say what happened."""
        names = [renamed.get(name, name) for name in changes.rows.schema.names]
        columns = dict(zip(names, changes.rows.columns, strict=True))
        columns[OP] = _op_words(changes.ops)
        missing = _missing(changes, renamed)
        if missing is not None:
            columns[MISSING] = missing
            if changes.moved is not None:
                lost = changes.moved & missing.is_valid().to_numpy(zero_copy_only=False)
                if lost.any():
                    columns[MOVED] = pa.array(lost, mask=~lost)
        columns |= self._facts(changes, decoded, [name for name in FACTS if name[1:] in self._settings.include])
        if self._settings.wants_before and changes.before is not None:
            columns[BEFORE] = changes.before
        return pa.RecordBatch.from_pydict(columns)

    def _facts(self, changes: Changes, decoded: Decoded, names: Sequence[str] = FACTS) -> dict[str, pa.Array]:
        index = pa.array(changes.transaction)
        found: dict[str, pa.Array] = {}
        for name in names:
            if name == COMMITTED_AT:
                times = np.array([one.committed_at for one in decoded.transactions], np.int64)
                known = pa.array(times, mask=times == 0).cast(_MICROS)
            else:
                texts = [one.position if name == POSITION else one.id for one in decoded.transactions]
                known = pa.array(texts, pa.string())
            found[name] = known.take(index)
        return found

    def _envelope(self, decoded: Decoded) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return all changes in the order of the log: what happened, where, and the rows as JSON."""
        parts: list[pa.RecordBatch] = []
        for changes in decoded.changes:
            is_row = pa.array(~np.isin(changes.ops, (Op.DELETE, Op.TRUNCATE)))
            after = pa.nulls(len(changes.ops), pa.string())
            if changes.schema.columns:  # a table that is emptied before it is read again has none
                after = pc.if_else(is_row, json_texts(changes.rows.to_struct_array()), after)
            before = _before_texts(changes)
            missing = _missing(changes, {})
            columns = {
                OP: _op_words(changes.ops),
                TABLE: pa.repeat(pa.scalar(changes.schema.table), len(changes.ops)),
                **self._facts(changes, decoded),
                AFTER_JSON: after,
                BEFORE_JSON: before,
                MISSING: missing if missing is not None else pa.nulls(len(changes.ops), pa.list_(pa.string())),
            }
            parts.append(pa.RecordBatch.from_pydict(columns))
        order = np.concatenate([changes.order for changes in decoded.changes])
        place = np.argsort(order, kind="stable")
        whole = pa.Table.from_batches(parts).combine_chunks().take(pa.array(place))
        return whole.combine_chunks().to_batches()[0], order[place]

    def _table_rows(self, origin: str, pattern: str, changes: Changes, decoded: Decoded) -> Iterator[Rows]:
        """Yield the rows of one table at a port of many, with the columns that the database has."""
        batch, schema = self._change_rows(changes, decoded, {}), changes.schema
        owner, _, name = schema.table.partition(".")
        is_in_default = owner == self._settings.default_schema
        table = SourceTable(owner, name, is_in_default, self._key_of(schema), changes.anew)
        fitter = ParquetDecoder(pa.schema([]), _NO_COLUMNS)
        for rows in self._fit(origin, pattern, batch, changes, fitter):
            yield replace(rows, batch=mark_table(rows.batch, table))

    def _fit(
        self,
        origin: str,
        port: str,
        batch: pa.RecordBatch,
        changes: Changes | npt.NDArray[np.int64],
        fitter: ParquetDecoder | None = None,
    ) -> Iterator[Rows]:
        """Fit change rows to the columns of their port, or to those of `fitter`. `changes` are those of one table, or
        the order of rows of several."""
        fitter = fitter or self._fitters[port]
        odd: Mapping[str, Mapping[int, str]] = {}
        table, order = "", changes
        if isinstance(changes, Changes):
            odd, table, order = changes.odd, changes.schema.table, changes.order
        rescued = _rescued_texts(odd, batch.num_rows) if odd else None
        for start in range(0, batch.num_rows, BATCH_ROWS):
            part = batch.slice(start, BATCH_ROWS)
            try:
                fitted = fitter.decode(ParquetPiece(part, start, 0))
            except (UnexpectedFieldError, MismatchError) as error:
                raise SchemaError(f"{origin}: {error}", file=origin) from error
            places = fitted.record_numbers
            made, counts = fitted.batch, [replace(one, file=origin, table=table) for one in fitted.rescued]
            if rescued is not None:
                made = with_rescued(fitter, made, rescued.take(places))
                counts += _count_odd(odd, origin, table) if start == 0 else []
            yield Rows(origin, made, pa.array(order).take(places), fitted.bad, port=port, rescued=counts)


def _op_words(ops: npt.NDArray[np.uint8]) -> pa.Array:
    """Return the words for what happened to rows."""
    if len(ops) and (ops == ops[0]).all():
        return pa.repeat(_WORDS[int(ops[0])], len(ops))
    return _WORDS.take(pa.array(ops))


def _missing(changes: Changes, renamed: Mapping[str, str]) -> pa.Array | None:
    """Return for every row the columns whose values the log left out; None if it has all of them.

    Of a delete the key is enough. A change row that empties the table has none.
    """
    names = [renamed.get(column.name, column.name) for column in changes.schema.columns]
    asked, empties = changes.ops != Op.DELETE, changes.ops == Op.TRUNCATE
    known = {name: mask & asked for name, mask in zip(names, changes.missing, strict=True) if mask is not None}
    masks = {name: known.get(name, empties) | empties for name in names}
    masks = {name: mask for name, mask in masks.items() if mask.any()}
    if not masks:
        return None
    flags = np.stack(list(masks.values()), axis=1)
    counts = flags.sum(axis=1)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    values = pa.array(list(masks), pa.string()).take(pa.array(np.nonzero(flags)[1]))
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(counts == 0))


def _before_texts(changes: Changes) -> pa.Array:
    """Return the rows before the changes as JSON; of a delete at least what the log has of it."""
    is_delete = changes.ops == Op.DELETE
    texts = pa.nulls(len(changes.ops), pa.string())
    if changes.before is not None:
        texts = json_texts(changes.before)
    if is_delete.any():
        texts = pc.if_else(pa.array(is_delete), json_texts(changes.rows.to_struct_array()), texts)
    return texts


def _without_seen(ddl: Ddl, sees: Mapping[str, npt.NDArray[np.bool_]]) -> Ddl:
    """Return a statement without what it does to rows of tables whose snapshots see it."""
    silent = {table: one for table, one in ddl.silent.items() if table not in sees or not sees[table][ddl.transaction]}
    return replace(ddl, silent=silent)


def _take(changes: Changes, chosen: npt.NDArray[np.int64]) -> Changes:
    """Return some of the changes."""
    return replace(
        changes,
        ops=changes.ops[chosen],
        rows=changes.rows.take(pa.array(chosen)),
        missing=[mask[chosen] if mask is not None else None for mask in changes.missing],
        order=changes.order[chosen],
        transaction=changes.transaction[chosen],
        before=changes.before.take(pa.array(chosen)) if changes.before is not None else None,
        odd=_of_rows(changes.odd, chosen),
        moved=changes.moved[chosen] if changes.moved is not None else None,
    )


def _of_rows(odd: Mapping[str, Mapping[int, str]], chosen: npt.NDArray[np.int64]) -> dict[str, dict[int, str]]:
    """Return the odd values of some rows."""
    if not odd:
        return {}
    places = {int(row): place for place, row in enumerate(chosen)}
    found = {name: {places[row]: text for row, text in texts.items() if row in places} for name, texts in odd.items()}
    return {name: texts for name, texts in found.items() if texts}


def _rescued_texts(odd: Mapping[str, Mapping[int, str]], rows: int) -> pa.Array:
    found: dict[int, dict[str, str]] = {}
    for column, values in odd.items():
        for row, text in values.items():
            found.setdefault(row, {})[column] = text
    texts: list[str | None] = [None] * rows
    for row, kept in found.items():
        texts[row] = json.dumps(kept, ensure_ascii=False)
    return pa.array(texts, pa.string())


def _count_odd(odd: Mapping[str, Mapping[int, str]], origin: str, table: str) -> list[Rescued]:
    counts = []
    for column, values in odd.items():
        first = next(iter(values.values()))
        text = shorten(json.dumps(first, ensure_ascii=False))
        counts.append(Rescued(column, len(values), first=text, file=origin, table=table))
    return counts
