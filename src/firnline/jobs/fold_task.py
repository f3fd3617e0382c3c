"""The stateful task: folds the rows of one shard into its state in one vectorised call, and writes the changes.

Runs inside Spark's workers. The steps:

1. gather the rows of the shard, and their keys;
2. look up the state of those keys, and of the keys whose timers are due;
3. fold;
4. write one segment with the changes, and the timers;
5. merge segments if there are many;
6. stage the output;
7. for a checkpoint, list the files of the shard.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime

import numpy as np
import pyarrow as pa

from firnline.clock import monotonic
from firnline.errors import FirnlineError, OperatorError
from firnline.exchange import ExchangeWriter, read_exchange
from firnline.jobs.fold_job import FoldReport, FoldTask
from firnline.operators.base import LATE, MAIN, Assigned, Batch, EpochContext, Indices, Operator, Result
from firnline.operators.columns import align, late_rows, micros
from firnline.operators.loading import build_operator
from firnline.sinks.registry import close_stagers, open_stagers
from firnline.state.columns import Layout, nulls
from firnline.state.keys import Located, distinct, encode_keys, key_family, locate
from firnline.state.lookup import by_slots, lookup
from firnline.state.manifest import ShardState
from firnline.state.merge import merge_due
from firnline.state.segments import open_segments, write_segment
from firnline.state.snapshot import finish_shard
from firnline.state.timers import after_firing, due_slots, merge_timers, write_timers
from firnline.types import Json

_LIBRARIES = (
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<frozen",
)


@dataclass(slots=True)
class _Tally:
    """The counters of the task."""

    rows: int = 0
    late: int = 0
    keys: int = 0
    changed: int = 0
    removed: int = 0
    bytes_written: int = 0
    out: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        began = monotonic()
        yield
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + monotonic() - began, 4)


def run_fold(task: dict[str, Json]) -> dict[str, Json]:
    """Fold the rows of one shard: a FoldTask in, a FoldReport out."""
    return _Shard(FoldTask.from_json(task)).run().to_json()


class _Shard:
    """One shard of one operator in one epoch."""

    def __init__(self, task: FoldTask) -> None:
        self._task = task
        self._name = task.operator.name
        self._prefix = f"{task.folder}/shard_{task.shard}/{self._name}.{task.attempt}"
        self._tally = _Tally()
        self._staged: dict[str, list[dict[str, Json]]] = {}
        self._exchanged: dict[str, Json] = {}

    def run(self) -> FoldReport:
        task, tally, after = self._task, self._tally, self._task.state
        if task.schemas is not None:
            after = self._fold(build_operator(task.operator, task.schemas, (), task.code))
        report = FoldReport(
            shard=task.shard,
            state=after,
            staged=self._staged,
            exchanged=self._exchanged,
            rows=tally.rows,
            late=tally.late,
            keys=tally.keys,
            changed=tally.changed,
            removed=tally.removed,
            bytes_written=tally.bytes_written,
            out=tally.out,
            seconds=tally.seconds,
        )
        return report if task.others is None else self._list(after, report, task.others)

    def _fold(self, operator: Operator) -> ShardState:
        task, tally = self._task, self._tally
        context = EpochContext(
            pipeline=task.pipeline,
            operator=self._name,
            epoch=task.epoch,
            epoch_time=datetime.fromisoformat(task.epoch_time),
            late_before=task.late_before,
            watermark=task.watermark,
        )
        layout = Layout(operator.state_key, operator.state_schema, timers=True)
        with tally.timed("gather"):
            gathered = self._gather(operator, context)
        with tally.timed("lookup"):
            batch, located = self._look_up(operator, gathered, layout)
        tally.keys = batch.keys.num_rows
        with tally.timed("fold"):
            if tally.keys:
                with _own_code(self._name, "fold"):
                    result = operator.fold(batch, context)
            else:
                result = Result(np.empty(0, np.int64), nulls(operator.state_schema, 0))
        with tally.timed("write"):
            after = self._write_state(layout, batch, located, result)
        with tally.timed("merge"):
            after = self._merge(layout, after)
        with tally.timed("stage"):
            self._put_out(operator, result, gathered)
        return after

    # -- 1 gather -------------------------------------------------------------------------------------

    def _gather(self, operator: Operator, context: EpochContext) -> _Gathered:
        rows: dict[str, pa.Table] = {}
        keys: list[pa.Table] = []
        late: list[pa.Table] = []
        counts: dict[str, int] = {}
        for port, schema in operator.inputs.items():
            batches = list(read_exchange(self._task.exchange, self._task.files[port], schema, self._task.shard))
            table = pa.Table.from_batches(batches, schema=schema).combine_chunks()
            if port in self._task.unordered:
                table = _in_order(table, operator.times.get(port))
            with _own_code(self._name, "assign"):
                assigned: Assigned = operator.assign(table, port, context)
            if assigned.late.size:
                self._tally.late += int(assigned.late.size)
                if LATE in operator.ports:
                    late.append(late_rows(operator, port, table, assigned.late, context))
            whole = assigned.rows.size == table.num_rows and bool((assigned.rows == np.arange(table.num_rows)).all())
            rows[port] = table if whole else table.take(pa.array(assigned.rows))
            keys.append(_cast(assigned.keys, operator.state_key, assigned.rows.size))
            counts[port] = assigned.rows.size
        self._tally.rows = sum(counts.values())
        return _Gathered(rows, _concat(keys), counts, late)

    # -- 2 look up ------------------------------------------------------------------------------------

    def _look_up(self, operator: Operator, gathered: _Gathered, layout: Layout) -> tuple[Batch, Located]:
        """Return the state of every key with rows or a due timer, each key once."""
        groups, deciding = self._task.key_groups, len(operator.keys)
        located = locate(gathered.keys, deciding, groups, gathered.keys.num_rows)
        once = distinct(located.slots, located.keys)
        keys = _take(gathered.keys, once.rows)
        key_of = once.key_of
        segments = open_segments(self._task.home, self._task.state.segments)
        hints = due_slots(self._task.home, self._task.state.timers, self._task.watermark, self._task.groups)
        waiting = layout.keys_of(by_slots(segments, hints, layout, self._task.watermark)) if hints.size else None
        due = np.zeros(keys.num_rows, np.bool_)
        if waiting is not None and waiting.num_rows:
            both = _concat([keys, waiting])
            located = locate(both, deciding, groups, both.num_rows)
            once = distinct(located.slots, located.keys)
            key_of = once.key_of[: keys.num_rows][key_of]
            due = np.zeros(once.rows.size, np.bool_)
            due[once.key_of[keys.num_rows :]] = True
            keys = _take(both, once.rows)
        at = Located(located.keys.take(once.rows), located.groups[once.rows], located.slots[once.rows])
        state = lookup(segments, at.slots, at.keys, layout)
        starts = np.cumsum([0, *gathered.counts.values()])
        by_port = {port: key_of[a:b] for port, a, b in zip(gathered.counts, starts[:-1], starts[1:], strict=True)}
        return Batch(keys, state.state, state.exists, due, gathered.rows, by_port), at

    # -- 4 write and 5 merge --------------------------------------------------------------------------

    def _write_state(self, layout: Layout, batch: Batch, at: Located, result: Result) -> ShardState:
        _check(self._name, batch, result)
        tally, task = self._tally, self._task
        # A key that never existed needs no removal.
        removed = result.removed[batch.exists[result.removed]]
        tally.changed, tally.removed = int(result.changed.size), int(removed.size)
        segments, timers = (
            self._task.state.segments,
            after_firing(self._task.home, self._task.state.timers, task.watermark),
        )
        if not (result.changed.size or removed.size):
            return ShardState(segments, timers)
        table = layout.changes(at.slots, batch.keys, result.changed, result.state, removed, result.timers)
        storage = self._task.home.storage
        ref = write_segment(storage, self._prefix, table, layout, operator=self._name, epoch=task.epoch)
        tally.bytes_written += ref.size_bytes
        if result.timers is not None:
            set_ones = np.asarray(result.timers.is_valid())
            due = np.asarray(result.timers.drop_null(), dtype=np.int64)
            slots = at.slots[result.changed[set_ones]]
            timer = write_timers(storage, self._prefix, due, slots, operator=self._name, epoch=task.epoch)
            if timer is not None:
                tally.bytes_written += timer.segment.size_bytes
                timers = (*timers, timer)
        return ShardState((*segments, ref), timers)

    def _merge(self, layout: Layout, state: ShardState) -> ShardState:
        name, epoch = self._name, self._task.epoch
        segments = merge_due(
            self._task.home, state.segments, self._task.groups, self._prefix, operator=name, epoch=epoch, layout=layout
        )
        timers = merge_timers(
            self._task.home, state.timers, self._task.groups, self._prefix, operator=name, epoch=epoch
        )
        known = {ref.path for ref in state.files}
        after = ShardState(segments, timers)
        self._tally.bytes_written += sum(ref.size_bytes for ref in after.files if ref.path not in known)
        return after

    # -- 6 stage and 7 list ---------------------------------------------------------------------------

    def _put_out(self, operator: Operator, result: Result, gathered: _Gathered) -> None:
        for port, where in self._task.ports.items():
            name = port.removeprefix(self._name).removeprefix(".") or MAIN
            schema = operator.output_schema(name)
            tables = [table for table in (result.output.get(name),) if table is not None]
            if name == LATE:
                tables += gathered.late
            batches = [batch for table in tables for batch in table.to_batches()]
            stagers = open_stagers(where.targets, self._task.attempt)
            exchanges = [ExchangeWriter(edge, self._task.exchange) for edge in where.edges]
            for batch in (align(b, schema) for b in batches if b.num_rows):
                for stager in stagers.values():
                    stager.write(batch)
                for exchange in exchanges:
                    exchange.write(batch)
            self._staged |= close_stagers(stagers)
            self._exchanged |= {exchange.edge.name: exchange.close() for exchange in exchanges}
            self._tally.out[port] = sum(b.num_rows for b in batches)

    def _list(self, after: ShardState, report: FoldReport, others: Mapping[str, ShardState]) -> FoldReport:
        """List the files of the shard. The first list counts: a repeated task returns its first report."""
        task = self._task
        states = {**others, **({self._name: after} if task.is_listed else {})}
        with self._tally.timed("list"):
            content, checksum = finish_shard(task.home.storage, task.folder, task.shard, states, report.to_json())
        return replace(FoldReport.from_json(content.report), checksum=checksum)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """The rows of a shard, the key of each (all inputs concatenated), and the late rows."""

    rows: Mapping[str, pa.Table]
    keys: pa.Table
    counts: Mapping[str, int]
    late: Sequence[pa.Table]


@contextmanager
def _own_code(operator: str, what: str) -> Iterator[None]:
    """Report an exception of the operator's own code as an OperatorError, not as a lost worker."""
    try:
        yield
    except (FirnlineError, MemoryError):
        raise
    except Exception as error:
        where = _own_frame(error)
        raise OperatorError(
            f"operator {operator!r}: {what} failed with {type(error).__name__}: {error}"
            f" ({where.filename}, line {where.lineno})",
            operator=operator,
            traceback="".join(traceback.format_exception(error)),
        ) from error


