"""Drives operators without Spark, as the engine does, and the conformance suite that every operator passes.

A test class inherits `OperatorConformance` and gives two fixtures: `operator`, and `epochs`, the rows of each input
epoch by epoch, none of which comes late. Needs pytest.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from firnline.operators.base import BEFORE, LATE, MAIN, OP, SEQUENCE, Assigned, Batch, EpochContext, Operator, Result
from firnline.operators.columns import late_rows, micros

__all__ = ["Epoch", "Harness", "OperatorConformance", "Snapshot", "assert_like", "check_result", "final_rows", "upsert"]

Key = tuple[Any, ...]
Row = dict[str, Any]
Epoch = Mapping[str, pa.Table]

_BEGIN = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a harness knows between two epochs; the state as the bytes of an Arrow file."""

    epoch: int
    watermark: int | None
    newest: Mapping[str, int]
    state: bytes
    timers: tuple[int | None, ...]


@dataclass
class Harness:
    """Runs epochs through one operator and keeps its state.

    Args:
        operator: The operator; it is made anew for every call, so anything that it remembers itself is lost.
        shards: Over how many tasks its keys are spread.
    """

    operator: Operator
    shards: int = 1
    epoch: int = 0
    watermark: int | None = None
    state: dict[Key, Row] = field(default_factory=dict)
    timers: dict[Key, int] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)

    def run(self, rows: Epoch) -> dict[str, pa.Table]:
        """Fold the rows of one epoch, by input, and return what comes out, by port."""
        operator = self.operator
        given = {name: rows.get(name, schema.empty_table()) for name, schema in operator.inputs.items()}
        self.epoch += 1
        context = EpochContext(
            pipeline="test",
            operator=operator.name,
            epoch=self.epoch,
            epoch_time=_BEGIN + timedelta(seconds=self.epoch),
            late_before=self.watermark,
            watermark=self._advance(given),
        )
        self.watermark = context.watermark
        outputs: dict[str, list[pa.Table]] = {
            port: [operator.output_schema(port).empty_table()] for port in operator.ports
        }
        for shard in range(self.shards):
            part = {name: _of_shard(operator, table, shard, self.shards) for name, table in given.items()}
            for port, table in self._fold(part, shard, context):
                outputs[port].append(table)
        return {port: pa.concat_tables(tables) for port, tables in outputs.items()}

    def run_all(self, epochs: Iterable[Epoch]) -> list[dict[str, pa.Table]]:
        """Run epochs one after the other."""
        return [self.run(epoch) for epoch in epochs]

    def snapshot(self) -> Snapshot:
        """Return all that a later harness needs to go on."""
        sink = pa.BufferOutputStream()
        batch = self._batch(list(self.state), set(), {}, {})
        columns = {
            f"{part}.{n}": t.column(n)
            for part, t in (("key", batch.keys), ("state", batch.state))
            for n in t.schema.names
        }
        table = pa.table(columns)
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        timers = tuple(self.timers.get(key) for key in self.state)
        return Snapshot(self.epoch, self.watermark, dict(self._newest), sink.getvalue().to_pybytes(), timers)

    @classmethod
    def restored(cls, operator: Operator, snapshot: Snapshot, shards: int = 1) -> Harness:
        """Return a harness that goes on where the snapshot was made, perhaps with other shards."""
        harness = cls(operator, shards, snapshot.epoch, snapshot.watermark, _newest=dict(snapshot.newest))
        table = pa.ipc.open_file(snapshot.state).read_all()
        keys = table.select([f"key.{name}" for name in operator.state_key.names])
        state = table.select([f"state.{name}" for name in operator.state_schema.names])
        rows = state.rename_columns(operator.state_schema.names).to_pylist()
        for key, row, timer in zip(_keys_of(keys), rows, snapshot.timers, strict=True):
            harness.state[key] = row
            if timer is not None:
                harness.timers[key] = timer
        return harness

    # -- one shard ------------------------------------------------------------------------------------

    def _fold(self, rows: Epoch, shard: int, context: EpochContext) -> Iterable[tuple[str, pa.Table]]:
        operator = type(self.operator)(self.operator.name, self.operator.inputs, self.operator.settings)
        numbers: dict[Key, int] = {}
        taken: dict[str, pa.Table] = {}
        key_of: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        for name, table in rows.items():
            assigned = operator.assign(table, name, context)
            _check_assigned(operator, table, assigned)
            taken[name] = table.take(pa.array(assigned.rows, pa.int64()))
            numbered = [numbers.setdefault(key, len(numbers)) for key in _keys_of(assigned.keys)]
            key_of[name] = np.array(numbered, np.int64)
            if len(assigned.late) and LATE in operator.ports:
                yield LATE, late_rows(operator, name, table, assigned.late, context)
        due = {
            key
            for key, time in self.timers.items()
            if context.watermark is not None and time <= context.watermark and self._shard_of(key) == shard
        }
        for key in sorted(due, key=repr):
            numbers.setdefault(key, len(numbers))
            del self.timers[key]
        if not numbers:
            return
        batch = self._batch(list(numbers), due, taken, key_of)
        result = operator.fold(batch, context)
        check_result(operator, batch, result)
        self._keep(list(numbers), result)
        yield from result.output.items()

    def _batch(
        self,
        keys: Sequence[Key],
        due: set[Key],
        rows: Epoch,
        key_of: Mapping[str, np.ndarray[Any, np.dtype[np.int64]]],
    ) -> Batch:
        schema = self.operator.state_key
        columns = [pa.array([key[place] for key in keys], f.type) for place, f in enumerate(schema)]
        table = pa.table(columns, schema=schema) if columns else pa.table({"": pa.nulls(len(keys))}).select([])
        nothing = dict.fromkeys(self.operator.state_schema.names)
        state = [self.state.get(key, nothing) for key in keys]
        return Batch(
            table,
            pa.Table.from_pylist(state, self.operator.state_schema),
            np.array([key in self.state for key in keys], np.bool_),
            np.array([key in due for key in keys], np.bool_),
            rows,
            key_of,
        )

    def _keep(self, keys: Sequence[Key], result: Result) -> None:
        timers = [None] * len(result.changed) if result.timers is None else result.timers.to_pylist()
        for number, row, timer in zip(result.changed, result.state.to_pylist(), timers, strict=True):
            self.state[keys[number]] = row
            self.timers.pop(keys[number], None)
            if timer is not None:
                self.timers[keys[number]] = timer
        for number in result.removed:
            del self.state[keys[number]]
            self.timers.pop(keys[number], None)

    def _advance(self, rows: Epoch) -> int | None:
        for name, column in self.operator.times.items():
            times, there = micros(rows[name].column(column))
            if there.any():
                self._newest[name] = max(int(times[there].max()), self._newest.get(name, -(2**63)))
        if not self._newest:
            return self.watermark
        reached = min(self._newest.values()) - self.operator.delay_us
        return reached if self.watermark is None else max(self.watermark, reached)

    def _shard_of(self, key: Key) -> int:
        return _shard(key[: len(self.operator.keys)], self.shards)


