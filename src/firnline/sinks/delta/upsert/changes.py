"""The change rows of an epoch: the newest of every key, in the order of the keys, and how rows are matched to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from isal import isal_zlib

from firnline.errors import DamagedError, SchemaError, SinkError
from firnline.options import MISSING, MOVED, OP, OPERATIONS, SEQUENCE, TRUNCATE
from firnline.schema import type_to_text
from firnline.sinks.changes import table_columns
from firnline.sinks.delta.stage import partition_text
from firnline.storage import Storage
from firnline.types import Json

SEQUENCE_BY = "sequence_by"  # of a staged file of records: the column that orders rows; null: their order in the files

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def check_key(key: Sequence[str], schema: pa.Schema) -> None:
    """Refuse a key that the columns lack, or that has no equality.

    Raises:
        SchemaError: it names the column.
    """
    for name in key:
        _check_column("key", name, schema, "cannot identify a row", "Use columns of a plain type as the key.")


def check_sequence(name: str, schema: pa.Schema) -> None:
    """Refuse an order by a column that is missing, or whose values have no order.

    Raises:
        SchemaError: it names the column.
    """
    _check_column("sequence_by", name, schema, "has no order", "Use a number, a time or text.")


def _check_column(setting: str, name: str, schema: pa.Schema, fault: str, hint: str) -> None:
    """Refuse a column of a setting that is missing, or nested: `fault` says what such values lack."""
    check_named(setting, name, schema)
    field = schema.field(name)
    if pa.types.is_nested(field.type):
        kind = type_to_text(field)
        raise SchemaError(f"the {setting} column {name!r} is {kind}, which {fault}", hint=hint, column=name)


def check_named(setting: str, name: str, schema: pa.Schema) -> None:
    """Refuse a column of a setting that is missing.

    Raises:
        SchemaError: it names the column.
    """
    if name not in schema.names:
        raise SchemaError(
            f"the {setting} column {name!r} is not among the columns {', '.join(schema.names)}",
            hint=f"Set the sink's {setting} to what its input has.",
            column=name,
        )


@dataclass(frozen=True, slots=True)
class Changes:
    """One row per key. If `keeps` is False the change is a delete, and the rest of its row has no meaning.

    `keys` are the key columns in comparable form (see `comparable`); `rows` has the columns of the changelog. With a
    `sequence`, a change counts only if the table holds no newer row of its key.
    """

    rows: pa.Table
    keys: pa.Table
    keeps: Mask
    sequence: pa.Array | None = None
    unknown: Mapping[str, Mask] = field(default_factory=dict)  # by column: changes under which the old value stays
    empties: bool = False  # the table is emptied before these changes
    origins: pa.Table | None = None  # in the form of `keys`: the key under which the table has the old values

    def __len__(self) -> int:
        return len(self.keeps)


def load_changes(
    storage: Storage, files: Sequence[dict[str, Json]], key: Sequence[str], partition_by: Sequence[str]
) -> Changes:
    """Read change files; of several rows with one key the highest sequence wins, then the later one.

    Changes of operators have a `_sequence`. Those of records are ordered by the column that their files name; without
    one, or where it is null, by their place in the files.

    Raises:
        DamagedError: a file differs from what was staged.
        SinkError: a file cannot be read.
        SchemaError: a column is missing, or an operation is unknown.
    """
    rows = pa.concat_tables([_read(storage, file) for file in files], promote_options="permissive")
    of_records = SEQUENCE_BY in files[0]
    for name in (OP,) if of_records else (OP, SEQUENCE):
        if name not in rows.column_names:
            raise SchemaError(
                f"rows for an upsert lack the column {name}", hint="Feed the sink from an operator that makes changes."
            )
    operation = rows.column(OP).cast(pa.string())
    odd = pc.filter(operation, pc.invert(pc.is_in(operation, pa.array(OPERATIONS))))
    if len(odd):
        raise SchemaError(
            f"a change row has {OP} {odd[0].as_py()!r}", hint=f"It must be one of {', '.join(OPERATIONS)}."
        )
    emptied = pc.equal(operation, TRUNCATE).to_numpy()
    if emptied.any():  # in the order of the files: only what comes after the last one counts
        rows = rows.slice(len(emptied) - int(np.argmax(emptied[::-1])))
        operation = rows.column(OP).cast(pa.string())
    if rows.num_rows:
        check_key(key, rows.schema)
        keys = pa.table({name: comparable(rows.column(name), name in partition_by) for name in key})
    else:
        keys = pa.table({name: pa.nulls(0) for name in key})
    order = _order_of_records(rows, files[0][SEQUENCE_BY]) if of_records else rows.column(SEQUENCE).cast(pa.int64())
    sorted_rows, ends = _by_key(keys, order)
    chosen = sorted_rows[ends]
    keeps = pc.not_equal(operation, "delete").to_numpy()
    values = rows.select(table_columns(rows.schema).names)
    unknown: dict[str, Mask] = {}
    origins: pa.Table | None = None
    if MISSING in rows.column_names and rows.column(MISSING).null_count < rows.num_rows:
        moved = _find_moved(rows)
        newest, unknown, sources = _merge(
            values, _one_array(rows.column(MISSING)), keeps, sorted_rows, ends, moved[sorted_rows]
        )
        origins = keys.take(pa.array(sources)).combine_chunks() if moved.any() else None
    else:
        newest = values.take(chosen)
    return Changes(
        rows=newest.combine_chunks(),
        keys=keys.take(chosen).combine_chunks(),
        keeps=keeps[chosen],
        sequence=_one_array(order).take(chosen) if of_records and files[0][SEQUENCE_BY] else None,
        unknown=unknown,
        empties=bool(emptied.any()),
        origins=origins,
    )


def _find_moved(rows: pa.Table) -> Mask:
    """Return which rows were moved to their key, from that of the row before them."""
    if MOVED not in rows.column_names:
        return np.zeros(rows.num_rows, np.bool_)
    found: Mask = pc.fill_null(_one_array(rows.column(MOVED)), False).to_numpy(zero_copy_only=False)
    return found


def _order_of_records(rows: pa.Table, sequence_by: str | None) -> pa.ChunkedArray:
    """Return what orders the records of one key, apart from their place in the files."""
    if sequence_by is None and SEQUENCE in rows.column_names:  # records that are change rows
        return rows.column(SEQUENCE).cast(pa.int64())
    if sequence_by is None or sequence_by not in rows.column_names:
        return pa.chunked_array([pa.nulls(rows.num_rows, pa.int64())])
    check_sequence(sequence_by, rows.schema)
    return rows.column(sequence_by)


def find_older(new: pa.Array, old: pa.Array) -> Mask:
    """Return for each pair whether the new sequence is before the old one. Null and NaN are before everything."""
    older = pc.fill_null(pc.less(new, old), False)
    older = pc.or_(older, pc.and_(_is_lowest(new), pc.invert(_is_lowest(old))))
    found: Mask = older.to_numpy(zero_copy_only=False)
    return found


def _is_lowest(sequence: pa.Array) -> pa.Array:
    return pc.is_null(sequence, nan_is_null=pa.types.is_floating(sequence.type))


def _read(storage: Storage, file: dict[str, Json]) -> pa.Table:
    path = str(file["path"])
    try:
        data = storage.get(path)
    except OSError as error:
        raise SinkError(f"cannot read the changes in {path}: {error}", file=path) from error
    if isal_zlib.crc32(data) != int(file["crc32"]):
        raise DamagedError(
            f"the changes in {path} are not what was staged",
            hint="Restore the file from a backup; nothing was committed from it.",
            file=path,
        )
    return pq.read_table(pa.BufferReader(data))


def comparable(column: pa.ChunkedArray | pa.Array, is_partition: bool) -> pa.Array:
    """Return a key column in comparable form: partition values as text, both zeros as one."""
    plain = _one_array(column) if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_large_string(plain.type) or pa.types.is_string_view(plain.type):
        plain = plain.cast(pa.string())
    elif pa.types.is_large_binary(plain.type) or pa.types.is_binary_view(plain.type):
        plain = plain.cast(pa.binary())
    if pa.types.is_floating(plain.type):
        plain = pc.add(plain, pa.scalar(0, plain.type))
    return partition_text(plain) if is_partition else plain


def comparable_partition(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return partition values of files, spelled by `partition_text`, in the comparable form of a key column."""
    return comparable(texts.cast(kind), True) if pa.types.is_floating(kind) else texts


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _merge(
    values: pa.Table, missing: pa.Array, keeps: Mask, sorted_rows: Indices, ends: Mask, moved: Mask
) -> tuple[pa.Table, dict[str, Mask], Indices]:
    """Return of every key the newest value of each column, and where no change has one: the old value stays there.

    A delete has all values: none of the row is left. `ends` are the newest changes among `sorted_rows`; `moved`, in
    that order, are rows that take their values along from another key. The third result has for each key a row with
    the key under which the table has the old values.
    """
    count = len(sorted_rows)
    begins = np.concatenate(([True], ends[:-1])) | moved
    first = np.maximum.accumulate(np.where(begins, np.arange(count), 0))  # of each change: the first one of its key
    lists = missing.take(pa.array(sorted_rows))
    owner = pc.list_parent_indices(lists).to_numpy()
    names = lists.flatten().to_numpy(zero_copy_only=False)
    columns, unknown = [], dict[str, Mask]()
    sources: Indices = sorted_rows[ends]
    chains = _Chains(sorted_rows, keeps, first, moved)
    for name in values.column_names:
        has_value = np.ones(count, np.bool_)
        has_value[owner[names == name]] = False
        has_value |= ~keeps[sorted_rows]
        newest = np.maximum.accumulate(np.where(has_value, np.arange(count), -1))
        is_known = newest >= first
        at, lacks = np.where(is_known, newest, np.arange(count))[ends], ~is_known[ends]
        for number in np.flatnonzero(lacks & moved[first][ends]).tolist():
            place, origin = chains.follow(int(first[ends][number]), newest)
            if place is None:
                sources[number] = origin
            else:
                lacks[number], at[number] = False, place if keeps[sorted_rows[place]] else at[number]
        columns.append(_one_array(values.column(name)).take(pa.array(sorted_rows[at])))
        if lacks.any():
            unknown[name] = lacks
    return pa.table(columns, names=values.column_names), unknown, sources


