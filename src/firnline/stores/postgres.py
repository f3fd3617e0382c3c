"""A checkpoint store in PostgreSQL: two tables in the schema `firnline`.

    firnline.heads     key, latest, deleted, updated_at
    firnline.versions  key, version, created_at, note, data

Every write locks the row of its key in `heads`, so writers of a key take turns and cannot deadlock. Waiting for the
lock has a timeout, and the database releases the locks of a stalled process.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC
from typing import Any, ClassVar, TypeVar

from firnline.errors import DamagedError, MissingExtraError, NewerFormatError
from firnline.faults import fault_point
from firnline.postgres_client import NETWORK_DEFAULTS, parse_dsn
from firnline.stores.base import (
    COMPRESS_ABOVE_BYTES,
    PAGE,
    CheckpointStore,
    VersionInfo,
    reset_after_fork,
)

FORMAT = 1
_SETTINGS = (
    "SET lock_timeout = '30s'",
    "SET statement_timeout = '120s'",
    "SET idle_in_transaction_session_timeout = '60s'",
    "SET synchronous_commit = on",  # a put is durable when it returns, whatever the server's default
)
_CREATE = (
    "CREATE SCHEMA IF NOT EXISTS firnline",
    'CREATE TABLE IF NOT EXISTS firnline.heads (key text COLLATE "C" PRIMARY KEY, latest bigint NOT NULL,'
    " deleted boolean NOT NULL, updated_at timestamptz NOT NULL DEFAULT now())",
    'CREATE TABLE IF NOT EXISTS firnline.versions (key text COLLATE "C" NOT NULL, version bigint NOT NULL,'
    " created_at timestamptz NOT NULL DEFAULT now(), note text NOT NULL, data bytea NOT NULL,"
    " PRIMARY KEY (key, version))",
    "COMMENT ON SCHEMA firnline IS 'firnline checkpoint store, format 1'",
)
_LOCK = 0x4649524E  # the advisory lock under which the tables are created
_T = TypeVar("_T")
_abandoned: list[Any] = []  # a parent's connections, after a fork: never used and never closed by the child


class PostgresStore(CheckpointStore):
    """Versions in the database that `dsn` names. The dsn's password is never shown.

    With `read_only` it is opened read-only and creates nothing: a database without the tables is empty.
    """

    kind: ClassVar[str] = "postgres"

    def __init__(
        self,
        dsn: str,
        *,
        held_by: str = "",
        compress_above_bytes: int = COMPRESS_ABOVE_BYTES,
        read_only: bool = False,
    ) -> None:
        super().__init__(held_by=held_by, compress_above_bytes=compress_above_bytes)
        try:
            import psycopg
        except ImportError as error:
            raise MissingExtraError(extra="postgres") from error
        self._psycopg: Any = psycopg
        self._given = parse_dsn(dsn, "checkpoint store")
        self._lock = threading.RLock()
        self._connection: Any = None
        self._read_only = read_only
        reset_after_fork(self)

    @property
    def place(self) -> str:
        host, port = self._given.get("host", "localhost"), self._given.get("port", "5432")
        return f"postgresql://{host}:{port}/{self._given.get('dbname', '')}"

    def open(self) -> None:
        if not self._run(_is_ready) and not self._read_only:
            self._run(_create, "store.put")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(self._psycopg.Error):
                    self._connection.close()
                self._connection = None

    # -- raw ------------------------------------------------------------------------------------------

    def get_raw(self, key: str) -> bytes | None:
        query = (
            "SELECT v.data FROM firnline.heads h LEFT JOIN firnline.versions v"
            " ON v.key = h.key AND v.version = h.latest WHERE h.key = %s AND NOT h.deleted"
        )
        row: Any = self._read(lambda db: _row(db, query, key), None)
        if row is not None and row[0] is None:
            raise DamagedError(f"the newest version of {key} in {self.place} is missing", what=self.place)
        return bytes(row[0]) if row else None

    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        return self._run(lambda db: _add(db, key, _locked(db, key)[0] + 1, data, note), "store.put")

    def delete(self, key: str) -> bool:
        def work(db: Any) -> bool:
            latest, deleted = _locked(db, key)
            if deleted:
                db.rollback()  # a key that was never put leaves no row
                return False
            db.execute("DELETE FROM firnline.versions WHERE key = %s", (key,))
            _set_head(db, key, latest + 1, True)
            return True

        return self._run(work, "store.delete")

    def list(self, prefix: str = "") -> Iterator[str]:
        query = "SELECT key FROM firnline.heads WHERE NOT deleted AND starts_with(key, %s) ORDER BY key"
        rows: Any = self._read(lambda db: db.execute(query, (prefix,)).fetchall(), [])
        yield from [str(row[0]) for row in rows]

    # -- versions -------------------------------------------------------------------------------------

    def latest_version(self, key: str) -> int:
        row: Any = self._read(lambda db: _row(db, "SELECT latest FROM firnline.heads WHERE key = %s", key), None)
        return int(row[0]) if row else 0

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        def work(db: Any) -> int:
            if _add_onto(db, key, expected, data, note):
                return expected + 1
            latest, _ = _locked(db, key)
            if latest == expected:
                return _add(db, key, expected + 1, data, note)
            row = _row(db, f"{_DATA} AND version = %s", key, expected + 1)
            if row is None or bytes(row[0]) != data:
                raise self._conflict(key, expected, latest)
            return expected + 1

        return self._run(work, "store.put")

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        row: Any = self._read(lambda db: _row(db, f"{_DATA} AND version = %s", key, version), None)
        return bytes(row[0]) if row else None

    def list_versions(self, key: str, *, before: int | None = None, limit: int = PAGE) -> Sequence[VersionInfo]:
        query = (
            "SELECT version, created_at, octet_length(data), note FROM firnline.versions"
            " WHERE key = %s AND version < %s ORDER BY version DESC LIMIT %s"
        )
        top = 2**63 - 1 if before is None else before
        rows: Any = self._read(lambda db: db.execute(query, (key, top, max(limit, 0))).fetchall(), [])
        return [VersionInfo(v, at.astimezone(UTC).isoformat(timespec="milliseconds"), s, n) for v, at, s, n in rows]

    def prune(self, key: str, keep: int) -> int:
        def work(db: Any) -> int:
            _locked(db, key)
            oldest = _row(
                db, "SELECT version FROM firnline.versions WHERE key = %s ORDER BY version DESC OFFSET %s LIMIT 1",
                key, keep - 1,
            )  # fmt: skip
            if oldest is None:
                db.rollback()
                return 0
            gone = db.execute("DELETE FROM firnline.versions WHERE key = %s AND version < %s", (key, oldest[0]))
            return int(gone.rowcount)

        return self._run(work, "store.prune")

    # -- connection -----------------------------------------------------------------------------------

    def _read(self, work: Callable[[Any], _T], nothing: _T) -> _T:
        """Do `work`. Read-only, return `nothing` if no writer has created the tables yet."""
        return self._run(lambda db: nothing if self._read_only and not _is_ready(db) else work(db))

    def _run(self, work: Callable[[Any], _T], call: str = "") -> _T:
        """Do `work` in one transaction; a `call` writes, and has its fault points.

        If the connection is lost before the commit was sent, it is opened again once: nothing was written. Later the
        outcome is unknown, which raises OSError.
        """
        with self._lock:
            for attempt in (1, 2):
                db = self._connect()
                try:
                    found = work(db)
                except self._psycopg.Error as error:
                    lost = db.broken or db.closed
                    self._let_go(db, lost)
                    if lost and attempt == 1:
                        continue
                    raise self._translated(error) from error
                except BaseException:
                    self._let_go(db, bool(db.broken or db.closed))
                    raise
                self._commit(db, call)
                return found
            raise AssertionError("the second attempt returns or raises")

    def _commit(self, db: Any, call: str) -> None:
        try:
            if call:
                fault_point(f"{call}.before")
            db.commit()
            if call:
                fault_point(f"{call}.after")
        except self._psycopg.Error as error:
            self._let_go(db, True)
            raise self._translated(error) from error
        except BaseException:
            self._let_go(db, True)
            raise

    def _let_go(self, db: Any, lost: bool) -> None:
        """End a failed transaction, and close the connection if its state is in doubt."""
        if not lost:
            with contextlib.suppress(self._psycopg.Error):
                db.rollback()
                return
        self.close()

    def _connect(self) -> Any:
        if self._connection is None:
            try:
                db = self._psycopg.connect(**{**NETWORK_DEFAULTS, "application_name": "firnline", **self._given})
            except self._psycopg.Error as error:
                raise self._translated(error) from error
            self._connection = db
            try:
                db.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
                for statement in _SETTINGS:
                    db.execute(statement)
                db.commit()
            except self._psycopg.Error as error:
                self.close()
                raise self._translated(error) from error
        return self._connection

    def _translated(self, error: Exception) -> Exception:
        """Return the library's error as one of the contract, without the password."""
        text = " ".join(str(error).split()) or type(error).__name__
        for secret in (self._given.get("password"), self._given.get("sslpassword")):
            text = text.replace(str(secret), "***") if secret else text
        errors = self._psycopg.errors
        if isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
            return DamagedError(f"{self.place} is damaged: {text}", what=self.place)
        if isinstance(error, errors.InsufficientPrivilege):
            return PermissionError(f"{self.place}: {text}")
        return OSError(f"{self.place}: {text}")

    def after_fork(self) -> None:
        """Drop the parent's connection in a forked child, without using or closing it."""
        if self._connection is not None:
            _abandoned.append(self._connection)
        self._connection = None
        self._lock = threading.RLock()


