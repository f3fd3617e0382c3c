"""Count and cut lines in a buffer, compiled: how many records are there, and where does the n-th end."""

from __future__ import annotations

from typing import Any

import numpy as np

from firnline.ndjson.jit import entry
from firnline.ndjson.text import line_end

TO_END, AT_LIMIT, AT_LONG_LINE = 0, 1, 2


@entry
def _measure(data: Any, p: int, n: int, max_records: int, max_line: int) -> tuple[int, int, int, int]:
    records = 0
    lines = 0
    while p < n:
        q = p
        while q < n and (data[q] == 32 or data[q] == 9 or data[q] == 13):
            q += 1
        if q < n and data[q] != 10:
            if records == max_records:
                return p, records, lines, AT_LIMIT
            end = line_end(data, q, n)
            if end - p > max_line:
                return p, records, lines, AT_LONG_LINE
            records += 1
        else:
            end = q
        lines += 1
        p = end + 1
    return min(p, n), records, lines, TO_END


def measure(data: bytes | memoryview, start: int, max_records: int, max_line: int) -> tuple[int, int, int, int]:
    """Walk whole lines from `start` on; a line of nothing but spaces, tabs and CR is no record.

    Returns (end, records, lines, why it stopped): at the end of the data, before record `max_records`, or
    before a line of more than `max_line` bytes.
    """
    if len(data) == start:
        return start, 0, 0, TO_END
    array = np.frombuffer(data, np.uint8)
    array.flags.writeable = False  # one compiled form for all kinds of buffers
    end, records, lines, why = _measure(array, start, array.size, max_records, max_line)
    return int(end), int(records), int(lines), int(why)
