"""The operator `correlate`: alerts when several inputs have rows with one key within an event-time window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import ConfigError
from firnline.jit import entry
from firnline.operators.base import LATE, MAIN, Assigned, Batch, EpochContext, Indices, Mask, Operator, Result
from firnline.operators.columns import (
    DELETE,
    INPUT,
    INSERT,
    TIMESTAMP,
    UPDATE,
    Codes,
    change_columns,
    change_fields,
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

NEVER = np.int64(-(2**62))  # earlier than every event time: nothing is final yet
MAX_INPUTS = 32

Inputs = npt.NDArray[np.int8]

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


@dataclass(frozen=True, slots=True)
class Observations:
    """The key number, time and input number of each row."""

    key: Indices
    time: Indices
    source: Inputs

    @classmethod
    def sort(cls, key: Indices, time: Indices, source: Inputs) -> Observations:
        """Return the rows sorted by key, time and input."""
        order = np.lexsort((source, time, key))
        return cls(key[order], time[order], source[order])


@dataclass(frozen=True, slots=True)
class Alerts:
    """Alerts: key number, start and end, number of rows, and the inputs of the rows (one bit per input)."""

    key: Indices
    start: Indices
    end: Indices
    rows: Indices
    inputs: Indices

    def take(self, at: Indices | Mask) -> Alerts:
        return Alerts(self.key[at], self.start[at], self.end[at], self.rows[at], self.inputs[at])

    @classmethod
    def concat(cls, first: Alerts, second: Alerts) -> Alerts:
        return cls(
            np.concatenate([first.key, second.key]),
            np.concatenate([first.start, second.start]),
            np.concatenate([first.end, second.end]),
            np.concatenate([first.rows, second.rows]),
            np.concatenate([first.inputs, second.inputs]),
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far each key is final: no row before `until` can come any more.

    The other fields describe the alert of the last step before `until`, which later rows may extend; `rows` is 0 if
    there is none.
    """

    until: Indices
    start: Indices
    end: Indices
    rows: Indices
    inputs: Indices


