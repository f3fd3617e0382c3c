"""Avro schemas: parsed into nodes with an Arrow type each, and derived from the columns of a table.

| Avro                                          | Arrow                                                            |
|-----------------------------------------------|------------------------------------------------------------------|
| null, boolean, int, long, float, double       | null, bool, int32, int64, float32, float64                       |
| bytes, fixed                                  | binary                                                           |
| string, enum, uuid as string                  | string                                                           |
| decimal up to 38 digits                       | decimal128; with more digits, binary                             |
| date, time-millis, time-micros                | date32, time32, time64                                           |
| timestamp-millis, -micros, -nanos             | timestamp in UTC, of this unit                                   |
| local-timestamp-millis, -micros, -nanos       | timestamp without a zone                                         |
| array, map, record                            | list, map, struct                                                |
| union of null and one other type              | that type                                                        |
| any other union                               | struct with one field per type, `member0`, `member1` and so on   |

A value that is no record becomes the column `value`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from firnline.avro import kernel as k
from firnline.types import Json

MAX_DEPTH = 64
MAX_NODES = 10_000
MAX_DIGITS = 38
_MAX_FIXED = 1 << 20
VALUE_COLUMN = "value"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PRIMITIVES = {
    "null": (k.NULL, pa.null()),
    "boolean": (k.BOOLEAN, pa.bool_()),
    "int": (k.INT, pa.int32()),
    "long": (k.LONG, pa.int64()),
    "float": (k.FLOAT, pa.float32()),
    "double": (k.DOUBLE, pa.float64()),
    "bytes": (k.BYTES, pa.binary()),
    "string": (k.STRING, pa.string()),
}
_INT_TYPES = {"date": pa.date32(), "time-millis": pa.time32("ms")}
_LONG_TYPES = {
    "time-micros": pa.time64("us"),
    **{f"timestamp-{word}": pa.timestamp(unit, "UTC") for word, unit in k.UNITS.items()},
    **{f"local-timestamp-{word}": pa.timestamp(unit) for word, unit in k.UNITS.items()},
}


class UnsupportedSchemaError(Exception):
    """A schema is invalid, or has no columns: it is recursive, or far too large."""


@dataclass(slots=True, eq=False)
class Node:
    """A part of a schema. `null_branch` is the number of the null branch of its union; -1: it is never null."""

    kind: int
    type: pa.DataType
    name: str = ""
    children: list[Node] = field(default_factory=list)
    size: int = 0  # bytes of a fixed, symbols of an enum
    symbols: tuple[str, ...] = ()
    null_branch: int = -1

    @property
    def least_bytes(self) -> int:
        """The size of the shortest value."""
        if self.null_branch >= 0 or self.kind not in (k.NULL, k.RECORD, k.FIXED, k.DECIMAL_FIXED):
            return 1
        if self.kind == k.RECORD:
            return sum(child.least_bytes for child in self.children)
        return self.size

    def walk(self) -> Iterator[Node]:
        """Yield the node and all below it, each before its children."""
        yield self
        for child in self.children:
            yield from child.walk()


class Schema:
    """A parsed schema: the nodes in the order of their numbers, and the table that compiled code reads."""

    def __init__(self, root: Node) -> None:
        self.root = root
        self.nodes = list(root.walk())
        self.table = np.zeros((len(self.nodes), k.NODE_COLUMNS), np.int64)
        self._number(root, 0)

    def new_stack(self) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """Return room for the frames of a walk."""
        return np.zeros((MAX_DEPTH + 1, k.FRAME_COLUMNS), np.int64)

    def _number(self, node: Node, number: int) -> int:
        row = self.table[number]
        row[k.KIND], row[k.NULL_BRANCH], row[k.SIZE] = node.kind, node.null_branch, node.size
        if pa.types.is_decimal(node.type):
            high, low = divmod(10**node.type.precision, 1 << 64)
            row[k.HIGH], row[k.LOW] = high, low - (1 << 64 if low >= 1 << 63 else 0)
        elif pa.types.is_time(node.type):
            row[k.LOW] = 86_400 * (1_000 if node.type == pa.time32("ms") else 1_000_000)
        end = number + 1
        for child in node.children:
            end = self._number(child, end)
        row[k.END] = end
        return end


def parse_schema(schema: Json, references: Sequence[Json] = ()) -> Schema:
    """Parse a schema, which may name the types of `references`.

    Raises:
        UnsupportedSchemaError: it is invalid, or cannot become columns.
    """
    parser = _Parser()
    try:
        for reference in references:
            parser.parse(reference, "", 0)
        node = parser.parse(schema, "", 0)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UnsupportedSchemaError(f"the schema is invalid: {type(error).__name__}: {error}") from error
    if node.kind != k.RECORD or node.null_branch >= 0:
        node.name = VALUE_COLUMN
        node = Node(k.RECORD, pa.struct([(VALUE_COLUMN, node.type)]), children=[node])
    return Schema(node)


class _Parser:
    """Parses one schema. Remembers named types."""

    def __init__(self) -> None:
        self._types: dict[str, Json] = {}  # by full name
        self._open: set[str] = set()  # records that are being parsed
        self._nodes = 0

    def parse(self, schema: Json, namespace: str, depth: int) -> Node:
        self._nodes += 1
        if depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise UnsupportedSchemaError(f"the schema has more than {MAX_DEPTH} levels or {MAX_NODES:,} parts")
        if isinstance(schema, list):
            return self._union(schema, namespace, depth)
        if isinstance(schema, str):
            return self._named(schema, namespace, depth)
        kind = schema["type"]
        if not isinstance(kind, str):
            return self.parse(kind, namespace, depth)
        if kind in ("record", "error", "enum", "fixed"):
            return self._new(schema, namespace, depth)
        if kind == "array":
            item = self.parse(schema["items"], namespace, depth + 1)
            if not item.least_bytes:
                raise UnsupportedSchemaError("the schema has an array of values without bytes")
            item.name = "item"
            return Node(k.ARRAY, pa.list_(item.type), children=[item])
        if kind == "map":
            value = self.parse(schema["values"], namespace, depth + 1)
            key, value.name = Node(k.STRING, pa.string(), "key"), "value"
            return Node(k.MAP, pa.map_(pa.string(), value.type), children=[key, value])
        return self._logical(self._named(kind, namespace, depth), schema)

    def _union(self, branches: list[Json], namespace: str, depth: int) -> Node:
        null = next((number for number, branch in enumerate(branches) if _is_null(branch)), -1)
        others = [branch for branch in branches if not _is_null(branch)]
        if len(branches) - len(others) > 1 or any(isinstance(branch, list) for branch in branches):
            raise UnsupportedSchemaError("the schema has a union with two nulls or with a union inside")
        if not others:
            return Node(k.UNION, pa.null(), size=1, null_branch=null)
        nodes = [self.parse(branch, namespace, depth + 1) for branch in others]
        if len(branches) == 2 and null >= 0:
            nodes[0].null_branch = null
            return nodes[0]
        for number, node in enumerate(nodes):
            node.name = f"member{number}"
        kind = pa.struct([(node.name, node.type) for node in nodes])
        return Node(k.UNION, kind, children=nodes, size=len(branches), null_branch=null)

    def _named(self, name: str, namespace: str, depth: int) -> Node:
        if name in _PRIMITIVES:
            return Node(*_PRIMITIVES[name])
        for full in (name,) if "." in name else (f"{namespace}.{name}", name):
            if full in self._open:
                raise UnsupportedSchemaError(f"the schema is recursive: {full} contains itself")
            if full in self._types:
                return self._body(self._types[full], full, depth)
        raise UnsupportedSchemaError(f"the schema names an unknown type {name!r}")

    def _new(self, schema: Mapping[str, Json], namespace: str, depth: int) -> Node:
        name = str(schema["name"])
        inside = name.rpartition(".")[0] or str(schema.get("namespace", namespace) or "")
        full = name if "." in name or not inside else f"{inside}.{name}"
        self._types[full] = schema
        return self._body(schema, full, depth)

    def _body(self, schema: Mapping[str, Json], full: str, depth: int) -> Node:
        if schema["type"] == "enum":
            symbols = tuple(str(symbol) for symbol in schema["symbols"])
            return Node(k.ENUM, pa.string(), size=len(symbols), symbols=symbols)
        if schema["type"] == "fixed":
            size = int(schema["size"])
            if not 0 <= size <= _MAX_FIXED:
                raise UnsupportedSchemaError(f"the schema has a fixed type of {size} bytes")
            return self._logical(Node(k.FIXED, pa.binary(), size=size), schema)
        self._open.add(full)
        children = []
        for one in schema["fields"]:
            child = self.parse(one["type"], full.rpartition(".")[0], depth + 1)
            child.name = str(one["name"])
            children.append(child)
        self._open.discard(full)
        return Node(k.RECORD, pa.struct([(child.name, child.type) for child in children]), children=children)

    @staticmethod
    def _logical(node: Node, schema: Mapping[str, Json]) -> Node:
        """Apply a logical type; one that is unknown or does not fit is ignored, as Avro says."""
        word = schema.get("logicalType")
        if node.kind == k.INT and word in _INT_TYPES:
            node.type = _INT_TYPES[word]
        elif node.kind == k.LONG and word in _LONG_TYPES:
            node.type = _LONG_TYPES[word]
        elif word == "decimal" and node.kind in (k.BYTES, k.FIXED):
            precision, scale = schema.get("precision"), schema.get("scale", 0)
            fits = isinstance(precision, int) and isinstance(scale, int) and 0 <= scale <= precision <= MAX_DIGITS
            if fits and precision:
                node.kind = k.DECIMAL if node.kind == k.BYTES else k.DECIMAL_FIXED
                node.type = pa.decimal128(precision, scale)
        return node


def _is_null(branch: Json) -> bool:
    return branch == "null" or (isinstance(branch, dict) and branch.get("type") == "null")


# -- from columns -------------------------------------------------------------------------------------


def derive_schema(columns: pa.Schema, name: str) -> dict[str, Json]:
    """Return the schema of rows with these columns, as a record with this full name.

    A column that may be null is a union of null and its type, with null as its default: so a reader of an older schema
    can do without it. Names of columns that Avro does not allow are escaped: every other character becomes `_xHEX_`.

    Raises:
        UnsupportedSchemaError: two columns get the same name.
    """
    return _record(list(columns), name)


def _record(fields: Sequence[pa.Field], full: str) -> dict[str, Json]:
    names = [escape_name(one.name) for one in fields]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UnsupportedSchemaError(f"two columns have the name {twice!r} in Avro")
    inside, _, name = full.rpartition(".")
    described = [
        {"name": known, "type": _avro_field(one, f"{full}.{known}"), **({"default": None} if one.nullable else {})}
        for known, one in zip(names, fields, strict=True)
    ]
    return {"type": "record", "name": name, **({"namespace": inside} if inside else {}), "fields": described}


def escape_name(name: str) -> str:
    """Return the name of a column as Avro allows it."""
    text = re.sub(r"[^A-Za-z0-9_]", lambda found: f"_x{ord(found[0]):x}_", name)
    return text if _NAME.fullmatch(text) else f"_x{ord(text[0]):x}_{text[1:]}" if text else "_"


def _avro_field(one: pa.Field, full: str) -> Json:
    kind = _avro_type(one.type, full)
    return ["null", kind] if one.nullable and kind != "null" else kind


def _avro_type(kind: pa.DataType, full: str) -> Json:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _avro_type(kind.storage_type, full)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _avro_type(kind.value_type, full)
    if types.is_struct(kind):
        return _record([kind.field(number) for number in range(kind.num_fields)], full)
    if types.is_map(kind) and (types.is_string(kind.key_type) or types.is_large_string(kind.key_type)):
        return {"type": "map", "values": _avro_field(kind.item_field, f"{full}.value")}
    if types.is_map(kind):
        return {"type": "array", "items": _record([kind.key_field, kind.item_field], f"{full}.entry")}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return {"type": "array", "items": _avro_field(kind.value_field, f"{full}.item")}
    return _avro_scalar(kind)


def _avro_scalar(kind: pa.DataType) -> Json:
    types = pa.types
    if types.is_null(kind) or types.is_boolean(kind):
        return "null" if types.is_null(kind) else "boolean"
    if kind == pa.uint64():
        return {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 0}
    if types.is_integer(kind) or types.is_duration(kind):
        is_small = types.is_integer(kind) and kind.bit_width < 32
        return "int" if is_small or kind == pa.int32() else "long"
    if types.is_floating(kind):
        return "double" if kind == pa.float64() else "float"
    if types.is_decimal(kind) and kind.precision <= MAX_DIGITS and 0 <= kind.scale <= kind.precision:
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if types.is_date(kind):
        return {"type": "int", "logicalType": "date"}
    if types.is_time(kind):
        return {"type": "long", "logicalType": "time-micros"}
    if types.is_timestamp(kind):
        unit = "nanos" if kind.unit == "ns" else "micros"
        return {"type": "long", "logicalType": f"{'' if kind.tz else 'local-'}timestamp-{unit}"}
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    return "string"
