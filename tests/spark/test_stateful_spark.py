"""Operators on real Spark: queries, shards in Python workers, workers and executors that are killed."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from deltalake import DeltaTable

from firnline.jobs.spark import SparkEngine
from firnline.options import OperatorOptions, PipelineOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from tests.support.counters import CounterInput, counter_options, read_counts
from tests.support.pipelines import Recorder, pipeline_options

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def engine() -> Iterator[SparkEngine]:
    made = SparkEngine("stateful", {"spark.master": "local[2]"})
    yield made
    made.stop()


def run(options: PipelineOptions, engine: SparkEngine) -> Recorder:
    told = Recorder()
    result = Runner(open_pipeline(options, once=True), engine, told, once=True).run()
    assert result.exit_code == 0, (result, told.troubles)
    return told


def rows_of(table: Path) -> list[dict[str, Any]]:
    return list(DeltaTable(str(table)).to_pyarrow_table().to_pylist())


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def query(name: str, text: str, *inputs: str) -> OperatorOptions:
    return OperatorOptions(name, "sql", inputs, {"query": text})


def counts(name: str, source: str, key: str) -> OperatorOptions:
    aggregates = [{"name": "n", "function": "count"}, {"name": "s", "function": "sum", "column": "v"}]
    settings = {"keys": [key], "aggregates": aggregates, "delay_us": 0, "emit": "changes", "before": False}
    return OperatorOptions(name, "aggregate", (source,), settings)


def test_queries_joins_and_state_over_two_sources(tmp_path: Path, engine: SparkEngine) -> None:
    orders, names = tmp_path / "orders", tmp_path / "names"
    write(orders, "f1.json", [{"id": n % 5, "v": n} for n in range(100)])
    write(names, "f1.json", [{"id": n, "name": f"n{n % 2}"} for n in range(5)])
    operators = [
        query("small", "select id, v from orders where v < 90", "orders"),
        query("named", "select n.name, s.v, epoch_time() as at from small s join names n using (id)", "small", "names"),
        counts("totals", "named", "name"),
    ]
    options = pipeline_options(
        "",
        "",
        sources=[FileSourceOptions("orders", str(orders)), FileSourceOptions("names", str(names))],
        operators=operators,
        sinks=[
            DeltaSinkOptions("totals", str(tmp_path / "totals"), input="totals", write="upsert"),
            DeltaSinkOptions("named", str(tmp_path / "named"), input="named"),
        ],
        shards=2,
    )
    told = run(options, engine)
    assert [facts.sources for facts in told.epochs] == [{"orders": 100, "names": 5}]
    wanted: Counter[str] = Counter()
    for n in range(90):
        wanted[f"n{n % 5 % 2}"] += n
    assert {r["name"]: r["s"] for r in rows_of(tmp_path / "totals")} == dict(wanted)
    named = rows_of(tmp_path / "named")
    assert len(named) == 90
    assert len({r["at"] for r in named}) == 1
    # An epoch that one source alone gives joins with nothing, and changes nothing.
    write(orders, "f2.json", [{"id": 1, "v": 1}])
    run(options, engine)
    assert len(rows_of(tmp_path / "named")) == 90


def test_epoch_time_is_the_same_when_state_is_made_again(tmp_path: Path, engine: SparkEngine) -> None:
    source = tmp_path / "in"
    operators = [
        query("timed", "select id, v, cast(epoch_time() as string) as at from files", "files"),
        counts("times", "timed", "at"),
    ]
    options = pipeline_options(
        str(source),
        "",
        operators=operators,
        sinks=[DeltaSinkOptions("times", str(tmp_path / "times"), input="times", write="upsert")],
        shards=2,
        trigger=TriggerOptions(every_epochs=100),
        max_files=1,
    )
    for number in range(3):
        write(source, f"f{number}.json", [{"id": n, "v": 1} for n in range(10)])
    run(options, engine)
    write(source, "f9.json", [{"id": n, "v": 1} for n in range(10)])
    run(options, engine)  # folds epochs 2 and 3 again before its own
    found = rows_of(tmp_path / "times")
    assert len(found) == 4
    assert {(r["n"], r["s"]) for r in found} == {(10, 10)}


@pytest.fixture
def counted(tmp_path: Path) -> CounterInput:
    found = CounterInput(tmp_path / "in", keys=200)
    found.add(files=4, rows=300)
    return found


def test_counters_over_many_epochs_and_another_number_of_shards(
    tmp_path: Path, counted: CounterInput, engine: SparkEngine
) -> None:
    options = counter_options(counted.folder, tmp_path / "table")
    run(options, engine)
    counted.add(files=2, rows=300)
    run(dataclasses.replace(options, state=dataclasses.replace(options.state, shards=5)), engine)
    assert read_counts(tmp_path / "table") == counted.expected()


def test_killed_python_workers_cost_an_attempt_and_nothing_else(
    tmp_path: Path, counted: CounterInput, engine: SparkEngine
) -> None:
    options = counter_options(counted.folder, tmp_path / "table", attempts=20)
    killed = 0
    done = threading.Event()

    def kill() -> None:
        nonlocal killed
        while not done.wait(0.7):
            if killed < 3:
                killed += kill_workers()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    try:
        run(options, engine)
    finally:
        done.set()
        thread.join()
    assert killed
    assert read_counts(tmp_path / "table") == counted.expected()


def kill_workers() -> int:
    """Kill this process' Spark workers, and the daemon that forks them; the JVM makes another."""
    workers = worker_processes()
    for process in workers:
        with_suppress(process)
    return 1 if workers else 0


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline()) if process.name().startswith("python") else []
    except psutil.Error:
        return []


