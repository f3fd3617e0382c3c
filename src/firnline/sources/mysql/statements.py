"""Statements in the log: those that begin and end transactions, that change tables, and that must not be there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import lru_cache
from itertools import chain, pairwise

from firnline.sources.cdc.log import SilentEffect
from firnline.sources.mysql.tokens import Token, split


class Kind(Enum):
    """What a statement in the log means to a reader of rows."""

    BEGIN = auto()
    COMMIT = auto()
    ROLLBACK = auto()
    ROLLBACK_TO = auto()  # rows between the savepoint and here are undone
    XA_START = auto()
    XA = auto()  # another statement of XA
    TRUNCATE = auto()  # empties a table
    DDL = auto()  # changes a table
    SILENT = auto()  # says nothing about rows
    ROWS = auto()  # changes rows, or is unknown: the server logs statements instead of rows


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the log.

    `effects` say, by table, how DDL may change rows that are there already, which no row event tells. A table that a
    statement does not change so is left out. `database.*` stands for all tables of a database.
    """

    kind: Kind
    tables: tuple[str, ...] = ()  # those that DDL names, as database.table
    effects: tuple[tuple[str, SilentEffect], ...] = ()


_DROPPED = SilentEffect("removed the table: its rows stay here until it comes again", "replace")
_DATABASE_DROPPED = SilentEffect("removed the database", "replace")
_REPLACED = SilentEffect("replaced the table", "replace")
_RENAMED_FROM = SilentEffect("gave the rows to another name: they stay here until the table comes again", "replace")
_RENAMED_TO = SilentEffect("gave the table the rows of another one", "replace")
_ROWS_REMOVED = SilentEffect("may have removed rows: they stay here", "empty")
_PARTITIONS = SilentEffect("changed whole partitions", "empty")
_PARTITION_ADDED = SilentEffect("gave the table the rows of another one", "read")
_VALUES = SilentEffect("may have changed values: rows from before keep their old ones", "read")
_COLUMN_RENAMED = SilentEffect("renamed a column: rows from before have it under its old name", "read")
_COLUMN_DROPPED = SilentEffect("removed a column: rows from before keep its values, also if it comes again", "read")
_COLUMN_ADDED = SilentEffect("added a column with values: rows from before lack them", "read")
_UNKNOWN = SilentEffect("is not known to this version of Firnline and may have changed rows", "read")
_STRENGTH = ("", "read", "empty", "replace")

