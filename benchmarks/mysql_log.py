"""The binary log of MySQL: how fast it is read, beside a client that throws it away, and how fast it is decoded."""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.cases import Row, World
from benchmarks.turns import in_turns, p50
from firnline.sources.mysql.decode import MySqlDecoder
from firnline.sources.mysql.packets import PacketReader
from firnline.sources.mysql.stream import MySqlStream
from tests.support.mariadb import running_mariadb
from tests.support.mysql import BinlogServer, find_mysqld, running_mysql

ROWS, IN_TRANSACTION, ROUNDS = 1_000_000, 50_000, 3
PIECE = 64 << 20
AIM_DECODE, AIM_STREAM = 1_000_000, 0.9
TABLE = (
    "CREATE TABLE bench.orders (id bigint primary key, customer int unsigned, name varchar(60), amount decimal(12,2), "
    "made_at datetime(6), note varchar(200))"
)


def mysql_decode(world: World) -> list[Row]:
    """A million rows of 6 columns and about 150 bytes."""
    count = max(10_000, int(ROWS * world.scale))
    with running_mysql() if find_mysqld() is not None else running_mariadb() as server:
        stream = MySqlStream(server.dsn, lambda table: table == "bench.orders", 4711)
        server.run("CREATE DATABASE bench", TABLE)
        start = stream.end_position()
        transactions = _fill(server, count)
        pieces: list[tuple[bytes, bytes]] = []

        def read() -> None:
            pieces[:] = _read(stream, start, transactions)

        def discard() -> None:
            _discard(stream, start)

        read_ms, discard_ms = in_turns([read, discard], rounds=world.rounds(ROUNDS), each=1)
    stream.close()

    def decode() -> None:
        found = sum(MySqlDecoder().decode(context, frames).count for context, frames in pieces)
        assert found == count, f"{found} rows of {count}"

    decode()  # compiles
    (decode_ms,) = in_turns([decode], rounds=world.rounds(ROUNDS), each=1)
    decoded, streamed, thrown = (count * 1000 / p50(times) for times in (decode_ms, read_ms, discard_ms))
    size = sum(len(frames) for _, frames in pieces) / count
    return [
        Row(f"mysql log: decode rows of {size:.0f} bytes", round(decoded), "per s", None, None,
            f">= {AIM_DECODE:g} per s", decoded >= AIM_DECODE),
        Row("mysql log: read rows, beside throwing them away", round(streamed), "per s", round(thrown),
            streamed / thrown, f">= {AIM_STREAM:g}x", streamed / thrown >= AIM_STREAM),
    ]  # fmt: skip


def _fill(server: BinlogServer, count: int) -> int:
    """Insert rows; return the number of transactions."""
    many = min(IN_TRANSACTION, count)
    with contextlib.closing(server.connect(database="bench")) as db, db.cursor() as cursor:
        cursor.execute("CREATE TABLE digits (d int)")
        cursor.execute("INSERT INTO digits VALUES " + ",".join(f"({i})" for i in range(10)))
        numbers = " + ".join(f"t{i}.d * {10**i}" for i in range(5))
        tables = ", ".join(f"digits t{i}" for i in range(5))
        for first in range(0, count, many):
            cursor.execute(
                f"INSERT INTO orders SELECT {first} + n, n % 97, CONCAT('customer ', n), n / 7, "
                "TIMESTAMPADD(SECOND, n, '2024-01-01 00:00:00.123456'), REPEAT('abcdefgh', 13) "
                f"FROM (SELECT {numbers} n FROM {tables}) x WHERE n < {min(many, count - first)}"
            )
    return -(-count // many)


def _read(stream: MySqlStream, start: Any, transactions: int) -> list[tuple[bytes, bytes]]:
    stream.open(start)
    found, cuts = [], 0
    while cuts < transactions:
        context = stream.context(at_cut=False)
        piece = stream.read(PIECE, 10.0)
        cuts += len(piece.cuts)
        found.append((context, piece.frames))
    stream.close()
    return found


def _discard(stream: MySqlStream, start: Any) -> None:
    """Read as many bytes as the log has, and throw them away."""
    end: Any = stream.end_position()
    stream.open(start)
    packets: PacketReader = stream._reader()
    left = end["pos"] - start["pos"]
    while left > 0:
        packets._start = packets._end = 0
        if packets.fill(10.0):
            left -= packets._end
    stream.close()
