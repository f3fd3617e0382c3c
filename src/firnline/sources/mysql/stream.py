"""The replication stream of MySQL and MariaDB.

A frame is an event with its checksum (see `events`). What is not needed is left out: transactions that touch no
captured table, rows and TABLE_MAP events of other tables, events without rows. Transactions that the server packed come
as the events in them.

A position is plain JSON:

    kind          mysql or mariadb
    file, pos     where the log stands
    created       when that file was begun, in seconds since 1970: name and time tell a file of the log from all others
    gtid_set      MySQL: all transactions so far; MariaDB: the last one of every domain; null without GTIDs
    server_uuid   MySQL's
    previous      MariaDB: `gtid_set` before the last transaction
    last          the last transaction: gtid, file, start, end, time of its commit where it happened first, checksum of
                  its last event, and of all its rows; null if none was seen

`open` begins before the last transaction and takes nothing before that very transaction came: on the same server with
the same places and checksums; on another one, that was promoted, with the same GTID and time of commit (MariaDB, whose
times are whole seconds: and the same rows). If its part of the log is purged, the file of the position itself must be
the same one.
"""

from __future__ import annotations

import math
import struct
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard
from isal import isal_zlib

from firnline.clock import monotonic
from firnline.errors import ConfigError, SourceError, SourceGapError
from firnline.sources.cdc.frames import Frames
from firnline.sources.cdc.log import GAP_HINT, Cut, LogStream, Piece
from firnline.sources.mysql import events as ev
from firnline.sources.mysql import kernel
from firnline.sources.mysql import stream_kernel as sk
from firnline.sources.mysql.connect import Dsn, connect, connect_any
from firnline.sources.mysql.events import GtidEvent, Header, damaged
from firnline.sources.mysql.gtid import GtidList, GtidSet, parse_gtid
from firnline.sources.mysql.packets import LARGEST, PacketReader
from firnline.sources.mysql.server import (
    COM_BINLOG_DUMP,
    COM_BINLOG_DUMP_GTID,
    Server,
    check_server,
    end_place,
    file_created,
    logged_gtids,
    logs_cascades,
    prepare_dump,
    purged_text,
    query,
    read_server,
    send,
)
from firnline.sources.mysql.statements import Kind, Statement, classify
from firnline.sources.mysql.tables import Table, read_table
from firnline.types import Json

HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0  # without any byte, heartbeats included, the connection counts as lost
ROTATE_BYTES = 600  # at most, of an event that names a file, as a frame
PROOF_SECONDS = 120.0  # for the last transaction to come again, with nothing else coming
FOREIGN_SECONDS = 20.0  # for transactions of another server to come before it is asked whether they will
PASSED_BYTES = 1 << 20  # of rows that are not needed, passed over at once
WINDOW_LOG = 27  # the largest window of compressed transactions that is unpacked: 128 MiB
_STATEMENT_HINT = f"Set binlog_format = ROW for all sessions. {GAP_HINT}"


