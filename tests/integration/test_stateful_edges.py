"""Promises of stateful pipelines at their edges: changed specs, replays, lost epochs, sources that begin late."""

from __future__ import annotations

import dataclasses
import gzip
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.checkpoint import ledger
from firnline.errors import SchemaError, SourceError, WorkerLostError
from firnline.history.state import load_state_view
from firnline.options import FieldOptions, OperatorOptions, PipelineOptions, SchemaOptions, TriggerOptions
from firnline.run import operator_state, steps
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.requests import FileRequest
from firnline.run.runner import Runner
from firnline.sinks.base import EpochCommit, RunTasks
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.files.source import FileSource
from firnline.sources.group import EpochPlan
from firnline.testing.local import LocalEngine
from firnline.types import Json, Receipt
from tests.support.counters import OPERATORS, CounterInput, counter_options
from tests.support.keyed import FIRST_TOTALS, FIRSTS, KeyedInput, keyed_options
from tests.support.pipelines import LocalRun, Recorder, pipeline_options, run_once, run_to_end

MINUTE_US = 60_000_000
FIELDS = SchemaOptions((FieldOptions("k", "string"), FieldOptions("v", "int64"), FieldOptions("at", "timestamp")))
INFERRED = SchemaOptions()
COUNT = [{"name": "n", "function": "count"}]
RARELY = TriggerOptions(every_epochs=100)
Write = Literal["append", "upsert"]


