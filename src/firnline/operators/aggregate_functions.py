"""The functions of the operator `aggregate`: the state of each per key, how rows change it, and its result.

Every function folds whole columns at once. No result depends on the order of the rows in an epoch: floats are added in
the order of their values, and the value breaks ties of first and last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import ConfigError, SchemaError
from firnline.operators.base import Indices, Mask
from firnline.operators.columns import get_field, integers, is_orderable, join_column, maybe, ranks, suggest, valid
from firnline.types import Json

_LOW = np.int64(0xFFFFFFFF)
_HALF = np.int64(2**31)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of an epoch from all inputs; row i belongs to key number `key_of[i]` of `keys` keys."""

    keys: int
    key_of: Indices
    inputs: Sequence[str]
    tables: Mapping[str, pa.Table]
    _joined: dict[str, pa.Array] = field(default_factory=dict)

    def column(self, field: pa.Field) -> pa.Array:
        """Return a column of the rows; all functions share it."""
        if field.name not in self._joined:
            self._joined[field.name] = join_column(self.inputs, self.tables, field)
        return self._joined[field.name]


class Function(ABC):
    """One aggregate column."""

    word: ClassVar[str]

    def __init__(self, operator: str, name: str, column: pa.Field | None) -> None:
        self.operator = operator
        self.name = name
        self._column = column

    @property
    def column(self) -> pa.Field:
        """The input column."""
        assert self._column is not None
        return self._column

    @property
    @abstractmethod
    def state(self) -> list[pa.Field]:
        """The columns of its state."""

    @property
    def result_field(self) -> pa.Field:
        """The output column; by default the first column of its state."""
        return self.state[0]

    @abstractmethod
    def fold(self, rows: Rows, old: list[pa.Array]) -> list[pa.Array]:
        """Return the state of every key after the rows; `old` is null for a new key."""

    def result(self, state: list[pa.Array]) -> pa.Array:
        """Return its result for every key."""
        return state[0]

    def refuse(self, why: str) -> ConfigError:
        column = self.column
        return ConfigError(
            f"operator {self.operator!r}: {self.word} of column {column.name!r} ({column.type}) {why}",
            hint="Take another column, or change its type in the schema of its source or by an operator of type sql.",
        )

    def overflow(self) -> SchemaError:
        return SchemaError(
            f"operator {self.operator!r}: the sum of column {self.column.name!r} in {self.name!r} is too large",
            hint="Make the column decimal(38,s) or float64 in the schema of its source, and start with new state.",
            operator=self.operator,
            column=self.column.name,
        )


class Count(Function):
    """The number of rows, or of values of a column that are not null."""

    word = "count"

    @property
    def state(self) -> list[pa.Field]:
        return [pa.field(self.name, pa.int64())]

    def fold(self, rows: Rows, old: list[pa.Array]) -> list[pa.Array]:
        key_of = rows.key_of
        if self._column is not None:
            key_of = key_of[valid(rows.column(self._column))]
        return [pa.array(integers(old[0]) + np.bincount(key_of, minlength=rows.keys))]


