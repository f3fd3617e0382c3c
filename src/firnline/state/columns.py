"""The columns of a state segment, and how older columns are read as the current ones.

    _slot: uint64, _removed: bool, the key's columns, [_timer: int64 microseconds,] the state's columns

Columns are found by position, not by name, so key and state may have a column of the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.errors import DamagedError, NewerFormatError, SchemaError
from firnline.state.keys import Mask, Numbers, Slots, key_family

FORMAT = 1
SLOT, REMOVED, TIMER = "_slot", "_removed", "_timer"
_FIXED = 2  # _slot and _removed come first
_PREFIX = "firnline."


@dataclass(frozen=True, slots=True)
class Layout:
    """The columns of an operator's state: its key, the state itself, and whether it has timers."""

    key: pa.Schema
    state: pa.Schema
    timers: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _plain(self.key))
        object.__setattr__(self, "state", _plain(self.state, nullable=True))

    @property
    def schema(self) -> pa.Schema:
        """All columns of a segment, in order."""
        timer = [pa.field(TIMER, pa.int64())] if self.timers else []
        return pa.schema([pa.field(SLOT, pa.uint64()), pa.field(REMOVED, pa.bool_()), *self.key, *timer, *self.state])

    @property
    def key_places(self) -> range:
        return range(_FIXED, _FIXED + len(self.key))

    @property
    def timer_place(self) -> int:
        return _FIXED + len(self.key)

    @property
    def state_places(self) -> range:
        first = _FIXED + len(self.key) + self.timers
        return range(first, first + len(self.state))

    # -- parts of a table of this layout --------------------------------------------------------------

    def slots_of(self, table: pa.Table) -> Slots:
        """Return the slots as numbers."""
        return to_numpy(table.column(0))

    def removed_of(self, table: pa.Table) -> Mask:
        """Return which rows remove a key."""
        return to_numpy(table.column(1))

    def keys_of(self, table: pa.Table) -> pa.Table:
        """Return the columns of the key."""
        return table.select(list(self.key_places))

    def timers_of(self, table: pa.Table) -> pa.Array:
        """Return when each key is due, null for never."""
        if not self.timers:
            return pa.nulls(table.num_rows, pa.int64())
        return one_chunk(table.column(self.timer_place))

    def state_of(self, table: pa.Table) -> pa.Table:
        """Return the columns of the state."""
        return table.select(list(self.state_places))

    # -- making one -----------------------------------------------------------------------------------

    def table(
        self, slots: Slots, keys: pa.Table, state: pa.Table, removed: Mask | None = None, timers: pa.Array | None = None
    ) -> pa.Table:
        """Return the rows of a segment; columns must have the layout's types. Without `removed`, no key is removed."""
        gone = pa.array(np.zeros(slots.size, np.bool_) if removed is None else removed)
        due = [pa.nulls(slots.size, pa.int64()) if timers is None else timers] if self.timers else []
        columns = [pa.array(slots), gone, *keys.columns, *due, *state.columns]
        return pa.Table.from_arrays([_fit(c, f) for c, f in zip(columns, self.schema, strict=True)], schema=self.schema)

    def changes(
        self,
        slots: Slots,
        keys: pa.Table,
        changed: Numbers,
        state: pa.Table,
        removed: Numbers,
        timers: pa.Array | None = None,
    ) -> pa.Table:
        """Return the rows of a segment with the changes of one fold; `changed` and `removed` are row numbers in `keys`.

        `state` and `timers` are as long as `changed`.
        """
        rows = np.concatenate([changed, removed]).astype(np.int64)
        full = pa.concat_tables([state.select(self.state.names).cast(self.state), nulls(self.state, removed.size)])
        due = None
        if timers is not None:
            due = pa.chunked_array([*_chunks(timers), pa.nulls(removed.size, pa.int64())], pa.int64())
        gone = np.arange(rows.size) >= changed.size
        return self.table(slots[rows], keys.take(pa.array(rows)), full, gone, due)

    def metadata(self, operator: str, epoch: int) -> dict[str, str]:
        """Return the metadata of a file."""
        about = {"format": FORMAT, "operator": operator, "epoch": epoch, "keys": len(self.key)}
        return {_PREFIX + name: str(value) for name, value in {**about, "timers": int(self.timers)}.items()}


def layout_of(schema: pa.Schema, what: str) -> Layout:
    """Return the layout of a file, from its schema.

    Raises:
        NewerFormatError: a newer Firnline wrote it.
        DamagedError: it is no state segment.
    """
    try:
        about = {k.decode(): v.decode() for k, v in (schema.metadata or {}).items()}
        found, keys, timers = (int(about[_PREFIX + name]) for name in ("format", "keys", "timers"))
    except (KeyError, ValueError) as error:
        raise DamagedError(f"{what} is not a segment of state: it lacks {error}", what=what) from error
    if found > FORMAT:
        raise NewerFormatError(f"{what} has format {found}; this Firnline reads up to {FORMAT}", found=found)
    fields = list(schema)
    key = fields[_FIXED : _FIXED + keys]
    return Layout(pa.schema(key), pa.schema(fields[_FIXED + keys + timers :]), bool(timers))


