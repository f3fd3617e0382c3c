"""The replication stream of a PostgreSQL server: messages of `pgoutput` as frames, cut at the ends of transactions."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq
from psycopg.pq import abc

from firnline.clock import monotonic
from firnline.errors import DamagedError, FirnlineError, SourceError, SourceGapError
from firnline.sources.cdc.frames import Frames
from firnline.sources.cdc.log import GAP_HINT, Cut, LogStream, Piece, pack_frame
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres import messages as m
from firnline.sources.postgres.library import Library
from firnline.sources.postgres.position import LastTransaction, LogPlace
from firnline.sources.postgres.server import PostgresServer, Slot, inserts_only
from firnline.sources.postgres.stream_kernel import ENDED, FAILED, LOST, OTHER
from firnline.types import Json

ASKED_SECONDS, MOST_ASKED = 10.0, 20  # a server that asks for so many answers within this time shuts down
STATUS_SECONDS = 5.0  # between two status messages; servers give up a silent reader after 60 s
CONNECT_SECONDS = 15.0
ASK_SECONDS = 0.2  # between two questions how far the server has sent its log
PROOF_SECONDS = 120.0  # for the server to send the last transaction again: it may have to decode much before
GATHER_SECONDS = 0.002  # for more rows to come, inside of a transaction
PASSED_ROWS = 100_000  # at once, without a look at the clock
_UNDEFINED = b"42704"  # the code of an object, here a publication, that does not exist
_FAILED = (pq.ExecStatus.FATAL_ERROR, pq.ExecStatus.NONFATAL_ERROR, pq.ExecStatus.BAD_RESPONSE)


class PostgresStream(LogStream):
    """Reads one slot."""

    def __init__(
        self,
        server: PostgresServer,
        slot: str,
        publication: str,
        tables: TablePatterns,
        *,
        creates: bool = True,
        failover: bool = False,
        name: str = "firnline",
        may_end_others: Callable[[], bool] = lambda: False,
    ) -> None:
        self._server = server
        self._slot = slot
        self._publication = publication
        self._tables = tables
        self._creates = creates  # a missing publication is created, and tables are added to it
        self._failover = failover  # the slot is one that standbys copy
        self._name = name
        self._may_end_others = may_end_others
        self._connection: abc.PGconn | None = None
        self._library: Library | None = None  # its functions, for compiled code
        self._out = Frames()
        self._flushed = 0
        self._status_at = 0.0
        self._place = LogPlace(0)
        self._before = tables  # that were captured when the log was read up to the position
        self._is_undecodable = False  # the server cannot read its own log where the slot is
        self._reset()

    def _reset(self) -> None:
        # Messages that describe tables and name types, by kind and number; those that were in force at the last cut and
        # are not any more (None: there was none); those of transactions that are passed over, for the next one.
        self._described: dict[bytes, bytes] = {}
        self._replaced: dict[bytes, bytes | None] = {}
        self._untold: list[bytes] = []
        self._captured: dict[int, bool] = {}
        self._proving: set[int] = set()  # tables that were captured, too, when the log was read up to the position
        self._known: npt.NDArray[np.int64] = np.zeros((0, 2), np.int64)  # the same for compiled code
        self._out.clear()
        self._begin: bytes | None = None  # of the transaction that goes on
        self._is_emitted = False  # whether its begin was returned: not before it has something for us
        self._rows = 0  # of that transaction
        self._asked: list[float] = []  # when the server asked for a status, without rows between
        self._idle_end, self._idle_at = 0, 0  # the server has sent everything before this place, at this time
        self._asked_at = 0.0
        self._kept: bytes | None = None  # a message of the stream that was received and not read

    # -- connecting -----------------------------------------------------------------------------------

    def begin(self) -> Json:
        self._server.check_settings()
        self._ensure_publication()
        if self._failover:
            self._server.check_failover(self._slot)
        slot = self._server.find_slot(self._slot) or self._server.create_slot(self._slot, failover=self._failover)
        return LogPlace(slot.confirmed).to_json()

    def begin_anew(self) -> Json:
        try:
            self._server.find_slot(self._slot)
        except SourceGapError:  # it has lost its log
            self._server.drop_slot(self._slot)
        if self._is_undecodable:
            self._ensure_publication()
            self._server.advance_slot(self._slot)
            self._is_undecodable = False
        return self.begin()

    def _ensure_publication(self) -> None:
        tables = self._server.find_tables(self._tables)
        if self._creates:
            self._server.check_may_publish(self._publication, tables)
            self._server.ensure_publication(self._publication, tables)
        else:
            self._server.require_publication(self._publication, tables)

    def open(self, position: Json) -> None:
        self.close()
        self._reset()
        place = LogPlace.from_json(position)
        self._connection = self._connect()
        self._library = Library(self._connection)
        place = self._prove_server(place)
        slot = self._find_slot()
        if self._failover and not slot.failover:
            self._server.check_failover(self._slot)
        if slot.active_pid is not None:
            slot = self._end_other(slot.active_pid)
        if slot.confirmed > place.lsn:
            raise self._gap(
                f"the slot {self._slot} was acknowledged up to {m.format_lsn(slot.confirmed)}, and the pipeline has "
                f"the log up to {m.format_lsn(place.lsn)} only: somebody else reads the slot, or spool files are lost"
            )
        end = self._server.end_lsn()
        if place.lsn > end:
            raise self._gap(
                f"the server's log ends at {m.format_lsn(end)}, before the position {m.format_lsn(place.lsn)}: it was "
                "restored from an older copy"
            )
        last = place.last
        is_provable = last is not None and slot.confirmed <= last.commit_lsn
        # What lies between the last transaction and the position has nothing for us; if it has, it is another history.
        start = place.lsn if place.is_chosen else slot.confirmed
        if last is not None and is_provable:
            start = last.commit_lsn
        self._start_replication(start)
        if self._find_slot().confirmed != slot.confirmed:  # it is ours from here on
            raise SourceError(f"{self._server.place}: somebody else has read the slot {self._slot} meanwhile")
        self._before = self._captured_before(place)
        self._place = replace(place, publication=self._publication, tables=self._tables.patterns)
        self._flushed, self._status_at = slot.confirmed, 0.0
        self._asked.clear()
        if is_provable:
            self._require_last(self._place)
        self._replaced.clear()

    def _find_slot(self) -> Slot:
        slot = self._server.find_slot(self._slot)
        if slot is None:
            raise self._gap(f"the slot {self._slot} does not exist any more")
        return slot

    def _captured_before(self, place: LogPlace) -> TablePatterns:
        """Return the tables that were captured when the log was read up to a place."""
        if place.publication:
            return TablePatterns(place.tables if place.publication == self._publication else (), "")
        return self._tables if self._creates else TablePatterns((), "")  # positions that do not say it

    def _connect(self) -> abc.PGconn:
        conninfo = self._server.conninfo(self._name, replication="database")
        connection = pq.PGconn.connect_start(conninfo.encode())
        deadline = monotonic() + CONNECT_SECONDS
        while True:
            status = connection.connect_poll()
            if status == pq.PollingStatus.OK:
                return connection
            if status == pq.PollingStatus.FAILED:
                raise self._refused(connection)
            reads = [connection.socket] if status == pq.PollingStatus.READING else []
            writes = [connection.socket] if status == pq.PollingStatus.WRITING else []
            ready = select.select(reads, writes, [], max(0.0, deadline - monotonic()))
            if not any(ready):
                connection.finish()
                raise SourceError(f"{self._server.place} does not answer", away=True)

    def _execute(self, command: str) -> abc.PGresult:
        """Send a command of the replication protocol, and wait for its answer."""
        connection = self._open_connection()
        connection.send_query(command.encode())
        deadline = monotonic() + CONNECT_SECONDS
        while connection.is_busy():
            self._wait(max(0.0, deadline - monotonic()))
            if monotonic() > deadline:
                raise SourceError(f"{self._server.place} does not answer")
        result = connection.get_result()
        if result is None or result.status in _FAILED:
            text = result.get_error_message().strip() if result is not None else "the connection was lost"
            raise self._server.translate(psycopg.OperationalError(text))
        return result

    def _prove_server(self, place: LogPlace) -> LogPlace:
        """Check that this server has the history of the position; returns the place with its identity."""
        result = self._execute("IDENTIFY_SYSTEM")
        system, timeline = str((result.get_value(0, 0) or b"").decode()), int(result.get_value(0, 1) or 0)
        self._drain()
        if place.system and place.system != system:
            raise self._gap(f"the server has the identity {system}, and the position is from {place.system}")
        if place.timeline and timeline < place.timeline:
            raise self._gap(f"the server is on timeline {timeline}, and the position is from {place.timeline}")
        if place.timeline and timeline > place.timeline:
            switched = self._switch_point(timeline, place.timeline)
            if place.lsn > switched:
                raise self._gap(
                    f"the server left timeline {place.timeline} at {m.format_lsn(switched)}, before the position "
                    f"{m.format_lsn(place.lsn)}: it was promoted or restored without the last changes"
                )
        return replace(place, system=system, timeline=timeline)

    def _switch_point(self, timeline: int, left: int) -> int:
        """Return where the server's history left a timeline."""
        result = self._execute(f"TIMELINE_HISTORY {timeline}")
        content = (result.get_value(0, 1) or b"").decode(errors="replace")
        self._drain()
        for line in content.splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == str(left):
                return m.parse_lsn(words[1])
        raise self._gap(f"the history of timeline {timeline} does not contain timeline {left}")

    def _drain(self) -> None:
        while self._open_connection().get_result() is not None:
            pass

    def _end_other(self, pid: int) -> Slot:
        """End the reader that holds the slot, if this run may; a run that lost its pipeline may not. Returns the slot
        as that reader left it."""
        if not self._may_end_others():
            raise SourceError(f"{self._server.place}: the slot {self._slot} is in use by process {pid} of the server")
        self._server.end_reader(pid)
        deadline = monotonic() + CONNECT_SECONDS
        while (slot := self._find_slot()).active_pid == pid:
            if monotonic() > deadline:
                raise SourceError(f"{self._server.place}: process {pid} of the server does not leave {self._slot}")
            time.sleep(0.05)
        return slot

    def _start_replication(self, lsn: int) -> None:
        names = ",".join(f'"{name}"' for name in self._publications())
        settings = f"proto_version '1', publication_names '{names}', messages 'true'"
        result = self._execute(f'START_REPLICATION SLOT "{self._slot}" LOGICAL {m.format_lsn(lsn)} ({settings})')
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise SourceError(f"{self._server.place}: the server does not stream (it answered {result.status})")

    def _publications(self) -> list[str]:
        """Return the publications to read: that of tables without a replica identity only if it exists."""
        second = inserts_only(self._publication)
        return [self._publication, *([second] if self._server.published(second) is not None else [])]

    def _require_last(self, place: LogPlace) -> None:
        """Read the last transaction before the position once more, and compare."""
        last = place.last
        assert last is not None
        deadline = monotonic() + PROOF_SECONDS
        self._place = replace(place, lsn=last.commit_lsn - 1)
        begin = commit = None
        while commit is None:
            message = self._next(max(0.0, min(1.0, deadline - monotonic())))
            if message is None:
                if monotonic() > deadline:
                    raise SourceError(f"{self._server.place}: the server did not send its last transaction again")
                if self._idle_end > last.end_lsn:
                    raise self._gap(f"transaction {last.xid} at {m.format_lsn(last.commit_lsn)} is not there any more")
                continue
            if message[0] == m.BEGIN:
                begin = m.Begin.parse(message)
            elif message[0] == m.COMMIT:
                commit = m.Commit.parse(message)
            elif message[0] in m.ROWS:
                self._pass_rows()
            elif message[0] in (m.RELATION, m.TYPE):
                self._note(message)
        found = LastTransaction(
            commit.commit_lsn, commit.end_lsn, begin.xid if begin is not None else 0, commit.committed_at
        )
        if found != last:
            raise self._gap(
                f"at {m.format_lsn(found.commit_lsn)} the server has transaction {found.xid}, and the pipeline read "
                f"transaction {last.xid} at {m.format_lsn(last.commit_lsn)}"
            )
        self._place = place

    def close(self) -> None:
        connection, self._connection, self._library = self._connection, None, None
        if connection is not None:
            connection.finish()

    # -- reading --------------------------------------------------------------------------------------

    def context(self, *, at_cut: bool) -> bytes:
        known = {**self._described, **self._replaced} if at_cut else self._described
        messages = sorted((one for one in known.values() if one is not None), key=lambda one: one[0] != m.TYPE)
        if self._begin is not None and self._is_emitted and not at_cut:
            messages.append(self._begin)
        return b"".join(pack_frame(message) for message in messages)

    def _describe(self, key: bytes, message: bytes | None) -> None:
        """Keep a message that describes a table or names a type; None: what was known of it is of no use any more."""
        self._replaced.setdefault(key, self._described.get(key))
        if message is not None:
            self._described[key] = message
        else:
            self._described.pop(key, None)

    def read(self, max_bytes: int, wait_seconds: float) -> Piece:
        frames = self._out
        cuts: list[Cut] = []
        deadline = monotonic() + wait_seconds
        while len(frames) < max_bytes:
            before = len(frames)
            self._read_rows(max_bytes)
            message = None
            if len(frames) < max_bytes:
                message = self._next(0.0 if frames else max(0.0, deadline - monotonic()))
            if message is None:
                if len(frames) > before and self._begin is not None and len(frames) < max_bytes:
                    time.sleep(GATHER_SECONDS)  # the server sends row by row, and the transaction goes on
                    continue
                if frames or monotonic() >= deadline:
                    break
                continue
            if not self._note(message):
                continue
            self._emit_begin()
            frames.append(message)
            if message[0] == m.COMMIT:
                cuts.append(self._cut(m.Commit.parse(message), len(frames)))
        return Piece(frames.take(), cuts, self._rows)

    def _emit_begin(self) -> None:
        """Append the begin of the transaction if it was not returned yet, and what those before it described."""
        if not self._is_emitted and self._begin is not None:
            self._is_emitted = True
            for message in (self._begin, *self._untold):
                self._out.append(message)
            self._untold.clear()

    def _read_rows(self, max_bytes: int) -> None:
        """Append rows as long as they come one after the other. The message that ends them is kept for `_next`, as is
        the first row of a transaction that we want."""
        if self._begin is None:  # rows outside of a transaction are none of ours
            return
        self._out.reserve(max_bytes)
        self._rows += self._take_rows(max_bytes if self._is_emitted else 0)

    def _take_rows(self, limit: int, *, passes_all: bool = False) -> int:
        """Append rows to the frames while those have less than `limit` bytes; returns how many."""
        if self._kept is not None or self._library is None:
            return 0
        self._send_status_if_due()
        ended, used, rows, message = self._library.take_rows(
            self._out.data, len(self._out), limit, self._known, passes_all=passes_all, most=PASSED_ROWS
        )
        self._out.end_at(used)
        if ended == OTHER:
            self._kept = message
        elif ended == ENDED:
            raise self._ended(self._open_connection())
        elif ended in (FAILED, LOST):
            raise self._refused(self._open_connection(), "the connection was lost")
        return rows

    def _pass_rows(self) -> None:
        """Pass over rows as long as they come one after the other: the last transaction may have many.

        The message that ends them is kept for `_next`.
        """
        self._take_rows(0, passes_all=True)

    def _is_captured(self, relation: bytes) -> bool:
        """Return whether the table of a row is captured. Rows outside of a transaction are none of ours."""
        number = int.from_bytes(relation, "big")
        if number not in self._captured or self._begin is None:
            raise DamagedError(f"{self._server.place}: a row of table {number} came before its description")
        return self._captured[number]

    def _completed(self, message: bytes) -> bytes:
        """Return a message for the spool. A table is described by the catalogue, too; it is that of now. TRUNCATE names
        captured tables alone: decoders may know others by old names."""
        if message[0] == m.TRUNCATE:
            emptied = m.Truncate.parse(message)
            captured = tuple(number for number in emptied.relations if self._captured.get(number))
            return replace(emptied, relations=captured).pack()
        if message[0] != m.RELATION:
            return message
        relation = m.Relation.parse(message)
        if not self._tables.covers(relation.table):
            return message
        with self._server.session() as db:
            facts = self._server.describe(db, relation.table)
        return message if facts is None else relation.complete(facts).pack()

    def _note(self, message: bytes) -> bool:
        """Keep what later frames depend on. Returns whether the message is one for the decoder."""
        kind = message[0]
        if kind in m.ROWS:
            captured = self._is_captured(message[1:5])
            self._rows += captured
            return captured
        if kind == m.RELATION:
            relation = m.Relation.parse(message)
            self._captured[relation.id] = captured = self._tables.covers(relation.table)
            self._known = np.array(list(self._captured.items()), np.int64)
            self._describe(message[:5], message if captured else None)
            if captured and self._before.covers(relation.table):
                self._proving.add(relation.id)
            else:
                self._proving.discard(relation.id)
            return captured
        if kind == m.TYPE:
            self._describe(message[:5], message)
            return True
        if kind == m.BEGIN:
            m.Begin.parse(message)
            self._begin, self._rows, self._is_emitted = message, 0, False
            return False
        if kind == m.TRUNCATE:
            emptied = m.Truncate.parse(message).relations
            self._rows += len(emptied)
            return bool(emptied)
        if kind == m.COMMIT:
            if not self._is_emitted:
                self._pass_over(m.Commit.parse(message))
            return self._is_emitted
        if kind in (m.ORIGIN, m.MESSAGE):
            return False
        raise DamagedError(f"{self._server.place}: the stream has a message of an unknown kind, {chr(kind)!r}")

    def _pass_over(self, commit: m.Commit) -> None:
        """End a transaction that has nothing for us: the place moves as it does when the server sends nothing."""
        self._check_end(commit)
        if commit.end_lsn > self._idle_end:
            self._idle_end, self._idle_at = commit.end_lsn, commit.committed_at
        self._begin = None

    def _check_end(self, commit: m.Commit) -> m.Begin:
        """Return the begin of the transaction that ends."""
        if self._begin is None:
            raise DamagedError(f"{self._server.place}: a transaction ends that has not begun")
        begin = m.Begin.parse(self._begin)
        if begin.commit_lsn != commit.commit_lsn:
            raise DamagedError(f"{self._server.place}: begin and end of a transaction name different places")
        return begin

    def _cut(self, commit: m.Commit, offset: int) -> Cut:
        begin = self._check_end(commit)
        last = LastTransaction(commit.commit_lsn, commit.end_lsn, begin.xid, commit.committed_at)
        self._place = replace(self._place, lsn=commit.end_lsn, last=last, seen_at=0, is_chosen=False)
        rows, self._rows, self._begin = self._rows, 0, None
        self._replaced.clear()
        return Cut(offset, self._place.to_json(), str(begin.xid), commit.committed_at, rows)

    def keep_alive(self) -> None:
        self._send_status_if_due()

    def has_reached(self, end: Json) -> bool:
        wanted = LogPlace.from_json(end).lsn
        if self._begin is None and max(self._place.lsn, self._idle_end) >= wanted:
            return True
        if self._begin is None and self._asked_at < monotonic() - ASK_SECONDS:
            self._send_status(wants_answer=True)
            self._asked_at = monotonic()
        return False

    def idle_position(self) -> Json | None:
        if self._begin is not None or self._idle_end <= self._place.lsn:
            return None
        self._place = replace(self._place, lsn=self._idle_end, seen_at=self._idle_at)
        return self._place.to_json()

    def idle_bytes(self) -> int:
        return max(0, self._idle_end - self._place.lsn) if self._begin is None else 0

    def _next(self, wait_seconds: float) -> bytes | None:
        """Return the next message of pgoutput behind the position; None if none came in time."""
        deadline = monotonic() + wait_seconds
        while True:
            self._send_status_if_due()
            connection = self._open_connection()
            try:
                size, data = (len(self._kept), self._kept) if self._kept is not None else connection.get_copy_data(1)
            except psycopg.Error as error:
                raise self._server.translate(error) from error
            self._kept = None
            if size > 0:
                message = self._take(bytes(data))
                if message is not None:
                    return message
                continue
            if size == -1:
                raise self._ended(connection)
            left = deadline - monotonic()
            if left <= 0:
                return None
            self._wait(min(left, STATUS_SECONDS))

    def _take(self, data: bytes) -> bytes | None:
        """Return the message of pgoutput in a message of the stream; None if it has none, or one that was read."""
        if data[0] == m.XLOG_DATA:
            self._asked.clear()
            message = data[m.DATA_HEADER :]
            if message[:1] == b"B" and m.Begin.parse(message).commit_lsn < self._place.lsn:
                self._skip()
                return None
            return self._completed(message)
        if data[0] == m.KEEPALIVE:
            sign = m.Keepalive.parse(data)
            if sign.end >= self._idle_end:
                self._idle_end, self._idle_at = sign.end, sign.sent_at
            if sign.wants_answer:
                self._answer()
            return None
        raise DamagedError(f"{self._server.place}: the stream has a message of an unknown kind, {chr(data[0])!r}")

    def _answer(self) -> None:
        """Send the status that the server asks for; leave a server that shuts down.

        Such a server waits until everything is acknowledged, which it is only behind an epoch that may never come. It
        asks again right after every answer; otherwise it asks a silent reader every 30 s.
        """
        now = monotonic()
        self._asked = [at for at in self._asked if at > now - ASKED_SECONDS] + [now]
        if len(self._asked) >= MOST_ASKED:
            raise SourceError(f"{self._server.place}: the server shuts down")
        self._send_status()

    def _skip(self) -> None:
        """Pass over a transaction before the position, but for what later ones depend on. It has no rows of tables that
        were captured then: all that have were read, and the stream begins behind them."""
        while True:
            message = self._next(STATUS_SECONDS)
            if message is None:
                continue
            if message[0] == m.COMMIT:
                return
            if message[0] in (m.RELATION, m.TYPE):
                if self._note(message):
                    self._untold.append(message)
            elif message[0] in (*m.ROWS, m.TRUNCATE):
                numbers = m.Truncate.parse(message).relations if message[0] == m.TRUNCATE else (_relation(message),)
                if not self._proving.isdisjoint(numbers):
                    raise self._gap(
                        f"before the position {m.format_lsn(self._place.lsn)} the server has changes that were not "
                        "there: it was restored from an older copy"
                    )

    def _wait(self, seconds: float) -> None:
        connection = self._open_connection()
        try:
            if select.select([connection.socket], [], [], seconds)[0]:
                connection.consume_input()
        except (psycopg.Error, OSError) as error:
            words = str(error).partition("\n")[0]
            raise SourceError(f"{self._server.place}: the connection was lost: {words}") from error

    # -- status ---------------------------------------------------------------------------------------

    def acknowledge(self, position: Json) -> None:
        self._flushed = max(self._flushed, LogPlace.from_json(position).lsn)
        self._status_at = 0.0

    def _send_status_if_due(self) -> None:
        if monotonic() - self._status_at > STATUS_SECONDS:
            self._send_status()

    def _send_status(self, *, wants_answer: bool = False) -> None:
        connection = self._open_connection()
        try:
            connection.put_copy_data(m.pack_status(self._flushed, time.time_ns() // 1000, wants_answer=wants_answer))
            connection.flush()
        except psycopg.Error as error:
            raise self._server.translate(error) from error
        self._status_at = monotonic()

    def end_position(self) -> Json:
        return replace(self._place, lsn=self._server.end_lsn()).to_json()

    def _open_connection(self) -> abc.PGconn:
        connection = self._connection
        if connection is None:
            raise SourceError(f"{self._server.place}: the stream is closed")
        return connection

    def _refused(self, connection: abc.PGconn, default: str = "the server refused the connection") -> FirnlineError:
        text = connection.error_message.decode(errors="replace").strip() if connection.status is not None else ""
        return self._server.translate(psycopg.OperationalError(text or default))

    def _ended(self, connection: abc.PGconn) -> FirnlineError:
        """Return why the server ended the stream."""
        result = connection.get_result() if not connection.is_busy() else None
        if result is None or result.status not in _FAILED:
            return self._refused(connection, "the server ended the stream")
        text = result.get_error_message().strip()
        if result.error_field(pq.DiagnosticField.SQLSTATE) == _UNDEFINED:
            self._is_undecodable = True
            names = ", ".join(self._publications())
            return SourceGapError(
                f"{self._server.place}: the server cannot read its log behind {m.format_lsn(self._place.lsn)}, since "
                f"the publication was not there yet ({names}): {text.splitlines()[0]}",
                hint="If you have changed `publication` or `slot` of the source, change it back, run until all is "
                f"read, and change it then. Otherwise the publication was dropped and created again. {GAP_HINT}",
            )
        return self._server.translate(psycopg.OperationalError(text))

    def _gap(self, reason: str) -> SourceGapError:
        return SourceGapError(f"{self._server.place}: {reason}", hint=GAP_HINT)


def _relation(message: bytes) -> int:
    return int.from_bytes(message[1:5], "big")
