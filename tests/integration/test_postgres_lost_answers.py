"""Answers of PostgreSQL that are lost, late or frozen at every message of a commit; and planted bugs are found."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL

from firnline.checkpoint.ledger import Ledger
from firnline.errors import CommitUnknownError, FencedError, SinkError
from firnline.sinks.base import EpochCommit, RestoreVersion
from firnline.sinks.follower import Follower
from firnline.sinks.postgres import checkpoints, database
from firnline.sinks.postgres.sink import PostgresSink
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, rows
from tests.support.postgres import PostgresServer, running_postgres
from tests.support.postgres_sink import TABLE, PostgresDriver, drive, execute, postgres_ids
from tests.support.proxy import Proxy, Treatment, running_proxy

QUICK: dict[str, Any] = {"statement_timeout": timedelta(seconds=1), "lock_timeout": timedelta(seconds=5)}
SETTLE_SECONDS = 120  # on a busy machine a statement may need longer than its timeout, more than once


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "GRACE_SECONDS", 0.2)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)


@pytest.fixture
def proxy(postgres_server: PostgresServer) -> Iterator[Proxy]:
    with running_proxy(postgres_server.port) as proxy:
        yield proxy


def through(proxy: Proxy, dsn: str) -> str:
    return make_conninfo(dsn, host="127.0.0.1", port=proxy.port, sslmode="disable", gssencmode="disable")


def settle(run: PostgresDriver, commit: EpochCommit) -> None:
    """Do what a run does after an error of unclear outcome: ask, and commit again only if the sink lacks the epoch."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        try:
            receipt = run.sink.find_receipt(commit.checkpoint.epoch) or run.sink.commit(commit)
            break
        except SinkError:
            assert time.monotonic() < deadline
    assert receipt.attempt == commit.checkpoint.attempt
    run._follow(commit)


def to_commit(data: bytes) -> bool:
    return b"COMMIT\0" in data


@pytest.mark.parametrize(
    ("treatment", "write"),
    [("drop", "append"), ("delay", "append"), ("reset", "append"), ("reset", "upsert"), ("freeze", "upsert")],
)
def test_a_lost_answer_loses_and_doubles_nothing(
    postgres: str, ledger: Ledger, proxy: Proxy, treatment: Treatment, write: str
) -> None:
    timeouts = {} if treatment == "reset" else QUICK  # of a connection that is reset, nobody waits for an answer
    run = drive(through(proxy, postgres), ledger, write=write, **timeouts)
    settle(run, run.stage(rows(0)))
    number = 0
    while True:  # until a commit needs no more answers than pass
        error = lose(run, proxy, rows(number + 1), treatment, after=number)
        if treatment == "reset" and proxy.was_hit:  # a piece of an answer: their number is not the same in every turn
            is_open = to_commit(proxy.hit_request)
            assert isinstance(error, CommitUnknownError) == is_open, f"answer {number}: {error}"
        if treatment in ("drop", "reset"):  # a frozen answer may be that of a statement before
            assert error is not None or not proxy.was_hit, f"answer {number}"
        assert postgres_ids(postgres, TABLE) == Counter(range(number + 2)), f"answer {number}"
        number += 1
        if not proxy.was_hit and error is None:
            break
    assert number > 8, "a commit has several answers"
    if treatment in ("drop", "reset"):  # the turns above may pass over this answer, as it has no fixed number
        while True:  # until no statement before it took longer than its timeout
            error = lose(run, proxy, rows(number + 1), treatment, on=to_commit)
            assert postgres_ids(postgres, TABLE) == Counter(range(number + 2))
            number += 1
            if proxy.was_hit:
                break
        assert isinstance(error, CommitUnknownError), "a lost answer to COMMIT leaves the outcome open"


def lose(
    run: PostgresDriver, proxy: Proxy, records: list[dict[str, Any]], treatment: Treatment, **when: Any
) -> SinkError | None:
    """Commit an epoch whose answers are treated so, then settle it; return the error of the first try."""
    commit, error = run.stage(records), None
    proxy.treat(treatment, seconds=0.1, **when)
    try:
        run.sink.commit(commit)
    except SinkError as raised:
        error = raised
    proxy.heal()
    settle(run, commit)
    return error


