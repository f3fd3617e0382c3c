"""How the types of PostgreSQL become Arrow types, and text values become Arrow arrays.

Values come as PostgreSQL's text: the stream and the rows of a snapshot have the same, so both give the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import DamagedError
from firnline.sources.postgres import kernel as k

MICROS = pa.timestamp("us")
MICROS_UTC = pa.timestamp("us", "UTC")
MAX_DIGITS = 38  # of a decimal128
_HEADER = 4  # bytes that PostgreSQL adds to a type modifier

# Types of PostgreSQL by number: their name, and their Arrow type. All others are read as text.
_PLAIN: dict[int, tuple[str, pa.DataType]] = {
    16: ("boolean", pa.bool_()), 17: ("bytea", pa.binary()), 18: ('"char"', pa.string()), 19: ("name", pa.string()),
    20: ("bigint", pa.int64()), 21: ("smallint", pa.int16()), 23: ("integer", pa.int32()), 25: ("text", pa.string()),
    26: ("oid", pa.int64()), 700: ("real", pa.float32()), 701: ("double precision", pa.float64()),
    1082: ("date", pa.date32()), 1083: ("time", pa.time64("us")), 1114: ("timestamp", MICROS),
    1184: ("timestamptz", MICROS_UTC), 114: ("json", pa.string()), 3802: ("jsonb", pa.string()),
    2950: ("uuid", pa.string()), 1266: ("timetz", pa.string()), 1186: ("interval", pa.string()),
    790: ("money", pa.string()), 142: ("xml", pa.string()), 869: ("inet", pa.string()), 650: ("cidr", pa.string()),
    829: ("macaddr", pa.string()), 774: ("macaddr8", pa.string()), 3614: ("tsvector", pa.string()),
    3615: ("tsquery", pa.string()), 600: ("point", pa.string()), 601: ("lseg", pa.string()), 602: ("path", pa.string()),
    603: ("box", pa.string()), 604: ("polygon", pa.string()), 628: ("line", pa.string()), 718: ("circle", pa.string()),
    3904: ("int4range", pa.string()), 3906: ("numrange", pa.string()), 3908: ("tsrange", pa.string()),
    3910: ("tstzrange", pa.string()), 3912: ("daterange", pa.string()), 3926: ("int8range", pa.string()),
    3220: ("pg_lsn", pa.string()), 27: ("tid", pa.string()), 28: ("xid", pa.int64()),
}  # fmt: skip
_ARRAYS = {
    1000: "boolean[]", 1001: "bytea[]", 1005: "smallint[]", 1007: "integer[]", 1009: "text[]", 1014: "char[]",
    1015: "varchar[]", 1016: "bigint[]", 1021: "real[]", 1022: "double precision[]", 1115: "timestamp[]",
    1182: "date[]", 1183: "time[]", 1185: "timestamptz[]", 1231: "numeric[]", 2951: "uuid[]", 199: "json[]",
    3807: "jsonb[]", 1041: "inet[]", 1187: "interval[]",
}  # fmt: skip
_SIZED = {1042: "char", 1043: "varchar", 1560: "bit", 1562: "varbit"}
_NUMERIC = 1700


@dataclass(frozen=True, slots=True)
class NativeType:
    """A type of PostgreSQL."""

    name: str
    arrow: pa.DataType
    is_known: bool = True


def native_type(oid: int, modifier: int, names: dict[int, str]) -> NativeType:
    """Return the type of a column. `names` has the types that the stream named, which are read as text."""
    if oid == _NUMERIC:
        return _numeric(modifier)
    if oid in _PLAIN:
        return NativeType(*_PLAIN[oid])
    if oid in _ARRAYS:
        return NativeType(_ARRAYS[oid], pa.string())
    if oid in _SIZED:
        size = modifier if oid in (1560, 1562) else modifier - _HEADER
        return NativeType(f"{_SIZED[oid]}({size})" if modifier > 0 else _SIZED[oid], pa.string())
    return NativeType(names.get(oid, f"type {oid}"), pa.string(), is_known=False)


def _numeric(modifier: int) -> NativeType:
    if modifier < _HEADER:
        return NativeType("numeric", pa.string())
    precision, scale = ((modifier - _HEADER) >> 16) & 0xFFFF, (modifier - _HEADER) & 0x7FF
    if scale >= 0x400:
        scale -= 0x800
    name = f"numeric({precision},{scale})"
    if precision > MAX_DIGITS or scale < 0 or scale > precision:
        return NativeType(name, pa.string())
    return NativeType(name, pa.decimal128(precision, scale))


@dataclass(frozen=True, slots=True)
class Converted:
    """The values of a column, and those of them that do not fit its type, with their rows."""

    values: pa.Array
    odd: dict[int, str]


def convert(texts: pa.StringArray, kind: pa.DataType) -> Converted:
    """Convert text values to a type. A value that does not fit (`infinity`, a date before year 1) is null and odd.

    Raises:
        DamagedError: the text is not UTF-8, or no value of this type at all.
    """
    if not len(texts):
        return Converted(pa.array([], kind), {})
    if pa.types.is_string(kind):
        _check_utf8(texts)
        return Converted(texts, {})
    converter = _converter(kind)
    try:
        return Converted(converter(texts), {})
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _convert_one_by_one(texts, kind, converter)


def _convert_one_by_one(
    texts: pa.StringArray, kind: pa.DataType, converter: Callable[[pa.StringArray], pa.Array]
) -> Converted:
    """Convert in halves until the odd values are found: there are few, or a column has little else."""
    odd: dict[int, str] = {}

    def parts(start: int, end: int) -> list[pa.Array]:
        try:
            return [converter(texts.slice(start, end - start))]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if end - start == 1:
                if texts[start].is_valid:
                    odd[start] = _text(texts, start)
                return [pa.nulls(1, kind)]
            middle = (start + end) // 2
            return [*parts(start, middle), *parts(middle, end)]

    return Converted(pa.concat_arrays(parts(0, len(texts))), odd)


def _text(texts: pa.StringArray, row: int) -> str:
    try:
        return str(texts[row].as_py())
    except UnicodeDecodeError as error:
        raise DamagedError(f"a value is not UTF-8: {error}") from error


def _check_utf8(texts: pa.StringArray) -> None:
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid as error:
        raise DamagedError(f"a value is not UTF-8: {error}") from error


def _converter(kind: pa.DataType) -> Callable[[pa.StringArray], pa.Array]:
    if pa.types.is_boolean(kind):
        return _to_bool
    if pa.types.is_binary(kind):
        return _to_bytes
    if kind == MICROS_UTC:
        return _to_utc
    if pa.types.is_time64(kind):
        return _to_time
    return lambda texts: pc.cast(texts, kind)


def _to_bool(texts: pa.StringArray) -> pa.Array:
    valid = pc.fill_null(pc.is_in(texts, pa.array(["t", "f"])), True)
    if not pc.all(pc.or_(valid, pc.is_null(texts)), min_count=0).as_py():
        raise pa.ArrowInvalid("no boolean")
    return pc.if_else(pc.is_null(texts), pa.scalar(None, pa.bool_()), pc.equal(texts, "t"))


def _to_utc(texts: pa.StringArray) -> pa.Array:
    """Convert `2024-01-01 12:00:00.5+00`: sessions use UTC."""
    if not pc.all(pc.ends_with(texts, "+00"), min_count=0).as_py():
        raise pa.ArrowInvalid("no time stamp in UTC")
    return pc.cast(pc.cast(pc.utf8_slice_codeunits(texts, 0, -3), MICROS), MICROS_UTC)


def _to_time(texts: pa.StringArray) -> pa.Array:
    """Convert `12:00:00.5`."""
    return pc.cast(pc.cast(pc.binary_join_element_wise("1970-01-01", texts, " "), MICROS), pa.time64("us"))


def _to_bytes(texts: pa.StringArray) -> pa.Array:
    """Convert `\\x0aff`."""
    if texts.offset:
        texts = pa.concat_arrays([texts])
    validity, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[: len(texts) + 1]
    text = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    out = np.empty(max(1, (int(ends[-1]) - int(ends[0])) // 2), np.uint8)
    out_ends = np.empty(len(texts) + 1, np.int32)
    if k.decode_hex(text, ends, out, out_ends) < 0:
        raise pa.ArrowInvalid("no bytea")
    buffers = [validity, pa.py_buffer(out_ends), pa.py_buffer(out)]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers, null_count=texts.null_count)
