"""Murmur3 over many byte strings at once, compiled: the 32-bit form picks a key group, the 64-bit form a slot.

`murmur3_32` is MurmurHash3_x86_32 with seed 0; `hash64` is the first half of MurmurHash3_x64_128 with seed 0.
Both read little-endian and are the same on every machine: what they give is part of the format of state.
"""

# numba checks the types of compiled code.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from firnline.ndjson.intrinsics import load8
from firnline.ndjson.jit import entry, inlined

_LOW32 = np.uint64(0xFFFFFFFF)
_A32, _B32, _N32 = np.uint64(0xCC9E2D51), np.uint64(0x1B873593), np.uint64(0xE6546B64)
_M32, _P32 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_A64, _B64 = np.uint64(0x87C37B91114253D5), np.uint64(0x4CF5AD432745937F)
_N64, _O64 = np.uint64(0x52DCE729), np.uint64(0x38495AB5)
_M64, _P64 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_FIVE = np.uint64(5)


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