class _Chains:
    """Finds values of rows whose key changed in an epoch, perhaps several times. Places are those of `sorted_rows`."""

    def __init__(self, sorted_rows: Indices, keeps: Mask, first: Indices, moved: Mask) -> None:
        self._rows, self._keeps, self._first, self._moved = sorted_rows, keeps, first, moved
        self._place_of = np.empty(len(sorted_rows) if moved.any() else 0, np.int64)
        if moved.any():
            self._place_of[sorted_rows] = np.arange(len(sorted_rows))

    def follow(self, begin: int, newest: Indices) -> tuple[int | None, int]:
        """Return the place of the newest value of a column that a moved row at `begin` takes along, or None and the row
        whose key the table has it under. `newest` are the newest values of the column up to each place.

        Raises:
            DamagedError: the row before a moved one does not delete its old key.
        """
        while True:
            row = int(self._rows[begin]) - 1
            if row < 0 or self._keeps[row]:
                raise DamagedError("a change row says that its key changed, and the row before it deletes no key")
            left = int(self._place_of[row])
            begin = int(self._first[left])
            if left > begin and newest[left - 1] >= begin:
                return int(newest[left - 1]), row
            if not self._moved[begin]:
                return None, row


def _by_key(keys: pa.Table, sequence: pa.ChunkedArray) -> tuple[Indices, Mask]:
    """Return the row numbers of all changes by key, oldest first, and which of them are the newest of their key."""
    count, plain = keys.num_rows, _one_array(sequence)
    # A row without a sequence is the oldest: null would sort as the newest.
    order = keys.append_column("\0known", pc.invert(_is_lowest(plain))).append_column("\0sequence", plain)
    order = order.append_column("\0number", pa.array(np.arange(count)))
    by = [(name, "ascending") for name in order.column_names]
    sorted_rows: Indices = pc.sort_indices(order, sort_keys=by).to_numpy().astype(np.int64)
    if count == 0:
        return sorted_rows, np.empty(0, np.bool_)
    same = np.ones(count - 1, np.bool_)
    for column in keys.columns:
        same &= _equal_to_next(_one_array(column).take(sorted_rows))
    return sorted_rows, np.append(~same, True)


