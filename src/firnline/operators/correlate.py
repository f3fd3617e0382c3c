"""The operator `correlate`: alerts when several inputs have rows with one key within an event-time window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import ConfigError
from firnline.operators.alerts import EVER, MAX_INPUTS, Alerts, Carried, Observations, find_alerts
from firnline.operators.base import LATE, MAIN, Assigned, Batch, EpochContext, Indices, Mask, Operator, Result
from firnline.operators.changelog import DELETE, INSERT, UPDATE, Codes, change_columns, change_fields
from firnline.operators.columns import (
    INPUT,
    TIMESTAMP,
    check_names,
    check_time,
    get_keys,
    integers,
    late_schema,
    maybe,
    micros,
    plain,
    valid,
)
from firnline.types import Json

_STATE = pa.schema(
    [
        ("times", pa.list_(pa.int64())),
        ("inputs", pa.list_(pa.int8())),
        ("final_until", pa.int64()),
        ("alert_start", pa.int64()),
        ("alert_end", pa.int64()),
        ("alert_rows", pa.int64()),
        ("alert_inputs", pa.int64()),
    ]
)


class Correlate(Operator):
    """Finds alerts: stretches of time in which a key has rows from several inputs, close to each other.

    Settings: `keys`, `time`, `window_us`, `min_inputs`, `delay_us`, `retain_us`. Every input has the key columns and
    the time; without `min_inputs` all of them must speak.

    Per key, rows at the same time are one step. A step at t qualifies when the rows with t - window < time <= t come
    from at least `min_inputs` inputs. An alert is a run of qualifying steps with no other step between them, each
    less than a window after the one before. `alert_start` is the earliest time in the window of its first step,
    `alert_end` the time of its last step; `inputs` and `rows` tell the distinct inputs and the number of the rows
    from `alert_start` to `alert_end`, both included.

    Rows may come in any order: what they change in the answer comes out as inserts, updates and deletes, one per key
    and `alert_start` in an epoch. The answer is final up to the watermark less `retain_us`: a row from before, and a
    row without a time, goes to the port `late`. Rows that no later row can be in a window with are forgotten.

    The state knows inputs by their place: new ones are added at the end of the list.
    """

    ports: ClassVar[tuple[str, ...]] = (MAIN, LATE)

    def __init__(self, name: str, inputs: Mapping[str, pa.Schema], settings: Mapping[str, Json]) -> None:
        super().__init__(name, inputs, settings)
        self._keys = get_keys(name, inputs, settings["keys"])
        self._time = str(settings["time"])
        self._window = int(settings["window_us"])
        self._min_inputs = int(settings.get("min_inputs") or len(inputs))
        self._retain = int(settings.get("retain_us") or 0)
        for source, schema in inputs.items():
            check_time(name, {source: schema}, self._time)
        if len(inputs) > MAX_INPUTS:
            raise ConfigError(
                f"operator {name!r} has {len(inputs)} inputs, but correlate takes {MAX_INPUTS} at most",
                hint="Bring several of them together by an operator of type sql.",
            )
        if not 1 <= self._min_inputs <= len(inputs):
            raise ConfigError(
                f"operator {name!r}: min_inputs is {self._min_inputs}, but there are {len(inputs)} inputs",
                hint=f"Set min_inputs to a number from 1 to {len(inputs)}.",
            )
        if self._window <= 0:
            raise ConfigError(f"operator {name!r}: its window must be longer than 0", hint="Set `window`, e.g. 10m.")
        check_names(name, self.output_schema())

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(f.name for f in self._keys)

    @property
    def state_key(self) -> pa.Schema:
        return pa.schema(self._keys)

    @property
    def state_schema(self) -> pa.Schema:
        return _STATE

    @property
    def output_key(self) -> tuple[str, ...]:
        return (*self.keys, "alert_start")

    @property
    def times(self) -> Mapping[str, str]:
        return dict.fromkeys(self.inputs, self._time)

    @property
    def delay_us(self) -> int:
        return int(self.settings.get("delay_us", 0))

    def output_schema(self, port: str = MAIN) -> pa.Schema:
        if port == LATE:
            return late_schema(self.inputs, pa.field(INPUT, pa.string()))
        found = [
            pa.field("alert_start", TIMESTAMP),
            pa.field("alert_end", TIMESTAMP),
            pa.field("inputs", pa.list_(pa.string())),
            pa.field("rows", pa.int64()),
        ]
        return pa.schema([*self._keys, *found, *change_fields()])

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        time, there = micros(rows.column(self._time))
        late = ~there
        if context.late_before is not None:
            late |= time < context.late_before - self._retain
        kept = np.flatnonzero(~late)
        return Assigned(kept, rows.select(list(self.keys)).take(pa.array(kept)), np.flatnonzero(late))

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        count = len(batch.exists)
        old, carried = _read_state(batch.state)
        rows, touched = self._with_new(old, batch)
        final = EVER if context.watermark is None else np.int64(context.watermark - self._retain)
        cut = np.maximum(carried.until, final)
        before, _ = find_alerts(old, carried, cut, self._window, self._min_inputs)
        after, carry = find_alerts(rows, carried, cut, self._window, self._min_inputs)

        needed = rows.time > (cut - self._window)[rows.key]
        kept = Observations(rows.key[needed], rows.time[needed], rows.source[needed])
        ends = np.full(count, EVER)
        np.maximum.at(ends, kept.key, kept.time)
        gone = ends == EVER
        changed = np.flatnonzero((touched | batch.due) & ~gone)
        return Result(
            changed,
            _write_state(kept, carry, changed),
            removed=np.flatnonzero(gone & batch.exists),
            timers=pa.array(ends[changed] + self._window + self._retain),
            output={MAIN: self._changes(batch, before, after, context)},
        )

    def _with_new(self, old: Observations, batch: Batch) -> tuple[Observations, Mask]:
        """Return the old observations and those of the epoch, and which keys have new ones."""
        key, time, source = [old.key], [old.time], [old.source]
        touched = np.zeros(len(batch.exists), np.bool_)
        for place, name in enumerate(self.inputs):
            if name not in batch.rows:
                continue
            key.append(np.asarray(batch.key_of[name], np.int64))
            time.append(micros(batch.rows[name].column(self._time))[0])
            source.append(np.full(len(key[-1]), place, np.int8))
            touched[key[-1]] = True
        return Observations.of(np.concatenate(key), np.concatenate(time), np.concatenate(source)), touched

    def _changes(self, batch: Batch, before: Alerts, after: Alerts, context: EpochContext) -> pa.Table:
        codes, found = _compare(before, after)
        at = pa.array(found.key)
        columns = [plain(batch.keys.column(f.name)).take(at) for f in self._keys]
        columns += [pa.array(found.start).cast(TIMESTAMP), pa.array(found.end).cast(TIMESTAMP)]
        columns += [self._names(found.inputs), pa.array(found.rows), *change_columns(codes, context.epoch)]
        return pa.Table.from_arrays(columns, schema=self.output_schema())

    def _names(self, masks: Indices) -> pa.Array:
        """Return the names of the inputs whose bits are set, sorted."""
        places = sorted(enumerate(self.inputs), key=lambda item: item[1])
        bits = (masks[:, None] >> np.array([place for place, _ in places])[None, :]) & 1
        offsets = np.concatenate([[0], np.cumsum(bits.sum(axis=1))]).astype(np.int32)
        names = pa.array([name for _, name in places], pa.string())
        return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(np.nonzero(bits)[1])))


def _read_state(state: pa.Table) -> tuple[Observations, Carried]:
    times, sources = plain(state.column("times")), plain(state.column("inputs"))
    lengths = integers(pc.fill_null(pc.list_value_length(times), 0))
    rows = Observations(
        np.repeat(np.arange(len(times)), lengths),
        integers(pc.list_flatten(times)),
        np.asarray(pc.list_flatten(sources)).astype(np.int8),
    )
    final = plain(state.column("final_until"))
    until = np.where(valid(final), integers(final), EVER)
    carried = (integers(plain(state.column(f"alert_{part}"))) for part in ("start", "end", "rows", "inputs"))
    return rows, Carried(until, *carried)


def _write_state(rows: Observations, carry: Carried, changed: Indices) -> pa.Table:
    """Return the state of the changed keys; the rows are sorted by key."""
    first, last = np.searchsorted(rows.key, changed), np.searchsorted(rows.key, changed, side="right")
    offsets = pa.array(np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32))
    wanted = np.zeros(len(carry.until), np.bool_)
    wanted[changed] = True
    of_changed = wanted[rows.key]
    until, there = carry.until[changed], carry.rows[changed] > 0
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(rows.time[of_changed])),
        pa.ListArray.from_arrays(offsets, pa.array(rows.source[of_changed])),
        maybe(until, until != EVER, pa.int64()),
        *(maybe(part[changed], there, pa.int64()) for part in (carry.start, carry.end, carry.rows, carry.inputs)),
    ]
    return pa.Table.from_arrays(columns, schema=_STATE)


def _compare(before: Alerts, after: Alerts) -> tuple[Codes, Alerts]:
    """Return the changes of alerts, by key and start; unchanged ones are left out."""
    both = Alerts.concat(before, after)
    is_new = np.arange(len(both.key)) >= len(before.key)
    order = np.lexsort((is_new, both.start, both.key))
    both, is_new = both.take(order), is_new[order]
    pair = np.zeros(len(order), np.bool_)  # this one is the new form of the one before
    pair[1:] = (np.diff(both.key) == 0) & (np.diff(both.start) == 0)
    replaced = np.append(pair[1:], False)
    same = np.zeros(len(order), np.bool_)
    same[1:] = (np.diff(both.end) == 0) & (np.diff(both.rows) == 0) & (np.diff(both.inputs) == 0)
    codes = np.where(is_new, np.where(pair, UPDATE, INSERT), DELETE).astype(np.int8)
    told = ~replaced & ~(pair & same)
    return codes[told], both.take(told)
