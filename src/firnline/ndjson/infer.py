"""Infers the types of new columns: by each value while a task reads, then by the kinds of all values of the epoch.

While a task reads, the `Learner` adds a column for every new field. A value of another kind turns such a column into
JSON text, which keeps every value and its kind. Each task counts the kinds per field (`KindCounter`), and `choose`
decides by the totals of all tasks: a column gets the kind that nearly all of its values have. So the type depends
neither on the order of records and files nor on how files were distributed over tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.jit import is_compiled
from firnline.ndjson import kernel as k
from firnline.ndjson import plain
from firnline.ndjson.exact import MisfitError, Number, Object, exact_float, fit, is_timestamp
from firnline.ndjson.tree import Kinds, Node, depth_of, inner_path
from firnline.schema import RESCUED_COLUMN, is_column_name_ok, is_json, json_field

MAX_NESTING = 32  # objects and arrays nested deeper become json columns
ODD_SHARE = 20  # one value in 20 may be of another kind; it is rescued
FEW_FRACTIONS = 1000  # in a column of integers, one number in 1000 may have a fraction; it is rescued

# The kinds counted. `large`: those of `int64` that no double represents exactly. `number`: values of a float64 column,
# which may have been written as integers if they are `whole`.
COUNTED = ("boolean", "int64", "large", "float64", "number", "whole", "timestamp", "string", "array", "object")

Counts = dict[str, Counter[str]]  # by path

_FIRST = {'"': "string", "t": "boolean", "f": "boolean", "{": "object", "[": "array"}
_EMPTY = pa.array(["[]", "{}"])  # these say nothing about a column's type
_SURE_DIGITS = 18  # integers of at most 18 characters fit int64

_NUMBERS = {"int64", "float64"}
_TEXTS = {"timestamp", "string"}
_SCALARS = {"boolean", *_NUMBERS, *_TEXTS}


# --- learning ------------------------------------------------------------------------------------------


def kind_of(value: Any) -> str:
    """Return the kind of a parsed value, as a type name."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if type(value) is list:
        return "array"
    if type(value) is Object:
        return "object"
    if type(value) is not Number:
        return "string"
    if not value.is_integer:
        return "float64"
    if len(value) <= 20 and -(1 << 63) <= int(value) < 1 << 63:
        return "int64"
    try:
        exact_float(value)
    except MisfitError:
        return "string"  # an integer that no number type holds is kept as text
    return "float64"


def wider_kind(value: Any, node: Node) -> str | None:
    """Return the kind of number that would hold a value which does not fit; None if no wider number would.

    It is `int64`, `float64` or `decimal`; for a list, a map or a struct the widest that its values need.
    """
    if node.kind in (k.INT32, k.INT64):
        return kind if (kind := kind_of(value)) in _NUMBERS else None
    if node.kind == k.DECIMAL:
        return "decimal" if type(value) is Number else None
    inner: list[tuple[Any, Node]] = []
    if node.kind == k.LIST and type(value) is list:
        inner = [(item, node.children[0]) for item in value]
    elif node.kind == k.MAP and type(value) is Object:
        inner = [(item, node.children[1]) for item in value.last().values()]
    elif node.kind == k.STRUCT and type(value) is Object and node.by_name.keys() >= value.last().keys():
        inner = [(item, node.by_name[name]) for name, item in value.last().items()]
    kinds: set[str | None] = set()
    for item, child in inner:
        try:
            if item is not None:
                fit(item, child)
        except MisfitError:
            kinds.add(wider_kind(item, child))
    if not kinds or None in kinds:
        return None
    return next(kind for kind in ("float64", "int64", "decimal") if kind in kinds)


