"""Turns rows into messages, whole columns at a time: JSON values, keys and topics.

Compiled code writes the values (`firnline.ndjson.write`). DuckDB writes columns of types that it does not know, and all
columns for as long as it is not compiled; both write the same:

| Arrow                  | JSON                                                                          |
|------------------------|-------------------------------------------------------------------------------|
| integers, decimals     | a number with all digits                                                      |
| floats                 | the shortest number that reads back the same; "NaN", "Infinity", "-Infinity"  |
| timestamps             | RFC 3339 in UTC with microseconds: "2024-05-01T12:00:00.000000Z"               |
| dates                  | "2024-05-01"                                                                  |
| binary                 | base64                                                                        |
| `json` columns         | the JSON itself                                                               |
| lists, structs, maps   | arrays and objects; null is null, and an absent value is null                 |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError
from firnline.ndjson import write
from firnline.ndjson.compiling import compile_beside
from firnline.options import DELETE, MISSING, MOVED, OP, SEQUENCE, split_template, template_columns
from firnline.schema import is_json
from firnline.sinks.changes import find_truncates
from firnline.sinks.kafka.envelope import wrap
from firnline.sinks.shaping import ShapedRows, unsliced
from firnline.state.keys import encode_keys
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sinks.kafka.avro_values import AvroValues

PART_BYTES, PART_ROWS = 1024 * 1024, 50_000  # Arrow bytes and rows that are encoded at once
_COLUMN = re.compile("c[0-9]+")
_FILE, _RECORD = "_firnline_file", "_firnline_record"  # where a row comes from, if its source has `lineage: true`


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages of some rows, in order. All arrays have one element per row."""

    numbers: pa.Array  # of the rows in their epoch
    values: pa.Array  # binary; null deletes the key
    keys: pa.Array | None  # binary; null: a message without a key
    topics: pa.Array | None  # dictionary of strings, null where the template has no value; None: one topic for all
    files: pa.Array | None  # where the rows come from, if they say so
    records: pa.Array | None
    end: int  # the number of the first row after these
    refused: Mapping[str, str]  # why topics will never take these values

    def __len__(self) -> int:
        return len(self.values)

    def filter(self, mask: pa.Array) -> Messages:
        """Return only the messages for which the mask is true."""

        def keep(column: pa.Array | None) -> pa.Array | None:
            return column.filter(mask) if column is not None else None

        return Messages(
            self.numbers.filter(mask),
            self.values.filter(mask),
            keep(self.keys),
            keep(self.topics),
            keep(self.files),
            keep(self.records),
            self.end,
            self.refused,
        )

    def sizes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the bytes of key and value of each message."""
        total = _lengths(self.values)
        if self.keys is not None:
            total = total + _lengths(self.keys)
        if self.files is not None:
            total = total + _lengths(self.files.cast(pa.binary()))
        return total


def _lengths(column: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = (
        pc.fill_null(pc.binary_length(column), 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
    )
    return found


class MessageEncoder:
    """Encodes rows by the settings of their epoch (`KafkaSinkOptions.own_shape`); values as JSON, unless `avro` is
    given."""

    def __init__(self, shape: Mapping[str, Json], avro: AvroValues | None = None) -> None:
        self.shape = shape
        self._avro = avro
        self._key: Sequence[str] = shape["key"]
        self._topic = str(shape["topic"])
        self._is_upsert = shape["write"] == "upsert"
        self._lanes = int(shape["lanes"])
        self._is_enveloped = shape.get("envelope") == "debezium"

    @cached_property
    def _connection(self) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(":memory:", config={"threads": "1"})
        connection.execute("SET enable_external_access = false")
        return connection

    def encode(self, rows: ShapedRows, lane: int | None = None) -> Iterator[Messages]:
        """Yield the messages of rows in parts; of one lane alone, if one is given.

        Rows that are left out still move the row number: the last part ends where the rows end.

        Raises:
            SchemaError: a column of the key or of the topic is missing.
        """
        batch, numbers = rows.batch, rows.numbers
        most = min(PART_ROWS, max(1, PART_BYTES * max(1, batch.num_rows) // max(1, batch.nbytes)))
        starts = range(0, batch.num_rows, most) or range(1)
        for start in starts:
            part, part_numbers = batch.slice(start, most), numbers.slice(start, most)
            last = start + most >= batch.num_rows
            end = rows.end if last else int(part_numbers[-1].as_py()) + 1
            if lane is not None and self._lanes > 1:
                mask = pa.array(self.lanes_of(part, part_numbers) == lane)
                part, part_numbers = part.filter(mask), part_numbers.filter(mask)
            yield self._encode(part, part_numbers, end)

    def lanes_of(self, batch: pa.RecordBatch, numbers: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return each row's lane: a hash of its key, or of its number if the sink has no key."""
        if not self._key:
            spread: np.ndarray[tuple[int], np.dtype[np.int64]] = numbers.to_numpy() % self._lanes
            return spread
        self._check_columns(batch.schema)
        keys = self._keys(batch)
        if keys is None:
            keys = self._run(batch, {"k": self._key_text(batch.schema)})["k"]
        hashes = encode_keys(pa.table({"k": keys.cast(pa.string())})).murmur3_32()
        return hashes.astype(np.int64) % self._lanes

    def _encode(self, batch: pa.RecordBatch, numbers: pa.Array, end: int) -> Messages:
        schema = batch.schema
        self._check_columns(schema)
        if not batch.num_columns:
            raise SchemaError("the rows have no columns")
        left_out = (OP, SEQUENCE, MISSING, MOVED) if self._is_upsert else ()
        fields = {n: field for n, field in enumerate(schema) if field.name not in left_out}
        columns: dict[int, write.Column | None] = {}
        wanted: dict[str, str] = {}
        refused: Mapping[str, str] = {}
        if self._avro is not None or self._is_enveloped:
            pass  # Avro needs the topics first; an envelope has columns of its own
        elif write.is_ready() and fields:
            columns = {n: write.as_column(batch.column(n), field) for n, field in fields.items()}
            wanted = {f"v{n}": _or_null(_json_text(f"c{n}", fields[n])) for n, known in columns.items() if not known}
        else:
            compile_beside()
            wanted = {"v": _object((f"c{n}", field) for n, field in fields.items())}
        keys = self._keys(batch)
        if self._key and keys is None:
            wanted["k"] = self._key_text(schema)
        if template_columns(self._topic):
            wanted["t"] = self._topic_text(schema)
        found = self._run(batch, wanted) if wanted else {}
        topics = found["t"].dictionary_encode() if "t" in found else None
        if self._avro is not None:
            chosen = pa.RecordBatch.from_arrays([batch.column(n) for n in fields], schema=pa.schema(fields.values()))
            values, refused = self._avro.encode(chosen, self._topic, topics)
        elif self._is_enveloped:
            values = self._write(wrap(batch, self.shape))
        elif columns:
            known = [column or write.raw_column(found[f"v{n}"]) for n, column in columns.items()]
            values = write.write_objects([fields[n].name for n in columns], known, batch.num_rows)
        else:
            values = found["v"].cast(pa.large_binary())
        if self._is_upsert and OP in schema.names:
            is_delete = pc.fill_null(pc.equal(batch.column(OP).cast(pa.string()), DELETE), False)
            values = pc.if_else(is_delete, pa.scalar(None, values.type), values)
        if keys is None and self._key:
            keys = found["k"].cast(pa.binary())
        if self._is_enveloped and keys is not None and (empties := find_truncates(batch)) is not None:
            keys = pc.if_else(empties, pa.scalar(None, keys.type), keys)
        return Messages(
            numbers,
            values,
            keys,
            topics,
            batch.column(_FILE) if _FILE in schema.names else None,
            batch.column(_RECORD) if _RECORD in schema.names else None,
            end,
            refused,
        )

    def _write(self, batch: pa.RecordBatch) -> pa.Array:
        """Return rows as JSON objects."""
        if not write.is_ready():
            compile_beside()
            text = _object((f"c{n}", field) for n, field in enumerate(batch.schema))
            return self._run(batch, {"v": text})["v"].cast(pa.large_binary())
        columns = [write.as_column(batch.column(n), field) for n, field in enumerate(batch.schema)]
        wanted = {
            f"v{n}": _or_null(_json_text(f"c{n}", batch.schema.field(n)))
            for n, known in enumerate(columns)
            if not known
        }
        found = self._run(batch, wanted) if wanted else {}
        known = [column or write.raw_column(found[f"v{n}"]) for n, column in enumerate(columns)]
        return write.write_objects(batch.schema.names, known, batch.num_rows)

    def _keys(self, batch: pa.RecordBatch) -> pa.Array | None:
        """Return the keys as binary; None if there are none, or if DuckDB writes them."""
        fields = [(batch.column(name), batch.schema.field(name)) for name in self._key]
        if len(fields) == 1 and not self._is_enveloped:
            kind = fields[0][1].type
            is_easy = _is_text(kind) or pa.types.is_integer(kind)
            return fields[0][0].cast(pa.string()).cast(pa.binary()) if is_easy else None
        if not fields or not write.is_ready():
            return None
        columns = [column for values, field in fields if (column := write.as_column(values, field)) is not None]
        if len(columns) < len(fields):
            return None
        keys = write.write_objects(self._key, columns, batch.num_rows).cast(pa.binary())
        if self._is_upsert:
            for values, _ in fields:
                keys = pc.if_else(values.is_null(), pa.scalar(None, pa.binary()), keys)
        return keys

    def _run(self, batch: pa.RecordBatch, expressions: Mapping[str, str]) -> dict[str, pa.Array]:
        """Return the text of each expression over the columns `c0`, `c1` and so on."""
        # Names differ in case only, perhaps, which DuckDB cannot tell apart.
        columns = [_without_zone(unsliced(column)) for column in batch.columns]
        renamed = pa.Table.from_arrays(columns, names=[f"c{n}" for n in range(len(columns))])
        self._connection.register("rows", renamed)
        try:
            wanted = ", ".join(f"{expression} AS {name}" for name, expression in expressions.items())
            found = self._connection.execute(f"SELECT {wanted} FROM rows").to_arrow_table()  # noqa: S608
        finally:
            self._connection.unregister("rows")
        return {name: found.column(name).combine_chunks() for name in expressions}

    def _key_text(self, schema: pa.Schema) -> str:
        fields = [(f"c{schema.get_field_index(name)}", schema.field(name)) for name in self._key]
        if len(fields) == 1 and not self._is_enveloped:
            return _plain_text(*fields[0])
        text = _object(fields)
        if self._is_upsert:
            some_null = " OR ".join(f"{name} IS NULL" for name, _ in fields)
            text = f"CASE WHEN {some_null} THEN NULL ELSE {text} END"
        return text

    def _topic_text(self, schema: pa.Schema) -> str:
        pieces = []
        for text, column in split_template(self._topic):
            pieces.append(_quoted(text))
            if column:
                pieces.append(_plain_text(f"c{schema.get_field_index(column)}", schema.field(column)))
        return " || ".join(pieces)  # null if one of them is

    def _check_columns(self, schema: pa.Schema) -> None:
        missing = [name for name in (*self._key, *template_columns(self._topic)) if name not in schema.names]
        if missing:
            raise SchemaError(
                f"the rows have no column {missing[0]!r}, which the key or the topic needs",
                hint=f"The rows have {', '.join(schema.names)}.",
            )


