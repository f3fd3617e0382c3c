"""The compiled scan over a JSON file: finds the top-level values and copies each to a line of its own.

Line breaks between tokens become spaces. A line break inside a string, which JSON forbids, becomes another control
character: the value stays invalid.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

from firnline.jit import compiled, entry
from firnline.sources.files.formats.scan_codes import (
    CUT,
    CUT_LINE,
    LIMIT,
    LINE,
    LONG,
    MODE,
    MORE,
    ROW_END,
    ROW_LINE,
    ROW_REASON,
    ROW_START,
    SKIP_DEPTH,
    SKIP_QUOTED,
    SKIPPING,
    TRAILING,
)

# What the file is: not yet known, objects one after the other, an array before its first value, an array after a value,
# or an array that ended.
UNKNOWN, SEQUENCE, ARRAY_FIRST, ARRAY_NEXT, CLOSED = range(5)

_FORBIDDEN = 1  # a control character


@compiled
def _after_spaces(data, p, n, line):
    """Return the index after spaces and line breaks, and the lines before it."""
    while p < n:
        c = data[p]
        if c == 10:
            line += 1
        elif c != 32 and c != 9 and c != 13:
            break
        p += 1
    return p, line


@compiled
def _copy_value(data, p, n, is_array, is_end, max_bytes, out, q, line):
    """Copy the value at p to out[q:]. Returns (next p, next q, line, why it stopped, or -1 at the end of the value).

    In an array, a value ends before a comma or bracket that is not inside it. Otherwise an object ends with its brace,
    and anything else ends before a line break or a brace.
    """
    start = p
    depth = 0
    quoted = False
    is_object = data[p] == 123
    while p < n:
        c = data[p]
        if quoted:
            if c == 92 and p + 1 < n and data[p + 1] != 10:
                out[q] = c
                out[q + 1] = data[p + 1]
                p += 2
                q += 2
                continue
            if c == 92 and p + 1 == n and not is_end:
                return p, q, line, MORE
            if c == 34:
                quoted = False
            elif c == 10:
                line += 1
                c = _FORBIDDEN
            out[q] = c
            p += 1
            q += 1
            continue
        if c == 123 or c == 91:
            if c == 123 and not is_array and not is_object:
                return p, q, line, -1
            depth += 1
        elif c == 125 or c == 93:
            if depth == 0 and is_array and c == 93:
                return p, q, line, -1
            if depth > 0:
                depth -= 1
            if depth == 0 and is_object and not is_array:
                out[q] = c
                return p + 1, q + 1, line, -1
        elif c == 34:
            quoted = is_array or is_object
        elif c == 44 and depth == 0 and is_array:
            return p, q, line, -1
        elif c == 10:
            if not is_array and not is_object:
                return p, q, line, -1
            line += 1
            c = 32
        elif c == 13:
            c = 32
        out[q] = c
        p += 1
        q += 1
        if p - start > max_bytes:
            return p, q, line, LONG
    if is_end and not is_array and not is_object:
        return p, q, line, -1
    return p, q, line, CUT if is_end else MORE


@entry
def scan_json(data, p, n, is_end, max_records, max_bytes, out, rows, control):
    """Copy values to lines of `out`, and describe each in `rows`. See `ScanReader._scan`."""
    line = control[LINE]
    mode = control[MODE]
    q = 0
    count = 0
    why = MORE
    while True:
        p, line = _after_spaces(data, p, n, line)
        if p == n:
            if is_end and mode in (ARRAY_FIRST, ARRAY_NEXT):
                why = CUT
                control[CUT_LINE] = line + 1
            break
        c = data[p]
        if mode == UNKNOWN:
            mode = SEQUENCE
            if c == 91:
                mode = ARRAY_FIRST
                p += 1
                continue
        if mode == CLOSED:
            why = TRAILING
            control[CUT_LINE] = line + 1
            break
        is_array = mode != SEQUENCE
        if is_array and c == 93:
            mode = CLOSED
            p += 1
            continue
        if count == max_records:
            why = LIMIT
            break
        value, value_line = p, line
        if mode == ARRAY_NEXT:  # at the comma
            value, value_line = _after_spaces(data, p + 1, n, line)
            if value == n:
                why = CUT if is_end else MORE
                control[CUT_LINE] = value_line + 1
                break
        start, start_line, first = p, value_line, q
        if is_array and (data[value] == 44 or data[value] == 93):
            # No value between two commas: a record all the same, and a bad one.
            out[q] = 44
            q += 1
            end = value
            start_line = line
            raw, raw_end = p, p + 1
            line = value_line
        else:
            end, q, after, stopped = _copy_value(data, value, n, is_array, is_end, max_bytes, out, q, value_line)
            if stopped < 0 and end - value > max_bytes:
                stopped = LONG
            if stopped >= 0:
                q = first
                why = stopped
                control[CUT_LINE] = value_line + 1
                p = start
                break
            raw, raw_end = value, end
            while raw_end > raw and (data[raw_end - 1] <= 32):
                raw_end -= 1
            line = after
        out[q] = 10
        q += 1
        rows[count, ROW_LINE] = start_line + 1
        rows[count, ROW_START] = raw
        rows[count, ROW_END] = raw_end
        rows[count, ROW_REASON] = 0
        count += 1
        p = end
        if is_array:
            mode = ARRAY_NEXT
    control[LINE] = line
    control[MODE] = mode
    return p, q, count, why


@entry
def skip_json(data, p, n, control):
    """Pass over a value that is too long, piece by piece. See `ScanReader._skip`."""
    is_array = control[MODE] != SEQUENCE
    depth = control[SKIP_DEPTH]
    quoted = control[SKIP_QUOTED]  # 0: no; 1: inside a string; 2: after a backslash in a string
    begun = control[SKIPPING]  # 0: no; 1: the comma is passed; 2: an object; 3: another value
    if begun == 0:
        depth = 0
        quoted = 0
        begun = 1
        if control[MODE] == ARRAY_NEXT:
            p += 1
    ended = False
    while p < n and not ended:
        c = data[p]
        if c == 10:
            control[LINE] += 1
        if begun == 1:
            if c != 32 and c != 9 and c != 10 and c != 13:
                begun = 2 if c == 123 else 3
            else:
                p += 1
                continue
        if quoted == 2:
            quoted = 1
        elif quoted == 1:
            if c == 92:
                quoted = 2
            elif c == 34:
                quoted = 0
        elif c == 34 and (is_array or begun == 2):
            quoted = 1
        elif c == 123 or c == 91:
            if c == 123 and not is_array and begun == 3:
                ended = True
                break
            depth += 1
        elif c == 125 or c == 93:
            if depth == 0 and is_array and c == 93:
                ended = True
                break
            if depth > 0:
                depth -= 1
            if depth == 0 and begun == 2 and not is_array:
                ended = True
        elif c == 44 and depth == 0 and is_array:
            ended = True
            break
        elif c == 10 and not is_array and begun == 3:
            ended = True
        p += 1
    control[SKIP_DEPTH] = depth
    control[SKIP_QUOTED] = quoted
    control[SKIPPING] = begun
    if ended and is_array:
        control[MODE] = ARRAY_NEXT
    return p, ended
