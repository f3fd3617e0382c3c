"""Damaged frames of a real log: an error or the same rows, never other rows, never a crash."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from firnline.errors import DamagedError, FirnlineError
from firnline.sources.cdc.log import pack_frame, unpack_frames
from firnline.sources.mysql import events as ev
from firnline.sources.mysql.decode import MySqlDecoder
from firnline.sources.mysql.packets import PacketReader
from firnline.sources.mysql.server import Server
from firnline.sources.mysql.stream import MySqlStream
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


class _Recorded:
    """A connection that gives recorded bytes, in pieces, and then nothing."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._data, self._at, self._piece = data, 0, piece
        self._sock = self

    def settimeout(self, _seconds: float) -> None:
        """Nothing to do: it never waits."""

    def recv_into(self, buffer: memoryview) -> int:
        part = self._data[self._at : self._at + min(self._piece, len(buffer))]
        if not part:
            raise BlockingIOError
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def _packets(messages: Iterator[bytes]) -> bytes:
    """Events as the server sends them."""
    sent = bytearray()
    for number, event in enumerate(messages):
        sent += struct.pack("<I", len(event) + 1 | number % 256 << 24) + b"\0" + event
    return bytes(sent)


def _stream(server: BinlogServer, sent: bytes, piece: int, *, one_by_one: bool = False) -> MySqlStream:
    """A stream that reads recorded packets."""
    stream: Any = MySqlStream(server.dsn, lambda table: table == "shop.t", 4711)
    stream._server = Server(("recorded", 0), "", False, "", 1, False, "CRC32", {})
    stream._packets = PacketReader(_Recorded(sent, piece), stream._server, 60.0)
    if one_by_one:
        stream._take_many = lambda _packets, _max_bytes: False
    return stream  # type: ignore[no-any-return]


def _read_all(stream: MySqlStream, max_bytes: int) -> list[Any]:
    """Frames, positions and counted rows of all that a stream gives."""
    frames, cuts = b"", []
    while (piece := stream.read(max_bytes, 0.0)).frames:
        cuts += [(len(frames) + cut.offset, cut.position, cut.rows) for cut in piece.cuts]
        frames += piece.frames
    return [frames, cuts]


@pytest.fixture
def many(binlog_server: BinlogServer) -> tuple[BinlogServer, list[bytes]]:
    """The events of statements that changed many rows, of a table that is captured and of one that is not."""
    binlog_server.run(
        "CREATE DATABASE shop", "CREATE TABLE shop.t (id int primary key, a varchar(200), b int)",
        "CREATE TABLE shop.u LIKE shop.t",
    )  # fmt: skip
    start = end_of(binlog_server)
    values = ", ".join(f"({i}, repeat('x', {i * 7 % 200}), {i})" for i in range(600))
    for table in ("t", "u"):
        binlog_server.run(f"INSERT INTO shop.{table} VALUES {values}")
    binlog_server.run("UPDATE shop.t JOIN shop.u USING (id) SET t.b = -t.id, u.b = -t.id", "DELETE FROM shop.t")
    with reading(binlog_server, start) as log:
        log.read(4)
    begin = ev.make_event(
        ev.Header(0, ev.QUERY, 1, 0, 0, 0), struct.pack("<IIBHH", 0, 0, 0, 0, 0) + b"\0" + b"BEGIN"
    )  # fmt: skip
    events = [bytes(frame) for frame in (*unpack_frames(log.context), *unpack_frames(log.frames))]
    return binlog_server, [one for event in events for one in ([event, begin] if event[4] in ev.GTIDS else [event])]


def test_events_taken_at_once_are_those_taken_one_by_one(many: tuple[BinlogServer, list[bytes]]) -> None:
    server, events = many
    rows = [event for event in events if event[4] in ev.ROWS]
    assert len(rows) >= 40
    sent = _packets(iter(events))
    for max_bytes in (1, 10_000, 1 << 20):
        expected = _read_all(_stream(server, sent, 1 << 20, one_by_one=True), max_bytes)
        assert len(expected[1]) == 3  # transactions with rows of the table
        for piece in (1, 1000, 1 << 20) if max_bytes > 1 else (16_384,):
            stream: Any = _stream(server, sent, piece)
            with mock.patch.object(stream._out, "reserve", wraps=stream._out.reserve) as reserve:
                assert _read_all(stream, max_bytes) == expected
            assert mock.call(max_bytes) in reserve.mock_calls or max_bytes == 1  # compiled code took events


def test_every_part_of_packets_damaged(many: tuple[BinlogServer, list[bytes]]) -> None:
    """A byte of a packet changed: an error, or nothing but the frames before it."""
    server, events = many
    sent = _packets(iter(events))
    expected = _read_all(_stream(server, sent, 1 << 20), 1 << 20)[0]
    seeded = random.Random(7)
    refused = 0
    for _ in range(FLIPS):
        damaged = bytearray(sent)
        damaged[seeded.randrange(len(sent))] ^= 1 << seeded.randrange(8)
        try:
            frames, _ = _read_all(_stream(server, bytes(damaged), 1 << 16), 1 << 20)
        except FirnlineError:
            refused += 1
        else:
            assert expected.startswith(frames)
    assert refused > FLIPS // 2