# -- expressions --------------------------------------------------------------------------------------


def _without_zone(column: pa.Array) -> pa.Array:
    """Return a column of times in UTC without the zone, which DuckDB formats faster. The values stay as they are."""
    kind = column.type
    return column.cast(pa.timestamp(kind.unit)) if pa.types.is_timestamp(kind) and kind.tz else column


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _object(fields: Iterable[tuple[str, pa.Field]]) -> str:
    """Return the text of an object with these columns."""
    pieces: list[str] = []
    before = "{"
    for column, field in fields:
        name = json.dumps(field.name, ensure_ascii=False)
        pieces += [_quoted(f"{before}{name}:"), _or_null(_json_text(column, field))]
        before = ","
    return f"concat({', '.join([*pieces, _quoted('}' if pieces else '{}')])})"


def _or_null(text: str) -> str:
    return f"coalesce({text}, 'null')"


def _json_text(x: str, field: pa.Field, depth: int = 0) -> str:
    """Return the expression for the JSON text of a value; null for null."""
    kind = field.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        quoted = f"CAST(to_json({x}) AS VARCHAR)"
        return (
            f"CASE WHEN json_valid({x}) THEN {x} WHEN {x} IS NOT NULL THEN {quoted} END" if is_json(field) else quoted
        )
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return _text(x, kind)
    if pa.types.is_floating(kind):
        words = f"WHEN isnan({x}) THEN '\"NaN\"' WHEN {x} > 0 THEN '\"Infinity\"' ELSE '\"-Infinity\"'"
        # As a JSON value it is written faster than as text; a narrow one would get the digits of a wide one.
        text = f"CAST({f'to_json({x})' if pa.types.is_float64(kind) else x} AS VARCHAR)"
        return f"CASE WHEN {x} IS NULL THEN NULL WHEN isfinite({x}) THEN {text} {words} END"
    if pa.types.is_nested(kind) and _is_simple(field):
        return f"CAST(to_json({x}) AS VARCHAR)"
    if _is_list(kind):
        element = f"e{depth}"
        inner = _or_null(_json_text(element, kind.value_field, depth + 1))
        return f"'[' || array_to_string(list_transform({x}, lambda {element}: {inner}), ',') || ']'"
    if pa.types.is_struct(kind):
        inner = _object((f"struct_extract({x}, {_quoted(part.name)})", part) for part in kind)
        return f"CASE WHEN {x} IS NOT NULL THEN {inner} END"
    if pa.types.is_map(kind):
        element = f"e{depth}"
        key = f"CAST(to_json(CAST({element}.key AS VARCHAR)) AS VARCHAR)"
        inner = _or_null(_json_text(f"{element}.value", kind.item_field, depth + 1))
        pairs = f"list_transform(map_entries({x}), lambda {element}: {key} || ':' || {inner})"
        return f"'{{' || array_to_string({pairs}, ',') || '}}'"
    if pa.types.is_null(kind):
        return "CAST(NULL AS VARCHAR)"
    return f"CAST(to_json({_text(x, kind)}) AS VARCHAR)"


