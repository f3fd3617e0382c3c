"""The contract of a captured database: how its log, and the rows that were there before, become change rows.

A kind of database is three classes. Two run in the driver: `LogStream` keeps one replication stream open, checks what
the server sends, and returns it as it is, cut into frames; `TableReader` reads tables chunk by chunk. `LogDecoder` runs
in workers: it turns frames and chunks into Arrow. Between them lie spool files (`sources.cdc.spool`): frames with their
context, durable before an epoch is decided. Chunks lie in such files, too.

A frame is a message of the server: its length in bytes (four bytes, little-endian), then the message. What a message
is, the kind decides; it may leave out messages that carry nothing (keepalives, rows of tables that are not captured).

A cut is a place between two frames where a transaction has ended. Only there may a slice end. A position is the
server's place at a cut, in plain JSON; it stays readable for ever. The source adds what it needs; the kind's own part
is opened by the kind alone.

The context is what a decoder must know before it reads frames: schemas in force, the begin of the transaction that
goes on. It consists of frames itself, from which no rows are made.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from firnline.errors import ConfigError, FirnlineError, SchemaError
from firnline.sources.cdc.tables import snapshot_command
from firnline.types import Json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa


RESNAPSHOT_ALL = "`firnline run --resnapshot-all`"
GAP_HINT = (
    f"What is committed stays as it is. Run once with {RESNAPSHOT_ALL}: the log is read on where it "
    "begins now, and all captured tables that have a key are emptied and read again. Or lose what changed in between: "
    "`firnline run --accept-gap`."
)
# Facts of a `SourceError`: the server does not answer, which every reader of it meets; nobody knows the host's name.
AWAY, UNKNOWN_HOST = "away", "unknown_host"
# Of a `ConfigError`: it is about the rows of tables alone, to which a right is missing.
UNREADABLE = "unreadable"


def names_no_host(text: str) -> bool:
    """Return whether the system said that there is no host of a name; not that it could not ask."""
    return bool(re.search(r"Name or service not known|nodename nor servname|No address associated", text))


def at_first(error: FirnlineError) -> FirnlineError:
    """Return the error of a server that has not answered yet: a wrong name of its host, too, is one of the spec."""
    if UNKNOWN_HOST not in error.fields:
        return error
    return ConfigError(error.message, hint="Correct the host in `dsn`, then run again; nothing was lost.")


class Op(IntEnum):
    """What a change row says of the row of its key; the names are those of the column `_op`."""

    INSERT = 0
    UPDATE = 1
    DELETE = 2
    TRUNCATE = 3  # the table was emptied: a row without values
    READ = 4  # of a snapshot: the row was there


# -- the driver's side --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a transaction."""

    offset: int  # in the bytes of the piece: behind the last frame of the transaction
    position: Json  # the server's place behind the transaction
    transaction: str  # its id on the server
    committed_at: int  # microseconds since 1970, by the server's clock; 0 if unknown
    rows: int  # change rows in the transaction, as far as the stream knows without decoding; for limits only


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream gave in one call: whole frames. A transaction may go on in the next piece."""

    frames: bytes
    cuts: Sequence[Cut] = ()
    open_rows: int = 0  # change rows behind the last cut


class LogStream(ABC):
    """The replication stream of one server. Used by one thread, except `acknowledge` and `end_position`."""

    @abstractmethod
    def begin(self) -> Json:
        """Prepare the server for a reader that has no position (publication, slot), and return where it begins.

        Repeatable: what was prepared before, by a run that was killed, is used.

        Raises:
            SourceError, ConfigError: as `open`.
        """

    @abstractmethod
    def begin_anew(self) -> Json:
        """As `begin`, after a gap that a person has accepted: give up what the server no longer has or never had."""

    @abstractmethod
    def open(self, position: Json) -> None:
        """Connect, prove that the server's log continues at `position`, and begin behind it.

        The proof: the server is the same one (or one that was promoted at or after the position), and it sends again
        the last transaction before the position, unchanged. That transaction is not returned by `read`.

        Raises:
            SourceGapError: the log does not continue there: purged, dropped, another server, another history.
            SourceError: the server does not answer, or another reader holds the stream; the caller tries again.
            ConfigError: a setting of the server forbids it; the hint has the statement that mends it.
        """

    @abstractmethod
    def context(self, *, at_cut: bool) -> bytes:
        """Return, as frames, what a decoder must know to decode the next frame that `read` returns; `at_cut`: to decode
        the frames behind the last cut, or those behind `open`. Frames that were returned since then change nothing."""

    @abstractmethod
    def read(self, max_bytes: int, wait_seconds: float) -> Piece:
        """Return the next frames: at once if there are any, else after `wait_seconds` at most, then perhaps none.

        `max_bytes` bounds a piece to whole frames; a single larger frame comes alone. Answers the server's keepalives.

        Raises:
            SourceError: the connection is lost; the caller opens the stream again.
            SourceGapError, DamagedError: a message that cannot be, or one that must not be passed over, by name.
        """

    @abstractmethod
    def keep_alive(self) -> None:
        """Keep the connection without reading, for a while in which there is no room for more.

        Raises:
            SourceError: the connection is lost.
        """

    @abstractmethod
    def has_reached(self, end: Json) -> bool:
        """Return whether everything before `end`, of `end_position`, has been read or carries nothing for us."""

    @abstractmethod
    def idle_position(self) -> Json | None:
        """Return a place behind the last cut up to which the log has nothing for us; None if there is none.

        Only between two transactions. So the server may forget its log though the captured tables are quiet.
        """

    @abstractmethod
    def idle_bytes(self) -> int:
        """Return how much of the log lies between the last cut, or the last `idle_position`, and the next one."""

    @abstractmethod
    def acknowledge(self, position: Json) -> None:
        """Tell the server that it may forget everything up to `position`. Called by any thread, at any time while the
        stream is open; sent with the next status message. Without effect where the server does not keep its log for
        readers."""

    @abstractmethod
    def end_position(self) -> Json:
        """Return where the server's log ends now, for lag and for runs that end there. Uses another connection."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections. The stream may be opened again."""


