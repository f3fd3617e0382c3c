"""Tables as the server's catalogue describes them, put into the words of the log: so both give the same schema."""

from __future__ import annotations

import ipaddress
import re
import struct
import uuid
from dataclasses import dataclass
from typing import Any

from firnline.errors import SourceError
from firnline.sources.cdc.tables import without_table
from firnline.sources.mysql import charsets, tables
from firnline.sources.mysql.convert import select_date
from firnline.sources.mysql.server import Server, query, quoted, quoted_table
from firnline.sources.mysql.tables import Table, TypeOf, make_table
from firnline.types import Json

_INTEGERS = {
    "tinyint": tables.TINY, "smallint": tables.SHORT, "mediumint": tables.INT24, "int": tables.LONG,
    "bigint": tables.LONGLONG,
}  # fmt: skip
_INTEGER_SIZES = {tables.TINY: 1, tables.SHORT: 2, tables.INT24: 3, tables.LONG: 4, tables.LONGLONG: 8}
_BLOBS = {
    "tinyblob": 1, "blob": 2, "mediumblob": 3, "longblob": 4, "tinytext": 1, "text": 2, "mediumtext": 3, "longtext": 4,
}  # fmt: skip
_MOMENTS = {"datetime": tables.DATETIME2, "timestamp": tables.TIMESTAMP2, "time": tables.TIME2}
_GEOMETRIES = frozenset(
    {
        "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon", "geomcollection",
        "geometrycollection",
    }
)  # fmt: skip
_ADDRESSES = {"uuid": 16, "inet6": 16, "inet4": 4}  # of MariaDB: binary in the log
_TYPE = re.compile(r"(\w+)(?:\((.*)\))?([^()]*)$", re.DOTALL)
_VALUE = re.compile(r"'((?:[^'\\]|''|\\.)*)'", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "Z": "\x1a", "b": "\b"}


@dataclass(frozen=True, slots=True)
class Definition:
    """A table, and how to select its rows."""

    table: Table  # as a TABLE_MAP event would describe it
    words: tuple[str, ...]  # of every column: the first word of its type, for the server's own types
    index: str  # by which rows are read; empty: there is none that names a row
    order: tuple[int, ...]  # the columns of the index, in its order
    collations: tuple[str, ...]  # of every column: its type and its collation, as the catalogue writes them

    @property
    def key(self) -> tuple[str, ...]:
        """The columns that name a row, in the order of the table, as `TableSchema.key`."""
        return self.table.schema.key

    def expressions(self) -> str:
        """Return what SELECT asks for."""
        return ", ".join(
            _expression(name, one, word)
            for name, one, word in zip(self.table.names, self.table.types, self.words, strict=True)
        )

    def describe_order(self) -> Json:
        """Return what gives rows their order."""
        return [[self.table.names[c], self.collations[c]] for c in self.order]

    def order_by(self) -> str:
        """Return the columns of the index for ORDER BY."""
        return ", ".join(quoted(self.table.names[c]) for c in self.order)

    def behind(self, key: Json) -> str:
        """Return the condition for rows behind a key, in a form for which the server uses the index."""
        same, parts = list[str](), list[str]()
        for c, value in zip(self.order, key, strict=True):
            name, one, word = quoted(self.table.names[c]), self.table.types[c], self.words[c]
            # Of numbers, the server would not use the index. By its name, an empty one is equal to value 0.
            if one.code == tables.ENUM and value and "" not in one.names:
                is_same, is_greater = f"{name} = {_enum(one, value)}", _is_behind_enum(name, one, value)
            else:
                text = literal(one, word, value)
                is_same, is_greater = f"{name} = {text}", f"{name} > {text}"
            parts.append(f"({' AND '.join([*same, is_greater])})")
            same.append(is_same)
        return " OR ".join(parts)


