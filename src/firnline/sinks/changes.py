"""Change rows: rows that say, in `_op`, whether they insert, update or delete the row of their key.

Operators make them. The records of a source become changes by the settings of a sink (`delete_when`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from firnline.operators.base import BEFORE
from firnline.options import MISSING, MOVED, OP, SEQUENCE, TRUNCATE


def table_columns(schema: pa.Schema) -> pa.Schema:
    """Return the columns of a changelog that go into a table."""
    return pa.schema([field for field in schema if field.name not in (OP, SEQUENCE, BEFORE, MISSING, MOVED)])


def find_truncates(batch: pa.RecordBatch) -> pa.Array | None:
    """Return which change rows empty their table; None if none does."""
    return find_words(batch, TRUNCATE)


def find_words(batch: pa.RecordBatch, word: str) -> pa.Array | None:
    """Return which rows have a word in `_op`; None if none has."""
    index = batch.schema.get_field_index(OP)
    if index < 0 or not pa.types.is_string(batch.schema.field(index).type):
        return None
    found = pc.fill_null(pc.equal(batch.column(index), word), False)
    return found if pc.any(found, min_count=0).as_py() else None


def find_deletes(batch: pa.RecordBatch, delete_when: Mapping[str, Sequence[str]]) -> pa.Array:
    """Return for each record whether it deletes its key: every column has one of its values.

    A value is what its text stands for in the type of the column: of a timestamp column, the same moment.
    """
    from firnline.ndjson.exact import values_of  # loads the decoder, which a committer does not need

    deletes = pa.repeat(pa.scalar(bool(delete_when)), batch.num_rows)
    for name, values in delete_when.items():
        index = batch.schema.get_field_index(name)
        if index < 0 or pa.types.is_nested(batch.schema.field(index).type):
            return pa.repeat(pa.scalar(False), batch.num_rows)
        wanted = values_of(batch.schema.field(index), values)
        deletes = pc.and_(deletes, pc.is_in(batch.column(index), wanted))
    return deletes
