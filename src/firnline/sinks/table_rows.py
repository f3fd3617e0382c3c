"""Rows of many captured tables in one stream, for a sink that reads them all (`input: shop.*`).

Every batch has the rows of one table, with the columns of that table, and says so in the metadata of its column
`_firnline_table`. Such batches keep their columns on the way to the sink: only the sink knows what it has of a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from firnline.options import OP
from firnline.schema import RESERVED_PREFIX

TABLE_COLUMN = f"{RESERVED_PREFIX}_table"  # no table of a database has such a column here: the prefix is reserved
COMMON_COLUMNS = pa.schema([(TABLE_COLUMN, pa.string()), (OP, pa.string())])  # what the rows of all tables have
_FACTS = b"firnline.table"


@dataclass(frozen=True, slots=True)
class SourceTable:
    """The table of a database that rows come from."""

    schema: str  # of MySQL: the database
    name: str
    is_in_default: bool  # whether it lies in the default schema
    key: tuple[str, ...] | None  # empty: its rows have none; None: the rows do not say
    anew: bool = False  # of the row that empties it: a snapshot begins here, and all of its rows come again

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"


def mark_table(batch: pa.RecordBatch, table: SourceTable) -> pa.RecordBatch:
    """Return rows of a table that say so."""
    facts = [table.schema, table.name, table.is_in_default, list(table.key) if table.key is not None else None]
    facts += [True] if table.anew else []
    field = pa.field(TABLE_COLUMN, pa.string(), metadata={_FACTS: json.dumps(facts).encode()})
    return batch.append_column(field, pa.repeat(pa.scalar(table.full_name), batch.num_rows))


def table_of(schema: pa.Schema) -> SourceTable | None:
    """Return the table that rows with these columns come from; None for rows of an ordinary input."""
    index = schema.get_field_index(TABLE_COLUMN)
    facts = (schema.field(index).metadata or {}).get(_FACTS) if index >= 0 else None
    if facts is None:
        return None
    owner, name, is_in_default, key, *anew = json.loads(facts)
    return SourceTable(owner, name, is_in_default, tuple(key) if key is not None else None, bool(anew))


def same_columns(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield batches in order, those that follow each other with the same columns of the same table together."""
    group: list[pa.RecordBatch] = []
    for batch in batches:
        if group and not group[0].schema.equals(batch.schema, check_metadata=True):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group