class Sum(Function):
    """The sum: exact for integers and decimals, null if there is no value."""

    word = "sum"

    def __init__(self, operator: str, name: str, column: pa.Field | None) -> None:
        super().__init__(operator, name, column)
        kind = self.column.type
        if pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
            self.kind = pa.int64()
        elif pa.types.is_floating(kind):
            self.kind = pa.float64()
        elif pa.types.is_decimal128(kind):
            self.kind = pa.decimal128(38, kind.scale)
        else:
            raise self.refuse("is not possible: it is no number")

    @property
    def state(self) -> list[pa.Field]:
        return [pa.field(self.name, self.kind)]

    def fold(self, rows: Rows, old: list[pa.Array]) -> list[pa.Array]:
        values = rows.column(self.column)
        if pa.types.is_integer(self.kind):
            return [self._integers(rows, values, old[0])]
        if pa.types.is_floating(self.kind):
            return [self._floats(rows, values, old[0])]
        return [self._decimals(rows, values, old[0])]

    def _integers(self, rows: Rows, values: pa.Array, old: pa.Array) -> pa.Array:
        """Add the upper and lower 32 bits separately, so that only the final sum can overflow."""
        there = valid(values)
        key_of, numbers = rows.key_of[there], integers(values)[there]
        before = integers(old)
        high, low = before >> 32, before & _LOW
        np.add.at(high, key_of, numbers >> 32)
        np.add.at(low, key_of, numbers & _LOW)
        high += low >> 32
        if ((high < -_HALF) | (high >= _HALF)).any():
            raise self.overflow()
        return maybe((high << 32) | (low & _LOW), valid(old) | _seen(rows.keys, key_of), self.kind)

    def _floats(self, rows: Rows, values: pa.Array, old: pa.Array) -> pa.Array:
        there = valid(values)
        key_of = rows.key_of[there]
        numbers = np.asarray(pc.fill_null(values.cast(pa.float64()), 0.0))[there]
        order = np.lexsort((numbers, key_of))
        key_of, numbers = key_of[order], numbers[order]
        starts = np.flatnonzero(np.diff(key_of, prepend=-1))
        total = np.array(pc.fill_null(old, 0.0))
        if len(starts):
            with np.errstate(invalid="ignore", over="ignore"):
                total[key_of[starts]] += np.add.reduceat(numbers, starts)
        return maybe(total, valid(old) | _seen(rows.keys, key_of), self.kind)

    def _decimals(self, rows: Rows, values: pa.Array, old: pa.Array) -> pa.Array:
        wide = pa.decimal256(60, self.kind.scale)
        table = pa.table(
            {
                "key": np.concatenate([np.arange(rows.keys), rows.key_of]),
                "value": pa.concat_arrays([old.cast(wide), values.cast(wide)]),
            }
        )
        sums = table.group_by("key", use_threads=False).aggregate([("value", "sum")])  # `old` has a row for every key
        try:
            return sums.sort_by("key").column("value_sum").combine_chunks().cast(self.kind)
        except pa.ArrowInvalid as error:
            raise self.overflow() from error


class Average(Function):
    """The mean of the values that are not null: a decimal for decimals, else a float64."""

    word = "avg"

    def __init__(self, operator: str, name: str, column: pa.Field | None) -> None:
        super().__init__(operator, name, column)
        self._sum = Sum(operator, f"{name}_sum", column)
        if pa.types.is_integer(self._sum.kind):
            self._sum.kind = pa.decimal128(38, 0)  # the sum may exceed int64 where the mean does not
        self._count = Count(operator, f"{name}_count", column)

    @property
    def state(self) -> list[pa.Field]:
        return [*self._sum.state, *self._count.state]

    @property
    def result_field(self) -> pa.Field:
        kind = self.column.type
        if not pa.types.is_decimal128(kind):
            return pa.field(self.name, pa.float64())
        # Four more decimal places than the column has, if the digits before the point leave room for them.
        scale = max(kind.scale, min(kind.scale + 4, 38 - (kind.precision - kind.scale)))
        return pa.field(self.name, pa.decimal128(min(kind.precision + 4, 38), scale))

    def fold(self, rows: Rows, old: list[pa.Array]) -> list[pa.Array]:
        return [*self._sum.fold(rows, old[:1]), *self._count.fold(rows, old[1:])]

    def result(self, state: list[pa.Array]) -> pa.Array:
        total, count = state
        kind = self.result_field.type
        if pa.types.is_floating(kind):
            return pc.divide(total.cast(pa.float64(), safe=False), _no_zero(count).cast(pa.float64(), safe=False))
        # The quotient has 20 more digits than the sum, so rounding half up afterwards is exact.
        quotient = pc.divide(total.cast(pa.decimal256(46, kind.scale)), _no_zero(count).cast(pa.decimal256(19, 0)))
        return pc.round(quotient, kind.scale, round_mode="half_towards_infinity").cast(kind)


