"""The columns of a changelog: what happened to a row, in which epoch, and what it was before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.operators.base import BEFORE, OP, SEQUENCE, Mask

INSERT, UPDATE, DELETE = 0, 1, 2
OPS = ("insert", "update", "delete")

Codes = npt.NDArray[np.int8]


def change_fields(before: Sequence[pa.Field] = ()) -> list[pa.Field]:
    """Return the fields that a changelog adds to its rows; with `_before` when there are fields for it."""
    fields = [pa.field(OP, pa.string()), pa.field(SEQUENCE, pa.int64())]
    if before:
        fields.append(pa.field(BEFORE, pa.struct([f.with_nullable(True) for f in before])))
    return fields


def change_columns(codes: Codes, epoch: int) -> list[pa.Array]:
    """Return `_op` and `_sequence`; `codes` are INSERT, UPDATE or DELETE."""
    ops = pa.array(OPS).take(pa.array(codes))
    return [ops, pa.repeat(pa.scalar(epoch, pa.int64()), len(codes))]


def before_column(fields: Sequence[pa.Field], columns: Sequence[pa.Array], there: Mask) -> pa.Array:
    """Return `_before` from the columns as they were; null where there was no row."""
    return pa.StructArray.from_arrays(
        list(columns), fields=[f.with_nullable(True) for f in fields], mask=pa.array(~there)
    )
