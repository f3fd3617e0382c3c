"""The canonical bytes of keys, and what follows from them: key groups, slots, shards.

A key is the bytes of its columns, one after the other, in order. Numbers are little-endian. Per column:

    null                            00
    integer up to 64 bits           01  int64                      int32 and int64 of one value are one key
    unsigned above 2^63 - 1         0a  uint64
    boolean                         02  00 or 01
    float of any width              03  float64                    -0.0 is 0.0, every NaN is 7ff8000000000000
    string                          04  uint32 length, UTF-8
    binary                          05  uint32 length, bytes
    date                            06  int64 days since 1970
    timestamp                       07  int64 microseconds since 1970, UTC; without a zone it is taken as UTC
    decimal up to 128 bits          08  int128 value, int16 scale  no trailing zeros: 1.50 is 15 at scale 1, 0 is 0

No type of one family is ever taken for one of another: the integer 1 and the float 1.0 are two keys.

    key group = murmur3_32(bytes of the columns that decide the shard) mod number of key groups
    slot      = key group << 48 | low 48 bits of hash64(bytes of all columns of the key)

State is sorted by slot, so a range of key groups is a contiguous part of every file. Two keys may share a slot; their
bytes tell them apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.errors import ConfigError
from firnline.state import encoding

SLOT_BITS = 48
LOW48 = (1 << SLOT_BITS) - 1
MAX_KEY_GROUPS = 1 << 16

_INTEGER, _BOOLEAN, _FLOAT, _STRING, _BINARY, _DATE, _TIMESTAMP, _DECIMAL, _BIG = 1, 2, 3, 4, 5, 6, 7, 8, 10
_CANONICAL_NAN = np.int64(0x7FF8000000000000)
_MINUS_ZERO = np.int64(-(2**63))  # its bits

Numbers = npt.NDArray[np.int64]
Groups = npt.NDArray[np.uint16]
Slots = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedKeys:
    """Keys as bytes: key i is `data[offsets[i]:offsets[i + 1]]`."""

    data: npt.NDArray[np.uint8]
    offsets: Numbers

    def __len__(self) -> int:
        return int(self.offsets.size) - 1

    def __getitem__(self, row: int) -> bytes:
        return self.data[self.offsets[row] : self.offsets[row + 1]].tobytes()

    def take(self, rows: Numbers) -> EncodedKeys:
        """The keys of some rows."""
        lengths = self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.zeros(rows.size + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = np.empty(int(offsets[-1]), np.uint8)
        encoding.take_keys(self.data, self.offsets, rows, offsets, data)
        return EncodedKeys(data, offsets)

    def equal(self, rows: Numbers, other: EncodedKeys, other_rows: Numbers) -> Mask:
        """Whether key `rows[i]` has the same bytes as key `other_rows[i]` of `other`."""
        out = np.empty(rows.size, np.bool_)
        encoding.equal_pairs(self.data, self.offsets, rows, other.data, other.offsets, other_rows, out)
        return out

    def murmur3_32(self) -> npt.NDArray[np.uint32]:
        """The hash that picks a key group."""
        return encoding.murmur3_32(self.data, self.offsets)

    def hash64(self) -> npt.NDArray[np.uint64]:
        """The hash that a slot is made of."""
        return encoding.hash64(self.data, self.offsets)


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Keys with their bytes, key groups and slots."""

    keys: EncodedKeys
    groups: Groups
    slots: Slots


def encode_keys(table: pa.Table, rows: int | None = None) -> EncodedKeys:
    """Return the canonical bytes of each row's key; every column of the table is part of it.

    Args:
        table: The key columns.
        rows: The number of keys, for a table without columns, which may have lost it.

    Raises:
        ConfigError: a column has a type that cannot be a key, or a time is finer than microseconds.
    """
    count = table.num_rows if rows is None else rows
    columns = [_prepare(name, column) for name, column in zip(table.column_names, table.columns, strict=True)]
    lengths = np.zeros(count, np.int64)
    for chunks in columns:
        start = 0
        for chunk in chunks:
            lengths[start : start + chunk.rows] += chunk.lengths
            start += chunk.rows
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    data = np.empty(int(offsets[-1]), np.uint8)
    cursor = offsets[:-1].copy()
    for chunks in columns:
        start = 0
        for chunk in chunks:
            chunk.put(cursor[start : start + chunk.rows], data)
            start += chunk.rows
    return EncodedKeys(data, offsets)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of one column: the byte size of each row, and how the bytes are written at each row's cursor."""

    rows: int
    lengths: Any  # an array, or one number for all rows
    put: Callable[[Numbers, npt.NDArray[np.uint8]], None]


