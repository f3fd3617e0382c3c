"""The compiled part of the stream: takes packets whose events hold rows of one table, many at once."""

# numba checks the types of compiled code.
# mypy: ignore-errors

from __future__ import annotations

import numpy as np

from firnline.jit import copy16, entry, inlined
from firnline.sources.cdc.frames import SLACK

TAKEN, START, USED, POS, PASSED, ROWS, DIGEST, CHECKSUM = range(8)  # of `state`: see `take_rows`
STATE_FIELDS = 8

_PACKET, _HEADER, _SUM = 5, 19, 4  # bytes before an event in its packet, of its header, of its checksum
_LARGEST = 0xFFFFFF
_FIRST_V2 = 30  # the first type of events that has a length of extra data
_SPLIT_LENGTH = 251  # from here on, a length takes more than one byte


_POLYNOMIAL = 0xEDB88320  # of CRC32, its lowest power first
_ONE = 1 << 31  # the polynomial 1


def _product(a: int, b: int) -> int:
    """Multiply two polynomials, modulo that of CRC32."""
    found = 0
    for bit in range(32):
        if a << bit & _ONE:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


def _make_powers() -> list[list[int]]:
    """Return the polynomials by which CRC32 is multiplied for zero bytes behind the others: 0 to 255 of them, 0 to 255
    times 256, and so on."""
    step = _ONE >> 8
    powers = []
    for _ in range(3):
        powers.append([_ONE])
        for _ in range(255):
            powers[-1].append(_product(step, powers[-1][-1]))
        step = _product(step, powers[-1][-1])
    return powers


_POWERS = np.array(_make_powers(), np.int64)
_TABLE = np.array([_product(byte, _ONE >> 8) for byte in range(256)], np.int64)


@inlined
def product(a, b):
    """Multiply two polynomials, modulo that of CRC32."""
    found = np.int64(0)
    for bit in range(31, -1, -1):
        found ^= b & -(a >> bit & 1)
        b = b >> 1 ^ (_POLYNOMIAL & -(b & 1))
    return found


@inlined
def crc32(data, at, end):
    """Return the CRC32 of a few bytes."""
    found = np.int64(0xFFFFFFFF)
    for i in range(at, end):
        found = found >> 8 ^ _TABLE[(found ^ data[i]) & 0xFF]
    return found ^ 0xFFFFFFFF


@inlined
def behind(crc, size):
    """Return what a CRC32 adds to the one of these bytes and `size` more, less than 2**24, behind them."""
    for place in range(3):
        power = size >> (8 * place) & 0xFF
        if power:
            crc = product(_POWERS[place, power], crc)
    return crc


@inlined
def number(data, at, size):
    """Return a little-endian number."""
    value = np.int64(0)
    for i in range(size):
        value |= np.int64(data[at + i]) << (8 * i)
    return value


@entry
def take_rows(data, end, target, limit, table_id, kind, bitmaps, must_be_whole, row_bytes, state):
    """Copy events of one type and table from packets into frames, as long as nothing else comes.

    The caller knows the table, and checks the frames. A packet that is anything but a plain event of these rows in
    the midst of a statement ends it, and is left to the caller: one that is not complete or goes on in another one, the
    last event of a statement, one with columns left out (if `must_be_whole`), one that does not fit before `limit`.

    `state`: [events taken; place of the next packet; end of the frames; position in the log; bytes of the log passed;
    rows, by their bytes; CRC32 of all rows so far; CRC32 of the new frames], read and written. The last two follow from
    the checksums of the events: if the frames have another one, an event does not match its own.
    """
    taken, at, used = 0, state[START], state[USED]
    pos, passed, rows, digest = state[POS], state[PASSED], state[ROWS], state[DIGEST]
    whole = np.int64(0)
    while at + _PACKET + _HEADER <= end:
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
            place = (pos >> 32 << 32) | log_pos
            if place < pos - (1 << 31):
                place += 1 << 32
            passed += max(0, place - pos)
            pos = place
        for i in range(4):
            target[used + i] = length >> (8 * i) & 0xFF
        frame = used + 4
        for i in range(0, length, 16):
            copy16(data, event + i, target, frame + i)
        checksum = number(data, stop, 4)
        digest = behind(digest ^ crc32(data, event, start), stop - start) ^ checksum
        whole = behind(whole, 4) ^ crc32(target, used, frame)
        whole = behind(whole, length - _SUM) ^ checksum
        whole = behind(whole, _SUM) ^ crc32(data, stop, stop + _SUM)
        rows += max(1, np.int64((stop - start) / max(1.0, row_bytes) + 0.5))
        taken += 1
        used = frame + length
        at += 4 + size
    state[TAKEN], state[START], state[USED] = taken, at, used
    state[POS], state[PASSED], state[ROWS], state[DIGEST] = pos, passed, rows, digest
    state[CHECKSUM] = whole


def warm_up() -> None:
    """Compile everything, or load what is compiled."""
    data, state = np.empty(SLACK, np.uint8), np.zeros(STATE_FIELDS, np.int64)
    take_rows(data, 0, data, 0, 0, 0, 1, False, 0.0, state)
