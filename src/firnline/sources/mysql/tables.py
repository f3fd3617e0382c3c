"""Tables as TABLE_MAP events describe them: columns, their types in Arrow, and how their values lie in a row.

| MySQL, MariaDB | Arrow | |
|---|---|---|
| TINYINT, SMALLINT, MEDIUMINT, INT, BIGINT | int8, int16, int32, int32, int64 | |
| the same UNSIGNED | int16, int32, int32, int64, decimal(20, 0) | |
| FLOAT, DOUBLE | float, double | |
| DECIMAL | decimal128 | with more than 38 digits: text, with a warning |
| CHAR, VARCHAR, TEXT, ENUM, SET | string | from the column's character set; a SET is `a,b` |
| BINARY, VARBINARY, BLOB, GEOMETRY, VECTOR | binary | BINARY is padded with zeros to its length |
| BIT(1), BIT(2) to BIT(63), BIT(64) | bool, int64, decimal(20, 0) | |
| DATE | date32 | `0000-00-00`, `2020-02-31` and dates before year 1: null, and their text in `odd` |
| DATETIME | timestamp(us) | the same |
| TIMESTAMP | timestamp(us, UTC) | the same |
| TIME | string | as the server prints it: `-838:59:59.000000` |
| YEAR | int16 | |
| JSON | string | as the server prints it |

MariaDB's UUID, INET4 and INET6 are binary: its log does not tell them from BINARY.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.sources.cdc.column_names import column_names
from firnline.sources.cdc.log import Column, TableSchema
from firnline.sources.mysql import charsets
from firnline.sources.mysql.events import damaged, read_length

(DECIMAL_OLD, TINY, SHORT, LONG, FLOAT, DOUBLE, NULL, TIMESTAMP, LONGLONG, INT24, DATE, TIME, DATETIME, YEAR, NEWDATE,
 VARCHAR, BIT, TIMESTAMP2, DATETIME2, TIME2) = range(20)  # fmt: skip
BLOB_COMPRESSED, VARCHAR_COMPRESSED = 140, 141
VECTOR, JSON, NEWDECIMAL, ENUM, SET = 242, 245, 246, 247, 248
BLOB, VAR_STRING, STRING, GEOMETRY = 252, 253, 254, 255

_NUMERIC = frozenset({TINY, SHORT, INT24, LONG, LONGLONG, NEWDECIMAL, FLOAT, DOUBLE, YEAR})
_ONE_BYTE_OF_METADATA = frozenset(
    {FLOAT, DOUBLE, BLOB, BLOB_COMPRESSED, GEOMETRY, JSON, TIME2, DATETIME2, TIMESTAMP2, VECTOR}
)
_TWO_BYTES_OF_METADATA = frozenset({VARCHAR, VARCHAR_COMPRESSED, BIT, NEWDECIMAL, STRING, VAR_STRING, ENUM, SET})
_INTEGERS = {TINY: 1, SHORT: 2, INT24: 3, LONG: 4, LONGLONG: 8}
_SIGNED = {TINY: pa.int8(), SHORT: pa.int16(), INT24: pa.int32(), LONG: pa.int32(), LONGLONG: pa.int64()}
_UNSIGNED = {TINY: pa.int16(), SHORT: pa.int32(), INT24: pa.int32(), LONG: pa.int64(), LONGLONG: pa.decimal128(20, 0)}
_INTEGER_NAMES = {TINY: "tinyint", SHORT: "smallint", INT24: "mediumint", LONG: "int", LONGLONG: "bigint"}
_BLOB_NAMES = {
    1: ("tinyblob", "tinytext"), 2: ("blob", "text"), 3: ("mediumblob", "mediumtext"), 4: ("longblob", "longtext"),
}  # fmt: skip
_HIDDEN = re.compile(rb"DB_ROW_HASH_\d+")  # columns of MariaDB for unique keys on long values, which nobody can select
_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)
MAX_COLUMNS = 4096
MAX_DIGITS = 38  # of decimal128, and of Delta tables

# The optional metadata.
(_SIGNEDNESS, _DEFAULT_CHARSET, _COLUMN_CHARSET, _COLUMN_NAME, _SET_VALUES, _ENUM_VALUES, _GEOMETRY_TYPE, _SIMPLE_KEY,
 _PREFIX_KEY, _ENUM_SET_DEFAULT_CHARSET, _ENUM_SET_COLUMN_CHARSET) = range(1, 12)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TypeOf:
    """The type of a column as the log tells it."""

    code: int
    meta: int  # length, or number of digits of a fraction of a second, or number of bits
    precision: int = 0
    scale: int = 0
    is_unsigned: bool = False
    charset: str = ""  # empty: bytes
    names: tuple[str, ...] = ()  # of ENUM and SET
    prefix: int = 0  # bytes of the length before a value; 0: all values are `size` bytes long
    size: int = 0


@dataclass(frozen=True, slots=True)
class Table:
    """A table as a TABLE_MAP event describes it. Types may be more than columns: MariaDB hides some."""

    schema: TableSchema
    types: tuple[TypeOf, ...]
    layout: npt.NDArray[np.int64]  # of every column: bytes of its length, or of its value
    is_key: npt.NDArray[np.uint8]
    warnings: tuple[str, ...]
    names: tuple[str, ...]  # of the columns, as the server has them


def read_table(body: memoryview, is_mariadb: bool) -> Table:
    """Return the table that a TABLE_MAP event describes; its body is without checksum.

    Raises:
        DamagedError: it cannot be read, has no names of columns, or a column has a type that is unknown.
    """
    try:
        return _read_table(body, is_mariadb)
    except (struct.error, IndexError, ValueError, UnicodeDecodeError, LookupError) as error:
        raise damaged(f"a TABLE_MAP event cannot be read: {error}") from error


def _read_table(body: memoryview, is_mariadb: bool) -> Table:
    at = 8
    database, at = _text(body, at)
    name, at = _text(body, at + 1)
    table = f"{database}.{name}"
    count, at = read_length(body, at + 1)
    if count > MAX_COLUMNS or at + count > len(body):
        raise ValueError(f"{count} columns")
    codes, at = bytes(body[at : at + count]), at + count
    size, at = read_length(body, at)
    metas, at = _metadata(codes, body[at : at + size]), at + size
    at += (count + 7) // 8  # which columns may be null: the rows tell
    extra = _fields(body[at:])
    names = _strings(extra.get(_COLUMN_NAME, b""))
    if len(names) != count:
        raise ValueError(f"table {table} has {len(names)} names for {count} columns: binlog_row_metadata is not FULL")
    types = _types(codes, metas, extra, table, names, is_mariadb)
    keys = _keys(extra, count)
    shown = count
    while shown and is_mariadb and _HIDDEN.fullmatch(names[shown - 1]):
        shown -= 1
    return make_table(table, [name.decode() for name in names[:shown]], types, keys)


def make_table(table: str, names: Sequence[str], types: Sequence[TypeOf], keys: Collection[int]) -> Table:
    """Return a table of these columns; `keys` are the numbers of those that name a row.

    There may be more types than names: rows have values behind those of the columns.

    Raises:
        ValueError: two columns have one name.
    """
    columns, warnings = [], []
    for number, (name, own, one) in enumerate(zip(names, column_names(names), types, strict=False)):
        if own != name:
            warnings.append(f"{table}.{name}: the column is named {own} here")
        columns.append(Column(own, arrow_type(one), native_name(one), number in keys))
        if one.code == NEWDECIMAL and one.precision > MAX_DIGITS:
            warnings.append(f"{table}.{name}: decimal({one.precision},{one.scale}) is read as text")
    if len(set(names)) != len(names):
        raise ValueError(f"table {table} has two columns of one name")
    layout = np.array([(one.prefix, one.size) for one in types], np.int64).reshape(len(types), 2)
    is_key = np.array([number in keys for number in range(len(types))], np.uint8)
    return Table(TableSchema(table, tuple(columns)), tuple(types), layout, is_key, tuple(warnings), tuple(names))


def _text(body: memoryview, at: int) -> tuple[str, int]:
    size = body[at]
    if at + 1 + size > len(body):
        raise ValueError("a name is cut off")
    return bytes(body[at + 1 : at + 1 + size]).decode(), at + 1 + size


def _metadata(codes: bytes, data: memoryview) -> list[bytes]:
    """Return the metadata of every column."""
    found, at = [], 0
    for code in codes:
        width = 1 if code in _ONE_BYTE_OF_METADATA else 2 if code in _TWO_BYTES_OF_METADATA else 0
        found.append(bytes(data[at : at + width]))
        at += width
    if at != len(data):
        raise ValueError(f"{len(data)} bytes of metadata instead of {at}")
    return found


def _fields(data: memoryview) -> dict[int, bytes]:
    """Return the optional metadata by its kind."""
    found, at = {}, 0
    while at < len(data):
        kind = data[at]
        size, at = read_length(data, at + 1)
        if at + size > len(data):
            raise ValueError(f"metadata of kind {kind} is cut off")
        found[kind] = bytes(data[at : at + size])
        at += size
    return found


def _numbers(data: bytes) -> list[int]:
    view, at, found = memoryview(data), 0, []
    while at < len(view):
        number, at = read_length(view, at)
        found.append(number)
    return found


def _strings(data: bytes) -> list[bytes]:
    view, at, found = memoryview(data), 0, []
    while at < len(view):
        size, at = read_length(view, at)
        if at + size > len(view):
            raise ValueError("a name is cut off")
        found.append(bytes(view[at : at + size]))
        at += size
    return found


def _lists(data: bytes) -> list[list[bytes]]:
    """Return the values of every ENUM or SET column."""
    view, at, found = memoryview(data), 0, []
    while at < len(view):
        count, at = read_length(view, at)
        values = []
        for _ in range(count):
            size, at = read_length(view, at)
            if at + size > len(view):
                raise ValueError("a value of ENUM or SET is cut off")
            values.append(bytes(view[at : at + size]))
            at += size
        found.append(values)
    return found


def _keys(extra: dict[int, bytes], count: int) -> set[int]:
    if _PREFIX_KEY in extra:
        keys = set(_numbers(extra[_PREFIX_KEY])[::2])
    else:
        keys = set(_numbers(extra.get(_SIMPLE_KEY, b"")))
    if any(key >= count for key in keys):
        raise ValueError("the primary key has a column that does not exist")
    return keys


def _charset_ids(extra: dict[int, bytes], default: int, each: int, count: int, table: str) -> list[int]:
    """Return the collations of the columns that have one."""
    if each in extra:
        found = _numbers(extra[each])
    elif default in extra:
        first, *pairs = _numbers(extra[default])
        found = [first] * count
        for number, collation in zip(pairs[::2], pairs[1::2], strict=True):
            found[number] = collation
    else:
        found = []
    if len(found) != count:
        raise ValueError(f"table {table} has {len(found)} collations for {count} columns of text")
    return found


def _types(
    codes: bytes, metas: list[bytes], extra: dict[int, bytes], table: str, names: list[bytes], is_mariadb: bool
) -> list[TypeOf]:
    real = [
        meta[0] if code == STRING and meta[0] in (ENUM, SET) else code for code, meta in zip(codes, metas, strict=True)
    ]
    numeric = [i for i, code in enumerate(real) if code in _NUMERIC]
    signs = extra.get(_SIGNEDNESS, b"")
    if numeric and len(signs) != (len(numeric) + 7) // 8:
        raise ValueError(f"table {table} has no signs for its columns of numbers")
    unsigned = {i for bit, i in enumerate(numeric) if signs[bit // 8] & (0x80 >> (bit % 8))}
    textual = {STRING, VAR_STRING, VARCHAR, BLOB, BLOB_COMPRESSED, VARCHAR_COMPRESSED}
    if is_mariadb:
        textual.add(GEOMETRY)
    text = [i for i, code in enumerate(real) if code in textual]
    collations = dict(zip(text, _charset_ids(extra, _DEFAULT_CHARSET, _COLUMN_CHARSET, len(text), table), strict=True))
    chosen = [i for i, code in enumerate(real) if code in (ENUM, SET)]
    ids = _charset_ids(extra, _ENUM_SET_DEFAULT_CHARSET, _ENUM_SET_COLUMN_CHARSET, len(chosen), table)
    collations |= dict(zip(chosen, ids, strict=True))
    values: dict[int, list[bytes]] = {}
    for code, kind in ((ENUM, _ENUM_VALUES), (SET, _SET_VALUES)):
        columns = [i for i, one in enumerate(real) if one == code]
        values |= dict(zip(columns, _lists(extra.get(kind, b"")), strict=True))
    found = []
    for i, (code, meta) in enumerate(zip(real, metas, strict=True)):
        charset = charsets.name_of(collations[i]) if i in collations else ""
        try:
            found.append(_type(code, meta, i in unsigned, charset, values.get(i, [])))
        except ValueError as error:
            raise ValueError(f"column {names[i].decode()} of table {table}: {error}") from error
    return found


def _type(code: int, meta: bytes, is_unsigned: bool, charset: str, values: list[bytes]) -> TypeOf:
    number = int.from_bytes(meta, "little")
    if code in _INTEGERS:
        return TypeOf(code, 0, is_unsigned=is_unsigned, size=_INTEGERS[code])
    if code in (FLOAT, DOUBLE):
        return TypeOf(code, 0, is_unsigned=is_unsigned, size=4 if code == FLOAT else 8)
    if code in (YEAR, DATE, NEWDATE, TIME, TIMESTAMP, DATETIME):
        return TypeOf(code, 0, size={YEAR: 1, TIMESTAMP: 4, DATETIME: 8}.get(code, 3))
    if code in (TIMESTAMP2, DATETIME2, TIME2):
        if number > 6:
            raise ValueError(f"{number} digits of a second")
        return TypeOf(code, number, size={TIMESTAMP2: 4, DATETIME2: 5, TIME2: 3}[code] + (number + 1) // 2)
    if code == NEWDECIMAL:
        precision, scale = meta[0], meta[1]
        if not 0 < precision <= 65 or scale > precision:
            raise ValueError(f"decimal({precision},{scale})")
        whole = precision - scale
        size = whole // 9 * 4 + _DIGIT_BYTES[whole % 9] + scale // 9 * 4 + _DIGIT_BYTES[scale % 9]
        return TypeOf(code, 0, precision, scale, is_unsigned, size=size)
    if code == BIT:
        bits = meta[1] * 8 + meta[0]
        if not 0 < bits <= 64:
            raise ValueError(f"bit({bits})")
        return TypeOf(code, bits, size=(bits + 7) // 8)
    if code in (ENUM, SET):
        names = tuple(charsets.decode(value, charset) for value in values)
        if not 0 < meta[1] <= (2 if code == ENUM else 8):
            raise ValueError(f"an ENUM or SET of {meta[1]} bytes")
        return TypeOf(code, meta[1], charset=charset, names=names, size=meta[1])
    if code in (VARCHAR, VAR_STRING):
        return TypeOf(VARCHAR, number, charset=charset, prefix=1 if number < 256 else 2)
    if code == STRING:
        length = ((meta[0] & 0x30 ^ 0x30) << 4) | meta[1]
        return TypeOf(code, length, charset=charset, prefix=1 if length < 256 else 2)
    if code in (BLOB, GEOMETRY, JSON, VECTOR):
        if not 1 <= number <= 4:
            raise ValueError(f"a length of {number} bytes")
        return TypeOf(code, number, charset=charset if code == BLOB else "", prefix=number)
    if code in (BLOB_COMPRESSED, VARCHAR_COMPRESSED):
        prefix = number if code == BLOB_COMPRESSED else 1 if number < 256 else 2
        if not 1 <= prefix <= 4:
            raise ValueError(f"a length of {prefix} bytes")
        return TypeOf(code, number, charset=charset, prefix=prefix)
    raise ValueError(f"type {code} is not known to this version of Firnline; leave the table out of `tables`")


def arrow_type(one: TypeOf) -> pa.DataType:
    """Return the type of a column in Arrow; see the module's table."""
    if one.code in _INTEGERS:
        return (_UNSIGNED if one.is_unsigned else _SIGNED)[one.code]
    if one.code == NEWDECIMAL:
        return pa.string() if one.precision > MAX_DIGITS else pa.decimal128(one.precision, one.scale)
    if one.code == BIT:
        return pa.bool_() if one.meta == 1 else pa.int64() if one.meta < 64 else pa.decimal128(20, 0)
    fixed = {
        FLOAT: pa.float32(), DOUBLE: pa.float64(), YEAR: pa.int16(), DATE: pa.date32(), NEWDATE: pa.date32(),
        TIME: pa.string(), TIME2: pa.string(), DATETIME: pa.timestamp("us"), DATETIME2: pa.timestamp("us"),
        TIMESTAMP: pa.timestamp("us", "UTC"), TIMESTAMP2: pa.timestamp("us", "UTC"), ENUM: pa.string(),
        SET: pa.string(), JSON: pa.string(),
    }  # fmt: skip
    return fixed.get(one.code) or (pa.string() if one.charset else pa.binary())


