"""Columns whose type was changed in the database: where their values go if the column here cannot hold them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pyarrow as pa

from firnline.errors import SchemaError
from firnline.schema import is_json, is_wider, type_to_text
from firnline.sources.cdc.column_names import escape
from firnline.sources.cdc.log import TableSchema
from firnline.sources.columns import Columns
from firnline.sources.files.formats.arrow_fit import own_field

_INTEGER_DIGITS = {pa.int32(): 10, pa.int64(): 19}
_FLOAT_DIGITS = {pa.float32(): 6, pa.float64(): 15}  # decimals with so many digits come back from a float as they were


def new_names(
    schema: TableSchema, columns: Columns, holds: Callable[[pa.Field, pa.Field], bool] | None = None
) -> dict[str, str]:
    """Return the columns of a table that get another name here.

    A column whose name differs in upper and lower case only from one that is here goes on in that one, since no table
    of Delta can have both. If the database had both before, it keeps the name that it got then. A column whose type the
    column here cannot hold goes on as `<name>_v2`, or the first such name that can.

    Only with `evolution: add`; otherwise the values are rescued, or stop the run. Decided by types alone, so that all
    rows of a schema have their values in the same column. `holds` says whether a column holds a type; `can_hold` if it
    is not given.

    Raises:
        SchemaError: the column is part of the key, which must not be in two columns.
    """
    if columns.evolution != "add":
        return {}
    holds = holds or partial(can_hold, may_widen=columns.may_widen)
    known = {field.name: field for field in columns.decoded if field.name in columns.frozen}
    spelled = {name.lower(): name for name in known}
    taken = {column.name.lower() for column in schema.columns}
    found: dict[str, str] = {}
    for column in schema.columns:
        here = column.name if column.name in known else _spelled_here(column.name, spelled)
        own, held = own_field(column.name, column.type), known.get(here)
        if own is None or held is None or holds(held, own):
            found |= {column.name: here} if here != column.name else {}
            continue
        if column.is_key:
            raise SchemaError(
                f"table {schema.table}: {column.name}, a column of the key, has the type {column.native} now, which a "
                f"column of the type {type_to_text(held)} cannot hold",
                hint="Change the type back, or capture the table anew into a table of another name.",
            )
        names = (_spelled_here(f"{column.name}_v{number}", spelled) for number in itertools.count(2))
        found[column.name] = next(
            name for name in names if name.lower() not in taken and (name not in known or holds(known[name], own))
        )
    return found


def spelled_first(names: Sequence[str], renamed: Mapping[str, str], spelled: dict[str, str]) -> dict[str, str]:
    """Return the columns of a table that get another name here, as `new_names`, if columns came with the same epoch.

    A column whose name differs in upper and lower case only from one that came before in this epoch goes on in that
    one, unless the table has both now. `spelled` has the columns that came before, by lower case; it gets those of
    `names`, which are the table's columns.
    """
    found, now = dict(renamed), {renamed.get(name, name) for name in names}
    for name in names:
        here = found.get(name, name)
        first = spelled.setdefault(here.lower(), here)
        if first not in now:
            found[name] = first
    return found


def _spelled_here(name: str, spelled: Mapping[str, str]) -> str:
    """Return the name of a column as it is written here; `spelled` has the columns that are here, by lower case."""
    escaped = escape(name)
    return escaped if escaped.lower() in spelled else spelled.get(name.lower(), name)


def can_hold(held: pa.Field, new: pa.Field, *, may_widen: bool = True) -> bool:
    """Return whether a column, as it is or, if it may be, widened, holds every value of another type."""
    old, kind = held.type, new.type
    if old == kind or is_json(held) or (may_widen and is_wider(old, kind)):
        return True
    if pa.types.is_string(old):
        return not (pa.types.is_binary(kind) or pa.types.is_nested(kind))
    if pa.types.is_decimal(old):
        scale, digits = _decimal_size(kind)
        return bool(scale <= old.scale and digits - scale <= old.precision - old.scale)
    if old in _FLOAT_DIGITS:
        return kind == pa.float32() or _decimal_size(kind)[1] <= _FLOAT_DIGITS[old]
    if pa.types.is_timestamp(old):
        return bool(pa.types.is_date(kind))
    return bool(old == pa.int64() and kind == pa.int32())


def _decimal_size(kind: pa.DataType) -> tuple[int, int]:
    """Return the scale, and the number of digits, of a type of exact numbers; of other types more than any holds."""
    if pa.types.is_decimal(kind):
        return kind.scale, kind.precision
    return (0, _INTEGER_DIGITS[kind]) if kind in _INTEGER_DIGITS else (0, 1000)
