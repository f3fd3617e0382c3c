"""What operators do with columns: find those that settings name, join several inputs, compare values, write changes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import ConfigError
from firnline.operators.base import BEFORE, LATE, OP, SEQUENCE, EpochContext, Indices, Mask, Operator
from firnline.schema import merge_fields

TIMESTAMP = pa.timestamp("us", "UTC")
INPUT = "_input"  # the input that a late row came from
WATERMARK = "_watermark"  # the watermark that made a row late

_LARGEST = np.int64(2**63 - 1)

INSERT, UPDATE, DELETE = 0, 1, 2
OPS = ("insert", "update", "delete")

Codes = npt.NDArray[np.int8]

AnyRows = TypeVar("AnyRows", pa.Table, pa.RecordBatch)


# -- columns that settings name -----------------------------------------------------------------------


def suggest(word: str, words: Iterable[str]) -> str:
    """Return a hint with the closest match, or all names."""
    known = {name.lower(): name for name in sorted(words)}
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.7)
    return f"Did you mean {known[close[0]]!r}?" if close else f"There are: {', '.join(known.values()) or 'none'}."


def get_field(name: str, inputs: Mapping[str, pa.Schema], column: str, *, everywhere: bool = True) -> pa.Field:
    """Return the field of a column that all inputs have, or at least one if not `everywhere`.

    Raises:
        ConfigError: an input lacks the column, or two inputs have it with different types.
    """
    result: pa.Field | None = None
    lacking = []
    for source, schema in inputs.items():
        at = schema.get_all_field_indices(column)
        if len(at) != 1:
            lacking.append(source)
            continue
        field = schema.field(at[0])
        if result is not None and field.type != result.type:
            raise ConfigError(
                f"operator {name!r}: column {column!r} is {field.type} in input {source!r}, not {result.type}",
                hint="Bring both to one type, in the schema of a source or by an operator of type sql.",
            )
        result = field.with_nullable(field.nullable or (result is not None and result.nullable))
    if result is None or (everywhere and lacking):
        where = f"input {lacking[0]!r}" if lacking else "it has no input, so it"
        known = inputs[lacking[0]].names if lacking else ()
        raise ConfigError(f"operator {name!r}: {where} has no column {column!r}", hint=suggest(column, known))
    return result.with_nullable(True) if lacking else result


def get_keys(name: str, inputs: Mapping[str, pa.Schema], keys: Sequence[str]) -> list[pa.Field]:
    """Return the fields of the key columns. Raises ConfigError if one cannot be a key."""
    fields = [get_field(name, inputs, key) for key in keys]
    for field in fields:
        if pa.types.is_nested(field.type):
            raise ConfigError(
                f"operator {name!r}: column {field.name!r} is {field.type}, which cannot be a key",
                hint="Take a part of it as a column of its own, by an operator of type sql.",
            )
    check_names(name, fields)
    return fields


def check_time(name: str, inputs: Mapping[str, pa.Schema], column: str) -> None:
    """Raise ConfigError unless the column is a timestamp in every input."""
    field = get_field(name, inputs, column)
    if not pa.types.is_timestamp(field.type):
        raise ConfigError(
            f"operator {name!r}: column {column!r} is {field.type}, but event time must be a timestamp",
            hint="Declare the column as timestamp in the schema of its source.",
        )


def check_names(name: str, fields: Iterable[pa.Field]) -> None:
    """Raise ConfigError if two columns have names that differ at most in case."""
    seen: set[str] = set()
    for field in fields:
        if field.name.lower() in seen:
            raise ConfigError(
                f"operator {name!r} would give two columns {field.name!r}", hint="Give one of them another name."
            )
        seen.add(field.name.lower())


# -- several inputs as one ----------------------------------------------------------------------------


def union_schema(inputs: Mapping[str, pa.Schema]) -> tuple[pa.Schema, list[str]]:
    """Return the columns of all inputs in one schema, and the names of the columns that cannot be merged.

    Numbers widen; other scalars of two types become strings. A column that is nested in one input and of another type
    in the next cannot be merged, and is left out.
    """
    fields: dict[str, pa.Field] = {}
    apart: list[str] = []
    for schema in inputs.values():
        for field in schema:
            have = fields.get(field.name)
            if have is None or have.type == field.type:
                nullable = field.nullable or (have is not None and have.nullable)
                fields[field.name] = (have or field).with_nullable(nullable)
            elif pa.types.is_nested(have.type) or pa.types.is_nested(field.type):
                apart.append(field.name)
            else:
                fields[field.name] = merge_fields(have, field).with_metadata(None)
    everywhere = [all(name in schema.names for schema in inputs.values()) for name in fields]
    kept = [f if same else f.with_nullable(True) for f, same in zip(fields.values(), everywhere, strict=True)]
    return pa.schema([f for f in kept if f.name not in apart]), apart


def align(rows: AnyRows, schema: pa.Schema) -> AnyRows:
    """Return the rows with the columns of a schema: missing columns are null, other columns are left out.

    A column of another type is cast.
    """
    if rows.schema.equals(schema, check_metadata=True):
        return rows
    columns = []
    for field in schema:
        if field.name not in rows.schema.names:
            columns.append(pa.nulls(rows.num_rows, field.type))
            continue
        column = rows.column(field.name)
        columns.append(column if column.type == field.type else column.cast(field.type))
    return type(rows).from_arrays(columns, schema=schema)


def join_column(inputs: Iterable[str], rows: Mapping[str, pa.Table], field: pa.Field) -> pa.Array:
    """Return one column of the rows of all inputs, in the order of the inputs; null where an input lacks it."""
    parts: list[pa.Array] = []
    for table in (rows[name] for name in inputs if name in rows):
        has = field.name in table.schema.names
        parts += table.column(field.name).chunks if has else [pa.nulls(table.num_rows, field.type)]
    return pa.chunked_array(parts, field.type).combine_chunks() if parts else pa.array([], field.type)


def join_keys(inputs: Iterable[str], key_of: Mapping[str, Indices]) -> Indices:
    """Return the key numbers of the rows of all inputs, in the order of the inputs."""
    parts = [np.asarray(key_of[name], np.int64) for name in inputs if name in key_of]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def late_schema(inputs: Mapping[str, pa.Schema], *more: pa.Field) -> pa.Schema:
    """Return the columns of the port `late`: those of the inputs, `more`, and the watermark."""
    added = [*more, pa.field(WATERMARK, TIMESTAMP)]
    names = {field.name for field in added}  # an input that is itself such a port has them already
    schema, _ = union_schema(inputs)
    return pa.schema([*(field for field in schema if field.name not in names), *added])


def late_rows(operator: Operator, source: str, rows: pa.Table, late: Indices, context: EpochContext) -> pa.Table:
    """Return the late rows of an input with the columns of the port `late`.

    `_watermark` is the watermark that made them late; it is null for a row without a time while there is no watermark.
    """
    schema = operator.output_schema(LATE)
    taken = rows.take(pa.array(late, pa.int64()))
    extra = {
        INPUT: pa.repeat(pa.scalar(source), taken.num_rows),
        WATERMARK: pa.repeat(pa.scalar(context.late_before, TIMESTAMP), taken.num_rows),
    }
    for name, column in extra.items():
        if name in schema.names:
            taken = taken.drop_columns([name]) if name in taken.schema.names else taken
            taken = taken.append_column(name, column)
    return align(taken, schema)


# -- values -------------------------------------------------------------------------------------------


def plain(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column in one piece."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def valid(column: pa.Array) -> Mask:
    """Return which values are not null."""
    return np.asarray(column.is_valid())


def integers(column: pa.Array) -> Indices:
    """Return whole numbers as int64, 0 for null."""
    return np.asarray(pc.fill_null(column.cast(pa.int64()), 0))


def micros(column: pa.Array | pa.ChunkedArray) -> tuple[Indices, Mask]:
    """Return timestamps as microseconds since 1970, and which of them are not null."""
    array = plain(column)
    array = array.cast(pa.timestamp("us", array.type.tz), safe=False)
    return integers(array), valid(array)


def maybe(values: np.ndarray[Any, Any], there: Mask, kind: pa.DataType) -> pa.Array:
    """Return an array of a type, null where `there` is False."""
    array = pa.array(values, mask=~there)
    return array if array.type == kind else array.cast(kind)


def is_orderable(kind: pa.DataType) -> bool:
    """Return whether values of a type have a fixed order."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    )


