"""MySQL's binary JSON as the text that MySQL prints: `{"a": 1, "b": [1.5, null]}`."""

from __future__ import annotations

import base64
import json
import struct
from decimal import Decimal

SMALL_OBJECT, LARGE_OBJECT, SMALL_ARRAY, LARGE_ARRAY, LITERAL = range(5)
INT16, UINT16, INT32, UINT32, INT64, UINT64, DOUBLE, STRING = range(5, 13)
OPAQUE = 15
MAX_DEPTH = 100  # of MySQL itself

_LITERALS = {0: "null", 1: "true", 2: "false"}
_INLINE = {INT16: "<h", UINT16: "<H"}
_INLINE_LARGE = {INT16: "<h", UINT16: "<H", INT32: "<i", UINT32: "<I"}
_NUMBERS = {INT16: "<h", UINT16: "<H", INT32: "<i", UINT32: "<I", INT64: "<q", UINT64: "<Q"}
_OPAQUE_DECIMAL, _OPAQUE_DATE, _OPAQUE_TIME, _OPAQUE_TIMES = 246, 10, 11, (7, 12)


def to_text(data: memoryview) -> str:
    """Return a JSON value as text.

    Raises:
        ValueError: the bytes are no binary JSON.
    """
    if not len(data):
        return "null"  # what a replica makes of an empty value
    out: list[str] = []
    try:
        _value(data[0], data[1:], out, 0)
    except (struct.error, IndexError, UnicodeDecodeError, ArithmeticError) as error:
        raise ValueError(f"binary JSON cannot be read: {error}") from error
    return "".join(out)


def _value(kind: int, data: memoryview, out: list[str], depth: int) -> None:
    if kind <= LARGE_ARRAY:
        _container(kind, data, out, depth)
    elif kind == LITERAL:
        out.append(_literal(data[0]))
    elif kind in _NUMBERS:
        out.append(str(struct.unpack_from(_NUMBERS[kind], data)[0]))
    elif kind == DOUBLE:
        out.append(_double(struct.unpack_from("<d", data)[0]))
    elif kind == STRING:
        size, at = _length(data)
        out.append(_quote(bytes(_cut(data, at, size)).decode()))
    elif kind == OPAQUE:
        size, at = _length(data[1:])
        out.append(_opaque(data[0], _cut(data, 1 + at, size)))
    else:
        raise ValueError(f"binary JSON has a value of the unknown type {kind}")


def _container(kind: int, data: memoryview, out: list[str], depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise ValueError(f"binary JSON is nested deeper than {MAX_DEPTH}")
    is_large = kind in (LARGE_OBJECT, LARGE_ARRAY)
    is_object = kind in (SMALL_OBJECT, LARGE_OBJECT)
    number, width = ("<I", 4) if is_large else ("<H", 2)
    inline = _INLINE_LARGE if is_large else _INLINE
    count, size = struct.unpack_from(number + number[1], data)
    if size > len(data):
        raise ValueError(f"binary JSON is cut off: {len(data)} of {size} bytes")
    data = data[:size]
    keys = 2 * width
    values = keys + (count * (width + 2) if is_object else 0)
    if values + count * (width + 1) > size:
        raise ValueError("binary JSON has more members than bytes")
    out.append("{" if is_object else "[")
    for i in range(count):
        if i:
            out.append(", ")
        if is_object:
            place = keys + i * (width + 2)
            at, length = struct.unpack_from(number, data, place)[0], struct.unpack_from("<H", data, place + width)[0]
            out.append(_quote(bytes(_cut(data, at, length)).decode()) + ": ")
        place = values + i * (width + 1)
        one = data[place]
        if one == LITERAL:
            out.append(_literal(data[place + 1]))
        elif one in inline:
            out.append(str(struct.unpack_from(inline[one], data, place + 1)[0]))
        else:
            at = struct.unpack_from(number, data, place + 1)[0]
            if at >= size or at < values:
                raise ValueError("binary JSON points outside of itself")
            _value(one, data[at:], out, depth + 1)
    out.append("}" if is_object else "]")


def _cut(data: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(data):
        raise ValueError("binary JSON is cut off")
    return data[at : at + size]


def _length(data: memoryview) -> tuple[int, int]:
    """Read a length of seven bits per byte; return it and the place behind it."""
    size = 0
    for i in range(5):
        size |= (data[i] & 0x7F) << (7 * i)
        if not data[i] & 0x80:
            return size, i + 1
    raise ValueError("binary JSON has a length of more than five bytes")


def _literal(byte: int) -> str:
    if byte not in _LITERALS:
        raise ValueError(f"binary JSON has the unknown literal {byte}")
    return _LITERALS[byte]


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _double(value: float) -> str:
    """Return a number as MySQL prints it: the shortest digits that give it back, 0.000000000000001 but 1e-16."""
    text = repr(value)
    if "n" in text:
        raise ValueError(f"binary JSON holds {text}")
    number = Decimal(text)
    exponent = number.adjusted()
    if value == 0.0 or (exponent in range(-4, 15) and "e" not in text):
        return text
    if exponent in range(-15, 15):
        return f"{number:f}"
    sign, digits, _ = number.as_tuple()
    figures = "".join(map(str, digits)).rstrip("0")
    rest = f".{figures[1:]}" if len(figures) > 1 else ""
    return f"{'-' if sign else ''}{figures[0]}{rest}e{exponent}"


def _opaque(kind: int, data: memoryview) -> str:
    if kind == _OPAQUE_DECIMAL:
        return _decimal(data)
    if kind in (_OPAQUE_DATE, *_OPAQUE_TIMES, _OPAQUE_TIME):
        packed = struct.unpack_from("<q", data)[0]
        minus = "-" if packed < 0 else ""
        packed = abs(packed)
        micros, whole = packed & 0xFFFFFF, packed >> 24
        clock = f"{whole & 63:02}.{micros:06}"
        clock = f"{whole >> 6 & 63:02}:{clock}"
        if kind == _OPAQUE_TIME:
            return f'"{minus}{whole >> 12 & 1023:02}:{clock}"'
        date = whole >> 17
        days = f"{(date >> 5) // 13:04}-{(date >> 5) % 13:02}-{date & 31:02}"
        return f'"{days}"' if kind == _OPAQUE_DATE else f'"{days} {whole >> 12 & 31:02}:{clock}"'
    return f'"base64:type{kind}:{base64.b64encode(bytes(data)).decode()}"'


def _decimal(data: memoryview) -> str:
    """Return a DECIMAL value: precision, scale, then groups of nine digits."""
    precision, scale, body = data[0], data[1], bytearray(data[2:])
    is_negative = body[0] < 128
    if is_negative:
        body = bytearray(byte ^ 255 for byte in body)
    body[0] ^= 128
    at, digits = 0, ""
    bytes_of = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
    whole = precision - scale
    groups = [whole % 9, *[9] * (whole // 9), *[9] * (scale // 9), scale % 9]
    for group in groups:
        width = bytes_of[group]
        if at + width > len(body):
            raise ValueError("binary JSON has a decimal that is cut off")
        if group:
            digits += f"{int.from_bytes(body[at : at + width], 'big'):0{group}}"
        at += width
    text = (digits[:whole].lstrip("0") or "0") + (f".{digits[whole:]}" if scale else "")
    return f"-{text}" if is_negative else text
