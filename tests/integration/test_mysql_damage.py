"""Damaged frames of a real log: an error or the same rows, never other rows, never a crash."""

from __future__ import annotations

import os
import random

import pytest

from firnline.errors import DamagedError
from firnline.sources.cdc.log import pack_frame, unpack_frames
from firnline.sources.mysql import events as ev
from firnline.sources.mysql.decode import MySqlDecoder
from tests.support.binlog import end_of, flat, reading
from tests.support.mysql import BinlogServer

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]
FLIPS = 100_000 if os.environ.get("FIRNLINE_PROOF") else 400
TABLE = (
    "CREATE TABLE shop.t (id bigint unsigned primary key, a mediumint, b decimal(20,5), c varchar(300), d text, "
    "e blob, f date, g time(3), h datetime(6), i timestamp(1) NULL, j year, k enum('x','y'), l set('p','q'), m bit(9), "
    "n json, o double, p char(5) character set latin1, q binary(4))"
)
ROW = (
    "({0}, -{0}, {0}.12345, 'text {0}', repeat('d', 20), x'00ff', '2020-01-02', '-12:34:56.789', "
    "'2020-01-02 03:04:05', '2020-01-02', 2020, 'y', 'p,q', b'101', "
    "'{{\"a\": [1, 2.5, null, \"x\"]}}', 1.5, 'é', x'01')"
)


@pytest.fixture
def recorded(binlog_server: BinlogServer) -> tuple[bytes, bytes]:
    """Context and frames of a few transactions of one table with most types."""
    binlog_server.run("CREATE DATABASE shop", TABLE)
    start = end_of(binlog_server)
    binlog_server.run(
        f"INSERT INTO shop.t VALUES {ROW.format(1)}, {ROW.format(2)}, {ROW.format(3)}",
        "UPDATE shop.t SET a = NULL, c = 'other' WHERE id = 2", "UPDATE shop.t SET id = 9 WHERE id = 3",
        "DELETE FROM shop.t WHERE id = 1", "TRUNCATE shop.t",
    )  # fmt: skip
    with reading(binlog_server, start) as log:
        log.read(5)
    return log.context, log.frames


def test_every_byte_of_the_frames(recorded: tuple[bytes, bytes]) -> None:
    """Each byte changed, and each end: DamagedError, or the very same rows."""
    context, frames = recorded
    expected = flat(MySqlDecoder().decode(context, frames))
    assert len(expected) == 8
    refused = 0
    for place in range(len(frames)):
        damaged = bytearray(frames)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(DamagedError):
            MySqlDecoder().decode(context, bytes(damaged))
        refused += 1
    for place in range(len(context)):
        damaged = bytearray(context)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(DamagedError):
            MySqlDecoder().decode(bytes(damaged), frames)
    assert refused == len(frames)
    ends = {0}
    for frame in unpack_frames(frames):
        ends.add(max(ends) + 4 + len(frame))
    for end in range(0, len(frames), 7):
        if end not in ends:
            with pytest.raises(DamagedError):
                MySqlDecoder().decode(context, frames[:end])


def test_bytes_that_pass_the_checksum(recorded: tuple[bytes, bytes]) -> None:
    """Bytes changed before the checksum was made: the decoder refuses them or reads something; it ends, and reads
    nothing outside of the frames."""
    context, frames = recorded
    messages = [bytes(frame) for frame in unpack_frames(frames)]
    seeded = random.Random(14)
    refused = read = 0
    for _ in range(FLIPS):
        number = seeded.randrange(len(messages))
        body = bytearray(messages[number][ev.HEADER_SIZE : -ev.CHECKSUM_SIZE])
        if not body:
            continue
        for _ in range(seeded.choice((1, 1, 2, 5))):
            body[seeded.randrange(len(body))] = seeded.randrange(256)
        if seeded.random() < 0.2:
            del body[seeded.randrange(len(body)) :]
        event = ev.make_event(ev.Header(*ev.HEADER.unpack_from(messages[number])), bytes(body))
        changed = [*messages[:number], event, *messages[number + 1 :]]
        try:
            decoded = MySqlDecoder(with_before=True).decode(context, b"".join(map(pack_frame, changed)))
        except DamagedError:
            refused += 1
        else:
            read += 1
            for changes in decoded.changes:
                changes.rows.validate(full=True)
    assert refused > FLIPS // 20
    assert read > FLIPS // 20
