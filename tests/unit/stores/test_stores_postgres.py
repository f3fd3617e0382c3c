"""The store in a real PostgreSQL server: conformance, a server that dies, secrets."""

from __future__ import annotations

import builtins
import os
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from firnline import faults
from firnline.errors import ConfigError, DamagedError, MissingExtraError, NewerFormatError, VersionConflictError
from firnline.faults import VARIABLE
from firnline.options import StoreOptions
from firnline.stores import open_store
from firnline.stores.base import CheckpointStore
from firnline.stores.postgres import PostgresStore
from firnline.testing.stores import StoreConformance
from tests.support.postgres import PASSWORD, PostgresServer

pytestmark = pytest.mark.postgres


@pytest.fixture
def server(postgres_server: PostgresServer) -> PostgresServer:
    return postgres_server


def execute(server: PostgresServer, statement: str) -> Any:
    import psycopg

    with psycopg.connect(server.dsn, autocommit=True) as db:
        return db.execute(statement)


@pytest.fixture
def options(server: PostgresServer) -> StoreOptions:
    return StoreOptions(type="postgres", dsn=server.dsn)


@pytest.fixture
def store(options: StoreOptions) -> Iterator[CheckpointStore]:
    with closing(open_store(options)) as store:
        yield store


class TestPostgres(StoreConformance):
    pass


def test_looking_at_a_database_makes_nothing(options: StoreOptions, server: PostgresServer) -> None:
    def is_there() -> bool:
        import psycopg

        with psycopg.connect(server.dsn) as db:
            row = db.execute("SELECT to_regnamespace('firnline') IS NOT NULL").fetchone()
            return bool(row and row[0])

    with closing(open_store(options, read_only=True)) as looking:
        assert looking.get_raw("p") is None
        assert (list(looking.list()), list(looking.list_versions("p"))) == ([], [])
        assert (looking.latest_version("p"), looking.get_version_raw("p", 1)) == (0, None)
        assert not is_there()
        with closing(open_store(options)) as store:
            assert is_there()
            store.put_raw("p", b"1")
        assert (looking.get_raw("p"), list(looking.list()), looking.latest_version("p")) == (b"1", ["p"], 1)
        assert looking.get_version_raw("p", 1) == b"1"
        assert [info.version for info in looking.list_versions("p")] == [1]


def test_a_server_that_dies_is_an_os_error_and_its_return_is_noticed(
    store: CheckpointStore, server: PostgresServer
) -> None:
    store.put_raw("p", b"1")
    server.kill()
    try:
        for _ in range(2):
            with pytest.raises(OSError, match=r"127\.0\.0\.1"):
                store.put_raw_versioned("p", b"2", 1)
            with pytest.raises(OSError, match=r"127\.0\.0\.1"):
                store.get_raw("p")
    finally:
        server.start()
    assert store.get_raw("p") == b"1"  # what was put is there, although the server was killed
    assert store.put_raw_versioned("p", b"2", 1) == 2
    server.kill()
    server.start()
    assert store.put_raw("p", b"3") == 3  # the connection was lost while nobody used it


def test_a_lost_answer_to_commit_is_unknown_and_the_repeat_succeeds(
    store: CheckpointStore, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_raw("p", b"1")
    monkeypatch.setenv(VARIABLE, "store.put.after:1:raise")
    monkeypatch.setattr(faults, "_seen", Counter())
    with pytest.raises(OSError, match="injected"):
        store.put_raw_versioned("p", b"2", 1)
    monkeypatch.delenv(VARIABLE)
    assert store.put_raw_versioned("p", b"2", 1) == 2
    with pytest.raises(VersionConflictError):
        store.put_raw_versioned("p", b"other", 1)


def test_the_server_dies_between_work_and_commit(
    store: CheckpointStore, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put_raw("p", b"1")

    def die(point: str) -> None:
        if point == "store.put.before":
            server.kill()

    monkeypatch.setattr("firnline.stores.postgres.fault_point", die)
    try:
        with pytest.raises(OSError, match=r"127\.0\.0\.1"):
            store.put_raw_versioned("p", b"2", 1)
    finally:
        monkeypatch.undo()
        server.start()
    assert store.latest_version("p") == 1
    assert store.put_raw_versioned("p", b"2", 1) == 2


def test_a_backend_that_is_ended_is_replaced(store: CheckpointStore, server: PostgresServer) -> None:
    store.put_raw("p", b"1")
    execute(server, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'firnline'")
    assert store.get_raw("p") == b"1"


def test_the_tables_are_made_once_by_many(options: StoreOptions) -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with closing(open_store(options)) as store:
                store.put_raw("p", b"1")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with closing(open_store(options)) as store:
        assert store.latest_version("p") == 8


def test_a_forked_child_opens_a_connection_of_its_own(store: CheckpointStore) -> None:
    store.put_raw("p", b"parent")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if store.put_raw("p", b"child") == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get_raw("p") == b"child"


def test_a_newer_schema_is_refused_by_name(store: CheckpointStore, server: PostgresServer) -> None:
    execute(server, "COMMENT ON SCHEMA firnline IS 'firnline checkpoint store, format 2'")
    with pytest.raises(NewerFormatError, match="format 2"):
        store.open()


def test_a_row_that_is_gone_is_damage(store: CheckpointStore, server: PostgresServer) -> None:
    store.put_raw("p", b"1")
    execute(server, "DELETE FROM firnline.versions")
    with pytest.raises(DamagedError, match="missing"):
        store.get_raw("p")


def test_nothing_that_is_refused_leaves_a_row(store: CheckpointStore, server: PostgresServer) -> None:
    with pytest.raises(VersionConflictError):
        store.put_raw_versioned("p", b"1", 5)
    store.delete("q")
    store.prune("r", 1)
    with closing(PostgresStore(server.dsn)) as other:
        assert other._run(lambda db: db.execute("SELECT count(*) FROM firnline.heads").fetchone()[0]) == 0


# -- secrets and settings -----------------------------------------------------------------------------


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error)


def test_the_password_is_never_shown(server: PostgresServer, options: StoreOptions) -> None:
    with closing(open_store(options)) as store:
        assert PASSWORD not in store.place
        store.put_raw("p", b"1")
        with pytest.raises(VersionConflictError) as conflict:
            store.put_raw_versioned("p", b"2", 7)
        assert PASSWORD not in shown(conflict.value)
    wrong = PASSWORD + "-wrong"
    with pytest.raises(OSError, match="password authentication failed") as refused:
        open_store(StoreOptions(type="postgres", dsn=server.dsn.replace(PASSWORD, wrong)))
    assert wrong not in shown(refused.value)
    for dsn in (f"postgresql://u:{PASSWORD}@h:not-a-port-{PASSWORD}/x?nonsense={PASSWORD}", f"password={PASSWORD} huh"):
        with pytest.raises((ConfigError, OSError)) as unread:
            open_store(StoreOptions(type="postgres", dsn=dsn))
        assert PASSWORD not in shown(unread.value)


def test_without_the_library_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def missing(name: str, *arguments: Any, **settings: Any) -> Any:
        if name == "psycopg":
            raise ImportError(name)
        return found(name, *arguments, **settings)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError) as caught:
        open_store(StoreOptions(type="postgres", dsn="postgresql://127.0.0.1/x"))
    assert caught.value.hint == "pip install 'firnline[postgres]'"