_SERVER_DATABASE = "mysql"
_CHANGES = {  # of rows: the words that may stand before the table
    "INSERT": {"LOW_PRIORITY", "DELAYED", "HIGH_PRIORITY", "IGNORE", "INTO"},
    "REPLACE": {"LOW_PRIORITY", "DELAYED", "INTO"},
    "UPDATE": {"LOW_PRIORITY", "IGNORE"},
    "DELETE": {"LOW_PRIORITY", "QUICK", "IGNORE", "FROM"},
}  # fmt: skip
_SILENT = frozenset(
    {
        "CACHE", "CHANGE", "CHECKSUM", "FLUSH", "GRANT", "INSTALL", "KILL", "LOCK", "PURGE", "RELEASE", "RESET",
        "REVOKE", "SAVEPOINT", "SET", "SHUTDOWN", "STOP", "UNINSTALL", "UNLOCK", "USE",
    }
)  # fmt: skip
_SILENT_PAIRS = {
    "ANALYZE": {"TABLE", "TABLES"}, "CHECK": {"TABLE", "TABLES", "VIEW"}, "OPTIMIZE": {"TABLE", "TABLES"},
    "REPAIR": {"VIEW"}, "RENAME": {"USER"}, "LOAD": {"INDEX"},
    "START": {"SLAVE", "REPLICA", "ALL", "GROUP_REPLICATION"},
}  # fmt: skip
_SILENT_OBJECTS = frozenset(  # of CREATE, ALTER and DROP
    {
        "EVENT", "FUNCTION", "GROUP", "INDEX", "INSTANCE", "LIBRARY", "PACKAGE", "PREPARE", "PROCEDURE", "REFERENCE",
        "ROLE", "SEQUENCE", "SERVER", "TABLESPACE", "TRIGGER", "USER", "VIEW",
    }
)  # fmt: skip
_BEFORE_OBJECTS = frozenset(
    {
        "AGGREGATE", "CLUSTERING", "DUALITY", "EXTERNAL", "FULLTEXT", "IGNORE", "JSON", "LOGFILE", "MATERIALIZED",
        "OFFLINE", "ONLINE", "OR", "RELATIONAL", "REPLACE", "RESOURCE", "SPATIAL", "TEMPORARY", "UNDO", "UNIQUE",
        "VECTOR",
    }
)  # fmt: skip
_KEYS = frozenset({"INDEX", "KEY", "UNIQUE", "FULLTEXT", "SPATIAL", "PRIMARY", "CONSTRAINT", "FOREIGN", "CHECK"})
_OPTIONS = frozenset(  # of a table, that leave its rows alone
    {
        "ALGORITHM", "AUTOEXTEND_SIZE", "AUTO_INCREMENT", "AVG_ROW_LENGTH", "CHARSET", "CHECKSUM", "COLLATE", "COMMENT",
        "COMPRESSION", "DELAY_KEY_WRITE", "ENCRYPTED", "ENCRYPTION", "ENCRYPTION_KEY_ID", "ENGINE", "ENGINE_ATTRIBUTE",
        "INSERT_METHOD", "KEY_BLOCK_SIZE", "LOCK", "MAX_ROWS", "MIN_ROWS", "PACK_KEYS", "PAGE_CHECKSUM",
        "PAGE_COMPRESSED", "PAGE_COMPRESSION_LEVEL", "ROW_FORMAT", "SECONDARY_ENGINE", "SECONDARY_ENGINE_ATTRIBUTE",
        "STATS_AUTO_RECALC", "STATS_PERSISTENT", "STATS_SAMPLE_PAGES", "TABLESPACE", "TABLE_CHECKSUM", "TRANSACTIONAL",
    }
)  # fmt: skip
_ENGINES = frozenset({"INNODB", "MYISAM", "ARIA", "MEMORY", "HEAP", "ROCKSDB", "NDB", "NDBCLUSTER"})  # that keep rows
_PARTITION_EFFECTS = {  # of what is done to partitions, and ends a statement
    "ADD": None, "ANALYZE": None, "CHECK": None, "COALESCE": None, "OPTIMIZE": None, "REBUILD": None,
    "REORGANIZE": None, "DROP": _PARTITIONS, "TRUNCATE": _PARTITIONS, "DISCARD": _PARTITIONS, "IMPORT": _PARTITIONS,
    "REPAIR": _ROWS_REMOVED,
}  # fmt: skip
_COLUMN_VALUES = frozenset({"AS", "AUTO_INCREMENT", "SERIAL", "PRIMARY"})  # that give an added column values

_CASCADES = ("CASCADE", "SET NULL", "SET DEFAULT")


class _UnknownStatementError(Exception):
    """A statement that this module cannot read."""


@lru_cache(maxsize=512)  # BEGIN and COMMIT come again and again
def classify(statement: str, database: str, *, sql_mode: int = 0, folds_names: bool = False) -> Statement:
    """Return what a statement means.

    Args:
        statement: The statement, as the log has it.
        database: The one that was in use.
        sql_mode: The mode under which it ran, as a number.
        folds_names: The server has the names of tables in small letters (`lower_case_table_names`).
    """
    if statement == "BEGIN":
        return Statement(Kind.BEGIN)
    tokens = _skip_settings(split(statement, sql_mode))
    first = next(tokens, Token()).word
    try:
        if first in _CHANGES:
            is_of_server = _changes_server_table(first, tokens, database)
            return Statement(Kind.SILENT if is_of_server else Kind.ROWS)
        found = _read(first, _Cursor(list(tokens), database, folds_names))
    except _UnknownStatementError:
        return Statement(Kind.ROWS)
    shown = " ".join(statement.split())[:200]
    effects = tuple((one, replace(effect, reason=f"{shown!r} {effect.reason}")) for one, effect in found.effects)
    return replace(found, effects=effects)


def makes_cascade(statement: str) -> bool:
    """Return whether DDL makes a foreign key by which the server changes rows by itself."""
    words = " ".join(token.word for token in split(statement))
    return any(f"ON {event} {action}" in words for event in ("DELETE", "UPDATE") for action in _CASCADES)


def _skip_settings(tokens: Iterator[Token]) -> Iterator[Token]:
    """Pass over `SET STATEMENT ... FOR` of MariaDB."""
    while True:
        first = next(tokens, Token())
        second = next(tokens, Token()) if first.word == "SET" else None
        if second is None or second.word != "STATEMENT":
            return chain([first] if second is None else [first, second], tokens)
        depth = 0
        for token in tokens:
            depth += (token.word == "(") - (token.word == ")")
            if token.word == "FOR" and not depth:
                break