def _prepare(name: str, column: pa.ChunkedArray) -> list[_Chunk]:
    family = key_family(column.type)
    if family is None:
        raise ConfigError(
            f"column {name!r} cannot be part of a key: its type is {column.type}",
            hint="Use columns of numbers, texts, bytes, booleans, dates, times or decimals (up to 38 digits) as keys.",
            column=name,
        )
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_null(column.type):
        column = column.cast(pa.int64())
    make = {_STRING: _bytes_chunk, _BINARY: _bytes_chunk, _DECIMAL: _decimal_chunk}.get(family, _number_chunk)
    try:
        return [make(chunk, family) for chunk in column.chunks if len(chunk)]
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"column {name!r} has a value that cannot be part of a key: {error}",
            hint="Times in keys are whole microseconds; round them before they become a key.",
            column=name,
        ) from error


def key_family(kind: pa.DataType) -> int | None:
    """Return the tag of a type in encoded keys; None if it cannot be part of a key. Null types count as integers."""
    t = pa.types
    if t.is_dictionary(kind):
        return key_family(kind.value_type)
    families: tuple[tuple[int, tuple[Callable[[pa.DataType], bool], ...]], ...] = (
        (_INTEGER, (t.is_integer, t.is_null)),
        (_STRING, (t.is_string, t.is_large_string, t.is_string_view)),
        (_BOOLEAN, (t.is_boolean,)),
        (_FLOAT, (t.is_floating,)),
        (_BINARY, (t.is_binary, t.is_large_binary, t.is_binary_view, t.is_fixed_size_binary)),
        (_DATE, (t.is_date,)),
        (_TIMESTAMP, (t.is_timestamp,)),
        (_DECIMAL, (t.is_decimal32, t.is_decimal64, t.is_decimal128)),
    )
    return next((family for family, tests in families if any(test(kind) for test in tests)), None)


