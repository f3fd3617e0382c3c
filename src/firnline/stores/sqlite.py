"""A checkpoint store in one SQLite file.

WAL with synchronous=FULL: a put is durable when it returns, readers do not wait for writers. Several processes and
threads may use it, on a disk of this machine. Two tables:

    heads     key, oldest, latest, deleted, checksum     what the versions must agree with
    versions  key, version, created_at, note, data, checksum

All numbers from `oldest` to `latest` exist; a deletion is an empty row below `oldest`. Each table therefore verifies
the other: a row that is missing or does not match its checksum is damage, and is reported, never skipped.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, TypeVar

from firnline.checkpoint.codec import canonical, checksum
from firnline.clock import SystemClock, jitter
from firnline.errors import ConfigError, DamagedError, NewerFormatError
from firnline.faults import fault_point
from firnline.storage import make_folders
from firnline.stores.base import (
    COMPRESS_ABOVE_BYTES,
    KEY,
    PAGE,
    CheckpointStore,
    VersionInfo,
    reset_after_fork,
    timestamp,
)

FORMAT = 1
APPLICATION_ID = 0x4649524E  # "FIRN": identifies the file, for `file` and for people
BUSY_SECONDS = 10.0
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_MACHINE = (
    *_BUSY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_NOLFS,
)  # fmt: skip  # errors of the machine; our statements are fixed, so all others mean that the file is not ours any more
_SCHEMA = (
    "CREATE TABLE heads (key TEXT PRIMARY KEY, oldest INTEGER NOT NULL, latest INTEGER NOT NULL,"
    " deleted INTEGER NOT NULL, checksum TEXT NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE versions (key TEXT NOT NULL, version INTEGER NOT NULL, created_at TEXT NOT NULL,"
    " note TEXT NOT NULL, size_bytes INTEGER NOT NULL, data BLOB NOT NULL, checksum TEXT NOT NULL,"
    " PRIMARY KEY (key, version)) STRICT",
)
_T = TypeVar("_T")
_abandoned: list[sqlite3.Connection] = []  # a parent's, after a fork: never used and never closed by the child


class SqliteStore(CheckpointStore):
    """Versions in the SQLite file `path`, which is created on the first open.

    With `read_only` it is opened read-only and creates nothing: a missing or empty file is an empty store.
    """

    kind: ClassVar[str] = "sqlite"

    def __init__(
        self,
        path: str,
        *,
        held_by: str = "",
        compress_above_bytes: int = COMPRESS_ABOVE_BYTES,
        read_only: bool = False,
    ) -> None:
        super().__init__(held_by=held_by, compress_above_bytes=compress_above_bytes)
        self._path = os.path.abspath(path)
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._clock = SystemClock()
        self._read_only = read_only
        reset_after_fork(self)

    @property
    def place(self) -> str:
        return self._path

    def open(self) -> None:
        if sqlite3.sqlite_version_info < (3, 37):
            raise ConfigError(f"SQLite {sqlite3.sqlite_version} is too old for a checkpoint store: it needs 3.37")
        if self._read_only:
            self._run(self._is_ready)
            return
        make_folders(os.path.dirname(self._path))
        if not self._run(self._is_ready):
            self._run(self._prepare, "store.put")

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    # -- raw ------------------------------------------------------------------------------------------

    def get_raw(self, key: str) -> bytes | None:
        def work(db: sqlite3.Connection) -> bytes | None:
            _, latest, deleted = self._head(db, key)
            return None if deleted or not latest else self._version(db, key, latest)

        return self._run(work)

    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        return self._run(lambda db: self._add(db, key, self._head(db, key), data, note), "store.put")

    def delete(self, key: str) -> bool:
        def work(db: sqlite3.Connection) -> bool:
            _, latest, deleted = self._head(db, key)
            if deleted or not latest:
                return False
            db.execute("DELETE FROM versions WHERE key = ?", (key,))
            self._insert(db, key, latest + 1, b"", "deleted")
            self._set_head(db, key, latest + 2, latest + 1, 1)
            return True

        return self._run(work, "store.delete")

    def list(self, prefix: str = "") -> Iterator[str]:
        def work(db: sqlite3.Connection) -> Sequence[str]:
            if self._is_bare(db):
                return []
            keys = [key for (key,) in db.execute("SELECT key FROM heads UNION SELECT key FROM versions ORDER BY key")]
            if not all(isinstance(key, str) and KEY.fullmatch(key) for key in keys) or keys != sorted({*keys}):
                raise self._damaged("its keys are not what was put")
            return [key for key in keys if key.startswith(prefix) and not self._head(db, key)[2]]

        yield from self._run(work)

    # -- versions -------------------------------------------------------------------------------------

    def latest_version(self, key: str) -> int:
        return self._run(lambda db: self._head(db, key))[1]

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        def work(db: sqlite3.Connection) -> int:
            head = oldest, latest, _ = self._head(db, key)
            if latest == expected:
                return self._add(db, key, head, data, note)
            if not oldest <= expected + 1 <= latest or self._version(db, key, expected + 1) != data:
                raise self._conflict(key, expected, latest)
            return expected + 1

        return self._run(work, "store.put")

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        def work(db: sqlite3.Connection) -> bytes | None:
            oldest, latest, _ = self._head(db, key)
            return self._version(db, key, version) if max(oldest, 1) <= version <= latest else None

        return self._run(work)

    def list_versions(self, key: str, *, before: int | None = None, limit: int = PAGE) -> Sequence[VersionInfo]:
        def work(db: sqlite3.Connection) -> Sequence[VersionInfo]:
            oldest, latest, _ = self._head(db, key)
            top = latest if before is None else min(latest, before - 1)
            wanted = range(top, max(oldest - 1, top - max(limit, 0), 0), -1)
            if not wanted:
                return []
            rows = db.execute(
                "SELECT version, created_at, size_bytes, note FROM versions"
                " WHERE key = ? AND version BETWEEN ? AND ? ORDER BY version DESC",
                (key, wanted[-1], wanted[0]),
            ).fetchall()
            if [row[0] for row in rows] != [*wanted]:
                raise self._damaged(f"versions {wanted[-1]} to {wanted[0]} of {key} are not all there")
            infos = [VersionInfo(*row) for row in rows]
            if not all(isinstance(i.created_at, str) and isinstance(i.note, str) for i in infos):
                raise self._damaged(f"what is told of the versions of {key} is not text")
            return infos

        return self._run(work)

    def prune(self, key: str, keep: int) -> int:
        def work(db: sqlite3.Connection) -> int:
            oldest, latest, deleted = self._head(db, key)
            first = latest - keep + 1
            if deleted or first <= oldest:
                return 0
            db.execute("DELETE FROM versions WHERE key = ? AND version < ?", (key, first))
            self._set_head(db, key, first, latest, 0)
            return first - oldest

        return self._run(work, "store.prune")

    # -- rows -----------------------------------------------------------------------------------------

    def _head(self, db: sqlite3.Connection, key: str) -> tuple[int, int, int]:
        """Return oldest and latest number, and whether the key is deleted; (1, 0, 1) for one that was never put."""
        if self._is_bare(db):
            return 1, 0, 1
        row = db.execute("SELECT oldest, latest, deleted, checksum FROM heads WHERE key = ?", (key,)).fetchone()
        if row is None:
            if db.execute("SELECT 1 FROM versions WHERE key = ? LIMIT 1", (key,)).fetchone():
                raise self._damaged(f"the head of {key} is missing")
            return 1, 0, 1
        if not all(isinstance(n, int) for n in row[:3]) or row[3] != _sum(key, *row[:3]):
            raise self._damaged(f"the head of {key} does not match its checksum")
        return row[0], row[1], row[2]

    def _set_head(self, db: sqlite3.Connection, key: str, oldest: int, latest: int, deleted: int) -> None:
        row = (key, oldest, latest, deleted)
        db.execute("INSERT OR REPLACE INTO heads VALUES (?, ?, ?, ?, ?)", (*row, _sum(*row)))

    def _version(self, db: sqlite3.Connection, key: str, version: int) -> bytes:
        """Return a version that exists according to the head."""
        row = db.execute("SELECT data, checksum FROM versions WHERE key = ? AND version = ?", (key, version)).fetchone()
        if row is None:
            raise self._damaged(f"version {version} of {key} is missing")
        if not isinstance(row[0], bytes) or row[1] != _sum(key, version, checksum(row[0])):
            raise self._damaged(f"version {version} of {key} does not match its checksum")
        return row[0]

    def _add(self, db: sqlite3.Connection, key: str, head: tuple[int, int, int], data: bytes, note: str) -> int:
        oldest, latest, _ = head
        self._insert(db, key, latest + 1, data, note)
        self._set_head(db, key, oldest, latest + 1, 0)
        return latest + 1

    def _insert(self, db: sqlite3.Connection, key: str, version: int, data: bytes, note: str) -> None:
        row = (key, version, timestamp(), note, len(data), data, _sum(key, version, checksum(data)))
        db.execute("INSERT INTO versions VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    # -- connection -----------------------------------------------------------------------------------

    def _is_ready(self, db: sqlite3.Connection) -> bool:
        """Return whether the tables exist; False for a new file. Raises an error for a file of another kind."""
        found = int(db.execute("PRAGMA user_version").fetchone()[0])
        owner = int(db.execute("PRAGMA application_id").fetchone()[0])
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not tables and not found and not owner:
            return False
        if owner != APPLICATION_ID or found < 1:
            raise self._damaged("it is not, or no longer, a checkpoint store")
        if found > FORMAT:
            raise NewerFormatError(f"{self._path} has format {found}; this Firnline reads up to {FORMAT}", found=found)
        if not tables >= {"heads", "versions"}:
            raise self._damaged("its tables are missing")
        return True

    def _is_bare(self, db: sqlite3.Connection) -> bool:
        """Return whether the store is read-only and no writer has created the tables yet."""
        return self._read_only and not self._is_ready(db)

    def _prepare(self, db: sqlite3.Connection) -> None:
        if self._is_ready(db):
            return  # another process was faster
        for statement in _SCHEMA:
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {FORMAT}")

    def _run(self, work: Callable[[sqlite3.Connection], _T], call: str = "") -> _T:
        """Do `work` in one transaction, and retry while the file is busy; a `call` writes, and has its fault points."""
        deadline = self._clock.monotonic() + 2 * BUSY_SECONDS
        while True:
            with self._lock:
                try:
                    return self._transact(self._connect(), work, call)
                except sqlite3.Error as error:
                    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                    if code not in _BUSY:
                        self.close()  # after a disk error the state of the connection is unknown
                    if code not in _MACHINE:
                        raise self._damaged(str(error)) from error
                    if code not in _BUSY or self._clock.monotonic() > deadline:
                        raise OSError(f"{self._path}: {error}") from error
                except (UnicodeError, OverflowError, MemoryError) as error:  # from damaged names, numbers and lengths
                    self.close()
                    raise self._damaged(str(error)) from error
            self._clock.sleep(jitter(0, 0.05))

    def _transact(self, db: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T], call: str) -> _T:
        db.execute("BEGIN IMMEDIATE" if call else "BEGIN")
        try:
            found = work(db)
            if call:
                fault_point(f"{call}.before")
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise
        if call:
            fault_point(f"{call}.after")
        return found

    def _connect(self) -> sqlite3.Connection:
        if self._read_only:
            return self._connect_to_look()
        if self._connection is None:
            db = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                db.execute("PRAGMA journal_mode = WAL")
                db.execute("PRAGMA synchronous = FULL")
            except sqlite3.Error:
                db.close()
                raise
            self._connection = db
        return self._connection

    def _connect_to_look(self) -> sqlite3.Connection:
        if self._connection is None:
            if not os.path.exists(self._path):
                return sqlite3.connect(":memory:", isolation_level=None)  # not kept: the file may appear later
            # Opened for writing but never created: the WAL of a killed writer must be recovered.
            place = f"file:{urllib.parse.quote(self._path)}?mode=rw"
            self._connection = sqlite3.connect(
                place, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
        return self._connection

    def after_fork(self) -> None:
        """Drop the connection in a forked child, without using or closing it."""
        if self._connection is not None:
            _abandoned.append(self._connection)
        self._connection = None
        self._lock = threading.RLock()

    def _damaged(self, what: str) -> DamagedError:
        return DamagedError(
            f"{self._path} is damaged: {what}",
            hint="Move the file away, with its -wal and -shm, and run again; or bring it back from a backup. "
            "`sqlite3 FILE .recover` shows what can still be read.",
            what=self._path,
        )


def _sum(*values: str | int) -> str:
    return checksum(canonical([*values]))
