"""The compiled walk over frames of `pgoutput`: where rows, tables and values begin, never beyond the end of the bytes.

Every function returns a status below zero, or the number of what it found. Nothing is trusted: all lengths are checked
against the end of their frame.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, copy16, entry, inlined, load8, newlines16, trailing_zeros

CUT_OFF, BAD_KIND, BAD_COLUMNS, BAD_LENGTH, TOO_MANY = -1, -2, -3, -4, -5

# Lines of the table of rows.
KIND, RELATION, NEW, END, OLD, OLD_KIND, TRANSACTION = range(7)
ROW_LINES = 7

NULL, UNCHANGED = -1, -2  # lengths of values that are not there
SLACK = 16  # bytes behind the end of a target that `gather` may write

_B, _C, _R, _Y, _I, _U, _D, _T = 66, 67, 82, 89, 73, 85, 68, 84
_K, _N, _O = 75, 78, 79
_NULL, _UNCHANGED, _TEXT = 110, 117, 116  # n, u, t


@compiled
def big32(data, at):
    """Return four bytes as a number, the highest first."""
    return (int(data[at]) << 24) | (int(data[at + 1]) << 16) | (int(data[at + 2]) << 8) | int(data[at + 3])


@compiled
def pass_tuple(data, at, end):
    """Return where the tuple that begins here ends."""
    if at + 2 > end:
        return CUT_OFF
    count = (int(data[at]) << 8) | int(data[at + 1])
    at += 2
    for _ in range(count):
        if at >= end:
            return CUT_OFF
        kind = data[at]
        at += 1
        if kind == _TEXT:
            if at + 4 > end:
                return CUT_OFF
            size = big32(data, at)
            at += 4
            if size > end - at:
                return CUT_OFF
            at += size
        elif kind != _NULL and kind != _UNCHANGED:
            return BAD_KIND
    return at


@entry
def find_rows(data, rows, others):
    """List the rows of frames, and the frames that are no rows.

    `rows` gets a column per row (see the lines above): NEW is where its new tuple begins, which ends with the frame at
    END and is checked by `find_values`; OLD is where its old one begins, which is checked here; 0 is none. `others`
    gets the start, the end and the number of rows before each other frame. Returns (status, rows, others, byte): the
    status is 0, or says what is wrong at that byte.
    """
    at, end = 0, len(data)
    row, other, transaction = 0, 0, -1
    while at < end:
        if at + 5 > end:
            return CUT_OFF, row, other, at
        size = int(data[at]) | (int(data[at + 1]) << 8) | (int(data[at + 2]) << 16) | (int(data[at + 3]) << 24)
        start = at + 4
        if size < 1 or size > end - start:
            return CUT_OFF, row, other, at
        stop = start + size
        kind = data[start]
        if kind in (_I, _U, _D):
            if row >= rows.shape[1]:
                return TOO_MANY, row, other, at
            if size < 6:
                return CUT_OFF, row, other, at
            place = start + 5
            mark = data[place]
            new, old, old_kind = 0, 0, 0
            if kind != _I and mark in (_K, _O):
                old = place + 1
                old_kind = int(mark)
                place = pass_tuple(data, old, stop)
                if place < 0:
                    return place, row, other, at
                if place < stop:
                    mark = data[place]
            if kind != _D:
                if place >= stop or mark != _N:
                    return BAD_KIND, row, other, at
                new = place + 1
            elif old == 0:
                return BAD_KIND, row, other, at
            elif place != stop:
                return BAD_LENGTH, row, other, at
            rows[KIND, row] = kind
            rows[RELATION, row] = big32(data, start + 1)
            rows[NEW, row] = new
            rows[END, row] = stop
            rows[OLD, row] = old
            rows[OLD_KIND, row] = old_kind
            rows[TRANSACTION, row] = transaction
            row += 1
        elif kind in (_B, _C, _R, _Y, _T):
            if other >= len(others):
                return TOO_MANY, row, other, at
            others[other, 0] = start
            others[other, 1] = stop
            others[other, 2] = row
            other += 1
            if kind == _B:
                transaction += 1
        else:
            return BAD_KIND, row, other, at
        at = stop
    return 0, row, other, at


@entry
def find_values(data, starts, ends, columns, is_whole, offsets, lengths):
    """Find the values of tuples that begin at `starts` (0: there is none, all its values are UNCHANGED).

    No tuple goes beyond its place in `ends`; with `is_whole` it ends there. `offsets` and `lengths` have a line per
    column. Returns 0, or what is wrong with a tuple: it has another number of columns, or does not end where it should.
    """
    for row in range(len(starts)):
        at, end = starts[row], ends[row]
        if at == 0:
            for column in range(columns):
                offsets[column, row] = 0
                lengths[column, row] = UNCHANGED
            continue
        if at + 2 > end:
            return CUT_OFF
        if ((int(data[at]) << 8) | int(data[at + 1])) != columns:
            return BAD_COLUMNS
        at += 2
        for column in range(columns):
            if at >= end:
                return CUT_OFF
            kind = data[at]
            at += 1
            if kind == _TEXT:
                if at + 4 > end:
                    return CUT_OFF
                size = big32(data, at)
                at += 4
                if size > end - at:
                    return CUT_OFF
                offsets[column, row] = at
                lengths[column, row] = size
                at += size
            elif kind == _NULL:
                offsets[column, row] = 0
                lengths[column, row] = NULL
            elif kind == _UNCHANGED:
                offsets[column, row] = 0
                lengths[column, row] = UNCHANGED
            else:
                return BAD_KIND
        if is_whole and at != end:
            return BAD_LENGTH
    return 0


@entry
def measure(lengths, ends):
    """Fill Arrow's offsets of the values with these lengths; returns how many bytes they have, and how many values are
    not there."""
    total, absent = 0, 0
    ends[0] = 0
    for row in range(len(lengths)):
        size = lengths[row]
        if size < 0:
            absent += 1
        else:
            total += size
        ends[row + 1] = total
    return total, absent


@inlined
def copy_value(data, at, size, text, to):
    """Copy bytes, and up to SLACK more: what is written too much is overwritten by the next value."""
    last = len(data) - 16
    i = 0
    while i < size and at + i <= last:
        copy16(data, at + i, text, to + i)
        i += 16
    while i < size:
        text[to + i] = data[at + i]
        i += 1


@entry
def gather(data, more, offsets, lengths, ends, text):
    """Copy values one behind the other: those at offsets behind `data` lie in `more`. `text` has SLACK more bytes than
    they need."""
    size = len(data)
    for row in range(len(lengths)):
        at = offsets[row]
        if at < size:
            copy_value(data, at, lengths[row], text, int(ends[row]))
        else:
            copy_value(more, at - size, lengths[row], text, int(ends[row]))


@compiled
def hex_value(byte):
    """Return the value of a hexadecimal digit; -1 if it is none."""
    if 48 <= byte <= 57:
        return byte - 48
    if 97 <= byte <= 102:
        return byte - 87
    return -1


@entry
def decode_hex(text, ends, out, out_ends):
    """Decode values of the form `\\x0aff`; returns -1 if one has another form."""
    to = 0
    out_ends[0] = 0
    for row in range(len(ends) - 1):
        at, end = ends[row], ends[row + 1]
        if end > at:
            if end - at < 2 or text[at] != 92 or text[at + 1] != 120 or (end - at) & 1:
                return -1
            at += 2
            while at < end:
                high, low = hex_value(int(text[at])), hex_value(int(text[at + 1]))
                if high < 0 or low < 0:
                    return -1
                out[to] = high * 16 + low
                to += 1
                at += 2
        out_ends[row + 1] = to
    return 0


@compiled
def escaped(byte):
    """Return the byte for which a letter behind a backslash stands in COPY's text; -1 if it stands for none."""
    if byte == 92:  # the backslash itself
        return 92
    if byte == 110:  # n
        return 10
    if byte == 116:  # t
        return 9
    if byte == 114:  # r
        return 13
    if byte == 98:  # b
        return 8
    if byte == 102:  # f
        return 12
    if byte == 118:  # v
        return 11
    return -1