class MySqlStream(LogStream):
    """The stream of one server, or of the first of several that answers.

    Args:
        dsn: The address; see `Dsn`.
        is_captured: Whether a table, as `database.table`, is captured.
        server_id: The id as which this reader is known to the server; no other reader or replica may have it.
        heartbeat_seconds: How often the server says that it is alive while nothing happens.
        partial_inserts: Take inserts whose columns the log leaves out (row images MINIMAL and NOBLOB leave out columns
            that got their default): they count as missing. Otherwise such an insert stops the stream.
        check_tables: Called with a connection, the server and no statement when the stream is opened, and with each
            DDL statement of a captured table behind which the log may lack changes; refuses what cannot be captured.
    """

    def __init__(
        self,
        dsn: str,
        is_captured: Callable[[str], bool],
        server_id: int,
        *,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        partial_inserts: bool = False,
        check_tables: Callable[[Any, Server, str, Sequence[str]], object] = lambda *_: None,
    ) -> None:
        self._dsn = Dsn.parse(dsn)
        self._is_captured = is_captured
        self._server_id = server_id
        self._heartbeat = heartbeat_seconds
        self._partial_inserts = partial_inserts
        self._check_tables = check_tables
        self._host = self._dsn.hosts[0]
        self._server: Server | None = None
        self._packets: PacketReader | None = None
        self._created: dict[tuple[str, str], int | None] = {}  # by server and file
        self._out = Frames()
        self._reset()

    def _reset(self) -> None:
        """Forget everything of the last connection."""
        self._out.clear()
        self._cuts: list[Cut] = []
        self._unpacked: Iterator[bytes] | None = None  # the events of a packed transaction
        self._waiting: bytes | None = None  # one of them that did not fit into the last piece
        self._file, self._pos, self._file_created = "", 0, 0
        self._format = b""
        self._has_checksums = True
        self._sizes: dict[tuple[int, int], float] = {}  # by table id and type of event: bytes of a row, as measured
        self._gtids: GtidSet | GtidList | None = None
        self._previous = ""
        self._last: dict[str, Any] | None = None
        self._expected: dict[str, Any] | None = None  # the transaction that proves continuity
        self._must_be_first = self._is_same_server = True
        self._at_cut: tuple[str, int, bytes] | None = None  # file, position and format of the last cut
        self._reached: tuple[int, int] | None = None  # the last cut, or where the stream was opened; on this server
        self._passed = 0  # bytes of the log since the last cut or idle position
        self._awaited: dict[str, float] = {}  # by GTIDs for which somebody waits: since when
        self._named = ("", -1)  # file and high part of the position that frames have told
        self._end_transaction()

    def _end_transaction(self) -> None:
        self._gtid: GtidEvent | None = None
        self._gtid_frame = b""
        self._start = ("", 0)
        self._is_begun = self._is_xa = self._is_emitted = self._is_skipped = False
        self._rows = 0
        self._digest = 0  # of all rows of the transaction
        self._maps: dict[int, tuple[bool, bytes]] = {}  # of tables: captured, and the frame

    # -- the contract --

    def begin(self) -> Json:
        db, host = connect_any(self._dsn, self._dsn.hosts)
        try:
            server = read_server(db, host)
            check_server(db, server, self._dsn.user, self._server_id)
            self._check_tables(db, server, "", ())
        finally:
            db.close()
        return self.end_position()

    def begin_anew(self) -> Json:
        return self.begin()

    def open(self, position: Json) -> None:
        self.close()
        self._reset()
        db, self._host = connect_any(self._dsn, self._dsn.hosts)
        try:
            server = self._server = read_server(db, self._host)
            check_server(db, server, self._dsn.user, self._server_id)
            self._check_tables(db, server, "", ())
            place: Any = position
            self._begin(db, server, place)
        except BaseException:
            if self._packets is None:
                db._force_close()
            self.close()
            raise

    def context(self, *, at_cut: bool) -> bytes:
        file, pos, form = self._at_cut if at_cut and self._at_cut is not None else (self._file, self._pos, self._format)
        frames = [ev.rotate_event(file, pos >> 32 << 32), form]
        if not at_cut and self._gtid is not None and not self._is_skipped:
            frames.append(self._gtid_frame)
            frames += [frame for captured, frame in self._maps.values() if captured]
        return b"".join(_framed(frame) for frame in frames)

    def read(self, max_bytes: int, wait_seconds: float) -> Piece:
        deadline = monotonic() + wait_seconds
        packets = self._reader()
        while True:
            while self._step(packets, max_bytes):
                pass
            is_full = self._unpacked is not None or packets.has_packet()
            if self._out and (is_full or not packets.fill(0.0)):
                break
            if not self._out:
                left = deadline - monotonic()
                if not packets.fill(max(0.0, left)) and left <= 0:
                    break
        piece = Piece(self._out.take(), tuple(self._cuts), self._rows if self._is_emitted else 0)
        self._cuts = []
        return piece

    def keep_alive(self) -> None:
        """Nothing to do: the server waits until it can send."""

    def has_reached(self, end: Json) -> bool:
        if self._gtid is not None or self._expected is not None:
            return False
        words = end["gtid_set"] or ""
        if isinstance(self._gtids, GtidList):  # MariaDB: a server has no UUID by which to know it
            is_reached = self._gtids.contains(GtidList.parse(words))
        elif self._server is not None and end["server_uuid"] == self._server.uuid:
            return ev.place_order(self._file, self._pos) >= ev.place_order(end["file"], end["pos"])
        else:
            is_reached = isinstance(self._gtids, GtidSet) and self._gtids.contains(GtidSet.parse(words))
        if is_reached:
            self._awaited.pop(words, None)
        elif monotonic() - self._awaited.setdefault(words, monotonic()) >= FOREIGN_SECONDS:
            self._check_end(words)
        return is_reached

    def _check_end(self, words: str) -> None:
        """Refuse to wait for transactions that another server has, and the one whose log is read has not."""
        server = self._server
        assert server is not None
        db = connect(self._dsn, server.host)
        try:
            if server.is_mariadb:
                lacking = str(GtidList.parse(words).minus(GtidList.parse(logged_gtids(db, server))))
            else:
                executed = query(db, server.host, "SELECT @@GLOBAL.gtid_executed")[0][0]
                lacking = str(GtidSet.parse(words).minus(GtidSet.parse(str(executed))))
        finally:
            db.close()
        if lacking:
            raise ConfigError(
                f"tables were read from another host than the log, which has the transactions {lacking}; server "
                f"{_at(server)}, whose log is read, does not have them",
                hint="Take that host out of dsn, or snapshot_dsn: it has transactions of its own. Then run again.",
            )
        self._awaited[words] = math.inf  # they will come

    def idle_position(self) -> Json | None:
        is_behind = self._reached is None or ev.place_order(self._file, self._pos) > self._reached
        if not is_behind or self._gtid is not None or self._expected is not None:
            return None
        self._passed = 0
        return self._position()

    def idle_bytes(self) -> int:
        return self._passed if self._gtid is None else 0

    def acknowledge(self, position: Json) -> None:
        """Nothing to do: the server does not keep its log for readers."""

    def end_position(self) -> Json:
        db = connect(self._dsn, self._host)
        try:
            server = read_server(db, self._host)
            end = end_place(db, server)
        finally:
            db.close()
        key = (server.uuid, end["file"])
        if key not in self._created:
            self._created = {key: file_created(self._dsn, server, end["file"])}
        return {**end, "created": self._created[key] or 0}

    def close(self) -> None:
        packets, self._packets = self._packets, None
        if packets is not None:
            packets.close()

    def check(self) -> None:
        """Refuse a server whose settings do not allow change capture; for a dry run.

        Raises:
            ConfigError: a setting is wrong; the hint has the statement that mends it.
            SourceError: no server answers.
        """
        db, host = connect_any(self._dsn, self._dsn.hosts)
        try:
            check_server(db, read_server(db, host), self._dsn.user, self._server_id)
        finally:
            db.close()

    def _reader(self) -> PacketReader:
        packets = self._packets
        if packets is None:
            raise SourceError("the stream is closed", hint="Open it again.")
        return packets

    # -- opening --

    def _begin(self, db: Any, server: Server, place: dict[str, Any]) -> None:
        """Ask for the log from before the last transaction on, and wait until that transaction has come."""
        if place.get("kind") != server.kind:
            raise _gap(f"the position is of {place.get('kind')}, and server {_at(server)} is {server.kind}")
        self._last, self._previous = place["last"], place["previous"]
        self._file, self._pos, self._file_created = place["file"], place["pos"], place["created"]
        replica = str(uuid.uuid5(uuid.NAMESPACE_OID, f"firnline-{self._server_id}"))
        prepare_dump(db, server, heartbeat_seconds=self._heartbeat, replica=replica)
        try:
            self._ask(db, server, place)
        except SourceGapError as error:
            if not self._was_reset(server, place):
                raise
            raise _gap(
                f"the log of server {_at(server)} was reset (RESET MASTER, RESET BINARY LOGS AND GTIDS, or a restored "
                f"server): its files begin anew, and {place['file']}, which was read before, is gone"
            ) from error

    def _was_reset(self, server: Server, place: dict[str, Any]) -> bool:
        """Return whether the files of a log were numbered anew since a position: purging takes the oldest first, and a
        file keeps its name."""
        if place["server_uuid"] != server.uuid:
            return False
        db = connect(self._dsn, server.host)
        try:
            files = [str(row[0]) for row in query(db, server.host, "SHOW BINARY LOGS")]
        finally:
            db.close()
        if place["file"] in files:
            return bool(self._created_of(server, place["file"]) != place["created"])
        return any(ev.place_order(file, 0) < ev.place_order(place["file"], 0) for file in files)

    def _ask(self, db: Any, server: Server, place: dict[str, Any]) -> None:
        """Send the command for the log behind a position, and wait for the proof that it continues there."""
        if server.is_mariadb:
            command = self._from_list(db, server, place)
        elif server.has_gtids and place["gtid_set"] is not None:
            command = self._from_set(db, server, place)
        else:
            command = self._from_file(server, place)
        if self._is_same_server:
            self._reached = ev.place_order(place["file"], place["pos"])
        self._has_checksums = server.checksum == "CRC32"
        self._packets = PacketReader(db, server, max(SILENCE_SECONDS, 4 * self._heartbeat))
        send(db, command)
        self._await_proof(self._packets)

    def _from_set(self, db: Any, server: Server, place: dict[str, Any]) -> bytes:
        rows = query(db, server.host, "SELECT @@GLOBAL.gtid_executed, @@GLOBAL.gtid_purged")
        executed, purged = GtidSet.parse(str(rows[0][0])), GtidSet.parse(str(rows[0][1]))
        ours = GtidSet.parse(place["gtid_set"])
        if lacking := ours.minus(executed):
            raise _gap(
                f"server {_at(server)} has not the transactions {lacking}, which were read before: another history"
            )
        if lost := purged.minus(ours):
            raise _gap(f"server {_at(server)} has purged the transactions {lost}, which were not read yet")
        self._gtids = ours
        asked = ours
        last = place["last"]
        if last is not None and last["gtid"] and not purged.has(*parse_gtid(last["gtid"])):
            self._expected = last
            self._must_be_first = self._is_same_server = server.uuid == place["server_uuid"]
            asked = ours.copy()
            asked.remove(*parse_gtid(last["gtid"]))
        else:
            self._prove_file(server, place)
        data = asked.encode()
        return struct.pack("<BHIIQI", COM_BINLOG_DUMP_GTID, 0, self._server_id, 0, 4, len(data)) + data

    def _from_list(self, db: Any, server: Server, place: dict[str, Any]) -> bytes:
        """Ask MariaDB for everything behind the last transaction of every domain."""
        self._gtids = GtidList.parse(place["gtid_set"] or "")
        last = place["last"]
        if last is not None:
            domain, _, number = last["gtid"].split("-")
            log = GtidList.parse(str(query(db, server.host, "SELECT @@GLOBAL.gtid_binlog_pos")[0][0]))
            if log.number(int(domain)) < int(number):
                raise _gap(f"server {_at(server)} has not the transaction {last['gtid']}, which was read before")
        state = place["gtid_set"] or ""
        if last is not None and self._created_of(server, last["file"]) == last["created"]:
            self._expected, state = last, place["previous"]
        elif last is not None and place["created"] != self._created_of(server, place["file"]):
            # Another server than the one that was read, or a purged file: the GTID alone leads to its transaction.
            self._expected, state, self._is_same_server = last, place["previous"], False
        else:
            self._prove_file(server, place)
        words = f"SET @slave_connect_state = '{state}', @slave_gtid_strict_mode = 1, @slave_gtid_ignore_duplicates = 0"
        query(db, server.host, words)
        return struct.pack("<BIHI", COM_BINLOG_DUMP, 4, 0, self._server_id)

    def _from_file(self, server: Server, place: dict[str, Any]) -> bytes:
        if place["server_uuid"] != server.uuid:
            raise _gap(
                f"server {_at(server)} is another one ({server.uuid}) than the one that was read "
                f"({place['server_uuid']}); without GTIDs a position holds on one server only"
            )
        file, start = place["file"], place["pos"]
        last = place["last"]
        if last is not None and self._created_of(server, last["file"]) is not None:
            self._expected, file, start = last, last["file"], last["start"]
        else:
            self._prove_file(server, place)
        if start >> 32:
            raise _gap(
                f"position {start} of {file} lies behind 4 GiB, where only GTIDs lead", hint="Set gtid_mode = ON."
            )
        return struct.pack("<BIHI", COM_BINLOG_DUMP, start, 0, self._server_id) + str(file).encode()

    def _prove_file(self, server: Server, place: dict[str, Any]) -> None:
        """Prove continuity by the file of the position: files of a log are only ever appended to."""
        if place["server_uuid"] != server.uuid:
            raise _gap(
                f"server {_at(server)} is another one than the one that was read, and has not the last transaction"
            )
        created = self._created_of(server, place["file"])
        if created is None:
            raise _gap(purged_text(server, place["file"]))
        if created != place["created"]:
            raise _gap(
                f"the log file {place['file']} of server {_at(server)} is another one than the one that was read"
            )
        db = connect(self._dsn, server.host)
        try:
            sizes = {str(row[0]): int(row[1]) for row in query(db, server.host, "SHOW BINARY LOGS")}
        finally:
            db.close()
        if sizes.get(place["file"], 0) < place["pos"]:
            raise _gap(f"the log file {place['file']} of server {_at(server)} ends before position {place['pos']}")

    def _created_of(self, server: Server, file: str) -> int | None:
        return file_created(self._dsn, server, file)

    def _await_proof(self, packets: PacketReader) -> None:
        """Read until the format of the log is known and the last transaction has come again."""
        quiet_since = monotonic()
        while not self._format or (self._expected is not None and self._must_be_first):
            before = (self._file, self._pos)
            if not self._step(packets, 1):
                packets.fill(1.0)
            if (self._file, self._pos) != before:
                quiet_since = monotonic()
            elif monotonic() - quiet_since > PROOF_SECONDS:
                raise self._no_proof("it did not come again")

    def _no_proof(self, why: str) -> SourceGapError:
        last: Any = self._expected or {}
        name = last.get("gtid") or f"{last.get('file')}:{last.get('start')}"
        server = self._server
        assert server is not None
        return _gap(f"the log of server {_at(server)} does not continue: of the last transaction, {name}, {why}")

    # -- events --

    def _step(self, packets: PacketReader, max_bytes: int) -> bool:
        """Take one event from the buffer; return False if it has no whole one, or the piece is full."""
        if self._unpacked is not None:
            event = self._waiting if self._waiting is not None else next(self._unpacked, None)
            self._waiting = None
            if event is None:
                self._unpacked = None
            elif self._fits(len(event), max_bytes):
                self._take(memoryview(event), True)
            else:
                self._waiting = event
                return False
            return True
        if not packets.has_packet() or not self._fits(packets.peek_size(), max_bytes):
            return False
        if packets.is_event_of(ev.TRANSACTION_PAYLOAD):
            self._unpacked = self._unpack(packets)
        elif not self._take_many(packets, max_bytes):
            self._take(packets.take_event(), self._has_checksums)
        return True

    def _fits(self, size: int, max_bytes: int) -> bool:
        """Return whether a frame of this size, and what must stand before it, fits into the piece."""
        if not self._out:
            return True
        before = 0 if self._is_emitted else len(self._gtid_frame) + ROTATE_BYTES
        return len(self._out) + size + before + 4 <= max_bytes

    def _take_many(self, packets: PacketReader, max_bytes: int) -> bool:
        """Take events with rows of one table, if the next ones are such; `_take` would do the same with each."""
        front = packets.rows_at_front()
        if front is None or not self._has_checksums or self._is_xa:
            return False
        kind, table_id = front
        if table_id not in self._maps:
            return False
        captured, _ = self._maps[table_id]
        is_wanted = captured and not self._is_skipped
        row_bytes = self._sizes.get((table_id, kind), 0.0)
        if (is_wanted and not self._is_emitted) or (captured and not row_bytes):
            return False
        out = self._out
        start, end = packets.bounds
        before = len(out)
        limit = max_bytes if is_wanted else before + PASSED_BYTES
        out.reserve(limit)
        state = np.array((0, start, before, self._pos, self._passed, 0, self._digest, 0), np.int64)
        must_be_whole = captured and kind in ev.WRITES and not self._partial_inserts
        bitmaps = 2 if kind in ev.UPDATES else 1
        sk.take_rows(packets.data, end, out.data, limit, table_id, kind, bitmaps, must_be_whole, row_bytes, state)
        taken, start, used, pos, passed, rows, digest, checksum = state.tolist()
        if isal_zlib.crc32(out.view[before:used]) != checksum:
            raise damaged(f"an event before {self._file}:{pos} does not match its checksum")
        packets.drop_to(start)
        self._pos, self._passed, self._digest = pos, passed, digest
        if captured:
            self._rows += rows
        if is_wanted:
            out.end_at(used)
        return bool(taken)

    def _take(self, event: memoryview, has_checksum: bool) -> None:
        """Take one event: check it, note what it tells, and append its frame if it is needed."""
        if len(event) < ev.HEADER_SIZE:
            raise damaged(f"an event has {len(event)} bytes")
        header = Header(*ev.HEADER.unpack_from(event))
        if header.size != len(event):
            raise damaged(f"an event of {header.size} bytes has {len(event)}")
        kind = header.type
        has_checksum = has_checksum or kind == ev.FORMAT_DESCRIPTION
        end = len(event) - ev.CHECKSUM_SIZE
        if has_checksum:
            if end < ev.HEADER_SIZE or ev.checksum(event[:end]) != int.from_bytes(event[end:], "little"):
                raise damaged(f"the event before {self._file}:{header.log_pos} does not match its checksum")
            body = event[ev.HEADER_SIZE : end]
        else:
            body = event[ev.HEADER_SIZE :]
        if kind in ev.UNPACKED:
            unpacked = ev.unpack_compressed(header, body)
            self._take(memoryview(unpacked), True)
            return
        if kind not in (ev.HEARTBEAT, ev.HEARTBEAT_V2, ev.ROTATE, ev.FORMAT_DESCRIPTION) and header.log_pos:
            self._advance(header)
        frame = event if has_checksum else memoryview(ev.make_event(header, body))
        if kind in ev.ROWS:
            self._take_rows(header, body, frame)
        elif kind == ev.TABLE_MAP:
            table_id, database, name = ev.read_table_name(body)
            captured = not self._is_skipped and self._is_captured(f"{database}.{name}")
            self._maps[table_id] = (captured, bytes(frame) if captured else b"")
            if captured:
                self._emit(frame)
        elif kind in ev.GTIDS:
            self._take_gtid(header, body, frame)
        elif kind == ev.XID:
            self._finish(header, frame)
        elif kind == ev.QUERY:
            self._take_query(header, body, frame)
        elif kind == ev.ROTATE:
            self._take_rotate(body)
        elif kind == ev.FORMAT_DESCRIPTION:
            self._has_checksums = ev.has_checksums(event[ev.HEADER_SIZE :])
            self._format, self._file_created = bytes(event), header.timestamp
            if header.log_pos:
                self._advance(header)
        elif kind == ev.XA_PREPARE:
            self._finish(header, frame)
        elif kind in (ev.HEARTBEAT, ev.HEARTBEAT_V2):
            self._take_heartbeat(header, body)
        elif kind == ev.PARTIAL_UPDATE:
            if self._maps.get(int.from_bytes(body[:6], "little"), (True, b""))[0]:
                hint = f"Run on the server: SET PERSIST binlog_row_value_options = ''; {GAP_HINT}"
                raise self._stop(header, "PARTIAL_UPDATE_ROWS, which holds parts of JSON values", hint)
        elif kind == ev.INCIDENT:
            raise self._stop(header, "INCIDENT: the server lost events of its log", GAP_HINT)
        elif kind not in ev.SILENT and not header.flags & ev.IGNORABLE:
            name = ev.NAMES.get(kind, f"unknown type {kind}")
            raise self._stop(header, f"{name}, which this version of Firnline does not read", _STATEMENT_HINT)

    def _stop(self, header: Header, what: str, hint: str) -> SourceGapError:
        return SourceGapError(f"the log at {self._file}:{header.log_pos} has an event {what}", hint=hint)

    def _advance(self, header: Header) -> None:
        """Note where the log stands; headers have 32 bits of it."""
        place = self._pos >> 32 << 32 | header.log_pos
        if place < self._pos - (1 << 31):
            place += 1 << 32
        self._passed += max(0, place - self._pos)
        self._pos = place

    def _emit(self, frame: memoryview | bytes) -> None:
        """Append a frame of the open transaction."""
        if self._is_skipped:
            return
        if not self._is_emitted:
            self._is_emitted = True
            if self._named != (self._file, self._pos >> 32):
                self._named = (self._file, self._pos >> 32)
                self._append(ev.rotate_event(self._file, self._pos >> 32 << 32))
            if self._gtid_frame:
                self._append(self._gtid_frame)
        self._append(frame)

    def _append(self, frame: memoryview | bytes) -> None:
        self._out.append(frame)

    def _take_gtid(self, header: Header, body: memoryview, frame: memoryview) -> None:
        if self._gtid is not None:
            raise damaged(f"a transaction begins at {self._file}:{header.log_pos} before another one has ended")
        gtid = self._gtid = ev.read_gtid(header, body)
        self._gtid_frame = bytes(frame)
        self._start = (self._file, self._pos - header.size)
        is_mariadb = header.type == ev.MARIADB_GTID
        self._is_begun = is_mariadb and not gtid.is_standalone
        self._is_xa = gtid.is_xa
        expected = self._expected
        if expected is not None:
            self._is_skipped = self._is_expected(gtid, expected)
            is_other_domain = is_mariadb and not self._is_same_server and gtid.server != expected["gtid"].split("-")[0]
            if not self._is_skipped and self._must_be_first and not is_other_domain:
                raise self._no_proof(f"there is {gtid.id or self._place(self._start)} instead")

    def _is_expected(self, gtid: GtidEvent, expected: dict[str, Any]) -> bool:
        """Return whether a transaction is the one that must come again.

        Raises:
            SourceGapError: it has the same id, and is another one.
        """
        if expected["gtid"] and gtid.id != expected["gtid"]:
            return False
        if not expected["gtid"] and self._start != (expected["file"], expected["start"]):
            return False
        if gtid.original_at != expected["at"]:
            raise self._no_proof("another one came under its name: it was committed at another time")
        return True

    def _place(self, place: tuple[str, int]) -> str:
        return f"{place[0]}:{place[1]}"

    def _take_query(self, header: Header, body: memoryview, frame: memoryview) -> None:
        text = ev.read_query(body)
        folds_names = self._server is not None and self._server.folds_names
        statement = classify(text.statement, text.database, sql_mode=text.sql_mode, folds_names=folds_names)
        kind = statement.kind
        if kind in (Kind.DDL, Kind.TRUNCATE):
            self._digest = ev.checksum(text.statement.encode(), self._digest)
        if kind is Kind.BEGIN:
            self._is_begun = True
            return
        if kind is Kind.XA_START:
            self._is_begun = self._is_xa = True
            return
        if kind is Kind.COMMIT:
            self._finish(header, frame)
            return
        if kind in (Kind.ROLLBACK, Kind.ROLLBACK_TO) and self._is_emitted:
            raise self._stop(header, f"{text.statement[:80]!r} behind rows of captured tables: the log does not tell "
                             "which of them stay", GAP_HINT)  # fmt: skip
        if kind is Kind.ROWS and not self._is_skipped:
            raise self._stop(header, f"{text.statement[:120]!r}: rows were changed by a statement, not by row events, "
                             "or this version of Firnline does not know the statement", _STATEMENT_HINT)  # fmt: skip
        if kind in (Kind.TRUNCATE, Kind.DDL) and self._concerns_us(statement):
            self._check_ddl(text.statement, statement)
            self._emit(ev.fold_names(header, body) if folds_names else frame)
        if kind is Kind.ROLLBACK or not self._is_begun or (kind is Kind.XA and not self._is_xa):
            self._finish(header, frame)

    def _check_ddl(self, text: str, statement: Statement) -> None:
        """Refuse DDL by which rows change outside the log."""
        server = self._server
        assert server is not None
        if statement.kind is not Kind.DDL or self._is_skipped or logs_cascades(server):
            return
        db = connect(self._dsn, server.host)
        try:
            self._check_tables(db, server, text, statement.tables)
        finally:
            db.close()

    def _concerns_us(self, statement: Statement) -> bool:
        return not statement.tables or any(self._is_captured(table) for table in statement.tables)

    def _take_rows(self, header: Header, body: memoryview, frame: memoryview) -> None:
        table_id = int.from_bytes(body[:6], "little")
        is_end = bool(int.from_bytes(body[6:8], "little") & ev.STATEMENT_END)
        captured, described = self._maps.get(table_id, (False, b""))
        if table_id == ev.DUMMY_TABLE:
            self._maps.clear()
            return
        if table_id not in self._maps:
            raise damaged(f"rows at {self._file}:{header.log_pos} of table id {table_id}, which nothing describes")
        area = _row_area(header, body)
        self._digest = ev.checksum(body[area.start :], self._digest)
        if captured:
            if self._is_xa:
                raise self._stop(header, "with rows of an XA transaction, which may still be rolled back",
                                 f"Keep XA transactions off the captured tables. {GAP_HINT}")  # fmt: skip
            self._count(header, body, area, table_id, described)
            self._emit(frame)
        if is_end:
            self._maps.clear()

    def _count(self, header: Header, body: memoryview, area: _RowArea, table_id: int, described: bytes) -> None:
        """Count the rows of an event: the first of a table exactly, the others by their bytes."""
        full = (1 << area.columns) - 1
        if header.type in ev.WRITES and not self._partial_inserts:
            shown = int.from_bytes(body[area.bitmap : area.start], "little")
            if shown & full != full:
                raise self._stop(
                    header, "with inserted rows without all of their columns: binlog_row_image leaves out columns that "
                    "got their default, so that their values are nowhere in the log",
                    "Set partial_inserts: true to read such columns as missing. Or run on the server: SET GLOBAL "
                    f"binlog_row_image = 'FULL'; {GAP_HINT}",
                )  # fmt: skip
        key = (table_id, header.type)
        size = self._sizes.get(key)
        if size is None:
            table = _describe(described, self._server)
            count = _count_rows(header, body, area, table) if area.columns == len(table.types) else 1
            if len(self._sizes) >= 1000:  # every DDL gives a table a new id
                self._sizes.clear()
            self._sizes[key] = (len(body) - area.start) / max(1, count)
        else:
            count = round((len(body) - area.start) / max(1.0, size))
        self._rows += max(1, count)

    def _finish(self, header: Header, frame: memoryview) -> None:
        """End the open transaction."""
        gtid = self._gtid
        if gtid is None:
            # Only a statement of a server without GTID events, or of a stream that began inside: nothing to end.
            raise damaged(f"a transaction ends at {self._file}:{header.log_pos} that has not begun")
        last = {
            "gtid": gtid.id, "file": self._start[0], "start": self._start[1], "end": self._pos,
            "at": gtid.original_at, "crc": int.from_bytes(frame[-4:], "little"), "created": self._file_created,
            "rows": self._digest,
        }  # fmt: skip
        if self._is_skipped:
            self._check_proof(last)
        else:
            if isinstance(self._gtids, GtidSet) and gtid.id:
                self._gtids.add(gtid.server, gtid.tag, gtid.number)
            elif isinstance(self._gtids, GtidList):
                self._previous = str(self._gtids)
                self._gtids.set(int(gtid.server), gtid.id)
            self._last = last
            if self._is_emitted:
                if header.type in (ev.XID, ev.QUERY) and self._is_begun:
                    self._append(frame)
                position = self._position()
                name = gtid.id or self._place(self._start)
                self._at_cut = (self._file, self._pos, self._format)
                self._cuts.append(Cut(len(self._out), position, name, gtid.committed_at, self._rows))
                self._reached, self._passed = ev.place_order(self._file, self._pos), 0
        self._end_transaction()

    def _check_proof(self, last: dict[str, Any]) -> None:
        expected = self._expected
        assert expected is not None
        self._expected = None
        names: tuple[str, ...] = ()
        if self._is_same_server:
            names = ("file", "start", "end", "crc", "created", "rows")
        elif isinstance(self._gtids, GtidList):
            names = ("rows",)
        for name in names:
            if last[name] != expected[name]:
                self._expected = expected
                raise self._no_proof(f"another one came under its name: {name} is {last[name]}, not {expected[name]}")

    def _position(self) -> dict[str, Any]:
        server = self._server
        assert server is not None
        return {
            "kind": server.kind, "file": self._file, "pos": self._pos, "created": self._file_created,
            "gtid_set": None if self._gtids is None else str(self._gtids), "server_uuid": server.uuid,
            "previous": self._previous, "last": self._last,
        }  # fmt: skip

    def _take_rotate(self, body: memoryview) -> None:
        self._file, self._pos = ev.read_rotate(body)

    def _take_heartbeat(self, header: Header, body: memoryview) -> None:
        """Note how far the log is; it has nothing for us up to there."""
        if header.type == ev.HEARTBEAT and self._gtid is None and bytes(body) == self._file.encode():
            before = self._pos
            self._advance(header)
            self._pos = max(self._pos, before)

    # -- packed transactions --

    def _unpack(self, packets: PacketReader) -> Iterator[bytes]:
        """Yield the events of a TRANSACTION_PAYLOAD event, each with a header and a checksum of its own.

        They are unpacked while packets come; the checksum of the whole is checked at the end, before the commit of the
        transaction is passed on.
        """
        source = _Payload(packets, self._has_checksums)
        self._advance(source.header)
        method, size = source.read_fields()
        reader: Any = source
        if method == 0:
            decompressor = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)
            reader = decompressor.stream_reader(reader, read_across_frames=True)
        elif method != 255:
            raise self._stop(source.header, f"TRANSACTION_PAYLOAD packed by the unknown method {method}", GAP_HINT)
        done = 0
        try:
            while done < size:
                head = _read_all(reader, ev.HEADER_SIZE)
                header = Header(*ev.HEADER.unpack(head))
                done += header.size
                if header.size < ev.HEADER_SIZE or done > size:
                    raise damaged("an event in a packed transaction has no length")
                body = _read_all(reader, header.size - ev.HEADER_SIZE)
                if done == size:
                    source.finish()
                yield ev.make_event(header._replace(log_pos=source.header.log_pos), body)
        except zstandard.ZstdError as error:
            raise damaged(f"a packed transaction cannot be unpacked: {error}") from error


