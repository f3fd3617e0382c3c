"""Single records in Python, exactly: parse them strictly, with numbers as written, and write JSON text again."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from json.encoder import encode_basestring
from typing import Any, TypeVar

MAX_DEPTH = 512

_T = TypeVar("_T")

_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Number(str):
    """A number as it was written."""

    __slots__ = ()

    @property
    def is_integer(self) -> bool:
        return not ("." in self or "e" in self or "E" in self)


class Object:
    """A JSON object with its pairs as they were written."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs

    def last(self) -> dict[str, Any]:
        """Return the fields; of duplicate keys the last wins."""
        return dict(self.pairs)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Hold back Python's cycle collector, which would walk over all parsed records again and again.

    Nothing here makes cycles. Threads that overlap at worst resume it early.
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


def on_fresh_stack(work: Callable[..., _T], *args: Any) -> _T:
    """Call `work`; when the caller stands too deep for its recursion, on the empty stack of another thread."""
    try:
        return work(*args)
    except RecursionError:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work, *args).result()


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
        value = on_fresh_stack(_DECODER.decode, text)
    except (ValueError, RecursionError):
        raise BadRecordError("not-json") from None
    if _SURROGATE.search(raw) and _has_lone_surrogate(value):
        raise BadRecordError("not-json")
    if type(value) is not Object:
        raise BadRecordError("not-an-object")
    return value


class _Mark(str):
    """Punctuation among the values that are still to be written."""

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
