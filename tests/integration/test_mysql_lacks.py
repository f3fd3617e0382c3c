"""Servers whose log lacks changes of captured tables: they are refused by name, with the setting that mends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import ConfigError, SchemaError
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.integration.test_mysql_source import ORDERS, captured, check_current
from tests.support.captured import Capturing, delta_rows, position, wait_until
from tests.support.mariadb import find_program, running_mariadb
from tests.support.mysql import PASSWORD, BinlogServer, find_mysqld, running_mysql
from tests.support.pipelines import run_once, run_to_end

PARENTS = "CREATE TABLE shop.parents (id int PRIMARY KEY)"
CHILDREN = "CREATE TABLE shop.orders (id bigint PRIMARY KEY, amount decimal(10,2), note varchar(500), parent int)"
CASCADE = "FOREIGN KEY (parent) REFERENCES shop.parents (id) ON DELETE CASCADE"

Running = Callable[..., contextlib.AbstractContextManager[BinlogServer]]
SERVERS = [
    pytest.param(running_mysql, marks=[
        pytest.mark.mysql, pytest.mark.skipif(find_mysqld() is None, reason="there is no MySQL server")]),
    pytest.param(running_mariadb, marks=[
        pytest.mark.mariadb, pytest.mark.skipif(find_program("mariadbd") is None, reason="there is no MariaDB")]),
]  # fmt: skip


def with_source(options: PipelineOptions, **settings: Any) -> PipelineOptions:
    source = options.sources[0]
    assert isinstance(source, MySqlSourceOptions)
    return replace(options, sources=(replace(source, **settings),))


def refusal(options: PipelineOptions) -> str:
    """What a run, and a dry run before it, refuse."""
    error = failure(options)
    with pytest.raises(ConfigError) as caught:
        open_pipeline(options).sources["db"].remarks()
    assert caught.value.message == error.message
    return f"{error.message} {error.hint}"


def failure(options: PipelineOptions) -> ConfigError:
    """How a run ends."""
    result = run_once(options).result
    assert isinstance(result.error, ConfigError), result
    return result.error


@pytest.mark.parametrize("running", SERVERS)
def test_filters_of_the_log(running: Running, tmp_path: Path) -> None:
    """They are refused before the first reading, and when a server that was read gets one; a dry run names others."""
    with running("--binlog-ignore-db=shop") as server:
        server.run("CREATE DATABASE shop", ORDERS)
        options = captured(server, tmp_path)
        assert "binlog_ignore_db = shop below [mysqld]" in refusal(options)
        server.stop()
        server.start("--binlog-do-db=shop")
        server.run("USE shop", "INSERT INTO shop.orders VALUES (1, 1, 'a')")
        run_to_end(options)
        assert any("binlog_do_db is set" in one for one in open_pipeline(options).sources["db"].remarks())
        server.stop()
        server.start("--binlog-do-db=other")
        server.run("INSERT INTO shop.orders VALUES (2, 1, 'lost')")
        assert "or add binlog_do_db = shop below [mysqld]" in refusal(options)
        both = refusal(with_source(options, tables=("orders", "later.orders")))
        assert "binlog_do_db = later" in both, both
        assert delta_rows(tmp_path / "current", "id") == [(1,)]


def test_a_database_with_a_dot(binlog_server: BinlogServer, tmp_path: Path) -> None:
    """Its tables cannot be told from those of other databases. A table may have a dot in its name."""
    binlog_server.run("CREATE DATABASE `my.shop`", ORDERS.replace("shop.", "`my.shop`."))
    binlog_server.run("CREATE DATABASE shop", ORDERS, ORDERS.replace("orders", "`my.orders`"))
    options = captured(binlog_server, tmp_path)
    for tables in (("my.shop.orders", "orders"), ("*.*",)):
        assert "my.shop.orders: a database with a dot" in refusal(with_source(options, tables=tables))
    binlog_server.run("INSERT INTO shop.orders VALUES (1, 1, '')", "INSERT INTO shop.`my.orders` VALUES (2, 2, '')")
    run_to_end(with_source(options, tables=("*.*", "!my.shop.*")))
    check_current(binlog_server, tmp_path)
    assert sorted(position(options).snapshots) == ["shop.my.orders", "shop.orders"]


@pytest.mark.mariadb
def test_names_in_another_case(tmp_path: Path) -> None:
    if find_program("mariadbd") is None:
        pytest.skip("there is no MariaDB server")
    with running_mariadb("--lower-case-table-names=1") as server:
        server.run("CREATE DATABASE Shop", ORDERS, "INSERT INTO shop.Orders VALUES (1, 1, '')")
        options = captured(server, tmp_path)
        for tables in (("orders", "Orders"), ("*", "!Orders")):
            assert "shop.orders" in refusal(with_source(options, tables=tables))
        run_to_end(options)
        check_current(server, tmp_path)


@pytest.mark.mariadb
def test_a_replica_that_does_not_log_what_it_replicates(mariadb: BinlogServer, tmp_path: Path) -> None:
    with running_mariadb("--server-id=2", "--log-slave-updates=OFF") as replica:
        replica.run("CREATE DATABASE shop", ORDERS)
        options = captured(replica, tmp_path)
        run_to_end(options)  # it is none yet
        replica.run(
            f"CHANGE MASTER TO master_host='127.0.0.1', master_port={mariadb.port}, master_user='firnline', "
            f"master_password='{PASSWORD}', master_use_gtid=slave_pos"
        )
        assert "log_slave_updates = ON" in refusal(options)  # whether it runs or not
        replica.run(
            "CREATE USER watcher IDENTIFIED BY 'w'",
            "GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO watcher",
        )
        dsn = f"mysql://watcher:w@127.0.0.1:{replica.port}/shop"
        run_to_end(with_source(options, dsn=dsn))  # without the right SLAVE MONITOR nobody sees a stopped replica
        replica.run("SET GLOBAL gtid_slave_pos = @@GLOBAL.gtid_binlog_pos", "START SLAVE")
        wait_until(lambda: replica.run("SHOW GLOBAL STATUS LIKE 'Slaves_running'")[0][1] == "1")
        assert "log_slave_updates = ON" in refusal(with_source(options, dsn=dsn))


@pytest.mark.mysql
def test_cascades_that_innodb_makes(tmp_path: Path) -> None:
    """MySQL 9.6 and later log cascades, but not with this setting."""
    if find_mysqld() is None:
        pytest.skip("there is no MySQL server: bash scripts/fetch_mysql.sh")
    with running_mysql() as server:
        if not server.run("SHOW GLOBAL VARIABLES LIKE 'innodb_native_foreign_keys'"):
            pytest.skip("this version of MySQL has no such setting")
        server.run("CREATE DATABASE shop", PARENTS, CHILDREN.replace("parent int", f"parent int, {CASCADE}"))
        server.run("INSERT INTO shop.parents VALUES (1)", "INSERT INTO shop.orders VALUES (1, 1, 'a', 1)")
        options = captured(server, tmp_path)
        run_to_end(options)
        server.run("DELETE FROM shop.parents")
        run_to_end(options)
        assert delta_rows(tmp_path / "current", "id") == []
        server.stop()
        server.start("--innodb-native-foreign-keys=ON")
        assert "innodb_native_foreign_keys = OFF" in refusal(options)
        run_to_end(with_source(options, accept_cascades=True))


@pytest.mark.mariadb
def test_a_cascade_that_comes_later(mariadb: BinlogServer, tmp_path: Path) -> None:
    """A foreign key that is made while a run reads stops it; so does one that was made and is gone again."""
    mariadb.run("CREATE DATABASE shop", PARENTS, CHILDREN)
    mariadb.run("INSERT INTO shop.parents VALUES (1), (2)", "INSERT INTO shop.orders VALUES (1, 1, 'a', 1)")
    options = captured(mariadb, tmp_path)
    run_to_end(options)
    with Capturing(options, fails="config") as run:
        mariadb.run(f"ALTER TABLE shop.orders ADD CONSTRAINT belongs {CASCADE}")
        wait_until(lambda: run.has_ended)
    error = run.results[0].error
    assert "its foreign key belongs changes rows by itself" in str(error)
    assert "accept_cascades: true" in refusal(options)
    mariadb.run("DELETE FROM shop.parents WHERE id = 1", "ALTER TABLE shop.orders DROP FOREIGN KEY belongs")
    assert "a foreign key of the statement" in failure(options).message
    run_to_end(with_source(options, accept_cascades=True))
    assert delta_rows(tmp_path / "current", "id") == [(1,)]  # the log does not have that it is gone
    mariadb.run("ALTER TABLE shop.orders COMMENT 'ON DELETE CASCADE'", "INSERT INTO shop.orders VALUES (2, 2, '', 2)")
    run_to_end(options)  # the statement is behind it
    assert delta_rows(tmp_path / "current", "id") == [(1,), (2,)]


@pytest.mark.mariadb
@pytest.mark.skipif(find_program("mariadbd") is None, reason="there is no MariaDB")
def test_a_system_versioned_table_is_appended_and_never_upserted(mariadb: BinlogServer, tmp_path: Path) -> None:
    mariadb.run("CREATE DATABASE shop", ORDERS + " WITH SYSTEM VERSIONING")
    options = captured(mariadb, tmp_path)
    source = open_pipeline(options).sources["db"]
    assert [text for text in source.remarks() if "system-versioned" in text] == [
        "table shop.orders is system-versioned: its changes can be appended, not upserted, as the log has rows of the "
        "past beside those of now; rows that are there before are not read"
    ]
    keyless = captured(mariadb, tmp_path / "keyless")
    error = run_once(replace(keyless, sinks=(replace(keyless.sinks[1], key=()),))).result.error
    assert isinstance(error, ConfigError)
    assert "shop.orders has no key" in error.message
    appended = replace(options, sinks=options.sinks[:1])
    run_to_end(appended)
    mariadb.run("INSERT INTO shop.orders VALUES (1, 1, 'x')", "UPDATE shop.orders SET amount = 2")
    run_to_end(appended)
    assert len(delta_rows(tmp_path / "history", "id", "_op")) == 3  # one of them of the past
    upserted = captured(mariadb, tmp_path / "upserted")
    run_to_end(upserted)
    mariadb.run("UPDATE shop.orders SET amount = 3")
    error = run_once(upserted).result.error
    assert isinstance(error, SchemaError)
    assert "shop.orders is system-versioned, and a sink upserts it" in error.message
