"""Encodes Arrow columns for COPY in PostgreSQL's binary format, column by column with Arrow's own kernels.

A tuple is the number of its fields, then for each field its length in bytes (-1: null) and its value, in network byte
order. Every column becomes an array of such fields, and the arrays are joined row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.sinks.encoding import encode_json

SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)  # no flags, no extension
TRAILER = b"\xff\xff"
NULL = b"\xff\xff\xff\xff"

_UNIX_MICROS = 946_684_800_000_000  # from 1970 to 2000, where PostgreSQL counts from
_UNIX_DAYS = 10_957
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1
_INTEGERS = {"int2": pa.int16(), "int4": pa.int32(), "int8": pa.int64()}
_JSONB_VERSION = b"\x01"


@dataclass(frozen=True, slots=True)
class Encoded:
    """The fields of one column: arrays of bytes that are joined row by row.

    `bad` says which values the column's type cannot hold; None if it holds all.
    """

    parts: Sequence[pa.Array | pa.Scalar]
    bad: pa.Array | None = None


def constant(value: bytes) -> pa.Scalar:
    """Return a field that has the same value in all rows."""
    return pa.scalar(_length(len(value)) + value, pa.binary())


def join_rows(columns: Sequence[Encoded], constants: Sequence[pa.Scalar] = ()) -> pa.Buffer:
    """Return the tuples of rows, ready to be sent; constants come last."""
    count = pa.scalar((len(columns) + len(constants)).to_bytes(2, "big"), pa.binary())
    parts = [part for column in columns for part in column.parts]
    joined = pc.binary_join_element_wise(count, *parts, *constants, pa.scalar(b"", pa.binary()))
    data = joined.buffers()[2]
    return data if data is not None else pa.py_buffer(b"")


def encode(column: pa.Array, wire: str) -> Encoded:
    """Encode a column for a type, where `columns.find_way` says `direct`."""
    return _ENCODERS[wire](_plain(column))


def text_of(column: pa.Array) -> pa.Array:
    """Return the values as text, as PostgreSQL reads them; nested ones as JSON."""
    plain = _plain(column)
    if pa.types.is_nested(plain.type):
        return json_text(plain)
    return plain if pa.types.is_string(plain.type) else plain.cast(pa.string())


def json_text(column: pa.Array) -> pa.Array:
    """Return the values as JSON text; a null stays null. Text is taken for JSON already."""
    if pa.types.is_string(column.type):
        return column
    return pc.if_else(column.is_valid(), encode_json(column).cast(pa.string()), pa.scalar(None, pa.string()))


def _plain(column: pa.Array) -> pa.Array:
    """Return the column without dictionary and in the usual layout of text and bytes."""
    if isinstance(column, pa.DictionaryArray):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    return column


# -- fields -----------------------------------------------------------------------------------------------


def _length(size: int) -> bytes:
    return size.to_bytes(4, "big", signed=True)


def _fixed(values: npt.NDArray[Any], valid: pa.Array | None, bad: pa.Array | None = None) -> Encoded:
    """Return the fields of values that all have the same size: an array in network order, or rows of bytes."""
    count = len(values)
    raw = np.ascontiguousarray(values).view(np.uint8).reshape(count, -1) if count else np.empty((0, 1), np.uint8)
    size = raw.shape[1]
    fields = np.empty((count, 4 + size), np.uint8)
    fields[:, :4] = np.frombuffer(_length(size), np.uint8)
    fields[:, 4:] = raw
    whole = pa.FixedSizeBinaryArray.from_buffers(pa.binary(4 + size), count, [None, pa.py_buffer(fields)])
    array = whole.cast(pa.binary())
    return Encoded([array if valid is None else pc.if_else(valid, array, pa.scalar(NULL, pa.binary()))], bad)


def _variable(column: pa.Array, prefix: bytes = b"") -> Encoded:
    """Return the fields of text or bytes, each after a prefix."""
    sizes = pc.add(pc.binary_length(column), len(prefix)).fill_null(-1)
    lengths = sizes.to_numpy(zero_copy_only=False).astype(">i4")
    heads = pa.FixedSizeBinaryArray.from_buffers(pa.binary(4), len(column), [None, pa.py_buffer(lengths)])
    parts: list[pa.Array | pa.Scalar] = [heads.cast(pa.binary())]
    data = column.cast(pa.binary())
    if prefix:
        data = pc.binary_join_element_wise(pa.scalar(prefix, pa.binary()), data, pa.scalar(b"", pa.binary()))
    parts.append(data.fill_null(b"") if data.null_count else data)
    return Encoded(parts)


def _valid(column: pa.Array) -> pa.Array | None:
    return column.is_valid() if column.null_count else None


def _numbers(column: pa.Array) -> npt.NDArray[Any]:
    """Return the values of a column of numbers; nulls as 0."""
    filled = column.fill_null(0) if column.null_count else column
    values: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return values


def _outside(column: pa.Array, lowest: int, highest: int) -> pa.Array | None:
    """Return which integers lie outside a range; None if all lie inside."""
    ends = pc.min_max(column)
    low, high = ends["min"].as_py(), ends["max"].as_py()
    if low is None or (low >= lowest and high <= highest):
        return None
    values = _numbers(column)
    return pa.array((values < lowest) | (values > highest))


# -- types ------------------------------------------------------------------------------------------------


def _encode_bool(column: pa.Array) -> Encoded:
    return _fixed(_numbers(column.cast(pa.uint8())), _valid(column))


def _integer_encoder(wire: str) -> Callable[[pa.Array], Encoded]:
    kind = _INTEGERS[wire]
    width = kind.bit_width

    def encode_integers(column: pa.Array) -> Encoded:
        bad = None
        if pa.types.is_floating(column.type):
            values = _numbers(column).astype(np.float64)
            unfit = ~np.isfinite(values) | (np.trunc(values) != values) | (np.abs(values) >= 2.0 ** (width - 1))
            bad = pa.array(unfit) if unfit.any() else None
            column = pa.array(np.where(unfit, 0, values).astype(np.int64), mask=column.is_null().to_numpy(False))
        elif width < 64 or column.type == pa.uint64():
            bad = _outside(column, -(2 ** (width - 1)), 2 ** (width - 1) - 1)
        values = _numbers(column)
        return _fixed(values.astype(f">i{width // 8}"), _valid(column), bad)

    return encode_integers


def _encode_float4(column: pa.Array) -> Encoded:
    values = _numbers(column)
    with np.errstate(over="ignore"):
        small = values.astype(np.float32)
    unfit = np.isinf(small) & np.isfinite(values.astype(np.float64))
    return _fixed(small.astype(">f4"), _valid(column), pa.array(unfit) if unfit.any() else None)


def _encode_float8(column: pa.Array) -> Encoded:
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    return _fixed(_numbers(column).astype(">f8"), _valid(column))


def _encode_text(column: pa.Array) -> Encoded:
    return _variable(text_of(column))


def _encode_date(column: pa.Array) -> Encoded:
    days = column.cast(pa.date32()).cast(pa.int32())
    bad = _outside(days, -(2**31) + _UNIX_DAYS + 1, 2**31 - 1)
    return _fixed((_numbers(days) - np.int32(_UNIX_DAYS)).astype(">i4"), _valid(column), bad)


def _encode_timestamp(column: pa.Array) -> Encoded:
    """Encode moments as microseconds; finer ones are cut off. A date is its midnight."""
    if pa.types.is_date(column.type):
        column = column.cast(pa.date32()).cast(pa.timestamp("s"))
    micros, bad = _micros(column, column.type.unit)
    low = _outside(micros, _LOWEST + _UNIX_MICROS + 1, _HIGHEST)
    with np.errstate(over="ignore"):
        moved = (_numbers(micros) - _UNIX_MICROS).astype(">i8")
    return _fixed(moved, _valid(column), _either(bad, low))


def _micros(column: pa.Array, unit: str) -> tuple[pa.Array, pa.Array | None]:
    """Return times as microseconds, and which of them are too large for that."""
    raw = column.cast(pa.int32()).cast(pa.int64()) if column.type.bit_width == 32 else column.cast(pa.int64())
    per_second = _PER_SECOND[unit]
    if per_second > 1_000_000:
        values = np.floor_divide(_numbers(raw), per_second // 1_000_000)
        return pa.array(values, mask=raw.is_null().to_numpy(False)), None
    factor = 1_000_000 // per_second
    if factor == 1:
        return raw, None
    bad = _outside(raw, -(_HIGHEST // factor), _HIGHEST // factor)
    with np.errstate(over="ignore"):
        return pa.array(_numbers(raw) * factor, mask=raw.is_null().to_numpy(False)), bad


def _encode_time(column: pa.Array) -> Encoded:
    micros, bad = _micros(column, column.type.unit)
    return _fixed(_numbers(micros).astype(">i8"), _valid(column), bad)


def _encode_interval(column: pa.Array) -> Encoded:
    micros, bad = _micros(column, column.type.unit)
    fields = np.zeros((len(column), 16), np.uint8)  # microseconds, days, months
    fields[:, :8] = _numbers(micros).astype(">i8").view(np.uint8).reshape(-1, 8)
    return _fixed(fields, _valid(column), bad)


def _either(a: pa.Array | None, b: pa.Array | None) -> pa.Array | None:
    return b if a is None else a if b is None else pc.or_(a, b)


def _encode_numeric(column: pa.Array) -> Encoded:
    """Encode integers and decimals as digits to the base of 10,000, with as many groups as the type may need."""
    if pa.types.is_integer(column.type):
        column = column.cast(pa.decimal128(20))
    precision, scale = column.type.precision, column.type.scale
    limbs, negative = _limbs(column)
    fraction = -(-scale // 4)
    _multiply(limbs, 10 ** (4 * fraction - scale))  # so that the decimal point is between two groups
    groups = -(-(precision - scale) // 4) + fraction
    pairs = groups + groups % 2  # two groups come from each division
    digits = np.zeros((len(column), pairs), ">i2")
    for at in range(pairs - 2, -1, -2):
        rest = _divide(limbs, 100_000_000)
        digits[:, at], digits[:, at + 1] = rest // 10_000, rest % 10_000
    fields = np.empty((len(column), 8 + 2 * pairs), np.uint8)
    head = np.array([pairs, pairs - fraction - 1, 0, scale], ">i2")
    fields[:, :8] = head.view(np.uint8)
    fields[:, 4] = np.where(negative, 0x40, 0)
    fields[:, 8:] = digits.view(np.uint8).reshape(len(column), -1)
    return _fixed(fields, _valid(column))


def _limbs(column: pa.Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return the absolute unscaled values of decimals in limbs of 32 bits, lowest first, and which are negative."""
    width = column.type.bit_width // 32
    data = column.buffers()[1]
    raw = np.frombuffer(data, np.uint32)[column.offset * width : (column.offset + len(column)) * width]
    limbs = raw.reshape(-1, width).astype(np.uint64)
    limbs[column.is_null().to_numpy(zero_copy_only=False)] = 0
    negative = limbs[:, -1] >= 2**31
    carry = np.ones(len(column), np.uint64)
    for at in range(width):  # the two's complement
        turned = (limbs[:, at] ^ np.uint64(0xFFFFFFFF)) + carry
        limbs[:, at] = np.where(negative, turned & np.uint64(0xFFFFFFFF), limbs[:, at])
        carry = turned >> np.uint64(32)
    return np.concatenate([limbs, np.zeros((len(column), 1), np.uint64)], axis=1), negative


