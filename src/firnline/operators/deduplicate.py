"""The operator `deduplicate`: emits the first row of every key, and drops later ones."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from firnline.errors import ConfigError
from firnline.operators.base import MAIN, Batch, EpochContext, Indices, Operator, Result
from firnline.operators.columns import (
    align,
    check_names,
    check_time,
    get_keys,
    integers,
    join_column,
    join_keys,
    maybe,
    micros,
    plain,
    union_schema,
    valid,
)
from firnline.types import Json

FIRST_TIME = "first_time"
DROPPED = "dropped"


class Deduplicate(Operator):
    """Emits the first row of every key unchanged, and drops later ones.

    Settings: `keys`, `time`, `ttl_us`, `delay_us`.

    Rows are taken in their order, input by input. With `ttl_us`, a key is forgotten when the watermark reaches the time
    of its first row plus `ttl_us`; the rows of that epoch are still dropped. If the first row has no time, the time to
    live starts at the first watermark after it.
    """

    def __init__(self, name: str, inputs: Mapping[str, pa.Schema], settings: Mapping[str, Json]) -> None:
        super().__init__(name, inputs, settings)
        self._keys = get_keys(name, inputs, settings["keys"])
        self._time: str | None = settings.get("time")
        self._ttl: int | None = settings.get("ttl_us")
        if self._time is not None:
            check_time(name, inputs, self._time)
        elif self._ttl is not None:
            raise ConfigError(
                f"operator {name!r} has a ttl, but no time", hint="Name the column of event time under `time`."
            )
        self._output, apart = union_schema(inputs)
        if apart:
            raise ConfigError(
                f"operator {name!r}: column {apart[0]!r} has types in its inputs that cannot be merged",
                hint="Rename or change one of them by an operator of type sql.",
            )
        check_names(name, self._output)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f.name for f in self._keys)

    @property
    def state_key(self) -> pa.Schema:
        return pa.schema(self._keys)

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([(FIRST_TIME, pa.int64()), (DROPPED, pa.int64())])

    @property
    def times(self) -> Mapping[str, str]:
        return {} if self._time is None else dict.fromkeys(self.inputs, self._time)

    @property
    def delay_us(self) -> int:
        return int(self.settings.get("delay_us", 0))

    def output_schema(self, port: str = MAIN) -> pa.Schema:
        return self._output

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        count = len(batch.exists)
        inputs = [name for name in self.inputs if name in batch.rows]
        key_of = join_keys(inputs, batch.key_of)
        first = np.full(count, len(key_of))
        np.minimum.at(first, key_of, np.arange(len(key_of)))
        passing = np.sort(first[~batch.exists & (first < len(key_of))])
        rows = np.bincount(key_of, minlength=count)
        old = plain(batch.state.column(DROPPED))
        dropped = integers(old) + rows - ~batch.exists
        time = self._first_times(batch, first, context)
        gone = np.zeros(count, np.bool_)
        timers = None
        if self._ttl is not None:
            due = integers(time) + self._ttl
            if context.watermark is not None:
                gone = valid(time) & (due <= context.watermark)
            timers = maybe(due, valid(time), pa.int64())
        changed = np.flatnonzero((rows > 0) & ~gone)
        taken = pa.array(changed)
        tables = [align(batch.rows[name], self._output) for name in inputs]
        joined = pa.concat_tables(tables) if tables else self._output.empty_table()
        return Result(
            changed,
            pa.table([time.take(taken), pa.array(dropped).take(taken)], schema=self.state_schema),
            removed=np.flatnonzero(gone & batch.exists),
            timers=None if timers is None else timers.take(taken),
            output={MAIN: joined.take(pa.array(passing))},
        )

    def _first_times(self, batch: Batch, first: Indices, context: EpochContext) -> pa.Array:
        """Return the time of the first row of every key; the watermark where that row has none."""
        old = plain(batch.state.column(FIRST_TIME))
        time, there = integers(old).copy(), valid(old).copy()
        if self._time is not None:
            column = next(iter(self.inputs.values())).field(self._time)
            times, known = micros(join_column(self.inputs, batch.rows, column))
            new = ~batch.exists & (first < len(times))
            time[new], there[new] = times[first[new]], known[first[new]]
        if self._ttl is not None and context.watermark is not None:
            time = np.where(there, time, context.watermark)
            there = np.ones(len(time), np.bool_)
        return maybe(time, there, pa.int64())
