"""Compiled loops over keys: write columns into encoded keys, compare them, hash them.

Hashes are Murmur3 over many byte strings at once: the 32-bit form picks a key group, the 64-bit form a slot.
`murmur3_32` is MurmurHash3_x86_32 with seed 0; `hash64` is the first half of MurmurHash3_x64_128 with seed 0. Both read
little-endian and are the same on every machine: their results are part of the format of state.
"""

# numba checks the types of compiled code.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from firnline.jit import compiled, entry, inlined, load8

NULL_TAG = 0
_LOW32 = np.uint64(0xFFFFFFFF)
_TEN = np.uint64(10)
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_A32, _B32, _N32 = np.uint64(0xCC9E2D51), np.uint64(0x1B873593), np.uint64(0xE6546B64)
_M32, _P32 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_A64, _B64 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_N64, _O64 = np.uint64(0x52DCE729), np.uint64(0x38495AB5)
_M64, _P64 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_FIVE = np.uint64(5)


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


# -- hashes --------------------------------------------------------------------------------------------


@inlined
def _tail(data, p, size):
    """Up to eight bytes as one little-endian number."""
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(data[p + i]) << np.uint64(8 * i)
    return value


@inlined
def _turn32(value, bits):
    return ((value << np.uint64(bits)) | (value >> np.uint64(32 - bits))) & _LOW32


@inlined
def _turn64(value, bits):
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@inlined
def _mixed32(word):
    return (_turn32((word * _A32) & _LOW32, 15) * _B32) & _LOW32


@inlined
def _final64(value):
    value = (value ^ (value >> np.uint64(33))) * _M64
    value = (value ^ (value >> np.uint64(33))) * _P64
    return value ^ (value >> np.uint64(33))


@entry
def _murmur3_32(data, offsets, out):
    for row in range(out.size):
        p, end = offsets[row], offsets[row + 1]
        size = end - p
        h = np.uint64(0)
        while p + 4 <= end:
            h = (_turn32(h ^ _mixed32(_tail(data, p, 4)), 13) * _FIVE + _N32) & _LOW32
            p += 4
        if p < end:
            h ^= _mixed32(_tail(data, p, end - p))
        h ^= np.uint64(size)
        h = ((h ^ (h >> np.uint64(16))) * _M32) & _LOW32
        h = ((h ^ (h >> np.uint64(13))) * _P32) & _LOW32
        out[row] = h ^ (h >> np.uint64(16))


@entry
def _hash64(data, offsets, out):
    for row in range(out.size):
        p, end = offsets[row], offsets[row + 1]
        size = np.uint64(end - p)
        a = np.uint64(0)
        b = np.uint64(0)
        while p + 16 <= end:
            a ^= _turn64(load8(data, p) * _A64, 31) * _B64
            a = (_turn64(a, 27) + b) * _FIVE + _N64
            b ^= _turn64(load8(data, p + 8) * _B64, 33) * _A64
            b = (_turn64(b, 31) + a) * _FIVE + _O64
            p += 16
        if end - p > 8:
            b ^= _turn64(_tail(data, p + 8, end - p - 8) * _B64, 33) * _A64
        if end > p:
            a ^= _turn64(_tail(data, p, min(end - p, 8)) * _A64, 31) * _B64
        a ^= size
        b ^= size
        a += b
        b += a
        out[row] = _final64(a) + _final64(b)


def murmur3_32(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """The 32-bit hash of each of the byte strings `data[offsets[i]:offsets[i + 1]]`."""
    out = np.empty(offsets.size - 1, np.uint32)
    _murmur3_32(data, offsets, out)
    return out


def hash64(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The 64-bit hash of each of the byte strings `data[offsets[i]:offsets[i + 1]]`."""
    out = np.empty(offsets.size - 1, np.uint64)
    _hash64(data, offsets, out)
    return out
