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

MAIN = ""  # the main port, named by the operator's own name
LATE = "late"  # `<operator>.late`: rows that arrived after their window had closed

OP = "_op"  # insert, update, delete
SEQUENCE = "_sequence"  # the epoch of the change: a key changes at most once in an epoch
BEFORE = "_before"  # optional: the row before the change

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EpochContext:
    """What an operator may use about the epoch; identical on every replay.

    Event times are microseconds since 1970. `late_before` is the watermark at the start of the epoch: a row with an
    earlier time is late. `watermark` is the watermark after the rows of the epoch: timers at or before it are due.
    Both are None until a row has a time.
    """

    pipeline: str
    operator: str
    epoch: int
    epoch_time: datetime
    late_before: int | None = None
    watermark: int | None = None


@dataclass(frozen=True, slots=True)
class Assigned:
    """The keys of the rows of one input: row number `rows[i]` belongs to the key in row i of `keys`.

    A row may appear many times (sliding windows) or not at all. `late` holds the numbers of late rows: they leave by
    the port `late` (`columns.late_rows`), or are dropped if the operator has no such port.
    """

    rows: Indices
    keys: pa.Table
    late: Indices = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call of `fold`.

    `keys` holds every key that occurs in the rows or has a timer due, each once. `state` has one row per key, in the
    same order; where `exists` is False the key is new, and its state row is all null. `due` marks the keys whose
    timer is due. `rows[input]` are the rows of an input in a fixed order, repeated for every key that they belong
    to; `key_of[input]` holds, for each of them, the row number of its key in `keys`.
    """

    keys: pa.Table
    state: pa.Table
    exists: Mask
    due: Mask
    rows: Mapping[str, pa.Table]
    key_of: Mapping[str, Indices]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one call of `fold`.

    `changed` holds the row numbers of keys with a new state: the state of key `changed[i]` is row i of `state`.
    `removed` holds the row numbers of keys whose state is deleted. No key is in both; a key in neither keeps its
    state, but a timer that was due does not fire again. `timers`, as long as `changed`, holds the event time of each
    key's timer in microseconds, null for none; it is None if no key has a timer. `output` holds the rows of each
    port.
    """

    changed: Indices
    state: pa.Table
    removed: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    timers: pa.Array | None = None
    output: Mapping[str, pa.Table] = field(default_factory=dict)


class Operator(ABC):
    """A stateful operator. Every task creates its own instance, which holds settings and never state.

    The same rows, state and context must always give the same result: no clock, no random numbers. The order of
    rows within an epoch is fixed only if there is no SQL operator upstream.
    """

    ports: ClassVar[tuple[str, ...]] = (MAIN,)  # the outputs

    def __init__(self, name: str, inputs: Mapping[str, pa.Schema], settings: Mapping[str, Json]) -> None:
        """Check settings and columns.

        Args:
            name: The operator's name in the spec.
            inputs: The columns of every input, by its name.
            settings: The settings in the spec.

        Raises:
            ConfigError: a setting is wrong, or the columns do not match the settings.
        """
        self.name = name
        self.inputs = dict(inputs)
        self.settings = dict(settings)

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """The columns, the same in every input, that decide a row's shard; empty: one shard has all rows."""

    @property
    def state_key(self) -> pa.Schema:
        """The columns of the state's key: `keys`, and the columns that `assign` adds, such as a window's start."""
        first = next(iter(self.inputs.values()))
        return pa.schema([first.field(key) for key in self.keys])

    @property
    @abstractmethod
    def state_schema(self) -> pa.Schema:
        """The columns of the state beside its key, all nullable. A later version may add columns and widen types."""

    @abstractmethod
    def output_schema(self, port: str = MAIN) -> pa.Schema:
        """Return the columns of a port."""

    @property
    def output_key(self) -> tuple[str, ...]:
        """The columns that identify a row of the main port, for `upsert`; empty if there are none."""
        return ()

    @property
    def times(self) -> Mapping[str, str]:
        """The event-time column of each input that has one; the watermark follows from them."""
        return {}

    @property
    def delay_us(self) -> int:
        """How far the watermark is behind the latest event time, in microseconds."""
        return 0

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        """Assign the rows of one input to keys; by default each row to the key in its own columns."""
        return Assigned(np.arange(rows.num_rows), rows.select(list(self.keys)))

    @abstractmethod
    def fold(self, batch: Batch, context: EpochContext) -> Result:
        """Fold rows into the state of their keys; called once per shard and epoch if there are rows or due timers."""
