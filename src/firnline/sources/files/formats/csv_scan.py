"""The compiled scan over CSV: turns each record into a line of JSON, with the names of the columns as keys.

A field that spells a JSON number, `true` or `false` is copied as it stands; a null is left out; any other field becomes
a string.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import compiled, copy16, entry, trailing_zeros
from firnline.sources.files.formats.scan_codes import (
    CUT,
    CUT_LINE,
    FULL,
    LIMIT,
    LINE,
    LONG,
    MORE,
    ROW_END,
    ROW_LINE,
    ROW_REASON,
    ROW_START,
    SKIP_QUOTED,
    SKIPPING,
)

WRONG_COUNT, STRAY_QUOTE = 1, 2  # why a record is refused
INFERRED, TEXT, NUMBER, BOOLEAN = range(4)  # how a column's fields become JSON
_SLACK = 64


@compiled
def _field_end(data, p, n, is_end, delimiter, quote, line):
    """Find the field at p.

    Returns (first byte, byte after the last one, index of the delimiter or line end, lines before it, whether quotes
    are doubled in it (1) or stray (2), why it stopped or -1).
    """
    if p < n and data[p] == quote:
        first = p + 1
        p += 1
        doubled = 0
        while True:
            if p >= n:
                return first, p, p, line, doubled, CUT if is_end else MORE
            c = data[p]
            if c == quote:
                if p + 1 >= n:
                    if not is_end:
                        return first, p, p, line, doubled, MORE
                    return first, p, p + 1, line, doubled, -1
                c = data[p + 1]
                if c == quote:
                    doubled = 1
                    p += 2
                    continue
                if c == delimiter or c == 10:
                    return first, p, p + 1, line, doubled, -1
                if c == 13:
                    if p + 2 >= n and not is_end:
                        return first, p, p, line, doubled, MORE
                    if p + 2 >= n or data[p + 2] == 10:
                        return first, p, p + 1, line, doubled, -1
                end = p
                p += 1
                while p < n and data[p] != delimiter and data[p] != 10:
                    p += 1
                if p >= n and not is_end:
                    return first, end, p, line, 2, MORE
                return first, end, p, line, 2, -1
            if c == 10:
                line += 1
            p += 1
    first = p
    while p < n and data[p] != delimiter and data[p] != 10:
        p += 1
    if p >= n and not is_end:
        return first, p, p, line, 0, MORE
    end = p
    if end > first and data[end - 1] == 13 and (p >= n or data[p] == 10):
        end -= 1
    return first, end, p, line, 0, -1


@compiled
def _is_number(data, s, e):
    """Return whether data[s:e] is a number as JSON writes it."""
    if s < e and data[s] == 45:
        s += 1
    if s >= e or data[s] < 48 or data[s] > 57:
        return False
    if data[s] == 48:
        s += 1
    else:
        while s < e and data[s] >= 48 and data[s] <= 57:
            s += 1
    if s < e and data[s] == 46:
        s += 1
        if s >= e or data[s] < 48 or data[s] > 57:
            return False
        while s < e and data[s] >= 48 and data[s] <= 57:
            s += 1
    if s < e and (data[s] == 101 or data[s] == 69):
        s += 1
        if s < e and (data[s] == 43 or data[s] == 45):
            s += 1
        if s >= e or data[s] < 48 or data[s] > 57:
            return False
        while s < e and data[s] >= 48 and data[s] <= 57:
            s += 1
    return s == e


@compiled
def _is_word(data, s, e, any_case):
    """Return 1 for `true`, 2 for `false`, else 0."""
    fold = 32 if any_case else 0
    if e - s == 4:
        if (
            data[s] | fold == 116
            and data[s + 1] | fold == 114
            and data[s + 2] | fold == 117
            and data[s + 3] | fold == 101
        ):
            return 1
    elif (
        e - s == 5
        and data[s] | fold == 102
        and data[s + 1] | fold == 97
        and data[s + 2] | fold == 108
        and data[s + 3] | fold == 115
        and data[s + 4] | fold == 101
    ):
        return 2
    return 0


@compiled
def _is_null(data, s, e, nulls, ends):
    """Return whether data[s:e] is one of the texts that mean null."""
    begin = 0
    for i in range(ends.size):
        end = ends[i]
        if end - begin == e - s:
            same = True
            for k in range(e - s):
                if data[s + k] != nulls[begin + k]:
                    same = False
                    break
            if same:
                return True
        begin = end
    return False


@compiled
def _put_escaped(out, q, c):
    """Write a byte that JSON escapes."""
    out[q] = 92
    if c == 34 or c == 92:
        out[q + 1] = c
        return q + 2
    if c == 10:
        out[q + 1] = 110
    elif c == 13:
        out[q + 1] = 114
    elif c == 9:
        out[q + 1] = 116
    else:
        out[q + 1] = 117
        out[q + 2] = 48
        out[q + 3] = 48
        out[q + 4] = 48 + (c >> 4)
        low = c & 15
        out[q + 5] = 48 + low if low < 10 else 87 + low
        return q + 6
    return q + 2


@compiled
def _put_string(data, s, e, n, quote, doubled, out, q):
    """Write data[s:e] as a JSON string; of two quotes in a row one is written."""
    out[q] = 34
    q += 1
    while s < e:
        if doubled == 0 and s + 16 <= n:
            mask = copy16(data, s, out, q)
            plain = 16 if mask == np.uint64(0) else trailing_zeros(mask)
            if plain >= e - s:
                q += e - s
                break
            s += plain
            q += plain
            if plain == 16:
                continue
        c = data[s]
        if doubled == 1 and c == quote:
            s += 1
        if c < 32 or c == 34 or c == 92:
            q = _put_escaped(out, q, c)
        else:
            out[q] = c
            q += 1
        s += 1
    out[q] = 34
    return q + 1


@compiled
def _put_number(data, s, e, out, q):
    """Write a number of a declared column: spaces around it, a plus sign and zeros before it are dropped.

    Returns the next q, or -1 if it is no number.
    """
    while s < e and (data[s] == 32 or data[s] == 9):
        s += 1
    while s < e and (data[e - 1] == 32 or data[e - 1] == 9):
        e -= 1
    negative = False
    if s < e and (data[s] == 43 or data[s] == 45):
        negative = data[s] == 45
        s += 1
    while s + 1 < e and data[s] == 48 and data[s + 1] >= 48 and data[s + 1] <= 57:
        s += 1
    if (s < e and data[s] == 45) or not _is_number(data, s, e):
        return -1
    if negative:
        out[q] = 45
        q += 1
    for i in range(s, e):
        out[q] = data[i]
        q += 1
    return q


@compiled
def _put_value(data, s, e, n, quote, doubled, how, out, q):
    """Write a field as a JSON value."""
    if how == NUMBER and doubled == 0:
        after = _put_number(data, s, e, out, q)
        if after >= 0:
            return after
    if doubled == 0 and how != TEXT:
        word = _is_word(data, s, e, how == BOOLEAN)
        if word > 0:
            for i in range(s, e):
                out[q] = data[i] | 32
                q += 1
            return q
        if s < e and (data[s] == 45 or (data[s] >= 48 and data[s] <= 57)) and _is_number(data, s, e):
            for i in range(s, e):
                out[q] = data[i]
                q += 1
            return q
    return _put_string(data, s, e, n, quote, doubled, out, q)


@entry
def scan_csv(
    data, p, n, is_end, max_records, max_bytes, out, rows, control,
    keys, key_ends, how, nulls, null_ends, delimiter, quote,
):  # fmt: skip
    """Copy records to lines of `out`, and describe each in `rows`. See `ScanReader._scan`.

    Args:
        keys: the names of the columns as JSON strings with a colon, one after the other; `key_ends` where each ends.
        how: how the fields of each column become JSON.
        nulls: the texts that mean null, one after the other; `null_ends` where each ends.
    """
    line = control[LINE]
    columns = key_ends.size
    q = 0
    count = 0
    why = MORE
    while True:
        if p >= n:
            break
        if data[p] == 10:
            p += 1
            line += 1
            continue
        if data[p] == 13:
            if p + 1 >= n:
                if not is_end:
                    break
                p += 1
                continue
            if data[p + 1] == 10:
                p += 2
                line += 1
                continue
        if count == max_records:
            why = LIMIT
            break
        at, lines, number, reason, first = p, line, 0, 0, q
        stopped = -1
        if q + _SLACK > out.size:
            why = FULL
            break
        out[q] = 123
        q += 1
        while True:
            s, e, at, lines, doubled, stopped = _field_end(data, at, n, is_end, delimiter, quote, lines)
            if stopped >= 0:
                break
            if doubled == 2:
                reason = STRAY_QUOTE
            elif number < columns and not _is_null(data, s, e, nulls, null_ends):
                begin = key_ends[number - 1] if number > 0 else 0
                if q + (key_ends[number] - begin) + 6 * (e - s) + _SLACK > out.size:
                    stopped = FULL
                    break
                if q - 1 != first:
                    out[q] = 44
                    q += 1
                for i in range(begin, key_ends[number]):
                    out[q] = keys[i]
                    q += 1
                q = _put_value(data, s, e, n, quote, doubled, how[number], out, q)
            number += 1
            if at < n and data[at] == delimiter:
                at += 1
                if at >= n and not is_end:
                    stopped = MORE
                    break
                continue
            break
        end = at
        if stopped < 0 and end - p > max_bytes:
            stopped = LONG
        if stopped >= 0:
            q = first
            why = stopped
            control[CUT_LINE] = line + 1
            break
        if number != columns and reason == 0:
            reason = WRONG_COUNT
        if reason != 0:
            q = first
        else:
            out[q] = 125
            out[q + 1] = 10
            q += 2
        rows[count, ROW_LINE] = line + 1
        rows[count, ROW_START] = p
        rows[count, ROW_END] = end
        if end > p and data[end - 1] == 13:
            rows[count, ROW_END] = end - 1
        rows[count, ROW_REASON] = reason
        count += 1
        line = lines
        # Past the line end: a line feed, or a carriage return before one.
        if end < n and data[end] == 13:
            end += 1
        if end < n and data[end] == 10:
            end += 1
            line += 1
        p = end
    control[LINE] = line
    return p, q, count, why


@entry
def skip_csv(data, p, n, is_end, control, delimiter, quote):
    """Pass over a record that is too long, piece by piece. See `ScanReader._skip`."""
    if control[SKIPPING] == 0:
        control[SKIPPING] = 1
        control[SKIP_QUOTED] = 0
    state = control[SKIP_QUOTED]  # 0: before a field; 1: inside a field; 2: inside quotes; 3: after a quote in those
    ended = False
    while p < n and not ended:
        c = data[p]
        if c == 10:
            control[LINE] += 1
        if state == 2:
            if c == quote:
                state = 3
        elif state == 3 and c == quote:
            state = 2
        elif c == 10:
            ended = True
        elif c == delimiter:
            state = 0
        elif state == 0 and c == quote:
            state = 2
        else:
            state = 1
        p += 1
    control[SKIP_QUOTED] = state
    return p, ended or (is_end and p == n and state != 2)