class Pick(Function):
    """One of the values: the smallest or largest, or the value of the row that is first or last by another column."""

    smallest: ClassVar[bool]

    def __init__(self, operator: str, name: str, column: pa.Field | None, order: pa.Field | None = None) -> None:
        super().__init__(operator, name, column)
        self._order = order
        if not is_orderable(self.column.type):
            raise self.refuse("is not possible: its values have no order")

    @property
    def state(self) -> list[pa.Field]:
        value = self.column.with_name(self.name).with_nullable(True)
        return [value] if self._order is None else [value, pa.field(f"{self.name}_order", self._order.type)]

    def fold(self, rows: Rows, old: list[pa.Array]) -> list[pa.Array]:
        fields = [self.column] if self._order is None else [self.column, self._order]
        columns = [pa.concat_arrays([o, rows.column(f)]) for o, f in zip(old, fields, strict=True)]
        key_of = np.concatenate([np.arange(rows.keys), rows.key_of])
        chosen = valid(columns[0]) & valid(columns[-1])
        for column in reversed(columns):
            chosen = self._best(key_of, ranks(column), chosen, rows.keys)
        at = np.zeros(rows.keys, np.int64)
        at[key_of[chosen]] = np.flatnonzero(chosen)  # several rows may be left, all with the same values
        indices = pa.array(at, mask=~_seen(rows.keys, key_of[chosen]))
        return [column.take(indices) for column in columns]

    def _best(self, key_of: Indices, rank: Indices, chosen: Mask, keys: int) -> Mask:
        """Return the chosen rows that have the best rank of their key."""
        order = rank if self.smallest else ~rank
        best = np.full(keys, np.iinfo(np.int64).max)
        np.minimum.at(best, key_of[chosen], order[chosen])
        kept: Mask = chosen & (order == best[key_of])
        return kept


class Min(Pick):
    """The smallest value."""

    word = "min"
    smallest = True


class Max(Pick):
    """The largest value."""

    word = "max"
    smallest = False


class First(Pick):
    """The value of the row that is first by another column; of several such rows, the smallest value."""

    word = "first"
    smallest = True


class Last(Pick):
    """The value of the row that is last by another column; of several such rows, the largest value."""

    word = "last"
    smallest = False


FUNCTIONS: dict[str, type[Function]] = {f.word: f for f in (Count, Sum, Average, Min, Max, First, Last)}


def build_function(
    operator: str, inputs: Mapping[str, pa.Schema], settings: Mapping[str, Json], time: str | None
) -> Function:
    """Return the function for the settings `name`, `function`, `column` and `order_by`.

    Raises:
        ConfigError: the function is unknown, or a column is missing or of the wrong type.
    """
    name, word = str(settings["name"]), str(settings["function"])
    kind = FUNCTIONS.get(word)
    if kind is None:
        raise ConfigError(
            f"operator {operator!r}: aggregate {name!r} has the unknown function {word!r}",
            hint=suggest(word, FUNCTIONS),
        )
    column = settings.get("column")
    taken = None if column is None else get_field(operator, inputs, str(column), everywhere=False)
    if taken is None and kind is not Count:
        raise ConfigError(
            f"operator {operator!r}: aggregate {name!r} ({word}) needs a column", hint="Name it under `column`."
        )
    if not issubclass(kind, First | Last):
        return kind(operator, name, taken)
    order_by = settings.get("order_by") or time
    if order_by is None:
        raise ConfigError(
            f"operator {operator!r}: aggregate {name!r} ({word}) needs an order",
            hint="Name a column under `order_by`, or the column of event time under `time`.",
        )
    order = get_field(operator, inputs, str(order_by), everywhere=False)
    if not is_orderable(order.type):
        raise ConfigError(
            f"operator {operator!r}: column {order.name!r} ({order.type}) gives aggregate {name!r} no order",
            hint="Order by a number, a text or a timestamp.",
        )
    return kind(operator, name, taken, order)


def _seen(keys: int, key_of: Indices) -> Mask:
    seen = np.zeros(keys, np.bool_)
    seen[key_of] = True
    return seen


def _no_zero(count: pa.Array) -> pa.Array:
    return pc.if_else(pc.equal(count, 0), pa.scalar(None, pa.int64()), count)
