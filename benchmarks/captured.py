"""Databases whose changes are captured, for benchmarks: each can be filled, its log read again from where it was empty,
and thrown away by the client that comes with the server."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import firnline
from firnline.clock import monotonic
from firnline.options import PipelineOptions
from firnline.sources.cdc.log import LogStream
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.mysql.stream import MySqlStream
from firnline.sources.postgres import server as postgres_sessions
from firnline.sources.postgres.stream import PostgresStream
from tests.support.mariadb import running_mariadb
from tests.support.mysql import CACHE, PASSWORD, BinlogServer, find_mysqld, running_mysql
from tests.support.postgres import PostgresServer, find_program, running_postgres

IN_TRANSACTION = 50_000
SLOT, KEPT, THROWN = "bench", "bench_kept", "bench_thrown"
WAIT_SECONDS = 60.0


class Database(ABC):
    """A running server with one table, `orders`, of 6 columns: rows of about 150 bytes."""

    name: str  # of the server, for people
    client: str  # that throws the log away; empty if there is none
    dumper: str  # how the server's own client reads the whole table, for people; empty if there is none

    @abstractmethod
    def source(self, snapshot: str = "never") -> dict[str, Any]:
        """Return the source of a pipeline, as a spec has it."""

    @abstractmethod
    def stream(self) -> LogStream:
        """Return a stream of the table that is not open."""

    @abstractmethod
    def fill(self, first: int, count: int) -> None:
        """Insert rows with ids from `first` on, in one transaction."""

    @abstractmethod
    def rewind(self) -> None:
        """Let a pipeline read again what it has acknowledged."""

    @abstractmethod
    def throw_away(self) -> None:
        """Read the log from where it was kept to its end with the server's own client, and throw it away."""

    @abstractmethod
    def keep(self) -> None:
        """Keep the log from here on; a pipeline stands here."""

    @abstractmethod
    def forget(self) -> None:
        """Forget the log up to here: a pipeline that begins finds rows in the table, and none in the log."""

    @abstractmethod
    def dump(self) -> None:
        """Read the whole table with the server's own client, and throw it away."""

    def fill_many(self, count: int) -> int:
        """Insert rows in transactions of `IN_TRANSACTION`; returns the number of transactions."""
        for first in range(0, count, IN_TRANSACTION):
            self.fill(first, min(IN_TRANSACTION, count - first))
        return -(-count // IN_TRANSACTION)

    def pipeline(self, folder: Path, snapshot: str = "never") -> PipelineOptions:
        """A pipeline of defaults: the history of the table."""
        return firnline.Pipeline(
            name="bench",
            sources={"shop": self.source(snapshot)},
            sinks=[{"type": "delta", "table": str(folder / "history"), "input": "shop.orders"}],
            checkpoint={"store": {"type": "file", "path": str(folder / "store")}},
        ).options


class Postgres(Database):
    """PostgreSQL. A slot of its own keeps the log."""

    name, client, dumper = "postgres", "pg_recvlogical", "psql with COPY"

    def __init__(self, server: PostgresServer) -> None:
        self._dsn = server.dsn
        self._execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, customer int, name varchar(60), amount numeric(12,2), "
            "made_at timestamp, note varchar(200))"
        )
        self.stream().begin()  # creates slot and publication

    def _execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self._dsn, autocommit=True) as db:
            cursor = db.execute(statement, values or None)
            return list(cursor.fetchall()) if cursor.description else []

    def source(self, snapshot: str = "never") -> dict[str, Any]:
        return {"type": "postgres", "dsn": self._dsn, "tables": ["orders"], "slot": SLOT, "snapshot": snapshot}

    def stream(self) -> PostgresStream:
        tables = TablePatterns(("orders",), "public")
        session = postgres_sessions.PostgresServer(self._dsn, self.name)
        return PostgresStream(session, SLOT, SLOT, tables, may_end_others=lambda: True)

    def fill(self, first: int, count: int) -> None:
        self._execute(
            "INSERT INTO orders SELECT %s + n, n %% 97, 'customer ' || n, n / 7.0, "
            "timestamp '2024-01-01 00:00:00.123456' + n * interval '1 s', repeat('abcdefgh', 13) "
            "FROM generate_series(0, %s) n",
            first, count - 1,
        )  # fmt: skip

    def keep(self) -> None:
        self._copy(SLOT, KEPT)

    def rewind(self) -> None:
        self._copy(KEPT, SLOT)

    def forget(self) -> None:
        self._execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", SLOT)

    def dump(self) -> None:
        program = find_program("psql")
        assert program is not None
        statement = "COPY orders TO STDOUT"
        subprocess.run([program, "-d", self._dsn, "-c", statement], check=True, stdout=subprocess.DEVNULL)

    def debezium(self) -> dict[str, str]:
        """Return the settings of Debezium's connector for the log from where it was kept."""
        import psycopg

        parts = psycopg.conninfo.conninfo_to_dict(self._dsn)
        self._copy(KEPT, THROWN)
        return {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "database.hostname": str(parts["host"]), "database.port": str(parts["port"]),
            "database.user": str(parts["user"]), "database.password": str(parts.get("password", "")),
            "database.dbname": str(parts["dbname"]), "plugin.name": "pgoutput", "slot.name": THROWN,
            "publication.name": SLOT, "publication.autocreate.mode": "disabled", "snapshot.mode": "no_data",
            "table.include.list": "public.orders",
        }  # fmt: skip

    def throw_away(self) -> None:
        self._copy(KEPT, THROWN)
        end = self._execute("SELECT pg_current_wal_flush_lsn()::text")[0][0]
        program = find_program(self.client)
        assert program is not None
        subprocess.run(
            [program, "-d", self._dsn, "-S", THROWN, "--start", "--no-loop", "-f", "/dev/null", "-F", "0", "-E", end,
             "-o", "proto_version=1", "-o", f"publication_names={SLOT}"],
            check=True, capture_output=True,
        )  # fmt: skip

    def _copy(self, slot: str, to: str) -> None:
        """Copy a slot over another one, when its reader has left it."""
        deadline = monotonic() + WAIT_SECONDS
        while self._execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active", to):
            assert monotonic() < deadline, f"somebody reads the slot {to}"
        self._execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", to)
        self._execute("SELECT pg_copy_logical_replication_slot(%s, %s)", slot, to)