class _Payload:
    """The bytes of a TRANSACTION_PAYLOAD event, as its packets come."""

    def __init__(self, packets: PacketReader, has_checksum: bool) -> None:
        self._packets = packets
        packet, self._goes_on = packets.take()
        packets.check(packet)
        self._data = bytes(packet[1:])
        self._at = 0
        self.header = Header(*ev.HEADER.unpack_from(self._data))
        self._left = self.header.size - (ev.CHECKSUM_SIZE if has_checksum else 0)  # bytes before the checksum
        self._has_checksum = has_checksum
        self._crc = 0
        self._check_lengths()
        self.read(ev.HEADER_SIZE)

    def _check_lengths(self) -> None:
        have = len(self._data)
        if have > self.header.size or (not self._goes_on and have < self.header.size and have < LARGEST - 1):
            raise damaged(f"an event of {self.header.size} bytes has {have}")

    def read(self, size: int = -1) -> bytes:
        """Return up to so many bytes; none at the end."""
        size = self._left if size < 0 else min(size, self._left)
        if self._at == len(self._data) and size:
            self._more()
        part = self._data[self._at : self._at + size]
        self._at += len(part)
        self._left -= len(part)
        self._crc = ev.checksum(part, self._crc)
        return part

    def _more(self) -> None:
        if not self._goes_on:
            raise damaged("a packed transaction is cut off")
        packet, self._goes_on = self._packets.next_packet()
        self._data, self._at = bytes(packet), 0

    def read_fields(self) -> tuple[int, int]:
        """Read what stands before the packed bytes; return the method and the size of what is packed."""
        method, size = 255, 0
        while kind := self._number():
            length = self._number()
            value = _read_all(self, length)
            number = ev.read_length(memoryview(value), 0)[0] if length else 0
            if kind == 2:
                method = number
            elif kind == 3:
                size = number
            elif kind == 1:
                self._packed = number
        if method == 255 and not size:
            size = self._left
        return method, size

    def _number(self) -> int:
        first = _read_all(self, 1)
        more = {252: 2, 253: 3, 254: 8}.get(first[0], 0)
        return ev.read_length(memoryview(first + (_read_all(self, more) if more else b"")), 0)[0]

    def finish(self) -> None:
        """Read what is left and compare the checksum.

        Raises:
            DamagedError: it is another one.
        """
        while self._left:
            self.read(1 << 20)
        if self._has_checksum:
            self._left = ev.CHECKSUM_SIZE
            crc, found = self._crc, b""
            while len(found) < ev.CHECKSUM_SIZE:
                found += self.read(ev.CHECKSUM_SIZE - len(found))
            if crc != int.from_bytes(found, "little"):
                raise damaged("a packed transaction does not match its checksum")
        while self._goes_on:  # a last packet may be empty
            _, self._goes_on = self._packets.next_packet()


