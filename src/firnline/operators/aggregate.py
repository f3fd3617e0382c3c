"""The operator `aggregate`: results per key, or per key and event-time window, emitted as changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa

from firnline.errors import ConfigError
from firnline.operators.aggregate_functions import Rows, build_function
from firnline.operators.base import LATE, MAIN, Assigned, Batch, EpochContext, Indices, Mask, Operator, Result
from firnline.operators.columns import (
    INSERT,
    TIMESTAMP,
    UPDATE,
    before_column,
    change_columns,
    change_fields,
    check_names,
    check_time,
    differs,
    get_keys,
    join_keys,
    late_schema,
    micros,
    plain,
)
from firnline.types import Json

_ALL = pa.field("_all", pa.int8())  # the state key of a global total, which has no key columns

WINDOW_START = "window_start"
WINDOW_END = "window_end"

_START = pa.field(WINDOW_START, TIMESTAMP)
_END = pa.field(WINDOW_END, TIMESTAMP)


@dataclass(frozen=True, slots=True)
class Folded:
    """State and results of every key of a batch, before and after its rows."""

    live: Mask  # keys that have state or rows; a due timer may belong to a key that no longer has state
    old_state: list[pa.Array]
    new_state: list[pa.Array]
    old_results: list[pa.Array]
    new_results: list[pa.Array]


class Aggregate(Operator):
    """Aggregates the rows of each key over all time.

    Settings: `keys`, `aggregates` (each `name`, `function`, `column`, `order_by`), `time`, `delay_us`, `before`.

    Each epoch emits one row per key whose result changed: an insert if the key is new, else an update. Null values are
    ignored, as in SQL; null in a key column is a key like any other. No row is late. The order of the rows in an epoch
    does not matter, but the division of rows into epochs can change the last digits of a sum of floats.
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
    def result_fields(self) -> list[pa.Field]:
        """The columns of the results."""
        return [function.result_field for function in self._functions]

    @property
    def key_fields(self) -> list[pa.Field]:
        """The columns before the results."""
        return self._keys

    def output_schema(self, port: str = MAIN) -> pa.Schema:
        if port == LATE:
            return late_schema(self.inputs)
        before = self.result_fields if self._before else []
        return pa.schema([*self.key_fields, *self.result_fields, *change_fields(before)])

    def key_columns(self, batch: Batch, at: Indices) -> list[pa.Array]:
        """Return the columns before the results, for the keys at these row numbers."""
        taken = pa.array(at)
        return [plain(batch.keys.column(f.name)).take(taken) for f in self._keys]

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        if self._keys:
            return super().assign(rows, source, context)
        column = pa.repeat(pa.scalar(0, _ALL.type), rows.num_rows)
        return Assigned(np.arange(rows.num_rows), pa.table([column], schema=pa.schema([_ALL])))

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        folded = self.fold_rows(batch)
        emitted = np.flatnonzero(self.changed_results(batch, folded))
        changed = np.flatnonzero(self.changed_states(batch, folded))
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
            folded.old_results.append(function.result(old))
            folded.new_results.append(function.result(new))
        return folded

    def changed_states(self, batch: Batch, folded: Folded) -> Mask:
        """Return which keys have a changed or new state."""
        return (_any_differs(folded.old_state, folded.new_state) | ~batch.exists) & folded.live

    def changed_results(self, batch: Batch, folded: Folded) -> Mask:
        """Return which keys have a changed or new result."""
        return (_any_differs(folded.old_results, folded.new_results) | ~batch.exists) & folded.live

    def state_of(self, folded: Folded, at: Indices) -> pa.Table:
        """Return the new state of the keys at these row numbers."""
        taken = pa.array(at)
        return pa.Table.from_arrays([column.take(taken) for column in folded.new_state], schema=self.state_schema)

    def changes(self, batch: Batch, folded: Folded, at: Indices, known: Mask, context: EpochContext) -> pa.Table:
        """Return a changelog row for each key at these row numbers: an update if the key is `known`, else an insert."""
        taken = pa.array(at)
        there = known[at]
        columns = self.key_columns(batch, at)
        columns += [column.take(taken) for column in folded.new_results]
        columns += change_columns(np.where(there, UPDATE, INSERT).astype(np.int8), context.epoch)
        if self._before:
            columns.append(before_column(self.result_fields, [c.take(taken) for c in folded.old_results], there))
        return pa.Table.from_arrays(columns, schema=self.output_schema())