def _multiply(limbs: npt.NDArray[np.uint64], factor: int) -> None:
    """Multiply in place by a small number."""
    if factor == 1:
        return
    carry = np.zeros(len(limbs), np.uint64)
    for at in range(limbs.shape[1]):
        product = limbs[:, at] * np.uint64(factor) + carry
        limbs[:, at] = product & np.uint64(0xFFFFFFFF)
        carry = product >> np.uint64(32)


def _divide(limbs: npt.NDArray[np.uint64], divisor: int) -> npt.NDArray[np.uint64]:
    """Divide in place by a small number; returns the remainders."""
    rest = np.zeros(len(limbs), np.uint64)
    for at in range(limbs.shape[1] - 1, -1, -1):
        whole = (rest << np.uint64(32)) | limbs[:, at]
        limbs[:, at], rest = whole // np.uint64(divisor), whole % np.uint64(divisor)
    return rest


_ENCODERS: dict[str, Callable[[pa.Array], Encoded]] = {
    "bool": _encode_bool,
    **{wire: _integer_encoder(wire) for wire in _INTEGERS},
    "float4": _encode_float4,
    "float8": _encode_float8,
    "numeric": _encode_numeric,
    "text": _encode_text,
    "bytea": _variable,
    "date": _encode_date,
    "timestamp": _encode_timestamp,
    "time": _encode_time,
    "interval": _encode_interval,
    "json": lambda column: _variable(json_text(column)),
    "jsonb": lambda column: _variable(json_text(column), _JSONB_VERSION),
}
