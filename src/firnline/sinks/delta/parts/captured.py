"""Parts for the tables of a captured database: the name, the key and the columns of each. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError
from firnline.ndjson import MismatchError, UnexpectedFieldError
from firnline.operators.base import BEFORE
from firnline.options import (
    FACTS,
    MISSING,
    MOVED,
    OP,
    TABLE_PLACES,
    SchemaOptions,
    split_template,
    template_columns,
)
from firnline.rescued import Rescued, add_rescued
from firnline.schema import RESCUED_COLUMN, RESERVED_PREFIX, is_wider, merge, own_columns, type_to_text, widen
from firnline.sinks.delta.parts.table import refuse_name
from firnline.sinks.table_rows import TABLE_COLUMN, SourceTable
from firnline.sources.cdc.evolution import can_hold, new_names, spelled_first
from firnline.sources.cdc.log import Column, TableSchema
from firnline.sources.cdc.position import is_other_key
from firnline.sources.cdc.tables import snapshot_command
from firnline.sources.columns import Columns
from firnline.sources.decoding import with_rescued
from firnline.sources.files.formats.parquet import ParquetDecoder, ParquetPiece
from firnline.types import Json

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_NEVER_AS_IT_IS = re.compile(r"[/\\~\x00-\x1f\x7f-\x9f\u2028\u2029]")
LONGEST = 120  # bytes of a name that had to be changed
_CHANGE_COLUMNS = frozenset({OP, MISSING, MOVED, BEFORE, *FACTS, RESCUED_COLUMN})  # not from the table itself


# -- names --------------------------------------------------------------------------------------------


def name_part(template: str, table: SourceTable, allowed: str) -> str:
    """Return the name of the part that has the rows of a table.

    Without a place for the schema, a table that is not in the default one is called `schema.table`.
    """
    has_schema = any(place in TABLE_PLACES[1:] for place in template_columns(template))
    name = table.name if has_schema or table.is_in_default else table.full_name
    pieces = []
    for literal, place in split_template(template):
        value = name if place == TABLE_PLACES[0] else table.schema
        pieces += [literal, *([_as_folder(value, allowed)] if place else [])]
    return "".join(pieces)


def _as_folder(name: str, allowed: str) -> str:
    """Return a name as it is if the pattern allows it and a folder may have it; else with `~` and two hex digits for
    every odd byte. One that gets too long ends with `~~` and a checksum of the name instead."""
    if re.fullmatch(allowed, name) and not _NEVER_AS_IT_IS.search(name) and not refuse_name(name):
        return name
    data = name.encode()
    odd = {place for place, byte in enumerate(data) if byte not in _PLAIN}
    odd |= {len(data) - 1} if data[-1] in b"." else set()
    odd |= {0} if data[0] in b"._-" or not odd else set()
    made = "".join(f"~{byte:02X}" if place in odd else chr(byte) for place, byte in enumerate(data))
    if len(made) <= LONGEST:
        return made
    return f"{made[: LONGEST - 18].rstrip('~')}~~{hashlib.sha256(data).hexdigest()[:16]}"


# -- keys ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PartKey:
    """The key of a part in one epoch, and which rows of the epoch have it. Takes the rows in their order.

    A part that is appended to stays so, whatever key the table gets later, unless it was upserted before. Rows with
    another key than the part has are left out if the source is to read the table again: that snapshot has them.
    """

    key: tuple[str, ...] | None  # before the epoch, or the one that rows named; None: the next rows say it
    was_upserted: bool = False  # at some time
    is_emptied: bool = False  # in this epoch, and may have another key since

    def takes(self, table: SourceTable, *, reads_anew: bool) -> bool:
        """Return whether the part takes rows of its table. `reads_anew`: the source is still to read it again.

        Raises:
            SchemaError: the rows have another key than the part, and no snapshot brings them.
        """
        if table.anew:
            if self.key or self.was_upserted:
                self.key, self.was_upserted, self.is_emptied = None, True, True
        elif self.key is None:
            self.key = table.key
        elif table.key is not None and is_other_key(self.key, table.key):
            if reads_anew:
                return False
            now = f"is {', '.join(table.key)} now" if table.key else "is gone"
            raise SchemaError(
                f"the key of table {table.full_name} was {', '.join(self.key)} and {now}, in an epoch that was decided "
                "while no sink upserted the table: rows by the old key would no longer be found",
                hint="Nothing is lost this way: take the sink out of the spec, then firnline sinks forget SINK --yes. "
                "Then add it with another name, another `table` and `start: now`, and read every table again: "
                + snapshot_command(None, table.full_name, empties=True),
            )
        return True


# -- columns ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PartColumns:
    """The columns of a part, and how rows of its table are fitted to them.

    First `add` gets the columns of all rows of an epoch, then `fit` the rows. So all rows of the epoch have the same
    types, and the result depends on nothing but the table as it was before the epoch, and the rows.
    """

    table: SourceTable
    schema: pa.Schema  # of the part before the epoch; `add` and `fit` let it grow
    options: SchemaOptions
    _frozen: frozenset[str] = frozenset()
    _named: dict[pa.Schema, dict[str, pa.Field]] = field(default_factory=dict)  # columns of rows by their names here
    _spelled: dict[str, str] = field(default_factory=dict)  # columns of rows of this epoch, by lower case
    _decoder: ParquetDecoder | None = None
    rescued: list[Rescued] = field(default_factory=list)  # by column: values that did not fit here

    @classmethod
    def begin(cls, table: SourceTable, known: pa.Schema | None, options: SchemaOptions) -> PartColumns:
        """Begin an epoch on the columns that the part has; None: there is no part yet."""
        if known is None:
            return cls(table, pa.schema([]), replace(options, evolution="add"))
        columns = own_columns(known)
        return cls(table, columns, options, frozenset(columns.names))

    def add(self, rows: pa.Schema) -> None:
        """Take in the columns of some rows.

        Raises:
            SchemaError: the source says that such a change stops.
        """
        named = self._named[rows] = self._name_columns(rows)
        self._widen(named)
        wanted = [
            one.with_name(name).with_nullable(True)
            for name, one in named.items()
            if self.options.evolution == "add" or _is_added(name)
        ]
        self.schema = merge(self.schema, pa.schema(wanted), frozen=self._frozen)

    def fit(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows with the columns of the part.

        Raises:
            SchemaError: a value or a column does not fit, and the source says that this stops.
        """
        if self._decoder is None:
            columns = Columns(self.schema, frozenset(self.schema.names), {}, evolution=self.options.evolution)
            self._decoder = ParquetDecoder(self.schema, columns)
        named = self._named[rows.schema]
        renamed = {one.name: name for name, one in named.items() if one.name != name}
        arrays = {name: rows.column(one.name) for name, one in named.items()}
        rescued = arrays.pop(RESCUED_COLUMN, None)
        if renamed and MISSING in arrays:
            arrays[MISSING] = _rename_missing(arrays[MISSING], renamed)
        try:
            decoded = self._decoder.decode(ParquetPiece(pa.RecordBatch.from_pydict(arrays), 0, 0))
        except (UnexpectedFieldError, MismatchError) as error:
            raise SchemaError(f"table {self.table.full_name}: {error}") from error
        fitted, table = decoded.batch, self.table.full_name
        found = (replace(one, table=table, line=None, wider={}) for one in decoded.rescued)
        self.rescued = add_rescued([*self.rescued, *found])
        if rescued is not None:
            fitted = with_rescued(self._decoder, fitted, rescued)
        self.schema = self._decoder.schema
        return fitted

    def _name_columns(self, rows: pa.Schema) -> dict[str, pa.Field]:
        """Return the columns of rows by the names that they get here."""
        key = self.table.key or ()
        own = [one for one in rows if not _is_added(one.name)]
        described = tuple(Column(one.name, one.type, type_to_text(one), one.name in key) for one in own)
        columns = Columns(self.schema, self._frozen, {}, evolution=self.options.evolution)
        renamed = new_names(TableSchema(self.table.full_name, described), columns, _holds)
        if self.options.evolution == "add":
            renamed = spelled_first([one.name for one in own], renamed, self._spelled)
        return {renamed.get(one.name, one.name): one for one in rows if one.name != TABLE_COLUMN}

    def _widen(self, fields: Mapping[str, pa.Field]) -> None:
        """Give known columns a wider type, where the database has one now."""
        known = {one.name: one.type for one in self.schema if one.name in self._frozen}
        wider = {name: one.type for name, one in fields.items() if name in known and is_wider(known[name], one.type)}
        if wider and self.options.on_widen == "fail":
            name = min(wider)
            raise SchemaError(
                f"table {self.table.full_name}: column {name} is {wider[name]} now, and was {known[name]}",
                hint="Set schema.on_widen of the source to rewrite or rescue.",
            )
        if wider and self.options.on_widen == "rewrite":
            self.schema = widen(self.schema, wider)


