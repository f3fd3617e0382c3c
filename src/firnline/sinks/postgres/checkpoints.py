"""The table `firnline.checkpoints`: one row per pipeline and sink, with the head that the sink holds.

    pipeline, sink   the key
    head             the sealed head (`sinks.follower.FollowerHead`)
    removed          ranges of epochs whose rows rollbacks have removed: [[first, last], ...]
    generation, epoch, backend_pid, updated_at    for people; nothing is decided from them

A transaction that writes rows locks its row first, so that those of one sink take turns. Whoever reads the head after a
lost answer takes the lock, too, and so waits for a backend that is still committing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import Connection, errors
from psycopg.sql import SQL, Literal

from firnline.errors import CommitConflictError, FencedError
from firnline.sinks.follower import FollowerHead

SCHEMA = "firnline"
TABLES = "tables"  # what a head says of its sink: the tables that it has written to
ADVISORY_LOCK = 0x4649524F  # under which schemas and tables are created
_CREATE = (
    "CREATE SCHEMA IF NOT EXISTS firnline",
    'CREATE TABLE IF NOT EXISTS firnline.checkpoints (pipeline text COLLATE "C" NOT NULL,'
    ' sink text COLLATE "C" NOT NULL, head json, generation bigint NOT NULL DEFAULT 0,'
    " epoch bigint NOT NULL DEFAULT 0, removed json NOT NULL DEFAULT '[]', backend_pid integer,"
    " updated_at timestamptz NOT NULL DEFAULT now(),"
    " PRIMARY KEY (pipeline, sink))",
    "COMMENT ON TABLE firnline.checkpoints IS 'firnline checkpoints of sinks, format 1'",
)
Db = Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """The row of one sink of one pipeline."""

    pipeline: str
    sink: str

    @property
    def key(self) -> tuple[str, str]:
        return self.pipeline, self.sink

    def session_name(self, generation: int, run: str) -> str:
        """Return the name of a session that may lock the row: with it, a claimant finds the sessions of older runs."""
        digest = hashlib.sha256("\0".join(self.key).encode()).hexdigest()[:16]
        mark = hashlib.sha256(run.encode()).hexdigest()[:8]
        return f"firnline {digest} {generation} {mark} {self.pipeline}/{self.sink}"[:63]

    def exists(self, db: Db) -> bool:
        """Return whether the table of checkpoints exists."""
        found = db.execute("SELECT to_regclass('firnline.checkpoints') IS NOT NULL").fetchone()
        return bool(found and found[0])

    def ensure(self, db: Db) -> None:
        """Create the table and the row if they are missing."""
        if not self.exists(db):
            db.execute("SELECT pg_advisory_xact_lock(%s)", (ADVISORY_LOCK,))
            for statement in _CREATE:
                db.execute(statement)
        db.execute("INSERT INTO firnline.checkpoints (pipeline, sink) VALUES (%s, %s) ON CONFLICT DO NOTHING", self.key)

    def read(self, db: Db) -> FollowerHead | None:
        """Read the committed head, without waiting for anybody."""
        return self._parse(db.execute(_SELECT, self.key).fetchone())

    def lock(self, db: Db, name: str, generation: int, lock_seconds: float) -> FollowerHead | None:
        """Lock the row, in a transaction that has locked nothing yet, and return its head.

        A backend that keeps the lock is ended if it is one of this run that lost its client, or one of a run with an
        older generation than `generation`. Others are waited for, and so is one that has committed and waits for a
        standby server.
        """
        patient = SQL("SET LOCAL lock_timeout = {}").format(Literal(f"{lock_seconds * 1000:.0f}ms"))
        try:
            found = db.execute(SQL(f"{_SELECT} FOR UPDATE"), self.key).fetchone()
            db.execute(patient)
        except errors.LockNotAvailable:
            db.execute(SQL("ROLLBACK TO SAVEPOINT begun; ") + patient)
            db.execute(_END_OLDER, {"name": name, "generation": generation})
            found = db.execute(SQL(f"{_SELECT} FOR UPDATE"), self.key).fetchone()
        return self._parse(found)

    def write(self, db: Db, head: FollowerHead) -> None:
        """Write the head into the locked row."""
        changed = db.execute(
            "UPDATE firnline.checkpoints SET head = %s, generation = %s, epoch = %s, backend_pid = pg_backend_pid(),"
            " updated_at = now() WHERE pipeline = %s AND sink = %s",
            (json.dumps(head.to_json()), head.generation, head.epoch, *self.key),
        )
        if changed.rowcount != 1:
            raise CommitConflictError(f"the checkpoint of sink {self.sink!r} is gone")

    def find_owner(self, db: Db, table: str) -> str | None:
        """Return the other sink that writes to a table, as `pipeline/sink`; None if no head names the table."""
        rows = db.execute(
            "SELECT pipeline, sink, head::text FROM firnline.checkpoints WHERE (pipeline, sink) <> (%s, %s)"
            " AND head IS NOT NULL",
            self.key,
        ).fetchall()
        for pipeline, sink, head in rows:
            if table in (json.loads(head).get("own") or {}).get(TABLES, ()):
                return f"{pipeline}/{sink}"
        return None

    def find_removed(self, db: Db, epoch: int) -> tuple[int, int] | None:
        """Return the range of removed epochs that an epoch lies in; None if its rows are there."""
        return next(((first, last) for first, last in self._removed(db) if first <= epoch <= last), None)

    def note_removed(self, db: Db, after: int, last: int) -> None:
        """Note in the locked row that the rows of the epochs after one are gone, up to the last one."""
        kept = [(a, b) for a, b in self._removed(db) if a <= after]
        db.execute(
            "UPDATE firnline.checkpoints SET removed = %s WHERE pipeline = %s AND sink = %s",
            (json.dumps([*kept, (after + 1, last)]), *self.key),
        )

    def _removed(self, db: Db) -> list[tuple[int, int]]:
        if not self.exists(db):
            return []
        found = db.execute(
            "SELECT removed::text FROM firnline.checkpoints WHERE pipeline = %s AND sink = %s", self.key
        ).fetchone()
        return [(int(a), int(b)) for a, b in json.loads(found[0])] if found else []

    def require(self, held: FollowerHead | None, expected: FollowerHead | None, generation: int) -> None:
        """Check what the locked row holds.

        Raises:
            FencedError: a newer generation owns the sink.
            CommitConflictError: it holds another head than the expected one.
        """
        if held is not None and held.generation > generation:
            raise FencedError(f"generation {held.generation} took sink {self.sink!r} over", generation=held.generation)
        if held != expected:
            epoch = held.epoch if held is not None else 0
            raise CommitConflictError(f"sink {self.sink!r} holds epoch {epoch}, which was not expected")

    def _parse(self, found: tuple[Any, ...] | None) -> FollowerHead | None:
        if found is None or found[0] is None:
            return None
        return FollowerHead.from_json(json.loads(found[0]), f"the checkpoint of sink {self.sink!r}")


_SELECT: LiteralString = "SELECT head::text FROM firnline.checkpoints WHERE pipeline = %s AND sink = %s"
_END_OLDER = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE pid <> pg_backend_pid() AND datname = current_database() AND usename = session_user"
    " AND wait_event IS DISTINCT FROM 'SyncRep'"
    " AND split_part(application_name, ' ', 1) = 'firnline'"
    " AND split_part(application_name, ' ', 2) = split_part(%(name)s, ' ', 2)"
    " AND split_part(application_name, ' ', 3) ~ '^[0-9]{1,18}$'"
    " AND (application_name = %(name)s OR split_part(application_name, ' ', 3)::bigint < %(generation)s)"
)
