"""The replication stream: transactions, positions, what is left out, what stops it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from firnline.errors import ConfigError, SourceError, SourceGapError
from firnline.sources.cdc.log import unpack_frames
from firnline.sources.mysql.decode import MySqlDecoder
from tests.support.binlog import Reading, apply, end_of, flat, log_of, purge, reading, stream_of
from tests.support.mysql import BinlogServer, MySqlServer

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]
ORDERS = "CREATE TABLE shop.orders (id int primary key, name varchar(40), amount decimal(10,2), note text)"


@pytest.fixture
def shop(binlog_server: BinlogServer) -> BinlogServer:
    binlog_server.run("CREATE DATABASE shop", "CREATE DATABASE other", ORDERS)
    binlog_server.run("CREATE TABLE other.things (id int primary key, v int)")
    return binlog_server


@contextlib.contextmanager
def transaction(server: BinlogServer) -> Iterator[Any]:
    """A cursor whose statements are committed at the end."""
    with contextlib.closing(server.connect(autocommit=False)) as db, db.cursor() as cursor:
        yield cursor
        db.commit()


def selected(server: BinlogServer, table: str = "shop.orders") -> dict[Any, dict[str, Any]]:
    with contextlib.closing(server.connect()) as db, db.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table}")
        names = [column[0] for column in cursor.description]
        return {(row[0],): dict(zip(names, row, strict=True)) for row in cursor.fetchall()}


def work(server: BinlogServer) -> int:
    """Transactions of all kinds; returns how many cuts they make."""
    with transaction(server) as cursor:
        cursor.executemany(
            "INSERT INTO shop.orders VALUES (%s, %s, %s, %s)", [(i, f"n{i}", i, "x" * i) for i in range(50)]
        )
        cursor.execute("UPDATE shop.orders SET amount = amount + 1 WHERE id < 10")
        cursor.execute("INSERT INTO other.things VALUES (1, 1)")
    with transaction(server) as cursor:
        cursor.execute("UPDATE shop.orders SET id = id + 100 WHERE id < 5")
        cursor.execute("SAVEPOINT here")
        cursor.execute("DELETE FROM shop.orders WHERE id > 20")
        cursor.execute("ROLLBACK TO here")
        cursor.execute("DELETE FROM shop.orders WHERE id BETWEEN 10 AND 20")
    with contextlib.closing(server.connect(autocommit=False)) as db, db.cursor() as cursor:
        cursor.execute("DELETE FROM shop.orders")
        db.rollback()
    server.run("INSERT INTO other.things VALUES (2, 2)")  # nothing for us
    server.run("UPDATE shop.orders SET note = NULL WHERE id = 7")
    server.run("ALTER TABLE shop.orders ADD COLUMN more int DEFAULT 3, DROP COLUMN note")
    server.run("REPLACE INTO shop.orders VALUES (7, 'seven', 7.5, 8), (8, 'ü', NULL, NULL)")
    return 5


def test_changes_lead_to_the_database(shop: BinlogServer) -> None:
    """All changes, folded by key, are the table: key changes, savepoints, rolled back transactions, DDL between."""
    start = end_of(shop)
    cuts = work(shop)
    with reading(shop, start) as log:
        log.read(cuts)
        assert [cut.rows > 0 for cut in log.cuts] == [True, True, True, False, True]
        assert log.cuts[0].rows == 60
    decoded = log.decode(with_before=True)
    tables: dict[str, dict[Any, dict[str, Any]]] = {}
    apply(decoded, tables)
    table = tables["shop.orders"]
    for row in table.values():
        row.pop("note", None)
        row.setdefault("more", 3)  # the default of existing rows is in no row event
    assert table == selected(shop)
    assert {changes.schema.table for changes in decoded.changes} == {"shop.orders"}
    assert [ddl.tables for ddl in decoded.ddl] == [("shop.orders",)]
    assert len(decoded.transactions) == cuts
    assert [one.id for one in decoded.transactions] == [cut.transaction for cut in log.cuts]
    ops = [op for _, op, _ in flat(decoded)]
    moved = ops[60:70]
    assert moved == ["DELETE", "INSERT"] * 5  # the key changed
    for changes in decoded.changes:
        assert changes.before is not None
        for op, row, before in zip(changes.ops, changes.rows.to_pylist(), changes.before.to_pylist(), strict=True):
            if op == 1:
                assert before["id"] == row["id"]
            elif op == 2:
                assert before == row
            else:
                assert before is None


def test_a_stream_goes_on_behind_any_transaction(shop: BinlogServer) -> None:
    """From each cut's position on, the rest comes, byte by byte the same; and positions are the same again."""
    start = end_of(shop)
    cuts = work(shop)
    with reading(shop, start) as log:
        log.read(cuts)
    for number, cut in enumerate(log.cuts[:-1]):
        with reading(shop, cut.position) as rest:
            rest.read(cuts - number - 1)
        assert [one.position for one in rest.cuts] == [one.position for one in log.cuts[number + 1 :]]
        parts = MySqlDecoder().decode(log.context, log.frames[: cut.offset])
        later = rest.decode()
        assert flat(parts) + flat(later) == flat(log.decode())


