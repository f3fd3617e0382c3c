"""The columns of a PostgreSQL table: which type an Arrow column gets, and how values reach a column that exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
from pyarrow import types as t

from firnline.schema import is_json
from firnline.sinks.postgres.options import NAME_BYTES

# How a column is written: `direct`, encoded as its type; `text`, as text that PostgreSQL casts to the type.
Way = Literal["direct", "text"]

_TEXTS = ("text", "varchar", "bpchar", "name")
_INTEGERS = ("int2", "int4", "int8")
_FLOATS = ("float4", "float8")
_TYPES: dict[pa.DataType, str] = {
    pa.bool_(): "boolean",
    pa.int8(): "smallint",
    pa.int16(): "smallint",
    pa.uint8(): "smallint",
    pa.int32(): "integer",
    pa.uint16(): "integer",
    pa.int64(): "bigint",
    pa.uint32(): "bigint",
    pa.uint64(): "numeric(20,0)",
    pa.float16(): "real",
    pa.float32(): "real",
    pa.float64(): "double precision",
    pa.date32(): "date",
    pa.date64(): "date",
}
_ARROW: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "bytea": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "time": pa.time64("us"),
    "interval": pa.duration("us"),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, as the catalogue describes it."""

    name: str
    type: str  # name of the type, of a domain that of its base
    type_schema: str
    shown: str  # as people write it, e.g. character varying(20)
    is_enum: bool
    modifier: int  # the length or precision that was given, -1 if none
    is_nullable: bool

    @property
    def wire(self) -> str:
        """The encoding of values, see `encode`; empty if values go as text and are cast."""
        if self.is_enum:
            return "text"
        if self.type_schema != "pg_catalog":
            return ""
        if self.type in _TEXTS:
            return "text"
        if self.type == "timestamptz":
            return "timestamp"
        return self.type if self.type in (*_ARROW, "numeric", "json", "jsonb") else ""

    @property
    def precision(self) -> tuple[int, int] | None:
        """Precision and scale of a numeric column; None if it has none, or is not numeric."""
        if self.type != "numeric" or self.modifier < 4:
            return None
        return (self.modifier - 4) >> 16, (self.modifier - 4) & 0x7FF

    @property
    def arrow(self) -> pa.DataType:
        """The Arrow type that holds the column's values; text for types without one."""
        size = self.precision
        if size is not None and size[0] <= 38 and size[1] <= size[0]:
            return pa.decimal128(*size)
        return _ARROW.get(self.type, pa.string()) if self.type_schema == "pg_catalog" else pa.string()


def type_for(field: pa.Field) -> str:
    """Return the type that a column of the table gets for an Arrow column."""
    kind = field.type.value_type if t.is_dictionary(field.type) else field.type
    if is_json(field) or t.is_nested(kind):
        return "jsonb"
    if kind in _TYPES:
        return _TYPES[kind]
    if t.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if t.is_timestamp(kind):
        return "timestamptz" if kind.tz else "timestamp"
    if t.is_time(kind):
        return "time"
    if t.is_duration(kind):
        return "interval"
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind):
        return "bytea"
    return "text"


def find_way(kind: pa.DataType, column: Column) -> Way | None:
    """Return how values of an Arrow type are written to a column; None if they cannot be."""
    kind = kind.value_type if t.is_dictionary(kind) else kind
    wire = column.wire
    is_binary = type_for(pa.field("", kind)) == "bytea"
    if t.is_null(kind):
        return "text"
    if _is_text(kind):
        return "direct" if wire in ("text", "json", "jsonb") else "text"
    if wire in ("json", "jsonb"):
        return None if is_binary else "direct"
    if wire == "text" and not column.is_enum:
        return None if is_binary else "direct"
    fits = {
        "bool": t.is_boolean(kind),
        **dict.fromkeys(_INTEGERS, t.is_integer(kind) or t.is_floating(kind)),
        **dict.fromkeys(_FLOATS, t.is_integer(kind) or t.is_floating(kind)),
        "float8": t.is_integer(kind) or t.is_floating(kind) or t.is_decimal(kind),
        "numeric": t.is_integer(kind) or (t.is_decimal(kind) and kind.scale >= 0),
        "bytea": is_binary,
        "date": t.is_date(kind),
        "timestamp": t.is_timestamp(kind) or t.is_date(kind),
        "time": t.is_time(kind),
        "interval": t.is_duration(kind),
    }
    if fits.get(wire, False):
        return "direct"
    return "text" if wire == "numeric" and t.is_floating(kind) else None


def _is_text(kind: pa.DataType) -> bool:
    return bool(t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind))


def find_wider_numeric(kind: pa.DataType, column: Column) -> str | None:
    """Return the type that a numeric column needs for decimals with more digits; None if it has room.

    PostgreSQL changes the precision without a rewrite of the table if the scale stays.

    Raises:
        ValueError: the decimals have more digits after the point than the column.
    """
    size = column.precision
    if size is None or not t.is_decimal(kind):
        return None
    whole = kind.precision - kind.scale
    if kind.scale > size[1]:
        raise ValueError(f"numeric({max(whole, size[0] - size[1]) + kind.scale},{kind.scale})")
    return f"numeric({whole + size[1]},{size[1]})" if whole > size[0] - size[1] else None


def is_name_ok(name: str) -> bool:
    """Whether PostgreSQL takes a name as it is."""
    return bool(name) and "\0" not in name and len(name.encode()) <= NAME_BYTES
