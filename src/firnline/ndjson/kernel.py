"""The compiled walk over a block: records straight into Arrow-shaped buffers, in one pass.

One compiled function, `scan`, serves every schema. The schema is an argument: a table with a row per node (see
`layout`), numbered breadth first so that the children of a node are neighbours. All buffers of one kind are parts of
one arena.

Slots. A value is written to a slot of its column. A struct's child uses the slot number of the struct; elements of a
list get new slots at the end. A column may lag behind: nulls are filled in when its next value comes, or at the end.
So a record that turns out odd half way is undone by cutting every column back to its parent's length (`rollback`).

Odd records (an unknown key, a value of another kind, anything not plainly valid) are only listed, with their position;
the exact path in Python (see `exact`) reads them. The kernel may call a good record odd, but never reads a bad one.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, entry, inlined
from firnline.ndjson.numbers import decimal_units, double_bits, is_exact, scan_date, scan_number, scan_timestamp
from firnline.ndjson.text import (
    FULL,
    ODD,
    SLACK,
    copy_base64,
    copy_json,
    copy_scalar,
    copy_string,
    key_end,
    line_end,
    same_bytes,
)

# --- numbers that the kernel and its callers agree on --------------------------------------------------

# Kinds of nodes. Containers come first, then those with offsets, then those with 64-bit words.
(STRUCT, LIST, MAP, STRING, ANY_STRING, RAW, BINARY, BOOL, INT64, INT32, FLOAT64, FLOAT32, DECIMAL, DATE, TIMESTAMP,
 NEW_TIMESTAMP) = range(16)  # fmt: skip

# Columns of the node table.
(KIND, PARENT, FIRST, COUNT, REQUIRED, REQUIRES, KEY, KEY_SIZE, TABLE, TABLE_MASK, PRECISION, SCALE,
 VALID, WORDS, OFFSETS, TEXT, CAPACITY, TEXT_CAPACITY, LENGTH, TEXT_LENGTH) = range(20)  # fmt: skip
NODE_COLUMNS = 20

# Fields of the control array, which `scan` reads when it starts and updates when it returns.
POSITION, ROW, RECORD, LINE, ODD_COUNT, FULL_NODE, FULL_TEXT, RESCUE_NODE, RESCUE_ALL, RESCUED_COUNT = range(10)
CONTROL_SIZE = 10
MIN_TIMESTAMP, MAX_TIMESTAMP = 19, 35  # characters of a time stamp with date and time
MAX_RESCUED = 16  # unknown fields of one record that the kernel rescues itself

# Columns of the table of odd records: where the line starts and ends, rows before it, record and line in the block.
ODD_START, ODD_END, ODD_ROW, ODD_RECORD, ODD_LINE = range(5)

# --- slots ---------------------------------------------------------------------------------------------


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
    """Return how many slots the node should have, given its parent's length."""
    parent = t[node, PARENT]
    if t[parent, KIND] == STRUCT:
        return t[parent, LENGTH]
    return np.int64(offsets[t[parent, OFFSETS] + t[parent, LENGTH]])


@compiled
def rollback(t, row, offsets):
    """Cut every column back to its values from the first `row` records."""
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
    if kind >= DATE:
        if data[p] != 34:
            return ODD, np.int64(0)
        if kind == DATE:
            fits, bits = scan_date(data, p + 1)
            return (p + 12 if fits and data[p + 11] == 34 else ODD), bits
        end, bits = scan_timestamp(data, p + 1)
        if kind == NEW_TIMESTAMP and end == p + 11:
            return ODD, bits  # a date alone is text while the column is new
        return (end + 1 if end >= 0 else ODD), bits
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
        # The exact path handles what overflows a float, or is subnormal there.
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


# --- records -------------------------------------------------------------------------------------------


@compiled
def key_hash(data, p, size):
    """Return FNV-1a of a key."""
    value = np.uint32(2166136261)
    for i in range(size):
        value = (value ^ np.uint32(data[p + i])) * np.uint32(16777619)
    return np.int64(value)


@inlined
def _find_child(data, p, n, size, t, node, expected, keys, table):
    """Return the child with this key, or -1. Keys mostly come in the order in which they were learned."""
    if (
        expected < t[node, FIRST] + t[node, COUNT]
        and t[expected, KEY_SIZE] == size
        and same_bytes(data, p, n, keys, t[expected, KEY], size)
    ):
        return expected
    mask = t[node, TABLE_MASK]
    at = key_hash(data, p, size) & mask
    while True:
        child = table[t[node, TABLE] + at]
        if child == 0:
            return -1
        if t[child, KEY_SIZE] == size and same_bytes(data, p, n, keys, t[child, KEY], size):
            return child
        at = (at + 1) & mask


