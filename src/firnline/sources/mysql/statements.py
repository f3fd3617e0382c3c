"""Statements in the log: those that begin and end transactions, that change tables, and that must not be there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache


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
_DROP = re.compile(rf"DROP\s+TABLE(?:\s+IF\s+EXISTS)?\s*({_TABLE}(?:\s*,\s*{_TABLE})*)", re.IGNORECASE)
_RENAME = re.compile(r"RENAME\s+TABLES?(?:\s+IF\s+EXISTS)?\s*(.*)", re.IGNORECASE | re.DOTALL)
_DATABASE = re.compile(r"(?:DROP|ALTER)\s+(?:DATABASE|SCHEMA)\b", re.IGNORECASE)
_SILENT_CHANGES = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), effect)
    for pattern, effect in (
        (r"^DROP\s+(TABLE|DATABASE|SCHEMA)\b", "removed the rows: they stay here"),
        (r"^(RENAME\s+TABLE|ALTER\b.*?\bRENAME\s+(TO|AS)\b)", "gave the rows to another name: they stay here"),
        (r"^ALTER\b.*\b(DROP|TRUNCATE|EXCHANGE|DISCARD|IMPORT)\s+(PARTITION|TABLESPACE)\b", "changed whole partitions"),
        (r"^ALTER\b.*\b(MODIFY|CHANGE|CONVERT)\b", "may have changed values: rows from before keep their old ones"),
        (r"^ALTER\b.*\bADD\b(?!\s+(INDEX|KEY|UNIQUE|FULLTEXT|SPATIAL|PRIMARY|CONSTRAINT|FOREIGN|CHECK|PARTITION)\b)"
         r".*\b(DEFAULT|NOT\s+NULL|AS|AUTO_INCREMENT)\b", "added a column with values: rows from before lack them"),
    )
)  # fmt: skip
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
        if first == "ALTER" and (renamed := re.search(rf"\bRENAME\s+(?:TO|AS)\s+({_TABLE})", plain, re.IGNORECASE)):
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


def find_silent(statement: str) -> str:
    """Return how DDL may change rows that are there already, which no row event tells; empty if it does not."""
    text = _LITERAL.sub("''", _COMMENT.sub(lambda found: f" {found.group(1) or ''} ", statement)).strip()
    shown = " ".join(statement.split())[:200]
    for pattern, effect in _SILENT_CHANGES:
        if pattern.search(text):
            return f"{shown!r} {effect}"
    return ""


def _table(name: str, database: str) -> str:
    found = _TABLE_PARTS.fullmatch(name.strip())
    assert found is not None  # a part of a match of the same pattern
    first, second = found.group(1), found.group(2)
    return f"{_unquote(first)}.{_unquote(second)}" if second else f"{database}.{_unquote(first)}"


def _unquote(name: str) -> str:
    return name[1:-1].replace(name[0] * 2, name[0]) if name[0] in '`"' else name
