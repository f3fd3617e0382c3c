"""Chunks of tables of MySQL and MariaDB: what their context says, how their rows become Arrow, and what they see.

The content of a chunk is rows of the binary protocol as frames: the length in four bytes, then the row. The context is
JSON: the table as a TABLE_MAP event would describe it, the number of rows, and the checksum of the content; a checksum
of the JSON stands behind it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.errors import DamagedError
from firnline.sources.cdc.log import ChunkRows, Transaction
from firnline.sources.mysql import select_kernel, tables
from firnline.sources.mysql.convert import ColumnValues, convert_selected
from firnline.sources.mysql.events import checksum, place_order
from firnline.sources.mysql.gtid import GtidList, GtidSet, parse_gtid
from firnline.sources.mysql.tables import Table, TypeOf, make_table
from firnline.types import Json

MYSQL, MARIADB = "mysql", "mariadb"
FORMAT = 1
_FIXED = {
    tables.TINY: 1, tables.SHORT: 2, tables.INT24: 4, tables.LONG: 4, tables.LONGLONG: 8, tables.FLOAT: 4,
    tables.DOUBLE: 8, tables.YEAR: 2, tables.ENUM: 8, tables.SET: 8,
}  # fmt: skip
_TEMPORAL = frozenset(
    {
        tables.DATE, tables.NEWDATE, tables.TIME, tables.TIME2, tables.DATETIME, tables.DATETIME2, tables.TIMESTAMP,
        tables.TIMESTAMP2,
    }
)  # fmt: skip


def layout_of(code: int) -> int:
    """Return how values of a type lie in a row: their length, or `select_kernel.WITH_LENGTH` or `WITH_BYTE`."""
    if code in _TEMPORAL:
        return select_kernel.WITH_BYTE
    return _FIXED.get(code, select_kernel.WITH_LENGTH)


# -- context ------------------------------------------------------------------------------------------


def pack_context(table: Table, content: bytes, rows: int) -> bytes:
    """Return the context of a chunk."""
    columns = [
        [name, one.code, one.meta, one.precision, one.scale, one.is_unsigned, one.charset, list(one.names),
         one.size, column.is_key]
        for name, column, one in zip(table.names, table.schema.columns, table.types, strict=True)
    ]  # fmt: skip
    value = {
        "format": FORMAT, "table": table.schema.table, "columns": columns, "rows": rows, "bytes": len(content),
        "crc": checksum(content),
    }  # fmt: skip
    text = json.dumps(value, ensure_ascii=False).encode()
    return text + checksum(text).to_bytes(4, "little")


@dataclass(frozen=True, slots=True)
class _Context:
    table: Table
    rows: int
    bytes: int
    crc: int


def _read_context(context: bytes) -> _Context:
    text = context[:-4]
    if checksum(text) != int.from_bytes(context[-4:], "little"):
        raise _damaged("its context does not match its checksum")
    try:
        value = json.loads(text)
        if value["format"] != FORMAT:
            raise _damaged(f"it has the format {value['format']}, which this version of Firnline does not know")
        names, types, keys = [], [], set()
        for number, (name, code, meta, precision, scale, is_unsigned, charset, words, size, is_key) in enumerate(
            value["columns"]
        ):
            names.append(name)
            types.append(TypeOf(code, meta, precision, scale, is_unsigned, charset, tuple(words), size=size))
            keys |= {number} if is_key else set()
        table = make_table(value["table"], names, types, keys)
        return _Context(table, int(value["rows"]), int(value["bytes"]), int(value["crc"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(f"its context cannot be read: {error}") from error


def _damaged(what: str) -> DamagedError:
    return DamagedError(
        f"a chunk of a table is damaged: {what}",
        hint="The file changed after it was written. Restore it, or roll back to before the snapshot and run again.",
    )


# -- rows ---------------------------------------------------------------------------------------------


def decode_chunk(context: bytes, content: bytes | memoryview) -> ChunkRows:
    """Return the rows of a chunk.

    Raises:
        DamagedError: the bytes are no chunk.
    """
    known = _read_context(context)
    table, count = known.table, known.rows
    name = table.schema.table
    if len(content) != known.bytes or checksum(content) != known.crc:
        raise _damaged(f"rows of {name} do not match their checksum")
    if count < 0 or count > len(content):
        raise _damaged(f"it cannot have {count} rows of {name}")
    data = np.frombuffer(content, np.uint8)
    data.flags.writeable = False  # as everywhere: one compiled function serves all
    layout = np.array([layout_of(one.code) for one in table.types], np.int64)
    shape = (len(table.types), count)
    offsets, lengths, states = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.uint8)
    if not select_kernel.find_values(data, layout, offsets, lengths, states):
        raise _damaged(f"rows of {name} do not end where they should")
    warnings = dict.fromkeys(table.warnings)
    odd: dict[str, dict[int, str]] = {}
    arrays = []
    for c, (one, column) in enumerate(zip(table.types, table.schema.columns, strict=True)):
        values, texts = ColumnValues(data, offsets[c], lengths[c], states[c]), dict[int, str]()
        arrays.append(convert_selected(one, values, f"{name}.{column.name}", warnings.setdefault, texts))
        if texts:
            odd[column.name] = texts
    schema = pa.schema([pa.field(column.name, column.type) for column in table.schema.columns])
    return ChunkRows(table.schema, pa.RecordBatch.from_arrays(arrays, schema=schema), odd, tuple(warnings))


def warm_up() -> None:
    """Compile everything, or load what is compiled."""
    types = [
        TypeOf(tables.DATE, 0, size=3),
        TypeOf(tables.TIME2, 0, size=3),
        TypeOf(tables.NEWDECIMAL, 0, 9, 0, size=4),
    ]
    content = b"\x0a\0\0\0\0\0\x04\xe8\x07\x01\x02\0\x010"
    table = make_table("a.b", ["d", "t", "n"], types, set())
    decode_chunk(pack_context(table, content, 1), content)
    select_kernel.split(np.zeros(4, np.uint8), 0, 0, 0, 0, np.zeros(4, np.int64))


# -- visibility ---------------------------------------------------------------------------------------


def sees(snapshot: Json, transactions: Sequence[Transaction]) -> npt.NDArray[np.bool_]:
    """Return which transactions a snapshot surely sees.

    A snapshot is JSON: `kind`, and `gtid_set` (MySQL: a set; MariaDB: a list); without GTIDs, and for MySQL's
    transactions that have none, `file` and `pos`.
    """
    gtids = snapshot["gtid_set"]
    if snapshot["kind"] == MARIADB:
        known = _list(gtids or "")
        found = [_is_in_list(known, one.id) for one in transactions]
    else:
        end = place_order(snapshot["file"], snapshot["pos"])
        found = [
            _set(gtids).has(*parse_gtid(one.id))
            if gtids is not None and one.id != one.position
            else place_order(*_place(one.position)) <= end
            for one in transactions
        ]
    return np.array(found, np.bool_)


def covers(snapshot: Json, other: Json) -> bool:
    """Return whether a snapshot surely sees everything up to a place, or all that another snapshot sees."""
    if snapshot["kind"] == MARIADB:
        return _list(snapshot["gtid_set"] or "").contains(_list(other["gtid_set"] or ""))
    if snapshot["gtid_set"] is not None and other["gtid_set"] is not None:
        return _set(snapshot["gtid_set"]).contains(_set(other["gtid_set"]))
    is_same = snapshot["server_uuid"] == other["server_uuid"]
    return is_same and place_order(snapshot["file"], snapshot["pos"]) >= place_order(other["file"], other["pos"])


def _place(position: str) -> tuple[str, int]:
    file, _, pos = position.rpartition(":")
    return file, int(pos)


@lru_cache(maxsize=8)
def _set(text: str) -> GtidSet:
    return GtidSet.parse(text)


@lru_cache(maxsize=8)
def _list(text: str) -> GtidList:
    return GtidList.parse(text)


def _is_in_list(known: GtidList, gtid: str) -> bool:
    domain, _, number = gtid.split("-")
    return int(number) <= known.number(int(domain))
