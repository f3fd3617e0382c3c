"""Compiled loops over encoded keys: write columns into them, compare them."""

# numba checks the types of compiled code.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

import numpy as np

from firnline.ndjson.intrinsics import load8
from firnline.ndjson.jit import compiled, entry

NULL_TAG = 0
_LOW32 = np.uint64(0xFFFFFFFF)
_TEN = np.uint64(10)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@compiled
def _put(data, p, value, width):
    """Write the low `width` bytes of a number, lowest first."""
    for i in range(width):
        data[p + i] = np.uint8((value >> np.uint64(8 * i)) & np.uint64(0xFF))


@entry
def put_numbers(values, valid, tag, negative_tag, width, cursor, data):
    """Write tag and number of each row at its cursor. An empty `valid` means that no row is null."""
    some_null = valid.size > 0
    for row in range(values.size):
        p = cursor[row]
        if some_null and not valid[row]:
            data[p] = NULL_TAG
            cursor[row] = p + 1
            continue
        value = values[row]
        data[p] = negative_tag if value < 0 else tag
        _put(data, p + 1, np.uint64(value), width)
        cursor[row] = p + 1 + width


@entry
def put_bytes(offsets, source, valid, tag, cursor, data):
    """Write tag, length and bytes of each row at its cursor."""
    some_null = valid.size > 0
    for row in range(offsets.size - 1):
        p = cursor[row]
        if some_null and not valid[row]:
            data[p] = NULL_TAG
            cursor[row] = p + 1
            continue
        first = np.int64(offsets[row])
        size = np.int64(offsets[row + 1]) - first
        data[p] = tag
        _put(data, p + 1, np.uint64(size), 4)
        p += 5
        for i in range(size):
            data[p + i] = source[first + i]
        cursor[row] = p + size


@compiled
def _tenth(high, low):
    """Divide a number of 128 bits by ten. Returns (high, low, remainder)."""
    a = high // _TEN
    rest = high % _TEN
    rest = (rest << np.uint64(32)) | (low >> np.uint64(32))
    b = rest // _TEN
    rest = ((rest % _TEN) << np.uint64(32)) | (low & _LOW32)
    c = rest // _TEN
    return a, (b << np.uint64(32)) | c, rest % _TEN


@entry
def put_decimals(words, valid, tag, scale, cursor, data):
    """Write tag, value and scale of each row at its cursor, without trailing zeros; `words` has low and high halves."""
    some_null = valid.size > 0
    for row in range(words.size // 2):
        p = cursor[row]
        if some_null and not valid[row]:
            data[p] = NULL_TAG
            cursor[row] = p + 1
            continue
        low = np.uint64(words[2 * row])
        high = np.uint64(words[2 * row + 1])
        negative = words[2 * row + 1] < 0
        if negative:
            low = ~low + _ONE
            high = ~high + (_ONE if low == _ZERO else _ZERO)
        left = np.int64(scale)
        if low == _ZERO and high == _ZERO:
            left = np.int64(0)
        else:
            next_high, next_low, rest = _tenth(high, low)
            while rest == _ZERO:
                high, low = next_high, next_low
                left -= 1
                next_high, next_low, rest = _tenth(high, low)
        if negative:
            low = ~low + _ONE
            high = ~high + (_ONE if low == _ZERO else _ZERO)
        data[p] = tag
        _put(data, p + 1, low, 8)
        _put(data, p + 9, high, 8)
        _put(data, p + 17, np.uint64(left), 2)
        cursor[row] = p + 19


@entry
def equal_pairs(data, offsets, mine, other_data, other_offsets, theirs, out):
    """Say of each pair of keys whether they have the same bytes."""
    for i in range(out.size):
        p = offsets[mine[i]]
        q = other_offsets[theirs[i]]
        size = offsets[mine[i] + 1] - p
        same = size == other_offsets[theirs[i] + 1] - q
        if same:
            while size >= 8 and load8(data, p) == load8(other_data, q):
                p += 8
                q += 8
                size -= 8
            for k in range(size):
                if data[p + k] != other_data[q + k]:
                    same = False
                    break
        out[i] = same


@entry
def take_keys(data, offsets, rows, new_offsets, out):
    """Copy the keys of some rows."""
    for i in range(rows.size):
        p = offsets[rows[i]]
        q = new_offsets[i]
        for k in range(new_offsets[i + 1] - q):
            out[q + k] = data[p + k]