def native_name(one: TypeOf) -> str:
    """Return the type of a column in MySQL's words, as far as the log tells it."""
    code = one.code
    sign = " unsigned" if one.is_unsigned else ""
    if code in _INTEGERS:
        return _INTEGER_NAMES[code] + sign
    if code in (FLOAT, DOUBLE):
        return ("float" if code == FLOAT else "double") + sign
    if code == NEWDECIMAL:
        return f"decimal({one.precision},{one.scale}){sign}"
    if code in (TIMESTAMP2, DATETIME2, TIME2):
        name = {TIMESTAMP2: "timestamp", DATETIME2: "datetime", TIME2: "time"}[code]
        return f"{name}({one.meta})" if one.meta else name
    if code in (ENUM, SET):
        values = ",".join("'" + name.replace("'", "''") + "'" for name in one.names)
        return f"{'enum' if code == ENUM else 'set'}({values})"
    if code == BIT:
        return f"bit({one.meta})"
    if code in (BLOB, BLOB_COMPRESSED):
        name = _BLOB_NAMES[one.meta][bool(one.charset)]
        return f"{name} character set {one.charset}" if one.charset else name
    if code in (STRING, VARCHAR, VARCHAR_COMPRESSED):
        if not one.charset:
            return f"{'binary' if code == STRING else 'varbinary'}({one.meta})"
        length = one.meta // charsets.width(one.charset)
        return f"{'char' if code == STRING else 'varchar'}({length}) character set {one.charset}"
    return {
        YEAR: "year", DATE: "date", NEWDATE: "date", TIME: "time", TIMESTAMP: "timestamp", DATETIME: "datetime",
        JSON: "json", GEOMETRY: "geometry", VECTOR: "vector",
    }[code]  # fmt: skip
