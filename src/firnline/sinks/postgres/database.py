"""Sessions with PostgreSQL: one connection, transactions with timeouts, and errors of the contract.

Settings hold for one transaction each (`SET LOCAL`), so that a connection pooler may stand in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import Connection, errors
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.sql import SQL, Composed, Identifier, Literal

from firnline.errors import CommitUnknownError, SinkError
from firnline.postgres_client import NETWORK_DEFAULTS, parse_dsn

PATIENCE = "2s"  # for a lock at first: then `CheckpointRow.lock` ends a backend that keeps it
GRACE_SECONDS = 15.0  # beyond the server's own timeout, before a silent server counts as lost
# Classes and codes of errors that one row causes: the rest of the rows can be written without it.
_ROW_CLASSES = ("22", "23", "44", "54", *("09", "27", "38", "39", "45", "P0"))  # those of triggers and functions last


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of one statement, and of the wait for a lock, in seconds."""

    statement: float
    lock: float


class _Session(Connection[tuple[Any, ...]]):
    """A connection that gives up a server that stays silent for longer than a statement may take."""

    silent_seconds: float = 60.0

    def wait(self, gen: PQGen[Any], interval: float = 0.1, timeout: float | None = None) -> Any:
        try:
            return super().wait(gen, interval, self.silent_seconds if timeout is None else timeout)
        except errors._WaitTimeout:
            self.pgconn.finish()  # no answer may be taken for that of a later question
            raise errors.OperationalError(f"the server did not answer within {self.silent_seconds:.0f} s") from None


class Database:
    """The database of a sink, with at most one connection. Its password is never shown.

    Calls come one at a time.
    """

    def __init__(self, dsn: str, place: str, timeouts: Timeouts) -> None:
        self._given = parse_dsn(dsn, "sink")
        self.place = place
        self._timeouts = timeouts
        self._connection: _Session | None = None

    @contextlib.contextmanager
    def transaction(self, name: str) -> Iterator[Connection[tuple[Any, ...]]]:
        """Begin a transaction of the session `name`. It is rolled back at the end unless `commit` ended it.

        Raises:
            SinkError: the database cannot be reached, or refuses a statement; nothing was written.
        """
        connection = self._begin(name)
        try:
            yield connection
        except psycopg.Error as error:
            raise self.translate(error) from error
        finally:
            self._end(connection)

    def commit(self, connection: Connection[tuple[Any, ...]]) -> None:
        """Commit. Every answer to the statements before was read.

        Raises:
            CommitUnknownError: the answer to the commit was lost.
            SinkError: the server refused it; nothing was written.
        """
        try:
            answer = connection.execute("COMMIT").statusmessage
        except psycopg.Error as error:
            if connection.closed or connection.broken or not _is_definite(error):
                self.close()
                raise CommitUnknownError(f"{self.place}: {self._text(error)}") from error
            raise
        if answer != "COMMIT":
            raise SinkError(f"{self.place}: the server answered {answer} to a commit")

    def close(self) -> None:
        """Drop the connection; a transaction that is open is rolled back."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.close()
            self._connection = None

    def _begin(self, name: str) -> _Session:
        for attempt in (1, 2):
            is_new = self._connection is None
            connection = self._connect()
            try:
                connection.execute(self._begin_statement(name))
            except psycopg.Error as error:
                lost = connection.closed or connection.broken
                self.close()
                if lost and not is_new and attempt == 1:
                    continue  # the server closed an idle connection: nothing was asked of it
                raise self.translate(error) from error
            return connection
        raise AssertionError("the second attempt returns or raises")

    def _begin_statement(self, name: str) -> Composed:
        settings = {
            "application_name": name,
            "lock_timeout": PATIENCE,
            "statement_timeout": f"{self._timeouts.statement * 1000:.0f}ms",
            "idle_in_transaction_session_timeout": f"{self._timeouts.statement * 1000:.0f}ms",
            "synchronous_commit": "on",  # durable when it returns, whatever the server's default
            "TimeZone": "UTC",
        }
        lines = [SQL("SET LOCAL {} = {}").format(Identifier(key), Literal(value)) for key, value in settings.items()]
        # A failure at once is better than one at the commit, when rows can no longer be told apart.
        return SQL("; ").join([SQL("BEGIN"), *lines, SQL("SET CONSTRAINTS ALL IMMEDIATE"), SQL("SAVEPOINT begun")])

    def _connect(self) -> _Session:
        if self._connection is None:
            try:
                session = _Session.connect(
                    **{**NETWORK_DEFAULTS, **self._given, "client_encoding": "UTF8"},
                    autocommit=True,
                    prepare_threshold=None,
                )
            except psycopg.Error as error:
                raise self.translate(error) from error
            session.silent_seconds = self._timeouts.statement + GRACE_SECONDS
            self._connection = session
        return self._connection

    def _end(self, connection: _Session) -> None:
        """End what is left of a transaction, and drop a connection whose state is in doubt."""
        if connection is not self._connection:
            with contextlib.suppress(psycopg.Error):
                connection.close()
            return
        status = connection.info.transaction_status
        if status is TransactionStatus.IDLE:
            return
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            with contextlib.suppress(psycopg.Error):
                connection.execute("ROLLBACK")
                return
        self.close()

    def translate(self, error: psycopg.Error) -> Exception:
        """Return a driver's error as one of the contract, without the password."""
        text = self._text(error)
        if isinstance(error, errors.InsufficientPrivilege):
            return SinkError(f"{self.place}: {text}", hint="Grant the role of the dsn what the message names.")
        if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn | errors.InvalidColumnReference):
            return SinkError(f"{self.place}: {text}", hint="Somebody changed the table; `firnline dry-run` checks it.")
        hint = "Check the address, the password and the server, then run again; nothing was lost."
        return SinkError(f"{self.place}: {text}", hint=hint)

    def _text(self, error: BaseException) -> str:
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in (self._given.get("password"), self._given.get("sslpassword")):
            text = text.replace(str(secret), "***") if secret else text
        return text

    def reason(self, error: BaseException) -> str:
        """Return the first line of the message of an error, or of its cause, for people."""
        error = error.__cause__ or error
        diagnosis = getattr(error, "diag", None)
        return (diagnosis.message_primary if diagnosis else None) or self._text(error)


def is_row_error(error: psycopg.Error) -> bool:
    """Whether a single row may have caused an error of COPY, INSERT or MERGE."""
    return (error.sqlstate or "").startswith(_ROW_CLASSES)


def _is_definite(error: psycopg.Error) -> bool:
    """Whether the server itself said that a commit failed: not by ending the session."""
    code = error.sqlstate or ""
    return bool(code) and not code.startswith(("57", "08", "58", "XX"))
