"""The conformance suite finds operators that break the contract."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from firnline.operators.base import LATE, MAIN, OP, Assigned, Batch, EpochContext, Operator, Result
from firnline.testing.operators import Epoch, Harness, OperatorConformance

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("t", pa.timestamp("us", "UTC"))])


class Summing(Operator):
    """A right one, to be broken in one place at a time."""

    ports: ClassVar[tuple[str, ...]] = (MAIN, LATE)

    @property
    def keys(self) -> tuple[str, ...]:
        return ("k",)

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([("sum", pa.int64())])

    def output_schema(self, port: str = MAIN) -> pa.Schema:
        if port == LATE:
            return SCHEMA
        return pa.schema([("k", pa.string()), ("sum", pa.int64()), (OP, pa.string())])

    @property
    def output_key(self) -> tuple[str, ...]:
        return ("k",)

    @property
    def times(self) -> Mapping[str, str]:
        return {"in": "t"}

    def add(self, batch: Batch) -> Any:
        total = np.array(batch.state.column("sum").fill_null(0))
        np.add.at(total, batch.key_of["in"], np.asarray(batch.rows["in"].column("v")))
        return total

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        total = self.add(batch)
        at = np.arange(len(total))
        op = pa.array(np.where(batch.exists, "update", "insert").tolist(), pa.string())
        output = pa.table([batch.keys.column("k"), pa.array(total), op], schema=self.output_schema())
        state = pa.table({"sum": pa.array(total, pa.int64())})
        return self.spoil(Result(at, state, output={MAIN: output}), batch)

    def spoil(self, result: Result, batch: Batch) -> Result:
        return result


class Guessing(Summing):
    def add(self, batch: Batch) -> Any:
        return super().add(batch) + random.randrange(10**9)


class Remembering(Summing):
    calls: ClassVar[list[int]] = []

    def add(self, batch: Batch) -> Any:
        self.calls.append(1)
        return super().add(batch) + len(self.calls)


class CountingEpochs(Summing):
    def add(self, batch: Batch) -> Any:
        return super().add(batch) + 1


class Mixing(Summing):
    """Its answer for a key depends on the other keys of the call."""

    def add(self, batch: Batch) -> Any:
        total = super().add(batch)
        return total + len(total)


class Inventing(Summing):
    """Gives rows without input."""

    def spoil(self, result: Result, batch: Batch) -> Result:
        extra = pa.table([["z"], [1], ["insert"]], schema=self.output_schema())
        return Result(result.changed, result.state, output={MAIN: pa.concat_tables([result.output[MAIN], extra])})


class Lateness(Summing):
    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        number = np.arange(rows.num_rows)
        return Assigned(number[1:], rows.select(["k"]).slice(1), number[:1])


class Twice(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        return Result(result.changed, result.state, result.changed[:1], output=result.output)


class Doubled(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        return Result(np.zeros_like(result.changed), result.state, output=result.output)


class Removing(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        return Result(result.changed[:0], result.state.slice(0, 0), result.changed, output=result.output)


class WrongType(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        wrong = result.output[MAIN].set_column(1, "sum", result.output[MAIN].column("sum").cast(pa.int32()))
        return Result(result.changed, result.state, output={MAIN: wrong})


class WrongPort(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        return Result(result.changed, result.state, output={"side": result.output[MAIN]})


class WrongState(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        return Result(result.changed, result.state.rename_columns(["total"]), output=result.output)


class ShortState(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        return Result(result.changed, result.state.slice(1), output=result.output)


class WrongTimers(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        return Result(result.changed, result.state, timers=pa.array([], pa.int64()), output=result.output)


class WrongOp(Summing):
    def spoil(self, result: Result, batch: Batch) -> Result:
        output = result.output[MAIN]
        op = pa.array(["update"] * output.num_rows)
        return Result(result.changed, result.state, output={MAIN: output.set_column(2, OP, op)})


def epochs() -> list[Epoch]:
    rng = np.random.default_rng(1)
    made: list[Epoch] = []
    for number in range(3):
        keys = [f"k{n}" for n in rng.integers(0, 9, 40)]
        times = pa.array(np.full(40, number)).cast(SCHEMA.field("t").type)
        made.append({"in": pa.table([keys, rng.integers(0, 9, 40), times], schema=SCHEMA)})
    return made


def checks() -> list[Callable[[Operator], None]]:
    suite = OperatorConformance()
    sample = epochs()
    return [
        lambda operator: suite.test_the_same_input_gives_the_same_output(operator, sample),
        lambda operator: suite.test_nothing_of_the_sample_is_late_and_something_comes_out(operator, sample),
        lambda operator: suite.test_epochs_may_be_cut_in_any_way(operator, sample),
        lambda operator: suite.test_shards_do_not_matter(operator, sample),
        lambda operator: suite.test_an_epoch_without_rows_changes_nothing(operator, sample),
        suite.test_an_empty_batch_gives_nothing,
        lambda operator: suite.test_restoring_in_the_middle_changes_nothing(operator, sample),
    ]


def failures(operator: Operator) -> int:
    failed = 0
    for check in checks():
        try:
            check(operator)
        except AssertionError:
            failed += 1
    return failed


class TestSumming(OperatorConformance):
    @pytest.fixture
    def operator(self) -> Operator:
        return Summing("sums", {"in": SCHEMA}, {})

    @pytest.fixture
    def epochs(self) -> list[Epoch]:
        return epochs()


@pytest.mark.parametrize(
    "broken",
    [
        Guessing, Remembering, CountingEpochs, Mixing, Inventing, Lateness, Twice, Doubled, Removing, WrongType,
        WrongPort, WrongState, ShortState, WrongTimers, WrongOp,
    ],
)  # fmt: skip
def test_a_broken_operator_is_found(broken: type[Operator]) -> None:
    assert failures(broken("sums", {"in": SCHEMA}, {})) > 0


def test_a_timer_brings_its_key_back_once() -> None:
    calls: list[tuple[list[str], list[bool], int | None]] = []

    class Alarm(Summing):
        def fold(self, batch: Batch, context: EpochContext) -> Result:
            calls.append((batch.keys.column("k").to_pylist(), batch.due.tolist(), context.late_before))
            rows = np.unique(batch.key_of["in"])
            state = pa.table({"sum": pa.array(np.zeros(len(rows)), pa.int64())})
            return Result(rows, state, timers=pa.array(np.full(len(rows), 5)))

    def rows(key: str, time: int) -> Epoch:
        return {"in": pa.table([[key], [1], pa.array([time]).cast(SCHEMA.field("t").type)], schema=SCHEMA)}

    harness = Harness(Alarm("alarm", {"in": SCHEMA}, {}))
    for key, time in (("a", 1), ("b", 5), ("c", 4), ("a", 5)):
        harness.run(rows(key, time))
    harness.run({})
    assert calls == [
        (["a"], [False], None),
        (["b", "a"], [False, True], 1),
        (["c", "b"], [False, True], 5),
        (["a", "c"], [False, True], 5),
        (["a"], [True], 5),
    ]
    assert not harness.timers
