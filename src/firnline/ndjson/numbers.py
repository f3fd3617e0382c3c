"""Exact numbers from JSON text, for the kernel: integers, doubles, decimals, timestamps, dates.

Each function rejects what it does not cover; the caller then leaves the record to the exact path in Python. So no
function accepts a text that is not valid JSON, or returns a value that is not the exact one.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, high_product, inlined, leading_zeros, trailing_zeros

_LOWEST, _HIGHEST = -342, 308


def _power_table() -> np.ndarray:
    """Return the upper 128 bits of 5**q, normalised, for every q a double can need (Eisel and Lemire)."""
    table = np.zeros((_HIGHEST - _LOWEST + 1, 2), np.uint64)
    for q in range(_LOWEST, _HIGHEST + 1):
        if q < 0:
            power = 5**-q
            bits = (power - 1).bit_length()
            # Down to -27 the power can divide a mantissa, so half-way cases exist: round up, do not truncate.
            value = (1 << (bits + 127 if q >= -27 else 2 * bits + 128)) // power + 1
            value >>= max(0, value.bit_length() - 128)
        else:
            value = 5**q
            size = value.bit_length()
            value = value << (128 - size) if size < 128 else value >> (size - 128)
        table[q - _LOWEST] = (value >> 64, value & 0xFFFFFFFFFFFFFFFF)
    return table


POWERS = _power_table()
TENS = np.array([10**k for k in range(19)], np.int64)
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799  # of the years 0001 to 9999 since 1970, in UTC


@inlined
def scan_number(data, p):
    """Read a JSON number at p.

    Returns (end, mantissa, exponent, negative, is_integer). `end` is -1 when the text is no JSON number or
    has more than 19 digits. The value is mantissa * 10**exponent.
    """
    bad = (-1, np.uint64(0), 0, False, False)
    negative = data[p] == 45
    if negative:
        p += 1
    c = data[p]
    if c < 48 or c > 57:
        return bad
    mantissa = np.uint64(c - 48)
    p += 1
    start = p
    digits = 1 if c != 48 else 0
    if c != 48:
        c = data[p]
        while c >= 48 and c <= 57:
            mantissa = mantissa * np.uint64(10) + np.uint64(c - 48)
            p += 1
            c = data[p]
        digits += p - start
    else:
        c = data[p]
        if c >= 48 and c <= 57:
            return bad
    exponent = 0
    is_integer = True
    if c == 46:
        is_integer = False
        p += 1
        start = p
        c = data[p]
        if digits == 0:
            while c == 48:
                p += 1
                c = data[p]
        first = p
        while c >= 48 and c <= 57:
            mantissa = mantissa * np.uint64(10) + np.uint64(c - 48)
            p += 1
            c = data[p]
        digits += p - first
        exponent = start - p
        if exponent == 0:
            return bad
    if digits > 19:
        return bad
    if c == 101 or c == 69:
        is_integer = False
        p += 1
        c = data[p]
        minus = c == 45
        if c == 45 or c == 43:
            p += 1
            c = data[p]
        if c < 48 or c > 57:
            return bad
        written = 0
        while c >= 48 and c <= 57:
            if written < 100000:
                written = written * 10 + np.int64(c - 48)
            p += 1
            c = data[p]
        exponent += -written if minus else written
    return (p, mantissa, exponent, negative, is_integer)


@inlined
def double_bits(mantissa, exponent, negative):
    """Return (fits, bits) of the double nearest to mantissa * 10**exponent (Eisel and Lemire's method).

    `fits` is False for overflow, subnormal results, and the rare cases that 128 bits cannot decide.
    """
    sign = np.uint64(1) << np.uint64(63) if negative else np.uint64(0)
    if mantissa == 0:
        return True, np.int64(sign)
    if exponent < _LOWEST or exponent > _HIGHEST:
        return False, np.int64(0)
    shift = leading_zeros(mantissa)
    w = mantissa << np.uint64(shift)
    row = exponent - _LOWEST
    low = w * POWERS[row, 0]
    high = high_product(w, POWERS[row, 0])
    if high & np.uint64(0x1FF) == np.uint64(0x1FF):
        more = high_product(w, POWERS[row, 1])
        low += more
        if more > low:
            high += np.uint64(1)
    if low == np.uint64(0xFFFFFFFFFFFFFFFF) and (exponent < -27 or exponent > 55):
        return False, np.int64(0)
    upper = high >> np.uint64(63)
    drop = upper + np.uint64(9)
    m = high >> drop
    power = ((217706 * exponent) >> 16) + 63 + np.int64(upper) - shift + 1023
    if power <= 0:
        return False, np.int64(0)
    halfway = low <= np.uint64(1) and exponent >= -4 and exponent <= 23 and m << drop == high
    if halfway and m & np.uint64(3) == np.uint64(1):
        m &= ~np.uint64(1)
    m += m & np.uint64(1)
    m >>= np.uint64(1)
    if m >= np.uint64(1) << np.uint64(53):
        m = np.uint64(1) << np.uint64(52)
        power += 1
    if power >= 0x7FF:
        return False, np.int64(0)
    m &= ~(np.uint64(1) << np.uint64(52))
    return True, np.int64(sign | np.uint64(power) << np.uint64(52) | m)


@inlined
def is_exact(mantissa, bits):
    """Return whether an integer needs at most `bits` significant bits."""
    if mantissa == 0:
        return True
    return (mantissa >> np.uint64(trailing_zeros(mantissa))) >> np.uint64(bits) == np.uint64(0)


@compiled
def decimal_units(mantissa, exponent, precision, scale):
    """Return (fits, value * 10**scale); `fits` is False for 10**18 or more such units, or when digits would be lost."""
    shift = exponent + scale
    if mantissa == 0:
        return True, np.int64(0)
    if shift < 0 or shift > 18 or mantissa >= np.uint64(TENS[18]) // np.uint64(TENS[shift]):
        return False, np.int64(0)
    units = np.int64(mantissa) * TENS[shift]
    if precision < 19 and units >= TENS[min(precision, 18)]:
        return False, np.int64(0)
    return True, units


@compiled
def _digits(data, p, count):
    value = 0
    for i in range(count):
        c = data[p + i]
        if c < 48 or c > 57:
            return -1
        value = value * 10 + np.int64(c - 48)
    return value


@compiled
def scan_date(data, p):
    """Read YYYY-MM-DD at p. Returns (fits, days since 1970-01-01)."""
    year = _digits(data, p, 4)
    if year < 1 or data[p + 4] != 45:
        return False, 0
    month = _digits(data, p + 5, 2)
    if month < 1 or month > 12 or data[p + 7] != 45:
        return False, 0
    day = _digits(data, p + 8, 2)
    leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    last = 31
    if month == 2:
        last = 29 if leap else 28
    elif month == 4 or month == 6 or month == 9 or month == 11:
        last = 30
    if day < 1 or day > last:
        return False, 0
    # Days from a civil date, counting years from March so that the leap day comes last.
    y = year - 1 if month <= 2 else year
    era = y // 400
    of_era = y - era * 400
    of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    return True, era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


@compiled
def scan_timestamp(data, p):
    """Read an RFC 3339 time, a time without offset (UTC) or a date, up to its closing quote.

    Returns (end, microseconds since 1970 in UTC), where `end` is the index of the quote, or -1 if it does not fit: the
    same values as in the exact path.
    """
    fits, days = scan_date(data, p)
    if not fits:
        return -1, 0
    p += 10
    if data[p] == 34:
        return p, days * 86_400_000_000
    if data[p] != 84 and data[p] != 116 and data[p] != 32:
        return -1, 0
    hour = _digits(data, p + 1, 2)
    if hour < 0 or hour > 23 or data[p + 3] != 58:
        return -1, 0
    minute = _digits(data, p + 4, 2)
    if minute < 0 or minute > 59 or data[p + 6] != 58:
        return -1, 0
    second = _digits(data, p + 7, 2)
    if second < 0 or second > 59:
        return -1, 0
    p += 9
    micros = 0
    if data[p] == 46:
        p += 1
        count = 0
        c = data[p]
        while c >= 48 and c <= 57:
            if count < 6:
                micros = micros * 10 + np.int64(c - 48)
            elif c != 48 or count == 9:
                return -1, 0
            count += 1
            p += 1
            c = data[p]
        if count == 0:
            return -1, 0
        micros *= TENS[max(6 - count, 0)]
    offset = 0
    c = data[p]
    if c == 90 or c == 122:
        p += 1
    elif c == 43 or c == 45:
        hours = _digits(data, p + 1, 2)
        if hours < 0 or hours > 23 or data[p + 3] != 58:
            return -1, 0
        minutes = _digits(data, p + 4, 2)
        if minutes < 0 or minutes > 59:
            return -1, 0
        offset = (hours * 60 + minutes) * (1 if c == 43 else -1)
        p += 6
    if data[p] != 34:
        return -1, 0
    seconds = days * 86_400 + hour * 3600 + (minute - offset) * 60 + second
    if seconds < FIRST_SECOND or seconds > LAST_SECOND:
        return -1, 0
    return p, seconds * 1_000_000 + micros