def _is_added(name: str) -> bool:
    """Return whether a column says something about the row, and is none of the database's table."""
    return name in _CHANGE_COLUMNS or name.startswith(RESERVED_PREFIX)


def _holds(held: pa.Field, new: pa.Field) -> bool:
    """As `can_hold`; but a column of integers becomes one of floats only if floats hold them all."""
    return can_hold(held, new) and not (held.type == pa.int64() and pa.types.is_floating(new.type))


def _rename_missing(missing: pa.Array, renamed: Mapping[str, str]) -> pa.Array:
    """Return the lists of missing columns, by the names that the columns have here."""
    names = missing.flatten()
    for old, new in renamed.items():
        names = pc.if_else(pc.equal(names, old), new, names)
    lengths = pc.fill_null(pc.list_value_length(missing), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array([0, *lengths.cumsum().tolist()], pa.int32())
    return pa.ListArray.from_arrays(offsets, names, mask=pc.is_null(missing))


def options_to_json(options: SchemaOptions) -> dict[str, Json]:
    """Return what an epoch keeps of the source's rules about new columns."""
    return {"evolution": options.evolution, "on_widen": options.on_widen}


def options_from_json(value: Mapping[str, Json]) -> SchemaOptions:
    """Parse the output of `options_to_json`."""
    return SchemaOptions(evolution=value["evolution"], on_widen=value["on_widen"])
