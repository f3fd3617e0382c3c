"""The checksum of rows, in order: the same however they are split into batches and files, and whatever compresses them.

It is computed on Arrow buffers. A column without a value counts for nothing: rows with it and without it are the same.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from isal import isal_zlib

ROWS_CHECKSUM = "rows_checksum"  # in the description of a file of the outbox


class RowChecksum:
    """Adds up batches of rows with the same columns."""

    def __init__(self) -> None:
        self._streams: dict[str, int] = {}  # by column and part of it: the checksum so far
        self._has_value: dict[str, bool] = {}

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the next rows."""
        for field, column in zip(batch.schema, batch.columns, strict=True):
            name = json.dumps([field.name, str(field.type)])
            self._has_value[name] = self._has_value.get(name, False) or column.null_count < len(column)
            self._add(name, column)

    def hex(self) -> str:
        """Return the checksum of all rows so far."""
        names = sorted(name for name, has_value in self._has_value.items() if has_value)
        found = {name: {k: v for k, v in self._streams.items() if k.startswith(name)} for name in names}
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:32]

    def _add(self, name: str, column: pa.Array) -> None:
        """Add the values of one column, or of a part of a nested one."""
        kind = column.type
        if isinstance(column, pa.ExtensionArray):
            return self._add(name, column.storage)
        if pa.types.is_dictionary(kind):
            return self._add(name, column.dictionary_decode())
        if pa.types.is_null(kind):
            return self._put(f"{name}/nulls", np.array([len(column)], np.int64))
        self._put(f"{name}/valid", _bits(column.is_valid()))
        if pa.types.is_struct(kind):
            for number, part in enumerate(column.flatten()):  # with the nulls of the struct
                self._add(f"{name}/{number}", part)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            self._put(f"{name}/lengths", pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64()))
            self._add(f"{name}/items", column.flatten())
        elif pa.types.is_map(kind):
            entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
            self._add(f"{name}/entries", column.cast(pa.list_(entry)))
        elif pa.types.is_boolean(kind):
            self._put(f"{name}/values", _bits(pc.fill_null(column, False)))
        elif pa.types.is_binary(kind) or pa.types.is_string(kind):
            self._add_bytes(name, column, np.int32)
        elif pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
            self._add_bytes(name, column, np.int64)
        elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
            self._add(name, column.cast(pa.large_binary()))
        else:
            self._add_fixed(name, column)
        return None

    def _add_fixed(self, name: str, column: pa.Array) -> None:
        """Add values of one size; what lies in the place of a null is nothing."""
        width = column.type.bit_width // 8
        start, count = column.offset * width, len(column)
        found = np.frombuffer(column.buffers()[1] or b"", np.uint8)[start : start + count * width]
        if column.null_count:
            found = np.where(_bits(column.is_valid()).astype(bool)[:, None], found.reshape(count, width), np.uint8(0))
        self._put(f"{name}/values", found)

    def _add_bytes(self, name: str, column: pa.Array, offset_type: type) -> None:
        """Add text or bytes: their lengths, and what they consist of."""
        if column.null_count:
            column = pc.fill_null(column, pa.scalar("" if _is_text(column.type) else b"", column.type))
        _, offsets, data = column.buffers()
        ends: np.ndarray = np.frombuffer(offsets or b"", offset_type)[column.offset : column.offset + len(column) + 1]
        if ends.size:
            self._put(f"{name}/lengths", np.diff(ends).astype(np.int64))
            self._put(f"{name}/values", np.frombuffer(data or b"", np.uint8)[int(ends[0]) : int(ends[-1])])

    def _put(self, stream: str, values: np.ndarray | pa.Array) -> None:
        found = values if isinstance(values, np.ndarray) else values.to_numpy(zero_copy_only=False)
        self._streams[stream] = isal_zlib.crc32(
            np.ascontiguousarray(found).view(np.uint8), self._streams.get(stream, 0)
        )


def _bits(column: pa.Array) -> np.ndarray:
    """Return booleans without null as bytes."""
    found: np.ndarray = column.cast(pa.uint8()).to_numpy(zero_copy_only=False)
    return found


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