# -- the driver's side: tables ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A captured table, as the server describes it now."""

    name: str  # schema.table (PostgreSQL) or database.table (MySQL)
    key: tuple[str, ...]  # columns by which changes name a row, unique and never null; empty: there are none
    rows: int  # the server's own estimate
    identity: str = ""  # another table that takes the name has another one; empty: the server does not say
    can_be_read: bool = True  # otherwise its changes alone are captured
    # What makes the log have its changes: if it is another one, changes in between are not in the log. Empty: nothing
    # does; None: the log has the changes of all tables.
    logged: str | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a table, as one SELECT in one snapshot of the database gave them, in the order of the key."""

    context: bytes  # what `LogDecoder.decode_chunk` must know: the table's schema in this snapshot
    content: bytes  # the rows, as the server sent them
    rows: int
    key: tuple[str, ...]  # of the table, as in `TableFacts`, in this snapshot
    last: Json  # the key of the last row, for the next chunk; None if there is none
    is_last: bool  # the table has no rows behind it
    sees: Json  # which transactions the snapshot surely sees, for `LogDecoder.sees`
    high: Json  # a place as of `LogStream.end_position`: every transaction that the snapshot sees lies before it
    identity: str = ""  # of the table, as in `TableFacts`, in this snapshot
    order: Json = None  # what gives the rows their order: columns, types, collations. `last` has no meaning without


class TableReader(ABC):
    """Reads tables chunk by chunk while the log goes on. Holds no lock that an application could wait for, and no
    transaction longer than a chunk, but for tables without a key. Used by one thread at a time."""

    lapse = "for a while, the log did not have all of its changes"  # in words: `TableFacts.logged` is another one

    @abstractmethod
    def find_tables(self) -> list[TableFacts]:
        """Return the captured tables that exist now.

        Raises:
            SourceError: the server does not answer.
        """

    @abstractmethod
    def prepare(self, tables: Sequence[str]) -> Mapping[str, FirnlineError]:
        """See to it that the log has the changes of these tables from now on. Repeatable. Some may be gone.

        Returns, by table, why it cannot be done.

        Raises:
            SourceError: the server does not answer.
        """

    @abstractmethod
    def barrier(self, place: Json) -> Json:
        """Return what the snapshot of a table's first chunk must see: every transaction that the log has up to
        `place`, and every one that may have changed a table before `prepare` took effect."""

    def later_barrier(self, place: Json) -> Json:
        """Return what the snapshots of later chunks must see: every transaction that the log has up to `place`. None if
        every later snapshot sees it anyway: only one server is ever read."""
        return None

    @abstractmethod
    def find_seen(self) -> Json | None:
        """Return, as `Chunk.sees`, which transactions every later snapshot surely sees; None if the server does not
        say it without a table.

        Raises:
            SourceError: the server does not answer.
        """

    @abstractmethod
    def find_end(self) -> Json:
        """Return a place as `Chunk.high`: every transaction that ended before this call lies before it.

        Raises:
            SourceError: the server does not answer.
        """

    @abstractmethod
    def read_chunk(
        self, table: str, after: Json, limit: int, *, order: Json = None, barrier: Json = None, where: str = ""
    ) -> Chunk | None:
        """Read up to `limit` rows behind the key `after` (None: from the first row on).

        Each call sees at least what the calls before it saw. `order` is that of the chunk which ended with `after`.
        `where` is a condition in SQL that a person gave. Returns None if the snapshot does not see everything of
        `barrier` yet; the caller tries again.

        Raises:
            TableGoneError: there is no such table any more.
            TableChangedError: the rows have another order now, so that none lies behind `after`.
            SourceError: it cannot be read now.
        """

    @abstractmethod
    def read_whole(self, table: str, limit: int, *, barrier: Json) -> Generator[Chunk] | None:
        """Read a table that has no key, in one snapshot, in chunks of up to `limit` rows.

        All chunks say the same in `sees`, which is exact: of the transactions that changed the table, the snapshot sees
        these and no others. Only the last one has a `high`, and `is_last`. Returns None as `read_chunk`, and raises the
        same. The caller closes the generator.
        """

    def check_may_read(self, tables: Collection[str]) -> None:  # noqa: B027
        """Check that the user has all rights that reading these tables takes, as far as `find_tables` does not.

        Raises:
            ConfigError: a right is missing; the hint has the statement that gives it.
            SourceError: the server does not answer.
        """

    @abstractmethod
    def find_unreadable(self, tables: Collection[str]) -> dict[str, FirnlineError]:
        """Return, of these tables, why those cannot be read whose rows the user has no right to; the hint has the
        statement that gives it. So do tables that the server hides: it does not tell them from those that do not exist.

        Raises:
            SourceError: the server does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connections. The reader may be used again."""


class TableGoneError(Exception):
    """A table does not exist any more. For the reading of tables only, never for people."""


class TableChangedError(Exception):
    """The rows of a table have another order than before. For the reading of tables only, never for people."""


# -- the workers' side --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a captured table."""

    name: str
    type: pa.DataType
    native: str  # its type in the database's own words, e.g. numeric(10,2)
    is_key: bool = False
    number: int = 0  # a column that was dropped and added again has another one; 0: the server does not say