def _changes_server_table(first: str, tokens: Iterator[Token], database: str) -> bool:
    """Return whether a change of rows is of the server's own tables, and names nothing of another database."""
    tokens = (token for token in tokens if token.word not in _CHANGES[first])
    last = next(tokens, Token())
    if not last.name:
        return False
    is_first = True
    for token in tokens:
        if token.word == "." and not last.word.isdigit():
            if last.name.lower() != _SERVER_DATABASE:
                return False
            if is_first:
                database = last.name
        is_first, last = False, token
    return database.lower() == _SERVER_DATABASE


class _Cursor:
    """A place in the tokens of a statement."""

    def __init__(self, tokens: Sequence[Token], database: str, folds_names: bool) -> None:
        self._tokens = tokens
        self._database = database
        self._folds_names = folds_names
        self._end = len(tokens)
        while self._end and tokens[self._end - 1].word == ";":
            self._end -= 1
        self._at = 0

    def peek(self, ahead: int = 0) -> str:
        """Return a word or sign; empty at the end and of what stands in quotes."""
        return self._tokens[self._at + ahead].word if self._at + ahead < self._end else ""

    @property
    def is_end(self) -> bool:
        return self._at >= self._end

    def take(self, *words: str) -> bool:
        """Pass over words, if they come next."""
        is_next = all(self.peek(ahead) == word for ahead, word in enumerate(words))
        self._at += len(words) * is_next
        return is_next

    def take_any(self, *words: str) -> str:
        """Pass over one of several words, if it comes next, and return it."""
        word = self.peek()
        if not word or word not in words:
            return ""
        self._at += 1
        return word

    def skip(self) -> str:
        """Pass over a token, or over everything between parentheses; return the word."""
        word, depth = self.peek(), 0
        while not self.is_end:
            depth += (self.peek() == "(") - (self.peek() == ")")
            self._at += 1
            if depth <= 0:
                break
        return word

    def skip_wait(self) -> None:
        """Pass over how long a statement of MariaDB waits for locks."""
        if self.take("WAIT"):
            self.skip()
        else:
            self.take("NOWAIT")

    def skip_exists(self) -> None:
        if not self.take("IF", "EXISTS"):
            self.take("IF", "NOT", "EXISTS")

    def name(self) -> str:
        """Pass over a name and return it."""
        found = self._tokens[self._at].name if not self.is_end else ""
        if not found:
            raise _UnknownStatementError
        self._at += 1
        return found.lower() if self._folds_names else found

    def table(self) -> str:
        """Pass over the name of a table and return it as database.table."""
        first = self.name()
        if self.take("."):
            return f"{first}.{self.name()}"
        database = self._database.lower() if self._folds_names else self._database
        return f"{database}.{first}"

    def clauses(self) -> Iterator[_Cursor]:
        """Yield cursors over what stands between commas; each goes on to the end of the statement."""
        start = self._at
        while start < self._end:
            yield self._part(start, self._end)
            self._at, depth = start, 0
            while not self.is_end and (depth or self.peek() != ","):
                depth += (self.peek() == "(") - (self.peek() == ")")
                self._at += 1
            start = self._at + 1

    def clause(self) -> _Cursor:
        """Return a cursor over what stands before the next comma."""
        start, depth = self._at, 0
        while not self.is_end and (depth or self.peek() != ","):
            depth += (self.peek() == "(") - (self.peek() == ")")
            self._at += 1
        end, self._at = self._at, start
        return self._part(start, end)

    def words(self) -> list[str]:
        """Return the words from here on, also those between parentheses."""
        return [token.word for token in self._tokens[self._at : self._end]]

    def outer_words(self) -> list[str]:
        """Return the words from here on that no parentheses enclose."""
        found = []
        while not self.is_end:
            found.append(self.skip())
        return found

    def _part(self, start: int, end: int) -> _Cursor:
        part = _Cursor((), self._database, self._folds_names)
        part._tokens, part._at, part._end = self._tokens, start, end
        return part


