"""What a follower gets of each row: chosen columns, masked values, and only the rows that fulfil a condition.

The shape of an epoch is part of its ledger entry, so that a later delivery gives the same rows. Rows are numbered
before a condition leaves any out: the number of a row, and so its id, does not depend on the sink.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import SchemaError
from firnline.options import MISSING, MOVED, OP, SEQUENCE, FollowerOptions
from firnline.sinks.changes import find_truncates
from firnline.sinks.table_rows import TABLE_COLUMN, SourceTable, table_of
from firnline.types import Json

if TYPE_CHECKING:  # a library of this size is loaded by those who have a condition or masked values alone
    import duckdb

REDACTED = "***"


@dataclass(frozen=True, slots=True)
class ShapedRows:
    """Rows as a follower gets them, each with its number in the epoch.

    `first` and `end` are the numbers of the rows that they were made from: a condition may have left some out.
    """

    batch: pa.RecordBatch
    numbers: pa.Array  # int64
    first: int
    end: int
    table: SourceTable | None = None  # that all of them come from, if the sink reads many


@dataclass(frozen=True, slots=True)
class RowShape:
    """Which columns and rows are delivered, and which values are masked."""

    columns: tuple[str, ...] = ()  # none: all
    exclude: tuple[str, ...] = ()
    mask: Mapping[str, str] = field(default_factory=dict)
    where: str = ""

    @classmethod
    def of(cls, options: FollowerOptions) -> RowShape:
        """Return the shape that the options of a sink ask for. An upsert needs the columns that make rows changes."""
        changes = (OP, SEQUENCE, MISSING, MOVED) if options.write == "upsert" and options.columns else ()
        return cls((*options.columns, *changes), options.exclude, dict(options.mask), options.where)

    def to_json(self) -> dict[str, Json]:
        return {
            "columns": list(self.columns),
            "exclude": list(self.exclude),
            "mask": dict(self.mask),
            "where": self.where,
        }

    @classmethod
    def from_json(cls, value: Json) -> RowShape:
        return cls(tuple(value["columns"]), tuple(value["exclude"]), dict(value["mask"]), str(value["where"]))

    def schema_of(self, rows: pa.Schema) -> pa.Schema:
        """Return the columns that are delivered of rows with these columns."""
        return self.apply(pa.RecordBatch.from_pylist([], rows), 0).batch.schema

    def check_condition(self, rows: pa.Schema) -> None:
        """Raise SchemaError if the condition does not fit rows with these columns."""
        if self.where:
            self._select_where(pa.RecordBatch.from_pylist([], rows), f"coalesce(({self.where}), false)")

    def apply(self, batch: pa.RecordBatch, first: int, dead: Collection[int] = ()) -> ShapedRows:
        """Return the rows to deliver of a batch whose first row has the number `first`; without dead letters.

        Raises:
            SchemaError: the condition does not fit the columns.
        """
        end = first + batch.num_rows
        numbers = pa.array(np.arange(first, end))
        if any(first <= number < end for number in dead):  # first: the condition may not fit a dead letter
            alive = pc.invert(pc.is_in(numbers, pa.array(sorted(dead), pa.int64())))
            batch, numbers = batch.filter(alive), numbers.filter(alive)
        if self.where and batch.num_rows:
            keep = self.fulfils(batch)
            batch, numbers = batch.filter(keep), numbers.filter(keep)
        return ShapedRows(self._mask(self._select(batch)), numbers, first, end, table_of(batch.schema))

    def fulfils(self, batch: pa.RecordBatch, *, lenient: bool = False) -> pa.Array:
        """Return which rows fulfil the condition; `lenient`: a row on which it fails does not.

        A change row that empties a table has no values to judge. It concerns the rows that fulfil the condition, too,
        so it counts as one of them unless the condition is about `_op` itself.

        Raises:
            SchemaError: the condition does not fit the columns, or fails on a row.
        """
        if not self.where or not batch.num_rows:
            return pa.repeat(pa.scalar(True), batch.num_rows)
        keep = self._select_where(batch, f"coalesce({'try' if lenient else ''}(({self.where})), false)")
        empties = find_truncates(batch)
        return keep if empties is None or OP in self.condition_columns else pc.or_(keep, empties)

    @property
    def condition_columns(self) -> set[str]:
        """The columns that the condition names, in lower case."""
        from firnline.sql.condition import find_columns  # imports a parser

        return find_columns(self.where) if self.where else set()

    def _select(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.columns and not self.exclude:
            return batch
        names = [
            name
            for name in batch.schema.names
            if (not self.columns or name in self.columns) and name not in self.exclude
        ]
        return batch.select(names)

    def _mask(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name, how in self.mask.items():
            index = batch.schema.get_field_index(name)
            if index < 0:
                continue
            column = batch.column(index)
            if how == "null":
                masked = pa.nulls(len(column), column.type)
            elif how == "redact":
                masked = pc.if_else(pc.is_null(column), pa.scalar(None, pa.string()), pa.scalar(REDACTED))
            else:
                masked = _hashed(column)
            batch = batch.set_column(index, pa.field(name, masked.type), masked)
        return batch

    def find_unfit(self, batch: pa.RecordBatch) -> pa.Array:
        """Return for each row whether the condition fails on it, as a cast does of a text that is no number."""
        return self._select_where(batch, f"try(({self.where}) IS NULL) IS NULL")

    def _select_where(self, batch: pa.RecordBatch, expression: str) -> pa.Array:
        """Return a truth for each row."""
        import duckdb

        rows = pa.table([unsliced(column) for column in batch.columns], names=batch.schema.names)
        try:
            with _connect() as connection:
                connection.register("rows", rows)
                found = connection.execute(f"SELECT {expression} AS found FROM rows")  # noqa: S608
                return found.to_arrow_table().column("found").combine_chunks().cast(pa.bool_())
        except duckdb.Error as error:
            # Other words of the library may quote a value of the row, which may be one that is masked.
            is_about_columns = isinstance(error, duckdb.BinderException | duckdb.CatalogException)
            words = str(error).splitlines()[0].removeprefix("Binder Error: ")
            reason = words if is_about_columns else str(error).partition(":")[0]
            raise SchemaError(
                f"where: the condition {self.where!r} does not fit the rows: {reason}",
                hint=f"Correct `where`: it may name the columns {', '.join(batch.schema.names)}. Text is in single"
                " quotes.",
            ) from None

    @staticmethod
    def event_ids(prefix: str, numbers: pa.Array) -> pa.Array:
        """Return the ids of events whose rows have these numbers."""
        return pc.binary_join_element_wise(pa.scalar(prefix), numbers.cast(pa.string()), "")


def unsliced(column: pa.Array) -> pa.Array:
    """Return a column for DuckDB, which reads wrong values of a struct inside of a struct if the column is a slice."""
    return pa.concat_arrays([column, column[:0]]) if column.offset and pa.types.is_nested(column.type) else column


def check_settings(options: FollowerOptions, rows: pa.Schema) -> None:
    """Refuse settings of a follower that do not fit rows with these columns: an epoch keeps its settings for ever.

    Raises:
        SchemaError: it names the sink, the setting and the column.
    """
    shape, named = RowShape.of(options), f"sink {options.name!r}"
    delivered = shape.schema_of(rows).names
    for setting, columns in options.named_columns.items():
        for name in columns:
            if name not in delivered:
                raise SchemaError(
                    f"{named}: {setting} names the column {name!r}, and its rows have {', '.join(delivered)}",
                    hint=f"Correct `{setting}` of the sink{_meant(name, delivered)}. A column that only later records"
                    " have can be declared under schema.fields of the source.",
                    sink=options.name,
                    column=name,
                )
    try:
        shape.check_condition(rows)
    except SchemaError as error:
        raise SchemaError(f"{named}: {error.message}", hint=error.hint, sink=options.name) from error


def find_unknown_columns(options: FollowerOptions, rows: pa.Schema) -> list[str]:
    """Return, in words, the columns that `columns`, `exclude` and `mask` of a follower name and its rows lack.

    Of a sink that reads many tables none: each has columns of its own.
    """
    if TABLE_COLUMN in rows.names:
        return []
    settings = {"columns": options.columns, "exclude": options.exclude, "mask": tuple(options.mask)}
    effects = {"columns": "nothing is delivered for it", "exclude": "nothing is left out", "mask": "nothing is masked"}
    return [
        f"{setting} of sink {options.name} names {name!r}, and its rows have no such column: {effects[setting]}"
        f"{_meant(name, rows.names)}"
        for setting, names in settings.items()
        for name in names
        if name not in rows.names
    ]


def _meant(name: str, names: Sequence[str]) -> str:
    """Return a question for the name that was probably meant; empty without one."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _hashed(column: pa.Array) -> pa.Array:
    """Return the SHA-256 of each value's text in hex."""
    with _connect() as connection:
        connection.register("values_to_hash", pa.table({"v": unsliced(column)}))
        found = connection.execute("SELECT sha256(CAST(v AS VARCHAR)) AS h FROM values_to_hash")
        return found.to_arrow_table().column("h").combine_chunks().cast(pa.string())


def _connect() -> duckdb.DuckDBPyConnection:
    """Open a database in memory that keeps the order of rows and reads no file; times are in UTC."""
    import duckdb

    connection = duckdb.connect(":memory:", config={"threads": "1"})
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute("SET enable_external_access = false")
    return connection