@compiled
def _after_colon(data, p):
    """Return the index of the value after a key that ends before p, or ODD."""
    while data[p] == 32 or data[p] == 9 or data[p] == 13:
        p += 1
    if data[p] != 58:
        return ODD
    p += 1
    while data[p] == 32 or data[p] == 9 or data[p] == 13:
        p += 1
    return p


@compiled
def _is_empty_container(data, p):
    close = data[p] + 2  # of [ and of { alike
    if data[p] != 91 and data[p] != 123:
        return False
    p += 1
    while data[p] == 32 or data[p] == 9 or data[p] == 13:
        p += 1
    return data[p] == close


@compiled
def _unknown(data, start, end, n, t, node, text, rescued, control):
    """Handle a field of a record whose key, data[start:end], is unknown.

    A null counts as absent. Any other value is appended to the rescued text if `node` is not 0 and the value cannot
    become a column: under RESCUE_ALL, or when it is an empty array or object. `rescued` lists the keys appended so
    far; its last row has their count. Returns the index after the value, or ODD or FULL.
    """
    count = rescued[MAX_RESCUED, 0]
    for i in range(count):
        if rescued[i, 1] == end - start and same_bytes(data, start, n, data, rescued[i, 0], end - start):
            return ODD  # the key came twice
    p = _after_colon(data, end + 1)
    if p < 0:
        return ODD
    if data[p] == 110 and data[p + 1] == 117 and data[p + 2] == 108 and data[p + 3] == 108:
        for i in range(start, end):
            if data[i] >= 0x80:
                return ODD
        return p + 4
    if node == 0 or count == MAX_RESCUED or not (control[RESCUE_ALL] or _is_empty_container(data, p)):
        return ODD
    base = t[node, TEXT]
    q = base + t[node, TEXT_LENGTH]
    stop = base + t[node, TEXT_CAPACITY] - SLACK
    control[FULL_NODE], control[FULL_TEXT] = node, 1
    if q + SLACK > stop:
        return FULL
    text[q] = 44 if count else 123
    text[q + 1] = 34
    after, q = copy_string(data, start, n, text, q + 2, stop, True)
    if after < 0:
        return after
    text[q] = 34
    text[q + 1] = 58
    p, q = copy_json(data, p, n, text, q + 2, stop)
    if p >= 0:
        t[node, TEXT_LENGTH] = q - base
        rescued[count, 0], rescued[count, 1] = start, end - start
        rescued[MAX_RESCUED, 0] = count + 1
    return p


@compiled
def _end_rescued(t, node, row, valid, words, offsets, text):
    """Complete the rescued text of a record."""
    fill(t, node, row, valid, words, offsets)
    size = t[node, TEXT_LENGTH]
    text[t[node, TEXT] + size] = 125
    t[node, TEXT_LENGTH] = size + 1
    offsets[t[node, OFFSETS] + row + 1] = size + 1
    valid[t[node, VALID] + row] = 1
    t[node, LENGTH] = row + 1


