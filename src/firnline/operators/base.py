"""The contract of a stateful operator: one vectorised call per shard and epoch, Arrow in, Arrow out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from firnline.types import Json

MAIN = ""  # the port that an operator's own name stands for
LATE = "late"  # `<operator>.late`: rows that came after their window was closed

OP = "_op"  # insert, update, delete
SEQUENCE = "_sequence"  # the epoch of the change: a key changes at most once in an epoch
BEFORE = "_before"  # optional: the row as it was

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EpochContext:
    """What an operator may know of the epoch; the same on every replay.

    Event times are microseconds since 1970. `late_before` is the watermark when the epoch began: a row with an
    earlier time is late. `watermark` is the one after its rows: timers at or before it are due. Both are None
    until a row with a time was seen.
    """

    pipeline: str
    operator: str
    epoch: int
    epoch_time: datetime
    late_before: int | None = None
    watermark: int | None = None


@dataclass(frozen=True, slots=True)
class Assigned:
    """Which keys the rows of one input belong to: `rows[i]` (a row's number) belongs to the key in row i of `keys`.

    A row may appear many times (sliding windows) or not at all. `late` are the numbers of rows that come too late:
    they leave by the port `late` (`columns.late_rows`), or are dropped where the operator has none.
    """

    rows: Indices
    keys: pa.Table
    late: Indices = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call gets.

    `keys` holds every key that occurs in the rows or has a timer due, each once. `state` has the same number of
    rows, in the same order; where `exists` is False the key is new, and its state row is all null. `due` marks the
    keys whose timer is due. `rows[input]` are the rows that belong to keys, in a fixed order (a row stands here
    once for every key it belongs to), and `key_of[input]` says, for each of them, which row of `keys` it belongs to.
    """

    keys: pa.Table
    state: pa.Table
    exists: Mask
    due: Mask
    rows: Mapping[str, pa.Table]
    key_of: Mapping[str, Indices]


@dataclass(frozen=True, slots=True)
class Result:
    """What one call gives back.

    `changed` are the numbers of keys whose state is now the row of `state` at the same place; `removed` those whose
    state is gone. No key is in both; a key in neither keeps its state, but a timer that is due comes but once.
    `timers`, as long as `changed`, holds the event time at which each key is due (microseconds), null for never; None
    when no key has a timer.
    `output` has rows by port.
    """

    changed: Indices
    state: pa.Table
    removed: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    timers: pa.Array | None = None
    output: Mapping[str, pa.Table] = field(default_factory=dict)


class Operator(ABC):
    """A stateful operator. Made anew in every task: it holds settings only, never state.

    Args of the constructor: its `name`, the columns of every input by name, and the settings that the spec gives.
    Bad settings and columns that do not fit raise `firnline.errors.ConfigError`.

    The same rows, state and context must always give the same result: no clock, no random numbers. The order of
    rows within an epoch is fixed only where no SQL operator stands upstream.
    """

    ports: ClassVar[tuple[str, ...]] = (MAIN,)  # the outputs it may have

    def __init__(self, name: str, inputs: Mapping[str, pa.Schema], settings: Mapping[str, Json]) -> None:
        self.name = name
        self.inputs = dict(inputs)
        self.settings = dict(settings)

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The columns, the same in every input, that decide which shard a row goes to. Empty: one shard has all."""

    @property
    def state_key(self) -> pa.Schema:
        """The columns of a state's key: `keys`, and what `assign` adds (such as the start of a window)."""
        first = next(iter(self.inputs.values()))
        return pa.schema([first.field(key) for key in self.keys])

    @property
    @abstractmethod
    def state_schema(self) -> pa.Schema:
        """The columns of the state, all nullable, beside its key. A later version may add columns and widen types."""

    @abstractmethod
    def output_schema(self, port: str = MAIN) -> pa.Schema:
        """The columns of what comes out of a port."""

    @property
    def output_key(self) -> tuple[str, ...]:
        """The columns that identify a row of the main port, for `upsert`; empty when there is none."""
        return ()

    @property
    def times(self) -> Mapping[str, str]:
        """The column of event time per input, for those that have one; they make the watermark."""
        return {}

    @property
    def delay_us(self) -> int:
        """How far the watermark stays behind the latest event time, in microseconds."""
        return 0

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        """Say which keys the rows of one input belong to; by default each to the key in its own columns."""
        return Assigned(np.arange(rows.num_rows), rows.select(list(self.keys)))

    @abstractmethod
    def fold(self, batch: Batch, context: EpochContext) -> Result:
        """Fold the rows into the state of their keys. Called when rows came, or timers are due."""