def with_suppress(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return


def test_a_worker_that_is_stopped_while_it_reads_is_replaced(tmp_path: Path, engine: SparkEngine) -> None:
    source, table = tmp_path / "in", tmp_path / "table"
    source.mkdir()
    lines = "".join(f'{{"id": {n}, "text": "{"x" * 100}"}}\n' for n in range(300_000))
    for name in "ab":
        (source / f"{name}.json").write_text(lines)
    options = pipeline_options(str(source), str(table), worker_ping_secs=1, attempts=20)
    stopped: list[psutil.Process] = []
    done = threading.Event()

    def stop() -> None:
        while not stopped and not done.wait(0.002):
            if next((table / "_firnline" / "demo" / "exchange").glob("*/ping-*"), None) is not None:
                stopped.extend(p for p in worker_processes() if p.pid != daemon_of(p))
                for process in stopped:
                    process.suspend()

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    try:
        told = run(options, engine)
    finally:
        done.set()
        thread.join()
        for process in stopped:
            with_suppress(process)
    assert stopped
    assert [str(error) for error in told.troubles if "was silent" in error.message]
    assert DeltaTable(str(table)).to_pyarrow_table(columns=["id"]).num_rows == 600_000


def worker_processes() -> list[psutil.Process]:
    """This process' Spark workers, and the daemons that fork them."""
    found = [p for p in psutil.Process().children(recursive=True) if "pyspark" in " ".join(cmdline(p))]
    return [p for p in found if "daemon" in " ".join(cmdline(p)) or "worker" in " ".join(cmdline(p))]


def daemon_of(process: psutil.Process) -> int:
    """The daemon that forked a worker; its own id for a daemon."""
    parent = process.parent()
    return parent.pid if parent is not None and "pyspark" in " ".join(cmdline(parent)) else process.pid


def test_a_task_that_hangs_past_its_time_is_given_up(
    tmp_path: Path, counted: CounterInput, engine: SparkEngine
) -> None:
    folder = tmp_path / "operators"
    folder.mkdir()
    text = (Path(counter_options(counted.folder, tmp_path).operator_paths[0]) / "counters.py").read_text()
    flag = tmp_path / "hung"
    hang = (
        f"        import os, time\n        if not os.path.exists({str(flag)!r}):\n"
        f"            open({str(flag)!r}, 'w').close()\n            time.sleep(600)\n"
    )
    marker = "    def fold(self, batch: Batch, context: EpochContext) -> Result:\n"
    (folder / "counters.py").write_text(text.replace(marker, marker + hang))
    options = counter_options(counted.folder, tmp_path / "table", timeout_ms=6000, attempts=20)
    told = run(dataclasses.replace(options, operator_paths=(str(folder),)), engine)
    assert flag.exists()
    assert any(error.code == "worker-lost" for error in told.troubles)
    assert read_counts(tmp_path / "table") == counted.expected()


@pytest.mark.parametrize("policy", ["replace", "absorb"])
def test_a_killed_executor_is_replaced_or_absorbed(tmp_path: Path, counted: CounterInput, policy: str) -> None:
    """In a process of its own: one session per process, and this one is a little cluster."""
    from tests.support.processes import Launcher

    options = counter_options(counted.folder, tmp_path / "table", on_worker_loss=policy, attempts=20)
    options = dataclasses.replace(options, spark={"spark.master": "local-cluster[2,1,1024]"})
    child = Launcher(tmp_path / "children").start(options, spark=True)
    child.wait_for("committed epoch 1", 400)
    executors = [
        p
        for p in psutil.Process(child.pid).children(recursive=True)
        if "CoarseGrainedExecutorBackend" in " ".join(all_words(p))
    ]
    assert executors
    os.kill(executors[0].pid, signal.SIGKILL)
    counted.add(files=2, rows=300)
    ended = child.wait(400)
    assert ended.exit_code == 0, child.log()[-4000:]
    deadline = time.monotonic() + 120
    while read_counts(tmp_path / "table") != counted.expected() and time.monotonic() < deadline:
        Launcher(tmp_path / "more").run(options)
    assert read_counts(tmp_path / "table") == counted.expected()


def all_words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
