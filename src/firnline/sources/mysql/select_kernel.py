"""The compiled part of reading tables: cuts what the server sends into rows, finds their values, and reads these.

Rows are those of the binary protocol: a byte 0, bits of the columns that are null, then the values. `split` runs in the
driver, as packets come; all else in workers. `find_values` checks every length against the end of the row, and the
other functions check the lengths of what they read: whatever the bytes are, nothing is read outside.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import entry, inlined
from firnline.sources.mysql.kernel import NULL, VALUE, days, is_date, power_of_ten, times_plus, write_clock

MORE, END, LARGE, LOST = range(4)  # of `split`: why it stopped
LARGEST = 0xFFFFFF  # a packet of this length goes on in the next one

# How the value of a column lies in a row: its length, if all values have the same one; else:
WITH_LENGTH = 0  # a length of one to nine bytes stands before it
WITH_BYTE = -1  # a length of one byte stands before it: dates and times


@entry
def split(data, start, end, sequence, most, found):
    """Go over packets with rows from `start` on, and write zero over the number of each, the highest byte of its
    header: so the header becomes the length of the row in four bytes.

    It stops after `most` rows. `found` gets: where it stopped, the next packet's number, the number of rows, where the
    last row begins.
    """
    p, rows, last = start, 0, start
    state = MORE
    while rows < most and end - p >= 4:
        size = np.int64(data[p]) | np.int64(data[p + 1]) << 8 | np.int64(data[p + 2]) << 16
        if data[p + 3] != sequence:
            state = LOST
            break
        if size == LARGEST:
            state = LARGE
            break
        if end - p < 4 + size:
            break
        if size == 0 or data[p + 4] != 0:
            state = END
            break
        data[p + 3] = 0
        sequence = (sequence + 1) & 255
        last = p
        rows += 1
        p += 4 + size
    found[0] = p
    found[1] = sequence
    found[2] = rows
    found[3] = last
    return state


@entry
def find_values(data, layout, offsets, lengths, states):
    """Find the values of all rows; return whether the rows are whole, and as many as there is room for."""
    columns, count = offsets.shape
    p, all_end = np.int64(0), data.shape[0]
    bits = (columns + 9) >> 3
    for r in range(count):
        if all_end - p < 4:
            return False
        size = (
            np.int64(data[p]) | np.int64(data[p + 1]) << 8 | np.int64(data[p + 2]) << 16 | np.int64(data[p + 3]) << 24
        )
        p += 4
        end = p + size
        if end > all_end or size < 1 + bits or data[p] != 0:
            return False
        nulls = p + 1
        p = nulls + bits
        for c in range(columns):
            bit = c + 2
            if data[nulls + (bit >> 3)] >> (bit & 7) & 1:
                states[c, r] = NULL
                continue
            width = layout[c]
            if width <= 0:
                if p >= end:
                    return False
                first = np.int64(data[p])
                p += 1
                if width == WITH_BYTE or first < 251:
                    width = first
                else:
                    more = 2 if first == 252 else 3 if first == 253 else 8 if first == 254 else 0
                    if more == 0 or end - p < more:
                        return False
                    width = np.int64(0)
                    for i in range(more):
                        width |= np.int64(data[p + i]) << (8 * i)
                    p += more
            if width < 0 or width > end - p:
                return False
            states[c, r] = VALUE
            offsets[c, r] = p
            lengths[c, r] = width
            p += width
        if p != end:
            return False
    return p == all_end


@inlined
def micros_at(data, p):
    """Read microseconds."""
    return np.int64(data[p]) | np.int64(data[p + 1]) << 8 | np.int64(data[p + 2]) << 16 | np.int64(data[p + 3]) << 24


@entry
def dates(data, offsets, lengths, states, in_days, out):
    """Read dates and time stamps; return how many are no date, and mark these as null; -1 if bytes are none at all.

    `out` gets days since 1970 if `in_days`, else microseconds.
    """
    odd = 0
    for r in range(out.shape[0]):
        out[r] = 0
        if states[r] != VALUE:
            continue
        p, size = offsets[r], lengths[r]
        if size != 0 and size != 4 and size != 7 and size != 11:
            return np.int64(-1)
        year = month = day = hour = minute = second = micros = np.int64(0)
        if size >= 4:
            year = np.int64(data[p]) | np.int64(data[p + 1]) << 8
            month, day = np.int64(data[p + 2]), np.int64(data[p + 3])
        if size >= 7:
            hour, minute, second = np.int64(data[p + 4]), np.int64(data[p + 5]), np.int64(data[p + 6])
        if size == 11:
            micros = micros_at(data, p + 7)
        if not is_date(year, month, day) or hour > 23 or minute > 59 or second > 59 or micros > 999999 or year < 1:
            states[r] = NULL
            odd += 1
        elif in_days:
            out[r] = days(year, month, day)
        else:
            out[r] = (((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second) * 1000000 + micros
    return np.int64(odd)


@entry
def clocks(data, offsets, lengths, states, digits, ends, out):
    """Write TIME values as text, one behind the other; return the bytes written, or -1 if a value is none.

    `out` has 18 bytes for every value, `ends` one element more than there are values.
    """
    q = 0
    for r in range(states.shape[0]):
        ends[r] = q
        if states[r] != VALUE:
            continue
        p, size = offsets[r], lengths[r]
        if size != 0 and size != 8 and size != 12:
            return np.int64(-1)
        negative = False
        hour = minute = second = micros = np.int64(0)
        if size >= 8:
            negative = data[p] != 0
            hour = micros_at(data, p + 1) * 24 + np.int64(data[p + 5])
            minute, second = np.int64(data[p + 6]), np.int64(data[p + 7])
        if size == 12:
            micros = micros_at(data, p + 8)
        if hour > 999 or minute > 59 or second > 59 or micros > 999999:
            return np.int64(-1)
        q = write_clock(out, q, negative, hour, minute, second, micros, digits)
    ends[states.shape[0]] = q
    return np.int64(q)


@entry
def decimals(data, offsets, lengths, states, precision, scale, out):
    """Read DECIMAL values from text into integers of two or four words; return -1, or the row that has none."""
    size = out.shape[1]
    for r in range(out.shape[0]):
        for i in range(size):
            out[r, i] = np.uint64(0)
        if states[r] != VALUE:
            continue
        p, end = offsets[r], offsets[r] + lengths[r]
        negative = p < end and data[p] == 45
        if negative:
            p += 1
        digits = 0  # that count
        behind = -1  # digits behind the point; -1: before it
        group, held = np.uint64(0), 0  # digits that are not in `out` yet
        any_digit = False
        while p < end:
            byte = np.int64(data[p])
            p += 1
            if byte == 46 and behind < 0:
                behind = 0
                continue
            if byte < 48 or byte > 57:
                return np.int64(r)
            any_digit = True
            if behind >= 0:
                behind += 1
            if digits or byte != 48:
                digits += 1
            group = group * np.uint64(10) + np.uint64(byte - 48)
            held += 1
            if held == 9:
                times_plus(out, r, size, power_of_ten(9), group)
                group, held = np.uint64(0), 0
        if not any_digit or behind > scale:
            return np.int64(r)
        times_plus(out, r, size, power_of_ten(held), group)
        short = scale - max(behind, 0)  # zeros that the text leaves out
        if digits:
            digits += short
        if digits > precision:
            return np.int64(r)
        while short > 0:
            step = min(short, 9)
            times_plus(out, r, size, power_of_ten(step), 0)
            short -= step
        if negative:
            carry = np.uint64(1)
            for i in range(size):
                out[r, i] = ~out[r, i] + carry
                carry = np.uint64(1) if carry and out[r, i] == 0 else np.uint64(0)
    return np.int64(-1)
