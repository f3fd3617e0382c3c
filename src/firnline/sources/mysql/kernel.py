"""The compiled part of the decoder: finds the values of rows, and turns them into the words that Arrow keeps.

`walk` goes over the rows of all events of one table and notes, of every column, where its values lie. It checks every
length against the end of the event, so that the other functions need not: whatever the bytes are, nothing is read
outside. The other functions turn the values of one column, found by `walk`, into words, days, decimals or text.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors
# ruff: noqa: SIM109, SIM110, SIM114

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, copy16, entry, high_product, inlined

# Columns of the table of events.
START, END, KIND, BITMAP, AFTER_BITMAP = range(5)  # where its rows begin and end, and its bitmaps of columns
EVENT_COLUMNS = 5
INSERT, UPDATE, DELETE = 0, 1, 2  # kinds of events, and of changes
VALUE, NULL, MISSING = 0, 1, 2  # of every row and column
BAD = -1  # an event's rows do not end where the event does

DATE, NEW_DATE, OLD_DATETIME, DATETIME2, TIMESTAMP, TIMESTAMP2 = range(6)  # for `times`
SLACK = 16  # bytes behind the end of a target that `copy_values` may write


@compiled
def image(data, p, end, bitmap, columns, layout, offsets, lengths, states):
    """Find the values of one row image. Returns the place behind it, or BAD."""
    present = 0
    for c in range(columns):
        if data[bitmap + (c >> 3)] >> (c & 7) & 1:
            present += 1
    nulls = p
    p += (present + 7) >> 3
    if p > end:
        return BAD
    bit = 0
    for c in range(columns):
        if not (data[bitmap + (c >> 3)] >> (c & 7) & 1):
            states[c] = MISSING
            continue
        is_null = data[nulls + (bit >> 3)] >> (bit & 7) & 1
        bit += 1
        if is_null:
            states[c] = NULL
            continue
        prefix = layout[c, 0]
        size = layout[c, 1]
        if prefix:
            if p + prefix > end:
                return BAD
            size = np.int64(data[p])
            for i in range(1, prefix):
                size |= np.int64(data[p + i]) << (8 * i)
            p += prefix
        if size > end - p:
            return BAD
        states[c] = VALUE
        offsets[c] = p
        lengths[c] = size
        p += size
    return p


@inlined
def same(data, p, q, size):
    """Return whether two stretches of bytes are equal."""
    for i in range(size):
        if data[p + i] != data[q + i]:
            return False
    return True


@inlined
def put(row, c, offset, length, state, offsets, lengths, states):
    """Note where the value of a row and column lies."""
    offsets[c, row] = offset
    lengths[c, row] = length
    states[c, row] = state


@entry
def walk(
    data, events, layout, is_key, scratch, flags, offsets, lengths, states, old_offsets, old_lengths, old_states, ops,
    owners, wants_old, writes
):  # fmt: skip
    """Go over the rows of all events; return the number of changes, or -1 - i if event i is damaged.

    An update that changes the key becomes a delete and an insert. A column that the image after an update leaves out
    has the value that the image before it has, if that has one.

    Args:
        data: All bytes.
        events: A row per event: see `START` and the following.
        layout: Of every column: how many bytes its length has, or else its value.
        is_key: Of every column.
        scratch: Four rows of room for places and lengths: of the image before, and of the one after.
        flags: Two rows of room for states, likewise.
        offsets, lengths, states: Of every column and change: what `walk` finds of the row after the change.
        ops, owners: Of every change: its kind, and its event.
        old_offsets, old_lengths, old_states: The same of the row before the change, if `wants_old`.
        wants_old: Whether the row before the change is wanted.
        writes: False to count only.
    """
    columns = layout.shape[0]
    count = 0
    for e in range(events.shape[0]):
        p, end, kind = events[e, START], events[e, END], events[e, KIND]
        while p < end:
            started = p
            if kind != INSERT:
                p = image(data, p, end, events[e, BITMAP], columns, layout, scratch[0], scratch[1], flags[0])
                if p < 0:
                    return -1 - e
            if kind != DELETE:
                p = image(data, p, end, events[e, AFTER_BITMAP], columns, layout, scratch[2], scratch[3], flags[1])
                if p < 0:
                    return -1 - e
            if p == started:  # a table without columns: no row ends
                return -1 - e
            moved = False
            if kind == UPDATE:
                for c in range(columns):
                    if flags[1, c] == MISSING and flags[0, c] != MISSING:
                        flags[1, c] = flags[0, c]
                        scratch[2, c] = scratch[0, c]
                        scratch[3, c] = scratch[1, c]
                    elif is_key[c] and flags[0, c] != MISSING:
                        if flags[0, c] != flags[1, c]:
                            moved = True
                        elif flags[0, c] == VALUE and (
                            scratch[1, c] != scratch[3, c]
                            or not same(data, scratch[0, c], scratch[2, c], scratch[1, c])
                        ):
                            moved = True
            if writes:
                if moved or kind == DELETE:
                    ops[count] = DELETE
                    owners[count] = e
                    for c in range(columns):
                        put(count, c, scratch[0, c], scratch[1, c], flags[0, c], offsets, lengths, states)
                        if wants_old:
                            put(
                                count,
                                c,
                                scratch[0, c],
                                scratch[1, c],
                                flags[0, c],
                                old_offsets,
                                old_lengths,
                                old_states,
                            )
                after = count + 1 if moved else count
                if kind != DELETE:
                    ops[after] = INSERT if moved else kind
                    owners[after] = e
                    for c in range(columns):
                        put(after, c, scratch[2, c], scratch[3, c], flags[1, c], offsets, lengths, states)
                        if wants_old:
                            state = flags[0, c] if kind == UPDATE and not moved else NULL
                            put(after, c, scratch[0, c], scratch[1, c], state, old_offsets, old_lengths, old_states)
            count += 2 if moved else 1
    return count


@entry
def words(data, offsets, states, size, big_endian, out):
    """Read the values of a column as unsigned numbers of `size` bytes."""
    for r in range(out.shape[0]):
        value = np.uint64(0)
        if states[r] == VALUE:
            p = offsets[r]
            if big_endian:
                for i in range(size):
                    value = value << np.uint64(8) | np.uint64(data[p + i])
            else:
                for i in range(size):
                    value |= np.uint64(data[p + i]) << np.uint64(8 * i)
        out[r] = value


@entry
def copy_values(data, offsets, lengths, states, pad, ends, out):
    """Copy the values of a column one behind the other; `ends` are their places in `out`, made before.

    `pad` is the length to which a value is filled with zeros, or 0. `out` is zero at first and has SLACK more bytes.
    """
    last = data.shape[0] - 16
    for r in range(states.shape[0]):
        if states[r] != VALUE:
            continue
        p, q, size = offsets[r], np.int64(ends[r]), lengths[r]
        i = 0
        if pad == 0:
            while i < size and p + i <= last:  # what is written too much is overwritten by the next value
                copy16(data, p + i, out, q + i)
                i += 16
        while i < size:
            out[q + i] = data[p + i]
            i += 1


@inlined
def days(year, month, day):
    """Return the days since 1970 of a date of the Gregorian calendar."""
    y = year - (1 if month <= 2 else 0)
    era = y // 400
    year_of_era = y - era * 400
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719468


@inlined
def is_date(year, month, day):
    """Return whether there is such a day."""
    if month < 1 or month > 12 or day < 1 or year > 9999:
        return False
    if month == 2:
        leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        return day <= (29 if leap else 28)
    if month == 4 or month == 6 or month == 9 or month == 11:
        return day <= 30
    return day <= 31


@inlined
def number(data, p, size):
    """Read a big-endian number."""
    value = np.int64(0)
    for i in range(size):
        value = value << 8 | np.int64(data[p + i])
    return value


@inlined
def fraction(data, p, digits):
    """Read the fraction of a second, in microseconds."""
    value = number(data, p, (digits + 1) >> 1)
    if digits == 1 or digits == 2:
        return value * 10000
    if digits == 3 or digits == 4:
        return value * 100
    return value


@entry
def times(data, offsets, states, kind, digits, out):
    """Read dates and time stamps; return how many are no date, and mark these as null.

    `out` gets days since 1970 of dates, else microseconds.
    """
    odd = 0
    for r in range(out.shape[0]):
        out[r] = 0
        if states[r] != VALUE:
            continue
        p = offsets[r]
        if kind == TIMESTAMP or kind == TIMESTAMP2:
            if kind == TIMESTAMP2:
                seconds, micros = number(data, p, 4), fraction(data, p + 4, digits)
            else:
                seconds, micros = np.int64(0), np.int64(0)
                for i in range(4):
                    seconds |= np.int64(data[p + i]) << (8 * i)
            if seconds + micros == 0 or micros > 999999:
                states[r] = NULL
                odd += 1
            else:
                out[r] = seconds * 1000000 + micros
            continue
        hour = minute = second = micros = np.int64(0)
        if kind == DATE or kind == NEW_DATE:
            value = np.int64(data[p]) | np.int64(data[p + 1]) << 8 | np.int64(data[p + 2]) << 16
            year, month, day = value >> 9, value >> 5 & 15, value & 31
        elif kind == DATETIME2:
            value = number(data, p, 5) - 0x8000000000
            micros = fraction(data, p + 5, digits)
            if value < 0:
                states[r] = NULL
                odd += 1
                continue
            date, clock = value >> 17, value & 0x1FFFF
            day, month, year = date & 31, (date >> 5) % 13, (date >> 5) // 13
            hour, minute, second = clock >> 12, clock >> 6 & 63, clock & 63
        else:
            value = np.int64(0)
            for i in range(8):
                value |= np.int64(data[p + i]) << (8 * i)
            date, clock = value // 1000000, value % 1000000
            day, month, year = date % 100, date // 100 % 100, date // 10000
            hour, minute, second = clock // 10000, clock // 100 % 100, clock % 100
        if not is_date(year, month, day) or hour > 23 or minute > 59 or second > 59 or micros > 999999 or year < 1:
            states[r] = NULL
            odd += 1
        elif kind == DATE or kind == NEW_DATE:
            out[r] = days(year, month, day)
        else:
            out[r] = (((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second) * 1000000 + micros
    return odd


@inlined
def two(out, q, value):
    """Write a number of two digits."""
    out[q] = 48 + value // 10
    out[q + 1] = 48 + value % 10


@inlined
def write_clock(out, q, negative, hour, minute, second, micros, digits):
    """Write a TIME value as the server prints it; return the place behind it."""
    if negative:
        out[q] = 45
        q += 1
    if hour > 99:
        out[q] = 48 + hour // 100
        q += 1
    two(out, q, hour % 100)
    out[q + 2] = 58
    two(out, q + 3, minute)
    out[q + 5] = 58
    two(out, q + 6, second)
    q += 8
    if digits:
        out[q] = 46
        power = np.int64(100000)
        for i in range(digits):
            out[q + 1 + i] = 48 + micros // power % 10
            power //= 10
        q += 1 + digits
    return q


@entry
def clocks(data, offsets, states, is_new, digits, ends, out):
    """Write TIME values as text, one behind the other; return how many cannot be, or the bytes written.

    `out` has 18 bytes for every value, `ends` one element more than there are values.
    """
    q = 0
    for r in range(states.shape[0]):
        ends[r] = q
        if states[r] != VALUE:
            continue
        p = offsets[r]
        micros = np.int64(0)
        if is_new:
            # The fraction counts down below zero: the whole is one number, with the middle of its range as zero.
            width = 3 + ((digits + 1) >> 1)
            bits = 8 * (width - 3)
            packed = number(data, p, width) - (np.int64(0x800000) << bits)
            negative = packed < 0
            if negative:
                packed = -packed
            micros = packed & ((np.int64(1) << bits) - 1)
            if digits == 1 or digits == 2:
                micros *= 10000
            elif digits == 3 or digits == 4:
                micros *= 100
            packed >>= bits
            hour, minute, second = packed >> 12, packed >> 6 & 63, packed & 63
        else:
            value = np.int64(data[p]) | np.int64(data[p + 1]) << 8 | np.int64(data[p + 2]) << 16
            negative = value >= 0x800000
            if negative:
                value = 0x1000000 - value
            hour, minute, second = value // 10000, value // 100 % 100, value % 100
        if hour > 999 or minute > 59 or second > 59 or micros > 999999:
            return np.int64(-1 - r)
        q = write_clock(out, q, negative, hour, minute, second, micros, digits)
    ends[states.shape[0]] = q
    return np.int64(q)


@inlined
def times_plus(out, r, size, factor, digit):
    """Multiply the number in `out[r]`, which has `size` words, and add to it; return what does not fit."""
    carry = np.uint64(digit)
    for i in range(size):
        low = out[r, i] * factor
        high = high_product(out[r, i], factor)
        total = low + carry
        carry = high + (np.uint64(1) if total < low else np.uint64(0))
        out[r, i] = total
    return carry


@inlined
def digit_bytes(digits):
    """Return how many bytes a group of up to nine digits has."""
    if digits == 0:
        return 0
    if digits <= 2:
        return 1
    if digits <= 4:
        return 2
    if digits <= 6:
        return 3
    return 4


@inlined
def power_of_ten(digits):
    """Return 10 to the power of up to nine."""
    power = np.uint64(1)
    for _ in range(digits):
        power *= np.uint64(10)
    return power


@entry
def decimals(data, offsets, states, precision, scale, out):
    """Read DECIMAL values into integers of two or four words; return -1, or the row whose digits cannot be."""
    size = out.shape[1]
    whole = precision - scale
    for r in range(out.shape[0]):
        for i in range(size):
            out[r, i] = np.uint64(0)
        if states[r] != VALUE:
            continue
        p = offsets[r]
        negative = data[p] < 128
        flip = np.int64(255) if negative else np.int64(0)
        top = True  # the highest bit of the first byte is the sign
        for part in range(2):
            rest = (whole if part == 0 else scale) % 9
            full = (whole if part == 0 else scale) // 9
            for group in range(full + 1):
                # The whole part has its odd group first, the fraction has it last.
                is_rest = group == 0 if part == 0 else group == full
                digits = rest if is_rest else 9
                width = digit_bytes(digits)
                if width == 0:
                    continue
                value = np.int64(0)
                for _ in range(width):
                    byte = np.int64(data[p]) ^ flip
                    if top:
                        byte ^= 128
                        top = False
                    value = value << 8 | byte
                    p += 1
                power = power_of_ten(digits)
                if np.uint64(value) >= power:
                    return np.int64(r)
                times_plus(out, r, size, power, value)
        if negative:
            carry = np.uint64(1)
            for i in range(size):
                out[r, i] = ~out[r, i] + carry
                carry = np.uint64(1) if carry and out[r, i] == 0 else np.uint64(0)
    return np.int64(-1)