class Seen:
    """The kinds of values seen for one field; once a kind is chosen for it, values of other kinds are ignored."""

    __slots__ = ("_chosen", "_timestamps", "depth", "element", "fields", "kinds", "path")

    def __init__(self, depth: int, path: str, chosen: Kinds, timestamps: bool) -> None:
        self.depth = depth
        self.path = path
        self._chosen = chosen
        self._timestamps = timestamps  # tell time stamps from other strings
        self.kinds: set[str] = set()
        self.element: Seen | None = None
        self.fields: dict[str, Seen] = {}

    def add(self, value: Any) -> None:
        kind = kind_of(value)
        if self._timestamps and type(value) is str and is_timestamp(value):
            kind = "timestamp"
        if kind == "null" or not _takes(self._chosen.get(self.path), kind) or is_empty(value):
            return
        self.kinds.add(kind)
        if self.depth >= MAX_NESTING:
            return
        if kind == "array":
            self.element = self.element or self._inner("")
            for item in value:
                self.element.add(item)
        elif kind == "object":
            for name, item in value.last().items():
                self.add_field(name, item)

    def add_field(self, name: str, value: Any) -> None:
        """Watch a field of an object; names that cannot be columns are ignored."""
        seen = self.fields.get(name)
        if seen is None:
            if value is None or not is_column_name_ok(name):
                return
            seen = self.fields[name] = self._inner(name)
        seen.add(value)

    def _inner(self, name: str) -> Seen:
        return Seen(self.depth + 1, inner_path(self.path, name), self._chosen, self._timestamps)

    def known_fields(self) -> list[tuple[pa.Field, int]]:
        """Return the fields of known type, with their sizes; of names that differ only in case, the first."""
        known: dict[str, tuple[pa.Field, int]] = {}
        for name, seen in self.fields.items():
            field = seen.field(name)
            if field is not None:
                known.setdefault(name.lower(), (field, seen.size()))
        return list(known.values())

    def field(self, name: str) -> pa.Field | None:
        """Return the field that can hold all values seen, or None while the type is not known."""
        if not self.kinds:
            return None
        chosen = self._chosen.get(self.path)
        if chosen in _SCALARS:
            return pa.field(name, scalar_type(chosen))
        if self.kinds == _NUMBERS:
            return pa.field(name, pa.float64())
        if self.kinds == _TEXTS:
            return pa.field(name, pa.string())
        if chosen == "json" or len(self.kinds) > 1:
            return json_field(name)
        (kind,) = self.kinds
        if kind in _SCALARS:
            return pa.field(name, scalar_type(kind))
        if self.depth >= MAX_NESTING:
            return json_field(name)
        if kind == "array":
            element = self.element.field("item") if self.element else None
            return None if element is None else pa.field(name, pa.list_(element))
        fields = [field for field, _ in self.known_fields()]
        return pa.field(name, pa.struct(fields)) if fields else None

    def size(self) -> int:
        """Return how many fields would be added."""
        inner = sum(seen.size() for seen in self.fields.values())
        return 1 + inner + (self.element.size() if self.element else 0)


def is_empty(value: Any) -> bool:
    """Return whether a value is `[]` or `{}`, which says nothing about a column's type."""
    return value == [] or (type(value) is Object and not value.pairs)


def _takes(chosen: str | None, kind: str) -> bool:
    """Return whether a value counts for a field of the chosen kind; every value does if none is chosen."""
    if chosen is None or chosen in (kind, "json"):
        return True
    return (chosen == "float64" and kind == "int64") or (chosen == "string" and kind in _SCALARS)


