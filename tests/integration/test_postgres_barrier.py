"""The first chunk of a PostgreSQL table sees all that the log has, also commits that wait for a standby."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from firnline.errors import SourceError
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres import tables
from firnline.sources.postgres.position import LogPlace
from firnline.sources.postgres.server import PostgresServer as Captured
from firnline.sources.postgres.tables import PostgresTables
from tests.support.captured import ORDERS, execute, query, wait_until
from tests.support.postgres import PostgresServer


@pytest.fixture
def waiting(postgres_server: PostgresServer) -> Iterator[str]:
    """A database whose server waits, at each commit, for a standby that never comes."""
    dsn = postgres_server.dsn
    execute(dsn, ORDERS)
    execute(dsn, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
    wait_until(lambda: query(dsn, "SHOW synchronous_standby_names") == [("nobody",)])
    yield dsn
    execute(dsn, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


@pytest.mark.parametrize("settings", ["", "?options=-c%20default_transaction_read_only%3Don"])
def test_a_commit_that_waits_for_a_standby_is_waited_for(waiting: str, settings: str) -> None:
    """The log has it, and no snapshot sees it yet. It is the newest transaction of the server."""
    patterns = TablePatterns(("orders",), "public")
    reader = PostgresTables(Captured(waiting + settings, "here"), "nothing", patterns, creates=False, name="test")
    insert = threading.Thread(target=execute, args=(waiting, "INSERT INTO orders VALUES (1, 1, 'x')"))
    insert.start()
    try:
        wait_until(lambda: query(waiting, "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"))
        barrier = reader.barrier(None)
        assert reader.read_chunk("public.orders", None, 10, barrier=barrier) is None
        assert reader.read_whole("public.orders", 10, barrier=barrier) is None
    finally:
        execute(waiting, "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
        insert.join(60)
    chunk = reader.read_chunk("public.orders", None, 10, barrier=barrier)
    reader.close()
    assert chunk is not None
    assert chunk.rows == 1


def test_a_host_that_is_behind_the_log_is_not_read(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log was read from another host of `dsn`, further than this one has it."""
    execute(postgres, ORDERS)
    reader = PostgresTables(
        Captured(postgres, "here"), "nothing", TablePatterns(("orders",), "public"), creates=False, name="test"
    )
    place = LogPlace.from_json(reader.find_end())
    assert reader.read_chunk("public.orders", None, 10, barrier=reader.later_barrier(place.to_json())) is not None
    ahead = replace(place, lsn=place.lsn + (1 << 30)).to_json()
    for barrier in (reader.barrier(ahead), reader.later_barrier(ahead)):
        assert reader.read_chunk("public.orders", None, 10, barrier=barrier) is None
        assert reader.read_whole("public.orders", 10, barrier=barrier) is None
    monkeypatch.setattr(tables, "BEHIND_SECONDS", 0.0)
    with pytest.raises(SourceError, match="has not yet what was read of the log"):
        reader.read_chunk("public.orders", None, 10, barrier=barrier)
    reader.close()