def _plain_text(x: str, field: pa.Field) -> str:
    """Return the expression for a value as it stands in a key or in a topic's name: JSON, without quotes."""
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if _is_text(kind):
        return x
    if pa.types.is_nested(kind) or pa.types.is_floating(kind):
        return _json_text(x, field)
    return _text(x, kind)


def _text(x: str, kind: pa.DataType) -> str:
    """Return the expression for the text of a value that is no number of floating point and has no parts."""
    if pa.types.is_timestamp(kind):
        # A column of its own has lost its zone already, see `_without_zone`.
        utc = f"({x} AT TIME ZONE 'UTC')" if kind.tz and not _COLUMN.fullmatch(x) else x
        if kind.unit in ("s", "ms"):  # else DuckDB takes them for nanoseconds, which reach from 1677 to 2262 only
            utc = f"CAST({utc} AS TIMESTAMP)"
        return f"strftime({utc}, '%Y-%m-%dT%H:%M:%S.%f{'Z' if kind.tz else ''}')"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return f"base64({x})"
    if pa.types.is_decimal(kind) and kind.precision == kind.scale:  # DuckDB writes .05, which is no JSON
        return f"regexp_replace(CAST({x} AS VARCHAR), '^-?', '\\00')"
    return f"CAST({x} AS VARCHAR)"


def _is_simple(field: pa.Field) -> bool:
    """Whether DuckDB's own JSON of a value is exact: lists and structs of texts, whole numbers and truth values."""
    kind = field.type
    if _is_list(kind):
        return _is_simple(kind.value_field)
    if pa.types.is_struct(kind):
        return all(_is_simple(part) for part in kind)
    return bool(_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)) and not is_json(field)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
