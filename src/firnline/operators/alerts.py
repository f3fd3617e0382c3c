"""Finds alerts in sorted observations: one pass over the rows of many keys, compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from firnline.ndjson.jit import entry
from firnline.operators.base import Indices, Mask

EVER = np.int64(-(2**62))  # a time before all others: nothing is final yet
MAX_INPUTS = 32

Inputs = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Observations:
    """Rows by key, time and input: `key` is the number of a key."""

    key: Indices
    time: Indices
    source: Inputs

    @classmethod
    def of(cls, key: Indices, time: Indices, source: Inputs) -> Observations:
        """Return the rows in their order."""
        order = np.lexsort((source, time, key))
        return cls(key[order], time[order], source[order])


@dataclass(frozen=True, slots=True)
class Alerts:
    """Alerts: of which key, from when to when, how many rows, from which inputs (a bit each)."""

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
class Carried:
    """Per key what is final: steps before `until` are judged, and the alert that the last of them belongs to.

    `rows` is 0 where there is none.
    """

    until: Indices
    start: Indices
    end: Indices
    rows: Indices
    inputs: Indices


def find_alerts(
    rows: Observations, carried: Carried, cut: Indices, window: int, min_inputs: int
) -> tuple[Alerts, Carried]:
    """Return the alerts that are not final, by key and start, and what to carry when all before `cut` is final.

    The rows of one key at one time are a step. A step at t qualifies when its rows and those of the time before it,
    later than t - window, come from `min_inputs` inputs at least. An alert is a run of qualifying steps without
    another step between them, each less than a window after the one before. It starts with the earliest row in the
    window of its first step, ends with its last step, and has all rows between.
    """
    keys = len(carried.until)
    room = len(rows.key) + keys
    found = np.empty((5, room), np.int64)
    kept = np.zeros((4, keys), np.int64)
    bounds = np.searchsorted(rows.key, np.arange(keys + 1))
    counts = np.zeros(MAX_INPUTS, np.int64)
    held = np.stack([carried.start, carried.end, carried.rows, carried.inputs])
    number = _scan(rows.time, rows.source, bounds, carried.until, cut, held, window, min_inputs, counts, found, kept)
    until = np.maximum(carried.until, cut)
    # An older alert cannot go on: the next step that is not final comes a window after it, or later.
    kept *= (kept[2] > 0) & (kept[1] > until - window)
    key, start, end, count, inputs = found[:, :number]
    return Alerts(key, start, end, count, inputs), Carried(until, kept[0], kept[1], kept[2], kept[3])


@entry
def _scan(
    time: Any,
    source: Any,
    bounds: Any,
    until: Any,
    cut: Any,
    held: Any,
    window: int,
    min_inputs: int,
    counts: Any,
    found: Any,
    kept: Any,
) -> int:
    number = 0
    for key in range(len(until)):
        for each in range(len(counts)):
            counts[each] = 0
        distinct = 0
        low = at = bounds[key]
        stop = bounds[key + 1]
        start, end, rows, inputs = held[0, key], held[1, key], held[2, key], held[3, key]
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
            goes_on = rows > 0 and now - end < window
            if rows > 0 and (distinct < min_inputs or not goes_on):
                found[0, number], found[1, number], found[2, number] = key, start, end
                found[3, number], found[4, number] = rows, inputs
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
                for each in range(len(counts)):
                    if counts[each] > 0:
                        inputs |= 1 << each
        if not passed:
            kept[0, key], kept[1, key], kept[2, key], kept[3, key] = start, end, rows, inputs
        if rows > 0:
            found[0, number], found[1, number], found[2, number] = key, start, end
            found[3, number], found[4, number] = rows, inputs
            number += 1
    return number
