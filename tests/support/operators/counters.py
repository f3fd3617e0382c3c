"""A job that checks itself: counters whose sequence numbers show every update that is lost, doubled or out of order."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from firnline.operators import MAIN, OP, SEQUENCE, Batch, EpochContext, Operator, Result


class Counters(Operator):
    """Counts the rows of every key, and how many did not carry the number after the one before.

    Rows have a key and a `number`, which counts up from 1 in every key. Settings: `keys`.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.settings["keys"])

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([("rows", pa.int64()), ("last", pa.int64()), ("faults", pa.int64())])

    def output_schema(self, port: str = MAIN) -> pa.Schema:
        change = [pa.field(OP, pa.string()), pa.field(SEQUENCE, pa.int64())]
        return pa.schema([*self.state_key, *self.state_schema, *change])

    @property
    def output_key(self) -> tuple[str, ...]:
        return self.keys

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        keys = np.concatenate([batch.key_of[name] for name in batch.rows])
        numbers = np.concatenate([_numbers(rows.column("number")) for rows in batch.rows.values()])
        order = np.argsort(keys, kind="stable")  # rows of one key stay in the order in which they came
        keys, numbers = keys[order], numbers[order]
        changed, first, rows = np.unique(keys, return_index=True, return_counts=True)
        before = {name: _numbers(batch.state.column(name)) for name in self.state_schema.names}
        expected = np.empty_like(numbers)
        expected[1:] = numbers[:-1] + 1
        expected[first] = before["last"][changed] + 1
        wrong = np.add.reduceat((numbers != expected).astype(np.int64), first) if numbers.size else first
        state = pa.table(
            {
                "rows": before["rows"][changed] + rows,
                "last": numbers[first + rows - 1],
                "faults": before["faults"][changed] + wrong,
            },
            schema=self.state_schema,
        )
        output = batch.keys.take(pa.array(changed))
        for name in state.column_names:
            output = output.append_column(name, state.column(name))
        words = np.where(batch.exists[changed], "update", "insert")
        output = output.append_column(OP, pa.array(words, pa.string()))
        output = output.append_column(SEQUENCE, pa.repeat(pa.scalar(context.epoch, pa.int64()), len(changed)))
        return Result(changed, state, output={MAIN: output})


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(column.combine_chunks().fill_null(0))