# --- evolution -------------------------------------------------------------------------------------------


def check_key(found: Layout, wanted: Layout, what: str) -> None:
    """Raise SchemaError if keys are encoded differently, because their state would be lost silently."""
    if found.key.equals(wanted.key):
        return
    pairs = zip(found.key, wanted.key, strict=False)
    if len(found.key) != len(wanted.key) or not all(_same_key(a, b) for a, b in pairs):
        raise SchemaError(
            f"{what} has the key ({_told(found.key)}), but the operator's is ({_told(wanted.key)})",
            hint="Give the operator the key it had, or a new name to begin with empty state.",
        )


def _same_key(found: pa.Field, wanted: pa.Field) -> bool:
    alike = found.name == wanted.name and key_family(found.type) == key_family(wanted.type)
    return alike and can_widen(found.type, wanted.type)


def adapt_state(table: pa.Table, wanted: pa.Schema, what: str) -> pa.Table:
    """Return the state with the wanted columns: a missing column is null, a narrower number is widened.

    Raises:
        SchemaError: a column cannot be read as the wanted type.
    """
    names = set(table.column_names)
    columns = [
        _widen(table.column(f.name), f, what) if f.name in names else pa.nulls(table.num_rows, f.type) for f in wanted
    ]
    return _table(columns, wanted, table.num_rows)


def adapt(table: pa.Table, found: Layout, wanted: Layout, what: str) -> pa.Table:
    """Return rows of one layout as rows of another."""
    if found.schema.equals(wanted.schema):
        return table
    check_key(found, wanted, what)
    keys = [_widen(c, f, what) for c, f in zip(found.keys_of(table).columns, wanted.key, strict=True)]
    due = [found.timers_of(table)] if wanted.timers else []
    state = adapt_state(found.state_of(table), wanted.state, what)
    columns = [table.column(0), table.column(1), *keys, *due, *state.columns]
    return pa.Table.from_arrays(columns, schema=wanted.schema)


def can_widen(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether every value of one type has an equal one in the other or, for float64, fails with an error if
    not."""
    t = pa.types
    if found == wanted or t.is_null(found):
        return True
    if t.is_integer(found) and t.is_integer(wanted):
        signs_fit = t.is_signed_integer(wanted) or t.is_unsigned_integer(found)
        return bool(signs_fit and found.bit_width < wanted.bit_width)
    if t.is_float64(wanted):
        return bool(t.is_integer(found) or t.is_floating(found))
    return (found, wanted) in ((pa.string(), pa.large_string()), (pa.binary(), pa.large_binary()))


def _widen(column: Any, wanted: pa.Field, what: str) -> Any:
    if column.type == wanted.type:
        return column
    if can_widen(column.type, wanted.type):
        try:
            return column.cast(wanted.type)
        except pa.ArrowInvalid as error:
            raise _unfit(wanted, column.type, what) from error
    raise _unfit(wanted, column.type, what)


def _unfit(wanted: pa.Field, found: pa.DataType, what: str) -> SchemaError:
    return SchemaError(
        f"column {wanted.name!r} in {what} is {found}, which cannot be read as {wanted.type}",
        hint="State may gain columns and wider numbers; for anything else give the operator or the column a new name.",
        column=wanted.name,
    )


# --- small helpers ---------------------------------------------------------------------------------------


def _plain(schema: pa.Schema, nullable: bool | None = None) -> pa.Schema:
    """Return a type without metadata and without dictionaries, which a file could change."""
    fields = []
    for one in schema:
        kind = one.type.value_type if pa.types.is_dictionary(one.type) else one.type
        fields.append(pa.field(one.name, kind, one.nullable if nullable is None else nullable, one.metadata))
    return pa.schema(fields)


def _fit(column: Any, wanted: pa.Field) -> Any:
    if column.type == wanted.type:
        return column
    if pa.types.is_dictionary(column.type) or can_widen(column.type, wanted.type):
        return column.cast(wanted.type)
    raise SchemaError(f"column {wanted.name!r} of a state is {column.type}, not {wanted.type}", column=wanted.name)


def _told(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name} {f.type}" for f in schema)


def _table(columns: Sequence[Any], schema: pa.Schema, rows: int) -> pa.Table:
    if columns:
        return pa.Table.from_arrays(list(columns), schema=schema)
    return pa.table({"": pa.nulls(rows)}).select([])


def _chunks(array: Any) -> list[pa.Array]:
    return list(array.chunks) if isinstance(array, pa.ChunkedArray) else [array]


def nulls(schema: pa.Schema, rows: int) -> pa.Table:
    """A table of nulls."""
    return _table([pa.nulls(rows, f.type) for f in schema], schema, rows)


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    """Return a column as one array, without a copy if it is one already."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def to_numpy(column: Any) -> npt.NDArray[Any]:
    """Return a column without nulls as numbers."""
    array = one_chunk(column) if isinstance(column, pa.ChunkedArray) else column
    out: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return out