def _shard(key: Key, shards: int) -> int:
    return zlib.crc32(repr(key).encode()) % shards


def _of_shard(operator: Operator, rows: pa.Table, shard: int, shards: int) -> pa.Table:
    if shards == 1:
        return rows
    keys = _keys_of(rows.select(list(operator.keys)))
    return rows.filter(pa.array([_shard(key, shards) == shard for key in keys], pa.bool_()))


def _keys_of(table: pa.Table) -> list[Key]:
    if not table.num_columns:
        return [()] * table.num_rows
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


# -- what every answer of an operator must be ---------------------------------------------------------


def _check_assigned(operator: Operator, rows: pa.Table, assigned: Assigned) -> None:
    assert assigned.keys.num_rows == len(assigned.rows), "assign: one key for each of its rows"
    assert assigned.keys.schema.names == operator.state_key.names, "assign: keys have the columns of state_key"
    assert assigned.keys.schema.types == operator.state_key.types, "assign: keys have the types of state_key"
    for name, numbers in (("rows", assigned.rows), ("late", assigned.late)):
        assert ((numbers >= 0) & (numbers < rows.num_rows)).all(), f"assign: {name} are numbers of rows"
    assert not np.intersect1d(assigned.rows, assigned.late).size, "assign: a row is late or has keys, not both"


def check_result(operator: Operator, batch: Batch, result: Result) -> None:
    """Fail when the result of a fold breaks the contract."""
    count = len(batch.exists)
    for name, numbers in (("changed", result.changed), ("removed", result.removed)):
        assert len(np.unique(numbers)) == len(numbers), f"fold: a key stands twice in {name}"
        assert ((numbers >= 0) & (numbers < count)).all(), f"fold: {name} are numbers of keys"
    assert not np.intersect1d(result.changed, result.removed).size, "fold: a key is changed and removed"
    assert batch.exists[result.removed].all(), "fold: a key is removed that has no state"
    assert result.state.num_rows == len(result.changed), "fold: one row of state for every changed key"
    assert result.state.schema.equals(operator.state_schema), "fold: state has the columns of state_schema"
    if result.timers is not None:
        assert len(result.timers) == len(result.changed), "fold: one timer for every changed key"
        assert result.timers.type == pa.int64(), "fold: timers are microseconds as int64"
    for port, table in result.output.items():
        assert port in operator.ports, f"fold: there is no port {port!r}"
        assert table.schema.equals(operator.output_schema(port)), f"fold: port {port!r} has other columns than it says"
        table.validate(full=True)


# -- what comes out, as a table -----------------------------------------------------------------------


