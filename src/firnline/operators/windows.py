"""The operator `aggregate` with event-time windows: tumbling or sliding, closed by the watermark."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from firnline.errors import ConfigError
from firnline.operators.aggregate import Aggregate
from firnline.operators.base import MAIN, Assigned, Batch, EpochContext, Indices, Mask, Result
from firnline.operators.columns import TIMESTAMP, micros, plain
from firnline.types import Json

WINDOW_START = "window_start"
WINDOW_END = "window_end"

_START = pa.field(WINDOW_START, TIMESTAMP)
_END = pa.field(WINDOW_END, TIMESTAMP)


class WindowedAggregate(Aggregate):
    """Folds rows into one answer per key and window; a window's state goes when the watermark reaches its end.

    Settings, beside those of `Aggregate`: `time`, `window` (`size_us`, `slide_us`), `emit`.

    Windows begin at multiples of the slide since 1970; a row belongs to those with start <= time < start + size.
    `emit: changes` gives a row whenever an answer changes; `emit: final` one insert when the window closes. A row all
    of whose windows were closed before the epoch, and a row without a time, go to the port `late`.
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
        emitted = np.flatnonzero(closed & folded.live if self._final else self.answered(batch, folded))
        known = np.zeros_like(batch.exists) if self._final else batch.exists
        output = self.changes(batch, folded, emitted, known, context)
        changed = np.flatnonzero(self.moved(batch, folded) & ~closed)
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
