"""Events of the binary log: their types, their headers, and those that both stream and decoder read.

A frame is an event with its header and, always, a CRC32 at its end: where the server writes none, or packs events into
another one, the stream makes the header and the checksum anew.
"""

from __future__ import annotations

import contextlib
import struct
import uuid
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from isal import isal_zlib

from firnline.errors import DamagedError
from firnline.sources.mysql import charsets
from firnline.sources.mysql.gtid import format_gtid

HEADER = struct.Struct("<IBIIIH")  # time stamp, type, server id, size of the event, position behind it, flags
HEADER_SIZE, CHECKSUM_SIZE = 19, 4
ARTIFICIAL, IGNORABLE = 0x20, 0x80  # flags
STATEMENT_END = 0x01  # flag of a rows event: the table maps before it are no longer in force
DUMMY_TABLE = 0xFFFFFF  # the id of a rows event without rows, which only ends a statement

(QUERY, STOP, ROTATE, INTVAR, RAND, USER_VAR, FORMAT_DESCRIPTION, XID, TABLE_MAP) = (2, 3, 4, 5, 13, 14, 15, 16, 19)
WRITE_V1, UPDATE_V1, DELETE_V1, INCIDENT, HEARTBEAT, IGNORABLE_EVENT, ROWS_QUERY = 23, 24, 25, 26, 27, 28, 29
WRITE, UPDATE, DELETE, GTID, ANONYMOUS_GTID, PREVIOUS_GTIDS, TRANSACTION_CONTEXT, VIEW_CHANGE = range(30, 38)
XA_PREPARE, PARTIAL_UPDATE, TRANSACTION_PAYLOAD, HEARTBEAT_V2, GTID_TAGGED = range(38, 43)
ANNOTATE, BINLOG_CHECKPOINT, MARIADB_GTID, GTID_LIST, START_ENCRYPTION, QUERY_COMPRESSED = range(160, 166)
WRITE_COMPRESSED_V1, UPDATE_COMPRESSED_V1, DELETE_COMPRESSED_V1 = 166, 167, 168
WRITE_COMPRESSED, UPDATE_COMPRESSED, DELETE_COMPRESSED = 169, 170, 171

ROWS = frozenset({WRITE_V1, UPDATE_V1, DELETE_V1, WRITE, UPDATE, DELETE})
WRITES = frozenset({WRITE_V1, WRITE})
UPDATES = frozenset({UPDATE_V1, UPDATE})
DELETES = frozenset({DELETE_V1, DELETE})
GTIDS = frozenset({GTID, ANONYMOUS_GTID, GTID_TAGGED, MARIADB_GTID})
# What a compressed event of MariaDB becomes.
UNPACKED = {
    QUERY_COMPRESSED: QUERY, WRITE_COMPRESSED_V1: WRITE_V1, UPDATE_COMPRESSED_V1: UPDATE_V1,
    DELETE_COMPRESSED_V1: DELETE_V1, WRITE_COMPRESSED: WRITE, UPDATE_COMPRESSED: UPDATE, DELETE_COMPRESSED: DELETE,
}  # fmt: skip
# Events that say nothing about rows.
SILENT = frozenset(
    {
        STOP, INTVAR, RAND, USER_VAR, IGNORABLE_EVENT, ROWS_QUERY, PREVIOUS_GTIDS, TRANSACTION_CONTEXT, VIEW_CHANGE,
        ANNOTATE, BINLOG_CHECKPOINT, GTID_LIST, START_ENCRYPTION,
    }
)  # fmt: skip
NAMES = {
    6: "LOAD", 8: "CREATE_FILE", 9: "APPEND_BLOCK", 10: "EXEC_LOAD", 11: "DELETE_FILE", 12: "NEW_LOAD",
    17: "BEGIN_LOAD_QUERY", 18: "EXECUTE_LOAD_QUERY", 20: "PRE_GA_WRITE_ROWS", 21: "PRE_GA_UPDATE_ROWS",
    22: "PRE_GA_DELETE_ROWS", INCIDENT: "INCIDENT", XA_PREPARE: "XA_PREPARE", PARTIAL_UPDATE: "PARTIAL_UPDATE_ROWS",
}  # fmt: skip

