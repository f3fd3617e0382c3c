"""The JSON text of Arrow values, column by column."""

from __future__ import annotations

import base64
import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_NOT_NUMBERS = {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}
_UNQUOTED = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_decimal, pa.types.is_duration)
_CONTROLS = "[\x00-\x1f]"
_SHORT = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def plain(values: pa.Array) -> pa.Array:
    """Return values without encodings and extensions: of dictionaries, views and large types the plain type."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain(values.storage)
    if pa.types.is_dictionary(kind):
        return plain(values.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(values))
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return values.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return values.cast(pa.binary())
    if pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return values.cast(pa.list_(kind.value_field))
    return values


def json_texts(values: pa.Array) -> pa.Array:
    """Return the JSON text of every value, null for nulls. Times and dates are ISO texts, bytes are base64."""
    values = plain(values)
    kind = values.type
    if pa.types.is_null(kind):
        return pa.nulls(len(values), pa.string())
    if pa.types.is_struct(kind):
        return _objects(values)
    if pa.types.is_map(kind):
        return _arrays(pa.ListArray.from_arrays(_offsets(values), _entries(values)), values)
    if pa.types.is_list(kind):
        return _arrays(values, values)
    if pa.types.is_binary(kind):
        texts = [None if one is None else _quote(base64.b64encode(one).decode()) for one in values.to_pylist()]
        return pa.array(texts, pa.string())
    if pa.types.is_string(kind):
        return _strings(values)
    return _scalars(values)


def scalar_texts(values: pa.Array) -> pa.Array:
    """Return the text of scalars that are no strings, without quotes."""
    kind = values.type
    if pa.types.is_duration(kind):
        values = values.cast(pa.int64())
    if pa.types.is_timestamp(kind):
        zoned = values.cast(pa.timestamp(kind.unit, "UTC"), safe=False)
        return pc.replace_substring(zoned.cast(pa.string()), " ", "T")
    if pa.types.is_floating(kind):
        if pa.types.is_float16(kind):
            values = values.cast(pa.float32())
        texts = values.cast(pa.string())
        return pc.replace_substring_regex(texts, r"^(-?[0-9]+)$", r"\1.0")
    return values.cast(pa.string())


def key_text(name: str) -> str:
    """Return a key with its colon."""
    return f"{_quote(name)}:"


def join_fields(parts: list[pa.Array]) -> pa.Array:
    """Return JSON objects from `"key":value` texts; nulls are left out, and an object without fields is null."""
    inner = parts[0]
    if len(parts) > 1:
        # Not with `null_handling="skip"`: Arrow then drops the rows in which everything is null.
        each = [pc.coalesce(pc.binary_join_element_wise(",", part, ""), pa.scalar("")) for part in parts]
        joined = pc.binary_join_element_wise(*each, "")
        inner = pc.if_else(pc.equal(joined, ""), pa.scalar(None, pa.string()), pc.utf8_slice_codeunits(joined, 1))
    return pc.binary_join_element_wise("{", inner, "}", "")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _scalars(values: pa.Array) -> pa.Array:
    kind = values.type
    texts = scalar_texts(values)
    if pa.types.is_floating(kind):
        for text, quoted in _NOT_NUMBERS.items():
            texts = pc.if_else(pc.equal(texts, text), quoted, texts)
        return texts
    if any(is_kind(kind) for is_kind in _UNQUOTED):
        return texts
    return pc.binary_join_element_wise('"', texts, '"', "")


def _strings(values: pa.Array) -> pa.Array:
    special = pc.any(pc.match_substring_regex(values, '[\\\\"\x00-\x1f]')).as_py()
    texts = values
    if special:
        for character, escaped in _SHORT.items():
            texts = pc.replace_substring(texts, character, escaped)
        odd = pc.match_substring_regex(texts, _CONTROLS)
        if pc.any(odd).as_py():  # other control characters are rare
            return pa.array([None if one is None else _quote(one) for one in values.to_pylist()], pa.string())
    return pc.binary_join_element_wise('"', texts, '"', "")


def _objects(values: pa.Array) -> pa.Array:
    parts = []
    for field, column in zip(values.type, values.flatten(), strict=True):
        texts = pc.coalesce(json_texts(column), pa.scalar("null"))
        parts.append(pc.binary_join_element_wise(key_text(field.name), texts, ""))
    texts = join_fields(parts) if parts else pa.repeat(pa.scalar("{}"), len(values))
    return pc.if_else(values.is_valid(), texts, pa.scalar(None, pa.string()))


def _offsets(values: Any) -> pa.Array:
    return pc.subtract(values.offsets, values.offsets[0])


def _entries(values: Any) -> pa.Array:
    first, last = values.offsets[0].as_py(), values.offsets[len(values)].as_py()
    keys, items = values.keys.slice(first, last - first), values.items.slice(first, last - first)
    return pa.StructArray.from_arrays([keys, items], names=["key", "value"])


def _arrays(lists: Any, values: pa.Array) -> pa.Array:
    first, last = lists.offsets[0].as_py(), lists.offsets[len(lists)].as_py()
    texts = pc.coalesce(json_texts(lists.values.slice(first, last - first)), pa.scalar("null"))
    joined = pc.binary_join(pa.ListArray.from_arrays(_offsets(lists), texts), ",")
    whole = pc.binary_join_element_wise("[", joined, "]", "")
    return pc.if_else(values.is_valid(), whole, pa.scalar(None, pa.string()))
