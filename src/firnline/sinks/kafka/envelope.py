"""The envelope of Debezium for change rows: `before`, `after`, `source`, `op` and `ts_ms`, as Arrow columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError
from firnline.operators.base import BEFORE
from firnline.options import DELETE, FACTS, MISSING, OP, TRUNCATE
from firnline.schema import RESCUED_COLUMN
from firnline.sinks.changes import table_columns
from firnline.types import Json

UNAVAILABLE = "__debezium_unavailable_value"  # in `after`: a text that the log left out
_CODES = {"insert": "c", "update": "u", DELETE: "d", "read": "r", TRUNCATE: "t"}
_LSN = re.compile(r"([0-9A-Fa-f]+)/([0-9A-Fa-f]+)")
_COMMITTED_AT, _POSITION, _TRANSACTION = FACTS
_NOT_OF_THE_TABLE = (*FACTS, RESCUED_COLUMN, "_firnline_file", "_firnline_record")


def wrap(batch: pa.RecordBatch, shape: Mapping[str, Json]) -> pa.RecordBatch:
    """Return change rows in the envelope; `shape` names their `source` and `table`.

    Everything comes from the rows, so that a repeated delivery writes the same bytes.

    Raises:
        SchemaError: they are no change rows.
    """
    if OP not in batch.schema.names:
        raise SchemaError(
            f"rows for `envelope: debezium` lack the column {OP}",
            hint="Read a table of a source that captures changes, or write `envelope: plain`.",
        )
    words = batch.column(OP).cast(pa.string())
    places = pc.index_in(words, pa.array(list(_CODES)))
    if places.null_count:
        odd = words.filter(pc.is_null(places))[0].as_py()
        raise SchemaError(f"a change row has {OP} {odd!r}", hint=f"It must be one of {', '.join(_CODES)}.")
    is_gone = pc.is_in(words, pa.array([DELETE, TRUNCATE])).to_numpy(zero_copy_only=False)
    fields = [field for field in table_columns(batch.schema) if field.name not in _NOT_OF_THE_TABLE]
    if BEFORE in batch.schema.names:
        before: pa.Array = batch.column(BEFORE)
    else:  # of a delete, the log has at least the key
        before = _struct([batch.column(f.name) for f in fields], fields, pc.not_equal(words, DELETE))
    lacks = batch.column(MISSING) if MISSING in batch.schema.names else None
    after = _struct([_marked(batch.column(f.name), f, lacks) for f in fields], fields, pa.array(is_gone))
    moments = _moments(batch)
    return pa.RecordBatch.from_arrays(
        [
            before,
            after,
            _source(batch, shape, words, moments, lacks),
            pa.array(list(_CODES.values())).take(places),
            moments,
        ],
        names=["before", "after", "source", "op", "ts_ms"],
    )


def _struct(columns: list[pa.Array], fields: list[pa.Field], absent: pa.Array) -> pa.StructArray:
    kept = [field.with_type(column.type).with_nullable(True) for field, column in zip(fields, columns, strict=True)]
    return pa.StructArray.from_arrays(columns, fields=kept, mask=absent)


def _marked(column: pa.Array, field: pa.Field, lacks: pa.Array | None) -> pa.Array:
    """Return a column of `after`: a text that the log left out has Debezium's mark; other types stay null."""
    if lacks is None or not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return column
    names, owners = lacks.flatten(), pc.list_parent_indices(lacks).to_numpy()
    absent = np.zeros(len(column), np.bool_)
    absent[owners[pc.equal(names, field.name).to_numpy(zero_copy_only=False)]] = True
    return pc.if_else(pa.array(absent), pa.scalar(UNAVAILABLE, column.type), column) if absent.any() else column


def _moments(batch: pa.RecordBatch) -> pa.Array:
    """Return when the transactions were committed, in milliseconds."""
    if _COMMITTED_AT not in batch.schema.names:
        return pa.nulls(batch.num_rows, pa.int64())
    micros = batch.column(_COMMITTED_AT).cast(pa.timestamp("us", "UTC")).cast(pa.int64())
    return pc.divide(micros, 1000)


def _source(
    batch: pa.RecordBatch, shape: Mapping[str, Json], words: pa.Array, moments: pa.Array, lacks: pa.Array | None
) -> pa.StructArray:
    rows = batch.num_rows
    schema, dot, table = str(shape["table"]).rpartition(".")
    columns: dict[str, pa.Array] = {
        "name": pa.repeat(pa.scalar(str(shape["source"])), rows),
        "ts_ms": moments,
        "snapshot": pc.if_else(pc.equal(words, "read"), "true", "false"),
        **({"schema": pa.repeat(pa.scalar(schema), rows)} if dot else {}),
        "table": pa.repeat(pa.scalar(table), rows),
        **_place(batch),
        **({"missing": lacks} if lacks is not None else {}),
        **({"rescued": batch.column(RESCUED_COLUMN)} if RESCUED_COLUMN in batch.schema.names else {}),
    }
    return pa.StructArray.from_arrays(list(columns.values()), names=list(columns))


def _place(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return where the transactions are in the log: `txId` and `lsn` of PostgreSQL; `gtid`, `file`, `pos` of MySQL."""
    names = batch.schema.names
    nothing = pa.nulls(batch.num_rows, pa.string())
    positions = batch.column(_POSITION).cast(pa.string()) if _POSITION in names else nothing
    ids = batch.column(_TRANSACTION).cast(pa.string()) if _TRANSACTION in names else nothing
    known = positions.dictionary_encode()
    is_number = pc.fill_null(pc.match_substring_regex(ids, "^[0-9]+$"), False)
    is_gtid = pc.and_(pc.invert(is_number), pc.fill_null(pc.not_equal(ids, positions), True))
    return {
        "txId": pc.if_else(is_number, ids, None).cast(pa.int64()),
        "lsn": _mapped(known, _lsn_number, pa.int64()),
        "gtid": pc.if_else(pc.and_(is_gtid, pc.not_equal(ids, "")), ids, None),
        "file": _mapped(known, lambda text: text.rpartition(":")[0] or None, pa.string()),
        "pos": _mapped(known, lambda text: int(text.rpartition(":")[2]) if ":" in text else None, pa.int64()),
    }


def _mapped(column: pa.DictionaryArray, call: Callable[[str], Any], kind: pa.DataType) -> pa.Array:
    """Return a column with a value for each text; the function is called once for each transaction."""
    return pa.array([call(text) for text in column.dictionary.to_pylist()], kind).take(column.indices)


def _lsn_number(text: str) -> int | None:
    found = _LSN.fullmatch(text)
    return (int(found.group(1), 16) << 32) | int(found.group(2), 16) if found else None
