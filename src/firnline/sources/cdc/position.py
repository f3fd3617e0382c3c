"""The position of a source that captures changes: a place in the server's log, the spool file that ends there, and how
far the rows of tables have been read that were there before."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from firnline.errors import DamagedError
from firnline.sources.base import PositionView, SnapshotProgress
from firnline.sources.cdc.spool import Mark
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class TableSnapshot:
    """How far the reading of a table's rows has come."""

    id: str  # serial number and random part; a later snapshot of the table has another one
    after: Json = None  # the key of the last row of the last chunk
    order: Json = None  # of that chunk, as in `Chunk`
    identity: str = ""  # of the table, as in `TableFacts`
    chunks: int = 0
    rows: int = 0  # of the chunks
    again: int = 0  # chunks that had to be read again
    estimate: int = 0  # of the table's rows, when it began
    where: str = ""
    request: str = ""  # of the person who asked for it
    done: bool = False
    # Of a table without a key, until the log has passed `high`: changes of transactions that its snapshot sees are
    # left out.
    sees: Json = None
    high: Json = None

    @property
    def serial(self) -> int:
        return int(self.id[:8])

    def to_json(self) -> dict[str, Json]:
        if self.done:
            request = {"request": self.request} if self.request else {}
            seen = {"sees": self.sees, "high": self.high} if self.sees is not None else {}
            facts = {"id": self.id, "identity": self.identity, "rows": self.rows, "chunks": self.chunks}
            return {**facts, **request, **seen, "done": True}
        return {
            "id": self.id,
            "identity": self.identity,
            "after": self.after,
            "order": self.order,
            "chunks": self.chunks,
            "rows": self.rows,
            "again": self.again,
            "estimate": self.estimate,
            "where": self.where,
            "request": self.request,
            **({"sees": self.sees, "high": self.high} if self.sees is not None else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> TableSnapshot:
        return cls(
            str(value["id"]),
            value.get("after"),
            value.get("order"),
            str(value.get("identity", "")),
            int(value["chunks"]),
            int(value["rows"]),
            int(value.get("again", 0)),
            int(value.get("estimate", 0)),
            str(value.get("where", "")),
            str(value.get("request", "")),
            bool(value.get("done", False)),
            value.get("sees"),
            value.get("high"),
        )

    @property
    def progress(self) -> SnapshotProgress:
        return SnapshotProgress(self.rows, self.estimate, self.chunks, self.done, self.request)


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Behind the last transaction of an epoch."""

    kind: str  # of the source
    location: str  # of the database, without credentials
    place: Json = None  # the server's place; None before the first transaction
    spool: int = 0  # the number of the last spool file that was read
    schemas: Mapping[str, str] = field(default_factory=dict)  # by table: fingerprint of the schema in force
    snapshots: Mapping[str, TableSnapshot] = field(default_factory=dict)  # by table
    # While tables are read: the last spool files, which have transactions that a snapshot may not see.
    window: tuple[str, ...] = ()
    # Tables that were captured before, each with the number of the newest snapshot then: what sinks have is old.
    left: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)  # of `schemas`, if the server's log has no statements
    # By table: a snapshot that the next epoch begins, since rows changed without being in the log; whether sinks lose
    # what they have of the table first.
    due: Mapping[str, bool] = field(default_factory=dict)
    logged: Mapping[str, str] = field(default_factory=dict)  # by table, as in `TableFacts`: all since is in the log
    # By table: the key by which sinks of many tables upsert it; empty: they append it; None: they lost its rows, and
    # those that come next say it.
    keys: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    unkeyed: frozenset[str] = frozenset()  # tables that lost the key by which they were upserted, and are appended

    @property
    def running(self) -> dict[str, TableSnapshot]:
        """The snapshots that are not done, in the order in which they began."""
        found = [(table, one) for table, one in self.snapshots.items() if not one.done]
        return dict(sorted(found, key=lambda item: item[1].serial))

    @property
    def left_out(self) -> dict[str, Json]:
        """By table: what a snapshot sees whose transactions are left out of the log."""
        return {table: one.sees for table, one in self.snapshots.items() if one.sees is not None}

    @property
    def serial(self) -> int:
        """The number of the newest snapshot; 0 if there is none."""
        return max((*(one.serial for one in self.snapshots.values()), *self.left.values()), default=0)

    def loses_key(self, table: str, key: tuple[str, ...]) -> bool:
        """Return whether rows with a key cannot go into what sinks of many tables have of a table: they upsert it by
        another one, or did so before it had none."""
        known = self.keys.get(table)
        return is_other_key(known, key) or (known == () and table in self.unkeyed and bool(key))

    def reads_anew(self, table: str) -> bool:
        """Return whether a snapshot of a table is still to begin that makes sinks lose what they have of it."""
        return self.due.get(table, False) or table in self.left

    def with_key(self, table: str, key: tuple[str, ...]) -> LogPosition:
        """Return the position once sinks of many tables have a table by this key."""
        lost = {table} if not key and table in self.keys else set()
        return replace(self, keys={**self.keys, table: key}, unkeyed=(self.unkeyed - {table}) | lost)

    def emptied(self, table: str) -> LogPosition:
        """Return the position once sinks have lost what they had of a table; those that always appended it keep it."""
        if not self.keys.get(table) and table not in self.unkeyed:
            return self
        return replace(self, keys={**self.keys, table: None})

    @property
    def tables(self) -> list[str]:
        """The tables of which something is known."""
        return sorted({*self.schemas, *self.snapshots})

    @property
    def mark(self) -> Mark:
        return Mark(self.place)

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": self.kind,
            "location": self.location,
            "place": self.place,
            "spool": self.spool,
            "schemas": dict(self.schemas),
            "snapshots": {table: one.to_json() for table, one in self.snapshots.items()},
            "window": list(self.window),
            "left": dict(self.left),
            **({"shapes": dict(self.shapes)} if self.shapes else {}),
            **({"due": dict(self.due)} if self.due else {}),
            **({"logged": dict(self.logged)} if self.logged else {}),
            **(
                {"keys": {t: list(key) if key is not None else None for t, key in self.keys.items()}}
                if self.keys
                else {}
            ),
            **({"unkeyed": sorted(self.unkeyed)} if self.unkeyed else {}),
        }

    @classmethod
    def from_json(cls, value: Json, kind: str) -> LogPosition:
        """Read a position.

        Raises:
            DamagedError: it is not one of this kind of source.
        """
        if not isinstance(value, Mapping) or value.get("kind") != kind:
            raise DamagedError(f"the position is not one of a {kind} source")
        try:
            return cls(
                kind,
                str(value["location"]),
                value["place"],
                int(value["spool"]),
                dict(value["schemas"]),
                {str(table): TableSnapshot.from_json(one) for table, one in value.get("snapshots", {}).items()},
                tuple(value.get("window", ())),
                {str(table): int(serial) for table, serial in value.get("left", {}).items()},
                dict(value.get("shapes", {})),
                dict(value.get("due", {})),
                dict(value.get("logged", {})),
                {str(t): tuple(key) if key is not None else None for t, key in value.get("keys", {}).items()},
                frozenset(value.get("unkeyed", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"the position of a {kind} source cannot be read: {error}") from error

    def describe(self, facts: Mapping[str, Json]) -> PositionView:
        """Return the position for people; `facts` are those of the server's place."""
        found: dict[str, Json] = {**facts, "tables": len(self.schemas)}
        if self.running:
            found["snapshot"] = describe_progress(self.running)
        return PositionView(facts=found, location=self.location)


def is_other_key(known: Collection[str] | None, key: Collection[str]) -> bool:
    """Return whether rows with a key cannot be upserted by the known one. What has none is appended to."""
    return bool(known) and set(known or ()) != set(key)


def reads_anew(positions: Mapping[str, Json], port: str, table: str) -> bool:
    """Return whether the source of a port, by the positions after an epoch, is still to read a table from its first
    row, and to empty it in sinks before that."""
    names = [name for name in positions if port.startswith(f"{name}.")]
    value = positions[max(names, key=len)] if names else None
    if not isinstance(value, Mapping) or "spool" not in value:
        return False
    return LogPosition.from_json(value, str(value.get("kind"))).reads_anew(table)


def describe_progress(running: Mapping[str, TableSnapshot]) -> str:
    """Return the progress of snapshots in words: `orders 12,000 of about 50,000 rows, 3 tables wait`."""
    active = [(table, one) for table, one in running.items() if one.chunks] or list(running.items())[:1]
    words = []
    for table, one in active:
        total = f" of about {one.estimate:,}" if one.estimate > one.rows else ""
        words.append(f"{table} {one.rows:,}{total} rows")
    waiting = len(running) - len(active)
    if waiting:
        words.append(f"{waiting} {'table waits' if waiting == 1 else 'tables wait'}")
    return ", ".join(words)