def ranks(column: pa.Array) -> Indices:
    """Return integers in the order of the values: equal for equal values, meaningless for null.

    Floats: -0.0 comes before 0.0, and NaN after everything, so that no two different values are equal.
    """
    kind = column.type
    if pa.types.is_floating(kind):
        values = np.asarray(pc.fill_null(column.cast(pa.float64()), 0.0))
        bits = values.view(np.int64)
        return np.where(np.isnan(values), _LARGEST, bits ^ ((bits >> 63) & _LARGEST))
    if pa.types.is_date32(kind):
        return integers(column.cast(pa.int32()))
    if pa.types.is_boolean(kind) or pa.types.is_timestamp(kind) or pa.types.is_date64(kind):
        return integers(column)
    if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        return integers(column)
    return np.asarray(pc.rank(column, tiebreaker="dense")).astype(np.int64)


def differs(old: pa.Array, new: pa.Array) -> Mask:
    """Return where two columns of the same type and length differ; null equals null, and NaN equals NaN."""
    if old is new:
        return np.zeros(len(new), np.bool_)
    there, here = valid(old), valid(new)
    if pa.types.is_floating(new.type):
        unlike = ranks(old) != ranks(new)
    else:
        unlike = np.asarray(pc.fill_null(pc.not_equal(old, new), False))
    result: Mask = (there != here) | (there & here & unlike)
    return result


# -- changelogs ---------------------------------------------------------------------------------------


def change_fields(before: Sequence[pa.Field] = ()) -> list[pa.Field]:
    """Return the fields that a changelog adds to its rows; `_before` only if it has fields."""
    fields = [pa.field(OP, pa.string()), pa.field(SEQUENCE, pa.int64())]
    if before:
        fields.append(pa.field(BEFORE, pa.struct([f.with_nullable(True) for f in before])))
    return fields


def change_columns(codes: Codes, epoch: int) -> list[pa.Array]:
    """Return `_op` and `_sequence`; `codes` are INSERT, UPDATE or DELETE."""
    ops = pa.array(OPS).take(pa.array(codes))
    return [ops, pa.repeat(pa.scalar(epoch, pa.int64()), len(codes))]


def before_column(fields: Sequence[pa.Field], columns: Sequence[pa.Array], there: Mask) -> pa.Array:
    """Return `_before`, the columns before the change; null where `there` is False."""
    return pa.StructArray.from_arrays(
        list(columns), fields=[f.with_nullable(True) for f in fields], mask=pa.array(~there)
    )