class Correlate(Operator):
    """Finds alerts: periods in which a key has rows from several inputs, close to each other.

    Settings: `keys`, `time`, `window_us`, `min_inputs`, `delay_us`, `retain_us`. Every input has the key columns and
    the time. `min_inputs` defaults to the number of inputs.

    The rows of one key with the same time are one step. A step at t qualifies if the rows with t - window < time <= t
    come from at least `min_inputs` inputs. An alert is a sequence of qualifying steps with no other step between them,
    each less than a window after the previous one. `alert_start` is the earliest time in the window of its first step,
    `alert_end` the time of its last step; `inputs` and `rows` are the distinct inputs and the number of the rows from
    `alert_start` to `alert_end`, both included.

    Rows may arrive in any order. Each epoch emits the changes of alerts as inserts, updates and deletes, one per key
    and `alert_start`. Alerts are final up to the watermark minus `retain_us`: an earlier row, and a row without a
    time, go to the port `late`. Rows that can share a window with no later row are removed from the state.

    The state refers to inputs by their position in the list, so new inputs must be added at its end.
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
        alert = [
            pa.field("alert_start", TIMESTAMP),
            pa.field("alert_end", TIMESTAMP),
            pa.field("inputs", pa.list_(pa.string())),
            pa.field("rows", pa.int64()),
        ]
        return pa.schema([*self._keys, *alert, *change_fields()])

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        time, there = micros(rows.column(self._time))
        late = ~there
        if context.late_before is not None:
            late |= time < context.late_before - self._retain
        kept = np.flatnonzero(~late)
        return Assigned(kept, rows.select(list(self.keys)).take(pa.array(kept)), np.flatnonzero(late))

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        count = len(batch.exists)
        old, progress = _read_state(batch.state)
        rows, touched = self._with_new(old, batch)
        final = NEVER if context.watermark is None else np.int64(context.watermark - self._retain)
        cut = np.maximum(progress.until, final)
        before, _ = _find_alerts(old, progress, cut, self._window, self._min_inputs)
        after, new_progress = _find_alerts(rows, progress, cut, self._window, self._min_inputs)

        needed = rows.time > (cut - self._window)[rows.key]
        kept = Observations(rows.key[needed], rows.time[needed], rows.source[needed])
        ends = np.full(count, NEVER)
        np.maximum.at(ends, kept.key, kept.time)
        gone = ends == NEVER
        changed = np.flatnonzero((touched | batch.due) & ~gone)
        return Result(
            changed,
            _write_state(kept, new_progress, changed),
            removed=np.flatnonzero(gone & batch.exists),
            timers=pa.array(ends[changed] + self._window + self._retain),
            output={MAIN: self._changes(batch, before, after, context)},
        )

    def _with_new(self, old: Observations, batch: Batch) -> tuple[Observations, Mask]:
        """Return the old observations with those of the epoch, and which keys have new ones."""
        key, time, source = [old.key], [old.time], [old.source]
        touched = np.zeros(len(batch.exists), np.bool_)
        for number, name in enumerate(self.inputs):
            if name not in batch.rows:
                continue
            key.append(np.asarray(batch.key_of[name], np.int64))
            time.append(micros(batch.rows[name].column(self._time))[0])
            source.append(np.full(len(key[-1]), number, np.int8))
            touched[key[-1]] = True
        return Observations.sort(np.concatenate(key), np.concatenate(time), np.concatenate(source)), touched

    def _changes(self, batch: Batch, before: Alerts, after: Alerts, context: EpochContext) -> pa.Table:
        codes, alerts = _compare(before, after)
        at = pa.array(alerts.key)
        columns = [plain(batch.keys.column(f.name)).take(at) for f in self._keys]
        columns += [pa.array(alerts.start).cast(TIMESTAMP), pa.array(alerts.end).cast(TIMESTAMP)]
        columns += [self._names(alerts.inputs), pa.array(alerts.rows), *change_columns(codes, context.epoch)]
        return pa.Table.from_arrays(columns, schema=self.output_schema())

    def _names(self, masks: Indices) -> pa.Array:
        """Return the names of the inputs whose bits are set, sorted."""
        by_name = sorted(enumerate(self.inputs), key=lambda item: item[1])
        bits = (masks[:, None] >> np.array([number for number, _ in by_name])[None, :]) & 1
        offsets = np.concatenate([[0], np.cumsum(bits.sum(axis=1))]).astype(np.int32)
        names = pa.array([name for _, name in by_name], pa.string())
        return pa.ListArray.from_arrays(pa.array(offsets), names.take(pa.array(np.nonzero(bits)[1])))


def _read_state(state: pa.Table) -> tuple[Observations, Progress]:
    times, sources = plain(state.column("times")), plain(state.column("inputs"))
    lengths = integers(pc.fill_null(pc.list_value_length(times), 0))
    rows = Observations(
        np.repeat(np.arange(len(times)), lengths),
        integers(pc.list_flatten(times)),
        np.asarray(pc.list_flatten(sources)).astype(np.int8),
    )
    final = plain(state.column("final_until"))
    until = np.where(valid(final), integers(final), NEVER)
    alert = (integers(plain(state.column(f"alert_{part}"))) for part in ("start", "end", "rows", "inputs"))
    return rows, Progress(until, *alert)


def _write_state(rows: Observations, progress: Progress, changed: Indices) -> pa.Table:
    """Return the state of the changed keys; the rows are sorted by key."""
    first, last = np.searchsorted(rows.key, changed), np.searchsorted(rows.key, changed, side="right")
    offsets = pa.array(np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32))
    wanted = np.zeros(len(progress.until), np.bool_)
    wanted[changed] = True
    of_changed = wanted[rows.key]
    until, there = progress.until[changed], progress.rows[changed] > 0
    alert = (progress.start, progress.end, progress.rows, progress.inputs)
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(rows.time[of_changed])),
        pa.ListArray.from_arrays(offsets, pa.array(rows.source[of_changed])),
        maybe(until, until != NEVER, pa.int64()),
        *(maybe(part[changed], there, pa.int64()) for part in alert),
    ]
    return pa.Table.from_arrays(columns, schema=_STATE)


def _compare(before: Alerts, after: Alerts) -> tuple[Codes, Alerts]:
    """Return the changed alerts with their operations, sorted by key and start."""
    both = Alerts.concat(before, after)
    is_new = np.arange(len(both.key)) >= len(before.key)
    order = np.lexsort((is_new, both.start, both.key))
    both, is_new = both.take(order), is_new[order]
    pair = np.zeros(len(order), np.bool_)  # this alert replaces the one before it
    pair[1:] = (np.diff(both.key) == 0) & (np.diff(both.start) == 0)
    replaced = np.append(pair[1:], False)
    same = np.zeros(len(order), np.bool_)
    same[1:] = (np.diff(both.end) == 0) & (np.diff(both.rows) == 0) & (np.diff(both.inputs) == 0)
    codes = np.where(is_new, np.where(pair, UPDATE, INSERT), DELETE).astype(np.int8)
    emitted = ~replaced & ~(pair & same)
    return codes[emitted], both.take(emitted)


# -- finding alerts -----------------------------------------------------------------------------------


def _find_alerts(
    rows: Observations, progress: Progress, cut: Indices, window: int, min_inputs: int
) -> tuple[Alerts, Progress]:
    """Return the alerts that are not final, sorted by key and start, and the progress if all before `cut` is final.

    `Correlate` says what an alert is. Compiled, in one pass over the sorted rows of all keys.
    """
    keys = len(progress.until)
    room = len(rows.key) + keys
    alerts = np.empty((5, room), np.int64)
    kept = np.zeros((4, keys), np.int64)
    bounds = np.searchsorted(rows.key, np.arange(keys + 1))
    counts = np.zeros(MAX_INPUTS, np.int64)
    open_alert = np.stack([progress.start, progress.end, progress.rows, progress.inputs])
    until = progress.until
    number = _scan(rows.time, rows.source, bounds, until, cut, open_alert, window, min_inputs, counts, alerts, kept)
    until = np.maximum(until, cut)
    # Only a recent alert can continue: the next step that is not final is at `until` or later.
    kept *= (kept[2] > 0) & (kept[1] > until - window)
    key, start, end, count, inputs = alerts[:, :number]
    return Alerts(key, start, end, count, inputs), Progress(until, kept[0], kept[1], kept[2], kept[3])


@entry
def _scan(
    time: Any,
    source: Any,
    bounds: Any,
    until: Any,
    cut: Any,
    open_alert: Any,
    window: int,
    min_inputs: int,
    counts: Any,
    alerts: Any,
    kept: Any,
) -> int:
    number = 0
    for key in range(len(until)):
        for index in range(len(counts)):
            counts[index] = 0
        distinct = 0
        low = at = bounds[key]
        stop = bounds[key + 1]
        start, end, rows, inputs = open_alert[0, key], open_alert[1, key], open_alert[2, key], open_alert[3, key]
        passed = False
        while at < stop:
            now = time[at]
            if not passed and now >= cut[key]:
                passed = True
                kept[0, key], kept[1, key], kept[2, key], kept[3, key] = start, end, rows, inputs
            first = at
            mask = 0
            while at < stop and time[at] == now:
                if counts[source[at]] == 0:
                    distinct += 1
                counts[source[at]] += 1
                mask |= 1 << source[at]
                at += 1
            while time[low] <= now - window:
                counts[source[low]] -= 1
                if counts[source[low]] == 0:
                    distinct -= 1
                low += 1
            if now < until[key]:
                continue
            continues = rows > 0 and now - end < window
            if rows > 0 and (distinct < min_inputs or not continues):
                alerts[0, number], alerts[1, number], alerts[2, number] = key, start, end
                alerts[3, number], alerts[4, number] = rows, inputs
                number += 1
                rows = 0
            if distinct < min_inputs:
                continue
            if rows > 0:
                end = now
                rows += at - first
                inputs |= mask
            else:
                start, end, rows, inputs = time[low], now, at - low, 0
                for index in range(len(counts)):
                    if counts[index] > 0:
                        inputs |= 1 << index
        if not passed:
            kept[0, key], kept[1, key], kept[2, key], kept[3, key] = start, end, rows, inputs
        if rows > 0:
            alerts[0, number], alerts[1, number], alerts[2, number] = key, start, end
            alerts[3, number], alerts[4, number] = rows, inputs
            number += 1
    return number
