"""The messages of PostgreSQL's logical replication (`pgoutput`, protocol version 1) and of its replication stream."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from firnline.errors import DamagedError
from firnline.types import Json

# First bytes of messages, as numbers: those of the stream, then those of pgoutput.
XLOG_DATA, KEEPALIVE = ord("w"), ord("k")
BEGIN, COMMIT, RELATION, TYPE, ORIGIN, MESSAGE = (ord(letter) for letter in "BCRYOM")
INSERT, UPDATE, DELETE, TRUNCATE = (ord(letter) for letter in "IUDT")
ROWS = frozenset((INSERT, UPDATE, DELETE))

DATA_HEADER = 25  # bytes before the message of pgoutput: kind, start, end of the server's log, time
POSTGRES_EPOCH_US = 946_684_800_000_000  # 2000-01-01 in microseconds since 1970

_KEEPALIVE = struct.Struct("!cQqB")
_STATUS = struct.Struct("!cQQQqB")
_BEGIN = struct.Struct("!cQqI")
_COMMIT = struct.Struct("!cBQQq")
_RELATION = struct.Struct("!cI")
_COLUMN = struct.Struct("!Ii")
_COUNT = struct.Struct("!h")
_TRUNCATE = struct.Struct("!cIB")
_PRIMARY = 2  # a flag of a column that the server does not send


def parse_lsn(text: str) -> int:
    """Return a place in the log from PostgreSQL's text for it, e.g. 16/B374D848.

    Raises:
        DamagedError: it is none.
    """
    high, slash, low = text.partition("/")
    try:
        if not slash:
            raise ValueError
        return (int(high, 16) << 32) | int(low, 16)
    except ValueError:
        raise DamagedError(f"{text!r} is no place in PostgreSQL's log") from None


def format_lsn(lsn: int) -> str:
    """Return PostgreSQL's text for a place in the log."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


@dataclass(frozen=True, slots=True)
class Keepalive:
    """The server's sign of life."""

    end: int  # everything before this place was sent
    sent_at: int  # microseconds since 1970, by the server's clock
    wants_answer: bool

    @classmethod
    def parse(cls, message: bytes) -> Keepalive:
        _, end, at, wants = _unpack(_KEEPALIVE, message)
        return cls(end, at + POSTGRES_EPOCH_US, bool(wants))


def pack_status(flushed: int, now_us: int, *, wants_answer: bool = False) -> bytes:
    """Return the message that tells the server up to where it may forget its log."""
    return _STATUS.pack(b"r", flushed, flushed, flushed, now_us - POSTGRES_EPOCH_US, wants_answer)


@dataclass(frozen=True, slots=True)
class Begin:
    """The begin of a transaction; all that follows until its end belongs to it."""

    commit_lsn: int
    committed_at: int  # microseconds since 1970
    xid: int

    @classmethod
    def parse(cls, message: bytes | memoryview) -> Begin:
        _, lsn, at, xid = _unpack(_BEGIN, message)
        return cls(lsn, at + POSTGRES_EPOCH_US, xid)


@dataclass(frozen=True, slots=True)
class Commit:
    """The end of a transaction."""

    commit_lsn: int
    end_lsn: int
    committed_at: int  # microseconds since 1970

    @classmethod
    def parse(cls, message: bytes | memoryview) -> Commit:
        _, _, lsn, end, at = _unpack(_COMMIT, message)
        return cls(lsn, end, at + POSTGRES_EPOCH_US)


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column of a table."""

    name: str
    oid: int  # of its type
    modifier: int  # of its type, e.g. precision and scale; -1: none
    is_key: bool  # part of the replica identity
    is_primary: bool = False  # part of the primary key, by the catalogue: the log of identity `full` does not say it


@dataclass(frozen=True, slots=True)
class Relation:
    """A table as it is described before its first row, and again after every change of it."""

    id: int
    schema: str
    name: str
    identity: str  # d: primary key, n: none, f: all columns, i: an index
    columns: tuple[RelationColumn, ...]

    @property
    def table(self) -> str:
        return f"{self.schema}.{self.name}"

    @classmethod
    def parse(cls, message: bytes | memoryview) -> Relation:
        """Parse a relation message.

        Raises:
            DamagedError: it is none.
        """
        data = bytes(message)
        try:
            _, number = _RELATION.unpack_from(data)
            schema, at = _text(data, _RELATION.size)
            name, at = _text(data, at)
            identity = chr(data[at])
            (count,) = _COUNT.unpack_from(data, at + 1)
            at += 1 + _COUNT.size
            columns = []
            for _ in range(count):
                flags = data[at]
                column, at = _text(data, at + 1)
                oid, modifier = _COLUMN.unpack_from(data, at)
                at += _COLUMN.size
                columns.append(RelationColumn(column, oid, modifier, bool(flags & 1), bool(flags & _PRIMARY)))
        except (struct.error, IndexError, ValueError) as error:
            raise DamagedError(f"a relation message cannot be read: {error}") from error
        if at != len(data) or identity not in "dnfi":
            raise DamagedError("a relation message cannot be read: it has another length or an unknown identity")
        return cls(number, schema or "pg_catalog", name, identity, tuple(columns))

    def pack(self) -> bytes:
        """Return the message."""
        head = _RELATION.pack(b"R", self.id) + _packed(self.schema) + _packed(self.name) + self.identity.encode()
        columns = [
            bytes([one.is_key]) + _packed(one.name) + _COLUMN.pack(one.oid, one.modifier) for one in self.columns
        ]
        return head + _COUNT.pack(len(columns)) + b"".join(columns)


def pack_type(oid: int, schema: str, name: str) -> bytes:
    """Return the message that names a type."""
    return _RELATION.pack(b"Y", oid) + _packed(schema) + _packed(name)


def with_primary(message: bytes, key: Sequence[str]) -> bytes:
    """Return a relation message whose columns say whether they belong to the primary key; as it is if it lacks one."""
    relation = Relation.parse(message)
    if not key or not {column.name for column in relation.columns} >= set(key):
        return message
    made, at = bytearray(message), 0
    for _ in range(2):  # schema and name
        _, at = _text(message, at or _RELATION.size)
    at += 1 + _COUNT.size
    for column in relation.columns:
        made[at] |= _PRIMARY if column.name in key else 0
        _, at = _text(message, at + 1)
        at += _COLUMN.size
    return bytes(made)


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables were emptied."""

    relations: tuple[int, ...]

    @classmethod
    def parse(cls, message: bytes | memoryview) -> Truncate:
        data = bytes(message)
        if len(data) < _TRUNCATE.size:
            raise DamagedError("a truncate message is cut off")
        _, count, _ = _TRUNCATE.unpack_from(data)
        if len(data) != _TRUNCATE.size + 4 * count:
            raise DamagedError("a truncate message has a wrong length")
        return cls(struct.unpack_from(f"!{count}I", data, _TRUNCATE.size))


def _packed(text: str) -> bytes:
    return text.encode() + b"\0"


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1


def _unpack(format_: struct.Struct, message: bytes | memoryview) -> tuple[Json, ...]:
    if len(message) != format_.size:
        raise DamagedError(f"a message of {format_.size} bytes has {len(message)}")
    return format_.unpack(message)