class WindowedAggregate(Aggregate):
    """Aggregates the rows of each key and window; the watermark closes a window when it reaches the window's end.

    Settings, beside those of `Aggregate`: `time`, `window` (`size_us`, `slide_us`), `emit`.

    Windows start at multiples of the slide since 1970; a row belongs to those with start <= time < start + size.
    `emit: changes` emits a row in every epoch that changes a result; `emit: final` emits one insert when the window
    closes. A row whose windows were all closed before the epoch, and a row without a time, go to the port `late`. The
    state of a closed window is removed.
    """

    def __init__(self, name: str, inputs: Mapping[str, pa.Schema], settings: Mapping[str, Json]) -> None:
        window = settings["window"]
        self._size = int(window["size_us"])
        self._slide = int(window.get("slide_us") or self._size)
        self._final = settings.get("emit", "changes") == "final"
        super().__init__(name, inputs, settings)
        if self._time is None:
            raise ConfigError(
                f"operator {name!r} has a window, but no time", hint="Name the column of event time under `time`."
            )
        if not 0 < self._slide <= self._size:
            raise ConfigError(
                f"operator {name!r}: the slide of a window must be longer than 0 and at most its size",
                hint="Rows between two windows would belong to none; make `slide` shorter.",
            )
        if self._final and self._before:
            raise ConfigError(
                f"operator {name!r}: `before` has no meaning with emit: final, which gives every row once",
                hint="Leave out `before`, or set emit: changes.",
            )

    @property
    def state_key(self) -> pa.Schema:
        return pa.schema([*self._keys, _START])

    @property
    def output_key(self) -> tuple[str, ...]:
        return (*self.keys, WINDOW_START)

    @property
    def key_fields(self) -> list[pa.Field]:
        return [*self._keys, _START, _END]

    def key_columns(self, batch: Batch, at: Indices) -> list[pa.Array]:
        start = plain(batch.keys.column(WINDOW_START)).take(pa.array(at))
        end = pa.array(micros(start)[0] + self._size).cast(TIMESTAMP)
        return [*super().key_columns(batch, at), start, end]

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        time, there = micros(rows.column(self.times[source]))
        newest = np.floor_divide(time, self._slide) * self._slide
        steps = np.arange(-(-self._size // self._slide)) * self._slide
        start = newest[:, None] - steps[None, :]
        end = start + self._size
        open_ = (end > time[:, None]) & there[:, None]
        if context.late_before is not None:
            open_ &= end > context.late_before
        row, nth = np.nonzero(open_)
        taken = pa.array(row)
        keys = [rows.column(key).take(taken) for key in self.keys]
        keys.append(pa.array(start[row, nth]).cast(TIMESTAMP))
        return Assigned(row, pa.Table.from_arrays(keys, schema=self.state_key), np.flatnonzero(~open_.any(axis=1)))

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        folded = self.fold_rows(batch)
        start, _ = micros(batch.keys.column(WINDOW_START))
        end = start + self._size
        closed = self._closed(end, context)
        emitted = np.flatnonzero(closed & folded.live if self._final else self.changed_results(batch, folded))
        known = np.zeros_like(batch.exists) if self._final else batch.exists
        output = self.changes(batch, folded, emitted, known, context)
        changed = np.flatnonzero(self.changed_states(batch, folded) & ~closed)
        return Result(
            changed,
            self.state_of(folded, changed),
            removed=np.flatnonzero(closed & batch.exists),
            timers=pa.array(end[changed]),
            output={MAIN: output},
        )

    def _closed(self, end: Indices, context: EpochContext) -> Mask:
        if context.watermark is None:
            return np.zeros(len(end), np.bool_)
        return end <= context.watermark


def _any_differs(old: Sequence[pa.Array], new: Sequence[pa.Array]) -> Mask:
    unlike: Mask = np.logical_or.reduce([differs(a, b) for a, b in zip(old, new, strict=True)])
    return unlike