def upsert(rows: dict[Key, Row], changes: pa.Table, key: Sequence[str]) -> None:
    """Change rows as an `upsert` sink does; fail on changes that cannot be, such as an insert of what is there."""
    seen: set[Key] = set()
    for change in changes.to_pylist():
        at = tuple(change[name] for name in key)
        assert at not in seen, f"{at} changes twice in one epoch"
        seen.add(at)
        op = change[OP]
        assert (op == "insert") == (at not in rows), f"{op} of {at}, which is {'' if at in rows else 'not '}there"
        if op == "delete":
            del rows[at]
        else:
            rows[at] = {name: value for name, value in change.items() if name not in (OP, SEQUENCE, BEFORE)}


def final_rows(operator: Operator, outputs: Iterable[Mapping[str, pa.Table]]) -> list[Row]:
    """Return what a table holds after these outputs, in a fixed order: changes upserted, other rows appended."""
    if OP not in operator.output_schema().names:
        return _sorted(row for output in outputs for row in output[MAIN].to_pylist())
    rows: dict[Key, Row] = {}
    for output in outputs:
        upsert(rows, output[MAIN], operator.output_key)
    return _sorted(rows.values())


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: repr([v for v in row.values() if not isinstance(v, float)]))


def assert_like(found: Sequence[Row], expected: Sequence[Row]) -> None:
    """Fail unless the rows are the same; floats may differ in their last digits."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert _is_like(a[name], b[name]), f"{name}: {a} is not {b}"


def _is_like(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return bool(a == b)


class OperatorConformance:
    """What every operator promises."""

    def test_the_same_input_gives_the_same_output(self, operator: Operator, epochs: Sequence[Epoch]) -> None:
        first, second = Harness(operator), Harness(operator)
        assert first.run_all(epochs) == second.run_all(epochs)
        assert first.snapshot() == second.snapshot()

    def test_nothing_of_the_sample_is_late_and_something_comes_out(
        self, operator: Operator, epochs: Sequence[Epoch]
    ) -> None:
        outputs = Harness(operator).run_all(epochs)
        assert sum(output[MAIN].num_rows for output in outputs) > 0
        assert all(output[LATE].num_rows == 0 for output in outputs if LATE in output)

    def test_epochs_may_be_cut_in_any_way(self, operator: Operator, epochs: Sequence[Epoch]) -> None:
        whole = {name: pa.concat_tables([e[name] for e in epochs if name in e]) for name in _names(epochs)}
        halves = [half for epoch in epochs for half in _halves(epoch)]
        expected = final_rows(operator, Harness(operator).run_all(epochs))
        assert_like(final_rows(operator, Harness(operator).run_all([whole])), expected)
        assert_like(final_rows(operator, Harness(operator).run_all(halves)), expected)

    def test_shards_do_not_matter(self, operator: Operator, epochs: Sequence[Epoch]) -> None:
        one, many = Harness(operator), Harness(operator, shards=5)
        for epoch in epochs:
            expected, found = one.run(epoch), many.run(epoch)
            for port in operator.ports:
                assert _sorted(found[port].to_pylist()) == _sorted(expected[port].to_pylist())
        assert many.state == one.state
        assert many.timers == one.timers

    def test_an_epoch_without_rows_changes_nothing(self, operator: Operator, epochs: Sequence[Epoch]) -> None:
        harness = Harness(operator)
        harness.run_all(epochs)
        before = harness.snapshot()
        assert all(table.num_rows == 0 for table in harness.run({}).values())
        assert harness.snapshot().state == before.state

    def test_an_empty_batch_gives_nothing(self, operator: Operator) -> None:
        rows = {name: schema.empty_table() for name, schema in operator.inputs.items()}
        nothing = np.empty(0, np.bool_)
        keys, state = operator.state_key.empty_table(), operator.state_schema.empty_table()
        batch = Batch(keys, state, nothing, nothing, rows, {name: np.empty(0, np.int64) for name in rows})
        context = EpochContext("test", operator.name, 1, _BEGIN)
        result = operator.fold(batch, context)
        check_result(operator, batch, result)
        assert not len(result.changed)
        assert not len(result.removed)
        assert all(table.num_rows == 0 for table in result.output.values())

    def test_restoring_in_the_middle_changes_nothing(self, operator: Operator, epochs: Sequence[Epoch]) -> None:
        straight = Harness(operator)
        expected = straight.run_all(epochs)
        harness = Harness(operator)
        for epoch, output in zip(epochs, expected, strict=True):
            harness = Harness.restored(operator, harness.snapshot())
            assert harness.run(epoch) == output
        assert harness.snapshot() == straight.snapshot()


def _names(epochs: Iterable[Epoch]) -> list[str]:
    return list(dict.fromkeys(name for epoch in epochs for name in epoch))


def _halves(epoch: Epoch) -> list[dict[str, pa.Table]]:
    """Cut an epoch in two by the order of its rows."""
    cuts = {name: table.num_rows // 2 for name, table in epoch.items()}
    return [
        {name: table.slice(0, cuts[name]) for name, table in epoch.items()},
        {name: table.slice(cuts[name]) for name, table in epoch.items()},
    ]