class Learner:
    """Collects values that do not fit the schema, and returns the widened schema.

    Args:
        adds_fields: unknown fields become columns.
        reserved: top-level names that never become columns.
        room: how many fields may still be added, nested ones included.
        chosen: the kinds already chosen by the values of the whole epoch.
        timestamps: new columns of time stamps become timestamp columns.
    """

    def __init__(
        self, root: Node, adds_fields: bool, reserved: frozenset[str], room: int, chosen: Kinds, timestamps: bool
    ) -> None:
        self._root = root
        self._chosen = chosen
        self._timestamps = timestamps
        self._adds_fields = adds_fields
        self._reserved = reserved
        self._room = room
        self._new: dict[int, Seen] = {}  # unknown fields, by the identity of the struct's node
        self._other: dict[int, Seen] = {}  # values that do not fit, by the identity of the node

    def watch(self, record: Object) -> None:
        self._watch_struct(self._root, record, 0)

    def _watch_struct(self, node: Node, value: Object, depth: int) -> None:
        for name, item in value.last().items():
            if item is None:
                continue
            child = node.by_name.get(name)
            if child is not None:
                self._watch(child, item, depth + 1)
            elif self._adds_fields and name.lower() not in node.lower_names:
                if node is self._root and (name in self._reserved or name == RESCUED_COLUMN):
                    continue
                seen = self._new.setdefault(id(node), Seen(depth, node.path, self._chosen, self._timestamps))
                seen.add_field(name, item)

    def _watch(self, node: Node, value: Any, depth: int) -> None:
        if node.kind == k.STRUCT and type(value) is Object:
            self._watch_struct(node, value, depth)
        elif node.kind == k.LIST and type(value) is list:
            for item in value:
                if item is not None:
                    self._watch(node.children[0], item, depth + 1)
        elif node.kind == k.MAP and type(value) is Object:
            for _, item in value.pairs:
                if item is not None:
                    self._watch(node.children[1], item, depth + 1)
        elif not node.frozen:
            try:
                fit(value, node)
            except MisfitError:
                self._other.setdefault(id(node), Seen(depth, node.path, {}, self._timestamps)).add(value)

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema widened by the watched values; the same object if it does not change."""
        if not self._new and not self._other:
            return schema
        fields = self._fields(self._root)
        widened = pa.schema(fields, metadata=schema.metadata)
        return schema if widened.equals(schema, check_metadata=True) else widened

    def _fields(self, node: Node) -> list[pa.Field]:
        out = [self._field(child) for child in node.children]
        seen = self._new.get(id(node))
        for field, size in seen.known_fields() if seen else ():
            if size <= self._room:
                self._room -= size
                out.append(field)
        return out

    def _field(self, node: Node) -> pa.Field:
        field = node.field
        if node.kind == k.STRUCT:
            field = field.with_type(pa.struct(self._fields(node)))
        elif node.kind == k.LIST:
            field = field.with_type(pa.list_(self._field(node.children[0])))
        elif node.kind == k.MAP:
            field = field.with_type(pa.map_(pa.string(), self._field(node.children[1])))
        seen = self._other.get(id(node))
        if seen is None or not seen.kinds:
            return field
        if node.kind == k.INT64 and seen.kinds == {"float64"}:
            return field.with_type(pa.float64())
        if node.kind == k.NEW_TIMESTAMP and seen.kinds == {"string"}:
            return field.with_type(pa.string())
        return json_field(field.name, field.nullable)  # holds every value and its kind, until the kinds are counted


# --- counting ------------------------------------------------------------------------------------------


class KindCounter:
    """Counts the kinds of values in every field whose type is not fixed.

    Without `timestamps`, time stamps count as strings.
    """

    def __init__(
        self, base: pa.Schema, frozen: Collection[str], hidden: Collection[str], timestamps: bool = True
    ) -> None:
        self._timestamps = timestamps
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
            counts = _count(field, values, self._timestamps)
            if not counts:
                return  # only nulls
            self.counts.setdefault(path, Counter()).update(counts)
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


def _count(field: pa.Field, values: pa.Array, timestamps: bool) -> Counter[str]:
    present = len(values) - values.null_count
    if not present:
        return Counter()
    if is_json(field):
        return _count_json(values, timestamps)
    kind = field.type
    if pa.types.is_timestamp(kind):
        return Counter(timestamp=present)
    if pa.types.is_string(kind):
        found = _count_timestamps(values) if timestamps else 0
        return +Counter(timestamp=found, string=present - found)
    if pa.types.is_struct(kind):
        return +Counter(object=_not_empty(values))
    if pa.types.is_list(kind):
        return +Counter(array=pc.sum(pc.greater(pc.list_value_length(values), 0)).as_py())
    if pa.types.is_boolean(kind):
        return Counter(boolean=present)
    if pa.types.is_floating(kind):
        numbers = values.drop_null().to_numpy(zero_copy_only=False)
        return Counter(number=present, whole=int(np.count_nonzero(np.floor(numbers) == numbers)))
    if pa.types.is_integer(kind):
        return Counter(int64=present, large=_large(values.drop_null()))
    return Counter(string=present)


def _count_timestamps(texts: pa.Array, quotes: int = 0) -> int:
    """Return how many texts are time stamps; `quotes` is 1 if they stand in quotes."""
    texts = texts.drop_null()
    if not len(texts):
        return 0
    if not is_compiled(k.count_timestamps):
        return plain.count_timestamps(texts, quotes)
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int32)[texts.offset : texts.offset + len(texts) + 1]
    bytes_ = np.frombuffer(data or b"", np.uint8)
    ends.flags.writeable = bytes_.flags.writeable = False  # numba compiles another version for what can be written
    return int(k.count_timestamps(ends, bytes_, quotes, np.zeros(2 * k.MAX_TIMESTAMP, np.uint8)))


def _not_empty(objects: pa.Array) -> int:
    """Return how many objects have a field that is not null."""
    filled = np.zeros(len(objects), np.bool_)
    for column in objects.flatten():
        filled |= column.is_valid().to_numpy(zero_copy_only=False)
    return int(np.count_nonzero(filled))


def _large(integers: pa.Array) -> int:
    """Return how many integers no double represents exactly."""
    numbers = integers.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if numbers.size == 0 or max(abs(int(numbers.min())), abs(int(numbers.max()))) <= 1 << 53:
        return 0
    doubles = numbers.astype(np.float64)
    exact = (doubles < 2.0**63) & (np.where(doubles < 2.0**63, doubles, 0).astype(np.int64) == numbers)
    return int(numbers.size - np.count_nonzero(exact))


def _count_json(values: pa.Array, timestamps: bool) -> Counter[str]:
    """Count the kinds of values by their JSON text."""
    texts = values.filter(pc.invert(pc.is_in(values, _EMPTY))).drop_null()
    firsts = pc.value_counts(pc.utf8_slice_codeunits(texts, 0, 1)).to_pylist()
    counts: Counter[str] = Counter()
    for item in firsts:
        counts[_FIRST.get(item["values"], "")] += int(item["counts"])
    if timestamps and counts["string"]:
        found = _count_timestamps(texts.filter(pc.starts_with(texts, '"')), quotes=1)
        counts["timestamp"] += found
        counts["string"] -= found
        counts = +counts
    if counts.pop("", 0):
        counts.update(_count_numbers(texts.filter(pc.match_substring_regex(texts, "^[-0-9]"))))
    return counts


def _count_numbers(texts: pa.Array) -> Counter[str]:
    fractions = pc.match_substring_regex(texts, "[.eE]")
    integers = texts.filter(pc.invert(fractions))
    short = pc.less_equal(pc.binary_length(integers), _SURE_DIGITS)
    sure = integers.filter(short).cast(pa.int64())
    counts = Counter(float64=pc.sum(fractions).as_py() or 0, int64=len(sure), large=_large(sure))
    for text in integers.filter(pc.invert(short)).to_pylist():
        counts.update(_count_integer(text))
    return +counts


def _count_integer(text: str) -> Counter[str]:
    """Count one long integer: as int64, else as a double, else as text."""
    try:
        exact_float(Number(text))
        is_exact = True
    except MisfitError:
        is_exact = False
    if len(text) <= len(str(-(1 << 63))) and -(1 << 63) <= int(text) < 1 << 63:
        return Counter(int64=1) if is_exact else Counter(int64=1, large=1)
    return Counter(float64=1) if is_exact else Counter(string=1)


def add_counts(counts: Counts, more: Mapping[str, Mapping[str, int]]) -> None:
    """Add the counts of a task to `counts`."""
    for path, of_path in more.items():
        counts.setdefault(path, Counter()).update(of_path)


# --- choosing ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """The kind chosen for a field, the number of its values, and how many of them (`odd`) will be rescued.

    `kind` is None if the numbers must be counted again: a float64 column no longer shows which of its values were
    written as integers.
    """

    kind: str | None
    values: int
    odd: int


def choose(path: str, counts: Mapping[str, int]) -> Choice:
    """Return the kind that a new field gets.

    It is the first of these kinds that at least 19 of 20 values fit: boolean, number, timestamp, array, object,
    string. Numbers are int64 if at most one in a thousand has a fraction, an exponent or too many digits for int64;
    else float64, unless more of them fit int64. A string holds time stamps as they are, and numbers and booleans as
    they are written in JSON. If no kind has enough values, the field becomes json.
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
        ("timestamp", counted["timestamp"]),
        ("array", counted["array"]),
        ("object", counted["object"]),
        ("string", total - nested),
    ]
    too_deep = depth_of(path) >= MAX_NESTING
    for kind, fitting in candidates:
        if fitting and total - fitting <= most and not (too_deep and kind in ("array", "object")):
            return Choice(kind, total, total - fitting)
    return Choice("json", total, 0)


