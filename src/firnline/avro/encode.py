"""Encodes rows as Avro records, whole batches at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.avro import kernel as k
from firnline.avro.schema import Node, Schema

Numbers = np.ndarray[Any, Any]
MOST_BYTES = 18  # of one value: a branch, and a decimal with its length, or a number, or the two counts of a list


def encode_rows(schema: Schema, batch: pa.RecordBatch, before: int = 0) -> tuple[Numbers, Numbers]:
    """Encode rows whose columns stand in the order of the schema's fields.

    Returns the bytes of all rows, one after the other, each with `before` zero bytes in front, and the offsets of the
    rows, one more than there are rows.
    """
    buffers = _Buffers(schema)
    for number, child, column in zip(buffers.children(0), schema.root.children, batch.columns, strict=True):
        buffers.add(number, child, column)
    rows, (valid, words, offsets, text) = batch.num_rows, buffers.joined()
    ends = np.zeros(rows + 1, np.int64)
    out = np.zeros(rows * before + buffers.most_bytes + len(text), np.uint8)
    k.write(rows, before, buffers.table, valid, words, offsets, text, out, ends[1:], schema.new_stack())
    return out[: ends[-1]], ends


class _Buffers:
    """The buffers of all columns in arenas, and the table of nodes that says where each begins."""

    def __init__(self, schema: Schema) -> None:
        self.table = schema.table.copy()
        self._valid: list[Numbers] = []
        self._words: list[Numbers] = []
        self._offsets: list[Numbers] = []
        self._text: list[Numbers] = []
        self._sizes = [0, 0, 0, 0]
        self.most_bytes = 0  # that all values need, without the bytes of texts

    def joined(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Return the arenas: validity, words, offsets, text."""
        kinds = (np.uint8, np.int64, np.int64, np.uint8)
        parts = (self._valid, self._words, self._offsets, self._text)
        valid, words, offsets, text = (
            np.concatenate(some) if some else np.zeros(0, kind) for some, kind in zip(parts, kinds, strict=True)
        )
        return valid, words, offsets, text

    def children(self, number: int) -> list[int]:
        """Return the numbers of a node's children."""
        found, at = [], number + 1
        while at < int(self.table[number, k.END]):
            found.append(at)
            at = int(self.table[at, k.END])
        return found

    def add(self, number: int, node: Node, column: pa.Array) -> None:
        """Add the values of a node, and of all below it."""
        column = _as_type(column, node.type)
        self.most_bytes += len(column) * MOST_BYTES
        row = self.table[number]
        row[k.VALID], row[k.WORDS], row[k.OFFSETS], row[k.TEXT] = self._sizes
        if node.null_branch >= 0:
            self._put(0, self._valid, column.is_valid().to_numpy(zero_copy_only=False).view(np.uint8))
        numbers = self.children(number)
        if node.kind == k.RECORD:
            for index, (at, child) in enumerate(zip(numbers, node.children, strict=True)):
                self.add(at, child, column.field(index))
        elif node.kind in (k.ARRAY, k.MAP):
            lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()).to_numpy()
            self._put(2, self._offsets, _offsets(lengths))
            items = _items(column, node)
            for at, child, values in zip(numbers, node.children, items, strict=True):
                self.add(at, child, values)
        elif node.kind in (k.STRING, k.BYTES):
            starts, data = _bytes_of(column)
            self._put(2, self._offsets, starts - starts[0])
            self._put(3, self._text, data[starts[0] : starts[-1]])
        elif node.kind != k.NULL:
            self._put(1, self._words, _words(column, node))

    def _put(self, arena: int, parts: list[Numbers], values: Numbers) -> None:
        parts.append(values)
        self._sizes[arena] += len(values)


def _as_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type) or pa.types.is_run_end_encoded(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_nested(kind):
        if pa.types.is_map(column.type):
            return column.cast(pa.list_(pa.struct([column.type.key_field, column.type.item_field])))
        return column  # its children are cast one by one
    return column if column.type == kind else column.cast(kind)


def _offsets(lengths: Numbers) -> Numbers:
    found = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


def _items(column: pa.Array, node: Node) -> list[pa.Array]:
    """Return the items of all lists in order, without those under a null; of maps, the keys and the values."""
    items = column.flatten()
    return [items.field(0), items.field(1)] if node.kind == k.MAP else [items]


def _bytes_of(column: pa.Array) -> tuple[Numbers, Numbers]:
    """Return the offsets of texts or bytes, null as empty, and the bytes."""
    if column.null_count:
        column = pc.fill_null(column, "" if pa.types.is_string(column.type) else b"")
    column = column.cast(pa.large_binary())
    _, offsets, data = column.buffers()
    edges = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    bytes_ = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return edges, bytes_


def _words(column: pa.Array, node: Node) -> Numbers:
    """Return the values of a column as 64-bit words, two for a decimal; anything for null."""
    if node.kind == k.DECIMAL:
        data = column.buffers()[1]
        end = 2 * (column.offset + len(column))
        return np.frombuffer(data, np.int64, end)[2 * column.offset :] if len(column) else np.zeros(0, np.int64)
    if node.kind == k.BOOLEAN:
        flags: Numbers = column.fill_null(False).cast(pa.int8()).to_numpy()
        return flags.astype(np.int64)
    if node.kind in (k.FLOAT, k.DOUBLE):
        numbers: Numbers = column.fill_null(0).to_numpy(zero_copy_only=False)
        return numbers.view(np.int64) if node.kind == k.DOUBLE else numbers.view(np.uint32).astype(np.int64)
    whole = column.cast(pa.int32()) if node.kind == k.INT else column
    filled: Numbers = whole.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return filled
