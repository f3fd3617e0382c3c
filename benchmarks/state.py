"""Stateful operators: keyed totals beside Structured Streaming's, and what the size of the state costs.

Every side reads the same NDJSON files, one an epoch, on the same session with as many tasks as Firnline has shards, and
appends the keys that changed to a Delta table. The first epoch of every run is not counted, but where a start is the
subject. `FIRNLINE_PROOF=1` makes the state ten times as large.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import duckdb
from deltalake import DeltaTable

from benchmarks.cases import Row, World
from benchmarks.state_peers import BuiltIn, Transform, can_transform
from benchmarks.state_runs import OPERATOR, SHARDS, Keyed, Told, run_totals, totals_options
from benchmarks.turns import p50, round_off
from firnline.options import PipelineOptions
from firnline.run.observer import EpochFacts

ROUNDS = 3
EACH = 4  # epochs that are counted in a round; every fourth one merges segments of state
STARTS = 3
CHANGED = (1_000, 10_000, 100_000)


def _rows(world: World) -> int:
    return max(1000, int(100_000 * world.scale))


def _epochs(world: World) -> int:
    """The epochs of a round, the first of which is not counted."""
    return 1 + world.rounds(EACH)


def _keys(world: World) -> int:
    """Of the larger state."""
    return int((10_000_000 if _is_proof() else 1_000_000) * max(world.scale, 0.005))


def _is_proof() -> bool:
    return bool(os.environ.get("FIRNLINE_PROOF"))


@dataclass(frozen=True)
class Loaded:
    """A pipeline whose state holds every key of its input."""

    inputs: Keyed
    work: Path

    def options(self, shards: int = SHARDS) -> PipelineOptions:
        return totals_options(self.inputs.folder, self.work, shards=shards)


@cache
def _loaded(world: World, keys: int) -> Loaded:
    """Fill a state through the pipeline itself; cases that only need some state share it."""
    folder = world.folder / f"state-{keys}"
    found = Loaded(Keyed(folder / "in", keys), folder / "work")
    found.inputs.load()
    run_totals(world.engine, found.options())
    return found


# -- beside the peers -------------------------------------------------------------------------------------


def keyed_aggregation(world: World) -> list[Row]:
    """100,000 rows an epoch over 1,000,000 keys that the state holds already: count and sum per key.

    `transformWithState` is so slow that it gets a part of the files only.
    """
    rows, keys = _rows(world), int(1_000_000 * max(world.scale, 0.005))
    folder = world.folder / "keyed"
    inputs, fewer = Keyed(folder / "in", keys), folder / "fewer"
    options = totals_options(inputs.folder, folder / "firnline")
    built_in = BuiltIn(world.spark, inputs.folder, folder / "agg")
    transform = Transform(world.spark, fewer, folder / "transform")
    sides: dict[str, Callable[[], list[float]]] = {
        "firnline": lambda: run_totals(world.engine, options).warm_seconds(),
        "agg": built_in.run,
    }
    if can_transform():
        sides["transform"] = transform.run
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(world.rounds(ROUNDS) + 1):  # the first fills the state
        new = inputs.add(_epochs(world), rows) if number else inputs.load()
        _link(new[:2] if number else new, fewer)
        for side, run in sides.items():
            found = run()
            times[side] += found if number else []
    ours, theirs = _totals(folder / "firnline" / "table"), _totals(built_in.table)
    assert ours == theirs, (ours, theirs)
    name = f"{rows:,} rows over {keys:,} keys, per epoch"
    result = [_against(f"{name}, beside groupBy().agg()", times["firnline"], times["agg"], 1.5)]
    if "transform" in times:
        result.insert(0, _against(f"{name}, beside transformWithState", times["firnline"], times["transform"], 8))
    merged = round_off(statistics.fmean(times["firnline"]))
    return [*result, Row(f"{name}, the mean, merges included", merged, "s")]


def _against(name: str, ours: list[float], theirs: list[float], aim: float) -> Row:
    ratio = p50(theirs) / p50(ours)
    return Row(name, round_off(p50(ours)), "s", round_off(p50(theirs)), ratio, f">= {aim:g}x", ratio >= aim)


def _link(files: list[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in files:
        os.link(file, folder / file.name)


def _totals(table: Path) -> tuple[int, int, int]:
    """What a table of changes says of every key in the end, read by DuckDB: keys, rows and their sum.

    The changes on the way depend on the order in which a side reads the files; the last ones do not.
    """
    files = DeltaTable(str(table)).file_uris()
    last = "select k, max(n) as n, arg_max(s, n) as s from read_parquet(?) group by k"
    found = duckdb.execute(f"select count(*), sum(n)::bigint, sum(s)::bigint from ({last})", [files]).fetchall()
    keys, rows, total = found[0]
    return int(keys), int(rows), int(total)


# -- the size of the state --------------------------------------------------------------------------------


def state_size(world: World) -> list[Row]:
    """The same epochs on a state ten times as large."""
    rows, large = _rows(world), _keys(world)
    sizes = (large // 10, large)
    times: dict[int, list[float]] = {keys: [] for keys in sizes}
    for number in range(world.rounds(ROUNDS) + 1):
        for keys in sizes:
            pipeline = _loaded(world, keys)
            pipeline.inputs.add(_epochs(world), rows)
            found = run_totals(world.engine, pipeline.options()).warm_seconds()
            times[keys] += found if number else []
    ours, peer = p50(times[large]), p50(times[large // 10])
    ratio = ours / peer
    name = f"{rows:,} rows, per epoch, {large:,} keys against {large // 10:,}"
    return [Row(name, round_off(ours), "s", round_off(peer), ratio, "<= 1.5", ratio <= 1.5)]


class _Written(Told):
    """Adds up, at every commit, the files of state that have come since the one before."""

    def __init__(self, state: Path) -> None:
        super().__init__()
        self._state = state
        self._known = set(_files(state))
        self.bytes_written: list[int] = []

    def committed(self, facts: EpochFacts) -> None:
        super().committed(facts)
        found = _files(self._state)
        self.bytes_written.append(sum(size for file, size in found.items() if file not in self._known))
        self._known |= set(found)


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def checkpoint_bytes(world: World) -> list[Row]:
    """Epochs that change few keys and many: how much of the state is written, checkpoints included.

    One epoch is in flight, so that what is found at a commit is what that epoch wrote. Medians are without merges.
    """
    pipeline = _loaded(world, _keys(world))
    result: list[Row] = []
    per_key: dict[int, float] = {}
    for most in CHANGED:
        changed = max(100, int(most * world.scale))
        pipeline.inputs.add_distinct(2 * EACH, changed)
        told = _Written(pipeline.work / "table" / "_firnline" / "bench" / "state")
        options = totals_options(pipeline.inputs.folder, pipeline.work, max_inflight=1)
        run_totals(world.engine, options, told)
        assert {facts.operators[OPERATOR]["changed"] for facts in told.epochs} == {changed}
        written, whole = p50(told.bytes_written), int(told.epochs[-1].operators[OPERATOR]["state_bytes"])
        per_key[changed] = written / changed
        name = f"{changed:,} of {pipeline.inputs.keys:,} keys changed: written per epoch, against the whole state"
        result.append(Row(name, round_off(written / 1e6), "MB", round_off(whole / 1e6), whole / written))
        mean = round_off(statistics.fmean(told.bytes_written) / 1e6)
        result.append(Row(f"{changed:,} keys changed: the mean, merges included", mean, "MB"))
    fewest, most = min(per_key), max(per_key)
    few, many = per_key[fewest], per_key[most]
    told_as = f"bytes per changed key, {most:,} changed against {fewest:,}"
    return [*result, Row(told_as, round_off(many), "B", round_off(few), many / few, "<= 1", many <= few)]


# -- starts -----------------------------------------------------------------------------------------------


def restart(world: World) -> list[Row]:
    """A new process takes the state up: its first epoch, from plan to commit, against those that follow.

    Spark and its workers are warm by another pipeline, but have never seen this state.
    """
    pipeline = _loaded(world, _keys(world))
    firsts, warm, opened = [], [], []
    for number in range(world.rounds(STARTS)):
        pipeline.inputs.add(1 + EACH, _rows(world))
        other = Keyed(world.folder / f"other-{number}" / "in", 1000)
        other.add(3, 1000)
        work = [pipeline.inputs.folder, pipeline.work, other.folder, other.folder.parent / "work"]
        command = [sys.executable, "-m", "benchmarks.state_restart", *map(str, work)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout.splitlines()[-1])
        firsts.append(float(told["first"]))
        opened.append(float(told["opened"]))
        warm += [float(seconds) for seconds in told["warm"]]
    ratio = p50(firsts) / p50(warm)
    name = f"first epoch after a restart on {pipeline.inputs.keys:,} keys, against a warm one"
    return [
        Row(name, round_off(p50(firsts)), "s", round_off(p50(warm)), ratio, "<= 1.5", ratio <= 1.5),
        Row("from the start of that run to its first commit", round_off(p50(opened)), "s"),
    ]


def rescale(world: World) -> list[Row]:
    """From 2 shards to 4, and back: from the start of the run until its first epoch runs, and until it is true."""
    pipeline = _loaded(world, _keys(world))
    ready, done = [], []
    for _ in range(world.rounds(STARTS)):
        for shards in (2 * SHARDS, SHARDS):
            pipeline.inputs.add(1, _rows(world))
            told = run_totals(world.engine, pipeline.options(shards))
            if shards != SHARDS:
                ready.append(told.running_at[told.first])
                done.append(told.committed_at[told.first])
    name = f"{SHARDS} to {2 * SHARDS} shards of {pipeline.inputs.keys:,} keys"
    took = p50(done)
    return [
        Row(f"{name}, until the first epoch runs", round_off(p50(ready)), "s"),
        Row(f"{name}, until the first epoch is committed", round_off(took), "s", aim="< 5 s", met=took < 5),
    ]