def _read_all(reader: Any, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = reader.read(left)
        if not part:
            raise damaged("a packed transaction is cut off")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


_described: dict[bytes, Table] = {}


def _describe(frame: bytes, server: Server | None) -> Table:
    """Return the table that a TABLE_MAP frame describes."""
    body = memoryview(frame)[ev.HEADER_SIZE : len(frame) - ev.CHECKSUM_SIZE]
    key = bytes(body[8:])
    if key not in _described:
        if len(_described) >= 256:
            _described.clear()
        _described[key] = read_table(body, server is not None and server.is_mariadb)
    return _described[key]


class _RowArea(NamedTuple):
    """Where the rows of an event lie in its body."""

    columns: int
    bitmap: int  # the first bitmap of the columns that are there
    start: int


def _row_area(header: Header, body: memoryview) -> _RowArea:
    place = 8 + (int.from_bytes(body[8:10], "little") if header.type >= ev.WRITE else 0)
    try:
        columns, place = ev.read_length(body, place)
    except ValueError as error:
        raise damaged(f"an event of rows cannot be read: {error}") from error
    return _RowArea(columns, place, place + ((columns + 7) >> 3) * (2 if header.type in ev.UPDATES else 1))


def _count_rows(header: Header, body: memoryview, area: _RowArea, table: Table) -> int:
    """Return the number of changes in one event."""
    columns = len(table.types)
    kind = kernel.INSERT if header.type in ev.WRITES else kernel.UPDATE if header.type in ev.UPDATES else kernel.DELETE
    last_bitmap = area.start - ((columns + 7) >> 3)
    events = np.array([(area.start, len(body), kind, area.bitmap, last_bitmap)], np.int64)
    data = np.frombuffer(body, np.uint8)
    data.flags.writeable = False  # as the decoder's data: one compiled function serves both
    room = np.zeros((columns, 0), np.int64), np.zeros((columns, 0), np.int64), np.zeros((columns, 0), np.uint8)
    scratch, flags = np.zeros((4, columns), np.int64), np.zeros((2, columns), np.uint8)
    none, numbers = np.empty(0, np.uint8), np.empty(0, np.int32)
    return int(
        kernel.walk(data, events, table.layout, table.is_key, scratch, flags, *room, *room, none, numbers, False, False)
    )


def _framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "little") + frame


def _at(server: Server) -> str:
    return f"{server.host[0]}:{server.host[1]}"


def _gap(message: str, hint: str = GAP_HINT) -> SourceGapError:
    return SourceGapError(message, hint=hint)
