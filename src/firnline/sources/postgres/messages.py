"""The messages of PostgreSQL's logical replication (`pgoutput`, protocol version 1) and of its replication stream."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    number: int = 0  # by the catalogue: a column that was dropped and added again has another one; 0: unknown


@dataclass(frozen=True, slots=True)
class Description:
    """What the catalogue says of a table beyond the log."""

    key: tuple[str, ...]  # that identifies its rows
    numbers: Mapping[str, int]  # of its columns
    is_whole: bool  # the log has whole old rows, of all partitions
    is_unlogged: bool = False  # the log has not all columns of the key: those that it marks identify nothing


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
            if at < len(data):  # of our own
                numbers = struct.unpack_from(f"!{count}h", data, at)
                columns = [replace(one, number=number) for one, number in zip(columns, numbers, strict=True)]
                at += _COUNT.size * count
        except (struct.error, IndexError, ValueError) as error:
            raise DamagedError(f"a relation message cannot be read: {error}") from error
        if at != len(data) or identity not in "dnfi":
            raise DamagedError("a relation message cannot be read: it has another length or an unknown identity")
        return cls(number, schema or "pg_catalog", name, identity, tuple(columns))

    def pack(self) -> bytes:
        """Return the message."""
        head = _RELATION.pack(b"R", self.id) + _packed(self.schema) + _packed(self.name) + self.identity.encode()
        columns = [
            bytes([one.is_key | one.is_primary * _PRIMARY]) + _packed(one.name) + _COLUMN.pack(one.oid, one.modifier)
            for one in self.columns
        ]
        numbers = [one.number for one in self.columns]
        more = struct.pack(f"!{len(numbers)}h", *numbers) if any(numbers) else b""
        return head + _COUNT.pack(len(columns)) + b"".join(columns) + more

    def complete(self, facts: Description) -> Relation:
        """Return the table with what the catalogue says of it.

        With identity `full`, the log marks all columns, and not those of the primary key. It says so of a partitioned
        table whose partitions have another identity, too: then old rows have the key for sure, and no more.
        """
        is_known = set(facts.key) <= {column.name for column in self.columns}
        key = facts.key if self.identity == "f" and is_known else ()
        identity = "d" if self.identity == "f" and not facts.is_whole else self.identity
        columns = [
            replace(
                one,
                is_key=one.name in key if identity != self.identity else one.is_key and not facts.is_unlogged,
                is_primary=one.name in key,
                number=facts.numbers.get(one.name, 0),
            )
            for one in self.columns
        ]
        return replace(self, identity=identity, columns=tuple(columns))


def pack_type(oid: int, schema: str, name: str) -> bytes:
    """Return the message that names a type."""
    return _RELATION.pack(b"Y", oid) + _packed(schema) + _packed(name)


@dataclass(frozen=True, slots=True)
class Truncate:
    """Tables were emptied."""

    relations: tuple[int, ...]
    flags: int = 0  # CASCADE, RESTART IDENTITY

    @classmethod
    def parse(cls, message: bytes | memoryview) -> Truncate:
        data = bytes(message)
        if len(data) < _TRUNCATE.size:
            raise DamagedError("a truncate message is cut off")
        _, count, flags = _TRUNCATE.unpack_from(data)
        if len(data) != _TRUNCATE.size + 4 * count:
            raise DamagedError("a truncate message has a wrong length")
        return cls(struct.unpack_from(f"!{count}I", data, _TRUNCATE.size), flags)

    def pack(self) -> bytes:
        """Return the message."""
        count = len(self.relations)
        return _TRUNCATE.pack(b"T", count, self.flags) + struct.pack(f"!{count}I", *self.relations)


def _packed(text: str) -> bytes:
    return text.encode() + b"\0"


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(0, at)
    return data[at:end].decode(), end + 1


def _unpack(format_: struct.Struct, message: bytes | memoryview) -> tuple[Json, ...]:
    if len(message) != format_.size:
        raise DamagedError(f"a message of {format_.size} bytes has {len(message)}")
    return format_.unpack(message)
