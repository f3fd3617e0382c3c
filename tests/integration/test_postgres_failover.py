"""Failover slots of PostgreSQL 17: a standby has the slot, so that reading goes on there, exactly once."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from firnline.errors import ConfigError
from firnline.run.open_pipeline import open_pipeline
from tests.support.captured import ORDERS, captured, check_current, execute, history, query, wait_until
from tests.support.pipelines import run_once, run_to_end
from tests.support.postgres import PACKED_17, PostgresServer, running_postgres_17

SLOT = "firnline_shop_db"
SYNCED = f"SELECT failover AND synced AND NOT temporary FROM pg_replication_slots WHERE slot_name = '{SLOT}'"


@pytest.fixture(scope="module")
def started() -> Iterator[PostgresServer]:
    if not PACKED_17.exists():
        pytest.skip("there is no PostgreSQL 17: bash scripts/fetch_postgres.sh")
    with running_postgres_17() as server:
        yield server


@pytest.fixture
def primary(started: PostgresServer) -> Iterator[PostgresServer]:
    started.clear()
    execute(started.dsn, ORDERS)
    yield started
    started.stop()
    started.start()


@contextmanager
def standby_of(primary: PostgresServer) -> Iterator[PostgresServer]:
    """A standby that copies slots, as the docs say. The primary shows a reader only what the standby has."""
    execute(primary.dsn, "SELECT pg_create_physical_replication_slot('standby', true)")
    primary.stop()
    with tempfile.TemporaryDirectory(prefix="firnline-postgres-") as folder:
        Path(folder).chmod(0o755)
        standby = primary.copy(Path(folder) / "standby")
        primary.start("-c", "synchronized_standby_slots=standby")
        standby.follow(primary)
        standby.start(
            "-c", "sync_replication_slots=on", "-c", "hot_standby_feedback=on", "-c", "primary_slot_name=standby"
        )  # fmt: skip
        try:
            yield standby
        finally:
            standby.stop()


def promote(primary: PostgresServer, standby: PostgresServer) -> None:
    """The primary dies; the standby takes its address and its part."""
    primary.kill()
    standby.stop()
    standby.port = primary.port
    standby.start()
    execute(standby.dsn, "SELECT pg_promote()")


def test_a_promoted_standby_that_copies_the_slot(primary: PostgresServer, tmp_path: Path) -> None:
    options = captured(primary.dsn, tmp_path, failover=True)  # the first run creates the slot
    with standby_of(primary) as standby:  # a copy of the data has the slots of that moment
        numbers = iter(range(1, 1_000_000))
        count = 0

        def write_and_read() -> None:
            nonlocal count
            count += 1
            execute(primary.dsn, f"INSERT INTO orders VALUES ({next(numbers)}, 1, 'x')")
            run_to_end(options)

        run_to_end(options)

        def is_synced() -> bool:  # the slot has to move on the primary, until the standby can follow it
            write_and_read()
            return query(standby.dsn, SYNCED) == [(True,)]

        wait_until(is_synced)
        write_and_read()
        promote(primary, standby)  # at once: what was read, the standby has
        write_and_read()
        check_current(standby.dsn, tmp_path)
        assert Counter(op for _, op in history(tmp_path)) == {"insert": count}
        assert query(standby.dsn, "SELECT pg_is_in_recovery()") == [(False,)]


def test_a_slot_that_is_no_failover_slot(primary: PostgresServer, tmp_path: Path) -> None:
    """It exists already, made by a run without `failover`."""
    run_to_end(captured(primary.dsn, tmp_path))
    options = captured(primary.dsn, tmp_path, failover=True)
    with pytest.raises(ConfigError, match=f"the slot {SLOT}, which exists, is no failover slot") as caught:
        open_pipeline(options).sources["db"].check()
    assert run_once(options).error_code == "config"
    assert f"ALTER_REPLICATION_SLOT {SLOT} (FAILOVER)" in str(caught.value.hint)
    with psycopg.connect(f"{primary.dsn}?replication=database", autocommit=True) as db:
        db.execute(f"ALTER_REPLICATION_SLOT {SLOT} (FAILOVER)")
    run_to_end(options)


def test_an_older_server_has_no_failover_slots(postgres: str, tmp_path: Path) -> None:
    (version,) = query(postgres, "SELECT current_setting('server_version_num')::int / 10000")[0]
    if version >= 17:
        pytest.skip("the installed server has failover slots")
    execute(postgres, ORDERS)
    run = run_once(captured(postgres, tmp_path, failover=True))
    assert run.error_code == "config"
    assert f"PostgreSQL {version} has no failover slots" in str(run.result.error)


def test_a_promoted_standby_without_the_slot_is_a_gap(primary: PostgresServer, tmp_path: Path) -> None:
    """The slot that a run makes by itself has no failover: the standby does not copy it."""
    options = captured(primary.dsn, tmp_path)
    with standby_of(primary) as standby:
        run_to_end(options)
        execute(primary.dsn, "INSERT INTO orders VALUES (1, 1, 'x')")
        run_to_end(options)
        wait_until(lambda: query(standby.dsn, "SELECT count(*) FROM orders") == [(1,)])
        promote(primary, standby)
        run = run_once(options)
        assert run.error_code == "source-gap"
        assert f"the slot {SLOT} does not exist any more" in str(run.result.error)