def _valid(chunk: pa.Array) -> Mask:
    """Return which rows are not null; empty if none is."""
    if chunk.null_count == 0:
        return np.empty(0, np.bool_)
    valid: Mask = np.asarray(chunk.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    return valid


def _lengths(valid: Mask, lengths: Any) -> Any:
    return np.where(valid, lengths, 1) if valid.size else lengths


def _buffer(buffer: pa.Buffer | None, kind: Any, count: int, first: int = 0) -> Any:
    """Return a read-only view of a buffer's numbers, so that one compiled form serves all buffers."""
    if buffer is None or count == 0:
        array = np.zeros(count, kind)
    else:
        array = np.frombuffer(buffer, kind, count, first * np.dtype(kind).itemsize)
    array.flags.writeable = False
    return array


def _number_chunk(chunk: pa.Array, family: int) -> _Chunk:
    tag, negative_tag, width = family, family, 8
    valid = _valid(chunk)
    if family == _BOOLEAN:
        chunk, width = chunk.cast(pa.uint8()).cast(pa.int64()), 1
    elif family == _FLOAT:
        chunk = chunk.cast(pa.float64())
    elif family == _DATE:
        chunk = chunk.cast(pa.date32()).view(pa.int32()).cast(pa.int64())
    elif family == _TIMESTAMP:
        chunk = chunk.cast(pa.timestamp("us", chunk.type.tz)).view(pa.int64())
    elif pa.types.is_uint64(chunk.type):
        chunk, negative_tag = chunk.view(pa.int64()), _BIG
    else:
        chunk = chunk.cast(pa.int64())
    values = _buffer(chunk.buffers()[1], np.int64, len(chunk), chunk.offset)
    if family == _FLOAT:
        positive = np.where(values == _MINUS_ZERO, 0, values)
        values = np.where(np.isnan(values.view(np.float64)), _CANONICAL_NAN, positive)
        values.flags.writeable = False

    def put(cursor: Numbers, data: npt.NDArray[np.uint8]) -> None:
        encoding.put_numbers(values, valid, tag, negative_tag, width, cursor, data)

    return _Chunk(len(chunk), _lengths(valid, 1 + width), put)


def _bytes_chunk(chunk: pa.Array, family: int) -> _Chunk:
    if not (pa.types.is_string(chunk.type) or pa.types.is_binary(chunk.type)):
        wide = pa.large_string() if family == _STRING else pa.large_binary()
        chunk = chunk if chunk.type == wide else chunk.cast(wide)
    small = pa.types.is_string(chunk.type) or pa.types.is_binary(chunk.type)
    _, places, source = chunk.buffers()
    offsets = _buffer(places, np.int32 if small else np.int64, len(chunk) + 1, chunk.offset)
    content = _buffer(source, np.uint8, source.size if source is not None else 0)
    valid = _valid(chunk)
    lengths = np.diff(offsets).astype(np.int64)
    if lengths.max() >= 1 << 32:
        raise pa.ArrowInvalid("it has 4 GiB or more")

    def put(cursor: Numbers, data: npt.NDArray[np.uint8]) -> None:
        encoding.put_bytes(offsets, content, valid, family, cursor, data)

    return _Chunk(len(chunk), _lengths(valid, lengths + 5), put)


def _decimal_chunk(chunk: pa.Array, family: int) -> _Chunk:
    if not pa.types.is_decimal128(chunk.type):
        chunk = chunk.cast(pa.decimal128(chunk.type.precision, chunk.type.scale))
    words = _buffer(chunk.buffers()[1], np.int64, 2 * len(chunk), 2 * chunk.offset)
    valid, scale = _valid(chunk), chunk.type.scale

    def put(cursor: Numbers, data: npt.NDArray[np.uint8]) -> None:
        encoding.put_decimals(words, valid, family, scale, cursor, data)

    return _Chunk(len(chunk), _lengths(valid, 19), put)


# --- groups, slots, shards -------------------------------------------------------------------------------


def key_groups_of(keys: EncodedKeys, key_groups: int) -> Groups:
    """Return the key group of each key; `keys` are exactly the columns that select the shard."""
    if not 1 <= key_groups <= MAX_KEY_GROUPS:
        raise ConfigError(f"there can be 1 to {MAX_KEY_GROUPS:,} key groups, not {key_groups:,}")
    groups: Groups = (keys.murmur3_32() % np.uint32(key_groups)).astype(np.uint16)
    return groups


def slots(groups: Groups, hashes: npt.NDArray[np.uint64], mask: int = LOW48) -> Slots:
    """Return the slots of keys: the group in the high bits, the low bits of the key's hash below. A smaller mask forces
    collisions."""
    out: Slots = (groups.astype(np.uint64) << np.uint64(SLOT_BITS)) | (hashes & np.uint64(mask))
    return out


def locate(table: pa.Table, deciding: int, key_groups: int, rows: int | None = None, mask: int = LOW48) -> Located:
    """Return bytes, groups and slots of keys; the first `deciding` columns of the table select the shard."""
    keys = encode_keys(table, rows)
    first = keys if deciding == table.num_columns else encode_keys(table.select(range(deciding)), len(keys))
    groups = key_groups_of(first, key_groups)
    return Located(keys, groups, slots(groups, keys.hash64(), mask))


def slot_bounds(groups: tuple[int, int]) -> tuple[int, int]:
    """Return the first and the last slot of the key groups `[first, last)`, both inclusive."""
    return groups[0] << SLOT_BITS, (groups[1] << SLOT_BITS) - 1


def shard_ranges(key_groups: int, shards: int) -> list[tuple[int, int]]:
    """Return the key groups `[first, last)` of each shard: contiguous, in order, as even as possible."""
    if not 1 <= shards <= key_groups:
        raise ConfigError(f"{key_groups} key groups make 1 to {key_groups} shards, not {shards}")
    bounds = [key_groups * shard // shards for shard in range(shards + 1)]
    return list(itertools.pairwise(bounds))


def shard_of(groups: Groups, ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return the shard number of each key group; `ranges` come from `shard_ranges`."""
    lasts = np.array([last for _, last in ranges], np.int64)
    out: npt.NDArray[np.int64] = np.searchsorted(lasts, groups.astype(np.int64), side="right")
    return out


# --- order -----------------------------------------------------------------------------------------------


def order_keys(at: Slots, keys: EncodedKeys) -> tuple[Numbers, Mask]:
    """Return the stable order of keys by slot and then by bytes, and where in it a new key starts."""
    order: Numbers = np.argsort(at, kind="stable")
    ranked = at[order]
    same_slot = ranked[1:] == ranked[:-1]
    first = np.ones(order.size, np.bool_)
    tied = np.flatnonzero(same_slot)
    first[tied + 1] = ~keys.equal(order[tied], keys, order[tied + 1])
    mixed = tied[first[tied + 1]]
    if mixed.size:
        _sort_collisions(order, ranked, keys, mixed)
        first[tied + 1] = ~keys.equal(order[tied], keys, order[tied + 1])
    return order, first


def _sort_collisions(order: Numbers, ranked: Slots, keys: EncodedKeys, mixed: Numbers) -> None:
    """Sort by bytes where several keys share a slot: rare enough for plain Python."""
    for slot in np.unique(ranked[mixed]):
        start, stop = np.searchsorted(ranked, slot, "left"), np.searchsorted(ranked, slot, "right")
        order[start:stop] = sorted(order[start:stop].tolist(), key=keys.__getitem__)


@dataclass(frozen=True, slots=True, eq=False)
class Distinct:
    """Each key once: `rows` are the first occurrences, in the order of slot and bytes; `key_of[i]` is row i's key."""

    rows: Numbers
    key_of: Numbers


def distinct(at: Slots, keys: EncodedKeys) -> Distinct:
    """Find the distinct keys among many rows."""
    order, first = order_keys(at, keys)
    key_of = np.empty(order.size, np.int64)
    key_of[order] = np.cumsum(first) - 1
    return Distinct(order[first], key_of)