def test_pieces_and_their_contexts(shop: BinlogServer) -> None:
    """A transaction that comes in many pieces is decoded from each piece with its own context alone."""
    start = end_of(shop)
    with transaction(shop) as cursor:
        for block in range(20):
            rows = [(block * 200 + i, f"näme{i}", i, "text " * 20) for i in range(200)]
            cursor.executemany("INSERT INTO shop.orders VALUES (%s, %s, %s, %s)", rows)
    found = []
    names = set()
    with contextlib.closing(stream_of(shop)) as stream:
        stream.open(start)
        cuts = 0
        pieces = 0
        while not cuts:
            context = stream.context(at_cut=False)
            piece = stream.read(20_000, 1.0)
            assert len(piece.frames) <= 20_000
            cuts += len(piece.cuts)
            if not piece.cuts:
                assert stream.idle_position() is None
            decoded = MySqlDecoder().decode(context, piece.frames)
            found += [row["id"] for _, _, row in flat(decoded)]
            names |= {one.id for one in decoded.transactions}
            pieces += 1
    assert found == list(range(4000))
    assert pieces > 10
    assert len(names) == 1
    assert piece.cuts[0].transaction in names


def test_a_gtid_counts_at_its_commit(shop: BinlogServer) -> None:
    """While a transaction is read, no position holds its GTID: only the cut at its end does."""
    start = end_of(shop)
    with transaction(shop) as cursor:
        for i in range(500):
            cursor.execute("INSERT INTO shop.orders VALUES (%s, 'x', 1, repeat('y', 200))", [i])
    with contextlib.closing(stream_of(shop)) as stream:
        stream.open(start)
        piece = stream.read(5_000, 5.0)
        assert piece.frames
        assert not piece.cuts
        assert piece.open_rows > 0
        assert stream.idle_position() is None
        with reading(shop, start, server_id=4713) as again:  # a restart in the middle begins with the whole
            again.read(1)
    assert again.cuts[0].position["gtid_set"] != start["gtid_set"]
    assert len(flat(again.decode())) == 500