def _read(first: str, rest: _Cursor) -> Statement:
    if first == "BEGIN" and (rest.is_end or rest.words() == ["WORK"]):
        return Statement(Kind.BEGIN)
    if first == "START" and rest.take("TRANSACTION"):
        return Statement(Kind.BEGIN)
    if first == "COMMIT":
        return Statement(Kind.COMMIT)
    if first == "ROLLBACK":
        rest.take("WORK")
        return Statement(Kind.ROLLBACK_TO if rest.take("TO") else Kind.ROLLBACK)
    if first == "XA":
        return Statement(Kind.XA_START if rest.take_any("START", "BEGIN") else Kind.XA)
    if first == "TRUNCATE":
        return _truncate(rest)
    if first == "RENAME" and rest.take_any("TABLE", "TABLES"):
        return _rename(rest)
    if first in ("CREATE", "ALTER", "DROP"):
        return _definition(first, rest)
    if first in _SILENT:
        return Statement(Kind.SILENT)
    rest.take_any("LOCAL", "NO_WRITE_TO_BINLOG")
    if rest.peek() in _SILENT_PAIRS.get(first, ()):
        return Statement(Kind.SILENT)
    if first == "REPAIR" and rest.take_any("TABLE", "TABLES"):
        return _ddl(dict.fromkeys(_tables(rest), _ROWS_REMOVED))
    raise _UnknownStatementError


def _ddl(effects: dict[str, SilentEffect]) -> Statement:
    return Statement(Kind.DDL, tuple(effects), tuple(effects.items()))


def _tables(rest: _Cursor) -> list[str]:
    found = [rest.table()]
    while rest.take(","):
        found.append(rest.table())
    return found


def _truncate(rest: _Cursor) -> Statement:
    rest.take("TABLE")
    table = rest.table()
    rest.skip_wait()
    if rest.take_any("DROP", "REUSE") and not rest.take("STORAGE"):
        raise _UnknownStatementError
    if not rest.is_end:
        raise _UnknownStatementError
    return Statement(Kind.TRUNCATE, (table,))


def _rename(rest: _Cursor) -> Statement:
    rest.skip_exists()
    old: list[str] = []
    new: list[str] = []
    while not old or rest.take(","):
        old.append(rest.table())
        rest.skip_wait()
        if not rest.take("TO"):
            raise _UnknownStatementError
        new.append(rest.table())
    if not rest.is_end:
        raise _UnknownStatementError
    tables = tuple(chain.from_iterable(zip(old, new, strict=True)))
    # A name may be both old and new: then it has other rows now.
    effects = dict.fromkeys(old, _RENAMED_FROM) | dict.fromkeys(new, _RENAMED_TO)
    return Statement(Kind.DDL, tables, tuple(effects.items()))


def _definition(first: str, rest: _Cursor) -> Statement:
    """Read CREATE, ALTER or DROP."""
    before = set()
    while True:
        if word := rest.take_any(*_BEFORE_OBJECTS):
            before.add(word)
        elif rest.take("SQL", "SECURITY") or rest.take("ALGORITHM", "="):
            rest.skip()
        elif rest.take("DEFINER", "="):
            while not rest.is_end and rest.peek() not in _SILENT_OBJECTS | _BEFORE_OBJECTS | {"SQL"}:
                rest.skip()
        else:
            break
    kind = rest.skip()
    if kind in _SILENT_OBJECTS:
        return Statement(Kind.SILENT)
    if kind in ("DATABASE", "SCHEMA"):
        if first == "CREATE":
            return Statement(Kind.SILENT)
        rest.skip_exists()
        return Statement(Kind.DDL, (), ((f"{rest.name()}.*", _DATABASE_DROPPED),) if first == "DROP" else ())
    if kind not in ("TABLE", "TABLES"):
        raise _UnknownStatementError
    if "TEMPORARY" in before:
        return Statement(Kind.SILENT)
    rest.skip_exists()
    if first == "DROP":
        tables = _tables(rest)
        rest.skip_wait()
        rest.take_any("RESTRICT", "CASCADE")
        if not rest.is_end:
            raise _UnknownStatementError
        return _ddl(dict.fromkeys(tables, _DROPPED))
    if first == "ALTER":
        return _alter(rest, ignores="IGNORE" in before)
    table = rest.table()
    # In row format, the rows of such a statement would be logged as rows, and the statement without its query.
    if "SELECT" in rest.words() or {"TABLE", "VALUES"} & set(rest.outer_words()):
        raise _UnknownStatementError
    return Statement(Kind.DDL, (table,), ((table, _REPLACED),) if "REPLACE" in before else ())


