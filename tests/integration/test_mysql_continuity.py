"""Lost connections, killed servers, purged logs, other servers: continuity is proven, or the stream stops."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from firnline.errors import SourceError, SourceGapError
from tests.support.binlog import Reading, end_of, flat, purge, reading, stream_of
from tests.support.mysql import BinlogServer, MySqlServer, running_mysql
from tests.support.proxy import running_proxy

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]
TABLE = "CREATE TABLE shop.t (id int primary key, v varchar(200))"


def insert(server: BinlogServer, *ids: int) -> None:
    """A transaction per id."""
    server.run(*[f"INSERT INTO shop.t VALUES ({i}, 'value {i}')" for i in ids])


def ids(log: Reading) -> list[int]:
    return [row["id"] for _, _, row in flat(log.decode())]


@pytest.fixture
def shop(binlog_server: BinlogServer) -> BinlogServer:
    binlog_server.run("CREATE DATABASE shop", TABLE)
    return binlog_server


def test_connection_lost_in_the_middle(shop: BinlogServer) -> None:
    """The proxy resets the stream inside a transaction: an error that may be retried; then all comes again from the
    last cut on."""
    start = end_of(shop)
    insert(shop, 1, 2)
    with contextlib.closing(shop.connect(autocommit=False)) as db, db.cursor() as cursor:
        cursor.executemany("INSERT INTO shop.t VALUES (%s, repeat('x', 150))", [[i] for i in range(10, 2500)])
        db.commit()
    insert(shop, 3)
    with running_proxy(shop.port) as proxy:
        dsn = shop.dsn.replace(str(shop.port), str(proxy.port))
        with contextlib.closing(stream_of(shop, dsn=dsn)) as stream:
            stream.open(start)
            log = Reading(stream).read(2, max_bytes=1000)
            stream.read(1000, 1.0)
            proxy.cut()
            with pytest.raises(SourceError) as caught:
                read_on(stream)
            assert caught.value.retryable
            with pytest.raises(SourceError):
                stream.read(1000, 1.0)
            stream.open(log.cuts[-1].position)
            rest = Reading(stream).read(2)
    assert ids(log)[:2] == [1, 2]
    assert ids(rest) == [*range(10, 2500), 3]


def read_on(stream: Any) -> None:
    while True:
        stream.read(1 << 20, 1.0)


def test_a_server_that_falls_silent(shop: BinlogServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without heartbeats the connection counts as lost."""
    monkeypatch.setattr("firnline.sources.mysql.stream.SILENCE_SECONDS", 4.0)
    with running_proxy(shop.port) as proxy:
        dsn = shop.dsn.replace(str(shop.port), str(proxy.port))
        with contextlib.closing(stream_of(shop, dsn=dsn, heartbeat_seconds=0.2)) as stream:
            stream.open(end_of(shop))
            stream.read(1000, 1.0)
            proxy.treat("drop")
            with pytest.raises(SourceError, match="heartbeat"):
                read_on(stream)


def test_server_killed_and_started(shop: BinlogServer) -> None:
    """kill -9 of the server: an error that may be retried; then the stream goes on exactly."""
    start = end_of(shop)
    insert(shop, 1, 2)
    with contextlib.closing(stream_of(shop)) as stream:
        stream.open(start)
        log = Reading(stream).read(2)
        shop.kill()
        with pytest.raises(SourceError) as caught:
            read_on(stream)
        assert caught.value.retryable
        with pytest.raises(SourceError):
            stream.open(log.cuts[-1].position)
        shop.start()
        insert(shop, 3)
        stream.open(log.cuts[-1].position)
        assert ids(Reading(stream).read(1)) == [3]


def test_many_look_at_the_log_at_once(shop: BinlogServer) -> None:
    """Readers of other sources and runs do not end each other, and none takes that for a log that is gone."""
    insert(shop, 1)
    first = end_of(shop)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: end_of(shop), range(48)))
    assert all(place == first for place in found)