_LOW, _HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_TABS, _ENDS, _SLASHES = np.uint64(0x0909090909090909), np.uint64(0x0A0A0A0A0A0A0A0A), np.uint64(0x5C5C5C5C5C5C5C5C)


@inlined
def zeros(word):
    """Return a number whose lowest bit that is set is the highest bit of the first byte that is 0; 0 if none is."""
    return (word - _LOW) & ~word & _HIGH


@inlined
def find_break(data, at):
    """Return where the next tab, line feed or backslash is; the end of the bytes if there is none."""
    end = len(data)
    while at + 8 <= end:
        word = load8(data, at)
        found = zeros(word ^ _TABS) | zeros(word ^ _ENDS) | zeros(word ^ _SLASHES)
        if found:
            return at + (trailing_zeros(found) >> 3)
        at += 8
    while at < end and data[at] != 9 and data[at] != 10 and data[at] != 92:
        at += 1
    return at


@entry
def count_lines(data):
    """Count the line feeds."""
    at, end, found = 0, len(data), 0
    while at + 16 <= end:
        flags = newlines16(data, at)
        while flags:
            flags &= flags - np.uint64(1)
            found += 1
        at += 16
    for i in range(at, end):
        found += data[i] == 10
    return found


@entry
def find_copied(data, columns, out, offsets, lengths):
    """Find the values of rows in COPY's text: tabs between values, a line per row, `\\N` for null.

    `offsets` and `lengths` have a line per column. A value with escapes lies in `out`, as long as `data`, without them;
    its offset counts on behind the end of `data`. Returns the number of rows, or what is wrong.
    """
    at, to, row, end = 0, 0, 0, len(data)
    while at < end:
        if row >= offsets.shape[1]:
            return TOO_MANY
        for column in range(columns):
            start = at
            at = find_break(data, at)
            if at >= end:
                return CUT_OFF
            if data[at] != 92:
                offsets[column, row] = start
                lengths[column, row] = at - start
            elif at == start and at + 2 < end and data[at + 1] == 78 and (data[at + 2] == 9 or data[at + 2] == 10):
                offsets[column, row] = 0
                lengths[column, row] = NULL
                at += 2
            else:
                begin = to
                for i in range(start, at):
                    out[to] = data[i]
                    to += 1
                while data[at] != 9 and data[at] != 10:
                    byte = int(data[at])
                    if byte == 92:
                        at += 1
                        if at >= end:
                            return CUT_OFF
                        byte = escaped(int(data[at]))
                        if byte < 0:
                            return BAD_KIND
                    out[to] = byte
                    to += 1
                    at += 1
                    if at >= end:
                        return CUT_OFF
                offsets[column, row] = end + begin
                lengths[column, row] = to - begin
            if data[at] != (10 if column == columns - 1 else 9):
                return BAD_COLUMNS
            at += 1
        row += 1
    return row
