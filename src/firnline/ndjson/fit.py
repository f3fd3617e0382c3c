"""Fit parsed values to columns, or say that they do not fit.

Fit is strict and lossless:

- string: JSON strings; numbers and booleans as they are written in JSON. While a column is new, strings alone.
- int32, int64: numbers written without fraction and exponent, in range. `1.0` does not fit.
- float64, float32: numbers. Integers must be exact; fractions are rounded to the nearest double (for float32:
  then to the nearest float). Overflow, and a number other than 0 that would become 0, do not fit.
- decimal: numbers, or strings that spell a JSON number, that need no rounding.
- boolean: `true`, `false`.
- timestamp: RFC 3339 strings (`T`, `t` or a space), converted to UTC; without offset taken as UTC; a date alone is
  midnight UTC. Finer than microseconds, a leap second and hour 24 do not fit.
- date: `YYYY-MM-DD`, years 0001 to 9999.
- binary: canonical, padded base64.
- json: any value, as JSON text without spaces; numbers and duplicate keys as written. `null` is null.
- list, map, struct: arrays, objects, objects.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np

from firnline.ndjson import nodes as k
from firnline.ndjson.slow import Number, Object, dump
from firnline.ndjson.tree import Node

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_TIME = re.compile(
    r"[Tt ]([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])(?:\.([0-9]+))?([Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
)


class MisfitError(Exception):
    """The value does not fit its column."""


def _to_any_string(value: Any, _: Node) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    raise MisfitError


def _to_string(value: Any, _: Node) -> str:
    if type(value) is not str:
        raise MisfitError
    return value


def _to_raw(value: Any, _: Node) -> str:
    return dump(value)


def _to_bool(value: Any, _: Node) -> bool:
    if not isinstance(value, bool):
        raise MisfitError
    return value


def _to_int(value: Any, node: Node) -> int:
    if type(value) is not Number or not value.is_integer or len(value) > 20:
        raise MisfitError
    number, top = int(value), 1 << (63 if node.kind == k.INT64 else 31)
    if not -top <= number < top:
        raise MisfitError
    return number


def exact_float(text: Number) -> float:
    """Return the double of a number. Raises MisfitError when more than the last digit would be lost."""
    if len(text) > 400 and text.is_integer:
        raise MisfitError
    number = float(text)
    if math.isinf(number):
        raise MisfitError
    if text.is_integer:
        if int(number) != int(text):
            raise MisfitError
    elif number == 0 and any(digit in "123456789" for digit in re.split("[eE]", text)[0]):
        raise MisfitError
    return number


def _to_float(value: Any, node: Node) -> float:
    if type(value) is not Number:
        raise MisfitError
    number = exact_float(value)
    if node.kind == k.FLOAT64:
        return number
    with np.errstate(over="ignore", under="ignore"):
        short = float(np.float32(number))
    if math.isinf(short) or (short == 0 and number != 0) or (value.is_integer and short != number):
        raise MisfitError
    return short


def _to_decimal(value: Any, node: Node) -> Decimal:
    if type(value) is not Number and (type(value) is not str or not _NUMBER.fullmatch(value)):
        raise MisfitError
    precision, scale = node.field.type.precision, node.field.type.scale
    try:
        sign, digits, exponent = Decimal(value).as_tuple()
    except InvalidOperation:
        raise MisfitError from None  # an exponent beyond all bounds
    text = "".join(map(str, digits)).lstrip("0")
    short = text.rstrip("0")
    if not short:
        return Decimal(0).scaleb(-scale)
    power = int(exponent) + len(text) - len(short)
    if power < -scale or len(short) + power > precision - scale:
        raise MisfitError
    return Decimal((sign, tuple(map(int, short + "0" * (power + scale))), -scale))


def _days(text: str) -> int:
    match = _DATE.fullmatch(text)
    if not match:
        raise MisfitError
    try:
        return int(np.datetime64(text, "D").astype(np.int64)) if match[1] != "0000" else _refuse()
    except ValueError:
        raise MisfitError from None


def _refuse() -> int:
    raise MisfitError


def _to_date(value: Any, _: Node) -> int:
    if type(value) is not str:
        raise MisfitError
    return _days(value)


def _to_timestamp(value: Any, _: Node) -> int:
    if type(value) is not str:
        raise MisfitError
    seconds = _days(value[:10]) * 86_400
    if len(value) == 10:
        return seconds * 1_000_000
    match = _TIME.fullmatch(value, 10)
    if not match:
        raise MisfitError
    hour, minute, second, fraction, offset = match.groups()
    seconds += int(hour) * 3600 + int(minute) * 60 + int(second)
    if offset and offset not in "Zz":
        shift = int(offset[1:3]) * 3600 + int(offset[4:6]) * 60
        seconds -= shift if offset[0] == "+" else -shift
    fraction = (fraction or "").ljust(6, "0")
    if fraction[6:].strip("0"):
        raise MisfitError
    return seconds * 1_000_000 + int(fraction[:6])


def _to_binary(value: Any, _: Node) -> bytes:
    if type(value) is not str:
        raise MisfitError
    try:
        data = base64.b64decode(value.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        raise MisfitError from None
    if base64.b64encode(data).decode() != value:
        raise MisfitError
    return data


def _element(value: Any, node: Node) -> Any:
    if value is None:
        if node.required:
            raise MisfitError
        return None
    return fit(value, node)


def _to_list(value: Any, node: Node) -> list[Any]:
    if type(value) is not list:
        raise MisfitError
    return [_element(item, node.children[0]) for item in value]


def _to_map(value: Any, node: Node) -> list[tuple[str, Any]]:
    if type(value) is not Object:
        raise MisfitError
    return [(key, _element(item, node.children[1])) for key, item in value.last().items()]


def _to_struct(value: Any, node: Node) -> dict[str, Any]:
    """Fit a struct inside a list or a map, where nothing can be rescued by itself."""
    if type(value) is not Object:
        raise MisfitError
    fields = value.last()
    if any(item is not None and key not in node.by_name for key, item in fields.items()):
        raise MisfitError
    return {name: _element(fields.get(name), child) for name, child in node.by_name.items()}


_FITTERS: dict[int, Callable[[Any, Node], Any]] = {
    k.STRUCT: _to_struct,
    k.LIST: _to_list,
    k.MAP: _to_map,
    k.STRING: _to_string,
    k.ANY_STRING: _to_any_string,
    k.RAW: _to_raw,
    k.BINARY: _to_binary,
    k.BOOL: _to_bool,
    k.INT64: _to_int,
    k.INT32: _to_int,
    k.FLOAT64: _to_float,
    k.FLOAT32: _to_float,
    k.DECIMAL: _to_decimal,
    k.TIMESTAMP: _to_timestamp,
    k.DATE: _to_date,
}


def fit(value: Any, node: Node) -> Any:
    """Return the Python value that Arrow takes for this node; null must be handled before.

    Raises:
        MisfitError: the value does not fit.
    """
    return _FITTERS[node.kind](value, node)
