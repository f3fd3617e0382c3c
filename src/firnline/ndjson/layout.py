"""Buffers for the kernel: the node table of a schema, the arenas that records are read into, and their Arrow form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from firnline.ndjson import kernel as k
from firnline.ndjson.text import SLACK
from firnline.ndjson.tree import Node
from firnline.schema import RESCUED_COLUMN

_TEXT_KINDS = (k.STRING, k.ANY_STRING, k.RAW, k.BINARY)
_FIRST_ELEMENTS = 4  # initial room for elements, per slot of the list
_FIRST_TEXT_BYTES = 16  # initial room for text, per slot

Array = np.ndarray[Any, Any]


def _hash(key: bytes) -> int:
    value = 2166136261
    for byte in key:
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value


class Layout:
    """The node table and the arenas for one schema; sizes that one block needed are kept for the next."""

    def __init__(self, root: Node) -> None:
        self.nodes = list(root.breadth_first())
        self.table = np.zeros((len(self.nodes), k.NODE_COLUMNS), np.int64)
        self.elements = np.full(len(self.nodes), float(_FIRST_ELEMENTS))  # per slot of the parent list or map
        self.text_bytes = np.full(len(self.nodes), float(_FIRST_TEXT_BYTES))  # per slot
        self.stack = np.zeros((self._describe(), 3), np.int64)
        self.rescued = np.zeros((k.MAX_RESCUED + 1, 2), np.int64)
        self.rescue_node = 0
        for number, node in enumerate(root.children, 1):
            if node.field.name == RESCUED_COLUMN:
                self.rescue_node = number
        self._index_keys()
        self.valid = np.zeros(0, np.uint8)
        self.words = np.zeros(0, np.int64)
        self.offsets = np.zeros(0, np.int32)
        self.text = np.zeros(0, np.uint8)
        self.rows = 0

    def _describe(self) -> int:
        """Fill in the columns that follow from the schema; return a bound on the nesting depth."""
        number = {id(node): index for index, node in enumerate(self.nodes)}
        depth = [1] * len(self.nodes)
        for index, node in enumerate(self.nodes):
            row = self.table[index]
            row[k.KIND] = node.kind
            row[k.COUNT] = len(node.children)
            row[k.REQUIRED] = node.required and index > 0
            row[k.REQUIRES] = node.kind == k.STRUCT and any(child.required for child in node.children)
            if node.kind == k.DECIMAL:
                row[k.PRECISION], row[k.SCALE] = node.field.type.precision, node.field.type.scale
            if node.children:
                row[k.FIRST] = number[id(node.children[0])]
            for child in node.children:
                self.table[number[id(child)], k.PARENT] = index
                depth[number[id(child)]] = depth[index] + 1
        return max(depth) + 1

    def _index_keys(self) -> None:
        """Write the keys, and per struct a hash table of its children (0, the root, means empty)."""
        keys = bytearray()
        slots: list[int] = []
        for index, node in enumerate(self.nodes):
            if node.kind != k.STRUCT:
                continue
            size = 2
            while size < 2 * len(node.children) + 1:
                size *= 2
            self.table[index, k.TABLE], self.table[index, k.TABLE_MASK] = len(slots), size - 1
            mine = [0] * size
            for offset, child in enumerate(node.children):
                number = int(self.table[index, k.FIRST]) + offset
                key = child.field.name.encode()
                self.table[number, k.KEY], self.table[number, k.KEY_SIZE] = len(keys), len(key)
                keys += key
                if child.hidden:
                    self.table[number, k.KEY_SIZE] = -1
                    continue
                at = _hash(key) & (size - 1)
                while mine[at]:
                    at = (at + 1) & (size - 1)
                mine[at] = number
            slots += mine
        self.keys = np.frombuffer(bytes(keys) + bytes(8), np.uint8)
        self.slots = np.array(slots, np.int64)

    # --- arenas ----------------------------------------------------------------------------------------

    def _divide(self, rows: int) -> None:
        """Assign every node its part of the arenas; replace arenas that are too small."""
        table = self.table
        valid = words = offsets = text = 0
        for index, node in enumerate(self.nodes):
            row = table[index]
            if index == 0:
                row[k.CAPACITY] = rows + 1
            else:
                parent = table[row[k.PARENT]]
                room = int(parent[k.CAPACITY])
                listed = parent[k.KIND] != k.STRUCT
                row[k.CAPACITY] = int(room * self.elements[index]) + 16 if listed else room
            room = int(row[k.CAPACITY])
            row[k.VALID] = valid
            valid += room
            if node.kind >= k.INT64:
                row[k.WORDS] = words
                words += room
            elif node.kind not in (k.STRUCT, k.BOOL):
                row[k.OFFSETS] = offsets
                offsets += room + 1
            if node.kind in _TEXT_KINDS:
                row[k.TEXT] = text
                row[k.TEXT_CAPACITY] = int(room * self.text_bytes[index]) + 4 * SLACK
                text += int(row[k.TEXT_CAPACITY])
        self.valid = self.valid if self.valid.size >= valid else np.empty(valid, np.uint8)
        self.words = self.words if self.words.size >= words else np.empty(words, np.int64)
        self.offsets = self.offsets if self.offsets.size >= offsets else np.empty(offsets, np.int32)
        self.text = self.text if self.text.size >= text else np.empty(text, np.uint8)

    def start(self, rows: int) -> None:
        """Empty all columns and make room for `rows` rows."""
        self.rows = rows
        self._divide(rows)
        self.table[:, k.LENGTH] = 0
        self.table[:, k.TEXT_LENGTH] = 0
        for index, node in enumerate(self.nodes):
            if node.kind in _TEXT_KINDS or node.kind in (k.LIST, k.MAP):
                self.offsets[self.table[index, k.OFFSETS]] = 0

    def grow(self, index: int, text: bool) -> None:
        """Double the room of one node; the values read so far are kept."""
        if text:
            self.text_bytes[index] = self.text_bytes[index] * 2 + 8
        else:
            family = [index] if self.nodes[int(self.table[index, k.PARENT])].kind == k.LIST else [index, index + 1]
            for member in family:
                self.elements[member] = self.elements[member] * 2 + 1
        old = self.table.copy()
        arenas = (self.valid, self.words, self.offsets, self.text)
        self.valid, self.words, self.offsets, self.text = (np.zeros(0, arena.dtype) for arena in arenas)
        self._divide(self.rows)
        for row, was in zip(self.table, old, strict=True):
            size = int(row[k.LENGTH])
            _move(self.valid, arenas[0], row[k.VALID], was[k.VALID], size)
            if row[k.KIND] >= k.INT64:
                _move(self.words, arenas[1], row[k.WORDS], was[k.WORDS], size)
            elif row[k.KIND] not in (k.STRUCT, k.BOOL):
                _move(self.offsets, arenas[2], row[k.OFFSETS], was[k.OFFSETS], size + 1)
            if row[k.KIND] in _TEXT_KINDS:
                _move(self.text, arenas[3], row[k.TEXT], was[k.TEXT], int(row[k.TEXT_LENGTH]))

    # --- Arrow -----------------------------------------------------------------------------------------

    def finish(self) -> list[pa.Array]:
        """Return one array per top-level column; each is a copy of exactly its size."""
        if self.table[0, k.LENGTH]:  # no row has nothing to fill
            k.finish(self.table, self.valid, self.words, self.offsets)
        count = len(self.nodes[0].children)
        return [self._array(index) for index in range(1, count + 1)]

    def _array(self, index: int) -> pa.Array:
        node, row = self.nodes[index], self.table[index]
        size = int(row[k.LENGTH])
        marks = self.valid[row[k.VALID] : row[k.VALID] + size]
        present = (marks & 1 if node.kind == k.BOOL else marks).view(np.bool_)
        nulls = size - int(np.count_nonzero(present))
        mask = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
        first = int(row[k.FIRST])
        children = [self._array(first + offset) for offset in range(len(node.children))]
        if node.kind == k.STRUCT:
            return pa.StructArray.from_buffers(node.field.type, size, [mask], nulls, children=children)
        if node.kind == k.BOOL:
            bits = pa.py_buffer(np.packbits((marks >> 1).view(np.bool_), bitorder="little"))
            return pa.Array.from_buffers(node.field.type, size, [mask, bits], nulls)
        if node.kind >= k.INT64:
            words = self.words[row[k.WORDS] : row[k.WORDS] + size]
            return pa.Array.from_buffers(node.field.type, size, [mask, pa.py_buffer(_fixed(node.kind, words))], nulls)
        offsets = pa.py_buffer(self.offsets[row[k.OFFSETS] : row[k.OFFSETS] + size + 1].copy())
        if node.kind == k.LIST:
            return pa.ListArray.from_buffers(node.field.type, size, [mask, offsets], nulls, children=children)
        if node.kind == k.MAP:
            entries = pa.StructArray.from_arrays(
                children, fields=[node.field.type.key_field, node.field.type.item_field]
            )
            return pa.MapArray.from_buffers(node.field.type, size, [mask, offsets], nulls, children=[entries])
        text = self.text[row[k.TEXT] : row[k.TEXT] + row[k.TEXT_LENGTH]]
        return pa.Array.from_buffers(node.field.type, size, [mask, offsets, pa.py_buffer(text.copy())], nulls)


def _move(target: Array, source: Array, to: int, start: int, size: int) -> None:
    target[to : to + size] = source[start : start + size]


def _fixed(kind: int, words: Array) -> Array:
    """Return 64-bit words as values of the column's width."""
    if kind in (k.INT32, k.DATE):
        return words.astype(np.int32)
    if kind == k.FLOAT32:
        return words.view(np.float64).astype(np.float32)
    if kind == k.DECIMAL:
        wide = np.empty((words.size, 2), np.int64)
        wide[:, 0] = words
        wide[:, 1] = words >> 63
        return wide
    return words.copy()
