"""Slots of columns, for the kernel: read a value into one, fill up with nulls, close containers, undo a record."""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.ndjson.jit import compiled, inlined
from firnline.ndjson.nodes import (
    ANY_STRING,
    BINARY,
    BOOL,
    CAPACITY,
    COUNT,
    DECIMAL,
    FIRST,
    FLOAT32,
    FLOAT64,
    INT32,
    INT64,
    KIND,
    LENGTH,
    OFFSETS,
    PARENT,
    PRECISION,
    RAW,
    REQUIRED,
    REQUIRES,
    SCALE,
    STRING,
    STRUCT,
    TEXT,
    TEXT_CAPACITY,
    TEXT_LENGTH,
    TIMESTAMP,
    VALID,
    WORDS,
)
from firnline.ndjson.numbers import decimal_units, double_bits, is_exact, scan_date, scan_number, scan_timestamp
from firnline.ndjson.text import FULL, ODD, copy_base64, copy_json, copy_scalar, copy_string


@compiled
def fill(t, node, upto, valid, words, offsets):
    """Append nulls until the node has `upto` slots."""
    have = t[node, LENGTH]
    kind = t[node, KIND]
    for i in range(t[node, VALID] + have, t[node, VALID] + upto):
        valid[i] = 0
    if kind >= INT64:
        for i in range(t[node, WORDS] + have, t[node, WORDS] + upto):
            words[i] = 0
    elif kind != STRUCT and kind != BOOL:
        base = t[node, OFFSETS]
        last = offsets[base + have]
        for i in range(base + have + 1, base + upto + 1):
            offsets[i] = last
    t[node, LENGTH] = upto


@inlined
def length_limit(t, node, offsets):
    """Return how many slots the node has at its parent's present length."""
    parent = t[node, PARENT]
    if t[parent, KIND] == STRUCT:
        return t[parent, LENGTH]
    return np.int64(offsets[t[parent, OFFSETS] + t[parent, LENGTH]])


@compiled
def rollback(t, row, offsets):
    """Cut every column back to what `row` whole records gave."""
    t[0, LENGTH] = row
    for node in range(1, t.shape[0]):
        limit = length_limit(t, node, offsets)
        if t[node, LENGTH] > limit:
            t[node, LENGTH] = limit
        kind = t[node, KIND]
        if kind >= STRING and kind <= BINARY:
            t[node, TEXT_LENGTH] = offsets[t[node, OFFSETS] + t[node, LENGTH]]


@inlined
def _text(data, p, n, t, node, slot, offsets, text):
    """Read a value into a node that holds bytes. Returns the next index, or ODD or FULL."""
    kind = t[node, KIND]
    base = t[node, TEXT]
    q = base + t[node, TEXT_LENGTH]
    end = base + t[node, TEXT_CAPACITY]
    if kind == RAW:
        p, q = copy_json(data, p, n, text, q, end)
    elif data[p] == 34:
        if kind == BINARY:
            p, q = copy_base64(data, p + 1, text, q, end)
        else:
            p, q = copy_string(data, p + 1, n, text, q, end, False)
    elif kind == ANY_STRING:
        p, q = copy_scalar(data, p, text, q, end)
    else:
        return ODD
    if p >= 0:
        t[node, TEXT_LENGTH] = q - base
        offsets[t[node, OFFSETS] + slot + 1] = q - base
    return p


