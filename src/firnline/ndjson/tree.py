"""The schema as the decoder sees it: a tree of nodes that know their kind and whether their type may change."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from firnline.ndjson import nodes
from firnline.schema import RESCUED_COLUMN, is_json

_KINDS = {
    pa.string(): nodes.STRING,
    pa.binary(): nodes.BINARY,
    pa.bool_(): nodes.BOOL,
    pa.int64(): nodes.INT64,
    pa.int32(): nodes.INT32,
    pa.float64(): nodes.FLOAT64,
    pa.float32(): nodes.FLOAT32,
    pa.timestamp("us", "UTC"): nodes.TIMESTAMP,
    pa.date32(): nodes.DATE,
}


@dataclass(slots=True, eq=False)
class Node:
    """One field of the schema.

    Attributes:
        frozen: the type was there from the start and must not change.
        hidden: no key of a record leads here (columns that others fill).
        children: a struct's fields; a list's element; a map's key and value.
    """

    field: pa.Field
    kind: int
    frozen: bool
    hidden: bool = False
    children: list[Node] = field(default_factory=list)
    by_name: dict[str, Node] = field(default_factory=dict)
    lower_names: set[str] = field(default_factory=set)

    @property
    def required(self) -> bool:
        return not self.field.nullable and not self.hidden

    def breadth_first(self) -> Iterator[Node]:
        level = [self]
        while level:
            yield from level
            level = [child for node in level for child in node.children]


def _kind_of(item: pa.Field, frozen: bool) -> int:
    if is_json(item):
        return nodes.RAW
    if pa.types.is_struct(item.type):
        return nodes.STRUCT
    if pa.types.is_list(item.type):
        return nodes.LIST
    if pa.types.is_map(item.type):
        return nodes.MAP
    if pa.types.is_decimal128(item.type):
        return nodes.DECIMAL
    kind = _KINDS.get(item.type)
    if kind is None:
        raise ValueError(f"column {item.name!r}: type {item.type} cannot be read from JSON")
    if kind == nodes.STRING and not frozen:
        return nodes.ANY_STRING
    return kind


def _build(item: pa.Field, base: pa.Field | None) -> Node:
    node = Node(item, _kind_of(item, base is not None), base is not None)
    if node.kind == nodes.STRUCT:
        known = {} if base is None or not pa.types.is_struct(base.type) else {f.name: f for f in base.type}
        _adopt(node, [_build(child, known.get(child.name)) for child in item.type])
    elif node.kind == nodes.LIST:
        node.children = [_build(item.type.value_field, None if base is None else base.type.value_field)]
    elif node.kind == nodes.MAP:
        value = _build(item.type.item_field, None if base is None else base.type.item_field)
        key = Node(item.type.key_field, nodes.STRING, True)
        node.children = [key, value]
    return node


def _adopt(node: Node, children: list[Node]) -> None:
    node.children = children
    node.by_name = {child.field.name: child for child in children if not child.hidden}
    node.lower_names = {child.field.name.lower() for child in children}


def build_tree(schema: pa.Schema, base: pa.Schema, frozen: Collection[str], reserved: Collection[str]) -> Node:
    """Return the root of `schema`; nodes that `base` has under a frozen column are frozen."""
    known = {item.name: item for item in base if item.name in frozen}
    root = Node(pa.field("", pa.struct(list(schema)), nullable=False), nodes.STRUCT, True)
    children = []
    for item in schema:
        child = _build(item, known.get(item.name))
        child.hidden = item.name == RESCUED_COLUMN or item.name in reserved
        children.append(child)
    _adopt(root, children)
    return root
