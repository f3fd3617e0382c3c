"""The compiled part of MySQL's stream: frames and checksums as the events say, for events of many sizes; an event that
does not match its checksum gives other checksums than its frames have."""

from __future__ import annotations

import random
import zlib

import numpy as np
import pytest

from firnline.sources.cdc.frames import SLACK
from firnline.sources.mysql import events as ev
from firnline.sources.mysql import stream_kernel as sk

TABLE_ID = 77
SIZES = (1, 2, 255, 256, 257, 8191, 65_535, 65_536, 70_000, 1_000_000)


def make_event(rows: bytes) -> bytes:
    """Return an event with inserted rows of two columns, and its checksum."""
    body = TABLE_ID.to_bytes(6, "little") + bytes(2) + (2).to_bytes(2, "little") + bytes((2, 3)) + rows
    size = ev.HEADER_SIZE + len(body) + ev.CHECKSUM_SIZE
    event = ev.HEADER.pack(1, ev.WRITE, 1, size, 0, 0) + body
    return event + zlib.crc32(event).to_bytes(4, "little")


def take(events: list[bytes], digest: int) -> tuple[bytes, int, int, int]:
    """Return the frames, how many events were taken, and the two checksums."""
    packets = b"".join(
        (len(event) + 1).to_bytes(3, "little") + bytes((number & 0xFF, 0)) + event
        for number, event in enumerate(events)
    )
    data = np.frombuffer(packets + bytes(SLACK), np.uint8).copy()
    target = np.zeros(len(packets) + SLACK, np.uint8)
    state = np.zeros(sk.STATE_FIELDS, np.int64)
    state[sk.DIGEST] = digest
    sk.take_rows(data, len(packets), target, len(packets), TABLE_ID, ev.WRITE, 1, True, 10.0, state)
    used, taken = int(state[sk.USED]), int(state[sk.TAKEN])
    return target[:used].tobytes(), taken, int(state[sk.DIGEST]), int(state[sk.CHECKSUM])


@pytest.mark.parametrize("seed", range(5))
def test_checksums_of_frames_and_rows(seed: int) -> None:
    chance = random.Random(seed)
    rows = [chance.randbytes(size) for size in chance.sample(SIZES, len(SIZES))]
    events = [make_event(one) for one in rows]
    frames, taken, digest, checksum = take(events, 12345)
    assert taken == len(events)
    assert frames == b"".join(len(event).to_bytes(4, "little") + event for event in events)
    assert checksum == zlib.crc32(frames)
    assert digest == zlib.crc32(b"".join(rows), 12345)


def test_no_damaged_event_has_the_checksum_of_its_frames() -> None:
    events = [make_event(bytes(range(40))) for _ in range(3)]
    middle = events[1]
    seen = 0
    for at in range(len(middle)):
        for bit in range(8):
            damaged = middle[:at] + bytes((middle[at] ^ 1 << bit,)) + middle[at + 1 :]
            frames, taken, _, checksum = take([events[0], damaged, events[2]], 0)
            if taken == 1:  # what is not such an event is left to the caller
                continue
            assert taken == 3
            assert checksum != zlib.crc32(frames)
            seen += 1
    assert seen > 8 * 40