# --- applying ------------------------------------------------------------------------------------------

_TYPES = {
    "boolean": pa.bool_(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "timestamp": pa.timestamp("us", "UTC"),
    "string": pa.string(),
}


def scalar_type(kind: str) -> pa.DataType:
    """Return the type of a column of scalars."""
    return _TYPES[kind]


def kinds_of(schema: pa.Schema) -> dict[str, str]:
    """Return the kind of every field that has a type which `choose` may choose, by path."""
    return {path: kind for field in schema for path, kind in _kinds(field.name, field)}


def _kinds(path: str, field: pa.Field) -> Iterator[tuple[str, str]]:
    if is_json(field):
        yield path, "json"
    elif pa.types.is_struct(field.type):
        yield path, "object"
        for child in field.type:
            yield from _kinds(inner_path(path, child.name), child)
    elif pa.types.is_list(field.type):
        yield path, "array"
        yield from _kinds(inner_path(path, ""), field.type.value_field)
    else:
        yield from ((path, kind) for kind, type_ in _TYPES.items() if type_ == field.type)


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


def apply_kinds(schema: pa.Schema, kinds: Kinds) -> pa.Schema:
    """Return the schema with the type of every field's kind; a field whose inner fields are unknown is left out."""
    return pa.schema([f for f in (_with_kind(field.name, field, kinds) for field in schema) if f is not None])


def _with_kind(path: str, field: pa.Field, kinds: Kinds) -> pa.Field | None:
    kind = kinds.get(path)
    if kind == "json":
        return json_field(field.name, field.nullable)
    if kind in _TYPES:
        return pa.field(field.name, _TYPES[kind], field.nullable)
    if pa.types.is_struct(field.type):
        inner = [_with_kind(inner_path(path, child.name), child, kinds) for child in field.type]
        known = [child for child in inner if child is not None]
        return field.with_type(pa.struct(known)) if known and kind != "array" else None
    if pa.types.is_list(field.type):
        item = _with_kind(inner_path(path, ""), field.type.value_field, kinds)
        return field.with_type(pa.list_(item)) if item is not None and kind != "object" else None
    if pa.types.is_map(field.type):
        item = _with_kind(inner_path(path, ""), field.type.item_field, kinds)
        return field.with_type(pa.map_(pa.string(), item)) if item is not None else None
    return None if kind in ("array", "object") else field