def read_definition(db: Any, server: Server, table: str) -> Definition:
    """Return the definition of a table.

    Raises:
        SourceError: the server does not answer, has no such table, or has a type that is unknown.
    """
    columns = query(db, server.host, f"SHOW FULL COLUMNS FROM {quoted_table(table)}")
    names, words, types, collations, virtual = [], [], [], [], set()
    for name, kind, collation, *_, extra, _, _ in columns:
        try:
            word, one = parse_type(str(kind), str(collation or ""))
        except ValueError as error:
            raise SourceError(
                f"column {name} of table {table}: {error}", hint=f"Leave the table out: {without_table(table)}."
            ) from error
        names.append(str(name))
        words.append(word)
        types.append(one)
        collations.append(f"{kind} {collation or ''}".strip())
        if "VIRTUAL" in str(extra).upper():
            virtual.add(str(name))
    index, order = _find_index(db, server, table, virtual)
    numbers = tuple(names.index(name) for name in order)
    return Definition(make_table(table, names, types, numbers), tuple(words), index, numbers, tuple(collations))


def _find_index(db: Any, server: Server, table: str, virtual: set[str]) -> tuple[str, list[str]]:
    """Return the index that names a row, and its columns: the primary key, or what the server takes for one."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in query(db, server.host, f"SHOW INDEX FROM {quoted_table(table)}"):
        if not int(row[1]):
            found.setdefault(str(row[2]), []).append(row)
    for name, parts in found.items():
        is_primary = name == "PRIMARY"
        if is_primary or all(_is_whole(part, virtual, server) for part in parts):
            return name, [str(part[4]) for part in parts]
    return "", []


def _is_whole(part: tuple[Any, ...], virtual: set[str], server: Server) -> bool:
    """Return whether a part of a unique index is a column as a whole that is never null."""
    column, prefix, may_be_null, method = part[4], part[7], str(part[9]), str(part[10])
    if column is None or prefix is not None or may_be_null == "YES":
        return False
    return not (server.is_mariadb and method == "HASH") and str(column) not in virtual


def parse_type(text: str, collation: str) -> tuple[str, TypeOf]:
    """Return the first word of a type, and the type as the log tells it.

    Args:
        text: The type as the catalogue writes it: `decimal(10,2) unsigned`.
        collation: Of the column; empty: it has none.

    Raises:
        ValueError: the type is unknown.
    """
    plain = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).strip() if not text.startswith(("enum", "set")) else text
    found = _TYPE.match(plain)
    if found is None:
        raise ValueError(f"type {text} is not known to this version of Firnline")
    word, inner, rest = found.group(1).lower(), found.group(2) or "", found.group(3)
    charset = _charset(collation)
    is_unsigned = "unsigned" in rest
    if word in _INTEGERS:
        code = _INTEGERS[word]
        return word, TypeOf(code, 0, is_unsigned=is_unsigned, size=_INTEGER_SIZES[code])
    if word in ("float", "double"):
        is_float = word == "float"
        code = tables.FLOAT if is_float else tables.DOUBLE
        return word, TypeOf(code, 0, is_unsigned=is_unsigned, size=4 if is_float else 8)
    if word == "decimal":
        precision, _, scale = inner.partition(",")
        return word, TypeOf(tables.NEWDECIMAL, 0, int(precision), int(scale or 0), is_unsigned)
    if word in _MOMENTS:
        return word, TypeOf(_MOMENTS[word], int(inner or 0))
    if word in ("enum", "set"):
        names = tuple(_unescape(value) for value in _VALUE.findall(inner))
        code = tables.ENUM if word == "enum" else tables.SET
        return word, TypeOf(code, 0, charset=charset, names=names)
    if word in ("char", "varchar", "binary", "varbinary"):
        code = tables.STRING if word in ("char", "binary") else tables.VARCHAR
        return word, TypeOf(code, int(inner) * (charsets.width(charset) if charset else 1), charset=charset)
    if word in _BLOBS:
        return word, TypeOf(tables.BLOB, _BLOBS[word], charset=charset)
    if word in _ADDRESSES:
        return word, TypeOf(tables.STRING, _ADDRESSES[word])
    if word in _GEOMETRIES:
        return word, TypeOf(tables.GEOMETRY, 4)
    if word == "bit":
        return word, TypeOf(tables.BIT, int(inner), size=(int(inner) + 7) // 8)
    others = {"year": tables.YEAR, "date": tables.DATE, "json": tables.JSON, "vector": tables.VECTOR}
    if word not in others:
        raise ValueError(f"type {text} is not known to this version of Firnline")
    return word, TypeOf(others[word], 0)


def _charset(collation: str) -> str:
    name = collation.partition("_")[0]
    return {"binary": "", "utf8": "utf8mb3"}.get(name, name)


def _unescape(value: str) -> str:
    return re.sub(r"''|\\(.)", lambda m: _ESCAPES.get(m.group(1), m.group(1)) if m.group(1) else "'", value,
                  flags=re.DOTALL)  # fmt: skip


def _expression(name: str, one: TypeOf, word: str) -> str:
    if one.code in (tables.ENUM, tables.SET):
        return f"CAST({quoted(name)} AS UNSIGNED) | 0"  # of MariaDB's casts alone, some have four bytes
    if word in _ADDRESSES:
        return f"CAST({quoted(name)} AS BINARY({_ADDRESSES[word]}))"
    return quoted(name)


# -- keys ---------------------------------------------------------------------------------------------


def key_value(one: TypeOf, raw: bytes) -> Json:
    """Return a value of a key, as it lies in a row of the binary protocol, for `literal`."""
    if one.code in _INTEGER_SIZES:
        return int.from_bytes(raw[: one.size], "little", signed=not one.is_unsigned)
    if one.code in (tables.ENUM, tables.SET, tables.YEAR):
        return int.from_bytes(raw, "little")
    if one.code == tables.BIT:
        return int.from_bytes(raw, "big")
    if one.code in (tables.FLOAT, tables.DOUBLE):
        return float(struct.unpack("<f" if one.code == tables.FLOAT else "<d", raw)[0])
    if one.code == tables.NEWDECIMAL:
        return raw.decode("ascii")
    if one.code == tables.TIME2:
        full = raw.ljust(12, b"\0")
        hours = int.from_bytes(full[1:5], "little") * 24 + full[5]
        micros = int.from_bytes(full[8:12], "little")
        return f"{'-' if full[0] else ''}{hours:02}:{full[6]:02}:{full[7]:02}.{micros:06}"
    if one.code in (tables.DATE, tables.DATETIME2, tables.TIMESTAMP2):
        year, month, day, hour, minute, second, micros = select_date(raw)
        date = f"{year:04}-{month:02}-{day:02}"
        return date if one.code == tables.DATE else f"{date} {hour:02}:{minute:02}:{second:02}.{micros:06}"
    return raw.hex()


def literal(one: TypeOf, word: str, value: Json) -> str:
    """Return a value of a key, as `key_value` gives it, for a statement.

    Raises:
        ValueError: it is none of this type.
    """
    if word in _ADDRESSES:
        return f"'{_address(word, bytes.fromhex(value))}'"
    if isinstance(value, int):
        return str(value)
    if one.code in (tables.FLOAT, tables.DOUBLE):
        return f"{float(value)!r}e0" if "e" not in repr(float(value)) else repr(float(value))
    if one.code == tables.NEWDECIMAL:
        return _matching(value, r"-?[0-9.]+")
    if one.code == tables.DATE:
        return f"DATE'{_matching(value, r'[0-9-]+')}'"
    if one.code == tables.TIME2:
        return f"TIME'{_matching(value, r'[0-9:.-]+')}'"
    if one.code in (tables.DATETIME2, tables.TIMESTAMP2):
        return f"TIMESTAMP'{_matching(value, r'[0-9 :.-]+')}'"
    return f"{'_' + one.charset if one.charset else ''} x'{bytes.fromhex(value).hex()}'"


def _enum(one: TypeOf, number: int) -> str:
    return f"{'_utf8mb4 ' if one.charset else ''}x'{one.names[number - 1].encode().hex()}'"


def _is_behind_enum(name: str, one: TypeOf, number: int) -> str:
    behind = [_enum(one, later) for later in range(number + 1, len(one.names) + 1)]
    return f"{name} IN ({', '.join(behind)})" if behind else "FALSE"


def _matching(value: Json, pattern: str) -> str:
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{value!r} is no value of a key")
    return value


def _address(word: str, value: bytes) -> str:
    if word == "uuid":
        return str(uuid.UUID(bytes=value))
    return str(ipaddress.IPv6Address(value) if word == "inet6" else ipaddress.IPv4Address(value))
