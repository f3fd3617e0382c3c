"""Strings, keys, base64 and raw JSON text from bytes, for the kernel: strict UTF-8, strict JSON.

The data always ends with a line feed, which no valid value contains: single-byte reads need no bounds check.
Functions return an index, or `ODD` for what the exact path in Python must read, or `FULL` when the target is full.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, copy16, inlined, load8, newlines16, special16, trailing_zeros
from firnline.ndjson.numbers import scan_number

ODD = -1
FULL = -2
SLACK = 32  # free bytes that every string target keeps, so that whole vectors can be stored
MAX_RAW_DEPTH = 64  # deeper raw values are left to the exact path


@inlined
def line_end(data, p, n):
    """Return the index of the first line feed at or after p, or n."""
    while p + 16 <= n:
        mask = newlines16(data, p)
        if mask != 0:
            return p + trailing_zeros(mask)
        p += 16
    while p < n and data[p] != 10:
        p += 1
    return p


@inlined
def key_end(data, p, n):
    """Return the index of the quote that ends the key at p, or ODD for escapes and controls.

    Bytes from 0x80 on are not checked here: a key that equals a known key is valid.
    """
    while True:
        if p + 16 <= n:
            mask = special16(data, p)
            if mask == 0:
                p += 16
                continue
            p += trailing_zeros(mask)
        c = data[p]
        if c == 34:
            return p
        if c == 92 or c < 32:
            return ODD
        p += 1


@inlined
def same_bytes(data, p, n, keys, k, size):
    """Return whether data[p:p+size] equals keys[k:k+size]; keys has eight spare bytes."""
    if p + size + 8 <= n:
        while size >= 8:
            if load8(data, p) != load8(keys, k):
                return False
            p += 8
            k += 8
            size -= 8
        if size == 0:
            return True
        return (load8(data, p) ^ load8(keys, k)) << np.uint64(64 - 8 * size) == np.uint64(0)
    for i in range(size):  # noqa: SIM110  (a loop compiles to less than a generator)
        if data[p + i] != keys[k + i]:
            return False
    return True


@compiled
def _hex4(data, p):
    value = 0
    for i in range(4):
        c = np.int64(data[p + i])
        if c >= 48 and c <= 57:
            c -= 48
        elif c >= 97 and c <= 102:
            c -= 87
        elif c >= 65 and c <= 70:
            c -= 55
        else:
            return -1
        value = value * 16 + c
    return value


@compiled
def _copy_utf8(data, p, out, q):
    """Copy one multi-byte character. Returns its number of bytes, or ODD when it is not valid."""
    c = data[p]
    d = data[p + 1]
    if d < 0x80 or d > 0xBF:
        return ODD
    out[q] = c
    out[q + 1] = d
    if c >= 0xC2 and c <= 0xDF:
        return 2
    if c >= 0xE0 and c <= 0xEF:
        if (c == 0xE0 and d < 0xA0) or (c == 0xED and d > 0x9F):
            return ODD
        size = 3
    elif c >= 0xF0 and c <= 0xF4:
        if (c == 0xF0 and d < 0x90) or (c == 0xF4 and d > 0x8F):
            return ODD
        size = 4
    else:
        return ODD
    for i in range(2, size):
        d = data[p + i]
        if d < 0x80 or d > 0xBF:
            return ODD
        out[q + i] = d
    return size


@compiled
def _put_code_point(out, q, code):
    if code < 0x80:
        out[q] = code
        return q + 1
    if code < 0x800:
        out[q] = 0xC0 | code >> 6
        out[q + 1] = 0x80 | code & 0x3F
        return q + 2
    if code < 0x10000:
        out[q] = 0xE0 | code >> 12
        out[q + 1] = 0x80 | code >> 6 & 0x3F
        out[q + 2] = 0x80 | code & 0x3F
        return q + 3
    out[q] = 0xF0 | code >> 18
    out[q + 1] = 0x80 | code >> 12 & 0x3F
    out[q + 2] = 0x80 | code >> 6 & 0x3F
    out[q + 3] = 0x80 | code & 0x3F
    return q + 4


@compiled
def _unescape(data, p, out, q):
    """Decode the escape whose backslash is at p. Returns (next p or ODD, next q)."""
    c = data[p + 1]
    if c == 117:
        code = _hex4(data, p + 2)
        p += 6
        if code >= 0xD800 and code <= 0xDBFF and data[p] == 92 and data[p + 1] == 117:
            low = _hex4(data, p + 2)
            if low < 0xDC00 or low > 0xDFFF:
                return ODD, q
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            p += 6
        elif code < 0 or (code >= 0xD800 and code <= 0xDFFF):
            return ODD, q
        return p, _put_code_point(out, q, code)
    if c == 110:
        c = 10
    elif c == 116:
        c = 9
    elif c == 114:
        c = 13
    elif c == 98:
        c = 8
    elif c == 102:
        c = 12
    elif c != 34 and c != 92 and c != 47:
        return ODD, q
    out[q] = c
    return p + 2, q + 1


@inlined
def copy_string(data, p, n, out, q, end, raw):
    """Copy the string whose first byte after the quote is at p to out[q:end].

    Escapes are decoded, or kept as they are when `raw` is set (those with more than one spelling are odd).
    Returns (index after the closing quote, or ODD or FULL; next q).
    """
    while True:
        if q + SLACK > end:
            return FULL, q
        if p + 16 <= n:
            mask = copy16(data, p, out, q)
            if mask == 0:
                p += 16
                q += 16
                continue
            plain = trailing_zeros(mask)
            p += plain
            q += plain
        c = data[p]
        if c == 34:
            return p + 1, q
        if c >= 0x80:
            size = _copy_utf8(data, p, out, q)
            if size < 0:
                return ODD, q
            p += size
            q += size
        elif c == 92:
            if raw:
                c = data[p + 1]
                if c == 117 or c == 47:
                    return ODD, q
                after, _ = _unescape(data, p, out, q)
                if after < 0:
                    return ODD, q
                out[q] = 92
                out[q + 1] = c
                p += 2
                q += 2
            else:
                p, q = _unescape(data, p, out, q)
                if p < 0:
                    return ODD, q
        elif c < 32:
            return ODD, q
        else:
            out[q] = c
            p += 1
            q += 1


@compiled
def copy_scalar(data, p, out, q, end):
    """Copy the text of a number, `true`, `false` or `null`. Returns (next p, or ODD or FULL; next q)."""
    c = data[p]
    stop = p
    if (c == 116 and data[p + 1] == 114 and data[p + 2] == 117 and data[p + 3] == 101) or (
        c == 110 and data[p + 1] == 117 and data[p + 2] == 108 and data[p + 3] == 108
    ):
        stop = p + 4
    elif c == 102 and data[p + 1] == 97 and data[p + 2] == 108 and data[p + 3] == 115 and data[p + 4] == 101:
        stop = p + 5
    elif c == 45 or (c >= 48 and c <= 57):
        stop, _mantissa, _exponent, _negative, _integer = scan_number(data, p)
    if stop <= p:
        return ODD, q
    if q + (stop - p) + SLACK > end:
        return FULL, q
    for i in range(p, stop):
        out[q] = data[i]
        q += 1
    return stop, q


@compiled
def copy_json(data, p, n, out, q, end):
    """Copy one JSON value of any shape, checked, without the spaces between tokens.

    Returns (next p, or ODD or FULL; next q).
    """
    depth = 0
    objects = np.uint64(0)  # one bit per open level: an object, not an array
    state = 0  # 0: a value; 1: a value or the end of an array; 2: a key; 3: a key or the end; 4: after a value
    while True:
        if q + SLACK > end:
            return FULL, q
        c = data[p]
        while c == 32 or c == 9 or c == 13:
            p += 1
            c = data[p]
        inside = objects & np.uint64(1) != np.uint64(0)
        if state == 4:
            if c == 44:
                state = 2 if inside else 0
            elif (c == 125 and inside) or (c == 93 and not inside):
                depth -= 1
                objects >>= np.uint64(1)
            else:
                return ODD, q
            out[q] = c
            p += 1
            q += 1
        elif (state == 3 and c == 125) or (state == 1 and c == 93):
            out[q] = c
            p += 1
            q += 1
            depth -= 1
            objects >>= np.uint64(1)
            state = 4
        elif state >= 2:
            if c != 34:
                return ODD, q
            out[q] = 34
            p, q = copy_string(data, p + 1, n, out, q + 1, end - 2, True)
            if p < 0:
                return p, q
            out[q] = 34
            c = data[p]
            while c == 32 or c == 9 or c == 13:
                p += 1
                c = data[p]
            if c != 58:
                return ODD, q
            out[q + 1] = 58
            p += 1
            q += 2
            state = 0
        elif c == 123 or c == 91:
            if depth == MAX_RAW_DEPTH:
                return ODD, q
            depth += 1
            objects = objects << np.uint64(1) | np.uint64(1 if c == 123 else 0)
            out[q] = c
            p += 1
            q += 1
            state = 3 if c == 123 else 1
        elif c == 34:
            out[q] = 34
            p, q = copy_string(data, p + 1, n, out, q + 1, end - 1, True)
            if p < 0:
                return p, q
            out[q] = 34
            q += 1
            state = 4
        else:
            p, q = copy_scalar(data, p, out, q, end)
            if p < 0:
                return p, q
            state = 4
        if state == 4 and depth == 0:
            return p, q


@compiled
def _base64_digit(c):
    if c >= 65 and c <= 90:
        return np.int64(c) - 65
    if c >= 97 and c <= 122:
        return np.int64(c) - 71
    if c >= 48 and c <= 57:
        return np.int64(c) + 4
    if c == 43:
        return np.int64(62)
    if c == 47:
        return np.int64(63)
    return np.int64(-1)


@compiled
def copy_base64(data, p, out, q, end):
    """Decode canonical base64 (padded, no spare bits). Returns (index after the quote, or ODD or FULL; next q)."""
    while data[p] != 34:
        if q + SLACK > end:
            return FULL, q
        a = _base64_digit(data[p])
        if a < 0:
            return ODD, q
        b = _base64_digit(data[p + 1])
        if b < 0:
            return ODD, q
        c = data[p + 2]
        third = _base64_digit(c)
        if third < 0 and c != 61:
            return ODD, q
        d = data[p + 3]
        fourth = _base64_digit(d)
        if fourth < 0 and d != 61:
            return ODD, q
        p += 4
        out[q] = a << 2 | b >> 4
        if third < 0:
            if fourth >= 0 or b & 15 != 0 or data[p] != 34:
                return ODD, q
            q += 1
        elif fourth < 0:
            if third & 3 != 0 or data[p] != 34:
                return ODD, q
            out[q + 1] = (b & 15) << 4 | third >> 2
            q += 2
        else:
            out[q + 1] = (b & 15) << 4 | third >> 2
            out[q + 2] = (third & 3) << 6 | fourth
            q += 3
    return p + 1, q
