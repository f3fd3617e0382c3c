"""Values of rows as text and as JSON, for sinks that write text; whole columns at a time.

| type | as text | in JSON |
|---|---|---|
| string | as it is | string |
| integers, decimal | digits | number |
| float | shortest digits that give the same number; `nan`, `inf`, `-inf` | number; null for those three |
| boolean | `true`, `false` | true, false |
| date, time | `2026-01-31`, `23:59:59.000000` | string |
| timestamp | `2026-01-31T23:59:59.000000Z`; without `Z` if it has no time zone | string |
| duration | a number in the unit of its type | number |
| binary | the bytes | base64 |
| struct, list, map | its JSON | object, array, object |
| json | as it is | the value itself |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.schema import is_json

_QUOTE, _BACKSLASH, _FIRST_PRINTABLE = 0x22, 0x5C, 0x20
_TEXT = pa.large_string()
_BARE = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_decimal, pa.types.is_duration)  # JSON without quotes


def encode_text(column: pa.Array) -> pa.Array:
    """Return a column as large_binary, with null where it is null; see the module."""
    column = _plain(column)
    kind = column.type
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.large_binary())
    if pa.types.is_nested(kind):
        return pc.if_else(column.is_valid(), encode_json(column), pa.scalar(None, _TEXT)).cast(pa.large_binary())
    return _scalar_text(column).cast(pa.large_binary())


def encode_rows(batch: pa.RecordBatch) -> pa.Array:
    """Return each row as one JSON object, as large_string. A null is written as null."""
    columns = [
        pc.fill_null(column.cast(_TEXT), "null") if is_json(field) else encode_json(column)
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return _object(batch.schema.names, columns)


def encode_json(column: pa.Array) -> pa.Array:
    """Return a column as large_string: the JSON of each value, `null` where it is null."""
    column = _plain(column)
    kind = column.type
    if pa.types.is_struct(kind):
        children = [encode_json(column.field(index)) for index in range(kind.num_fields)]
        text = _object([field.name for field in kind], children) if children else pa.array(["{}"] * len(column), _TEXT)
    elif pa.types.is_map(kind):
        lengths, entries = _flat(column)
        keys = _quoted(_scalar_text(_plain(entries.field(0))))
        text = _joined("{", _lists(lengths, _joined(keys, ":", encode_json(entries.field(1)))), "}")
    elif pa.types.is_nested(kind):
        lengths, values = _flat(column)
        text = _joined("[", _lists(lengths, encode_json(values)), "]")
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        text = _joined('"', _base64(column), '"')
    elif any(fits(kind) for fits in _BARE):
        text = _scalar_text(column)
    elif pa.types.is_floating(kind):
        text = pc.if_else(pc.is_finite(column), _scalar_text(column), pa.scalar("null", _TEXT))
    else:
        text = _quoted(_scalar_text(column))
    return pc.if_else(column.is_valid(), text, pa.scalar("null", _TEXT)) if column.null_count else text


def escape_json(text: pa.Array) -> pa.Array:
    """Escape text for JSON, without the quotes."""
    used = _bytes_of(text)
    if (used == _BACKSLASH).any():
        text = pc.replace_substring(text, "\\", "\\\\")
    if (used == _QUOTE).any():
        text = pc.replace_substring(text, '"', '\\"')
    for code in np.unique(used[used < _FIRST_PRINTABLE]).tolist():
        text = pc.replace_substring(text, chr(code), f"\\u{code:04x}")
    return text


def _plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionary encoding, views and extension types."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type):
        return column.cast(_TEXT)
    if pa.types.is_binary_view(column.type):
        return column.cast(pa.large_binary())
    return column


def _scalar_text(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind):
        text = pc.strftime(column.cast(pa.timestamp(kind.unit)), format="%Y-%m-%dT%H:%M:%S", locale="C").cast(_TEXT)
        return _joined(text, "Z") if kind.tz is not None else text
    if pa.types.is_null(kind):
        return pa.nulls(len(column), _TEXT)
    if pa.types.is_duration(kind):
        column = column.cast(pa.int64())
    return column.cast(_TEXT)


def _object(names: Sequence[str], columns: Sequence[pa.Array]) -> pa.Array:
    """Return one JSON object for each row; the columns are JSON, at least one."""
    labels = escape_json(pa.array(names, _TEXT)).to_pylist()
    parts: list[pa.Array | str] = []
    for number, (label, column) in enumerate(zip(labels, columns, strict=True)):
        parts += [f'{"," if number else "{"}"{label}":', column]
    return _joined(*parts, "}")


def _quoted(text: pa.Array) -> pa.Array:
    return _joined('"', escape_json(text), '"')


def _joined(*parts: pa.Array | str) -> pa.Array:
    """Return the parts of each row joined; null if one of them is null."""
    scalars = [pa.scalar(part, _TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar("", _TEXT))


def _flat(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the number of values of each list or map, 0 for null, and all values in order."""
    if pa.types.is_map(column.type):
        column = column.cast(pa.list_(pa.struct([column.type.key_field, column.type.item_field])))
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64())
    return lengths, column.flatten()


def _lists(lengths: pa.Array, values: pa.Array) -> pa.Array:
    """Return the values of each list, joined by commas."""
    offsets = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return pc.binary_join(lists, pa.scalar(",", _TEXT))


def _base64(column: pa.Array) -> pa.Array:
    """Return bytes in base64."""
    import duckdb  # a library of this size is loaded by those who write binary columns alone

    with duckdb.connect(":memory:", config={"threads": "1"}) as connection:
        connection.register("binaries", pa.table({"b": column.cast(pa.binary())}))
        found = connection.execute("SELECT to_base64(b) AS t FROM binaries").to_arrow_table()
    return found.column("t").combine_chunks().cast(_TEXT)


def _bytes_of(text: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of a large_string column, without copying them."""
    _, offsets, data = text.buffers()
    if data is None or not len(text):
        return np.zeros(0, np.uint8)
    edges = np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1]
    return np.frombuffer(data, np.uint8)[edges[0] : edges[-1]]