@inlined
def _number(data, p, t, node):
    """Read a value into 64 bits. Returns (next index or ODD, bits)."""
    kind = t[node, KIND]
    if kind >= TIMESTAMP:
        if data[p] != 34:
            return ODD, np.int64(0)
        if kind == TIMESTAMP:
            p, bits = scan_timestamp(data, p + 1)
            return (p + 1 if p >= 0 else ODD), bits
        fits, bits = scan_date(data, p + 1)
        return (p + 12 if fits and data[p + 11] == 34 else ODD), bits
    p, mantissa, exponent, negative, is_integer = scan_number(data, p)
    if p < 0:
        return ODD, np.int64(0)
    if kind <= INT32:
        top = np.uint64(1) << np.uint64(63 if kind == INT64 else 31)
        if not is_integer or mantissa > top or (mantissa == top and not negative):
            return ODD, np.int64(0)
        return p, np.int64(np.uint64(0) - mantissa if negative else mantissa)
    if kind == DECIMAL:
        fits, bits = decimal_units(mantissa, exponent, t[node, PRECISION], t[node, SCALE])
        return (p if fits else ODD), (-bits if negative else bits)
    if is_integer and not is_exact(mantissa, 53 if kind == FLOAT64 else 24):
        return ODD, np.int64(0)
    fits, bits = double_bits(mantissa, exponent, negative)
    if kind == FLOAT32 and mantissa != 0:
        # Left to the Python path: what overflows a float, or is subnormal there.
        power = (bits >> 52 & 0x7FF) - 1023
        fits = fits and power >= -126 and power < 127
    return (p if fits else ODD), bits


@inlined
def read_value(data, p, n, t, node, slot, valid, words, offsets, text):
    """Read a value that opens no container into the node's slot. Returns the next index, or ODD or FULL."""
    if t[node, LENGTH] != slot:
        if t[node, LENGTH] > slot:
            return ODD  # the key came twice
        fill(t, node, slot, valid, words, offsets)
    kind = t[node, KIND]
    c = data[p]
    if c == 110:
        if t[node, REQUIRED] or data[p + 1] != 117 or data[p + 2] != 108 or data[p + 3] != 108:
            return ODD
        fill(t, node, slot + 1, valid, words, offsets)
        return p + 4
    mark = 1
    if kind >= INT64:
        p, bits = _number(data, p, t, node)
        if p < 0:
            return ODD
        words[t[node, WORDS] + slot] = bits
    elif kind == BOOL:
        if c == 116 and data[p + 1] == 114 and data[p + 2] == 117 and data[p + 3] == 101:
            p += 4
            mark = 3
        elif c == 102 and data[p + 1] == 97 and data[p + 2] == 108 and data[p + 3] == 115 and data[p + 4] == 101:
            p += 5
        else:
            return ODD
    elif kind >= STRING:
        p = _text(data, p, n, t, node, slot, offsets, text)
        if p < 0:
            return p
    else:
        return ODD
    valid[t[node, VALID] + slot] = mark
    t[node, LENGTH] = slot + 1
    return p


@compiled
def read_map_key(data, p, n, t, node, slot, valid, offsets, text):
    """Append the key whose quote is at p. Returns the index after it, or ODD or FULL."""
    child = t[node, FIRST]
    at = t[child, LENGTH]
    if at >= t[child, CAPACITY]:
        return FULL
    p = _text(data, p, n, t, child, at, offsets, text)
    if p < 0:
        return p
    valid[t[child, VALID] + at] = 1
    t[child, LENGTH] = at + 1
    base = t[child, OFFSETS]
    first = np.int64(offsets[t[node, OFFSETS] + slot])
    if at - first > 64:
        return ODD  # comparing every pair of keys would no longer be cheap
    start = offsets[base + at]
    size = offsets[base + at + 1] - start
    for other in range(first, at):
        begin = offsets[base + other]
        if offsets[base + other + 1] - begin == size:
            same = True
            for i in range(size):
                if text[t[child, TEXT] + begin + i] != text[t[child, TEXT] + start + i]:
                    same = False
                    break
            if same:
                return ODD  # the key came twice
    return p


@inlined
def close_container(t, node, slot, valid, offsets):
    """End the container in this slot. Returns False when a required field is missing."""
    first = t[node, FIRST]
    if t[node, KIND] != STRUCT:
        offsets[t[node, OFFSETS] + slot + 1] = t[first, LENGTH]
        valid[t[node, VALID] + slot] = 1
        t[node, LENGTH] = slot + 1
    elif t[node, REQUIRES]:
        for child in range(first, first + t[node, COUNT]):
            if t[child, REQUIRED] and t[child, LENGTH] <= slot:
                return False
    return True
