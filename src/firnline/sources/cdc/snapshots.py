"""Reads the rows of tables that were there before, chunk by chunk, in a thread of its own, while the log goes on.

Chunks lie in files beside the spool files, durable before an epoch is decided. What was read and not decided when a run
ends is read again by the next one: a kill repeats a few chunks. Snapshots of the database are taken one after the
other, and chunks are given on in that order, so that each sees at least what those before it saw.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from firnline.clock import jitter, monotonic
from firnline.errors import FirnlineError, SourceError
from firnline.faults import fault_point
from firnline.names import chunk_name
from firnline.sources.cdc.chunks import ChunkFile, SnapshotBegin, SnapshotPassed, TableLogged, WindowSeen
from firnline.sources.cdc.log import (
    AWAY,
    UNREADABLE,
    Chunk,
    TableChangedError,
    TableFacts,
    TableGoneError,
    TableReader,
)
from firnline.sources.cdc.position import LogPosition, TableSnapshot
from firnline.sources.cdc.schemas import TableState
from firnline.sources.cdc.spool import UNLESS_KEYED, Content, pack
from firnline.sources.cdc.spooling import Awaited, Spooler
from firnline.storage import Storage
from firnline.types import Json

logger = logging.getLogger(__name__)

Mode = Literal["initial", "never", "always"]

CHUNK_ROWS = 200_000
MAX_AHEAD = 4  # chunks that were read and that no epoch has given on
WINDOW_FILES = 16  # after so many more, while no chunk is read, it is found out which of them are of no use
LOOK_SECONDS = 30.0  # between two looks for tables that are new
WAIT_SECONDS = 0.1
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0  # between two tries to read a table
# For so long the log waits for a table that cannot be read whole, and when it is tried again afterwards.
HOLD_FAILURES, HOLD_SECONDS, HOLD_AGAIN_SECONDS = 4, 20.0, 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A snapshot that a person asked for."""

    request: str
    table: str
    where: str = ""
    empties: bool = False


@dataclass(slots=True)
class _Tried:
    """What is read, and tried again when it fails."""

    barrier: Json = None
    failures: int = 0
    not_before: float = 0.0
    error: FirnlineError | None = None


@dataclass(slots=True)
class _Cursor(_Tried):
    """Where the reading of a table goes on."""

    state: TableSnapshot = field(default_factory=lambda: TableSnapshot(""))  # of the last chunk that was read
    has_barrier: bool = False


@dataclass(frozen=True, slots=True)
class _Taken:
    """A chunk that was read, and the log that it waits for."""

    file: ChunkFile
    reached: Awaited


@dataclass(slots=True)
class _Whole(_Tried):
    """A table without a key, which is read whole: its begin and its chunks, once they are read.

    Until an epoch begins it, none of its changes is given on: the log waits, or its changes are left out of it. The
    snapshot sees them all, because it is taken while the log waits.
    """

    identity: str = ""  # of the table
    logged: str = ""  # of the table
    begin: SnapshotBegin | None = None
    chunks: list[ChunkFile] = field(default_factory=list)
    is_prepared: bool = False  # the log has its changes
    held_since: float | None = None  # the log waits for it since then; None: its changes are left out
    was_put_aside: bool = False  # the log went on without it
    serial: int = 0  # of the snapshot that is being read, or was
    is_read_now: bool = False
    gaps: int = 0  # of the log before it was read

    @property
    def may_hold(self) -> bool:
        """Whether the log may wait longer for it."""
        longest = HOLD_AGAIN_SECONDS if self.was_put_aside else HOLD_SECONDS
        return self.held_since is not None and monotonic() - self.held_since < longest


@dataclass(slots=True)
class _Shared:
    """What the thread and plans share, under one lock."""

    position: LogPosition | None = None  # of the newest plan
    tables: dict[str, TableFacts] | None = None  # that exist; None: nobody has looked yet
    cursors: dict[str, _Cursor] = field(default_factory=dict)  # by id of the snapshot
    taken: list[_Taken] = field(default_factory=list)  # in the order of their snapshots
    wholes: dict[str, _Whole] = field(default_factory=dict)  # by table, until their epoch is decided
    passing: dict[str, Awaited] = field(default_factory=dict)  # by id: where the log has passed such a table's snapshot
    serial: int = 0  # the highest one that was given to a snapshot
    seen: Json = None  # what every chunk sees that is read from now on; None: not known
    asked_at: str = ""  # the last spool file of the window when that was asked for
    has_looked: bool = False  # the tables without a key are known
    wants_look: bool = False  # now, not when it is due
    checked: set[str] = field(default_factory=set)  # tables that are due: somebody has looked since whether they exist
    changed: set[str] = field(default_factory=set)  # ids of snapshots whose tables have another key now
    # By table and what tells it from the one before: where the log has passed that one, or what is not in the log.
    replaced: dict[tuple[str, str], Awaited] = field(default_factory=dict)
    asked: dict[str, Asked] = field(default_factory=dict)  # by request
    refused: set[str] = field(default_factory=set)  # requests
    made: set[str] = field(default_factory=set)  # ids of this run
    error: FirnlineError | None = None  # of the last look at the tables
    hidden: dict[str, FirnlineError] = field(default_factory=dict)  # tables that the last look did not find, with why


