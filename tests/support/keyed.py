"""Keyed input and pipelines with operators for tests; what their tables must hold is told by a run without trouble."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from firnline.options import FieldOptions, OperatorOptions, PipelineOptions, SchemaOptions
from firnline.sinks.delta.options import DeltaSinkOptions, delta_tables
from tests.support import duck
from tests.support.pipelines import pipeline_options, run_to_end

COUNTS = [{"name": "n", "function": "count"}, {"name": "total", "function": "sum", "column": "v"}]
SECOND = 1_000_000

TOTALS = OperatorOptions("totals", "aggregate", ("files",), {"keys": ["k"], "aggregates": COUNTS})
FIRSTS = OperatorOptions("firsts", "deduplicate", ("files",), {"keys": ["k", "v"]})
FIRST_TOTALS = replace(TOTALS, inputs=("firsts",))
WINDOWS = OperatorOptions(
    "windows",
    "aggregate",
    ("files",),
    {"keys": ["k"], "aggregates": COUNTS, "time": "at", "window": {"size_us": 60 * SECOND}, "delay_us": 5 * SECOND},
)
SCHEMA = SchemaOptions((FieldOptions("k", "string"), FieldOptions("v", "int64"), FieldOptions("at", "timestamp")))
GRAPHS: Mapping[str, tuple[OperatorOptions, ...]] = {
    "one operator": (TOTALS,),
    "two operators": (FIRSTS, FIRST_TOTALS),
    "windows": (WINDOWS,),
}


class KeyedInput:
    """A folder of files whose records have a key, a value and an event time; one file is one epoch."""

    def __init__(self, folder: Path, seed: int = 0, keys: int = 7) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._random = random.Random(seed)
        self._keys = keys
        self.files = 0

    def add(self, records: int = 6) -> Path:
        """A new file, after all others. Event time goes on by half a minute a file, and some records are late."""
        self.files += 1
        lines = []
        for _ in range(records):
            second = max(0, 30 * self.files - self._random.choice([0, 1, 2, 3, 200]))
            at = f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"
            record = {"k": f"k{self._random.randrange(self._keys)}", "v": self._random.randrange(20), "at": at}
            lines.append(json.dumps(record))
        path = self.folder / f"f{self.files:05d}.json"
        path.write_text("\n".join(lines) + "\n")
        return path


def keyed_options(
    folder: Path, operators: tuple[OperatorOptions, ...] = (TOTALS,), *, table: str = "out", **settings: Any
) -> PipelineOptions:
    """A pipeline from `in` through operators into a table that holds the last one's answers, one file an epoch."""
    sink = DeltaSinkOptions("delta", str(folder / table), input=operators[-1].name, write="upsert")
    settings = {"max_files": 1, "shards": 2, "schema": SCHEMA, "sinks": (sink,), **settings}
    return pipeline_options(str(folder / "in"), sink.table, operators=operators, **settings)


def answers(table: str | Path) -> list[tuple[Any, ...]]:
    """Every row of a table of answers, in order: the log read by delta-rs, the files by DuckDB."""
    delta = DeltaTable(str(table))
    files = delta.file_uris()
    names = sorted(field.name for field in delta.schema().fields)
    if not files:
        return []
    columns = ", ".join(f'"{name}"' for name in names)
    query = f"select {columns} from read_parquet({[str(f) for f in files]!r}, union_by_name=true) order by all"
    rows: list[tuple[Any, ...]] = duck.execute(query).fetchall()
    return rows


def answers_without_trouble(folder: Path, options: PipelineOptions, table: str = "untroubled") -> list[tuple[Any, ...]]:
    """What the table holds after one run over the same input, into a table of its own, in which nothing went wrong."""
    sinks = tuple(replace(sink, table=str(folder / f"{table}-{sink.name}")) for sink in delta_tables(options.sinks))
    checkpoint = replace(options.checkpoint, store=None, local=None, remote=None)
    run_to_end(replace(options, sinks=sinks, checkpoint=checkpoint))
    return answers(sinks[0].location)


def run_epochs(keyed: KeyedInput, options: PipelineOptions, epochs: int) -> None:
    """Add a file per epoch, then run once over all of them."""
    for _ in range(epochs):
        keyed.add()
    run_to_end(options)


def run_each_epoch(keyed: KeyedInput, options: PipelineOptions, epochs: int) -> None:
    """Add a file and run, for each epoch."""
    for _ in range(epochs):
        run_epochs(keyed, options, 1)
