"""The compiled walk over a block: records straight into Arrow-shaped buffers, in one pass.

One compiled function serves every schema: the schema comes in as a table of nodes (see `layout`), numbered
breadth first so that the children of a node are neighbours. All buffers of one kind live in one arena.

Slots. The slot of a struct's child is the slot of the struct; the slots of a list's element are appended.
A column may lag behind: nulls are filled in when its next value comes, or at the end. So a record that turns
out odd half way is undone by cutting every column back to its parent's length (`rollback`).

Odd records (an unknown key, a value of another kind, anything not plainly valid) are only noted, with their
place, and go through the exact path in Python. The kernel may call a good record odd, never the reverse.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.ndjson.cells import close_container, fill, length_limit, read_map_key, read_value, rollback
from firnline.ndjson.jit import compiled, entry, inlined
from firnline.ndjson.nodes import (
    CAPACITY,
    COUNT,
    FIRST,
    FULL_NODE,
    FULL_TEXT,
    KEY,
    KEY_SIZE,
    KIND,
    LENGTH,
    LINE,
    LIST,
    MAP,
    MAX_RESCUED,
    ODD_COUNT,
    ODD_END,
    ODD_LINE,
    ODD_RECORD,
    ODD_ROW,
    ODD_START,
    OFFSETS,
    POSITION,
    RECORD,
    RESCUE_ALL,
    RESCUE_NODE,
    ROW,
    STRUCT,
    TABLE,
    TABLE_MASK,
    TEXT,
    TEXT_CAPACITY,
    TEXT_LENGTH,
    VALID,
)
from firnline.ndjson.text import FULL, ODD, SLACK, copy_json, copy_string, key_end, line_end, same_bytes


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
    """Take an unknown field of a record whose key is data[start:end].

    A null counts as absent. Anything else goes to the rescued text, if there is a node for it and nothing can be
    learned from the value: under RESCUE_ALL, or when it is an empty array or object. `rescued` holds the keys
    written so far, their count in the last row. Returns the index after the value, or ODD or FULL.
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
            place = t[target, LENGTH]
            if place >= t[target, CAPACITY]:
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
                place = slot
                p = end + 1
            else:
                target = t[node, FIRST] + 1
                place = t[target - 1, LENGTH]
                p = read_map_key(data, p, n, t, node, slot, valid, offsets, text)
                if p < 0:
                    control[FULL_NODE], control[FULL_TEXT] = target - 1, place < t[target - 1, CAPACITY]
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
            if t[target, LENGTH] != place:
                if t[target, LENGTH] > place:
                    return ODD
                fill(t, target, place, valid, words, offsets)
            if inner == STRUCT:
                valid[t[target, VALID] + place] = 1
                t[target, LENGTH] = place + 1
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = node, slot, expected
            depth += 1
            node, slot, kind, expected = target, place, inner, t[target, FIRST]
            close = 93 if inner == LIST else 125
            fresh = True
            p += 1
            continue
        p = read_value(data, p, n, t, target, place, valid, words, offsets, text)
        if p < 0:
            control[FULL_NODE], control[FULL_TEXT] = target, 1
            return p
    while data[p] == 32 or data[p] == 9 or data[p] == 13:
        p += 1
    if data[p] != 10:
        return ODD
    if rescued[MAX_RESCUED, 0] > 0:
        _end_rescued(t, control[RESCUE_NODE], row, valid, words, offsets, text)
    return p


@entry
def scan(data, t, keys, table, valid, words, offsets, text, stack, rescued, odd, control):
    """Read records until the data, the room for odd records, or the room in a buffer ends.

    The data ends with a line feed. Returns 0 at the end of the data, ODD when `odd` is full, FULL when the
    buffer named in `control` must grow; a call with the same arguments then goes on.
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
def finish(t, valid, words, offsets):
    """Bring every column to its parent's length."""
    for node in range(1, t.shape[0]):
        limit = length_limit(t, node, offsets)
        if t[node, LENGTH] < limit:
            fill(t, node, limit, valid, words, offsets)