class World:
    """Two sources of rows, and tables named after what they read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in "ab":
            (folder / name).mkdir()

    def add(self, source: str, name: str, *rows: Mapping[str, Any]) -> None:
        (self.folder / source / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def options(
        self,
        *operators: OperatorOptions,
        sinks: Mapping[str, Write],
        schemas: Mapping[str, SchemaOptions] | None = None,
        **settings: Any,
    ) -> PipelineOptions:
        """`sinks` says how each table is written; `schemas` has those of sources that declare none."""
        sources = [
            FileSourceOptions(
                n, str(self.folder / n), poll_interval_secs=0.05, file_attempts=1, schema=(schemas or {}).get(n, FIELDS)
            )
            for n in "ab"
        ]
        made = [
            DeltaSinkOptions(name, str(self.folder / f"table-{name}"), input=name, write=write)
            for name, write in sinks.items()
        ]
        settings = {"max_files": 1, "shards": 3, **settings}
        return pipeline_options("", "", sources=sources, operators=operators, sinks=made, **settings)

    def read(self, table: str) -> list[dict[str, Any]]:
        return list(DeltaTable(str(self.folder / f"table-{table}")).to_pyarrow_table().to_pylist())

    def counts(self, table: str = "totals") -> dict[str, int]:
        return {row["k"]: row["n"] for row in self.read(table)}

    def starts(self, table: str = "windows") -> list[str]:
        return sorted(row["window_start"].strftime("%H:%M") for row in self.read(table))


def row(key: Any, time: str = "10:00", value: int = 1) -> dict[str, Any]:
    return {"k": key, "v": value, "at": f"2026-01-01T{time}:00Z"}


def totals(*inputs: str, **more: Any) -> OperatorOptions:
    return OperatorOptions("totals", "aggregate", inputs or ("a",), {"keys": ["k"], "aggregates": COUNT}, **more)


def final_windows(source: str = "a", delay_minutes: int = 0, **more: Any) -> OperatorOptions:
    settings = {
        "keys": ["k"],
        "time": "at",
        "window": {"size_us": 10 * MINUTE_US},
        "aggregates": COUNT,
        "delay_us": delay_minutes * MINUTE_US,
        "emit": "final",
    }
    return OperatorOptions(more.pop("name", "windows"), "aggregate", (source,), settings, **more)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def with_operators(options: PipelineOptions, *operators: OperatorOptions, reads: str = "") -> PipelineOptions:
    """The same pipeline with other operators; `reads` is what its only sink takes now."""
    sinks = (dataclasses.replace(options.sinks[0], input=reads),) if reads else options.sinks
    return dataclasses.replace(options, operators=operators, sinks=sinks)


def watermark(run: LocalRun, operator: str) -> int:
    held = run.pipeline.load().checkpoint
    assert held is not None
    return int(held.watermarks[operator]["at"])


# -- a spec that changed -------------------------------------------------------------------------------


def test_another_number_of_key_groups_is_refused(world: World) -> None:
    options = world.options(totals(), sinks={"totals": "upsert"})
    keys = [f"k{n}" for n in range(20)]
    world.add("a", "f1", *map(row, keys))
    run_to_end(options)
    world.add("a", "f2", *map(row, keys))
    run = run_once(dataclasses.replace(options, state=dataclasses.replace(options.state, key_groups=64)))
    assert run.error_code == "config" or world.counts() == dict.fromkeys(keys, 2)


def test_state_is_not_read_as_that_of_an_operator_of_another_type(world: World) -> None:
    options = world.options(totals(), sinks={"totals": "append"})
    world.add("a", "f1", row("x"))
    run_to_end(options)
    world.add("a", "f2", row("x"))
    changed = OperatorOptions("totals", "deduplicate", ("a",), {"keys": ["k"]})
    assert run_once(with_operators(options, changed)).exit_code != 0


def test_a_renamed_operator_keeps_its_watermark(world: World) -> None:
    options = world.options(final_windows(), sinks={"windows": "append"})
    world.add("a", "f1", row("x", "10:01"))
    world.add("a", "f2", row("x", "10:30"))  # closes the first window
    run_to_end(options)
    renamed = with_operators(options, final_windows(name="others", renamed_from="windows"), reads="others")
    world.add("a", "f3", row("x", "10:02"))  # late
    world.add("a", "f4", row("x", "10:50"))
    run_to_end(renamed)
    assert world.starts() == ["10:00", "10:30"]


def test_an_input_that_is_gone_does_not_hold_the_watermark_back(world: World) -> None:
    firsts = OperatorOptions("firsts", "deduplicate", ("a",), {"keys": ["k", "v"]})
    options = world.options(firsts, final_windows("firsts"), sinks={"windows": "append"})
    world.add("a", "f1", row("x", "10:00", 1))
    before = watermark(run_once(options), "windows")
    renamed = dataclasses.replace(firsts, name="others", renamed_from="firsts")
    world.add("a", "f2", row("x", "11:00", 2))
    run = run_once(with_operators(options, renamed, final_windows("others")))
    assert watermark(run, "windows") > before


def test_keys_of_an_own_operator_decide_its_shard(world: World) -> None:
    (world.folder / "own.py").write_text(
        "import numpy as np\n"
        "import pyarrow as pa\n"
        "from firnline.operators.base import Operator, Result\n"
        "class Rows(Operator):\n"
        "    keys = ('k',)\n"
        "    state_schema = pa.schema([('n', pa.int64())])\n"
        "    output_key = ('k',)\n"
        "    def output_schema(self, port=''):\n"
        "        return pa.schema([('k', pa.string()), ('n', pa.int64())])\n"
        "    def fold(self, batch, context):\n"
        "        keys = len(batch.exists)\n"
        "        rows = np.bincount(batch.key_of['a'], minlength=keys)\n"
        "        told = pa.array(np.asarray(batch.state.column('n').combine_chunks().fill_null(0)) + rows)\n"
        "        out = pa.table({'k': batch.keys.column('k'), 'n': told})\n"
        "        return Result(np.arange(keys), pa.table({'n': told}), output={'': out})\n"
    )
    options = world.options(OperatorOptions("totals", "own:Rows", ("a",)), sinks={"totals": "append"})
    options = dataclasses.replace(options, operator_paths=(str(world.folder),))
    world.add("a", "f1", *(row(f"k{n}") for n in range(9)))
    first = run_once(options)
    world.add("a", "f2", *(row(f"k{n}") for n in range(9)))
    run_once(dataclasses.replace(options, state=dataclasses.replace(options.state, shards=2)))
    assert first.error_code == "config" or sorted(r["n"] for r in world.read("totals")) == [1] * 9 + [2] * 9


# -- replays -------------------------------------------------------------------------------------------


def test_a_replay_closes_the_windows_that_its_epoch_closed(world: World) -> None:
    options = world.options(final_windows(), sinks={"windows": "append"}, trigger=RARELY)
    world.add("a", "f1", row("x", "10:01"))
    world.add("a", "f2", row("x", "10:12"))  # closes the first window, and no checkpoint of the state is made
    run_to_end(options)
    world.add("a", "f3", row("x", "10:40"))
    run_to_end(with_operators(options, final_windows(delay_minutes=5)))
    assert world.starts() == ["10:00", "10:10"]


def test_a_replay_finds_the_columns_as_its_epoch_did(world: World) -> None:
    undeclared = {"a": INFERRED, "b": INFERRED}
    options = world.options(totals("a", "b"), sinks={"totals": "upsert"}, schemas=undeclared, trigger=RARELY)
    world.add("a", "f1", {"k": "x"})
    run_to_end(options)
    world.add("b", "f1", {"k": 1}, {"k": "x"}, {"k": 1})  # the first rows of b: numbers and texts make a text
    run_to_end(options)
    world.add("a", "f2", {"k": "1"})
    run_to_end(options)
    assert world.counts() == {"x": 2, "1": 3}


def test_the_floor_keeps_what_a_chain_of_operators_is_restored_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_at = {"firsts": {1, 3, 6}, "totals": {1, 4}}

    def due(_: Any, made: Any, *args: Any, **kwargs: Any) -> frozenset[str]:
        return frozenset(name for name, epochs in made_at.items() if made.epoch in epochs)

    monkeypatch.setattr(operator_state.OperatorStates, "_due", due)
    monkeypatch.setattr(steps, "FOLD_EVERY", 1)
    monkeypatch.setattr(ledger, "FOLD_ENTRIES", 1)
    source = KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path, (FIRSTS, FIRST_TOTALS), mode="per_operator", rollback_window=1)
    for _ in range(8):
        source.add()
        run_to_end(options)


# -- epochs that are lost ------------------------------------------------------------------------------


class _Losing:
    """Lets the first commit of epoch 2 fail once the job of epoch 3 has come to a given kind of order."""

    def __init__(self, kind: str, *, dies: bool) -> None:
        self.kind = kind
        self.dies = dies  # the job is stopped by the cancel; else it goes on, as between two jobs
        self.running, self.dropped = threading.Event(), threading.Event()
        self._cancels = 0

    def run(self, options: PipelineOptions) -> tuple[Runner, OpenPipeline]:
        pipeline = open_pipeline(options, once=True)
        commit = pipeline.deciding.commit
        lost = threading.Event()

        def refuse(told: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
            if told.checkpoint.epoch == 2 and not lost.is_set():
                lost.set()
                assert self.running.wait(120)
                raise SchemaError("the table has another column now")
            return commit(told, run_tasks)

        pipeline.deciding.commit = refuse  # type: ignore[method-assign,assignment]
        runner = Runner(pipeline, self._engine(), Recorder(), once=True)
        assert runner.run().exit_code == 0
        return runner, pipeline

    def _engine(self) -> LocalEngine:
        losing = self

        class Engine(LocalEngine):
            def run(
                self, tag: str, orders: list[dict[str, Json]], timeout_seconds: float | None = None
            ) -> list[dict[str, Json]]:
                first = orders[0] if orders else {}
                if (first.get("epoch"), first.get("kind")) == (3, losing.kind) and not losing.running.is_set():
                    losing.running.set()
                    assert losing.dropped.wait(120)
                    if losing.dies:
                        raise WorkerLostError("a Spark job failed: cancelled")
                return super().run(tag, orders, timeout_seconds)

            def cancel(self, tag: str) -> None:
                losing._cancels += 1
                if losing._cancels == 2:  # epochs 2 and 3; what else the drop does is done when the next event is taken
                    threading.Timer(0.2, losing.dropped.set).start()

        return Engine(1)


def _five_epochs(world: World, **settings: Any) -> PipelineOptions:
    for number in range(5):
        world.add("a", f"f{number}", row("x"))
    return world.options(totals(), sinks={"totals": "upsert"}, max_inflight=2, **settings)


def test_a_job_that_was_cancelled_is_no_lost_worker(world: World) -> None:
    runner, _ = _Losing("fold", dies=True).run(_five_epochs(world, on_worker_loss="absorb"))
    assert runner._states is not None
    assert runner._states.shards == 3
    assert world.counts() == {"x": 5}


def test_epochs_that_run_again_make_their_checkpoints_of_state(world: World) -> None:
    _, pipeline = _Losing("read", dies=False).run(_five_epochs(world))
    entries = list(pipeline.entries(pipeline.load().entry))
    assert [e.checkpoint.state["totals"]["epoch"] for e in entries] == [5, 4, 3, 2, 1]


# -- several sources -----------------------------------------------------------------------------------


def test_a_sink_whose_source_begins_later_gets_the_columns_of_its_source(world: World) -> None:
    options = world.options(sinks={"a": "append", "b": "append"}, schemas={"a": INFERRED, "b": INFERRED})
    world.add("a", "f1", {"x": 1})
    run_to_end(options)
    world.add("b", "f1", {"x": "text", "y": 2})
    run_to_end(options)
    found = [{name: value for name, value in r.items() if name != "_rescued_data"} for r in world.read("b")]
    assert (world.read("a"), found) == ([{"x": 1}], [{"x": "text", "y": 2}])


def test_the_deciding_sink_may_be_that_of_a_source_that_begins_later(world: World) -> None:
    options = world.options(sinks={"b": "append", "a": "append"}, schemas={"a": INFERRED, "b": INFERRED})
    world.add("a", "f1", {"x": 1})
    run_to_end(options)


def test_an_operator_whose_input_begins_later_begins_with_its_initial_state(world: World) -> None:
    path = world.folder / "exported.parquet"
    pq.write_table(pa.table({"k": ["x"], "n": pa.array([100])}), path)
    counted = totals("b", initial_state=str(path))
    options = world.options(counted, sinks={"a": "append"}, schemas={"b": INFERRED})
    world.add("a", "f1", row("y"))
    run_to_end(options)
    world.add("b", "f1", row("x"))
    run = run_once(options)
    found = load_state_view(run.pipeline, "totals").reader.first(10)
    assert found.select(["k", "n"]).to_pylist() == [{"k": "x", "n": 101}]


def test_a_retry_of_a_source_that_is_left_out_is_not_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    options = world.options(sinks={"a": "append", "b": "append"}, max_files=10)
    world.add("a", "f1", row("x"))
    world.add("b", "f1", row("x"))
    whole = gzip.compress(json.dumps(row("again")).encode() + b"\n")
    path = world.folder / "b" / "f2.json.gz"
    path.write_bytes(whole[:-6])
    run = run_once(options)
    path.write_bytes(whole)
    run.pipeline.requests.ask_retry(str(path), changed=True, ids=run.pipeline.ids)
    world.add("a", "f2", row("x"))
    planned, listed = FileSource.plan, threading.Event()
    taken: list[list[FileRequest]] = []

    def plan(self: FileSource, *args: Any) -> Any:
        if self.name == "b":
            assert listed.wait(120)
        return planned(self, *args)

    class Releasing(Recorder):
        def planned(self, epoch: int, plan: EpochPlan) -> None:
            taken.append([request for made in runner._progress.epochs.values() for request in made.requests])
            listed.set()

    monkeypatch.setattr(FileSource, "plan", plan)
    runner = Runner(open_pipeline(options, once=True), LocalEngine(1), Releasing(), once=True)
    assert runner.run().exit_code == 0
    assert taken[0] == []  # the epoch that read a alone
    assert sorted(r["k"] for r in world.read("b")) == ["again", "x"]


def test_a_late_file_survives_a_listing_of_another_source_that_fails(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = world.options(sinks={"a": "append", "b": "append"}, max_files=10)
    world.add("a", "f5", row("x"))
    world.add("b", "f5", row("x"))
    run_to_end(options)
    world.add("a", "f1", row("late"))
    world.add("a", "f6", row("x"))
    planned, failed, done = FileSource.plan, threading.Event(), threading.Event()

    def plan(self: FileSource, *args: Any) -> Any:
        if self.name == "b" and not failed.is_set():
            assert done.wait(120)
            failed.set()
            raise SourceError("the listing failed once")
        found = planned(self, *args)
        if self.name == "a":
            done.set()
        return found

    monkeypatch.setattr(FileSource, "plan", plan)
    run_to_end(options)
    assert sorted(r["k"] for r in world.read("a")) == ["late", "x", "x"]


def test_rows_of_a_source_that_is_left_out_at_first_are_not_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    both = dataclasses.replace(final_windows(), inputs=("a", "b"))
    options = world.options(both, sinks={"windows": "append"}, max_files=10)
    for source in "ab":
        world.add(source, "f1", row("x", "10:00"), row("x", "12:00"))
    planned, listed = FileSource.plan, threading.Event()

    def plan(self: FileSource, *args: Any) -> Any:
        if self.name == "b":
            assert listed.wait(120)
        return planned(self, *args)

    class Releasing(Recorder):
        def committed(self, facts: Any) -> None:
            super().committed(facts)
            listed.set()

    monkeypatch.setattr(FileSource, "plan", plan)
    told = Releasing()
    assert Runner(open_pipeline(options, once=True), LocalEngine(1), told, once=True).run().exit_code == 0
    assert [facts.operators["windows"]["late"] for facts in told.epochs] == [0, 0]
    assert [(r["window_start"].hour, r["n"]) for r in world.read("windows")] == [(10, 2)]


def test_a_table_may_have_a_column_that_only_another_tool_can_fill(world: World) -> None:
    options = world.options(sinks={"a": "append", "b": "append"})
    write_deltalake(world.folder / "table-b", pa.table({"k": ["old"], "small": pa.array([1], pa.int8())}))
    for source in "ab":
        world.add(source, "f1", row("x"))
    run_to_end(options)
    world.add("a", "f2", row("x"))  # an epoch in which b gives nothing
    run_to_end(options)


# -- triggers and workers ------------------------------------------------------------------------------


def test_rows_that_a_checkpoint_holds_do_not_count_for_the_next_one(world: World) -> None:
    for number in range(5):
        world.add("a", f"f{number}", *[row("x")] * 10)
    trigger = TriggerOptions(every_epochs=None, every_records=20)
    run = run_once(world.options(totals(), sinks={"totals": "upsert"}, trigger=trigger))
    entries = list(run.pipeline.entries(run.pipeline.load().entry))
    assert [e.checkpoint.state["totals"]["epoch"] for e in entries] == [5, 3, 3, 1, 1]


def test_an_operator_that_raises_is_no_lost_worker(world: World) -> None:
    (world.folder / "own.py").write_text(
        "import pyarrow as pa\n"
        "from firnline.operators.base import Operator\n"
        "class Raising(Operator):\n"
        "    keys = ('k',)\n"
        "    state_schema = pa.schema([('n', pa.int64())])\n"
        "    def output_schema(self, port=''):\n"
        "        return pa.schema([('k', pa.string())])\n"
        "    def fold(self, batch, context):\n"
        "        raise KeyError('k')\n"
    )
    own = OperatorOptions("totals", "own:Raising", ("a",), {"keys": ["k"]})
    options = world.options(own, sinks={"a": "append"}, on_worker_loss="absorb")
    world.add("a", "f1", row("x"))
    pipeline = open_pipeline(dataclasses.replace(options, operator_paths=(str(world.folder),)), once=True)
    runner = Runner(pipeline, LocalEngine(1), Recorder(), once=True)
    assert runner.run().exit_code != 0
    assert runner._states is not None
    assert runner._states.shards == 3


def test_an_error_in_an_own_operator_names_its_file_and_line(tmp_path: Path) -> None:
    """Also when a library raises it on the operator's behalf; the traceback is there for `--debug`."""
    source = CounterInput(tmp_path / "in")
    source.add(rows=2)
    folder = tmp_path / "mine"
    folder.mkdir()
    text = (OPERATORS / "counters.py").read_text()
    broken = text.replace("class Counters", "class Mine").replace(
        "        keys = np.concatenate(", '        np.concatenate("odd")\n        keys = np.concatenate(', 1
    )
    (folder / "mine.py").write_text(broken)
    line = broken.splitlines().index('        np.concatenate("odd")') + 1
    options = counter_options(source.folder, tmp_path / "table")
    operator = dataclasses.replace(options.operators[0], type="mine:Mine")
    options = dataclasses.replace(options, operators=(operator,), operator_paths=(str(folder),))
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "operator")
    assert run.result.error is not None
    assert f"({folder / 'mine.py'}, line {line})" in run.result.error.message
    assert "Traceback" in str(run.result.error.fields["traceback"])
