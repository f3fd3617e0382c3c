"""The compiled part of the stream: takes packets whose events hold rows of one table, many at once."""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import copy16, entry, inlined
from firnline.sources.cdc.frames import SLACK

AT, ROWS_AT, END, CHECKSUM = range(4)  # of every event that was taken, in the target: where it begins, where its rows
EVENT_COLUMNS = 4  # begin, where its checksum begins, and the checksum
TAKEN, START, USED, POS, PASSED, ROWS = range(6)  # of `state`: see `take_rows`
STATE_FIELDS = 6

_PACKET, _HEADER, _SUM = 5, 19, 4  # bytes before an event in its packet, of its header, of its checksum
_LARGEST = 0xFFFFFF
_FIRST_V2 = 30  # the first type of events that has a length of extra data
_SPLIT_LENGTH = 251  # from here on, a length takes more than one byte


@inlined
def number(data, at, size):
    """Return a little-endian number."""
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(data[at + i]) << (8 * i)
    return value


@entry
def take_rows(data, end, target, limit, table_id, kind, bitmaps, must_be_whole, row_bytes, events, state):
    """Copy events of one type and table from packets into frames, as long as nothing else comes.

    The caller knows the table, and checks the checksums. A packet that is anything but a plain event of these rows in
    the midst of a statement ends it, and is left to the caller: one that is not complete or goes on in another one, the
    last event of a statement, one with columns left out (if `must_be_whole`), one that does not fit before `limit`.

    `state`: [events taken; place of the next packet; end of the frames; position in the log; bytes of the log passed;
    rows, by their bytes], read and written.
    """
    taken, at, used = 0, state[START], state[USED]
    pos, passed, rows = state[POS], state[PASSED], state[ROWS]
    while taken < len(events) and at + _PACKET + _HEADER <= end:
        size = number(data, at, 3)
        event, length = at + _PACKET, size - 1
        body, stop = event + _HEADER, event + length - _SUM
        if size == _LARGEST or at + 4 + size > end or used + 4 + length > limit or stop - body < 11:
            break
        if data[at + 4] != 0 or data[event + 4] != kind or number(data, event + 9, 4) != length:
            break
        if number(data, body, 6) != table_id or data[body + 6] & 1:
            break
        place = body + 8
        if kind >= _FIRST_V2:
            place += number(data, place, 2)
        if place >= stop or data[place] >= _SPLIT_LENGTH:
            break
        columns = np.int64(data[place])
        place += 1
        start = place + ((columns + 7) >> 3) * bitmaps
        if start > stop:
            break
        if must_be_whole:
            is_whole = True
            for c in range(columns):
                if not (data[place + (c >> 3)] >> (c & 7) & 1):
                    is_whole = False
            if not is_whole:
                break
        log_pos = number(data, event + 13, 4)
        if log_pos:
            behind = (pos >> 32 << 32) | log_pos
            if behind < pos - (1 << 31):
                behind += 1 << 32
            passed += max(0, behind - pos)
            pos = behind
        for i in range(4):
            target[used + i] = length >> (8 * i) & 0xFF
        frame = used + 4
        for i in range(0, length, 16):
            copy16(data, event + i, target, frame + i)
        events[taken, AT] = frame
        events[taken, ROWS_AT] = frame + start - event
        events[taken, END] = frame + stop - event
        events[taken, CHECKSUM] = number(data, stop, 4)
        rows += max(1, np.int64((stop - start) / max(1.0, row_bytes) + 0.5))
        taken += 1
        used = frame + length
        at += 4 + size
    state[TAKEN], state[START], state[USED] = taken, at, used
    state[POS], state[PASSED], state[ROWS] = pos, passed, rows


def warm_up() -> None:
    """Compile everything, or load what is compiled."""
    data, state = np.empty(SLACK, np.uint8), np.zeros(STATE_FIELDS, np.int64)
    take_rows(data, 0, data, 0, 0, 0, 1, False, 0.0, np.empty((0, EVENT_COLUMNS), np.int64), state)
