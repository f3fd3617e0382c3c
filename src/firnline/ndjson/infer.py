"""Infers the types of new values: watches values that the schema does not hold yet, then widens the schema."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from firnline.ndjson import nodes as k
from firnline.ndjson.fit import MisfitError, exact_float, fit
from firnline.ndjson.kinds import MAX_NESTING, scalar_type
from firnline.ndjson.slow import Number, Object
from firnline.ndjson.tree import Kinds, Node, inner_path
from firnline.schema import RESCUED_COLUMN, is_column_name_ok, json_field

_NUMBERS = {"int64", "float64"}
_SCALARS = {"boolean", *_NUMBERS, "string"}


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
    """The kinds of values seen for one field; once its kind is chosen, others are ignored."""

    __slots__ = ("_chosen", "element", "fields", "kinds", "level", "path")

    def __init__(self, level: int, path: str, chosen: Kinds) -> None:
        self.level = level
        self.path = path
        self._chosen = chosen
        self.kinds: set[str] = set()
        self.element: Seen | None = None
        self.fields: dict[str, Seen] = {}

    def add(self, value: Any) -> None:
        kind = kind_of(value)
        if kind == "null" or not _takes(self._chosen.get(self.path), kind) or is_empty(value):
            return
        self.kinds.add(kind)
        if self.level >= MAX_NESTING:
            return
        if kind == "array":
            self.element = self.element or Seen(self.level + 1, inner_path(self.path, ""), self._chosen)
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
            seen = self.fields[name] = Seen(self.level + 1, inner_path(self.path, name), self._chosen)
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
        if not self.kinds:
            return None
        chosen = self._chosen.get(self.path)
        if chosen in _SCALARS:
            return pa.field(name, scalar_type(chosen))
        if self.kinds == _NUMBERS:
            return pa.field(name, pa.float64())
        if chosen == "json" or len(self.kinds) > 1:
            return json_field(name)
        (kind,) = self.kinds
        if kind in _SCALARS:
            return pa.field(name, scalar_type(kind))
        if self.level >= MAX_NESTING:
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
    """Whether a value is `[]` or `{}`: it says nothing about a column's type."""
    return value == [] or (type(value) is Object and not value.pairs)


def _takes(chosen: str | None, kind: str) -> bool:
    """Whether a value may shape a field of the chosen kind; without one, every value may."""
    if chosen is None or chosen in (kind, "json"):
        return True
    return (chosen == "float64" and kind == "int64") or (chosen == "string" and kind in _SCALARS)


class Learner:
    """Collects values beyond the schema, and returns the widened schema.

    Args:
        adds_fields: unknown fields become columns.
        reserved: top-level names that never become columns.
        room: how many fields may still be added, at all levels together.
        chosen: the kinds of fields that the values of the whole epoch have decided.
    """

    def __init__(self, root: Node, adds_fields: bool, reserved: frozenset[str], room: int, chosen: Kinds) -> None:
        self._root = root
        self._chosen = chosen
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
                self._new.setdefault(id(node), Seen(level, node.path, self._chosen)).add_field(name, item)

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
                self._other.setdefault(id(node), Seen(level, node.path, {})).add(value)

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
        if seen is None or not seen.kinds:
            return field
        if node.kind == k.INT64 and seen.kinds == {"float64"}:
            return field.with_type(pa.float64())
        return json_field(field.name, field.nullable)  # holds every value and its kind, until the kinds are counted