def test_a_lost_answer_to_a_claim_or_a_rollback_leaves_it_whole(postgres: str, ledger: Ledger, proxy: Proxy) -> None:
    first = drive(postgres, ledger)
    for one in (1, 2, 3):
        first.apply(rows(one))
    generation, number, hits = 2, 0, True
    while hits:  # claims
        proxy.treat("reset", after=number)
        with suppress(SinkError):
            drive(through(proxy, postgres), ledger, generation=generation, run=f"run {generation}")
        hits = proxy.was_hit
        proxy.heal()
        run = drive(through(proxy, postgres), ledger, generation=generation, run=f"run {generation}")
        assert (run.generation, run.epoch) == (generation, 3)
        generation, number = generation + 1, number + 1
    assert number > 8
    number, hits = 0, True
    while hits:  # rollbacks
        run.apply(rows(100 + number))
        edit = run.stage_edit("rollback", to_epoch=3)
        proxy.treat("reset", after=number)
        with suppress(SinkError):
            run.sink.edit(edit, RestoreVersion(3), run.entry)
        hits = proxy.was_hit
        proxy.heal()
        run.edit(edit, RestoreVersion(3))
        assert postgres_ids(postgres, TABLE) == Counter([1, 2, 3]), f"answer {number}"
        number += 1
    assert number > 8


def test_a_claimant_ends_a_backend_whose_client_is_silent(postgres: str, ledger: Ledger, proxy: Proxy) -> None:
    """The client of the older run still holds its connection: nothing but the claimant can free the row."""
    old = drive(postgres, ledger, lock_timeout=timedelta(seconds=60))
    old.apply(rows(1))
    commit = old.stage(rows(2))
    began, go_on, ended = threading.Event(), threading.Event(), []
    commit_now = old.sink._database.commit  # type: ignore[attr-defined]

    def waiting(connection: Any) -> None:
        began.set()
        go_on.wait(120)
        commit_now(connection)

    def deliver() -> None:
        try:
            old.sink.commit(commit)
        except Exception as error:
            ended.append(error)

    old.sink._database.commit = waiting  # type: ignore[attr-defined]
    thread = threading.Thread(target=deliver)
    thread.start()
    assert began.wait(60)
    new = drive(postgres, ledger, generation=2, lock_timeout=timedelta(seconds=60))
    new.commit(new.stage(rows(3)))
    go_on.set()
    thread.join(60)
    assert isinstance(ended[0], CommitUnknownError), "the commit was sent, and no answer came"
    with pytest.raises(FencedError):
        old.sink.commit(commit)
    assert postgres_ids(postgres, TABLE) == Counter([1, 3])


def test_an_older_run_ends_no_backend_of_its_successor(postgres: str, ledger: Ledger) -> None:
    """Else a zombie and its successor would interrupt each other for ever."""
    old = drive(postgres, ledger, lock_timeout=timedelta(seconds=1))
    old.apply(rows(1))
    new = drive(postgres, ledger, generation=2)
    with new.sink._database.transaction(new.sink._session) as db:  # type: ignore[attr-defined]
        assert new.sink._lock(db) is not None  # type: ignore[attr-defined]
        with pytest.raises(SinkError, match="lock timeout"):
            old.sink.find_receipt(2)
        assert db.execute("SELECT 1").fetchone() == (1,)
    with pytest.raises(FencedError):
        old.apply(rows(2))


# -- a backend that is still committing -------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


def stall_commits(dsn: str, is_on: bool) -> None:
    """Make every commit wait for a standby server that does not exist."""
    value = "nobody" if is_on else ""
    execute(dsn, f"ALTER SYSTEM SET synchronous_standby_names = '{value}'", "SELECT pg_reload_conf()")
    with psycopg.connect(dsn, autocommit=True) as db:
        deadline = time.monotonic() + 60
        while db.execute("SHOW synchronous_standby_names").fetchone() != (value,):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def lose_an_answer_while_it_commits(dsn: str, ledger: Ledger) -> None:
    """The answer is given up while the commit still goes on: whoever asks must wait for its end."""
    run = drive(dsn, ledger, **QUICK)
    settle(run, run.stage(rows(1)))
    commit = run.stage(rows(2))
    stall_commits(dsn, True)
    try:
        with pytest.raises(CommitUnknownError):
            run.sink.commit(commit)
        with suppress(SinkError):  # still unknown
            assert run.sink.find_receipt(2) is not None, "an epoch that is being committed is not absent"
        again = threading.Thread(target=lambda: _ignore(lambda: run.sink.commit(commit)))
        again.start()
        time.sleep(0.5)
    finally:
        stall_commits(dsn, False)
    again.join(60)
    settle(run, commit)
    assert postgres_ids(dsn, TABLE) == Counter([1, 2])


def _ignore(call: Callable[[], object]) -> None:
    with suppress(SinkError):
        call()