class SnapshotTaker:
    """Takes the snapshots of one source."""

    def __init__(
        self,
        reader: TableReader,
        spooler: Spooler,
        storage: Storage,
        folder: str,
        *,
        mode: Mode,
        check_holder: Callable[[], None],
        name: str,
        named: Collection[str] = (),
        serial: int = 0,
    ) -> None:
        self._reader = reader
        self._named = named  # tables that the spec names one by one: the server may hide them
        self._spooler = spooler
        self._storage = storage
        self._folder = folder
        self._mode = mode
        self._check_holder = check_holder
        self._name = name
        self._shared = _Shared(serial=serial)
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"firnline tables {name}", daemon=True)

    # -- for plans ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; it closes its connections."""
        self._stopping.set()
        with self._news:
            self._news.notify_all()
        self._thread.join(LONGEST_PAUSE_SECONDS)

    def ask(self, asked: Asked) -> None:
        """Take note of a snapshot that a person asked for. Repeatable."""
        with self._news:
            if asked.request not in self._shared.asked:
                self._shared.asked[asked.request], self._shared.wants_look = asked, True
            self._news.notify_all()

    @property
    def refused(self) -> frozenset[str]:
        """The requests that are not answered, since their tables are gone or have no key; the log names them."""
        with self._news:
            return frozenset(self._shared.refused)

    def forget(self, requests: Sequence[str]) -> None:
        """Forget what a person asked for: the epoch that begins it is committed."""
        with self._news:
            for request in requests:
                self._shared.asked.pop(request, None)

    def follow(self, position: LogPosition) -> None:
        """Read on behind a position, that of the newest plan. One that went back makes chunks that were taken count
        again, or be read again."""
        with self._news:
            shared = self._shared
            shared.position = position
            running = {one.id: one for one in position.running.values()}
            for id_, one in running.items():
                cursor = shared.cursors.get(id_)
                numbers = {taken.file.number for taken in shared.taken if taken.file.snapshot == id_}
                if (
                    cursor is None
                    or cursor.state.again != one.again
                    or not numbers.issuperset(range(one.chunks + 1, cursor.state.chunks + 1))
                    or cursor.state.chunks < one.chunks
                ):
                    shared.taken = [taken for taken in shared.taken if taken.file.snapshot != id_]
                    shared.cursors[id_] = _Cursor(state=one)
            shared.cursors = {id_: cursor for id_, cursor in shared.cursors.items() if id_ in running}
            shared.taken = [taken for taken in shared.taken if taken.file.snapshot in running]
            for one in position.snapshots.values():
                if one.sees is not None and one.id not in shared.passing:
                    shared.passing[one.id] = self._spooler.wait_for(one.high)
            shared.changed &= running.keys()
            shared.checked &= position.due.keys()
            replaced = {_mark(table) for table in self._find_awaited(position, shared.tables)}
            shared.replaced = {one: awaited for one, awaited in shared.replaced.items() if one in replaced}
            is_known = len(replaced) == len(shared.replaced) and shared.checked == position.due.keys()
            shared.wants_look = shared.wants_look or not is_known or bool(self._find_left(position))
            self._news.notify_all()

    def forget_decided(self, position: LogPosition) -> None:
        """Forget chunks up to a position: its epoch is decided."""
        with self._news:
            done = position.snapshots
            self._shared.taken = [
                one
                for one in self._shared.taken
                if (state := done.get(one.file.table)) is None
                or state.id != one.file.snapshot
                or not (state.done or one.file.number <= state.chunks)
            ]
            for table in self._shared.wholes.keys() & done.keys():
                del self._shared.wholes[table]

    def begins(self, position: LogPosition) -> list[SnapshotBegin]:
        """Return the snapshots that the next epoch begins."""
        with self._news:
            shared = self._shared
            if shared.tables is None:
                return []
            pending = self._pending(position)
            begins = [one.begin for one in pending.values() if one.begin is not None]
            chosen: dict[str, Asked | None] = {}
            for table in shared.tables.values():
                if not table.key or table.name in pending:
                    continue
                known = position.snapshots.get(table.name)
                is_new = known is None and self._mode != "never"
                is_made = known is not None and known.id in shared.made
                is_due = table.name in position.due and table.name in shared.checked
                if is_new or is_due or (self._mode == "always" and not is_made):
                    chosen[table.name] = None
                elif known is not None and known.id in shared.changed:
                    chosen[table.name] = Asked(known.request, table.name, known.where)
            replaced = {table.name: table for table in self._find_replaced(position, shared.tables)}
            answered = {one.request for one in position.snapshots.values()}
            for asked in sorted(shared.asked.values(), key=lambda one: bool(one.where)):
                if asked.request in answered or asked.table not in shared.tables or asked.table in replaced:
                    continue
                if asked.where and (asked.table in position.running or asked.table in chosen):
                    continue  # some rows never take the place of all: they are read afterwards
                if shared.tables[asked.table].key:
                    chosen[asked.table] = asked
                else:
                    self._refuse(asked, "it has no key, so that its rows would come twice")
            for name, table in replaced.items():
                chosen.pop(name, None)
                if table.key and self._has_passed(table, position):
                    known = position.snapshots[name]
                    wanted = (one for one in shared.asked.values() if one.table == name and not one.where)
                    request = next((one.request for one in wanted if one.request not in answered), "")
                    chosen[name] = Asked(request if known.done else known.request, name, empties=True)
            if any(one.is_read_now for one in shared.wholes.values()):  # snapshots begin in the order of their serials
                chosen.clear()
            for name, asked_for in sorted(chosen.items()):
                id_ = _make_id(self._next_serial(position))
                shared.made.add(id_)
                facts = shared.tables[name]
                empties = position.due.get(name, False)
                begin = SnapshotBegin(
                    name, id_, facts.rows, empties=empties, identity=facts.identity, logged=facts.logged or ""
                )
                if asked_for is not None:
                    empties = empties or asked_for.empties
                    begin = replace(begin, where=asked_for.where, request=asked_for.request, empties=empties)
                begins.append(begin)
            # What sinks have of a table that was captured before is old.
            return [
                replace(one, empties=True) if one.table in position.left and not one.where else one for one in begins
            ]

    def _refuse(self, asked: Asked, reason: str) -> None:
        """Drop a request that cannot be answered."""
        if asked.request not in self._shared.refused:
            self._shared.refused.add(asked.request)
            facts = {"source": self._name, "table": asked.table, "reason": reason}
            logger.warning("table is not read again, and the request is dropped", extra=facts)

    def _find_replaced(self, position: LogPosition, tables: Mapping[str, TableFacts] | None) -> list[TableFacts]:
        """Return the tables that took the name of another one, whose rows are those of the position, and those of which
        the log lacks changes."""
        found = []
        for table in (tables or {}).values():
            known = position.snapshots.get(table.name)
            if known is None or (self._mode == "never" and known.done):
                continue
            if not table.key and not table.can_be_read:
                continue
            is_other = known.identity and table.identity and known.identity != table.identity
            if is_other or self._has_lapsed(table, position):
                found.append(table)
        return found

    def _find_awaited(self, position: LogPosition, tables: Mapping[str, TableFacts] | None) -> list[TableFacts]:
        """Return the tables for which the log must pass what came before: those that are replaced, and those of which
        it lacks changes."""
        replaced = self._find_replaced(position, tables)
        lapsed = [one for one in (tables or {}).values() if self._has_lapsed(one, position)]
        return [*replaced, *(one for one in lapsed if one not in replaced)]

    @staticmethod
    def _has_lapsed(table: TableFacts, position: LogPosition) -> bool:
        """Return whether the log lacks changes of a table behind what a position has of it."""
        known = position.logged.get(table.name)
        return bool(known and table.logged) and known != table.logged

    def find_logged(self, position: LogPosition) -> list[TableLogged]:
        """Return what makes the log have the changes of tables, where a position does not say it; of tables that are
        not read again, also where it says something else."""
        with self._news:
            found = []
            for table in (self._shared.tables or {}).values():
                if not table.logged or (self._mode != "never" and table.name not in position.snapshots):
                    continue
                if table.name not in position.logged:
                    found.append(TableLogged(table.name, table.logged))
                elif self._has_lapsed(table, position) and self._has_passed(table, position):
                    found.append(TableLogged(table.name, table.logged, self._reader.lapse))
            read_again = {table.name for table in self._find_replaced(position, self._shared.tables)}
            return [one for one in found if one.table not in read_again]

    def _has_passed(self, table: TableFacts, position: LogPosition) -> bool:
        """Return whether the log up to a position has all changes of the table that had the name before."""
        passed = self._shared.replaced.get(_mark(table))
        return passed is not None and passed.file is not None and passed.file <= position.spool

    def find_gone(self, position: LogPosition) -> list[str]:
        """Return the names that tables without a key took from others: these are forgotten, and the new ones read."""
        with self._news:
            replaced = self._find_replaced(position, self._shared.tables)
            gone = [one.name for one in replaced if not one.key and self._has_passed(one, position)]
            return list(dict.fromkeys([*gone, *self._find_due_wholes(position)]))

    def _find_due_wholes(self, position: LogPosition) -> list[str]:
        """Return the tables without a key that are due: the log says that they took the names of others."""
        tables = self._shared.tables or {}
        due = [tables[one] for one in position.due if one in self._shared.checked and one in tables]
        return [one.name for one in due if not one.key and one.can_be_read and self._mode != "never"]

    def _find_left(self, position: LogPosition) -> list[TableFacts]:
        """Return the tables without a key that are to be read anew, since what was read of them is forgotten."""
        if self._mode == "never":
            return []
        known = self._shared.wholes.keys() | position.snapshots.keys()
        tables = [one for one in (self._shared.tables or {}).values() if not one.key and one.can_be_read]
        return [one for one in tables if one.name in position.left and one.name not in known]

    def table_state(self, table: str) -> TableState:
        """Return how the server had a table at the last look. Without a key it is not read again, since its rows would
        come twice."""
        with self._news:
            shared = self._shared
            known = (shared.tables or {}).get(table)
            was_there = shared.position is not None and table in shared.position.tables
            if known is None and shared.tables is not None and was_there and table not in shared.hidden:
                return "gone"
            return "keyed" if known is None or known.key else "unkeyed"

    def holds_log(self, position: LogPosition) -> bool:
        """Return whether the log must wait: a table without a key is being read, and what its snapshot sees is not
        known yet. Nobody knows before the first look at the tables that succeeds."""
        with self._news:
            waits = any(one.held_since is not None for one in self._pending(position).values())
            return waits or not self._shared.has_looked

    def left_out(self, position: LogPosition) -> dict[str, Json]:
        """Return the tables without a key that are still to be read: their changes are left out of the log until
        then. So are those of a hidden table, if the log says that it has no key."""
        with self._news:
            given_on = position.schemas.keys() - position.left.keys()
            hidden = dict.fromkeys(self._find_hidden(position).keys() - given_on, UNLESS_KEYED)
            return {**hidden, **dict.fromkeys(self._pending(position))}

    def _find_hidden(self, position: LogPosition) -> dict[str, FirnlineError]:
        """Return why the server shows nothing of tables whose rows are still to be read."""
        asked = {one.table for one in self._shared.asked.values()}
        return {
            table: why
            for table, why in self._shared.hidden.items()
            if is_to_be_read(position, table, self._mode) or table in asked
        }

    def _pending(self, position: LogPosition) -> dict[str, _Whole]:
        """Return the tables without a key that are still to be begun behind a position."""
        wholes = self._shared.wholes
        given_on = position.schemas.keys() - position.snapshots.keys() - position.left.keys()
        for table in wholes.keys() & given_on:
            del wholes[table]  # changes of it were given on, by an epoch that was under way when it was found
            self._warn_of_earlier_rows(table)
        for one in wholes.values():
            if one.begin is not None and one.gaps != self._spooler.gaps:  # it lacks changes between it and the log
                one.begin, one.chunks, one.barrier = None, [], None
        return {table: one for table, one in wholes.items() if table not in position.snapshots}

    def _next_serial(self, position: LogPosition) -> int:
        shared = self._shared
        shared.serial = max(shared.serial, position.serial) + 1
        return shared.serial

    def wholes(self, begins: Sequence[SnapshotBegin]) -> list[ChunkFile]:
        """Return the chunks of the tables without a key that the next epoch begins and reads whole."""
        begun = {one.table for one in begins}
        with self._news:
            found = [one for table, one in self._shared.wholes.items() if table in begun and one.begin is not None]
            return [chunk for one in found for chunk in one.chunks]

    def passed(self, position: LogPosition) -> list[SnapshotPassed]:
        """Return the tables without a key whose snapshot the log has passed."""
        with self._news:
            return [
                SnapshotPassed(table, one.id)
                for table, one in position.snapshots.items()
                if one.sees is not None
                and (passed := self._shared.passing.get(one.id)) is not None
                and passed.file is not None
                and passed.file <= position.spool
            ]

    def ready(self, position: LogPosition, end: int) -> list[ChunkFile]:
        """Return the chunks that may be given on behind a position, by an epoch whose last spool file is `end`."""
        found: list[ChunkFile] = []
        states = dict(position.running)
        with self._news:
            for taken in self._shared.taken:
                file, state = taken.file, states.get(taken.file.table)
                if state is None or state.id != file.snapshot or file.number <= state.chunks:
                    continue
                if file.number != state.chunks + 1 or taken.reached.file is None or taken.reached.file > end:
                    break
                found.append(file.under(position.window))
                states[file.table] = replace(state, chunks=file.number)
        return found

    def trims(self, position: LogPosition, chunks: Sequence[ChunkFile]) -> list[WindowSeen]:
        """Return what makes the window shorter, for an epoch with these chunks; chunks that are left for later epochs
        may need all of it."""
        names = {chunk.name for chunk in chunks}
        with self._news:
            seen, self._shared.seen = self._shared.seen, None
            is_needed = any(one.file.name not in names for one in self._waiting(position))
            return [WindowSeen(seen, position.window)] if seen is not None and position.window and not is_needed else []

    def is_settled(self, position: LogPosition) -> bool:
        """Return whether no table is being read that can be."""
        try:
            return self.is_done(position)
        except FirnlineError:
            return True

    def is_done(self, position: LogPosition) -> bool:
        """Return whether all tables have been read.

        Raises:
            FirnlineError: why a table cannot be read, when all others have been.
        """
        with self._news:
            shared = self._shared
            tried: list[_Tried | None] = [shared.cursors.get(one.id) for one in position.running.values()]
            waits = any(one is None or one.error is None for one in tried)
            pending = self._pending(position).values()
            waits = waits or any(one.error is None or one.held_since is not None for one in pending)
            if waits or self._waiting(position):
                return False
            error = next((one.error for one in (*tried, *pending) if one is not None), shared.error)
            error = error or next(iter(self._find_hidden(position).values()), None)
            replaced = self._find_awaited(position, shared.tables) if shared.error is None else shared.replaced
            is_unknown = shared.error is None and shared.checked != position.due.keys()
            is_unknown = is_unknown or bool(self._find_left(position)) or bool(self._find_due_wholes(position))
            is_unknown = is_unknown or (shared.error is None and shared.wants_look and bool(shared.asked))
            if replaced or is_unknown or (shared.tables is None and error is None):
                return False
        if self.begins(position):
            return False
        if error is not None:
            raise error
        return True

    @property
    def trouble(self) -> str | None:
        """Why tables cannot be read now, by name; None if they can."""
        with self._news:
            shared, names = self._shared, self._names()
            found = [f"tables cannot be read: {shared.error.message}"] if shared.error is not None else []
            for id_, cursor in shared.cursors.items():
                if cursor.error is not None and id_ in names:
                    found.append(f"table {names[id_]} cannot be read: {_in_words(cursor.error)}")
            for table, whole in shared.wholes.items():
                if whole.error is not None:
                    without = ", and its changes are left out until it can" if whole.held_since is None else ""
                    found.append(f"table {table} cannot be read{without}: {_in_words(whole.error)}")
            for table, error in self._find_hidden(shared.position).items() if shared.position is not None else ():
                found.append(f"table {table} cannot be read: {_in_words(error)}")
        return "; ".join(found) or None

    def _names(self) -> dict[str, str]:
        position = self._shared.position
        return {one.id: table for table, one in position.running.items()} if position is not None else {}

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        looked_at, failures = 0.0, 0
        try:
            while not self._stopping.is_set():
                if monotonic() >= looked_at or (self._shared.wants_look and not failures):
                    failures = 0 if self._look() else failures + 1
                    looked_at = monotonic() + (_pause(failures) if failures else LOOK_SECONDS)
                if not self._read_next():
                    with self._news:
                        if not self._stopping.is_set():
                            self._news.wait(WAIT_SECONDS)
        finally:
            self._reader.close()

    def _look(self) -> bool:
        """Look which tables there are, and make the log have the changes of those that are new."""
        found: dict[str, TableFacts] | None = None
        failed: Mapping[str, FirnlineError] = {}
        hidden: dict[str, FirnlineError] = {}
        has_looked = False
        try:
            self._check_holder()
            with self._news:
                due = set(self._shared.position.due) if self._shared.position is not None else set()
                asked, self._shared.wants_look = list(self._shared.asked.values()), False
            tables = {table.name: table for table in self._reader.find_tables()}
            hidden = self._look_for_hidden(tables, asked)
            with self._news:
                known = self._shared.tables
                new = [table for name, table in tables.items() if name not in (known or {})]
                left = self._find_left(self._shared.position) if self._shared.position is not None else []
                self._find_wholes([*new, *(tables[one.name] for one in left if one.name in tables)])
                captured = self._shared.position.tables if self._shared.position is not None else []
            has_looked = True
            gone = [name for name in captured if name not in tables]
            if known is None or gone or any(_differ(table, known.get(name)) for name, table in tables.items()):
                failed = self._reader.prepare([*tables, *gone])
                tables = self._as_logged(tables)
            replaced = self._await_replaced(tables)
            found = {name: table for name, table in tables.items() if table.logged != ""}
            error = next(iter(failed.values()), None)
        except Exception as failure:  # whatever a client library raises
            error = _as_failure(failure)
        with self._news:
            if error is not None and self._shared.error is None:
                logger.log(_level(error), "tables cannot be read", extra={"source": self._name, "reason": str(error)})
            self._shared.error = error
            self._shared.has_looked |= has_looked
            if has_looked:
                known_before, self._shared.hidden = self._shared.hidden, hidden
                needed = self._find_hidden(self._shared.position) if self._shared.position is not None else {}
                for name in needed.keys() - known_before.keys():
                    self._warn_of(name, hidden[name])
            if found is not None:
                self._shared.tables = {name: table for name, table in found.items() if name not in failed}
                self._shared.replaced |= replaced
                self._shared.checked |= due
                for one in asked:
                    if one.table in hidden:
                        self._refuse(one, _in_words(hidden[one.table]))
                    elif one.table not in found:
                        self._refuse(one, "the server has no such table that is captured")
            for name, whole in self._shared.wholes.items():
                if found is not None and name in found and name not in failed:
                    whole.is_prepared = True
                    whole.identity, whole.logged = found[name].identity, found[name].logged or ""
                elif not whole.is_prepared:  # nobody knows for how long
                    whole.held_since = None
            self._news.notify_all()
        return found is not None

    def _look_for_hidden(self, tables: Collection[str], asked: Sequence[Asked]) -> dict[str, FirnlineError]:
        """Return why tables cannot be read that the server does not show, though the spec, the log or a person names
        them."""
        with self._news:
            position = self._shared.position
        known = position.tables if position is not None else []
        named = {*self._named, *known, *(one.table for one in asked)}
        return self._reader.find_unreadable(sorted(named.difference(tables)))

    def _as_logged(self, tables: Mapping[str, TableFacts]) -> dict[str, TableFacts]:
        """Return tables with what makes the log have their changes now, after `prepare`."""
        if not any(one.logged is not None for one in tables.values()):
            return dict(tables)
        now = {(one.name, one.identity): one.logged for one in self._reader.find_tables()}
        return {name: replace(one, logged=now.get((name, one.identity), "")) for name, one in tables.items()}

    def _await_replaced(self, tables: Mapping[str, TableFacts]) -> dict[tuple[str, str], Awaited]:
        """Wait until the log has passed the tables whose names others have now: their changes come before."""
        with self._news:
            position, awaited = self._shared.position, self._shared.replaced
            found = self._find_awaited(position, tables) if position is not None else []
            new = [table for table in found if _mark(table) not in awaited]
        if not new:
            return {}
        end = self._reader.find_end()
        for table in new:
            text = "another table has the name now: sinks that upsert lose the old one's rows, then it is read"
            known = position.snapshots.get(table.name) if position is not None else None
            if known is not None and known.identity == table.identity:
                text = f"table is read again, and sinks that upsert lose its rows first: {self._reader.lapse}"
            if known is not None and (self._mode != "never" or not known.done):  # an epoch warns of the others
                logger.warning(text, extra={"source": self._name, "table": table.name})
        return {_mark(table): self._spooler.wait_for(end) for table in new}

    def _find_wholes(self, new: Sequence[TableFacts]) -> None:
        """Take note of new tables without a key. From now on the log waits, until they are read."""
        position = self._shared.position
        for table in new:
            if table.key or self._mode == "never" or position is None or table.name in position.snapshots:
                continue
            is_given_on = table.name in position.schemas and table.name not in position.left
            if is_given_on or not table.can_be_read:
                self._warn_of_earlier_rows(table.name)
            else:
                self._shared.wholes.setdefault(table.name, _Whole(held_since=monotonic()))

    def _warn_of_earlier_rows(self, table: str) -> None:
        logger.warning(
            "table without a key: rows that were there before its changes are not read",
            extra={"source": self._name, "table": table},
        )

    def _read_next(self) -> bool:
        """Read the next chunk of the first table that has one; returns whether there was one."""
        if self._read_whole():
            return True
        with self._news:
            shared = self._shared
            position, names = shared.position, self._names()
            if position is None or len(self._waiting(position)) >= MAX_AHEAD:
                return False
            now = monotonic()
            chosen = next(
                (
                    (names[id_], cursor)
                    for id_, cursor in shared.cursors.items()
                    if id_ in names and not cursor.state.done and cursor.not_before <= now and id_ not in shared.changed
                ),
                None,
            )
        if chosen is None:
            return self._find_seen(position)
        table, cursor = chosen
        try:
            self._check_holder()
            self._read(table, cursor, position)
        except Exception as error:  # whatever a client library raises
            self._put_off(table, cursor, error)
            with self._news:
                if cursor.state.id in shared.cursors:  # others first
                    shared.cursors[cursor.state.id] = shared.cursors.pop(cursor.state.id)
        return True

    def _find_seen(self, position: LogPosition) -> bool:
        """Find out what later chunks see, if no chunk is read and the window grows; returns whether it did."""
        window = position.window
        with self._news:
            known = window.index(self._shared.asked_at) + 1 if self._shared.asked_at in window else 0
            if len(window) - known < WINDOW_FILES or self._waiting(position):
                return False
            self._shared.asked_at = window[-1]
        try:
            self._check_holder()
            seen = self._reader.find_seen()
        except Exception as error:  # the window stays as it is
            logger.info("cannot ask what snapshots see", extra={"source": self._name, "reason": str(error)})
            return False
        with self._news:
            self._shared.seen = seen
        return True

    def _read_whole(self) -> bool:
        """Read the next table without a key; returns whether there was one."""
        with self._news:
            now, position = monotonic(), self._shared.position
            chosen = next(
                (
                    (table, one)
                    for table, one in self._shared.wholes.items()
                    if one.is_prepared and one.begin is None and one.not_before <= now
                ),
                None,
            )
            if chosen is None or position is None:
                return False
            table, whole = chosen
            if whole.held_since is None:  # the log waits again
                whole.held_since, whole.barrier = now, None
            whole.serial, whole.is_read_now = self._next_serial(position), True
            whole.gaps = self._spooler.gaps
        try:
            self._check_holder()
            if whole.barrier is None:
                # Epochs that were under way when the log began to wait have no more of it than this.
                whole.barrier = self._reader.barrier(self._spooler.end_place)
            chunks = self._reader.read_whole(table, CHUNK_ROWS, barrier=whole.barrier)
            if chunks is not None:
                with contextlib.closing(chunks):
                    self._keep_whole(table, whole, chunks)
            elif whole.may_hold:
                whole.not_before = monotonic() + WAIT_SECONDS
            else:
                self._put_off_whole(table, whole, SourceError(f"transactions are open that may have changed {table}"))
        except TableGoneError:
            with self._news:
                self._shared.wholes.pop(table, None)
                (self._shared.tables or {}).pop(table, None)  # another one of that name is new
        except Exception as error:
            self._put_off_whole(table, whole, error)
        finally:
            with self._news:
                whole.is_read_now = False
        return True

    def _put_off_whole(self, table: str, whole: _Whole, error: Exception) -> None:
        """Take note of a failure. After some, the log goes on without the changes of the table."""
        self._put_off(table, whole, error)
        with self._news:
            if whole.may_hold and not whole.was_put_aside and whole.failures < HOLD_FAILURES:
                return
            whole.held_since, was_before, whole.was_put_aside = None, whole.was_put_aside, True
            if not was_before:
                logger.warning(
                    "the log goes on without the changes of a table that cannot be read; once it can, it is read whole",
                    extra={"source": self._name, "table": table},
                )

    def _keep_whole(self, table: str, whole: _Whole, chunks: Iterator[Chunk]) -> None:
        state = TableSnapshot(_make_id(whole.serial))
        files: list[ChunkFile] = []
        last: Chunk | None = None
        for chunk in chunks:
            files.append(self._write(table, state, chunk))
            state, last = replace(state, chunks=state.chunks + 1, rows=state.rows + chunk.rows), chunk
        assert last is not None
        begin = SnapshotBegin(
            table,
            state.id,
            state.rows,
            sees=last.sees,
            high=last.high,
            identity=whole.identity,
            logged=whole.logged,
        )
        with self._news:
            whole.begin, whole.chunks = begin, [replace(file, high=last.high) for file in files]
            whole.error = None
            self._news.notify_all()

    def _waiting(self, position: LogPosition) -> list[_Taken]:
        """Return the chunks that no epoch up to a position has given on."""
        states = position.running
        return [
            one
            for one in self._shared.taken
            if (state := states.get(one.file.table)) is None or one.file.number > state.chunks
        ]

    def _put_off(self, table: str, one: _Tried, error: Exception) -> None:
        """Take note of a failure; the table is tried again after a pause."""
        failure = _as_failure(error)
        if one.error is None:
            self._warn_of(table, failure)
        with self._news:
            one.failures += 1
            one.error, one.not_before = failure, monotonic() + _pause(one.failures)

    def _warn_of(self, table: str, failure: FirnlineError) -> None:
        """Log why a table cannot be read; it is tried again."""
        text = "table %s cannot be read, trying again: %s"
        logger.log(_level(failure), text, table, _in_words(failure), extra={"source": self._name})

    def _read(self, table: str, cursor: _Cursor, position: LogPosition) -> None:
        state = cursor.state
        if state.after is None and not cursor.has_barrier:
            # Files that a run before has spooled may lack the table: they are to be seen, too.
            cursor.barrier, cursor.has_barrier = self._reader.barrier(self._spooler.end_place), True
        barrier = cursor.barrier if state.after is None else self._reader.later_barrier(position.place)
        try:
            chunk = self._reader.read_chunk(
                table, state.after, CHUNK_ROWS, order=state.order, barrier=barrier, where=state.where
            )
        except TableGoneError:
            logger.warning("table is gone, its snapshot ends", extra={"source": self._name, "table": table})
            chunk = Chunk(b"", b"", 0, (), state.after, True, None, position.place, state.identity)
        except TableChangedError:
            self._begin_again(table, cursor)
            return
        if chunk is not None and state.identity and chunk.identity != state.identity:
            self._begin_again(table, cursor)
            return
        if chunk is None:
            self._put_off_barrier(table, cursor)
            return
        file = self._write(table, state, chunk)
        reached = self._spooler.wait_for(chunk.high)
        with self._news:
            cursor.failures, cursor.error = 0, None
            if self._shared.cursors.get(state.id) is cursor:
                rows = state.rows + chunk.rows
                cursor.state = replace(
                    state, after=chunk.last, order=chunk.order, chunks=file.number, rows=rows, done=chunk.is_last
                )
                self._shared.taken.append(_Taken(file, reached))

    def _begin_again(self, table: str, cursor: _Cursor) -> None:
        """Have an epoch begin the snapshot of a table again: it is another table now, or has another key."""
        if not self._look():
            raise self._shared.error or SourceError("tables cannot be read")
        with self._news:
            found = (self._shared.tables or {}).get(table)
            if found is None:
                return
            if not cursor.state.identity or found.identity == cursor.state.identity:
                facts = {"source": self._name, "table": table}
                logger.warning("table has another key now, and is read again from its first row", extra=facts)
            self._shared.changed.add(cursor.state.id)
            self._news.notify_all()

    def _put_off_barrier(self, table: str, cursor: _Cursor) -> None:
        if not cursor.failures:
            logger.info("snapshot waits for open transactions to end", extra={"source": self._name, "table": table})
        cursor.failures += 1
        with self._news:
            cursor.not_before = monotonic() + min(WAIT_SECONDS * 2.0 ** min(cursor.failures, 16), 5.0)

    def _write(self, table: str, state: TableSnapshot, chunk: Chunk) -> ChunkFile:
        facts: Mapping[str, Json] = {"table": table, "rows": chunk.rows, "last": chunk.last}
        data, checksum = pack(Content(chunk.context, chunk.content), json.dumps(facts, sort_keys=True).encode())
        name = chunk_name(state.id, state.chunks + 1, checksum)
        fault_point("spool.chunk.before")
        self._storage.put(f"{self._folder}/{name}", data)
        fault_point("spool.chunk.after")
        return ChunkFile(
            name,
            table,
            state.id,
            state.chunks + 1,
            state.again,
            chunk.key,
            chunk.last,
            chunk.is_last,
            chunk.sees,
            chunk.high,
            chunk.rows,
            len(data),
            checksum,
            order=chunk.order,
        )


