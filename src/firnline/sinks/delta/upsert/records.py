"""Stages the records of a source as change rows: each one updates the row of its key, or deletes it.

Records that are change rows already, with `_op` and `_sequence`, stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from firnline.options import OP, OPERATIONS
from firnline.sinks.changes import find_deletes
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
