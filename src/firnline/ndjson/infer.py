"""What types do new values have: watch values that the schema does not hold yet, then widen the schema."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from firnline.ndjson import nodes as k
from firnline.ndjson.fit import MisfitError, exact_float, fit
from firnline.ndjson.slow import Number, Object
from firnline.ndjson.tree import Node
from firnline.schema import RESCUED_COLUMN, is_column_name_ok, json_field, merge_fields

MAX_NESTING = 32  # objects and arrays nested deeper become json columns

_SCALARS = {"boolean": pa.bool_(), "int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}


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


class Seen:
    """All kinds of values that were seen for one field."""

    __slots__ = ("element", "fields", "kinds", "level")

    def __init__(self, level: int) -> None:
        self.level = level
        self.kinds: set[str] = set()
        self.element: Seen | None = None
        self.fields: dict[str, Seen] = {}

    def add(self, value: Any) -> None:
        kind = kind_of(value)
        if kind == "null":
            return
        self.kinds.add(kind)
        if self.level >= MAX_NESTING:
            return
        if kind == "array":
            self.element = self.element or Seen(self.level + 1)
            for item in value:
                self.element.add(item)
        elif kind == "object":
            for name, item in value.last().items():
                self.add_field(name, item)

    def add_field(self, name: str, value: Any) -> None:
        """Watch a field of an object; names that cannot be columns are passed over."""
        seen = self.fields.get(name)
        if seen is None:
            if value is None or not is_column_name_ok(name):
                return
            seen = self.fields[name] = Seen(self.level + 1)
        seen.add(value)

    def known_fields(self) -> list[tuple[pa.Field, int]]:
        """Return the fields whose type is known, with their sizes; of names that differ in case alone the first."""
        found: dict[str, tuple[pa.Field, int]] = {}
        for name, seen in self.fields.items():
            field = seen.field(name)
            if field is not None:
                found.setdefault(name.lower(), (field, seen.size()))
        return list(found.values())

    def field(self, name: str) -> pa.Field | None:
        """Return the field that takes all values seen, or None while the type is not known."""
        nested = self.kinds & {"array", "object"}
        if not self.kinds:
            return None
        if nested and (len(self.kinds) > 1 or self.level >= MAX_NESTING):
            return json_field(name)
        if "array" in nested:
            element = self.element.field("item") if self.element else None
            return None if element is None else pa.field(name, pa.list_(element))
        if "object" in nested:
            fields = [field for field, _ in self.known_fields()]
            return pa.field(name, pa.struct(fields)) if fields else None
        kinds = sorted(self.kinds)
        out = pa.field(name, _SCALARS[kinds[0]])
        for kind in kinds[1:]:
            out = merge_fields(out, pa.field(name, _SCALARS[kind]))
        return out

    def size(self) -> int:
        """Return how many fields would be added."""
        inner = sum(seen.size() for seen in self.fields.values())
        return 1 + inner + (self.element.size() if self.element else 0)


class Learner:
    """Collects what records hold beyond the schema, and gives the schema that holds it too.

    Args:
        adds_fields: unknown fields become columns.
        reserved: top-level names that never become columns.
        room: how many fields may still be added, at all levels together.
    """

    def __init__(self, root: Node, adds_fields: bool, reserved: frozenset[str], room: int) -> None:
        self._root = root
        self._adds_fields = adds_fields
        self._reserved = reserved
        self._room = room
        self._new: dict[int, Seen] = {}  # unknown fields, by the identity of the struct's node
        self._other: dict[int, Seen] = {}  # values that do not fit, by the identity of the node

    def watch(self, record: Object) -> None:
        self._watch_struct(self._root, record, 0)

    def _watch_struct(self, node: Node, value: Object, level: int) -> None:
        for name, item in value.last().items():
            if item is None:
                continue
            child = node.by_name.get(name)
            if child is not None:
                self._watch(child, item, level + 1)
            elif self._adds_fields and name.lower() not in node.lower_names:
                if node is self._root and (name in self._reserved or name == RESCUED_COLUMN):
                    continue
                self._new.setdefault(id(node), Seen(level)).add_field(name, item)

    def _watch(self, node: Node, value: Any, level: int) -> None:
        if node.kind == k.STRUCT and type(value) is Object:
            self._watch_struct(node, value, level)
        elif node.kind == k.LIST and type(value) is list:
            for item in value:
                if item is not None:
                    self._watch(node.children[0], item, level + 1)
        elif node.kind == k.MAP and type(value) is Object:
            for _, item in value.pairs:
                if item is not None:
                    self._watch(node.children[1], item, level + 1)
        elif not node.frozen:
            try:
                fit(value, node)
            except MisfitError:
                self._other.setdefault(id(node), Seen(level)).add(value)

    def schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the schema that also holds what was watched; the same object when nothing changes."""
        if not self._new and not self._other:
            return schema
        fields = self._fields(self._root)
        found = pa.schema(fields, metadata=schema.metadata)
        return schema if found.equals(schema, check_metadata=True) else found

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
        if seen is None:
            return field
        other = seen.field(field.name)
        if other is None:
            # Only `[]` or `{}` were seen: a container of nothing, which mixes with no scalar.
            other = json_field(field.name) if node.kind > k.MAP else field
        return merge_fields(field, other)
