"""Statements in the log: those that begin and end transactions, that change tables, and that must not be there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import lru_cache

from firnline.sources.cdc.log import SilentEffect


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
    ROWS = auto()  # changes rows: the server logs statements instead of rows


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of the log."""

    kind: Kind
    tables: tuple[str, ...] = ()  # those that DDL names, as database.table


_COMMENT = re.compile(r"/\*M?!\d*(.*?)\*/|/\*.*?\*/|--[ \t][^\n]*|#[^\n]*", re.DOTALL)
_LITERAL = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"", re.DOTALL)
_QUOTED = re.compile(rf"{_LITERAL.pattern}|`(?:[^`]|``)*`", re.DOTALL)  # texts and names
_NAME = r"(?:`(?:[^`]|``)+`|\"(?:[^\"]|\"\")+\"|[\w$\u0080-\uffff]+)"
_TABLE = rf"{_NAME}(?:\s*\.\s*{_NAME})?"
_TABLE_PARTS = re.compile(rf"({_NAME})(?:\s*\.\s*({_NAME}))?")
_TRUNCATE = re.compile(rf"TRUNCATE\s+(?:TABLE\s+)?({_TABLE})\s*;?\s*$", re.IGNORECASE)
_TABLE_DDL = re.compile(
    rf"(?:CREATE(?:\s+OR\s+REPLACE)?|ALTER(?:\s+ONLINE)?(?:\s+IGNORE)?)\s+TABLE(?:\s+IF\s+(?:NOT\s+)?EXISTS)?\s*({_TABLE})",
    re.IGNORECASE,
)
_DROP = re.compile(rf"DROP\s+TABLES?(?:\s+IF\s+EXISTS)?\s*({_TABLE}(?:\s*,\s*{_TABLE})*)", re.IGNORECASE)
_RENAME = re.compile(r"RENAME\s+TABLES?(?:\s+IF\s+EXISTS)?\s*(.*)", re.IGNORECASE | re.DOTALL)
_DROP_DATABASE = re.compile(rf"DROP\s+(?:DATABASE|SCHEMA)(?:\s+IF\s+EXISTS)?\s*({_NAME})", re.IGNORECASE)
_DATABASE = re.compile(r"(?:DROP|ALTER)\s+(?:DATABASE|SCHEMA)\b", re.IGNORECASE)
# Of a table. A name in quotes is none of these words.
_NEW_NAME = rf"(?<![`\"])\bRENAME\b(?:\s*(?:TO|AS)\b|\s*=)?\s*(?!(?:TO|AS|COLUMN|INDEX|KEY)\b)({_TABLE})"
_RENAMES = re.compile(rf"^(RENAME\s+TABLES?\b|ALTER\b.*?{_NEW_NAME})", re.IGNORECASE | re.DOTALL)
_READ, _EMPTY, _REPLACE = SilentEffect("", "read"), SilentEffect("", "empty"), SilentEffect("", "replace")
_SILENT_CHANGES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), replace(way, reason=effect))
    for pattern, effect, way in (
        (r"^DROP\s+TABLES?\b", "removed the table: its rows stay here until it comes again", _REPLACE),
        (r"^CREATE\s+OR\s+REPLACE\b", "replaced the table", _REPLACE),
        (r"^ALTER\s+(ONLINE\s+)?IGNORE\b", "may have removed rows: they stay here", _EMPTY),
        (r"^ALTER\b.*\b(DROP|TRUNCATE|EXCHANGE|DISCARD|IMPORT)\s+(PARTITION|TABLESPACE)\b",
         "changed whole partitions", _EMPTY),
        (r"^ALTER\b.*\b(MODIFY|CHANGE|CONVERT)\b",
         "may have changed values: rows from before keep their old ones", _READ),
        (r"^ALTER\b.*\bRENAME\s+COLUMN\b", "renamed a column: rows from before have it under its old name", _READ),
        (r"^ALTER\b.*\bADD\b(?!\s+(INDEX|KEY|UNIQUE|FULLTEXT|SPATIAL|PRIMARY|CONSTRAINT|FOREIGN|CHECK|PARTITION)\b)"
         r".*\b(DEFAULT(?!\s+NULL\b)|NOT\s+NULL|AS|AUTO_INCREMENT|SERIAL)\b",
         "added a column with values: rows from before lack them", _READ),
    )
)  # fmt: skip
_MAKES_CASCADE = re.compile(r"\bON\s+(DELETE|UPDATE)\s+(CASCADE|SET\s+(NULL|DEFAULT))\b", re.IGNORECASE)
_RENAMED_FROM = SilentEffect("gave the rows to another name: they stay here until the table comes again", "replace")
_RENAMED_TO = SilentEffect("gave the table the rows of another one", "replace")
_SILENT = frozenset(
    {
        "ALTER", "ANALYZE", "BINLOG", "CACHE", "CHANGE", "CHECK", "CHECKSUM", "CREATE", "DROP", "FLUSH", "GRANT",
        "INSTALL", "KILL", "LOCK", "OPTIMIZE", "PURGE", "RELEASE", "RENAME", "REPAIR", "RESET", "REVOKE", "SAVEPOINT",
        "SET", "SHUTDOWN", "START", "STOP", "UNINSTALL", "UNLOCK", "USE",
    }
)  # fmt: skip