def _own_frame(error: BaseException) -> traceback.FrameSummary:
    """Return the innermost line of the operator's own code: not that of a library which it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if not frame.filename.startswith(_LIBRARIES)), frames[-1])


def _in_order(table: pa.Table, time: str | None) -> pa.Table:
    """Return rows of a query in an order that is the same on every replay: by time, then by content."""
    plain = [name for name in table.column_names if key_family(table.schema.field(name).type) is not None]
    hashes = encode_keys(table.select(plain), table.num_rows).hash64()
    times = micros(table.column(time))[0] if time else np.zeros(table.num_rows, np.int64)
    return table.take(pa.array(np.lexsort((hashes, times))))


# Arrow loses the row count of a table without columns; an operator without keys has such keys.


def _concat(tables: Sequence[pa.Table]) -> pa.Table:
    if tables[0].num_columns:
        return pa.concat_tables(tables).combine_chunks()
    return _without_columns(sum(table.num_rows for table in tables))


def _take(table: pa.Table, rows: Indices) -> pa.Table:
    return table.take(pa.array(rows)) if table.num_columns else _without_columns(rows.size)


def _cast(table: pa.Table, schema: pa.Schema, rows: int) -> pa.Table:
    return table.cast(schema) if table.num_columns else _without_columns(rows)


def _without_columns(rows: int) -> pa.Table:
    return pa.table({"": pa.nulls(rows)}).select([])


def _check(name: str, batch: Batch, result: Result) -> None:
    """Check the operator's result: an operator that breaks its contract must not damage the state."""
    keys = batch.keys.num_rows
    named = np.concatenate([result.changed, result.removed])
    if named.size and (named.min() < 0 or named.max() >= keys):
        raise OperatorError(f"operator {name!r}: changed or removed names keys that are not there")
    if named.size and np.bincount(named, minlength=keys).max() > 1:
        raise OperatorError(f"operator {name!r}: a key is changed or removed more than once")
    if result.state.num_rows != result.changed.size:
        raise OperatorError(f"operator {name!r}: {result.state.num_rows} rows of state for {result.changed.size} keys")
    if result.timers is not None and len(result.timers) != result.changed.size:
        raise OperatorError(f"operator {name!r}: {len(result.timers)} timers for {result.changed.size} keys")
