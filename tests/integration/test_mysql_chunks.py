"""Chunks of tables of MySQL and MariaDB: their values and schemas are those of the log; what their snapshots see."""

from __future__ import annotations

import contextlib
from typing import Any

import pyarrow as pa
import pytest

from firnline.sources.cdc.log import Changes, Chunk, ChunkRows
from firnline.sources.mysql.decode import MySqlDecoder
from firnline.sources.mysql.table_reader import MySqlTableReader
from tests.integration.test_mysql_types import kinds_of
from tests.support.binlog import end_of, reading
from tests.support.mysql import BinlogServer, MySqlServer

pytestmark = [pytest.mark.mysql, pytest.mark.mariadb]


def reader_of(server: BinlogServer, **settings: Any) -> contextlib.closing[MySqlTableReader]:
    return contextlib.closing(MySqlTableReader(server.dsn, lambda table: table.startswith("shop."), **settings))


def chunk_of(server: BinlogServer, table: str, limit: int = 100_000, **settings: Any) -> Chunk:
    with reader_of(server) as reader:
        chunk = reader.read_chunk(table, None, limit, **settings)
    assert chunk is not None
    return chunk


def decoded(chunk: Chunk) -> ChunkRows:
    return MySqlDecoder().decode_chunk(chunk.context, chunk.content)


def check_same(rows: ChunkRows, changes: Changes, by: str = "id") -> None:
    """A chunk has the schema and the rows that the log has: same names, types, words, key, values, odd values."""
    assert rows.schema == changes.schema
    assert rows.rows.schema == changes.rows.schema
    order = {value: row for row, value in enumerate(changes.rows.column(by).to_pylist())}
    assert len(order) == rows.rows.num_rows
    indices = [order[value] for value in rows.rows.column(by).to_pylist()]
    expected = changes.rows.take(pa.array(indices))
    for column in rows.schema.columns:
        ours, theirs = rows.rows.column(column.name), expected.column(column.name)
        assert ours.to_pylist() == theirs.to_pylist(), f"{rows.schema.table}.{column.name} {column.native}"
        assert ours.equals(theirs), f"{rows.schema.table}.{column.name} {column.native}"
    texts = {name: {indices.index(row): text for row, text in odd.items()} for name, odd in changes.odd.items()}
    assert rows.odd == texts
    rows.rows.validate(full=True)


def test_every_type_has_the_value_of_the_log(binlog_server: BinlogServer) -> None:
    """Each value of each type, null included: the chunk's schema and batch are exactly those of the log."""
    kinds = kinds_of(binlog_server)
    start = end_of(binlog_server)
    with contextlib.closing(binlog_server.connect()) as db, db.cursor() as cursor:
        cursor.execute("CREATE DATABASE shop")
        cursor.execute("SET time_zone = '+03:00', sql_mode = ''")
        for number, kind in enumerate(kinds):
            cursor.execute(f"CREATE TABLE shop.t{number} (id int primary key, v {kind.type}, w int unsigned)")
            rows = ", ".join(f"({i}, {value}, {i})" for i, value in enumerate((*kind.values, "NULL")))
            cursor.execute(f"INSERT INTO shop.t{number} VALUES {rows}")
    with reading(binlog_server, start) as log:
        changes = {one.schema.table: one for one in log.read(2 * len(kinds)).decode().changes}
    with reader_of(binlog_server) as reader:
        for table, expected in changes.items():
            chunk = reader.read_chunk(table, None, 1000)
            assert chunk is not None
            assert chunk.is_last
            assert chunk.key == ("id",)
            check_same(decoded(chunk), expected)