def test_whoever_asks_waits_for_a_backend_that_is_still_committing(own_server: PostgresServer, ledger: Ledger) -> None:
    own_server.clear()
    lose_an_answer_while_it_commits(own_server.dsn, ledger)


# -- planted bugs -----------------------------------------------------------------------------------------


def refuse_a_stranger(dsn: str, ledger: Ledger) -> None:
    """Another run's epoch of the same number is not ours."""
    run = drive(dsn, ledger)
    run.apply(rows(1))
    with pytest.raises(FencedError):
        run.sink.commit(run.stage(rows(9), epoch=1))


def lose_the_answer_to_a_commit(dsn: str, ledger: Ledger) -> None:
    """The answer to COMMIT is lost; the run asks, and goes on."""
    with psycopg.connect(dsn) as db, running_proxy(int(db.info.port)) as proxy:
        run = drive(through(proxy, dsn), ledger)
        run.apply(rows(1))
        commit = run.stage(rows(2))
        proxy.treat("reset", on=to_commit)
        try:
            run.sink.commit(commit)
        except CommitUnknownError:
            proxy.heal()
            settle(run, commit)
        except SinkError:  # failed for sure: a run commits once more
            proxy.heal()
            run.sink.commit(commit)
            pytest.fail("an unknown outcome was taken for a failure")
    assert postgres_ids(dsn, TABLE) == Counter([1, 2])


def commit_in_turns(dsn: str, ledger: Ledger) -> None:
    """Two runs of one generation build on the same head: only one of them may commit."""
    a, b = (drive(dsn, ledger, run=name) for name in ("a", "b"))
    first, second = a.stage(rows(1)), b.stage(rows(2))
    head = b.sink.read_head()  # type: ignore[attr-defined]
    a.sink.commit(first)
    b.sink.read_head = lambda: head  # type: ignore[attr-defined]  # what it has read before
    with suppress(SinkError, FencedError):
        b.sink.commit(second)
    assert postgres_ids(dsn, TABLE) == Counter([1])


def roll_back_in_a_shared_table(dsn: str, ledger: Ledger) -> None:
    """Two sinks append to one table; one of them goes back."""
    a = drive(dsn, ledger, name="a")
    b = drive(dsn, Ledger(LocalStorage(f"{ledger.storage.root}-b"), PIPELINE), name="b")
    for number in (1, 2):
        a.apply(rows(number))
        b.apply(rows(10 + number))
    a.edit(a.stage_edit("rollback", to_epoch=1), RestoreVersion(1))
    assert postgres_ids(dsn, TABLE) == Counter([1, 11, 12])


def _no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: checkpoints.CheckpointRow, db: Any, *_: Any) -> Any:
        return self.read(db)

    monkeypatch.setattr(checkpoints.CheckpointRow, "lock", read)


def _lost_means_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = database.Database.commit

    def careless(self: database.Database, connection: Any) -> None:
        try:
            commit(self, connection)
        except CommitUnknownError as error:
            raise SinkError("failed") from error

    monkeypatch.setattr(database.Database, "commit", careless)


def _any_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    def anyones(self: Follower, head: Any, commit: EpochCommit) -> Any:
        return self._find_receipt(head, commit.checkpoint.epoch)

    monkeypatch.setattr(Follower, "_first_receipt", anyones)


def _no_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints.CheckpointRow, "require", lambda *_: None)


def _all_rows_are_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own_rows = PostgresSink._own_rows

    def careless(self: PostgresSink, verb: str, table: Any, after: int) -> Any:
        return SQL(own_rows(self, verb, table, after).as_string().replace(f"'demo/{self.name}'", '"_firnline_sink"'))

    monkeypatch.setattr(PostgresSink, "_own_rows", careless)


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[str, Ledger], None]]] = [
    (_no_lock, lose_an_answer_while_it_commits),
    (_lost_means_failed, lose_the_answer_to_a_commit),
    (_any_receipt, refuse_a_stranger),
    (_no_fence, commit_in_turns),
    (_all_rows_are_own, roll_back_in_a_shared_table),
]


@pytest.mark.parametrize(("bug", "scenario"), BUGS, ids=lambda f: f.__name__.strip("_"))
def test_a_planted_bug_is_found(
    own_server: PostgresServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    scenario: Callable[[str, Ledger], None],
) -> None:
    for planted in (False, True):
        own_server.clear()
        ledger = Ledger(LocalStorage(str(tmp_path / str(planted))), PIPELINE)
        if not planted:
            scenario(own_server.dsn, ledger)
            continue
        bug(monkeypatch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            scenario(own_server.dsn, ledger)
