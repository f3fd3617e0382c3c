"""Fits Arrow values of any type to columns: a value is cast only if it does not change.

- int32, int64: integers in range, floats and decimals without a fraction.
- float64, float32: numbers that are exact, decimals that the shortest text of the float spells.
- decimal: integers and decimals that need no rounding, floats whose shortest text needs none.
- string: strings; numbers, booleans, times and dates as text.
- timestamp: time stamps in whole microseconds (without a zone they are in UTC), dates as midnight UTC; years 1 to 9999.
- date: dates, time stamps at midnight UTC; years 1 to 9999.
- json: any value as JSON text.
- list, map, struct: the same, if all inner values fit. Fields of a struct are fitted one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.schema import is_column_name_ok, is_json, json_field
from firnline.sources.files.formats.arrow_json import (
    join_fields,
    json_texts,
    key_text,
    plain,
    scalar_texts,
)

MICROS = pa.timestamp("us", "UTC")
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # 0001-01-01 and 9999-12-31, in days since 1970
_DAY_MICROS = 86_400_000_000
Mask = np.ndarray[Any, Any]

_NARROW = (pa.int8(), pa.int16(), pa.uint8(), pa.uint16())


# --- the columns that a file's types become ----------------------------------------------------------------


def own_field(name: str, kind: pa.DataType) -> pa.Field | None:
    """Return the column for values of an Arrow type; None for the null type, which has no values."""
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.json":
            return json_field(name)
        return own_field(name, kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return own_field(name, kind.value_type)
    if pa.types.is_struct(kind):
        children = [own_field(child.name, child.type) for child in kind if is_column_name_ok(child.name)]
        known = [child for child in _differing(children) if child is not None]
        return pa.field(name, pa.struct(known)) if known else json_field(name)
    if pa.types.is_map(kind):
        return _own_map(name, kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = own_field("item", kind.value_type)
        return None if item is None else pa.field(name, pa.list_(item))
    own = _own_scalar(kind)
    return None if own is None else pa.field(name, own)


def _differing(children: list[pa.Field | None]) -> Iterator[pa.Field | None]:
    """Yield the fields whose names differ in more than case."""
    seen: set[str] = set()
    for child in children:
        if child is not None and child.name.lower() not in seen:
            seen.add(child.name.lower())
            yield child


def _own_map(name: str, kind: Any) -> pa.Field | None:
    key, value = own_field("key", kind.key_type), own_field("value", kind.item_type)
    if key is None or value is None:
        return None
    if key.type == pa.string():
        return pa.field(name, pa.map_(pa.string(), value))
    return pa.field(name, pa.list_(pa.field("item", pa.struct([key, value]))))


def _own_scalar(kind: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if types.is_null(kind):
        return None
    if kind in _NARROW:
        return pa.int32()
    if kind in (pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_()):
        return kind
    if kind == pa.uint32() or types.is_duration(kind):
        return pa.int64()
    if kind == pa.uint64():
        return pa.decimal128(20, 0)
    if kind == pa.float16():
        return pa.float32()
    if types.is_decimal(kind) and kind.precision <= 38 and 0 <= kind.scale <= kind.precision:
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_date(kind):
        return pa.date32()
    if types.is_timestamp(kind):
        return MICROS
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.string()  # texts, times of day, decimals with too many digits


# --- fitting -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Misfits:
    """The values of one field that do not fit."""

    path: str
    field: pa.Field | None  # the column; None for a field that is no column
    mask: Mask
    texts: pa.Array  # the JSON text of all values of the field
    values: pa.Array


@dataclass(slots=True)
class Fitted:
    """Values of a field: those that fit, null for the others, and what is rescued instead."""

    values: pa.Array
    misfit: Mask | None = None  # the whole value does not fit
    rescued: pa.Array | None = None  # JSON text of what does not fit inside a struct
    missing: Mask | None = None  # a required field is null
    found: list[Misfits] = field(default_factory=list)


def fit(values: pa.Array, column: pa.Field, path: str) -> Fitted:
    """Fit values to a column. Nulls fit."""
    values = plain(values)
    kind = column.type
    if is_json(column):
        return Fitted(json_texts(values))
    if pa.types.is_null(values.type):
        return Fitted(pa.nulls(len(values), kind))
    if pa.types.is_struct(kind) and pa.types.is_struct(values.type):
        return _fit_struct(values, kind, path)
    if pa.types.is_nested(kind) or pa.types.is_nested(values.type):
        return _fit_lists(values, kind)
    fitted, misfit = (values, None) if values.type == kind else _fit_scalars(values, kind)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        fitted, misfit = _within_years(fitted, misfit)
    return Fitted(fitted, misfit)


def add_required(fitted: Fitted, column: pa.Field, present: Mask | None = None) -> None:
    """Note the nulls of a column that must not be null."""
    if column.nullable:
        return
    nulls = _nulls(fitted.values)
    if present is not None:
        nulls &= present
    if nulls.any():
        fitted.missing = nulls if fitted.missing is None else fitted.missing | nulls


def _fit_struct(values: Any, kind: Any, path: str) -> Fitted:
    """Fit the fields of structs one by one."""
    columns = dict(zip((child.name for child in values.type), values.flatten(), strict=True))
    out = Fitted(values)
    present = ~_nulls(values)
    arrays, parts = [], []
    for child in kind:
        if child.name not in columns:
            inner = Fitted(pa.nulls(len(values), child.type))
        else:
            column = columns.pop(child.name)
            inner = fit(column, child, f"{path}{child.name}.")
            parts += rescue(inner, child, f"{path}{child.name}", column)
        add_required(inner, child, present)
        arrays.append(inner.values)
        out.found += inner.found
        if inner.missing is not None:
            out.missing = inner.missing if out.missing is None else out.missing | inner.missing
    for name, column in columns.items():
        unknown, part = rescue_unknown(f"{path}{name}", name, column)
        if unknown is not None:
            out.found.append(unknown)
            parts.append(part)
    mask = None if present.all() else pa.array(~present)
    out.values = pa.StructArray.from_arrays(arrays, fields=list(kind), mask=mask)
    if parts:
        out.rescued = join_fields(parts)
    return out


def rescue(fitted: Fitted, column: pa.Field, path: str, values: pa.Array) -> list[pa.Array]:
    """Return the `"key":value` texts of what does not fit a column, and note it."""
    key = key_text(column.name)
    if fitted.misfit is not None and fitted.misfit.any():
        texts = json_texts(values)
        fitted.found.append(Misfits(path, column, fitted.misfit, texts, values))
        wanted = pc.if_else(pa.array(fitted.misfit), texts, pa.scalar(None, pa.string()))
        return [pc.binary_join_element_wise(key, wanted, "")]
    if fitted.rescued is not None:
        return [pc.binary_join_element_wise(key, fitted.rescued, "")]
    return []


def rescue_unknown(path: str, name: str, values: pa.Array) -> tuple[Misfits | None, pa.Array]:
    """Return what a field that is no column holds, and its `"key":value` texts."""
    present = ~_nulls(values)
    texts = json_texts(values) if present.any() else pa.nulls(len(values), pa.string())
    found = Misfits(path, None, present, texts, values) if present.any() else None
    return found, pc.binary_join_element_wise(key_text(name), texts, "")


def _fit_lists(values: Any, kind: Any) -> Fitted:
    """Fit lists and maps. A value fits if everything inside it does."""
    is_map = pa.types.is_map(values.type)
    if pa.types.is_map(kind) and is_map:
        keys = _inner(values, values.keys, pa.field("key", pa.string(), nullable=False))
        items = _inner(values, values.items, kind.item_field)
        offsets = _whole_offsets(values)
        made = pa.MapArray.from_arrays(offsets, keys.values, items.values, type=kind)
        bad = _rows_of(values, keys) | _rows_of(values, items)
        return _without(made, bad)
    if pa.types.is_list(kind) and (is_map or pa.types.is_list(values.type)):
        inside = pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"]) if is_map else values.values
        items = _inner(values, inside, kind.value_field)
        made = pa.ListArray.from_arrays(_whole_offsets(values), items.values, type=kind)
        return _without(made, _rows_of(values, items))
    return Fitted(pa.nulls(len(values), kind), ~_nulls(values))


def _inner(lists: Any, values: pa.Array, column: pa.Field) -> Fitted:
    """Fit the elements of lists; one that does not fit in part does not fit."""
    first, last = lists.offsets[0].as_py(), lists.offsets[len(lists)].as_py()
    fitted = fit(values.slice(first, last - first), column, "")
    add_required(fitted, column)
    parts = [mask for mask in (fitted.misfit, fitted.missing) if mask is not None]
    if fitted.rescued is not None:
        parts.append(fitted.rescued.is_valid().to_numpy(zero_copy_only=False))
    misfit = np.logical_or.reduce(parts) if parts else None
    return Fitted(fitted.values, misfit)


def _whole_offsets(lists: Any) -> pa.Array:
    """Return the offsets of lists, from 0 on, with null for a null list."""
    offsets = pc.subtract(lists.offsets, lists.offsets[0])
    nulls = np.append(_nulls(lists), False)
    return pc.if_else(pa.array(nulls), pa.scalar(None, pa.int32()), offsets) if nulls.any() else offsets


def _rows_of(lists: Any, fitted: Fitted) -> Mask:
    """Return which lists hold an element that does not fit."""
    bad = np.zeros(len(lists), np.bool_)
    if fitted.misfit is not None and fitted.misfit.any():
        offsets = lists.offsets.to_numpy() - lists.offsets[0].as_py()
        before = np.concatenate([[0], np.cumsum(fitted.misfit)])
        bad = before[offsets[1:]] > before[offsets[:-1]]
    return bad & ~_nulls(lists)


def _without(values: pa.Array, bad: Mask) -> Fitted:
    if not bad.any():
        return Fitted(values)
    return Fitted(_null_where(values, bad), bad)


# --- scalars -------------------------------------------------------------------------------------------


def _fit_scalars(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask | None]:
    """Cast scalars of one type to another. Returns the values that fit, and a mask of those that do not."""
    types, old = pa.types, values.type
    if types.is_duration(old):
        values, old = values.cast(pa.int64()), pa.int64()
        if kind == old:
            return values, None
    if types.is_string(kind):
        if types.is_binary(old):
            return _none(values, kind)
        return scalar_texts(values), None
    if types.is_integer(kind) and types.is_integer(old):
        return _where(values, kind, _in_range(values, kind))
    if types.is_integer(kind) and types.is_floating(old):
        return _where(values, kind, _is_whole(values, kind))
    if types.is_floating(kind) and (types.is_integer(old) or types.is_floating(old)):
        return _where(values, kind, _is_exact(values, kind))
    if types.is_floating(kind) and types.is_decimal(old):
        # By way of text: Arrow's own cast is not always the nearest float.
        made = values.cast(pa.string()).cast(kind)
        return _keep_same(values, made, lambda back: _cast_each(back.cast(pa.string()), old)[0])
    if types.is_decimal(kind) and types.is_floating(old):
        return _cast_each(scalar_texts(values), kind)
    if types.is_decimal(kind) and types.is_integer(old):
        return _cast_each(values.cast(pa.decimal256(76, 0)), kind)
    if types.is_decimal(old) and (types.is_decimal(kind) or types.is_integer(kind)):
        return _cast_each(values, kind)
    if types.is_timestamp(kind) and (types.is_timestamp(old) or types.is_date(old)):
        return _cast_each(values if types.is_date(old) else values.cast(pa.timestamp(old.unit, "UTC")), kind)
    if types.is_date(kind) and (types.is_date(old) or types.is_timestamp(old)):
        made = values.cast(kind, safe=False)
        return _keep_same(values, made, lambda back: back.cast(old, safe=False))
    return _none(values, kind)


def _within_years(values: pa.Array, misfit: Mask | None) -> tuple[pa.Array, Mask | None]:
    """Leave out values outside the years 1 to 9999, which the statistics of a table and most readers cannot hold."""
    is_date = pa.types.is_date(values.type)
    unit = 1 if is_date else _DAY_MICROS
    numbers = values.cast(pa.int32() if is_date else pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    bad: Mask = (numbers < _FIRST_DAY * unit) | (numbers >= (_LAST_DAY + 1) * unit)
    if not bad.any():
        return values, misfit
    return _null_where(values, bad), bad if misfit is None else bad | misfit


def _nulls(values: pa.Array) -> Mask:
    valid: Mask = values.is_valid().to_numpy(zero_copy_only=False)
    return ~valid


def _null_where(values: pa.Array, bad: Mask) -> pa.Array:
    order = np.where(bad, -1, np.arange(len(values)))
    return values.take(pa.array(order, mask=bad))


def _none(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask | None]:
    present = ~_nulls(values)
    return pa.nulls(len(values), kind), present if present.any() else None


def _where(values: pa.Array, kind: pa.DataType, fits: Mask) -> tuple[pa.Array, Mask | None]:
    """Cast the values that fit, without further checks."""
    bad = ~fits & ~_nulls(values)
    if bad.any():
        values = pc.if_else(pa.array(bad), pa.scalar(None, values.type), values)
    return values.cast(kind, safe=False), bad if bad.any() else None


def _numbers(values: pa.Array) -> Mask:
    kind = pa.float32() if values.type == pa.float16() else values.type
    numbers: Mask = values.cast(kind).fill_null(0).to_numpy(zero_copy_only=False)
    return numbers


def _in_range(values: pa.Array, kind: pa.DataType) -> Mask:
    numbers, info = _numbers(values), np.iinfo(kind.to_pandas_dtype())
    old = np.iinfo(numbers.dtype)
    fits = np.ones(len(numbers), np.bool_)
    if old.min < info.min:
        fits &= numbers >= info.min
    if old.max > info.max:
        fits &= numbers <= numbers.dtype.type(info.max)
    return fits


def _is_whole(values: pa.Array, kind: pa.DataType) -> Mask:
    numbers = _numbers(values).astype(np.float64)
    top = 2.0**63 if kind == pa.int64() else 2.0**31
    with np.errstate(invalid="ignore"):
        fits: Mask = (np.floor(numbers) == numbers) & (numbers >= -top) & (numbers < top)
    return fits


def _is_exact(values: pa.Array, kind: pa.DataType) -> Mask:
    numbers = _numbers(values)
    with np.errstate(over="ignore", invalid="ignore"):
        floats = numbers.astype(kind.to_pandas_dtype())
        if numbers.dtype.kind == "f":
            same: Mask = (floats.astype(numbers.dtype) == numbers) | np.isnan(numbers)
            return same
        top = 2.0 ** (64 if numbers.dtype.kind == "u" else 63)
        inside = np.abs(floats.astype(np.float64)) < top
        back = np.where(inside, floats, 0).astype(numbers.dtype)
        edge = (floats == -top) & (numbers == np.iinfo(numbers.dtype).min)
        fits: Mask = (inside & (back == numbers)) | edge
    return fits


def _keep_same(values: pa.Array, made: pa.Array, back: Callable[[pa.Array], pa.Array]) -> tuple[pa.Array, Mask | None]:
    """Keep the values that are the same when they are cast back."""
    same = pc.equal(back(made), values).fill_null(False).to_numpy(zero_copy_only=False)
    bad = ~same & ~_nulls(values)
    if not bad.any():
        return made, None
    return pc.if_else(pa.array(bad), pa.scalar(None, made.type), made), bad


def _cast_each(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask | None]:
    """Cast with Arrow's checks. Values that fail are found by halving, so that the others are cast together."""
    bad = np.zeros(len(values), np.bool_)
    pieces: list[pa.Array] = []
    left = [(0, len(values))]
    while left:
        start, size = left.pop()
        try:
            pieces.append(values.slice(start, size).cast(kind))
        except pa.ArrowInvalid:
            if size == 1:
                bad[start] = True
                pieces.append(pa.nulls(1, kind))
                continue
            half = size // 2
            left += [(start + half, size - half), (start, half)]
    whole = pa.concat_arrays(pieces) if pieces else pa.array([], kind)
    return whole, bad if bad.any() else None