class MySql(Database):
    """MySQL, or MariaDB where MySQL is not there. The server keeps its log."""

    def __init__(self, server: BinlogServer, name: str, program: Sequence[str]) -> None:
        self.name, self.client = name, "mysqlbinlog" if program else ""
        self.dumper = "mysql --quick" if shutil.which("mysql") else ""
        self._server, self._program = server, program
        self._kept: Any = None
        numbers = ", ".join(f"({i})" for i in range(10))
        server.run(
            "CREATE DATABASE bench",
            "CREATE TABLE bench.orders (id bigint primary key, customer int unsigned, name varchar(60), "
            "amount decimal(12,2), made_at datetime(6), note varchar(200))",
            "CREATE TABLE bench.digits (d int)",
            f"INSERT INTO bench.digits VALUES {numbers}",
        )

    def source(self, snapshot: str = "never") -> dict[str, Any]:
        return {"type": "mysql", "dsn": f"{self._server.dsn}/bench", "tables": ["orders"], "snapshot": snapshot}

    def stream(self) -> MySqlStream:
        return MySqlStream(self._server.dsn, lambda table: table == "bench.orders", 4711)

    def fill(self, first: int, count: int) -> None:
        digits = len(str(count))
        number = " + ".join(f"t{i}.d * {10**i}" for i in range(digits))
        tables = ", ".join(f"bench.digits t{i}" for i in range(digits))
        self._server.run(
            f"INSERT INTO bench.orders SELECT {first} + n, n % 97, CONCAT('customer ', n), n / 7, "
            "TIMESTAMPADD(SECOND, n, '2024-01-01 00:00:00.123456'), REPEAT('abcdefgh', 13) "
            f"FROM (SELECT {number} n FROM {tables}) x WHERE n < {count}"
        )

    def keep(self) -> None:
        self._kept = self.stream().end_position()

    def rewind(self) -> None:
        """Nothing to do: the server does not forget what was read."""

    def forget(self) -> None:
        """Nothing to do: a pipeline begins where the log ends."""

    def dump(self) -> None:
        subprocess.run(
            ["mysql", "--no-defaults", "--quick", "--batch", "--host=127.0.0.1", f"--port={self._server.port}",
             "--user=firnline", "-e", "SELECT * FROM bench.orders"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, "MYSQL_PWD": PASSWORD},
        )  # fmt: skip

    def throw_away(self) -> None:
        kept, end = self._kept, self.stream().end_position()
        assert isinstance(end, dict)
        assert end["file"] == kept["file"], "the log went on in another file"
        with tempfile.TemporaryDirectory(prefix="firnline-bench-") as folder:
            Path(folder, kept["file"]).symlink_to(os.devnull)
            subprocess.run(
                [*self._program, "--no-defaults", "--read-from-remote-server", "--raw", f"--result-file={folder}/",
                 "--host=127.0.0.1", f"--port={self._server.port}",
                 "--user=firnline", f"--start-position={kept['pos']}", kept["file"]],
                check=True, capture_output=True, env={**os.environ, "MYSQL_PWD": PASSWORD},
            )  # fmt: skip


@contextlib.contextmanager
def running_database(name: str) -> Iterator[Database]:
    """A server, from nothing to gone: `postgres` or `mysql`."""
    if name == "postgres":
        with running_postgres() as server:
            yield Postgres(server)
    elif find_mysqld() is not None:
        with running_mysql() as server_of_mysql:
            yield MySql(server_of_mysql, "mysql", _find_mysqlbinlog())
    else:
        with running_mariadb() as server_of_mariadb:
            yield MySql(server_of_mariadb, "mariadb", ())


def _find_mysqlbinlog() -> list[str]:
    """Return how to start the client: the installed one, or the one that was fetched with the server."""
    installed = shutil.which("mysqlbinlog")
    if installed is not None:
        return [installed]
    loader = next(CACHE.glob("usr/lib/*/ld-linux-*.so.*"))
    return [str(loader), "--library-path", str(loader.parent), str(CACHE / "usr/bin/mysqlbinlog")]