def _differ(table: TableFacts, known: TableFacts | None) -> bool:
    """Return whether a table is another one than before, has another key, or is logged in another way or not at all."""
    if known is None or table.logged == "":
        return True
    return (table.identity, table.key, table.logged) != (known.identity, known.key, known.logged)


def _mark(table: TableFacts) -> tuple[str, str]:
    """Return what tells a table from one that had its name before, or was logged in another way."""
    return table.name, f"{table.identity} {table.logged or ''}"


def _make_id(serial: int) -> str:
    return f"{serial:08d}-{secrets.token_hex(4)}"


def is_to_be_read(position: LogPosition, table: str, mode: Mode) -> bool:
    """Return whether the rows of a table are still to be read, behind a position."""
    return table in position.due or (mode != "never" and table not in position.snapshots)


def _in_words(error: FirnlineError) -> str:
    """Return an error, with the statement that mends it if a right is missing."""
    return f"{error.message}. {error.hint}".rstrip(".;") if UNREADABLE in error.fields else error.message


def _level(error: FirnlineError) -> int:
    """Return how loud to log a failure: of a server that does not answer, the run warns."""
    return logging.INFO if AWAY in error.fields else logging.WARNING


def _as_failure(error: Exception) -> FirnlineError:
    """Return a failure as an error of ours."""
    if isinstance(error, FirnlineError):
        return error
    failure = SourceError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _pause(failures: int) -> float:
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_PAUSE_SECONDS)
    return longest * jitter(0.8, 1.2)