@lru_cache(maxsize=512)  # BEGIN and COMMIT come again and again
def classify(statement: str, database: str) -> Statement:
    """Return what a statement means; `database` is the one that was in use."""
    if statement == "BEGIN":
        return Statement(Kind.BEGIN)
    text = _COMMENT.sub(lambda found: f" {found.group(1) or ''} ", statement).strip().rstrip(";").strip()
    word = re.match(r"[A-Za-z]*", text)
    first = word.group().upper() if word else ""
    upper = text.upper()
    if first in ("BEGIN", "COMMIT") or upper == "START TRANSACTION":
        return Statement(Kind.COMMIT if first == "COMMIT" else Kind.BEGIN)
    if first == "ROLLBACK":
        return Statement(Kind.ROLLBACK_TO if re.match(r"ROLLBACK\s+(WORK\s+)?TO\b", upper) else Kind.ROLLBACK)
    if first == "XA":
        return Statement(Kind.XA_START if re.match(r"XA\s+(START|BEGIN)\b", upper) else Kind.XA)
    if first == "TRUNCATE" and (found := _TRUNCATE.match(text)):
        return Statement(Kind.TRUNCATE, (_table(found.group(1), database),))
    if found := _TABLE_DDL.match(text):
        plain = _LITERAL.sub("''", text)
        if first == "CREATE" and re.search(r"\bSELECT\b", _QUOTED.sub("''", text), re.IGNORECASE):
            return Statement(Kind.ROWS)  # with rows, it would be logged without the SELECT
        tables = [_table(found.group(1), database)]
        if first == "ALTER" and (renamed := re.search(_NEW_NAME, plain, re.IGNORECASE)):
            tables.append(_table(renamed.group(1), database))
        return Statement(Kind.DDL, tuple(tables))
    if found := _DROP.match(text):
        return Statement(Kind.DDL, tuple(_table(one, database) for one in re.findall(_TABLE, found.group(1))))
    if found := _RENAME.match(text):
        names = [one for one in re.findall(_TABLE, found.group(1)) if one.upper() != "TO"]
        return Statement(Kind.DDL, tuple(_table(one, database) for one in names))
    if _DATABASE.match(text):
        return Statement(Kind.DDL)
    if first in _SILENT:
        return Statement(Kind.SILENT)
    return Statement(Kind.ROWS)


def find_silent(statement: str, tables: Sequence[str]) -> dict[str, SilentEffect]:
    """Return, by table, how DDL may change rows that are there already, which no row event tells.

    `tables` are those of `classify`. A table that a statement does not change so is left out. `database.*` stands for
    all tables of a database.
    """
    text = _LITERAL.sub("''", _COMMENT.sub(lambda found: f" {found.group(1) or ''} ", statement)).strip()
    shown = " ".join(statement.split())[:200]
    found: dict[str, SilentEffect] = {}
    if _RENAMES.search(text):  # old and new names in turn; a name may be both: then it has other rows now
        found = dict.fromkeys(tables[::2], _RENAMED_FROM) | dict.fromkeys(tables[1::2], _RENAMED_TO)
    elif dropped := _DROP_DATABASE.match(text):
        found = {f"{_unquote(dropped.group(1))}.*": replace(_REPLACE, reason="removed the database")}
    elif (effect := next((effect for pattern, effect in _SILENT_CHANGES if pattern.search(text)), None)) is not None:
        found = dict.fromkeys(tables, effect)
    return {table: replace(effect, reason=f"{shown!r} {effect.reason}") for table, effect in found.items()}


def makes_cascade(statement: str) -> bool:
    """Return whether DDL makes a foreign key by which the server changes rows by itself."""
    return bool(_MAKES_CASCADE.search(_LITERAL.sub("''", statement)))


def _table(name: str, database: str) -> str:
    found = _TABLE_PARTS.fullmatch(name.strip())
    assert found is not None  # a part of a match of the same pattern
    first, second = found.group(1), found.group(2)
    return f"{_unquote(first)}.{_unquote(second)}" if second else f"{database}.{_unquote(first)}"


def _unquote(name: str) -> str:
    return name[1:-1].replace(name[0] * 2, name[0]) if name[0] in '`"' else name
