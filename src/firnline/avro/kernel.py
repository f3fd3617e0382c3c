"""The compiled walks over Avro records: one function serves every schema, which is an argument.

A schema is a table with a row per node, numbered depth first: the children of a node follow it, each with all below it,
up to `END`. All buffers of one kind are parts of one arena; the table says where the part of a node begins.

Decoding takes two passes. `check` proves that a record is what its schema says, and counts what it adds to each node;
`fill` then writes the values of good records, which need no checks any more.

A walk goes from a node to the next number. Only lists and unions lead elsewhere: each puts a frame on a stack, which
says at which number the walk turns. (Functions that call themselves do not survive numba's cache.)
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, entry

# Kinds of nodes.
(RECORD, UNION, ARRAY, MAP, NULL, STRING, BYTES, FIXED, ENUM, BOOLEAN, INT, LONG, FLOAT, DOUBLE, DECIMAL,
 DECIMAL_FIXED) = range(16)  # fmt: skip
UNITS = {"millis": "ms", "micros": "us", "nanos": "ns"}  # of times, in Avro and in Arrow

# Columns of the node table. HIGH and LOW are the two words of the smallest decimal that has too many digits; of a time
# of day, LOW is the length of a day.
(KIND, NULL_BRANCH, END, SIZE, HIGH, LOW, VALID, WORDS, OFFSETS, TEXT, LENGTH, TEXT_LENGTH) = range(12)
NODE_COLUMNS = 12

# Outcomes of `check` for one record.
GOOD, BROKEN, NOT_UTF8, TOO_LARGE = 0, -1, -2, -3

# Columns of a frame: the list or union that it belongs to, the number at which the walk turns, and of a list the items
# that are left (or, to encode, where they end) and the slot around it.
BELOW, TURN, LEFT, SLOT = range(4)
FRAME_COLUMNS = 4

_LAST_BYTE = 9  # of a number: the tenth has one bit left


# --- decoding ------------------------------------------------------------------------------------------


@compiled
def _number_end(data, at, end):
    """Return the end of a variable-length number, or BROKEN."""
    for size in range(_LAST_BYTE + 1):
        if at + size >= end:
            return BROKEN
        byte = data[at + size]
        if byte < 0x80:
            return BROKEN if size == _LAST_BYTE and byte > 1 else at + size + 1
    return BROKEN


@compiled
def _number(data, at):
    """Return a variable-length number that is complete."""
    value = np.uint64(0)
    shift = np.uint64(0)
    while True:
        byte = np.uint64(data[at])
        value |= (byte & np.uint64(0x7F)) << shift
        if byte < 0x80:
            break
        shift += np.uint64(7)
        at += 1
    return np.int64(value >> np.uint64(1)) ^ -np.int64(value & np.uint64(1))


@compiled
def _is_utf8(data, at, end):
    while at < end:
        c = data[at]
        if c < 0x80:
            at += 1
            continue
        size = 2 if c < 0xE0 else 3 if c < 0xF0 else 4
        if c < 0xC2 or c > 0xF4 or at + size > end:
            return False
        d = data[at + 1]
        if (c == 0xE0 and d < 0xA0) or (c == 0xED and d > 0x9F) or (c == 0xF0 and d < 0x90) or (c == 0xF4 and d > 0x8F):
            return False
        for i in range(1, size):
            if data[at + i] & 0xC0 != 0x80:
                return False
        at += size
    return True


@compiled
def _decimal_word(data, at, end, word):
    """Return the lower (0) or upper (1) 64 bits of a big-endian number, extended by its sign."""
    negative = end > at and data[at] >= 0x80
    value = np.uint64(0)
    for i in range(8):
        place = end - 1 - 8 * word - i
        byte = np.uint64(data[place]) if place >= at else np.uint64(0xFF if negative else 0)
        value |= byte << np.uint64(8 * i)
    return np.int64(value)


@compiled
def _is_decimal(data, at, end, high, low):
    """Return whether a number has no more digits than its column: it lies between -limit and limit."""
    negative = end > at and data[at] >= 0x80
    for i in range(at, end - 16):  # more than 128 bits: the others only repeat the sign
        if data[i] != (0xFF if negative else 0):
            return False
    if end - at > 16 and (data[end - 16] >= 0x80) != negative:
        return False
    lower = np.uint64(_decimal_word(data, at, end, 0))
    upper = np.uint64(_decimal_word(data, at, end, 1))
    if negative:  # the magnitude
        lower = ~lower + np.uint64(1)
        upper = ~upper + np.uint64(1 if lower == 0 else 0)
    if upper != np.uint64(high):
        return upper < np.uint64(high)
    return lower < np.uint64(low)


@compiled
def _count_nulls(node, table):
    """Count a null for a node and for all below it that have a slot for each of its own."""
    at = node
    while at < table[node, END]:
        table[at, LENGTH] += 1
        at = table[at, END] if table[at, KIND] == ARRAY or table[at, KIND] == MAP else at + 1


@compiled
def _check_record(data, at, end, table, stack):
    """Check a record and count what it adds to each node. Returns where it ends, or what is wrong."""
    node = 0
    depth = 0
    while True:
        while depth and node == stack[depth - 1, TURN]:
            below = stack[depth - 1, BELOW]
            if table[below, KIND] == UNION:
                depth -= 1
                node = table[below, END]
                continue
            stack[depth - 1, LEFT] -= 1
            if stack[depth - 1, LEFT] == 0:
                at, count = _block(data, at, end)
                if at < 0:
                    return at
                if count == 0:
                    depth -= 1
                    continue
                stack[depth - 1, LEFT] = count
            node = below + 1
        if node == table[0, END]:
            return at
        kind = table[node, KIND]
        null = table[node, NULL_BRANCH]
        branch = 0
        if kind == UNION or null >= 0:
            after = _number_end(data, at, end)
            if after < 0:
                return BROKEN
            branch = _number(data, at)
            at = after
            if branch < 0 or branch >= (table[node, SIZE] if kind == UNION else 2):
                return BROKEN
            if branch == null:
                _count_nulls(node, table)
                node = table[node, END]
                continue
        table[node, LENGTH] += 1
        if kind == RECORD:
            node += 1
            continue
        if kind == UNION:
            wanted = branch - 1 if null >= 0 and branch > null else branch
            child = node + 1
            chosen = child
            member = 0
            while child < table[node, END]:
                if member == wanted:
                    chosen = child
                else:
                    _count_nulls(child, table)
                member += 1
                child = table[child, END]
            stack[depth, BELOW] = node
            stack[depth, TURN] = table[chosen, END]
            depth += 1
            node = chosen
            continue
        if kind in (ARRAY, MAP):
            at, count = _block(data, at, end)
            if at < 0:
                return at
            if count == 0:
                node = table[node, END]
                continue
            stack[depth, BELOW] = node
            stack[depth, TURN] = table[node, END]
            stack[depth, LEFT] = count
            depth += 1
            node += 1
            continue
        at = _check_scalar(node, kind, data, at, end, table)
        if at < 0:
            return at
        node += 1


@compiled
def _block(data, at, end):
    """Return where the items of a block begin, or BROKEN, and how many there are."""
    after = _number_end(data, at, end)
    if after < 0:
        return BROKEN, 0
    count = _number(data, at)
    if count < 0:
        count = -count
        at = after
        after = _number_end(data, at, end)
        if after < 0 or _number(data, at) < 0:
            return BROKEN, 0
    if count < 0 or count > end - after:  # each has at least one byte
        return BROKEN, 0
    return after, count


@compiled
def _check_scalar(node, kind, data, at, end, table):
    """Check a value without parts. Returns where it ends, or what is wrong."""
    if kind == NULL:
        return at
    if kind == BOOLEAN:
        return at + 1 if at < end and data[at] <= 1 else BROKEN
    if kind in (FLOAT, DOUBLE):
        at += 4 if kind == FLOAT else 8
        return at if at <= end else BROKEN
    if kind in (FIXED, DECIMAL_FIXED):
        size = table[node, SIZE]
        if size > end - at:
            return BROKEN
        table[node, TEXT_LENGTH] += size
        if kind == DECIMAL_FIXED and not _is_decimal(data, at, at + size, table[node, HIGH], table[node, LOW]):
            return TOO_LARGE
        return at + size
    after = _number_end(data, at, end)
    if after < 0:
        return BROKEN
    number = _number(data, at)
    if kind in (INT, LONG):
        if kind == INT and (number < -(1 << 31) or number >= 1 << 31):
            return BROKEN
        limit = table[node, LOW]
        return TOO_LARGE if limit and (number < 0 or number >= limit) else after
    if kind == ENUM:
        return after if number >= 0 and number < table[node, SIZE] else BROKEN
    # STRING, BYTES and DECIMAL: a length, then bytes.
    if number < 0 or number > end - after:
        return BROKEN
    table[node, TEXT_LENGTH] += number
    if kind == STRING and not _is_utf8(data, after, after + number):
        return NOT_UTF8
    if kind == DECIMAL and not _is_decimal(data, after, after + number, table[node, HIGH], table[node, LOW]):
        return TOO_LARGE
    return after + number


@entry
def check(data, starts, ends, outcomes, table, stack):
    """Check records and count what the good ones add to each node. Writes an outcome for each record that was good."""
    bad = 0
    for record in range(starts.size):
        if outcomes[record] != GOOD:
            continue
        at = _check_record(data, starts[record], ends[record], table, stack)
        if at != ends[record]:
            outcomes[record] = at if at < 0 else BROKEN
            bad += 1
    return bad


@compiled
def _fill_nulls(node, table, valid, offsets):
    at = node
    while at < table[node, END]:
        slot = table[at, LENGTH]
        table[at, LENGTH] = slot + 1
        valid[table[at, VALID] + slot] = 0
        kind = table[at, KIND]
        if kind in (ARRAY, MAP):
            offsets[table[at, OFFSETS] + slot + 1] = offsets[table[at, OFFSETS] + slot]
            at = table[at, END]
            continue
        if kind in (STRING, BYTES, FIXED):
            offsets[table[at, OFFSETS] + slot + 1] = offsets[table[at, OFFSETS] + slot]
        at += 1


@compiled
def _skip_number(data, at):
    while data[at] >= 0x80:
        at += 1
    return at + 1


@compiled
def _fill_record(data, at, table, valid, words, offsets, text, stack):
    """Write a record that was checked."""
    node = 0
    depth = 0
    while True:
        while depth and node == stack[depth - 1, TURN]:
            below = stack[depth - 1, BELOW]
            if table[below, KIND] == UNION:
                depth -= 1
                node = table[below, END]
                continue
            stack[depth - 1, LEFT] -= 1
            if stack[depth - 1, LEFT] == 0:
                count = _number(data, at)
                at = _skip_number(data, at)
                if count == 0:
                    depth -= 1
                    continue
                if count < 0:
                    count = -count
                    at = _skip_number(data, at)
                stack[depth - 1, LEFT] = count
                offsets[table[below, OFFSETS] + table[below, LENGTH]] += count
            node = below + 1
        if node == table[0, END]:
            return
        kind = table[node, KIND]
        null = table[node, NULL_BRANCH]
        branch = 0
        if kind == UNION or null >= 0:
            branch = _number(data, at)
            at = _skip_number(data, at)
            if branch == null:
                _fill_nulls(node, table, valid, offsets)
                node = table[node, END]
                continue
        slot = table[node, LENGTH]
        table[node, LENGTH] = slot + 1
        valid[table[node, VALID] + slot] = 1
        if kind == RECORD:
            node += 1
            continue
        if kind == UNION:
            wanted = branch - 1 if null >= 0 and branch > null else branch
            child = node + 1
            chosen = child
            member = 0
            while child < table[node, END]:
                if member == wanted:
                    chosen = child
                else:
                    _fill_nulls(child, table, valid, offsets)
                member += 1
                child = table[child, END]
            stack[depth, BELOW] = node
            stack[depth, TURN] = table[chosen, END]
            depth += 1
            node = chosen
            continue
        if kind in (ARRAY, MAP):
            count = _number(data, at)
            at = _skip_number(data, at)
            if count < 0:
                count = -count
                at = _skip_number(data, at)
            place = table[node, OFFSETS] + slot
            offsets[place + 1] = offsets[place] + count
            if count == 0:
                node = table[node, END]
                continue
            stack[depth, BELOW] = node
            stack[depth, TURN] = table[node, END]
            stack[depth, LEFT] = count
            depth += 1
            node += 1
            continue
        at = _fill_scalar(node, kind, slot, data, at, table, words, offsets, text)
        node += 1


@compiled
def _fill_scalar(node, kind, slot, data, at, table, words, offsets, text):
    """Write a value without parts. Returns where it ends."""
    if kind == NULL:
        return at
    if kind == BOOLEAN:
        words[table[node, WORDS] + slot] = data[at]
        return at + 1
    if kind in (FLOAT, DOUBLE):
        size = 4 if kind == FLOAT else 8
        value = np.uint64(0)
        for i in range(size):
            value |= np.uint64(data[at + i]) << np.uint64(8 * i)
        words[table[node, WORDS] + slot] = np.int64(value)
        return at + size
    if kind in (INT, LONG, ENUM):
        words[table[node, WORDS] + slot] = _number(data, at)
        return _skip_number(data, at)
    size = table[node, SIZE]
    if kind in (STRING, BYTES, DECIMAL):
        size = _number(data, at)
        at = _skip_number(data, at)
    if kind in (DECIMAL, DECIMAL_FIXED):
        words[table[node, WORDS] + 2 * slot] = _decimal_word(data, at, at + size, 0)
        words[table[node, WORDS] + 2 * slot + 1] = _decimal_word(data, at, at + size, 1)
        return at + size
    place = table[node, OFFSETS] + slot
    to = table[node, TEXT] + offsets[place]
    for i in range(size):
        text[to + i] = data[at + i]
    offsets[place + 1] = offsets[place] + size
    return at + size


@entry
def fill(data, starts, outcomes, table, valid, words, offsets, text, stack):
    """Write the values of the good records."""
    for record in range(starts.size):
        if outcomes[record] == GOOD:
            _fill_record(data, starts[record], table, valid, words, offsets, text, stack)
    return 0


# --- encoding ------------------------------------------------------------------------------------------


@compiled
def _put_number(out, at, value):
    code = np.uint64((value << 1) ^ (value >> 63))
    while code >= np.uint64(0x80):
        out[at] = np.uint8(code & np.uint64(0x7F)) | np.uint8(0x80)
        code >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(code)
    return at + 1


@compiled
def _decimal_size(low, high):
    """Return the fewest bytes that hold a number of 128 bits with its sign."""
    size = 16
    while size > 1:
        top = _decimal_byte(low, high, size - 1)
        below = _decimal_byte(low, high, size - 2)
        if not ((top == 0 and below < 0x80) or (top == 0xFF and below >= 0x80)):
            break
        size -= 1
    return size


@compiled
def _decimal_byte(low, high, place):
    word = np.uint64(low) if place < 8 else np.uint64(high)
    return np.int64((word >> np.uint64(8 * (place % 8))) & np.uint64(0xFF))


@compiled
def _write_row(row, table, valid, words, offsets, text, out, at, stack):
    """Write a row. Returns where it ends."""
    node = 0
    depth = 0
    slot = row
    while True:
        while depth and node == stack[depth - 1, TURN]:
            below = stack[depth - 1, BELOW]
            slot += 1
            if slot == stack[depth - 1, LEFT]:
                out[at] = 0
                at += 1
                depth -= 1
                slot = stack[depth, SLOT]
                continue
            node = below + 1
        if node == table[0, END]:
            return at
        kind = table[node, KIND]
        null = table[node, NULL_BRANCH]
        if null >= 0:
            present = valid[table[node, VALID] + slot]
            out[at] = 2 * (1 - null) if present else 2 * null
            at += 1
            if not present:
                node = table[node, END]
                continue
        if kind == RECORD:
            node += 1
            continue
        if kind in (ARRAY, MAP):
            first = offsets[table[node, OFFSETS] + slot]
            last = offsets[table[node, OFFSETS] + slot + 1]
            if first == last:
                out[at] = 0
                at += 1
                node = table[node, END]
                continue
            at = _put_number(out, at, last - first)
            stack[depth, BELOW] = node
            stack[depth, TURN] = table[node, END]
            stack[depth, LEFT] = last
            stack[depth, SLOT] = slot
            depth += 1
            slot = first
            node += 1
            continue
        at = _write_scalar(node, kind, slot, table, words, offsets, text, out, at)
        node += 1


@compiled
def _write_scalar(node, kind, slot, table, words, offsets, text, out, at):
    """Write a value without parts. Returns where it ends."""
    if kind == NULL:
        return at
    if kind == BOOLEAN:
        out[at] = words[table[node, WORDS] + slot]
        return at + 1
    if kind in (FLOAT, DOUBLE):
        size = 4 if kind == FLOAT else 8
        value = np.uint64(words[table[node, WORDS] + slot])
        for i in range(size):
            out[at + i] = (value >> np.uint64(8 * i)) & np.uint64(0xFF)
        return at + size
    if kind in (INT, LONG):
        return _put_number(out, at, words[table[node, WORDS] + slot])
    if kind == DECIMAL:
        place = table[node, WORDS] + 2 * slot
        size = _decimal_size(words[place], words[place + 1])
        out[at] = 2 * size
        for i in range(size):
            out[at + 1 + i] = _decimal_byte(words[place], words[place + 1], size - 1 - i)
        return at + 1 + size
    place = table[node, OFFSETS] + slot
    start = table[node, TEXT] + offsets[place]
    length = offsets[place + 1] - offsets[place]
    at = _put_number(out, at, length)
    for i in range(length):
        out[at + i] = text[start + i]
    return at + length


@entry
def write(rows, before, table, valid, words, offsets, text, out, ends, stack):
    """Write rows one after the other, each with `before` bytes in front, and where each ends."""
    at = 0
    for row in range(rows):
        at = _write_row(row, table, valid, words, offsets, text, out, at + before, stack)
        ends[row] = at
    return 0