_DATA = "SELECT data FROM firnline.versions WHERE key = %s"


def _row(db: Any, query: str, *values: object) -> Any:
    return db.execute(query, values).fetchone()


def _is_ready(db: Any) -> bool:
    if _row(db, "SELECT to_regclass('firnline.heads') IS NULL OR to_regclass('firnline.versions') IS NULL")[0]:
        return False
    about = _row(db, "SELECT obj_description(to_regnamespace('firnline')::oid, 'pg_namespace')")[0] or ""
    found = about.rpartition("format ")[2]
    if found.isdigit() and int(found) > FORMAT:
        raise NewerFormatError(f"schema firnline has format {found}; this Firnline reads up to {FORMAT}", found=found)
    return True


def _create(db: Any) -> None:
    db.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))  # two concurrent creators would conflict
    for statement in _CREATE:
        db.execute(statement)


def _locked(db: Any, key: str) -> tuple[int, bool]:
    """Return the latest number and whether there is no value. Locks the key until the transaction ends."""
    db.execute("INSERT INTO firnline.heads (key, latest, deleted) VALUES (%s, 0, true) ON CONFLICT DO NOTHING", (key,))
    row = _row(db, "SELECT latest, deleted FROM firnline.heads WHERE key = %s FOR UPDATE", key)
    return int(row[0]), bool(row[1])


def _set_head(db: Any, key: str, latest: int, deleted: bool) -> None:
    db.execute(
        "UPDATE firnline.heads SET latest = %s, deleted = %s, updated_at = now() WHERE key = %s", (latest, deleted, key)
    )


def _add_onto(db: Any, key: str, expected: int, data: bytes, note: str) -> bool:
    """Add a version if `expected` is the latest, in one round trip. Returns False if it is not, or the key is new."""
    done = db.execute(
        "WITH head AS (UPDATE firnline.heads SET latest = %s, deleted = false, updated_at = now()"
        " WHERE key = %s AND latest = %s RETURNING key, latest)"
        " INSERT INTO firnline.versions (key, version, note, data) SELECT key, latest, %s, %s FROM head",
        (expected + 1, key, expected, note, data),
    )
    return int(done.rowcount) == 1


def _add(db: Any, key: str, version: int, data: bytes, note: str) -> int:
    db.execute(
        "INSERT INTO firnline.versions (key, version, note, data) VALUES (%s, %s, %s, %s)", (key, version, note, data)
    )
    _set_head(db, key, version, False)
    return version
