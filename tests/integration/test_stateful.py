"""Pipelines with several sources and operators that remember, end to end, without Spark; tables read by delta-rs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.clock import SystemClock
from firnline.history.state import load_state_view
from firnline.history.status import load_status
from firnline.jobs.engine import Engine
from firnline.options import (
    FieldOptions,
    LocalTierOptions,
    OperatorOptions,
    PipelineOptions,
    RemoteTierOptions,
    SchemaOptions,
    TriggerOptions,
)
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.files.source import FileSource
from firnline.state.export import write_export
from firnline.testing.local import LocalEngine
from tests.support.counters import CounterInput, counter_options, read_counts
from tests.support.pipelines import Recorder, pipeline_options, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids

MINUTE_US = 60_000_000
FIELDS = (FieldOptions("k", "string"), FieldOptions("v", "int64"), FieldOptions("at", "timestamp"))


class World:
    """Two sources of timed rows, windows over both, and a count of windows over those."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        for name in "ab":
            (folder / name).mkdir(parents=True)

    def add(self, source: str, name: str, rows: list[tuple[str, int, str]]) -> None:
        lines = [{"k": k, "v": v, "at": f"2026-01-01T{at}Z"} for k, v, at in rows]
        (self.folder / source / f"{name}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
        self.rows += lines

    def options(self, **settings: Any) -> PipelineOptions:
        sources = tuple(
            FileSourceOptions(n, str(self.folder / n), poll_interval_secs=0.05, schema=SchemaOptions(FIELDS))
            for n in "ab"
        )
        operators = settings.pop("operators", [windows()])
        sinks = settings.pop("sinks", ["windows"])
        made = [
            DeltaSinkOptions(
                s.replace(".", "-"), self.table(s), input=s, write="append" if "." in s or s in "ab" else "upsert"
            )
            for s in sinks
        ]
        settings = {"max_files": 1, "shards": 3, **settings}
        return pipeline_options("", "", sources=sources, operators=operators, sinks=made, **settings)

    def table(self, port: str) -> str:
        return str(self.folder / f"table-{port}")

    def read(self, port: str) -> list[dict[str, Any]]:
        return list(DeltaTable(self.table(port)).to_pyarrow_table().to_pylist())

    def counts(self) -> dict[tuple[str, str], int]:
        return {(r["k"], r["window_start"].strftime("%H:%M")): r["n"] for r in self.read("windows")}


def windows(**more: Any) -> OperatorOptions:
    settings: dict[str, Any] = {
        "keys": ["k"],
        "time": "at",
        "window": {"size_us": 10 * MINUTE_US},
        "aggregates": [{"name": "n", "function": "count"}, {"name": "s", "function": "sum", "column": "v"}],
        "delay_us": 5 * MINUTE_US,
        "emit": "changes",
        "before": False,
    }
    return OperatorOptions("windows", "aggregate", ("a", "b"), settings, **more)


def totals(source: str = "a", name: str = "totals", **more: Any) -> OperatorOptions:
    settings: dict[str, Any] = {
        "keys": ["k"],
        "aggregates": [{"name": "n", "function": "count"}],
        "delay_us": 0,
        "emit": "changes",
        "before": False,
    }
    return OperatorOptions(name, "aggregate", (source,), settings, **more)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def expected_windows(rows: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter((r["k"], r["at"][11:15] + "0") for r in rows)
    return dict(found)


def fill(world: World, hours: range) -> None:
    for hour in hours:
        for source in "ab":
            rows = [(f"k{n % 3}", n, f"{hour:02d}:{(7 * n) % 60:02d}:00") for n in range(12)]
            world.add(source, f"f{hour:02d}", sorted(rows, key=lambda r: r[2]))


def test_windows_over_two_sources_are_those_of_all_rows(world: World) -> None:
    options = world.options()
    fill(world, range(3))
    run_to_end(options)
    fill(world, range(3, 5))
    run_to_end(options)
    assert world.counts() == expected_windows(world.rows)


def test_an_aggregate_without_keys_is_one_row(world: World) -> None:
    plain = totals()
    whole = dataclasses.replace(plain, settings={**plain.settings, "keys": []})
    sink = DeltaSinkOptions("totals", world.table("totals"), input="totals")
    options = dataclasses.replace(world.options(operators=[whole], sinks=["a"]), sinks=(sink,))
    fill(world, range(2))
    run_to_end(options)
    assert sorted((r["n"], r["_op"]) for r in world.read("totals")) == [(12, "insert"), (24, "update")]


def test_a_row_after_its_window_was_closed_goes_to_the_side_table(world: World) -> None:
    options = world.options(sinks=["windows", "windows.late"])
    world.add("a", "f1", [("x", 1, "10:01:00"), ("x", 2, "10:59:00")])
    world.add("b", "f1", [("x", 3, "10:58:00")])
    run_to_end(options)
    world.add("a", "f2", [("x", 4, "10:02:00"), ("x", 5, "10:57:00")])
    run_to_end(options)
    assert world.counts() == {("x", "10:00"): 1, ("x", "10:50"): 3}
    late = world.read("windows.late")
    assert [(r["k"], r["v"]) for r in late] == [("x", 4)]
    assert late[0]["_watermark"].strftime("%H:%M") == "10:53"


class SetClock(SystemClock):
    """A clock whose time of day is set by hand."""

    minute = 0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, 0, 0, tzinfo=UTC) + timedelta(minutes=self.minute)


@pytest.mark.parametrize("every", [1, 100])
def test_a_silent_input_no_longer_holds_windows_open_after_idle_after(world: World, every: int) -> None:
    """Also where epochs are folded again after each restart: what was idle then is idle again."""
    operator = windows(idle_after=timedelta(minutes=30))
    options = world.options(
        operators=[operator], sinks=["windows", "windows.late"], trigger=TriggerOptions(every_epochs=every)
    )
    clock = SetClock()

    def run(minute: int) -> dict[str, Any]:
        """One epoch at a time of day, in the run that began at midnight; what the operator did in it."""
        clock.minute = 0
        pipeline = open_pipeline(options, once=True, clock=clock)
        told = Recorder()
        runner = Runner(pipeline, LocalEngine(1), told, once=True)
        clock.minute = minute
        assert runner.run().exit_code == 0
        return told.epochs[-1].operators["windows"]

    def idle() -> list[str]:
        (found,) = [one for one in load_status(open_pipeline(options)).operators if one.operator == "windows"]
        return list(found.idle_inputs)

    for source in "ab":
        world.add(source, "f0", [("x", 1, "10:01:00")])
    run(0)
    for number, (minute, removed, who) in enumerate(((1, 0, []), (30, 0, []), (31, 3, ["b"]))):
        world.add("a", f"f{number + 1}", [("x", 1, f"1{number + 1}:01:00")])
        assert (run(minute)["removed"], idle()) == (removed, who)
    world.add("b", "f5", [("x", 1, "10:02:00"), ("x", 1, "13:02:00")])
    last = run(32)
    assert (last["late"], last["removed"], idle()) == (1, 0, []), "what an idle input let close is closed once"
    assert [r["at"].strftime("%H:%M") for r in world.read("windows.late")] == ["10:02"]
    assert world.counts() == {("x", "10:00"): 2, ("x", "11:00"): 1, ("x", "12:00"): 1, ("x", "13:00"): 2}


def test_closed_windows_leave_no_state_behind(world: World) -> None:
    options = world.options()
    for hour in range(6):
        for source in "ab":
            world.add(source, f"f{hour}", [("x", 1, f"{hour:02d}:00:00")])
        run = run_once(options)
        assert run.exit_code == 0
    held = run.pipeline.load()
    assert held.checkpoint is not None
    removed = sum(int(e.operators["windows"]["removed"]) for e in run.told.epochs)
    assert removed > 0
    assert world.counts() == expected_windows(world.rows)


@pytest.mark.parametrize("mode", ["aligned", "per_operator"])
@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_every_way_of_checkpointing_gives_the_same_tables(tmp_path: Path, mode: Any, every: int) -> None:
    chained = [windows(), totals("windows", "totals")]

    def make(name: str, **settings: Any) -> World:
        made = World(tmp_path / name)
        options = made.options(operators=chained, sinks=["windows", "totals", "a"], **settings)
        for hour in range(4):
            fill(made, range(hour, hour + 1))
            run_to_end(options)
        return made

    plain = make("plain")
    other = make("other", mode=mode, trigger=TriggerOptions(every_epochs=every))
    for table in ("windows", "totals", "a"):
        assert sorted(map(str, other.read(table))) == sorted(map(str, plain.read(table)))
    assert other.counts() == expected_windows(other.rows)


def test_each_operator_keeps_its_own_time_in_per_operator_mode(world: World) -> None:
    often, never = windows(interval_ms=1), totals("windows", interval_ms=3_600_000)
    options = world.options(operators=[often, never], sinks=["windows", "totals"], mode="per_operator")
    fill(world, range(3))
    run_to_end(options)
    run = run_once(options)
    held = run.pipeline.load().checkpoint
    assert held is not None
    assert held.state["totals"]["epoch"] == 1
    assert held.state["windows"]["epoch"] == held.epoch
    fill(world, range(3, 4))
    run_to_end(options)  # replays for the one, skips for the other
    assert world.counts() == expected_windows(world.rows)
    assert sum(r["n"] for r in world.read("totals")) == _changes(world, often)


def _changes(world: World, operator: OperatorOptions) -> int:
    """How many change rows the windows gave: what a fault-free run of every epoch counts."""
    again = World(world.folder / "again")
    options = again.options(operators=[operator, totals("windows")], sinks=["windows", "totals"])
    for hour in range(4):
        fill(again, range(hour, hour + 1))
        run_to_end(options)
    return int(sum(r["n"] for r in again.read("totals")))


def test_a_slow_source_does_not_hold_up_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    options = world.options(operators=[], sinks=["a", "b"], max_files=10)
    fill(world, range(2))
    slow, planned = threading.Event(), FileSource.plan

    def plan(self: FileSource, *args: Any) -> Any:
        if self.name == "b" and not slow.is_set():
            slow.wait(120)
        return planned(self, *args)

    monkeypatch.setattr(FileSource, "plan", plan)
    pipeline, told = open_pipeline(options, once=True), Recorder()

    class Releasing(Recorder):
        def committed(self, facts: Any) -> None:
            told.committed(facts)
            slow.set()

    assert Runner(pipeline, LocalEngine(1), Releasing(), once=True).run().exit_code == 0
    assert [set(facts.sources) for facts in told.epochs] == [{"a"}, {"b"}]
    assert len(world.read("a")) == len(world.read("b")) == 24


def test_an_epoch_says_what_each_source_gave(world: World) -> None:
    options = world.options(max_files=10)
    world.add("a", "f1", [("x", 1, "10:00:00")] * 5)
    world.add("b", "f1", [("x", 1, "10:00:00")] * 2)
    run = run_once(options)
    assert [facts.sources for facts in run.told.epochs] == [{"a": 5, "b": 2}]
    assert run.told.epochs[0].operators["windows"]["rows"] == 7


# -- operators that come, go and change --------------------------------------------------------------


def fails(options: PipelineOptions, code: str, *words: str) -> None:
    run = run_once(options)
    assert run.result.error is not None
    assert run.error_code == code
    for word in words:
        assert word in f"{run.result.error.message} {run.result.error.hint}"


def test_an_operator_that_is_gone_or_new_needs_a_word_in_the_spec(world: World) -> None:
    one = world.options(operators=[totals()], sinks=["totals"])
    fill(world, range(1))
    run_to_end(one)
    gone = world.options(operators=[totals(name="others")], sinks=["others"])
    gone = dataclasses.replace(gone, sinks=(dataclasses.replace(one.sinks[0], input="others"),))
    fails(gone, "config", "'totals'", "renamed_from", "state.dropped")
    dropped = dataclasses.replace(gone, state=dataclasses.replace(gone.state, dropped=("totals",)))
    fails(dropped, "config", "'others'", "initial_state")


def test_a_renamed_operator_goes_on_from_its_state(world: World) -> None:
    one = world.options(operators=[totals()], sinks=["totals"])
    fill(world, range(1))
    run_to_end(one)
    renamed = dataclasses.replace(
        one,
        operators=(totals(name="sums", renamed_from="totals"),),
        sinks=(dataclasses.replace(one.sinks[0], input="sums"),),
    )
    world.add("a", "g1", [("k0", 1, "10:00:00")])
    run_to_end(renamed)
    world.add("a", "g2", [("k0", 1, "10:00:00")])
    run_to_end(renamed)
    assert {r["k"]: r["n"] for r in world.read("totals")} == {"k0": 6, "k1": 4, "k2": 4}


def test_an_operator_that_is_given_leave_begins_empty(world: World) -> None:
    one = world.options(operators=[totals()], sinks=["totals"])
    fill(world, range(1))
    run_to_end(one)
    more = world.options(operators=[totals(), totals(name="second", initial_state="empty")], sinks=["totals"])
    second = totals("totals", "third", initial_state="empty")
    more = dataclasses.replace(more, operators=(totals(), second))
    world.add("a", "g1", [("k0", 1, "10:00:00")])
    run_to_end(more)
    held = open_pipeline(more).load().checkpoint
    assert held is not None
    assert set(held.state) == {"totals", "third"}


def test_an_operator_begins_with_an_exported_state(world: World, tmp_path: Path) -> None:
    first = world.options(operators=[totals()], sinks=["totals"])
    fill(world, range(1))
    run_to_end(first)
    path = tmp_path / "exported.parquet"
    view = load_state_view(open_pipeline(first), "totals")
    assert write_export(str(path), view.reader.schema, view.reader.scan(), {}) == 3
    again = World(tmp_path / "again")
    options = again.options(operators=[totals(initial_state=str(path))], sinks=["totals"])
    again.add("a", "g1", [("k0", 1, "10:00:00"), ("new", 1, "10:00:00")])
    run_to_end(options)
    again.add("a", "g2", [("k1", 1, "10:00:00")])
    run_to_end(options)
    assert {r["k"]: r["n"] for r in again.read("totals")} == {"k0": 5, "k1": 5, "new": 1}


# -- tiers, damage, loss -------------------------------------------------------------------------------


@pytest.fixture
def counted(tmp_path: Path) -> CounterInput:
    return CounterInput(tmp_path / "in")


def tiered(tmp_path: Path, counted: CounterInput, **settings: Any) -> PipelineOptions:
    return counter_options(
        counted.folder,
        tmp_path / "table",
        local=LocalTierOptions(str(tmp_path / "local"), 1),
        remote=RemoteTierOptions(str(tmp_path / "remote"), 1),
        **settings,
    )


def state_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.arrow"))


def test_an_empty_local_tier_is_filled_from_the_remote_one(tmp_path: Path, counted: CounterInput) -> None:
    options = tiered(tmp_path, counted)
    counted.add(files=3)
    run_to_end(options)
    shutil.rmtree(tmp_path / "local" / "state")
    counted.add(files=2)
    run_to_end(options)
    assert read_counts(tmp_path / "table") == counted.expected()
    assert state_files(tmp_path / "local")


def test_state_that_only_an_older_remote_copy_has_is_made_again(tmp_path: Path, counted: CounterInput) -> None:
    options = tiered(tmp_path, counted)
    counted.add(files=3)
    run_to_end(options)
    late = dataclasses.replace(options.checkpoint, remote=None)
    counted.add(files=2)
    run_to_end(dataclasses.replace(options, checkpoint=late))  # the remote tier hears nothing of these
    shutil.rmtree(tmp_path / "local" / "state")
    counted.add(files=1)
    run_to_end(options)
    assert read_counts(tmp_path / "table") == counted.expected()


@pytest.mark.parametrize("how", ["rot", "cut", "gone"])
def test_a_damaged_file_of_state_is_repaired_from_the_remote_tier(
    tmp_path: Path, counted: CounterInput, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = tiered(tmp_path, counted)
    counted.add(files=3, rows=30)
    run_to_end(options)
    for path in state_files(tmp_path / "local"):
        damage(path, how)
    counted.add(files=1)
    run_to_end(options)
    assert read_counts(tmp_path / "table") == counted.expected()


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "rot":
        data[len(data) // 2] ^= 0x10
    else:
        del data[-7:]
    path.write_bytes(data)


def test_damaged_state_without_another_copy_is_refused_or_made_again_never_used(
    tmp_path: Path, counted: CounterInput
) -> None:
    options = counter_options(counted.folder, tmp_path / "table")
    counted.add(files=3, rows=30)
    run_to_end(options)
    for path in state_files(tmp_path / "table" / "_firnline"):
        damage(path, "rot")
    counted.add(files=1)
    run = run_once(options)
    assert run.exit_code != 0
    assert run.error_code in ("state-damaged", "state-lost")
    assert sum(row[1] for row in read_counts(tmp_path / "table")) == 90


def test_lost_state_is_made_again_from_the_very_beginning_while_the_ledger_tells_it(
    tmp_path: Path, counted: CounterInput
) -> None:
    options = counter_options(counted.folder, tmp_path / "table")
    counted.add(files=3)
    run_to_end(options)
    shutil.rmtree(tmp_path / "table" / "_firnline" / options.name / "state")
    counted.add(files=1)
    run_to_end(options)
    assert read_counts(tmp_path / "table") == counted.expected()


def test_lost_state_whose_input_changed_is_refused(tmp_path: Path, counted: CounterInput) -> None:
    options = counter_options(counted.folder, tmp_path / "table")
    counted.add(files=3)
    run_to_end(options)
    shutil.rmtree(tmp_path / "table" / "_firnline" / options.name / "state")
    (counted.folder / "f00002.json").write_text('{"key": "key-0", "number": 99}\n')
    counted.add(files=1)
    fails(options, "state-lost", "f00002.json")


# -- workers -------------------------------------------------------------------------------------------


class Losing(LocalEngine):
    """Loses the task of one shard, as if its worker had died, so many times."""

    def __init__(self, times: int, threads: int = 1) -> None:
        super().__init__(threads)
        self.times = times
        self.shards: list[int] = []

    def run(self, tag: str, orders: list[dict[str, Any]], timeout_seconds: float | None = None) -> list[dict[str, Any]]:
        folds = [order for order in orders if order["kind"] == "fold"]
        if folds:
            self.shards.append(len(folds))
        if folds and self.times:
            self.times -= 1
            super().run(tag, orders[:-1], timeout_seconds)  # the others have done their part
            orders[-1]["kind"] = "lost"
        return super().run(tag, orders, timeout_seconds)


def run_with(options: PipelineOptions, engine: Engine) -> Recorder:
    told = Recorder()
    result = Runner(open_pipeline(options, once=True), engine, told, once=True).run()
    assert result.exit_code == 0, result
    return told


@pytest.mark.parametrize(("policy", "shards"), [("replace", [3, 3, 3]), ("absorb", [3, 2, 2])])
def test_a_lost_worker_is_replaced_or_absorbed(
    tmp_path: Path, counted: CounterInput, policy: str, shards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from firnline.errors import WorkerLostError
    from firnline.jobs import worker as tasks

    def lose(order: Mapping[str, Any]) -> dict[str, Any]:
        raise WorkerLostError("the worker is gone")

    monkeypatch.setitem(tasks.KINDS, "lost", lose)
    options = counter_options(counted.folder, tmp_path / "table", shards=3, on_worker_loss=policy)
    counted.add(files=2)
    engine = Losing(1)
    run_with(options, engine)
    assert engine.shards == shards
    assert read_counts(tmp_path / "table") == counted.expected()
    counted.add(files=1)
    run_to_end(options)
    assert read_counts(tmp_path / "table") == counted.expected()


def test_absorbed_shards_are_given_back_when_workers_return(
    tmp_path: Path, counted: CounterInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    from firnline.errors import WorkerLostError
    from firnline.jobs import worker as tasks

    def lose(order: Mapping[str, Any]) -> dict[str, Any]:
        raise WorkerLostError("the worker is gone")

    monkeypatch.setitem(tasks.KINDS, "lost", lose)
    options = counter_options(counted.folder, tmp_path / "table", on_worker_loss="absorb", shards=None)
    counted.add(files=1)
    run_with(options, LocalEngine(3))
    generation = open_pipeline(options).load().generation
    counted.add(files=3)
    engine = Losing(1, threads=3)
    run_with(options, engine)
    assert engine.shards == [3, 2, 3, 3]
    held = open_pipeline(options).load()
    assert held.checkpoint is not None
    assert held.generation == generation + 3  # its own claim, one to absorb, one to give back
    assert {ref["shards"] for ref in held.checkpoint.state.values()} == {3}
    counted.add(files=1)
    run_with(options, short := Losing(1, threads=3))
    assert short.shards == [3, 2]
    counted.add(files=1)
    run_with(options, later := Losing(0, threads=3))
    assert later.shards == [3]  # a new run begins with as many as there should be
    assert read_counts(tmp_path / "table") == counted.expected()


def test_a_task_that_hangs_while_it_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firnline.jobs import read_task as task
    from firnline.jobs import worker as tasks

    wake, hung = threading.Event(), threading.Event()

    def read(order: dict[str, Any]) -> dict[str, Any]:
        if not hung.is_set():
            hung.set()
            wake.wait(120)
        return task.run_task(order)

    monkeypatch.setitem(tasks.KINDS, "read", read)
    sample = SampleInput(tmp_path / "in")
    sample.add("a.json", 5)
    told = run_with(
        pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"), job_timeout_secs=1.5, attempts=20), LocalEngine(2)
    )
    assert {error.code for error in told.troubles} == {"worker-lost"}
    wake.set()
    for thread in [t for t in threading.enumerate() if t.name.startswith("task ")]:
        thread.join(120)
    assert table_ids(tmp_path / "out") == sample.ids


def test_a_shard_that_hangs_is_given_up_and_does_no_harm_when_it_wakes(
    tmp_path: Path, counted: CounterInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    from firnline.jobs import fold_task
    from firnline.jobs import worker as tasks

    wake, hung = threading.Event(), threading.Event()
    real = fold_task.run_fold

    def fold(order: dict[str, Any]) -> dict[str, Any]:
        if not hung.is_set():
            hung.set()
            wake.wait(120)
        return real(order)

    monkeypatch.setitem(tasks.KINDS, "fold", fold)
    options = counter_options(counted.folder, tmp_path / "table", timeout_ms=1500, attempts=20)
    counted.add(files=3)
    run_with(options, LocalEngine(2))
    assert hung.is_set()
    wake.set()  # the zombie folds what it was told, long after another did
    for thread in [t for t in threading.enumerate() if t.name.startswith("task ")]:
        thread.join(120)
    counted.add(files=1)
    run_to_end(options)
    assert read_counts(tmp_path / "table") == counted.expected()


def test_an_operator_that_breaks_its_contract_is_told_and_breaks_nothing(tmp_path: Path, counted: CounterInput) -> None:
    folder = tmp_path / "operators"
    folder.mkdir()
    good = Path(counter_options(counted.folder, tmp_path / "t").operator_paths[0]) / "counters.py"
    text = good.read_text().replace("return Result(changed, state,", "return Result(changed + 1000, state,")
    (folder / "counters.py").write_text(text)
    options = counter_options(counted.folder, tmp_path / "table")
    counted.add(files=1)
    bad = dataclasses.replace(options, operator_paths=(str(folder),))
    fails(bad, "operator", "names keys that are not there")
    run_to_end(options)
    assert read_counts(tmp_path / "table") == counted.expected()


def test_a_source_that_the_checkpoint_knows_must_stay_in_the_spec(world: World) -> None:
    options = world.options(operators=[], sinks=["a", "b"])
    fill(world, range(1))
    run_to_end(options)
    only = dataclasses.replace(options, sources=options.sources[:1], sinks=options.sinks[:1])
    fails(only, "config", "'b'")


def test_sharded_rows_keep_the_order_of_the_files_however_many_tasks_read_them(tmp_path: Path) -> None:
    counted = CounterInput(tmp_path / "in", keys=3)
    counted.add(files=8, rows=40)
    options = counter_options(counted.folder, tmp_path / "table", max_files=8, shards=4)
    run_with(options, LocalEngine(4))
    assert read_counts(tmp_path / "table") == counted.expected()
