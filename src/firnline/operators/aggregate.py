"""The operator `aggregate`: one answer per key, kept up to date and emitted as changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from firnline.errors import ConfigError
from firnline.operators.base import LATE, MAIN, Assigned, Batch, EpochContext, Indices, Mask, Operator, Result
from firnline.operators.changelog import INSERT, UPDATE, before_column, change_columns, change_fields
from firnline.operators.columns import check_names, check_time, differs, get_keys, join_keys, late_schema, plain
from firnline.operators.functions import Rows, build_function
from firnline.types import Json

_ALL = pa.field("_all", pa.int8())  # the key of the one total, where there are no keys: a table needs a column


@dataclass(frozen=True, slots=True)
class Folded:
    """State and answers of every key of a batch, before its rows and after."""

    live: Mask  # keys that have state or rows; a timer may be due for a key that has neither any more
    old_state: list[pa.Array]
    new_state: list[pa.Array]
    old_answers: list[pa.Array]
    new_answers: list[pa.Array]


class Aggregate(Operator):
    """Folds rows into one answer per key, over all time.

    Settings: `keys`, `aggregates` (each `name`, `function`, `column`, `order_by`), `time`, `delay_us`, `before`.

    A key whose answer changed in an epoch gives one row: insert when the key is new, update otherwise. Null values
    are ignored, as in SQL; null in a key column is a key like others. Nothing is late. The order of the rows in an
    epoch does not matter, but how rows are cut into epochs can change the last digits of a sum of floats.
    """

    ports: ClassVar[tuple[str, ...]] = (MAIN, LATE)

    def __init__(self, name: str, inputs: Mapping[str, pa.Schema], settings: Mapping[str, Json]) -> None:
        super().__init__(name, inputs, settings)
        self._time: str | None = settings.get("time")
        if self._time is not None:
            check_time(name, inputs, self._time)
        self._keys = get_keys(name, inputs, settings["keys"])
        self._functions = [build_function(name, inputs, aggregate, self._time) for aggregate in settings["aggregates"]]
        self._before = bool(settings.get("before", False))
        if not self._functions:
            raise ConfigError(f"operator {name!r} has no aggregates", hint="Name at least one under `aggregates`.")
        check_names(name, self.state_schema)
        check_names(name, self.output_schema())

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f.name for f in self._keys)

    @property
    def state_key(self) -> pa.Schema:
        return pa.schema(self._keys or [_ALL])

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([f for function in self._functions for f in function.state])

    @property
    def output_key(self) -> tuple[str, ...]:
        return self.keys

    @property
    def times(self) -> Mapping[str, str]:
        return {} if self._time is None else dict.fromkeys(self.inputs, self._time)

    @property
    def delay_us(self) -> int:
        return int(self.settings.get("delay_us", 0))

    @property
    def answer_fields(self) -> list[pa.Field]:
        """The columns of the answers."""
        return [function.answer_field for function in self._functions]

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns that stand before the answers."""
        return self._keys

    def output_schema(self, port: str = MAIN) -> pa.Schema:
        if port == LATE:
            return late_schema(self.inputs)
        before = self.answer_fields if self._before else []
        return pa.schema([*self.key_fields, *self.answer_fields, *change_fields(before)])

    def key_columns(self, batch: Batch, at: Indices) -> list[pa.Array]:
        """Return the columns that stand before the answers, of some keys."""
        taken = pa.array(at)
        return [plain(batch.keys.column(f.name)).take(taken) for f in self._keys]

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        if self._keys:
            return super().assign(rows, source, context)
        column = pa.repeat(pa.scalar(0, _ALL.type), rows.num_rows)
        return Assigned(np.arange(rows.num_rows), pa.table([column], schema=pa.schema([_ALL])))

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        folded = self.fold_rows(batch)
        emitted = np.flatnonzero(self.answered(batch, folded))
        changed = np.flatnonzero(self.moved(batch, folded))
        return Result(
            changed,
            self.state_of(folded, changed),
            output={MAIN: self.changes(batch, folded, emitted, batch.exists, context)},
        )

    # -- the steps ------------------------------------------------------------------------------------

    def fold_rows(self, batch: Batch) -> Folded:
        """Fold the rows into the state of all keys of a batch."""
        inputs = list(self.inputs)
        rows = Rows(len(batch.exists), join_keys(inputs, batch.key_of), inputs, batch.rows)
        live = batch.exists.copy()
        live[rows.key_of] = True
        folded = Folded(live, [], [], [], [])
        for function in self._functions:
            old = [plain(batch.state.column(f.name)).cast(f.type) for f in function.state]
            new = function.fold(rows, old) if len(rows.key_of) else old
            folded.old_state.extend(old)
            folded.new_state.extend(new)
            folded.old_answers.append(function.answer(old))
            folded.new_answers.append(function.answer(new))
        return folded

    def moved(self, batch: Batch, folded: Folded) -> Mask:
        """Return which keys have another state than before."""
        return (_any_differs(folded.old_state, folded.new_state) | ~batch.exists) & folded.live

    def answered(self, batch: Batch, folded: Folded) -> Mask:
        """Return which keys have another answer than before."""
        return (_any_differs(folded.old_answers, folded.new_answers) | ~batch.exists) & folded.live

    def state_of(self, folded: Folded, at: Indices) -> pa.Table:
        """Return the new state of some keys."""
        taken = pa.array(at)
        return pa.Table.from_arrays([column.take(taken) for column in folded.new_state], schema=self.state_schema)

    def changes(self, batch: Batch, folded: Folded, at: Indices, known: Mask, context: EpochContext) -> pa.Table:
        """Return a row of the changelog for each of some keys: an update if an answer was emitted before."""
        taken = pa.array(at)
        there = known[at]
        columns = self.key_columns(batch, at)
        columns += [column.take(taken) for column in folded.new_answers]
        columns += change_columns(np.where(there, UPDATE, INSERT).astype(np.int8), context.epoch)
        if self._before:
            columns.append(before_column(self.answer_fields, [c.take(taken) for c in folded.old_answers], there))
        return pa.Table.from_arrays(columns, schema=self.output_schema())


def _any_differs(old: Sequence[pa.Array], new: Sequence[pa.Array]) -> Mask:
    unlike: Mask = np.logical_or.reduce([differs(a, b) for a, b in zip(old, new, strict=True)])
    return unlike
