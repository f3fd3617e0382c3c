"""The subject of the benchmarks of state: a pipeline that counts and sums per key, and when its epochs were true."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firnline.clock import monotonic
from firnline.options import (
    BatchOptions,
    CheckpointOptions,
    OperatorOptions,
    PipelineOptions,
    StateOptions,
    StoreOptions,
)
from firnline.run.observer import EpochFacts, Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.group import EpochPlan

OPERATOR = "totals"
SHARDS = 2
LOAD_ROWS = 1_000_000  # a file of rows that fill the state: one epoch

_TOTALS = OperatorOptions(
    OPERATOR,
    "aggregate",
    ("records",),
    {
        "keys": ["k"],
        "aggregates": [{"name": "n", "function": "count"}, {"name": "s", "function": "sum", "column": "v"}],
        "delay_us": 0,
        "emit": "changes",
        "before": False,
    },
)


# -- input ------------------------------------------------------------------------------------------------


class Keyed:
    """A folder of NDJSON files with rows `{k, v}`; the same seed gives the same rows."""

    def __init__(self, folder: Path, keys: int, seed: int = 1) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.keys = keys
        self._random = random.Random(seed)
        self._files = 0

    def load(self) -> list[Path]:
        """Every key once."""
        starts = range(0, self.keys, LOAD_ROWS)
        return [self._write(range(start, min(start + LOAD_ROWS, self.keys))) for start in starts]

    def add(self, files: int, rows: int) -> list[Path]:
        """Files of rows whose keys are drawn with equal chances."""
        return [self._write(self._random.choices(range(self.keys), k=rows)) for _ in range(files)]

    def add_distinct(self, files: int, rows: int) -> list[Path]:
        """Files in each of which a key occurs once at most."""
        return [self._write(self._random.sample(range(self.keys), rows)) for _ in range(files)]

    def _write(self, keys: Iterable[int]) -> Path:
        draw = self._random.random
        path = self.folder / f"{self._files:06}.ndjson"
        with path.open("w") as out:
            out.writelines(f'{{"k":"key-{key:08}","v":{int(draw() * 1000)}}}\n' for key in keys)
        self._files += 1
        return path


# -- runs -------------------------------------------------------------------------------------------------


@dataclass
class Told(Observer):
    """When a run came to each of its steps, in seconds since it began."""

    began: float = field(default_factory=monotonic)
    planned_at: dict[int, float] = field(default_factory=dict)
    running_at: dict[int, float] = field(default_factory=dict)
    committed_at: dict[int, float] = field(default_factory=dict)
    epochs: list[EpochFacts] = field(default_factory=list)

    def _now(self) -> float:
        return monotonic() - self.began

    def planned(self, epoch: int, plan: EpochPlan) -> None:
        self.planned_at[epoch] = self._now()

    def running(self, epoch: int) -> None:
        self.running_at[epoch] = self._now()

    def committed(self, facts: EpochFacts) -> None:
        self.committed_at[facts.epoch] = self._now()
        self.epochs.append(facts)

    @property
    def first(self) -> int:
        """The number of the run's first epoch."""
        return self.epochs[0].epoch

    def warm_seconds(self) -> list[float]:
        """From commit to commit: what every epoch but the first took."""
        at = [self.committed_at[facts.epoch] for facts in self.epochs]
        return [after - before for before, after in itertools.pairwise(at)]


def totals_options(source: Path, work: Path, *, shards: int = SHARDS, max_inflight: int = 2) -> PipelineOptions:
    """Count and sum per key; the keys that changed are appended to a Delta table, every epoch has a checkpoint."""
    return PipelineOptions(
        name="bench",
        sources=(FileSourceOptions("records", str(source)),),
        operators=(_TOTALS,),
        sinks=(DeltaSinkOptions("delta", str(work / "table"), input=OPERATOR),),
        state=StateOptions(shards=shards),
        batch=BatchOptions(max_files=1, max_inflight=max_inflight),
        checkpoint=CheckpointOptions(store=StoreOptions(path=str(work / "store"))),
    )


def run_totals(engine: Any, options: PipelineOptions, told: Told | None = None) -> Told:
    """Run until the input is exhausted, one file an epoch."""
    told = told or Told()
    result = Runner(open_pipeline(options, once=True), engine, told, once=True).run()
    if result.error is not None:
        raise result.error
    return told