def test_purged_before_it_was_read(shop: BinlogServer) -> None:
    """Files of the log with transactions that were not read are gone: a gap, with the ways out."""
    start = end_of(shop)
    insert(shop, 1)
    with reading(shop, start) as log:
        position: Any = log.read(1).cuts[0].position
    insert(shop, 2)
    shop.run("FLUSH BINARY LOGS")
    purge(shop, end_of(shop)["file"])
    insert(shop, 3)
    with contextlib.closing(stream_of(shop)) as stream, pytest.raises(SourceGapError) as caught:
        stream.open(position)
    assert "--resnapshot" in (caught.value.hint or "")
    assert not caught.value.retryable


def test_the_log_was_reset(shop: BinlogServer) -> None:
    """After RESET the same names and numbers come again: neither fewer nor as many transactions are taken for ours."""
    reset = "RESET BINARY LOGS AND GTIDS" if isinstance(shop, MySqlServer) else "RESET MASTER"
    shop.run(reset)
    start = end_of(shop)
    insert(shop, 1, 2, 3)
    with reading(shop, start) as log:
        positions: list[Any] = [start, *[cut.position for cut in log.read(3).cuts]]
    shop.run(reset)
    for count in range(5):
        for position in positions[1:]:
            with contextlib.closing(stream_of(shop)) as stream, pytest.raises(SourceGapError):
                stream.open(position)
        insert(shop, 10 + count)


def test_a_reset_is_no_purge(shop: BinlogServer) -> None:
    """Files are numbered anew: the older ones of the log are not those that were there before."""
    start = end_of(shop)
    shop.run("FLUSH BINARY LOGS", "FLUSH BINARY LOGS")
    insert(shop, 1)
    with reading(shop, start) as log:
        position: Any = log.read(1).cuts[-1].position
    shop.run("RESET BINARY LOGS AND GTIDS" if isinstance(shop, MySqlServer) else "RESET MASTER")
    for last in (position["last"], None):
        with contextlib.closing(stream_of(shop)) as stream, pytest.raises(SourceGapError, match="was reset"):
            stream.open({**position, "last": last})


def test_a_last_transaction_that_is_not_the_same(shop: BinlogServer) -> None:
    """Each fact of the last transaction counts: another time, place or checksum is another history."""
    start = end_of(shop)
    insert(shop, 1, 2)
    with reading(shop, start) as log:
        position: Any = log.read(2).cuts[-1].position
    insert(shop, 3)
    changes: list[dict[str, Any]] = [{name: 1} for name in ("at", "crc", "end", "start", "rows")]
    for change in changes:
        other = {**position, "last": {**position["last"], **change}}
        with contextlib.closing(stream_of(shop)) as stream, pytest.raises(SourceGapError, match="does not continue"):
            stream.open(other)
    with contextlib.closing(stream_of(shop)) as stream, pytest.raises(SourceGapError):
        stream.open({**position, "kind": "postgres"})
    with reading(shop, position) as log:
        assert ids(log.read(1)) == [3]