MARIADB_STANDALONE, MARIADB_GROUP_ID, MARIADB_PREPARED_XA, MARIADB_COMPLETED_XA = 1, 2, 64, 128
# Status variables of a QUERY event: flags, sql_mode, catalog, auto_increment, the client's character set, time zone.
_FLAGS, _SQL_MODE, _CATALOG, _AUTO_INCREMENT, _CHARSET, _TIME_ZONE, _CATALOG_TEXT = range(7)
_SIZES = {_FLAGS: 4, _AUTO_INCREMENT: 4}
_TEXTS = frozenset({_TIME_ZONE, _CATALOG_TEXT})
_FOLDS_NAMES = 0xFE  # our own; no server writes it
_ERRORS = (struct.error, IndexError, ValueError, UnicodeDecodeError, OverflowError)


class Header(NamedTuple):
    """The header of an event."""

    timestamp: int
    type: int
    server_id: int
    size: int
    log_pos: int
    flags: int


def damaged(what: str) -> DamagedError:
    """Return the error for an event that is not what it should be."""
    return DamagedError(
        f"binary log: {what}",
        hint="The bytes between server and Firnline changed. Run again: the stream is read again from the last commit.",
    )


def checksum(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC32 of bytes; `before` is the one of what stands before them."""
    return int(isal_zlib.crc32(data, before))


def make_event(header: Header, body: bytes | memoryview) -> bytes:
    """Return an event with its header and its checksum; the size in the header is made new."""
    head = header._replace(size=HEADER_SIZE + len(body) + CHECKSUM_SIZE)
    data = HEADER.pack(*head) + body
    return data + checksum(data).to_bytes(4, "little")


def rotate_event(file: str, position: int) -> bytes:
    """Return an event that says where the next events lie."""
    return make_event(Header(0, ROTATE, 0, 0, 0, ARTIFICIAL), struct.pack("<Q", position) + file.encode())


def read_rotate(body: memoryview) -> tuple[str, int]:
    """Return file and position of a ROTATE event, whose body is without checksum."""
    try:
        return bytes(body[8:]).decode(), struct.unpack_from("<Q", body)[0]
    except _ERRORS as error:
        raise damaged(f"a ROTATE event cannot be read: {error}") from error


def has_checksums(body: memoryview) -> bool:
    """Return whether events behind this FORMAT_DESCRIPTION (its body with its checksum) have checksums.

    Raises:
        DamagedError: it is of a version that this reader does not know.
    """
    if len(body) < 57 + CHECKSUM_SIZE + 1 or body[0] != 4 or body[1] != 0 or body[56] != HEADER_SIZE:
        raise damaged("FORMAT_DESCRIPTION is not of version 4")
    algorithm = body[len(body) - CHECKSUM_SIZE - 1]
    if algorithm > 1:
        raise damaged(f"events have checksums of the unknown kind {algorithm}")
    return algorithm == 1


def place_order(file: str, pos: int) -> tuple[int, int]:
    """Return a key by which places in the log of one server are in order."""
    digits = file.rpartition(".")[2]
    return int(digits) if digits.isdigit() else 0, pos


@dataclass(frozen=True, slots=True)
class GtidEvent:
    """The begin of a transaction."""

    id: str  # its GTID; empty if it has none
    server: str  # of MySQL's GTID: the server's UUID; of MariaDB's: the domain
    tag: str
    number: int
    committed_at: int  # microseconds since 1970 on this server
    original_at: int  # the same on the server where it happened first
    length: int  # of the transaction in the log; 0 if unknown
    is_standalone: bool = False  # MariaDB: a statement alone, without COMMIT
    is_xa: bool = False  # MariaDB: a prepared XA transaction, or the end of one


def read_gtid(header: Header, body: memoryview) -> GtidEvent:
    """Return what a GTID event of any kind says; its body is without checksum.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        if header.type == MARIADB_GTID:
            return _read_mariadb(header, body)
        if header.type == GTID_TAGGED:
            return _read_tagged(body)
        return _read_plain(header, body)
    except _ERRORS as error:
        raise damaged(f"a GTID event cannot be read: {error}") from error


def _read_mariadb(header: Header, body: memoryview) -> GtidEvent:
    number, domain, flags = struct.unpack_from("<QIB", body)
    at = header.timestamp * 1_000_000
    return GtidEvent(
        f"{domain}-{header.server_id}-{number}", str(domain), "", number, at, at, 0,
        bool(flags & MARIADB_STANDALONE), bool(flags & (MARIADB_PREPARED_XA | MARIADB_COMPLETED_XA)),
    )  # fmt: skip


def _read_plain(header: Header, body: memoryview) -> GtidEvent:
    server, number = str(uuid.UUID(bytes=bytes(body[1:17]))), struct.unpack_from("<q", body, 17)[0]
    at = original = header.timestamp * 1_000_000
    length, place = 0, 42
    if len(body) >= place + 7:  # from 8.0.1 on
        at = original = int.from_bytes(body[place : place + 7], "little")
        place += 7
        if at >> 55:
            at &= (1 << 55) - 1
            original = int.from_bytes(body[place : place + 7], "little")
            place += 7
        if len(body) > place:
            length, place = read_length(body, place)
    if header.type == ANONYMOUS_GTID:
        return GtidEvent("", "", "", 0, at, original, length)
    return GtidEvent(format_gtid(server, "", number), server, "", number, at, original, length)


def _read_tagged(body: memoryview) -> GtidEvent:
    """Read MySQL's serialized form: fields with numbers, each number as long as it needs."""
    version, place = _read_number(body, 0)
    if version != 1:
        raise ValueError(f"serialization version {version}")
    size, place = _read_number(body, place)
    end = min(size, len(body))
    _, place = _read_number(body, place)  # the last field that a reader must know
    server, tag, number, at, original, length = b"", "", 0, 0, 0, 0
    while place < end:
        name, place = _read_number(body, place)
        if name == 1:
            digits = []
            for _ in range(16):
                digit, place = _read_number(body, place)
                digits.append(digit)
            server = bytes(digits)
        elif name == 3:
            count, place = _read_number(body, place)
            tag, place = bytes(body[place : place + count]).decode("ascii"), place + count
        elif name <= 11:
            value, place = _read_number(body, place)
            if name == 2:
                number = value >> 1  # signed: the lowest bit is the sign
            elif name == 6:
                at = value
            elif name == 7:
                original = value
            elif name == 8:
                length = value
        else:
            break  # fields of later versions, which may be ignored
    words = str(uuid.UUID(bytes=server))
    return GtidEvent(format_gtid(words, tag, number), words, tag, number, at, original or at, length)


def _read_number(body: memoryview, place: int) -> tuple[int, int]:
    """Read a number whose first byte tells by its trailing one bits how many bytes follow."""
    first = body[place]
    more = 0
    while more < 8 and first >> more & 1:
        more += 1
    rest = body[place + 1 : place + 1 + more]
    if len(rest) < more:
        raise ValueError("a number is cut off")
    value = int.from_bytes(rest, "little")
    if more < 8:
        value = value << (7 - more) | first >> (more + 1)
    return value, place + 1 + more


def read_length(body: memoryview, place: int) -> tuple[int, int]:
    """Read a length-encoded number; return it and the place behind it.

    Raises:
        ValueError: the bytes end before it does.
    """
    if place >= len(body):
        raise ValueError("a length is cut off")
    first = body[place]
    if first < 251:
        return first, place + 1
    size = {252: 2, 253: 3, 254: 8}.get(first, 0)
    if not size or place + 1 + size > len(body):
        raise ValueError("a length is cut off")
    return int.from_bytes(body[place + 1 : place + 1 + size], "little"), place + 1 + size


@dataclass(frozen=True, slots=True)
class QueryEvent:
    """A statement in the log."""

    database: str
    statement: str
    sql_mode: int = 0
    folds_names: bool = False  # see `fold_names`


def read_query(body: memoryview) -> QueryEvent:
    """Return the statement of a QUERY event, whose body is without checksum.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        _, _, database_size, _, variables = struct.unpack_from("<IIBHH", body)
        at = 13 + variables
        if at + database_size + 1 > len(body):
            raise ValueError("it is cut off")
        database = bytes(body[at : at + database_size]).decode("utf-8", "replace")
        text = bytes(body[at + database_size + 1 :])
        sql_mode, collation, folds_names = _read_variables(body[13:at])
        return QueryEvent(database, _decode_statement(text, collation), sql_mode, folds_names)
    except _ERRORS as error:
        raise damaged(f"a QUERY event cannot be read: {error}") from error


def _decode_statement(text: bytes, collation: int | None) -> str:
    """Return a statement that is in the client's character set.

    The servers write CREATE TABLE ... SELECT anew, without its query, and always as UTF-8: so a CREATE that is UTF-8
    counts as such.
    """
    if text.isascii() or collation is None:
        return text.decode("utf-8", "replace")
    if text.startswith(b"CREATE "):
        with contextlib.suppress(UnicodeDecodeError):
            return text.decode()
    return charsets.decode(text, charsets.name_of(collation))


def _read_variables(block: memoryview) -> tuple[int, int | None, bool]:
    """Return what the status variables of a QUERY event say: sql_mode, the client's collation, and our own mark.

    The servers write mode and collation before all variables whose size depends on the server's version.
    """
    sql_mode, collation, folds_names, at = 0, None, False, 0
    while at < len(block):
        code = block[at]
        at += 1
        if code == _FOLDS_NAMES:
            folds_names = True
        elif code == _SQL_MODE:
            sql_mode = int.from_bytes(block[at : at + 8], "little")
            at += 8
        elif code == _CHARSET:
            collation = int.from_bytes(block[at : at + 2], "little")
            break
        elif code == _CATALOG:
            at += block[at] + 2
        elif code in _TEXTS:
            at += block[at] + 1
        elif code in _SIZES:
            at += _SIZES[code]
        else:
            break
    return sql_mode, collation, folds_names


def fold_names(header: Header, body: memoryview) -> bytes:
    """Return a QUERY event with a mark: its server has the names of tables in small letters, however it is written."""
    size = struct.unpack_from("<H", body, 11)[0]
    marked = bytes(body[:11]) + struct.pack("<HB", size + 1, _FOLDS_NAMES) + bytes(body[13:])
    return make_event(header, marked)


def read_table_name(body: memoryview) -> tuple[int, str, str]:
    """Return id, database and name of the table that a TABLE_MAP event describes.

    Raises:
        DamagedError: it cannot be read.
    """
    try:
        table_id = int.from_bytes(body[:6], "little")
        size = body[8]
        database = bytes(body[9 : 9 + size]).decode()
        at = 10 + size
        name = bytes(body[at + 1 : at + 1 + body[at]]).decode()
        return table_id, database, name
    except _ERRORS as error:
        raise damaged(f"a TABLE_MAP event cannot be read: {error}") from error


def unpack_compressed(header: Header, body: memoryview) -> bytes:
    """Return an event of MariaDB's `log_bin_compress` as the plain event that it stands for.

    Raises:
        DamagedError: it cannot be unpacked.
    """
    try:
        if header.type == QUERY_COMPRESSED:
            at = 13 + struct.unpack_from("<H", body, 11)[0] + body[8] + 1
        else:
            at = 8 if header.type <= DELETE_COMPRESSED_V1 else 8 + struct.unpack_from("<H", body, 8)[0]
            count, behind = read_length(body, at)
            bitmaps = 2 if header.type in (UPDATE_COMPRESSED, UPDATE_COMPRESSED_V1) else 1
            at = behind + bitmaps * ((count + 7) // 8)
        mark = body[at]
        if mark & 0x70 or not mark & 0x80 or not 1 <= mark & 7 <= 4:
            raise ValueError("its method is not zlib")
        width = mark & 7
        size = int.from_bytes(body[at + 1 : at + 1 + width], "big")
        data = zlib.decompress(body[at + 1 + width :])
        if len(data) != size:
            raise ValueError(f"{len(data)} bytes instead of {size}")
    except (*_ERRORS, zlib.error) as error:
        raise damaged(f"a compressed event cannot be unpacked: {error}") from error
    return make_event(header._replace(type=UNPACKED[header.type]), bytes(body[:at]) + data)
