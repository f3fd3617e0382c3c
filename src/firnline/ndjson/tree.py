"""The schema as the decoder sees it: a tree of fields, with the kind of each and whether its type may change.

A path names a field: the names from the column inwards, with an empty name for the element of a list or the value of a
map.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.ndjson import kernel as k
from firnline.schema import RESCUED_COLUMN, is_json

_KINDS = {
    pa.string(): k.STRING,
    pa.binary(): k.BINARY,
    pa.bool_(): k.BOOL,
    pa.int64(): k.INT64,
    pa.int32(): k.INT32,
    pa.float64(): k.FLOAT64,
    pa.float32(): k.FLOAT32,
    pa.timestamp("us", "UTC"): k.TIMESTAMP,
    pa.date32(): k.DATE,
}

Kinds = Mapping[str, str]  # path -> boolean, int64, float64, timestamp, string, array, object or json

_SEPARATOR = "\n"  # no column name holds one


def inner_path(path: str, name: str) -> str:
    """Return the path of a field inside another; "" is the element of a list or the value of a map."""
    return f"{path}{_SEPARATOR}{name}" if path else name


def outer_paths(path: str) -> set[str]:
    """Return the paths of the fields that contain a field."""
    names = path.split(_SEPARATOR)
    return {_SEPARATOR.join(names[:depth]) for depth in range(1, len(names))}


def depth_of(path: str) -> int:
    """Return the depth of a field; a column is at 1."""
    return path.count(_SEPARATOR) + 1


def shown_path(path: str) -> str:
    """Return a path for people: `order.lines[].price`."""
    return "".join(f".{name}" if name else "[]" for name in path.split(_SEPARATOR)).lstrip(".")


@dataclass(slots=True, eq=False)
class Node:
    """One field of the schema.

    Attributes:
        path: the names that lead to the field.
        frozen: the type must not change: the column existed before, or the field's kind is chosen.
        hidden: no key of a record leads here; the source fills the column itself.
        children: a struct's fields; a list's element; a map's key and value.
    """

    field: pa.Field
    kind: int
    frozen: bool
    path: str = ""
    hidden: bool = False
    children: list[Node] = field(default_factory=list)
    by_name: dict[str, Node] = field(default_factory=dict)
    lower_names: set[str] = field(default_factory=set)

    @property
    def required(self) -> bool:
        return not self.field.nullable and not self.hidden

    def breadth_first(self) -> Iterator[Node]:
        nodes = [self]
        while nodes:
            yield from nodes
            nodes = [child for node in nodes for child in node.children]


def _kind_of(item: pa.Field, frozen: bool) -> int:
    if is_json(item):
        return k.RAW
    if pa.types.is_struct(item.type):
        return k.STRUCT
    if pa.types.is_list(item.type):
        return k.LIST
    if pa.types.is_map(item.type):
        return k.MAP
    if pa.types.is_decimal128(item.type):
        return k.DECIMAL
    kind = _KINDS.get(item.type)
    if kind is None:
        raise ValueError(f"column {item.name!r}: type {item.type} cannot be read from JSON")
    if kind == k.STRING and frozen:
        return k.ANY_STRING  # a new column must tell numbers from strings
    if kind == k.TIMESTAMP and not frozen:
        return k.NEW_TIMESTAMP  # a new column must tell time stamps from dates
    return kind


def _build(item: pa.Field, base: pa.Field | None, path: str, chosen: Kinds) -> Node:
    frozen = base is not None or path in chosen
    node = Node(item, _kind_of(item, frozen), frozen, path)
    if node.kind == k.STRUCT:
        known = {} if base is None or not pa.types.is_struct(base.type) else {f.name: f for f in base.type}
        inner = [_build(child, known.get(child.name), inner_path(path, child.name), chosen) for child in item.type]
        _adopt(node, inner)
    elif node.kind == k.LIST:
        known_item = None if base is None else base.type.value_field
        node.children = [_build(item.type.value_field, known_item, inner_path(path, ""), chosen)]
    elif node.kind == k.MAP:
        known_item = None if base is None else base.type.item_field
        value = _build(item.type.item_field, known_item, inner_path(path, ""), chosen)
        key = Node(item.type.key_field, k.STRING, True)
        node.children = [key, value]
    return node


def _adopt(node: Node, children: list[Node]) -> None:
    node.children = children
    node.by_name = {child.field.name: child for child in children if not child.hidden}
    node.lower_names = {child.field.name.lower() for child in children}


def build_tree(
    schema: pa.Schema, base: pa.Schema, frozen: Collection[str], reserved: Collection[str], chosen: Kinds
) -> Node:
    """Return the root of `schema`. A node is frozen if `base` has it in a frozen column, or if its kind is chosen."""
    known = {item.name: item for item in base if item.name in frozen}
    root = Node(pa.field("", pa.struct(list(schema)), nullable=False), k.STRUCT, True)
    children = []
    for item in schema:
        child = _build(item, known.get(item.name), item.name, chosen)
        child.hidden = item.name == RESCUED_COLUMN or item.name in reserved
        children.append(child)
    _adopt(root, children)
    return root
