"""Stages the records of a source as change rows: each one updates the row of its key, or deletes it.

Records that are change rows already, with `_op` and `_sequence`, stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from firnline.ndjson.exact import values_of
from firnline.sinks.delta.options import OP, OPERATIONS
from firnline.sinks.delta.stage import ChangeStager
from firnline.sinks.delta.upsert.changes import SEQUENCE_BY
from firnline.storage import Storage
from firnline.types import Json


class RecordStager(ChangeStager):
    """Writes the records of one task for one sink.

    What the spec says about order and deletes becomes part of what is staged, so that a later commit of the same files
    has the same result: deletes as the column `_op`, the column that orders rows in the description of each file.
    """

    def __init__(self, target: dict[str, Json], attempt: str, storage: Storage | None = None) -> None:
        super().__init__(target, attempt, storage)
        records = target["shape"]["records"]
        self._sequence_by: str | None = records["sequence_by"]
        self._delete_when: Mapping[str, Sequence[str]] = records["delete_when"]

    def write(self, batch: pa.RecordBatch) -> None:
        index = batch.schema.get_field_index(OP)
        given: pa.Array | pa.Scalar = pa.scalar("update")
        if index >= 0:  # other words are those that `delete_when` may name
            words = batch.column(index).cast(pa.string())
            given = pc.if_else(pc.is_in(words, pa.array(OPERATIONS)), words, given)
        operation = pc.if_else(find_deletes(batch, self._delete_when), pa.scalar("delete"), given)
        field = pa.field(OP, pa.string())
        super().write(
            batch.set_column(index, field, operation) if index >= 0 else batch.append_column(field, operation)
        )

    def close(self) -> list[dict[str, Json]]:
        for file in super().close():
            file[SEQUENCE_BY] = self._sequence_by
        return self._staged


def find_deletes(batch: pa.RecordBatch, delete_when: Mapping[str, Sequence[str]]) -> pa.Array:
    """Return for each record whether it deletes its key: every column has one of its values.

    A value is what its text stands for in the type of the column: of a timestamp column, the same moment.
    """
    deletes = pa.repeat(pa.scalar(bool(delete_when)), batch.num_rows)
    for name, values in delete_when.items():
        index = batch.schema.get_field_index(name)
        if index < 0 or pa.types.is_nested(batch.schema.field(index).type):
            return pa.repeat(pa.scalar(False), batch.num_rows)
        wanted = values_of(batch.schema.field(index), values)
        deletes = pc.and_(deletes, pc.is_in(batch.column(index), wanted))
    return deletes
