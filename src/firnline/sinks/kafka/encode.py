"""Turns rows into messages, whole columns at a time: JSON values, keys and topics.

DuckDB builds the text of every row with one expression per column, so that every digit of a number is kept:

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

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError
from firnline.options import OP, SEQUENCE
from firnline.schema import is_json
from firnline.sinks.kafka.options import DELETE, split_template, template_columns
from firnline.sinks.shaping import ShapedRows
from firnline.state.keys import encode_keys
from firnline.types import Json

PART_BYTES = 1024 * 1024  # Arrow bytes that are encoded at once
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
    """Encodes rows by the settings of their epoch (`KafkaSinkOptions.own_shape`)."""

    def __init__(self, shape: Mapping[str, Json]) -> None:
        self.shape = shape
        self._key: Sequence[str] = shape["key"]
        self._topic = str(shape["topic"])
        self._is_upsert = shape["write"] == "upsert"
        self._lanes = int(shape["lanes"])
        self._queries: dict[pa.Schema, str] = {}

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
        most = max(1, PART_BYTES * max(1, batch.num_rows) // max(1, batch.nbytes))
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
        keys = self._run(batch, f"SELECT {self._key_text(batch.schema)} AS k FROM rows").column("k")  # noqa: S608
        hashes = encode_keys(pa.table({"k": keys})).murmur3_32()
        return hashes.astype(np.int64) % self._lanes

    def _encode(self, batch: pa.RecordBatch, numbers: pa.Array, end: int) -> Messages:
        query = self._queries.get(batch.schema)
        if query is None:
            query = self._queries[batch.schema] = self._query(batch.schema)
        found = self._run(batch, query)
        names = found.column_names

        def column(name: str) -> pa.Array | None:
            return found.column(name).combine_chunks() if name in names else None

        values, keys, topics = column("v"), column("k"), column("t")
        schema = batch.schema
        assert values is not None
        return Messages(
            numbers,
            values.cast(pa.binary()),
            keys.cast(pa.binary()) if keys is not None else None,
            topics.dictionary_encode() if topics is not None else None,
            batch.column(_FILE) if _FILE in schema.names else None,
            batch.column(_RECORD) if _RECORD in schema.names else None,
            end,
        )

    def _run(self, batch: pa.RecordBatch, query: str) -> pa.Table:
        # Names differ in case only, perhaps, which DuckDB cannot tell apart.
        renamed = pa.Table.from_arrays(
            [_without_zone(column) for column in batch.columns], names=[f"c{n}" for n in range(batch.num_columns)]
        )
        if not batch.num_columns:
            raise SchemaError("the rows have no columns")
        self._connection.register("rows", renamed)
        try:
            return self._connection.execute(query).to_arrow_table()
        finally:
            self._connection.unregister("rows")

    def _query(self, schema: pa.Schema) -> str:
        self._check_columns(schema)
        left_out = (OP, SEQUENCE) if self._is_upsert else ()
        fields = [(f"c{n}", field) for n, field in enumerate(schema) if field.name not in left_out]
        value = _object(fields)
        if self._is_upsert and OP in schema.names:
            value = f"CASE WHEN c{schema.get_field_index(OP)} = '{DELETE}' THEN NULL ELSE {value} END"
        columns = [f"{value} AS v"]
        if self._key:
            columns.append(f"{self._key_text(schema)} AS k")
        if template_columns(self._topic):
            columns.append(f"{self._topic_text(schema)} AS t")
        return f"SELECT {', '.join(columns)} FROM rows"  # noqa: S608

    def _key_text(self, schema: pa.Schema) -> str:
        fields = [(f"c{schema.get_field_index(name)}", schema.field(name)) for name in self._key]
        if len(fields) == 1:
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
        return f"CAST({x} AS VARCHAR)"
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
        return f"strftime({utc}, '%Y-%m-%dT%H:%M:%S.%f{'Z' if kind.tz else ''}')"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return f"base64({x})"
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