def _equal_to_next(column: pa.Array) -> Mask:
    """Return for each value except the last whether the next one is equal; nulls and NaNs are equal."""
    this, following = column[:-1], column[1:]
    same = pc.fill_null(pc.equal(this, following), False)
    same = pc.or_(same, pc.and_(pc.is_null(this), pc.is_null(following)))
    if pa.types.is_floating(column.type):
        nan = pc.and_(pc.fill_null(pc.is_nan(this), False), pc.fill_null(pc.is_nan(following), False))
        same = pc.or_(same, nan)
    found: Mask = same.to_numpy(zero_copy_only=False)
    return found


class KeyIndex:
    """Finds which of the changed keys rows have: exact, column by column; null is equal to null."""

    def __init__(self, keys: pa.Table) -> None:
        self._steps: list[tuple[pa.Array, Indices | None]] = []
        codes = np.zeros(keys.num_rows, np.int64)
        for number, column in enumerate(keys.columns):
            values = pc.unique(column)
            found = pc.index_in(column, values, skip_nulls=False).to_numpy().astype(np.int64)
            if number == 0:
                codes = found
                self._steps.append((values, None))
            else:
                pairs, codes = np.unique(codes * len(values) + found, return_inverse=True)
                self._steps.append((values, pairs))
        self._change_of = np.empty(keys.num_rows, np.int64)
        self._change_of[codes] = np.arange(keys.num_rows)

    def find(self, columns: Sequence[pa.Array]) -> tuple[Indices, Indices]:
        """Return the numbers of the rows with a changed key, ascending, and the number of the change of each."""
        rows: Indices | None = None
        codes: Indices = np.empty(0, np.int64)
        for column, (values, pairs) in zip(columns, self._steps, strict=True):
            part = column if rows is None else column.take(rows)
            found = pc.index_in(part, values, skip_nulls=False)
            hits = pc.indices_nonzero(pc.is_valid(found)).to_numpy().astype(np.int64)
            here = found.take(hits).to_numpy().astype(np.int64)
            if rows is None or pairs is None:
                rows, codes = hits, here
                continue
            rows, wanted = rows[hits], codes[hits] * len(values) + here
            at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
            exact = pairs[at] == wanted
            rows, codes = rows[exact], at[exact]
        assert rows is not None, "a key has columns"
        return rows, self._change_of[codes]


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows with exactly these columns: missing ones are null, others are cast to the wanted type.

    Raises:
        SchemaError: a column cannot be cast without loss.
    """
    columns: list[Any] = []
    for wanted in schema:
        index = batch.schema.get_field_index(wanted.name)
        if index < 0:
            columns.append(pa.nulls(batch.num_rows, wanted.type))
            continue
        column = batch.column(index)
        try:
            columns.append(column if column.type.equals(wanted.type) else column.cast(wanted.type))
        except pa.ArrowException as error:
            raise SchemaError(f"column {wanted.name} is {column.type}, not {wanted.type}: {error}") from error
    return pa.RecordBatch.from_arrays(columns, schema=schema)