@dataclass(frozen=True, slots=True)
class TableSchema:
    """The schema of a table as it was in force at some place in the log."""

    table: str  # schema.table (PostgreSQL) or database.table (MySQL)
    columns: tuple[Column, ...]

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that identify a row; empty if the log does not say."""
        return tuple(column.name for column in self.columns if column.is_key)


@dataclass(frozen=True, slots=True)
class Changes:
    """Change rows of one table under one schema, in the order of the log.

    An update of the key is two changes: the delete of the old key, and the insert of the new one.
    """

    schema: TableSchema
    ops: npt.NDArray[np.uint8]  # of every row: an `Op`
    rows: pa.RecordBatch  # the columns of the schema: the row after the change; of a delete, what the log has of it
    missing: Sequence[npt.NDArray[np.bool_] | None]  # of every column: rows whose value the log left out (null here)
    order: npt.NDArray[np.int64]  # of every row: its number among all change rows of the frames, of any table
    transaction: npt.NDArray[np.int32]  # of every row: index into `Decoded.transactions`
    before: pa.StructArray | None = None  # the row before the change, as far as the log has it; only if asked for
    odd: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # by column and row: text of values that do not
    # fit the type (null in `rows`), such as a date before year 1
    moved: npt.NDArray[np.bool_] | None = None  # inserts of rows whose key changed; the row before is the delete
    anew: bool = False  # a row that empties the table: a snapshot of all of its rows begins


@dataclass(frozen=True, slots=True)
class Transaction:
    """A transaction of which frames were decoded."""

    id: str
    committed_at: int  # microseconds since 1970; 0 if unknown
    position: str  # the server's place of its commit, as text for the column `_position`


@dataclass(frozen=True, slots=True)
class SilentEffect:
    """How a statement may change rows of a table that are there already, without a trace of them in the log."""

    reason: str
    # What mends it: nothing, to read the table again, or to empty it and to read it; `replace`: the same, always, once
    # there is a table, since it is gone or another one has its name.
    again: Literal["", "read", "empty", "replace"]


@dataclass(frozen=True, slots=True)
class Ddl:
    """A statement that changed tables, at its place among the change rows; for `on_ddl`."""

    tables: tuple[str, ...]  # those that it names; empty: unknown, or a whole database
    statement: str
    transaction: int  # index into `Decoded.transactions`
    order: int  # the number of the next change row
    silent: Mapping[str, SilentEffect] = field(default_factory=dict)  # by table; those that it changes so


@dataclass(frozen=True, slots=True)
class Decoded:
    """The change rows of a spool file."""

    changes: Sequence[Changes]  # in the order of their first row; a table may occur several times
    transactions: Sequence[Transaction]
    count: int  # change rows in all
    warnings: Sequence[str] = field(default_factory=tuple)  # e.g. a type that is read as text
    ddl: Sequence[Ddl] = field(default_factory=tuple)  # of databases whose log has such statements


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """The rows of a chunk."""

    schema: TableSchema  # as the log describes the table
    rows: pa.RecordBatch
    odd: Mapping[str, Mapping[int, str]] = field(default_factory=dict)  # as in `Changes`
    warnings: Sequence[str] = field(default_factory=tuple)


# By table: columns by which sinks upsert its rows.
SinkKeys: TypeAlias = Mapping[str, Collection[str]]


def other_key(schema: TableSchema, keys: SinkKeys) -> frozenset[str]:
    """Return the columns of a table by which sinks identify its rows, and the log does not."""
    names = {column.name for column in schema.columns if not column.is_key}
    return frozenset(names.intersection(keys.get(schema.table, ())))


def lacks_key(schema: TableSchema, keys: SinkKeys, way_out: str) -> SchemaError:
    """Return the error of a change that does not say which row of a sink it is about."""
    table, wanted = schema.table, ", ".join(sorted(keys[schema.table]))
    return SchemaError(
        f"table {table}: a sink upserts its rows by {wanted}, the log identifies them by "
        f"{', '.join(schema.key) or 'no column'}, and an update or a delete in the log does not have the old values of "
        f"{', '.join(sorted(other_key(schema, keys)))}: the sink would keep old rows",
        hint=f"Nothing is lost this way: {begin_anew(table)} To keep the key of the sink, {way_out} before that.",
    )


def check_table_key(schema: TableSchema, key: Collection[str]) -> None:
    """Refuse rows for a sink that takes its key from the table, if the table has another one at their place in the log:
    several of its rows may have the same values there.

    Raises:
        SchemaError: it names the table and both keys.
    """
    if not key or not schema.columns or (schema.key and set(schema.key) <= set(key)):
        return
    names, now = ", ".join(sorted(key)), f"is {', '.join(schema.key)}" if schema.key else "is gone"
    raise SchemaError(
        f"table {schema.table}: a sink without `key` upserts its rows by {names}, which was the key of the table when "
        f"the run began, and its key {now} at this place in the log: rows that differ there would become one",
        hint=f"If {names} identifies a row before and after, set `key: [{names}]` of the sink. Otherwise, nothing is "
        f"lost this way: {begin_anew(schema.table)}",
        table=schema.table,
    )


def begin_anew(table: str) -> str:
    """Return how a sink of one captured table begins anew, with all of its rows, for a hint."""
    return (
        "take the sink out of the spec (one that is no Delta table: firnline sinks forget SINK --yes), and run: "
        "firnline run --once. Then add it with another name and another table; a Delta table with `start: snapshot`, "
        f"for any other type: {snapshot_command(None, table, empties=True)}. The only sink of a "
        "pipeline gets a pipeline with another `name` instead."
    )


class LogDecoder(ABC):
    """Decodes the frames of one spool file. Holds no connection and knows no catalogue: frames alone decide.

    An update is a delete and an insert if it changes a column of the key: of that of the log, or of a sink's (`keys`).
    """

    @abstractmethod
    def decode(self, context: bytes, frames: bytes | memoryview) -> Decoded:
        """Decode all frames of a file.

        Raises:
            DamagedError: a message is not what it should be. Never a wrong row, whatever the bytes are.
            SchemaError: a change lacks the old values of a sink's key.
        """

    @abstractmethod
    def decode_chunk(self, context: bytes, content: bytes | memoryview) -> ChunkRows:
        """Decode a chunk. Every value equals the one that the log would give for the same row.

        Raises:
            DamagedError: the bytes are no chunk.
        """

    @abstractmethod
    def sees(self, snapshot: Json, transactions: Sequence[Transaction]) -> npt.NDArray[np.bool_]:
        """Return which transactions a snapshot, of `Chunk.sees`, surely sees."""

    @abstractmethod
    def place_of_chunk(self, high: Json) -> Transaction:
        """Return what the rows of a chunk say of their place, from `Chunk.high`; they have no transaction id."""


def pack_frame(message: bytes) -> bytes:
    """Return a message as a frame."""
    return len(message).to_bytes(4, "little") + message


def unpack_frames(frames: bytes | memoryview) -> Iterator[memoryview]:
    """Yield the messages of frames.

    Raises:
        ValueError: the bytes do not consist of whole frames.
    """
    view: Any = memoryview(frames)
    at, end = 0, len(view)
    while at < end:
        if at + 4 > end:
            raise ValueError(f"frame header at byte {at} is cut off")
        size = int.from_bytes(view[at : at + 4], "little")
        if at + 4 + size > end:
            raise ValueError(f"frame of {size} bytes at byte {at} is cut off")
        yield view[at + 4 : at + 4 + size]
        at += 4 + size