@inlined
def _record(data, p, n, t, keys, table, valid, words, offsets, text, stack, rescued, row, control):
    """Read the object at p into row `row`. Returns the index of the line feed after it, or ODD or FULL."""
    if data[p] != 123:
        return ODD
    p += 1
    depth, node, slot, kind, expected = 0, 0, row, STRUCT, t[0, FIRST]
    close = 125
    fresh = True
    rescued[MAX_RESCUED, 0] = 0
    while True:
        c = data[p]
        while c == 32 or c == 9 or c == 13:
            p += 1
            c = data[p]
        if c == close:
            p += 1
            if not close_container(t, node, slot, valid, offsets):
                return ODD
            if depth == 0:
                break
            depth -= 1
            node, slot, expected = stack[depth, 0], stack[depth, 1], stack[depth, 2]
            kind = t[node, KIND]
            close = 93 if kind == LIST else 125
            fresh = False
            continue
        if not fresh:
            if c != 44:
                return ODD
            p += 1
            c = data[p]
            while c == 32 or c == 9 or c == 13:
                p += 1
                c = data[p]
        fresh = False
        if kind == LIST:
            target = t[node, FIRST]
            target_slot = t[target, LENGTH]
            if target_slot >= t[target, CAPACITY]:
                control[FULL_NODE], control[FULL_TEXT] = target, 0
                return FULL
        else:
            if c != 34:
                return ODD
            if kind == STRUCT:
                end = key_end(data, p + 1, n)
                if end < 0:
                    return ODD
                target = _find_child(data, p + 1, n, end - p - 1, t, node, expected, keys, table)
                if target < 0:
                    rescuer = control[RESCUE_NODE] if depth == 0 else 0
                    p = _unknown(data, p + 1, end, n, t, rescuer, text, rescued, control)
                    if p < 0:
                        return p
                    continue
                expected = target + 1
                target_slot = slot
                p = end + 1
            else:
                target = t[node, FIRST] + 1
                target_slot = t[target - 1, LENGTH]
                p = read_map_key(data, p, n, t, node, slot, valid, offsets, text)
                if p < 0:
                    control[FULL_NODE], control[FULL_TEXT] = target - 1, target_slot < t[target - 1, CAPACITY]
                    return p
            c = data[p]
            while c == 32 or c == 9 or c == 13:
                p += 1
                c = data[p]
            if c != 58:
                return ODD
            p += 1
            c = data[p]
            while c == 32 or c == 9 or c == 13:
                p += 1
                c = data[p]
        inner = t[target, KIND]
        if inner <= MAP and c == (91 if inner == LIST else 123):
            if t[target, LENGTH] != target_slot:
                if t[target, LENGTH] > target_slot:
                    return ODD
                fill(t, target, target_slot, valid, words, offsets)
            if inner == STRUCT:
                valid[t[target, VALID] + target_slot] = 1
                t[target, LENGTH] = target_slot + 1
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = node, slot, expected
            depth += 1
            node, slot, kind, expected = target, target_slot, inner, t[target, FIRST]
            close = 93 if inner == LIST else 125
            fresh = True
            p += 1
            continue
        p = read_value(data, p, n, t, target, target_slot, valid, words, offsets, text)
        if p < 0:
            control[FULL_NODE], control[FULL_TEXT] = target, 1
            return p
    while data[p] == 32 or data[p] == 9 or data[p] == 13:
        p += 1
    if data[p] != 10:
        return ODD
    if rescued[MAX_RESCUED, 0] > 0:
        _end_rescued(t, control[RESCUE_NODE], row, valid, words, offsets, text)
        control[RESCUED_COUNT] += rescued[MAX_RESCUED, 0]
    return p


@entry
def scan(data, t, keys, table, valid, words, offsets, text, stack, rescued, odd, control):
    """Read records until the data ends, `odd` is full, or a buffer is full.

    The data must end with a line feed. Returns 0 at the end of the data, ODD when `odd` is full, FULL when the
    buffer named in `control` must grow. After that, a call with the same arguments continues.
    """
    n = data.size
    p, row, record = control[POSITION], control[ROW], control[RECORD]
    line, odds = control[LINE], control[ODD_COUNT]
    status = 0
    while True:
        start = p
        while p < n and (data[p] == 32 or data[p] == 9 or data[p] == 13 or data[p] == 10):
            if data[p] == 10:
                line += 1
                start = p + 1
            p += 1
        if p >= n:
            break
        if odds >= odd.shape[0]:
            p, status = start, ODD
            break
        end = _record(data, p, n, t, keys, table, valid, words, offsets, text, stack, rescued, row, control)
        if end == FULL:
            rollback(t, row, offsets)
            p, status = start, FULL
            break
        if end == ODD:
            rollback(t, row, offsets)
            end = line_end(data, p, n)
            odd[odds, ODD_START], odd[odds, ODD_END], odd[odds, ODD_ROW] = start, end, row
            odd[odds, ODD_RECORD], odd[odds, ODD_LINE] = record, line
            odds += 1
        else:
            row += 1
            t[0, LENGTH] = row
        record += 1
        line += 1
        p = end + 1
    control[POSITION], control[ROW], control[RECORD] = p, row, record
    control[LINE], control[ODD_COUNT] = line, odds
    return status


@entry
def count_timestamps(offsets, text, quotes, scratch):
    """Return how many texts are time stamps; `quotes` is 1 if the texts stand in quotes, else 0.

    `scratch` has room for one text, its closing quote and what `scan_timestamp` may look at after it.
    """
    count = 0
    for i in range(offsets.size - 1):
        start = offsets[i] + quotes
        size = offsets[i + 1] - quotes - start
        if size < MIN_TIMESTAMP or size > MAX_TIMESTAMP or text[start + 4] != 45:
            continue
        for j in range(size):
            scratch[j] = text[start + j]
        scratch[size] = 34
        end, _ = scan_timestamp(scratch, 0)
        if end == size:
            count += 1
    return count


@entry
def finish(t, valid, words, offsets):
    """Bring every column to its parent's length."""
    for node in range(1, t.shape[0]):
        limit = length_limit(t, node, offsets)
        if t[node, LENGTH] < limit:
            fill(t, node, limit, valid, words, offsets)
