"""Decodes Avro records to Arrow, whole batches at a time; a record that is not what its schema says becomes no row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from firnline import jit
from firnline.avro import kernel as k
from firnline.avro.schema import Node, Schema, parse_schema

Numbers = np.ndarray[Any, Any]
Reason = Literal["not-avro", "invalid-utf8", "does-not-fit"]
REASONS: dict[int, Reason] = {k.BROKEN: "not-avro", k.NOT_UTF8: "invalid-utf8", k.TOO_LARGE: "does-not-fit"}
_WITH_TEXT = (k.STRING, k.BYTES, k.FIXED)
_WITH_WORDS = (k.BOOLEAN, k.INT, k.LONG, k.FLOAT, k.DOUBLE, k.ENUM)


def decode_records(
    schema: Schema, data: bytes | memoryview, starts: Numbers, ends: Numbers
) -> tuple[pa.RecordBatch, dict[int, Reason]]:
    """Decode records, given by where they start and end in `data`. Returns a row for each good one, in order, and why
    the others, by their numbers, are bad.
    """
    table = schema.table.copy()
    array = np.frombuffer(data, np.uint8)
    outcomes, stack = np.zeros(len(starts), np.int64), schema.new_stack()
    if k.check(array, starts, ends, outcomes, table, stack):
        table = schema.table.copy()  # counts of good records alone
        k.check(array, starts, ends, outcomes, table, stack)
    columns = _Columns(schema, table)
    k.fill(array, starts, outcomes, table, columns.valid, columns.words, columns.offsets, columns.text, stack)
    rows = int(table[0, k.LENGTH])
    arrays = [columns.array(number) for number in columns.children(0)]
    bad = {int(number): REASONS[int(outcomes[number])] for number in np.flatnonzero(outcomes)}
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([]))), bad
    return pa.RecordBatch.from_arrays(arrays, names=[child.name for child in schema.root.children]), bad


class _Columns:
    """The buffers of all nodes, as large as `check` has counted."""

    def __init__(self, schema: Schema, table: Numbers) -> None:
        self._nodes: Sequence[Node] = schema.nodes
        self._table = table
        valid = words = offsets = text = 0
        for node, row in zip(schema.nodes, table, strict=True):
            length, size = int(row[k.LENGTH]), int(row[k.TEXT_LENGTH])
            row[k.VALID], row[k.WORDS], row[k.OFFSETS], row[k.TEXT] = valid, words, offsets, text
            valid += length
            if node.kind in _WITH_WORDS:
                words += length
            elif node.kind in (k.DECIMAL, k.DECIMAL_FIXED):
                words += 2 * length
            elif node.kind in (k.ARRAY, k.MAP, *_WITH_TEXT):
                offsets += length + 1
                text += size
            row[k.LENGTH] = 0
        self.valid = np.empty(valid, np.uint8)
        self.words = np.zeros(words, np.int64)
        self.offsets = np.zeros(offsets, np.int32)
        self.text = np.empty(text, np.uint8)

    def children(self, number: int) -> list[int]:
        """Return the numbers of a node's children."""
        found, at = [], number + 1
        while at < int(self._table[number, k.END]):
            found.append(at)
            at = int(self._table[at, k.END])
        return found

    def array(self, number: int) -> pa.Array:
        """Return the values of a node."""
        node, row = self._nodes[number], self._table[number]
        length = int(row[k.LENGTH])
        if pa.types.is_null(node.type):
            return pa.nulls(length)
        flags = self.valid[int(row[k.VALID]) : int(row[k.VALID]) + length]
        valid = None if flags.all() else pa.py_buffer(np.packbits(flags, bitorder="little"))
        kind = node.type
        if node.kind in (k.RECORD, k.UNION):
            children = [self.array(child) for child in self.children(number)]
            return pa.Array.from_buffers(kind, length, [valid], children=children)
        if node.kind in (k.ARRAY, k.MAP):
            offsets = self._part(self.offsets, row[k.OFFSETS], length + 1)
            items = [self.array(child) for child in self.children(number)]
            if node.kind == k.MAP:
                entries = pa.struct([kind.key_field, kind.item_field])
                items = [pa.Array.from_buffers(entries, len(items[0]), [None], children=items)]
            return pa.Array.from_buffers(kind, length, [valid, pa.py_buffer(offsets)], children=items)
        if node.kind in _WITH_TEXT:
            offsets = self._part(self.offsets, row[k.OFFSETS], length + 1)
            text = self._part(self.text, row[k.TEXT], int(offsets[-1]))
            return pa.Array.from_buffers(kind, length, [valid, pa.py_buffer(offsets), pa.py_buffer(text)])
        if node.kind in (k.DECIMAL, k.DECIMAL_FIXED):
            words = self._part(self.words, row[k.WORDS], 2 * length)
            return pa.Array.from_buffers(kind, length, [valid, pa.py_buffer(words)])
        words = self._part(self.words, row[k.WORDS], length)
        if node.kind == k.ENUM:
            numbers = pa.array(words, mask=flags == 0)
            return pa.array(node.symbols, pa.string()).take(numbers)
        return pa.Array.from_buffers(kind, length, [valid, pa.py_buffer(_values(node, words))])

    @staticmethod
    def _part(arena: Numbers, start: int, length: int) -> Numbers:
        return arena[int(start) : int(start) + length]


def _values(node: Node, words: Numbers) -> Numbers:
    """Return the words of a node as its type stores them."""
    if node.kind == k.BOOLEAN:
        return np.packbits(words.astype(np.uint8), bitorder="little")
    if node.kind == k.FLOAT:
        return words.astype(np.uint32)
    return words.astype(np.int32) if node.kind == k.INT else words


def warm_up() -> None:
    """Compile the kernel, or load it from the cache; later calls are cheap."""
    from firnline.avro.encode import encode_rows

    schema = parse_schema({"type": "record", "name": "r", "fields": [{"name": "a", "type": "int"}]})
    with jit.compiling():
        found, _ = decode_records(schema, b"\x02", np.array([0]), np.array([1]))
        encode_rows(schema, found)
