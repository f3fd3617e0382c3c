"""Writes the JSON text of rows, compiled: whole numbers, doubles, decimals, texts, times and dates from Arrow buffers.

The output has room for the longest text (`write.py` reckons it) and `SLACK` bytes more, because whole vectors are
stored. The same holds for the texts that are read.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, copy16, entry, high_product, inlined, leading_zeros, trailing_zeros

SLACK = 64
RAW, TEXT, WHOLE, UNSIGNED, DOUBLE, TRUTH, TIME, ZONED_TIME, DAY, DECIMAL = range(10)  # kinds of columns
DAY_MICROSECONDS = 86_400_000_000
_LOWEST, _HIGHEST = -292, 324


def _power_table() -> np.ndarray:
    """Return the upper 128 bits of 10**k, rounded up, for every k that the shortest text of a double can need."""
    table = np.zeros((_HIGHEST - _LOWEST + 1, 2), np.uint64)
    for k in range(_LOWEST, _HIGHEST + 1):
        power = 10 ** abs(k)
        bits = power.bit_length()
        if k < 0:
            value = -(-(1 << (bits + 127)) // power)
        else:
            value = power << (128 - bits) if bits <= 128 else -(-power >> (bits - 128))
        table[k - _LOWEST] = (value >> 64, value & 0xFFFFFFFFFFFFFFFF)
    return table


_POWERS = _power_table()
_TENS = np.array([10**k for k in range(20)], np.uint64)
_PAIRS = np.frombuffer("".join(f"{n:02}" for n in range(100)).encode(), np.uint8).copy()
_HEX = np.frombuffer(b"0123456789ABCDEF", np.uint8).copy()
_NULL = np.frombuffer(b"null", np.uint8).copy()
_TRUE = np.frombuffer(b"true", np.uint8).copy()
_FALSE = np.frombuffer(b"false", np.uint8).copy()
_NAN = np.frombuffer(b'"NaN"', np.uint8).copy()
_INFINITY = np.frombuffer(b'Infinity"', np.uint8).copy()


@inlined
def _put_word(word, out, p):
    for i in range(word.size):
        out[p + i] = word[i]
    return p + word.size


@inlined
def _put_bytes(data, start, end, out, p):
    """Copy data[start:end]."""
    while start < end:
        copy16(data, start, out, p)
        step = min(16, end - start)
        start += step
        p += step
    return p


@inlined
def _put_pair(value, out, p):
    """Write two digits."""
    out[p] = _PAIRS[2 * value]
    out[p + 1] = _PAIRS[2 * value + 1]


@inlined
def _count_digits(value):
    """Return how many digits a number has."""
    if value == np.uint64(0):
        return 1
    count = ((64 - leading_zeros(value)) * 1233) >> 12
    return count + 1 if count > 19 or value >= _TENS[count] else count


@inlined
def _put_digits(value, count, out, p):
    """Write the last `count` digits of a number, with zeros before it."""
    at = p + count
    while at - p >= 2:
        rest = value // np.uint64(100)
        at -= 2
        _put_pair(np.int64(value - rest * np.uint64(100)), out, at)
        value = rest
    if at > p:
        out[p] = np.uint8(48 + np.int64(value % np.uint64(10)))
    return p + count


@inlined
def _magnitude(value, out, p):
    """Write the sign of a number. Returns (its magnitude, the place after the sign)."""
    if value < 0:
        out[p] = 45
        return np.uint64(0) - np.uint64(value), p + 1
    return np.uint64(value), p


@compiled
def _round_to_odd(row, factor):
    """Return a power of ten times a factor, shifted right by 128 bits; the last bit is set if bits were lost."""
    carry = high_product(_POWERS[row, 1], factor)
    low = _POWERS[row, 0] * factor
    high = high_product(_POWERS[row, 0], factor)
    low += carry
    if low < carry:
        high += np.uint64(1)
    return high | np.uint64(1) if low > np.uint64(1) else high


@compiled
def _shortest(bits):
    """Return (digits, exponent) of the shortest decimal that reads back as this double (Giulietti's Schubfach).

    Of several, it is the nearest one. The double is finite and not zero; its sign does not count.
    """
    one = np.uint64(1)
    fraction = bits & np.uint64(0xFFFFFFFFFFFFF)
    biased = np.int64((bits >> np.uint64(52)) & np.uint64(0x7FF))
    if biased:
        c = fraction | (one << np.uint64(52))
        q = biased - 1075
        if -53 < q <= 0 and c & ((one << np.uint64(-q)) - one) == np.uint64(0):
            return c >> np.uint64(-q), 0  # a whole number
    else:
        c = fraction
        q = -1074
    is_odd = c & one
    is_closer = fraction == np.uint64(0) and biased > 1  # the next smaller double is nearer than the next larger one
    k = (q * 1262611 - (524031 if is_closer else 0)) >> 22
    shift = np.uint64(q + ((-k * 1741647) >> 19) + 1)
    row = -k - _LOWEST
    middle = c << np.uint64(2)
    lower = _round_to_odd(row, (middle - (one if is_closer else np.uint64(2))) << shift) + is_odd
    value = _round_to_odd(row, middle << shift)
    upper = _round_to_odd(row, (middle + np.uint64(2)) << shift) - is_odd
    s = value >> np.uint64(2)
    if s >= np.uint64(10):
        tens = s // np.uint64(10)
        below = lower <= tens * np.uint64(40)
        above = tens * np.uint64(40) + np.uint64(40) <= upper
        if below != above:
            return tens + one if above else tens, k + 1
    below = lower <= s << np.uint64(2)
    above = (s << np.uint64(2)) + np.uint64(4) <= upper
    if below != above:
        return s + one if above else s, k
    half = (s << np.uint64(2)) + np.uint64(2)
    return s + one if value > half or (value == half and s & one) else s, k


@compiled
def _put_double(bits, out, p):
    """Write a double: plainly between 1e-6 and 1e21, else with an exponent; always with a point or an exponent."""
    unsigned = np.uint64(bits)
    magnitude = unsigned & np.uint64(0x7FFFFFFFFFFFFFFF)
    infinite = np.uint64(0x7FF0000000000000)
    if magnitude > infinite:
        return _put_word(_NAN, out, p)
    if magnitude == infinite:
        out[p] = 34
        p += 1
    if bits < 0:
        out[p] = 45
        p += 1
    if magnitude == infinite:
        return _put_word(_INFINITY, out, p)
    if magnitude == np.uint64(0):
        out[p], out[p + 1], out[p + 2] = 48, 46, 48
        return p + 3
    digits, exponent = _shortest(magnitude)
    while digits % np.uint64(10) == np.uint64(0):
        digits //= np.uint64(10)
        exponent += 1
    count = _count_digits(digits)
    point = count + exponent  # digits before the point
    if 0 < point <= 21:
        if exponent >= 0:
            p = _put_digits(digits, count, out, p)
            for _ in range(exponent):
                out[p] = 48
                p += 1
            out[p], out[p + 1] = 46, 48
            return p + 2
        _put_digits(digits, count, out, p + 1)
        for i in range(point):
            out[p + i] = out[p + i + 1]
        out[p + point] = 46
        return p + count + 1
    if -6 < point <= 0:
        out[p], out[p + 1] = 48, 46
        p += 2
        for _ in range(-point):
            out[p] = 48
            p += 1
        return _put_digits(digits, count, out, p)
    _put_digits(digits, count, out, p + 1)
    out[p] = out[p + 1]
    p += 1
    if count > 1:
        out[p] = 46
        p += count
    out[p] = 101
    p += 1
    rest, p = _magnitude(point - 1, out, p)
    return _put_digits(rest, _count_digits(rest), out, p)


@inlined
def _put_day(days, out, p):
    """Write a day since 1970, in the years 0001 to 9999."""
    # Years begin in March here, so that the leap day is their last; 400 years have 146,097 days.
    days += 719_468
    era = days // 146_097
    day = days - era * 146_097
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5
    month += 3 if month < 10 else -9
    year += era * 400 + (1 if month <= 2 else 0)
    _put_pair(year // 100, out, p)
    _put_pair(year % 100, out, p + 2)
    _put_pair(month, out, p + 5)
    _put_pair(day + 1, out, p + 8)
    out[p + 4], out[p + 7] = 45, 45
    return p + 10


@inlined
def _put_time(microseconds, out, p):
    """Write microseconds since 1970, in the years 0001 to 9999."""
    days = microseconds // DAY_MICROSECONDS
    rest = microseconds - days * DAY_MICROSECONDS
    p = _put_day(days, out, p)
    seconds = rest // 1_000_000
    rest -= seconds * 1_000_000
    out[p], out[p + 3], out[p + 6], out[p + 9] = 84, 58, 58, 46
    _put_pair(seconds // 3600, out, p + 1)
    _put_pair(seconds // 60 % 60, out, p + 4)
    _put_pair(seconds % 60, out, p + 7)
    _put_pair(rest // 10_000, out, p + 10)
    _put_pair(rest // 100 % 100, out, p + 12)
    _put_pair(rest % 100, out, p + 14)
    return p + 16


@inlined
def _put_decimal(value, scale, out, p):
    """Write value / 10**scale with all digits after the point."""
    magnitude, p = _magnitude(value, out, p)
    if scale == 0:
        return _put_digits(magnitude, _count_digits(magnitude), out, p)
    whole = magnitude // _TENS[scale]
    p = _put_digits(whole, _count_digits(whole), out, p)
    out[p] = 46
    return _put_digits(magnitude - whole * _TENS[scale], scale, out, p + 1)


@compiled
def _put_escape(c, out, p):
    out[p] = 92
    if c == 34 or c == 92:
        out[p + 1] = c
        return p + 2
    short = 0
    if c == 8:
        short = 98
    elif c == 9:
        short = 116
    elif c == 10:
        short = 110
    elif c == 12:
        short = 102
    elif c == 13:
        short = 114
    if short:
        out[p + 1] = short
        return p + 2
    out[p + 1], out[p + 2], out[p + 3] = 117, 48, 48
    out[p + 4], out[p + 5] = _HEX[c >> 4], _HEX[c & 15]
    return p + 6


@inlined
def _put_text(data, start, end, out, p):
    """Write data[start:end] as a JSON string."""
    out[p] = 34
    p += 1
    while start < end:
        mask = copy16(data, start, out, p)
        left = end - start
        if left < 16:
            mask &= (np.uint64(1) << np.uint64(left)) - np.uint64(1)
        if mask == np.uint64(0):
            step = min(16, left)
            start += step
            p += step
            continue
        step = trailing_zeros(mask)
        start += step
        p += step
        c = data[start]
        if c < 128:
            p = _put_escape(c, out, p)
            start += 1
            continue
        while start < end and data[start] >= 128:
            out[p] = data[start]
            start += 1
            p += 1
    out[p] = 34
    return p + 1


@inlined
def _put_value(kind, scale, words, row, text, out, p):
    """Write the value of one row."""
    word = words[row]
    if kind == TEXT:
        return _put_text(text, word, words[row + 1], out, p)
    if kind == RAW:
        return _put_bytes(text, word, words[row + 1], out, p)
    if kind == WHOLE:
        magnitude, p = _magnitude(word, out, p)
        return _put_digits(magnitude, _count_digits(magnitude), out, p)
    if kind == DOUBLE:
        return _put_double(word, out, p)
    if kind == UNSIGNED:
        return _put_digits(np.uint64(word), _count_digits(np.uint64(word)), out, p)
    if kind == TRUTH:
        return _put_word(_TRUE, out, p) if word else _put_word(_FALSE, out, p)
    if kind == DECIMAL:
        return _put_decimal(word, scale, out, p)
    out[p] = 34
    p = _put_day(word, out, p + 1) if kind == DAY else _put_time(word, out, p + 1)
    if kind == ZONED_TIME:
        out[p] = 90
        p += 1
    out[p] = 34
    return p + 1


@entry
def write_rows(columns, words, valid, text, labels, label_ends, out, ends):
    """Write the text of each row: before each column its label, and the last label at the end.

    Args:
        columns: kind and scale of each column.
        words: the values of each column, as 64 bits; for texts where each begins in `text`, and where the last ends.
        valid: 0 where a value is null; the last line: where the whole row is null.
        labels: the labels, one after the other; `label_ends` where each ends, after a first 0.
        out: room for all of it.
        ends: where each row ends in `out`, after a first 0.
    """
    count = columns.shape[0]
    p = 0
    for row in range(ends.size - 1):
        if valid[count, row] == 0:
            p = _put_word(_NULL, out, p)
        else:
            for c in range(count):
                p = _put_bytes(labels, label_ends[c], label_ends[c + 1], out, p)
                if valid[c, row] == 0:
                    p = _put_word(_NULL, out, p)
                else:
                    p = _put_value(columns[c, 0], columns[c, 1], words[c], row, text, out, p)
            p = _put_bytes(labels, label_ends[count], label_ends[count + 1], out, p)
        ends[row + 1] = p


@entry
def write_lists(starts, valid, value_ends, text, out, ends):
    """Write the text of each list: the values `starts[row]` to `starts[row + 1]`, whose texts end at `value_ends`."""
    p = 0
    for row in range(ends.size - 1):
        if valid[row] == 0:
            p = _put_word(_NULL, out, p)
        else:
            out[p] = 91
            p += 1
            for value in range(starts[row], starts[row + 1]):
                if value > starts[row]:
                    out[p] = 44
                    p += 1
                p = _put_bytes(text, value_ends[value], value_ends[value + 1], out, p)
            out[p] = 93
            p += 1
        ends[row + 1] = p
