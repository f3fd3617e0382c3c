"""State that is large: a million keys, more than a worker may hold in memory, and keys that come far more often."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from firnline.options import FieldOptions, OperatorOptions, PipelineOptions, SchemaOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from tests.support.pipelines import pipeline_options, run_once, run_to_end
from tests.support.processes import Launcher, RunOrder

KEYS = 1_000_000
NOTE = "x" * 120  # what every key drags along


def options_of(folder: Path) -> PipelineOptions:
    (folder / "in").mkdir(exist_ok=True)
    fields = (FieldOptions("k", "int64"), FieldOptions("note", "string"))
    aggregates = [{"name": "n", "function": "count"}, {"name": "latest", "function": "max", "column": "note"}]
    settings = {"keys": ["k"], "aggregates": aggregates, "delay_us": 0, "emit": "changes", "before": False}
    operator = OperatorOptions("totals", "aggregate", ("rows",), settings, initial_state=str(folder / "first.parquet"))
    return pipeline_options(
        "",
        "",
        sources=[FileSourceOptions("rows", str(folder / "in"), schema=SchemaOptions(fields))],
        operators=[operator],
        sinks=[DeltaSinkOptions("totals", str(folder / "table"), input="totals")],
        shards=2,
    )


def add(folder: Path, name: str, keys: list[int]) -> None:
    (folder / "in").mkdir(exist_ok=True)
    lines = (json.dumps({"k": key, "note": NOTE}) for key in keys)
    (folder / "in" / name).write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose operator holds a million keys, after its first epoch."""
    folder = tmp_path_factory.mktemp("large")
    columns = {
        "k": pa.array(np.arange(KEYS)),
        "n": pa.array(np.ones(KEYS, np.int64)),
        "latest": pa.repeat(pa.scalar(NOTE), KEYS),
    }
    pq.write_table(pa.table(columns), folder / "first.parquet")
    add(folder, "f1.json", [1, 2, 3])
    run_to_end(options_of(folder))
    return folder


def changes(folder: Path, epoch: int) -> dict[int, int]:
    rows = DeltaTable(str(folder / "table")).to_pyarrow_table().to_pylist()
    return {r["k"]: r["n"] for r in rows if r["_sequence"] == epoch}


def test_a_million_keys_are_all_there_and_an_epoch_writes_what_changed(large: Path) -> None:
    assert changes(large, 1) == {1: 2, 2: 2, 3: 2}
    add(large, "f2.json", [5, 999_999, 1_000_000])
    run = run_once(options_of(large))
    facts = run.told.epochs[-1]
    assert changes(large, facts.epoch) == {5: 2, 999_999: 2, 1_000_000: 1}
    told = facts.operators["totals"]
    assert told["changed"] == 3
    assert told["bytes_written"] < 20_000
    assert told["state_bytes"] > 100_000_000


def test_keys_that_come_far_more_often_than_others(large: Path) -> None:
    add(large, "f3.json", [7] * 5000 + list(range(100, 200)))
    run = run_once(options_of(large))
    found = changes(large, run.told.epochs[-1].epoch)
    assert found[7] == 5001
    assert found[150] == 2
    assert len(found) == 101


def test_a_fold_holds_far_less_in_memory_than_the_state_is_large(large: Path, tmp_path: Path) -> None:
    add(large, "f4.json", list(range(0, KEYS, 200)))
    child = Launcher(tmp_path / "children", run_and_measure).start(options_of(large))
    assert child.wait(120).exit_code == 0, child.log()[-3000:]
    with open(f"{tmp_path}/children/child-001.memory", "rb") as stream:
        before, most, state_bytes = pickle.load(stream)
    assert state_bytes > 100_000_000
    assert most - before < state_bytes / 2


def run_and_measure(order: RunOrder) -> int:
    """In a child: how much memory of its own, which no file backs, a run takes at most."""
    before, most, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    run = run_once(order.options)
    done.set()
    thread.join()
    state = int(run.told.epochs[-1].operators["totals"]["state_bytes"])
    with open(order.log.replace(".log", ".memory"), "wb") as stream:
        pickle.dump((before, most, state), stream)
    return run.exit_code


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("this system does not tell")
