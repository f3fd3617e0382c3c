"""The exact path, in plain Python: parses single records strictly, fits their values to columns, writes JSON text.

A value fits a column only if nothing is lost:

- string: JSON strings; numbers and booleans as they are written in JSON. While a column is new, only strings.
- int32, int64: numbers written without fraction and exponent, in range. `1.0` does not fit.
- float64, float32: numbers. Integers must be exact; fractions are rounded to the nearest double (for float32:
  then to the nearest float). Overflow, and a number other than 0 that would become 0, do not fit.
- decimal: numbers, or strings that spell a JSON number, that need no rounding.
- boolean: `true`, `false`.
- timestamp: RFC 3339 strings (`T`, `t` or a space), converted to UTC; without an offset they are in UTC; a date alone
  is midnight UTC. Finer than microseconds, more than nine digits, a leap second, hour 24 and UTC years other than
  0001 to 9999 do not fit. While a column is new, a date alone does not fit.
- date: `YYYY-MM-DD`, years 0001 to 9999.
- binary: canonical, padded base64.
- json: any value, as JSON text without spaces; numbers and duplicate keys as written. `null` is null.
- list, map, struct: arrays, objects, objects.
"""

from __future__ import annotations

import base64
import binascii
import gc
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from decimal import Decimal, InvalidOperation
from json.encoder import encode_basestring
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from firnline.ndjson import kernel as k
from firnline.ndjson.numbers import FIRST_SECOND, LAST_SECOND
from firnline.ndjson.tree import Node, build_tree

MAX_DEPTH = 512

_T = TypeVar("_T")

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_DATE = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})")
_TIME = re.compile(
    r"[Tt ]([01][0-9]|2[0-3]):([0-5][0-9]):([0-5][0-9])(?:\.([0-9]{1,9}))?([Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
)


# --- parsing and writing -------------------------------------------------------------------------------


class Number(str):
    """A number as it was written."""

    __slots__ = ()

    @property
    def is_integer(self) -> bool:
        return not ("." in self or "e" in self or "E" in self)


class Object:
    """A JSON object: its pairs as written, duplicate keys included."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs

    def last(self) -> dict[str, Any]:
        """Return the fields; of duplicate keys the last wins."""
        return dict(self.pairs)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which would visit all parsed records again and again.

    Parsing creates no cycles. Threads that overlap resume the collector early at worst.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class BadRecordError(Exception):
    """The record cannot become a row; the message is the reason."""


def _refuse_constant(text: str) -> Any:
    raise ValueError(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=Object, parse_int=Number, parse_float=Number, parse_constant=_refuse_constant
)


def _depth(raw: bytes) -> int:
    depth = deepest = 0
    for token in _BRACKETS.findall(raw):
        if token in (b"{", b"["):
            depth += 1
            deepest = max(deepest, depth)
        elif token in (b"}", b"]"):
            depth -= 1
    return deepest


def _has_lone_surrogate(value: Any) -> bool:
    left = [value]
    while left:
        item = left.pop()
        if type(item) is str:
            try:
                item.encode()
            except UnicodeEncodeError:
                return True
        elif type(item) is list:
            left.extend(item)
        elif type(item) is Object:
            for pair in item.pairs:
                left.extend(pair)
    return False


def _on_fresh_stack(function: Callable[..., _T], *args: Any) -> _T:
    """Call a function; if the stack is too deep for its recursion, call it again on the empty stack of a thread."""
    try:
        return function(*args)
    except RecursionError:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, *args).result()


def parse(raw: bytes) -> Object:
    """Return the object on one line.

    Raises:
        BadRecordError: "invalid-utf8", "not-json" or "not-an-object".
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise BadRecordError("invalid-utf8") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _depth(raw) > MAX_DEPTH:
        raise BadRecordError("not-json")
    try:
        value = _on_fresh_stack(_DECODER.decode, text)
    except (ValueError, RecursionError):
        raise BadRecordError("not-json") from None
    if _SURROGATE.search(raw) and _has_lone_surrogate(value):
        raise BadRecordError("not-json")
    if type(value) is not Object:
        raise BadRecordError("not-an-object")
    return value


class _Mark(str):
    """Punctuation between values that are not yet written."""

    __slots__ = ()


def dump(value: Any) -> str:
    """Return the JSON text of a parsed value: no spaces, numbers as written, not escaped to ASCII."""
    out: list[str] = []
    left: list[Any] = [value]
    while left:
        item = left.pop()
        kind = type(item)
        if kind is _Mark or kind is Number:
            out.append(item)
        elif kind is str:
            out.append(encode_basestring(item))
        elif kind is list:
            out.append("[")
            left.append(_Mark("]"))
            for index in range(len(item) - 1, -1, -1):
                left.append(item[index])
                if index:
                    left.append(_Mark(","))
        elif kind is Object:
            out.append("{")
            left.append(_Mark("}"))
            for index in range(len(item.pairs) - 1, -1, -1):
                name, inner = item.pairs[index]
                left.append(inner)
                left.append(_Mark(("," if index else "") + encode_basestring(name) + ":"))
        else:
            out.append("null" if item is None else "true" if item else "false")
    return "".join(out)


# --- fitting -------------------------------------------------------------------------------------------


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
    """Return a number as a double.

    Raises:
        MisfitError: an integer is not exact, or a number overflows or would become 0.
    """
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


def is_timestamp(value: str) -> bool:
    """Return whether a string is a time stamp with date and time that fits a timestamp column."""
    try:
        _timestamp(value)
    except MisfitError:
        return False
    return True


def _to_timestamp(value: Any, node: Node) -> int:
    if type(value) is not str:
        raise MisfitError
    if len(value) == 10 and node.kind == k.TIMESTAMP:
        return _days(value) * 86_400_000_000
    return _timestamp(value)


def _timestamp(value: str) -> int:
    """Return the microseconds since 1970 of a time stamp with date and time."""
    seconds = _days(value[:10]) * 86_400
    match = _TIME.fullmatch(value, 10)
    if not match:
        raise MisfitError
    hour, minute, second, fraction, offset = match.groups()
    seconds += int(hour) * 3600 + int(minute) * 60 + int(second)
    if offset and offset not in "Zz":
        shift = int(offset[1:3]) * 3600 + int(offset[4:6]) * 60
        seconds -= shift if offset[0] == "+" else -shift
    fraction = (fraction or "").ljust(6, "0")
    if fraction[6:].strip("0") or not FIRST_SECOND <= seconds <= LAST_SECOND:
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
    """Fit a struct inside a list or a map, whose fields cannot be rescued one by one."""
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
    k.NEW_TIMESTAMP: _to_timestamp,
    k.DATE: _to_date,
}


def fit(value: Any, node: Node) -> Any:
    """Return the Python value that Arrow accepts for this node; the caller handles null.

    Raises:
        MisfitError: the value does not fit.
    """
    return _FITTERS[node.kind](value, node)


def values_of(column: pa.Field, texts: Iterable[str]) -> pa.Array:
    """Return the values of a column that texts stand for, each read as a JSON string, number or boolean, if it fits."""
    try:
        [node] = build_tree(pa.schema([column]), pa.schema([column]), (column.name,), (), {}).children
    except ValueError:  # a type that no record can have
        return pa.array([], column.type)
    values: list[Any] = []
    for text in texts:
        forms: list[Any] = [text]
        forms += [Number(text)] if _NUMBER.fullmatch(text) else []
        forms += [text == "true"] if text in ("true", "false") else []
        for form in forms:
            with suppress(MisfitError):
                values.append(fit(form, node))
    return pa.array(values, column.type)