@pytest.mark.mysql
def test_another_server_on_the_same_port(mysql: MySqlServer) -> None:
    """Another server with the same tables and file names is refused; a replica that was promoted is taken."""
    mysql.run("CREATE DATABASE shop", TABLE)
    start = end_of(mysql)
    insert(mysql, 1, 2)
    with reading(mysql, start) as log:
        positions: list[Any] = [cut.position for cut in log.read(2).cuts]
    with running_mysql() as other:
        other.run("CREATE DATABASE shop", TABLE)
        insert(other, 1, 2, 3, 4)
        for position in positions:
            with contextlib.closing(stream_of(other)) as stream, pytest.raises(SourceGapError, match="another history"):
                stream.open(position)
        other.stop()
        # The same server as a replica of the first one: it has all transactions, under their own GTIDs.
        other.start("--server-id=2")
        other.run("DROP DATABASE shop", "RESET BINARY LOGS AND GTIDS")
        other.run(
            f"CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1', SOURCE_PORT={mysql.port}, SOURCE_USER='firnline', "
            "SOURCE_PASSWORD='s3cret-in-tests', SOURCE_AUTO_POSITION=1, SOURCE_SSL=1",
            f"SET GLOBAL gtid_purged = '{start['gtid_set']}'", "CREATE DATABASE shop", TABLE,
        )  # fmt: skip
        other.run("START REPLICA")
        other.run(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{positions[-1]['gtid_set']}', 60)")
        other.run("STOP REPLICA")
        insert(other, 5)
        for number, position in enumerate(positions):
            with reading(other, position) as log:
                cuts = 2 - number
                while sorted(ids(log.read(cuts))) != [2, 5][number:]:  # statements of the replica itself are cuts, too
                    cuts += 1


@pytest.mark.mysql
def test_a_log_without_gtids(mysql: MySqlServer) -> None:
    """gtid_mode OFF: file and position lead; a purged file and another server are gaps."""
    with running_mysql("--gtid-mode=OFF", "--enforce-gtid-consistency=OFF", "--skip-log-replica-updates=0") as server:
        server.run("CREATE DATABASE shop", TABLE)
        start = end_of(server)
        assert start["gtid_set"] is None
        insert(server, 1, 2, 3)
        with reading(server, start) as log:
            cuts = log.read(3).cuts
        assert ids(log) == [1, 2, 3]
        for number, cut in enumerate(cuts[:2]):
            with reading(server, cut.position) as rest:
                assert ids(rest.read(2 - number)) == [2, 3][number:]
        position: Any = cuts[1].position
        with contextlib.closing(stream_of(server)) as stream, pytest.raises(SourceGapError):
            stream.open({**position, "server_uuid": "0" * 8})
        with contextlib.closing(stream_of(server)) as stream, pytest.raises(SourceGapError):
            stream.open({**position, "last": {**position["last"], "at": 5}})
        server.run("FLUSH BINARY LOGS")
        purge(server, end_of(server)["file"])
        with contextlib.closing(stream_of(server)) as stream, pytest.raises(SourceGapError):
            stream.open(position)


@pytest.mark.mysql
def test_compressed_transactions(mysql: MySqlServer) -> None:
    """TRANSACTION_PAYLOAD: unpacked while it comes, in pieces, and behind each of them the stream can go on."""
    mysql.run("CREATE DATABASE shop", "CREATE TABLE shop.t (id int primary key, v longtext)")
    start = end_of(mysql)
    with contextlib.closing(mysql.connect(autocommit=False, max_allowed_packet=1 << 30)) as db, db.cursor() as cursor:
        cursor.execute("SET SESSION binlog_transaction_compression = ON")
        cursor.executemany("INSERT INTO shop.t VALUES (%s, %s)", [[i, f"text {i} " * 50] for i in range(3000)])
        db.commit()
        cursor.execute("INSERT INTO shop.t VALUES (5000, 'small')")
        db.commit()
        # Bytes that no method packs: more than one packet of 16 MiB.
        cursor.execute("SET SESSION max_execution_time = 0")
        for i in range(6000, 6006):
            words = "CONCAT(" + ",".join(["HEX(RANDOM_BYTES(1024))"] * 1000) + ")"
            cursor.execute(f"INSERT INTO shop.t VALUES ({i}, {words}), ({i + 100}, {words}), ({i + 200}, {words})")
        db.commit()
        cursor.execute("INSERT INTO shop.t VALUES (9000, 'end')")
        db.commit()
    with reading(mysql, start) as log:
        log.read(4, max_bytes=50_000)
    expected = [*range(3000), 5000, *[i + n for i in range(6000, 6006) for n in (0, 100, 200)], 9000]
    assert ids(log) == expected
    texts = {row["id"]: row["v"] for _, _, row in flat(log.decode())}
    assert texts == dict(mysql.run("SELECT id, v FROM shop.t"))
    assert [len(text) for i, text in texts.items() if 6000 <= i < 9000] == [2048 * 1000] * 18
    for number, cut in enumerate(log.cuts[:-1]):
        with reading(mysql, cut.position) as rest:
            assert [one.position for one in rest.read(3 - number).cuts] == [
                one.position for one in log.cuts[number + 1 :]
            ]


@pytest.mark.mariadb
def test_compressed_events_of_mariadb(mariadb: BinlogServer) -> None:
    """log_bin_compress: rows and statements are unpacked."""
    mariadb.run("CREATE DATABASE shop", "CREATE TABLE shop.t (id int primary key, v text)")
    start = end_of(mariadb)
    mariadb.run("SET GLOBAL log_bin_compress = ON", "SET GLOBAL log_bin_compress_min_len = 10")
    try:
        mariadb.run(
            "INSERT INTO shop.t VALUES (1, repeat('a', 5000)), (2, repeat('b', 5000))",
            "UPDATE shop.t SET v = repeat('c', 4000) WHERE id = 2", "DELETE FROM shop.t WHERE id = 1",
            f"ALTER TABLE shop.t ADD COLUMN more int COMMENT '{'x' * 900}'",
        )  # fmt: skip
    finally:
        mariadb.run("SET GLOBAL log_bin_compress = OFF")
    with reading(mariadb, start) as log:
        log.read(4)
    assert [(op, row["id"], row["v"][:1]) for _, op, row in flat(log.decode())] == [
        ("INSERT", 1, "a"), ("INSERT", 2, "b"), ("UPDATE", 2, "c"), ("DELETE", 1, "a"),
    ]  # fmt: skip
    with reading(mariadb, log.cuts[1].position) as rest:
        assert len(rest.read(2).cuts) == 2


@pytest.mark.mysql
def test_tagged_gtids(mysql: MySqlServer) -> None:
    """GTIDs with tags are in the position, and the stream goes on behind each of them."""
    mysql.run("CREATE DATABASE shop", TABLE)
    start = end_of(mysql)
    mysql.run(
        "SET gtid_next = 'AUTOMATIC:blue'", "INSERT INTO shop.t VALUES (1, 'a')", "SET gtid_next = 'AUTOMATIC'",
        "INSERT INTO shop.t VALUES (2, 'a')", "SET gtid_next = 'AUTOMATIC:red'", "INSERT INTO shop.t VALUES (3, 'a')",
    )  # fmt: skip
    with reading(mysql, start) as log:
        cuts = log.read(3).cuts
    assert [cut.transaction.split(":")[1:-1] for cut in cuts] == [["blue"], [], ["red"]]
    last: Any = cuts[-1].position
    assert last["gtid_set"] == mysql.run("SELECT @@gtid_executed")[0][0].replace("\n", "")
    for number, cut in enumerate(cuts[:2]):
        with reading(mysql, cut.position) as rest:
            assert ids(rest.read(2 - number)) == [2, 3][number:]


@pytest.mark.mysql
def test_partial_json_is_refused(mysql: MySqlServer) -> None:
    """PARTIAL_UPDATE_ROWS of a captured table stops the stream; the setting is refused before."""
    mysql.run("CREATE DATABASE shop", "CREATE TABLE shop.t (id int primary key, v json)")
    mysql.run("""INSERT INTO shop.t VALUES (1, '{"a": "long text here", "b": 2}')""")
    start = end_of(mysql)
    mysql.run("SET binlog_row_value_options = 'PARTIAL_JSON'", "UPDATE shop.t SET v = JSON_SET(v, '$.b', 3)")
    with reading(mysql, start) as log, pytest.raises(SourceGapError, match="PARTIAL_UPDATE_ROWS"):
        log.read(1)


@pytest.mark.mariadb
def test_domains_of_mariadb(mariadb: BinlogServer) -> None:
    """Several domains, and one that begins while the stream runs."""
    mariadb.run("CREATE DATABASE shop", TABLE)
    start = end_of(mariadb)
    for i, domain in enumerate([0, 5, 5, 0, 7]):
        mariadb.run(f"SET SESSION gtid_domain_id = {domain}", f"INSERT INTO shop.t VALUES ({i}, 'x')")
    with reading(mariadb, start) as log:
        cuts = log.read(5).cuts
    assert ids(log) == list(range(5))
    for number, cut in enumerate(cuts[:-1]):
        with reading(mariadb, cut.position) as rest:
            assert ids(rest.read(4 - number)) == list(range(number + 1, 5))