def test_what_is_not_captured_is_left_out(shop: BinlogServer) -> None:
    """Other tables leave nothing in the frames, and the position moves on without a cut."""
    start = end_of(shop)
    shop.run(*[f"INSERT INTO other.things VALUES ({i}, {i})" for i in range(10, 40)], "CREATE USER x", "DROP USER x")
    end = end_of(shop)
    with reading(shop, start, heartbeat_seconds=0.2) as log:
        idle = wait_for_idle(log, end)
        assert log.frames == b""
        assert log.stream.idle_position() == idle
        shop.run("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        log.read(1)
        assert log.stream.idle_position() is None
    with reading(shop, idle) as log:
        log.read(1)
    assert [row["id"] for _, _, row in flat(log.decode())] == [1]


def wait_for_idle(log: Reading, end: Any) -> Any:
    """Read until the position without rows is that of the end."""
    for _ in range(600):
        log.frames += log.stream.read(1 << 20, 0.2).frames
        idle: Any = log.stream.idle_position()
        if idle is not None and (idle["file"], idle["pos"]) >= (end["file"], end["pos"]):
            return idle
    raise AssertionError(f"still at {log.stream.idle_position()}, not at {end}")


def test_truncate_and_ddl_are_at_their_place(shop: BinlogServer) -> None:
    """TRUNCATE is a change between others; DDL of captured tables is told with its place."""

    def do() -> None:
        shop.run(
            "INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)", "/* why */ truncate  table `shop` . `orders`",
            "INSERT INTO shop.orders VALUES (2, 'b', 1, NULL)", "CREATE TABLE other.more (id int)",
            "RENAME TABLE shop.orders TO shop.sales", "INSERT INTO shop.sales VALUES (3, 'c', 1, NULL)",
            "CREATE TABLE shop.copy AS SELECT id, name FROM shop.sales", "DROP TABLE shop.copy",
        )  # fmt: skip

    decoded = log_of(shop, do, 7)
    assert [(table, op, row.get("id")) for table, op, row in flat(decoded)] == [
        ("shop.orders", "INSERT", 1), ("shop.orders", "TRUNCATE", None), ("shop.orders", "INSERT", 2),
        ("shop.sales", "INSERT", 3), ("shop.copy", "INSERT", 2), ("shop.copy", "INSERT", 3),
    ]  # fmt: skip
    assert [(ddl.tables, ddl.order) for ddl in decoded.ddl] == [
        (("shop.orders", "shop.sales"), 3), (("shop.copy",), 4), (("shop.copy",), 6),
    ]  # fmt: skip


def test_row_images(shop: BinlogServer) -> None:
    """MINIMAL and NOBLOB: what the log leaves out is missing, never null; keys are always there."""
    shop.run("INSERT INTO shop.orders VALUES (1, 'a', 1, 'note'), (2, 'b', 2, NULL)")

    def do() -> None:
        shop.run(
            "SET binlog_row_image = 'MINIMAL'", "UPDATE shop.orders SET amount = 5 WHERE id = 1",
            "UPDATE shop.orders SET note = NULL WHERE id = 1", "UPDATE shop.orders SET id = 3 WHERE id = 2",
            "DELETE FROM shop.orders WHERE id = 3", "SET binlog_row_image = 'NOBLOB'",
            "UPDATE shop.orders SET name = 'z' WHERE id = 1", "INSERT INTO shop.orders VALUES (9, 'i', 1, 'n')",
        )  # fmt: skip

    rows = [(op, row) for _, op, row in flat(log_of(shop, do, 6))]
    assert [(op, sorted(row)) for op, row in rows] == [
        ("UPDATE", ["amount", "id"]), ("UPDATE", ["id", "note"]), ("DELETE", ["id"]), ("INSERT", ["id"]),
        ("DELETE", ["id"]), ("UPDATE", ["amount", "id", "name"]), ("INSERT", ["amount", "id", "name", "note"]),
    ]  # fmt: skip
    assert [row["id"] for _, row in rows] == [1, 1, 2, 3, 3, 1, 9]
    assert rows[1][1] == {"id": 1, "note": None}


def test_inserts_whose_defaults_the_log_lacks_stop_the_stream(shop: BinlogServer) -> None:
    """MINIMAL leaves out columns that got their default: stop by name, or read them as missing if the spec says so."""
    start = end_of(shop)
    shop.run("SET binlog_row_image = 'MINIMAL'", "INSERT INTO shop.orders (id) VALUES (1)")
    with reading(shop, start) as log, pytest.raises(SourceGapError, match="got their default") as caught:
        log.read(1)
    assert "SET GLOBAL binlog_row_image = 'FULL'" in (caught.value.hint or "")
    with reading(shop, start, partial_inserts=True) as log:
        assert flat(log.read(1).decode()) == [("shop.orders", "INSERT", {"id": 1})]


def test_statements_instead_of_rows_stop_the_stream(shop: BinlogServer) -> None:
    """A session with binlog_format = STATEMENT: the stream stops and shows the statement."""
    start = end_of(shop)
    shop.run("SET SESSION binlog_format = 'STATEMENT'", "INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
    with reading(shop, start) as log, pytest.raises(SourceGapError, match=r"INSERT INTO shop\.orders") as caught:
        log.read(1)
    assert "binlog_format = ROW" in (caught.value.hint or "")


def test_xa_is_refused_for_captured_tables_only(shop: BinlogServer) -> None:
    """XA on other tables passes; rows of captured ones in XA stop the stream, since they may be rolled back."""
    start = end_of(shop)
    shop.run("XA START 'a'", "INSERT INTO other.things VALUES (5, 5)", "XA END 'a'", "XA PREPARE 'a'", "XA COMMIT 'a'")
    shop.run("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
    with reading(shop, start) as log:
        assert [row["id"] for _, _, row in flat(log.read(1).decode())] == [1]
        shop.run("XA START 'b'", "INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)", "XA END 'b'", "XA PREPARE 'b'")
        try:
            with pytest.raises(SourceGapError, match="XA"):
                log.read(2)
        finally:
            shop.run("XA ROLLBACK 'b'")


def test_packets_that_go_on(shop: BinlogServer) -> None:
    """Events that need more than one packet of 16 MiB, and one that fills a packet exactly."""
    shop.run("CREATE TABLE shop.big (id int primary key, v longblob)")
    start = end_of(shop)
    with contextlib.closing(shop.connect(max_allowed_packet=1 << 30)) as db, db.cursor() as cursor:
        for number, size in enumerate([17 << 20, 34 << 20]):
            cursor.execute(f"INSERT INTO shop.big VALUES ({number}, repeat('ab', {size // 2}))")
        cursor.execute("INSERT INTO shop.big VALUES (7, '')")
    with reading(shop, start) as log:
        log.read(1, max_bytes=1000)
        overhead = max(len(frame) for frame in unpack_frames(log.frames)) - (17 << 20)
        log.read(3)
    assert [(row["id"], len(row["v"])) for _, _, row in flat(log.decode())] == [(0, 17 << 20), (1, 34 << 20), (7, 0)]
    # The packet of an event has one byte more.
    exact = 0xFFFFFF - 1 - overhead
    with contextlib.closing(shop.connect(max_allowed_packet=1 << 30)) as db, db.cursor() as cursor:
        cursor.execute(f"INSERT INTO shop.big VALUES (8, repeat('x', {exact})), (9, 'end')")
        cursor.execute(f"INSERT INTO shop.big VALUES (10, repeat('x', {exact}))")
        cursor.execute("INSERT INTO shop.big VALUES (11, 'y')")
    with reading(shop, log.cuts[-1].position) as log:
        rows = flat(log.read(3).decode())
        assert max(len(frame) for frame in unpack_frames(log.frames)) == 0xFFFFFF - 1
    assert [row["id"] for _, _, row in rows] == [8, 9, 10, 11]


def test_log_without_checksums(shop: BinlogServer) -> None:
    """A server without checksums, and one that begins to write them: frames have them all the same."""
    start = end_of(shop)
    try:
        shop.run("SET GLOBAL binlog_checksum = 'NONE'", "INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        with reading(shop, start) as log:
            log.read(1)
            shop.run("SET GLOBAL binlog_checksum = 'CRC32'", "INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)")
            log.read(2)
            shop.run("SET GLOBAL binlog_checksum = 'NONE'", "INSERT INTO shop.orders VALUES (3, 'a', 1, NULL)")
            log.read(3)
    finally:
        shop.run("SET GLOBAL binlog_checksum = 'CRC32'")
    assert [row["id"] for _, _, row in flat(log.decode())] == [1, 2, 3]


def test_files_of_the_log_change(shop: BinlogServer) -> None:
    """FLUSH LOGS between and around transactions; and the old files are purged, which loses nothing."""
    start = end_of(shop)
    with reading(shop, start) as log:
        for i in range(3):
            shop.run(f"INSERT INTO shop.orders VALUES ({i}, 'a', 1, NULL)", "FLUSH BINARY LOGS")
            log.read(i + 1)
        end = end_of(shop)
        idle = wait_for_idle(log, end)
    assert [row["id"] for _, _, row in flat(log.decode())] == [0, 1, 2]
    files = [one.position.rpartition(":")[0] for one in log.decode().transactions]
    assert len(set(files)) == 3
    purge(shop, end["file"])
    shop.run("INSERT INTO shop.orders VALUES (3, 'a', 1, NULL)")
    with reading(shop, idle) as log:  # the file of the position is proof enough
        assert [row["id"] for _, _, row in flat(log.read(1).decode())] == [3]
    with pytest.raises(SourceGapError) as caught, reading(shop, start):
        pass
    assert "--resnapshot" in (caught.value.hint or "")


def test_close_wakes_a_reader(shop: BinlogServer) -> None:
    """`close` by another thread ends a `read` that waits."""
    stream = stream_of(shop)
    stream.open(end_of(shop))
    timer = threading.Timer(0.5, stream.close)
    timer.start()
    with pytest.raises(SourceError, match=r"lost|closed"):
        stream.read(1000, 600.0)
    timer.join()


def test_a_second_reader_of_the_same_id_ends_the_first(shop: BinlogServer) -> None:
    """The server ends the older stream; its reader gets an error and may try again."""
    position = end_of(shop)
    with reading(shop, position) as first, reading(shop, position) as second:
        shop.run("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        second.read(1)
        with pytest.raises(SourceError, match=r"lost|same"):
            first.read(2)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("binlog_row_metadata = 'MINIMAL'", "binlog_row_metadata = 'FULL'"),
        ("binlog_format = 'MIXED'", "binlog_format = 'ROW'"),
    ],
)  # fmt: skip
def test_settings_of_the_server(shop: BinlogServer, wrong: str, right: str) -> None:
    """A wrong setting is refused, with the statement that mends it."""
    position = end_of(shop)
    shop.run(f"SET GLOBAL {wrong}")
    try:
        with contextlib.closing(stream_of(shop)) as stream:
            for call in (stream.check, lambda: stream.open(position)):
                with pytest.raises(ConfigError) as caught:
                    call()
                assert right in (caught.value.hint or "")
    finally:
        shop.run(f"SET GLOBAL {right}")


def test_rights_and_ids(shop: BinlogServer) -> None:
    """A user without the rights, a wrong password, the server's own id, no server: each with what to do."""
    shop.run("CREATE USER 'poor'@'%' IDENTIFIED BY 'secret-word'", "GRANT SELECT ON *.* TO 'poor'@'%'")
    try:
        poor = f"mysql://poor:secret-word@127.0.0.1:{shop.port}"
        for dsn, words in ((poor, "REPLICATION SLAVE"), (poor.replace("secret-word", "wrong-word"), "denied")):
            with (
                contextlib.closing(stream_of(shop, dsn=dsn)) as stream,
                pytest.raises(ConfigError, match=words) as caught,
            ):
                stream.check()
            assert "GRANT SELECT, REPLICATION SLAVE" in (caught.value.hint or "")
            assert "-word" not in str(caught.value) + str(caught.value.hint)
    finally:
        shop.run("DROP USER 'poor'@'%'")
    with contextlib.closing(stream_of(shop, server_id=1)) as stream, pytest.raises(ConfigError, match="server_id 1"):
        stream.check()
    with contextlib.closing(stream_of(shop, dsn="mysql://a:b@127.0.0.1:1")) as stream, pytest.raises(SourceError):
        stream.check()
    with pytest.raises(ConfigError, match="dsn"):
        stream_of(shop, dsn="postgres://a:b@127.0.0.1:1")
    several = f"mysql://firnline:s3cret-in-tests@127.0.0.1:1,127.0.0.1:{shop.port}?ssl_mode=required"
    if isinstance(shop, MySqlServer):  # MariaDB 10.11 has no certificate of its own
        with contextlib.closing(stream_of(shop, dsn=several)) as stream:
            stream.open(end_of(shop))
            shop.run("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
            assert len(Reading(stream).read(1).cuts) == 1
