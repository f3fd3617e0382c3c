"""The compiled part of reading: takes messages with rows from the client library (libpq), many at once.

The library is called by the addresses of its functions; see `library`.
"""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import call_c, copy_from, entry, inlined, load_byte
from firnline.sources.cdc.frames import SLACK

NOTHING, ENDED, FAILED, LOST, OTHER, FULL = 0, -1, -2, -3, 1, 2  # how `take_rows` ended; the first three are libpq's
GET, CONSUME, FREE, CONNECTION, SLOT = range(5)  # of `library`
USED, ROWS, MESSAGE, SIZE = range(4)  # of `state`: see `take_rows`
STATE_FIELDS = 4

_HEADER = 25  # bytes of a message of the stream before the one of pgoutput
_DATA, _I, _U, _D = 119, 73, 85, 68  # w: data of the log; kinds of rows


@inlined
def find(known, relation):
    """Return whether rows of a table are wanted, -1 if nothing is known of it."""
    for i in range(len(known)):
        if known[i, 0] == relation:
            return known[i, 1]
    return np.int64(-1)


@entry
def take_rows(library, slot, target, limit, known, passes_all, most, state):
    """Copy messages with rows into frames, as long as they come one after the other and are there.

    `known` has the numbers of tables, and whether their rows are wanted. A message with anything else, of a table that
    is not known, or that does not fit before `limit` ends it and is handed back: its address and size in `state`. With
    `passes_all` rows of all tables are passed over. After `most` messages it ends with FULL.

    `state`: [end of the frames, read and written; rows in the new ones; address and size of a message].
    """
    used, rows = state[USED], 0
    relation, wanted = np.int64(-1), np.int64(0)
    ended = FULL
    is_drained = False
    taken = 0
    while taken < most:
        size = call_c(library[GET], (library[CONNECTION], library[SLOT], np.int64(1)))
        if size == 0 and not is_drained:
            is_drained = True
            if call_c(library[CONSUME], (library[CONNECTION],)) == 0:
                ended = LOST
                break
            continue
        if size <= 0:
            ended = size
            break
        is_drained = False
        taken += 1
        message = slot[0]
        is_row = False
        if size > _HEADER + 5 and load_byte(message) == _DATA:
            kind = load_byte(message + _HEADER)
            is_row = kind in (_I, _U, _D)
        if is_row and not passes_all:
            number = np.int64(0)
            for i in range(4):
                number = number << 8 | load_byte(message + _HEADER + 1 + i)
            if number != relation:
                relation, wanted = number, find(known, number)
            length = size - _HEADER
            if wanted < 0 or (wanted and used + 4 + length > limit):
                is_row = False
            elif wanted:
                for i in range(4):
                    target[used + i] = length >> (8 * i) & 0xFF
                copy_from(message + _HEADER, target, used + 4, length)
                used += 4 + length
                rows += 1
        if not is_row:
            ended = OTHER
            state[MESSAGE], state[SIZE] = message, size
            break
        call_c(library[FREE], (message,))
    state[USED], state[ROWS] = used, rows
    return ended


@entry
def take_copied(library, slot, target, most, enough, state):
    """Copy the rows of a COPY behind each other, as long as they are there.

    It ends with FULL after `most` of them, or once there are `enough` bytes. A row that has no room in `target` ends
    it, and is handed back: its address and size in `state`.

    `state`: [end of the rows, read and written; how many came; address and size of a row].
    """
    used, rows = state[USED], 0
    ended = FULL
    is_drained = False
    while rows < most and used < enough:
        size = call_c(library[GET], (library[CONNECTION], library[SLOT], np.int64(1)))
        if size == 0 and not is_drained:
            is_drained = True
            if call_c(library[CONSUME], (library[CONNECTION],)) == 0:
                ended = LOST
                break
            continue
        if size <= 0:
            ended = size
            break
        is_drained = False
        rows += 1
        if used + size > len(target):
            ended = OTHER
            state[MESSAGE], state[SIZE] = slot[0], size
            break
        copy_from(slot[0], target, used, size)
        used += size
        call_c(library[FREE], (slot[0],))
    state[USED], state[ROWS] = used, rows
    return ended


def warm_up() -> None:
    """Compile everything, or load what is compiled."""
    numbers = np.zeros(STATE_FIELDS + FREE, np.int64)
    take_copied(numbers, numbers[:1], np.empty(SLACK, np.uint8), 0, 0, numbers)
    take_rows(numbers, numbers[:1], np.empty(SLACK, np.uint8), 0, np.zeros((0, 2), np.int64), True, 0, numbers)