def _alter(rest: _Cursor, *, ignores: bool) -> Statement:
    table = rest.table()
    rest.skip_wait()
    tables = [table]
    effects: dict[str, SilentEffect] = {}

    def note(name: str, effect: SilentEffect | None) -> None:
        known = effects.get(name)
        if effect is not None and (known is None or _STRENGTH.index(known.again) < _STRENGTH.index(effect.again)):
            effects[name] = effect
        if name not in tables:
            tables.append(name)

    note(table, _ROWS_REMOVED if ignores else None)
    for clause in rest.clauses():
        first = clause.peek()
        if first in _PARTITION_EFFECTS and clause.peek(1) == "PARTITION":
            note(table, _PARTITION_EFFECTS[first])
            break
        if clause.take("EXCHANGE", "PARTITION"):
            note(table, _PARTITIONS)
            clause.skip()
            note(_table_behind(clause, "WITH"), _PARTITIONS)
            break
        if clause.take("CONVERT", "PARTITION"):
            note(table, _PARTITIONS)
            clause.skip()
            note(_table_behind(clause, "TO"), _RENAMED_TO)
            break
        if clause.take("CONVERT", "TABLE"):
            note(table, _PARTITION_ADDED)
            note(clause.table(), _RENAMED_FROM)
            break
        if first == "PARTITION" or (first in ("REMOVE", "UPGRADE") and clause.peek(1) == "PARTITIONING"):
            break
        if first == "RENAME" and clause.peek(1) not in ("COLUMN", "INDEX", "KEY"):
            clause.skip()
            clause.take_any("TO", "AS", "=")
            note(table, _RENAMED_FROM)
            note(clause.table(), _RENAMED_TO)
        else:
            note(table, _clause_effect(clause.clause()))
    return Statement(Kind.DDL, tuple(tables), tuple(effects.items()))


def _table_behind(clause: _Cursor, word: str) -> str:
    if not clause.take(word, "TABLE"):
        raise _UnknownStatementError
    return clause.table()


def _clause_effect(clause: _Cursor) -> SilentEffect | None:
    """Return what a clause of ALTER TABLE does to the rows of the table."""
    first, second = clause.peek(), clause.peek(1)
    if first == "ADD":
        if second in _KEYS or (second in ("VECTOR", "CLUSTERING") and clause.peek(2) in ("INDEX", "KEY")):
            return None
        if (second, clause.peek(2)) == ("PERIOD", "FOR"):
            return None
        return _UNKNOWN if (second, clause.peek(2)) == ("SYSTEM", "VERSIONING") else _added_column(clause.words())
    if first == "DROP":
        if second in _KEYS or (second, clause.peek(2)) == ("PERIOD", "FOR"):
            return None
        return _ROWS_REMOVED if (second, clause.peek(2)) == ("SYSTEM", "VERSIONING") else _COLUMN_DROPPED
    if first in ("MODIFY", "CHANGE", "CONVERT"):
        return _VALUES
    if first == "RENAME":
        return _COLUMN_RENAMED if second == "COLUMN" else None
    if first in ("DISCARD", "IMPORT") and second == "TABLESPACE":
        return _PARTITIONS
    if first == "ALTER":
        words = clause.words()
        pairs = set(pairwise(words))
        is_known = {("SET", "DEFAULT"), ("DROP", "DEFAULT")} & pairs or {
            "VISIBLE", "INVISIBLE", "ENFORCED", "IGNORED",
        } & set(words)  # fmt: skip
        return None if is_known else _UNKNOWN
    if (first, second) in (("ENABLE", "KEYS"), ("DISABLE", "KEYS"), ("ORDER", "BY")):
        return None
    if clause.words() in (["FORCE"], ["WITH", "VALIDATION"], ["WITHOUT", "VALIDATION"], ["SECONDARY_LOAD"],
                          ["SECONDARY_UNLOAD"]):  # fmt: skip
        return None
    return _options_effect(clause)


def _added_column(words: list[str]) -> SilentEffect | None:
    has_values = bool(_COLUMN_VALUES & set(words))
    is_null = False
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        has_values |= (word == "DEFAULT" and behind != "NULL") or (word == "NOT" and behind == "NULL")
        is_null |= word == "NULL"
    if "TIMESTAMP" in words and not is_null:  # the time of now, if explicit_defaults_for_timestamp is off
        has_values = True
    return _COLUMN_ADDED if has_values else None


def _options_effect(clause: _Cursor) -> SilentEffect | None:
    """Return what options of a table do to its rows; of other clauses, that they are unknown."""
    while not clause.is_end:
        clause.take(",")
        clause.take("DEFAULT")
        if clause.take("CHARACTER", "SET") or clause.take("DATA", "DIRECTORY") or clause.take("INDEX", "DIRECTORY"):
            option = ""
        elif not (option := clause.take_any(*_OPTIONS)):
            has_partitions = clause.peek() == "PARTITION" or clause.take("REMOVE", "PARTITIONING")
            return None if has_partitions else _UNKNOWN
        clause.take("=")
        if option == "ENGINE" and clause.peek() not in _ENGINES:
            return _ROWS_REMOVED
        clause.skip()
    return None
