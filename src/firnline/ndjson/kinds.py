"""Which type a new column gets: count the kinds of its values, then let the kind that nearly all of them have win.

While a column is new, a value of another kind turns it into JSON text, which holds every value and tells its kind. The
kinds are counted per field over all tasks of the epoch, and `choose` decides by the totals alone. So the type depends
neither on the order of records and files nor on how they were dealt out to tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.ndjson.fit import MisfitError, exact_float
from firnline.ndjson.slow import Number
from firnline.ndjson.tree import Kinds, depth_of, inner_path
from firnline.schema import RESCUED_COLUMN, is_json, json_field

MAX_NESTING = 32  # objects and arrays nested deeper become json columns
ODD_SHARE = 20  # one value in so many may be of another kind, and is rescued
FEW_FRACTIONS = 1000  # one number in so many may have a fraction in a column of integers, and is rescued

# What is counted. `large` are integers among `int64` that no double holds; `number` are values of a float64 column, of
# which those that are `whole` may be integers.
COUNTED = ("boolean", "int64", "large", "float64", "number", "whole", "string", "array", "object")

Counts = dict[str, Counter[str]]  # by path

_FIRST = {'"': "string", "t": "boolean", "f": "boolean", "{": "object", "[": "array"}
_EMPTY = pa.array(["[]", "{}"])  # say nothing about a column's type
_SURE_DIGITS = 18  # integers of so many characters fit int64


# -- counting -----------------------------------------------------------------------------------------


class KindCounter:
    """Counts the kinds of values in every field whose type is not fixed."""

    def __init__(self, base: pa.Schema, frozen: Collection[str], hidden: Collection[str]) -> None:
        self._base = {field.name: field for field in base if field.name in frozen}
        self._hidden = frozenset({RESCUED_COLUMN, *hidden})
        self.counts: Counts = {}

    def add(self, batch: pa.RecordBatch) -> None:
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if field.name not in self._hidden:
                self._add(field.name, field, self._base.get(field.name), column)

    def to_json(self) -> dict[str, dict[str, int]]:
        return {path: dict(counts) for path, counts in self.counts.items()}

    def _add(self, path: str, field: pa.Field, base: pa.Field | None, values: pa.Array) -> None:
        if base is not None and base.type == field.type:
            return
        if base is None:
            found = _count(field, values)
            if not found:
                return  # only nulls
            self.counts.setdefault(path, Counter()).update(found)
        if pa.types.is_struct(field.type):
            known = {f.name: f for f in base.type} if base is not None and pa.types.is_struct(base.type) else {}
            for child, column in zip(field.type, values.flatten(), strict=True):
                self._add(inner_path(path, child.name), child, known.get(child.name), column)
        elif pa.types.is_list(field.type):
            item = None if base is None else base.type.value_field
            self._add(inner_path(path, ""), field.type.value_field, item, values.flatten())
        elif pa.types.is_map(field.type):
            item = None if base is None else base.type.item_field
            entries = pa.ListArray.from_arrays(values.offsets, values.items)  # without what lies outside a slice
            self._add(inner_path(path, ""), field.type.item_field, item, entries.flatten())


def _count(field: pa.Field, values: pa.Array) -> Counter[str]:
    present = len(values) - values.null_count
    if not present:
        return Counter()
    if is_json(field):
        return _count_json(values)
    kind = field.type
    if pa.types.is_struct(kind):
        return +Counter(object=_not_empty(values))
    if pa.types.is_list(kind):
        return +Counter(array=pc.sum(pc.greater(pc.list_value_length(values), 0)).as_py())
    if pa.types.is_boolean(kind):
        return Counter(boolean=present)
    if pa.types.is_floating(kind):
        found = values.drop_null().to_numpy(zero_copy_only=False)
        return Counter(number=present, whole=int(np.count_nonzero(np.floor(found) == found)))
    if pa.types.is_integer(kind):
        return Counter(int64=present, large=_large(values.drop_null()))
    return Counter(string=present)


def _not_empty(objects: pa.Array) -> int:
    """How many objects have a field that is not null."""
    filled = np.zeros(len(objects), np.bool_)
    for column in objects.flatten():
        filled |= column.is_valid().to_numpy(zero_copy_only=False)
    return int(np.count_nonzero(filled))


def _large(integers: pa.Array) -> int:
    """How many integers no double holds."""
    found = integers.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if found.size == 0 or max(abs(int(found.min())), abs(int(found.max()))) <= 1 << 53:
        return 0
    doubles = found.astype(np.float64)
    exact = (doubles < 2.0**63) & (np.where(doubles < 2.0**63, doubles, 0).astype(np.int64) == found)
    return int(found.size - np.count_nonzero(exact))


def _count_json(values: pa.Array) -> Counter[str]:
    """The kinds of values by their JSON text."""
    texts = values.filter(pc.invert(pc.is_in(values, _EMPTY))).drop_null()
    firsts = pc.value_counts(pc.utf8_slice_codeunits(texts, 0, 1)).to_pylist()
    found: Counter[str] = Counter()
    for item in firsts:
        found[_FIRST.get(item["values"], "")] += int(item["counts"])
    if found.pop("", 0):
        found.update(_count_numbers(texts.filter(pc.match_substring_regex(texts, "^[-0-9]"))))
    return found


def _count_numbers(texts: pa.Array) -> Counter[str]:
    fractions = pc.match_substring_regex(texts, "[.eE]")
    integers = texts.filter(pc.invert(fractions))
    short = pc.less_equal(pc.binary_length(integers), _SURE_DIGITS)
    sure = integers.filter(short).cast(pa.int64())
    found = Counter(float64=pc.sum(fractions).as_py() or 0, int64=len(sure), large=_large(sure))
    for text in integers.filter(pc.invert(short)).to_pylist():
        found.update(_count_integer(text))
    return +found


def _count_integer(text: str) -> Counter[str]:
    """A long integer: within int64, or a double, or only text."""
    try:
        exact_float(Number(text))
        is_exact = True
    except MisfitError:
        is_exact = False
    if len(text) <= len(str(-(1 << 63))) and -(1 << 63) <= int(text) < 1 << 63:
        return Counter(int64=1) if is_exact else Counter(int64=1, large=1)
    return Counter(float64=1) if is_exact else Counter(string=1)


def add_counts(counts: Counts, more: Mapping[str, Mapping[str, int]]) -> None:
    """Add the counts of a task."""
    for path, found in more.items():
        counts.setdefault(path, Counter()).update(found)


# -- choosing -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """The kind of a field, how many values it had, and how many of them are of another kind and will be rescued.

    Without a kind, numbers must be counted again: a float64 column does not tell its integers from its fractions.
    """

    kind: str | None
    values: int
    odd: int


def choose(path: str, counts: Mapping[str, int]) -> Choice:
    """Return the kind that a new field gets.

    The first of these that all but one value in twenty fit: boolean, number, array, object, text. Numbers are int64
    while at most one in a thousand has a fraction, an exponent or more digits than int64 holds; else float64, unless
    more of them fit int64. Text holds numbers and booleans as they are written in JSON. Failing all, json.
    """
    counted = {kind: int(counts.get(kind, 0)) for kind in COUNTED}
    total = sum(counted.values()) - counted["large"] - counted["whole"]
    most = total // ODD_SHARE
    nested = counted["array"] + counted["object"]
    integers, floats, whole = counted["int64"], counted["float64"] + counted["number"], counted["whole"]
    few = (integers + floats) // FEW_FRACTIONS
    if whole and (floats - whole <= few or counted["large"]):
        return Choice(None, total, 0)
    as_floats = integers - counted["large"] + floats
    is_integer = floats <= few or integers > as_floats
    numbers = ("int64", integers) if is_integer else ("float64", as_floats)
    candidates = [
        ("boolean", counted["boolean"]),
        numbers,
        ("array", counted["array"]),
        ("object", counted["object"]),
        ("string", total - nested),
    ]
    too_deep = depth_of(path) >= MAX_NESTING
    for kind, fitting in candidates:
        if fitting and total - fitting <= most and not (too_deep and kind in ("array", "object")):
            return Choice(kind, total, total - fitting)
    return Choice("json", total, 0)


# -- applying -----------------------------------------------------------------------------------------

_TYPES = {"boolean": pa.bool_(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}


def scalar_type(kind: str) -> pa.DataType:
    """The type of a column of scalars."""
    return _TYPES[kind]


def json_paths(schema: pa.Schema) -> set[str]:
    """Return the paths of the fields that are JSON text."""
    return {path for field in schema for path in _json_paths(field.name, field)}


def _json_paths(path: str, field: pa.Field) -> Iterator[str]:
    if is_json(field):
        yield path
    elif pa.types.is_struct(field.type):
        for child in field.type:
            yield from _json_paths(inner_path(path, child.name), child)
    elif pa.types.is_list(field.type):
        yield from _json_paths(inner_path(path, ""), field.type.value_field)


def settle(schema: pa.Schema, kinds: Kinds) -> pa.Schema:
    """Return the schema with every field as its kind says; one whose inner fields are not known yet is left out."""
    return pa.schema([f for f in (_settled(field.name, field, kinds) for field in schema) if f is not None])


def _settled(path: str, field: pa.Field, kinds: Kinds) -> pa.Field | None:
    kind = kinds.get(path)
    if kind == "json":
        return json_field(field.name, field.nullable)
    if kind in _TYPES:
        return pa.field(field.name, _TYPES[kind], field.nullable)
    if pa.types.is_struct(field.type):
        inner = [_settled(inner_path(path, child.name), child, kinds) for child in field.type]
        known = [child for child in inner if child is not None]
        return field.with_type(pa.struct(known)) if known and kind != "array" else None
    if pa.types.is_list(field.type):
        item = _settled(inner_path(path, ""), field.type.value_field, kinds)
        return field.with_type(pa.list_(item)) if item is not None and kind != "object" else None
    if pa.types.is_map(field.type):
        item = _settled(inner_path(path, ""), field.type.item_field, kinds)
        return field.with_type(pa.map_(pa.string(), item)) if item is not None else None
    return None if kind in ("array", "object") else field
