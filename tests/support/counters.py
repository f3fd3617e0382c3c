"""Pipelines that check themselves: counters per key, whose sequence numbers show any update that went wrong.

A file holds rows `{"key": ..., "number": ...}`; the numbers of a key count up from 1 over all files, in their order.
The operator, `operators/counters.py`, records in its state every number that does not follow the one
before, and the table is read by DuckDB.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from firnline.options import FieldOptions, OperatorOptions, PipelineOptions, SchemaOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from tests.support import duck
from tests.support.pipelines import pipeline_options

OPERATORS = Path(__file__).parent / "operators"
FIELDS = (FieldOptions("key", "string"), FieldOptions("number", "int64"))


class CounterInput:
    """Files of counted rows, and what the table must say of them."""

    def __init__(self, folder: Path, seed: int = 0, keys: int = 20) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._random = random.Random(seed)
        self._keys = keys
        self._files = 0
        self.counts: Counter[str] = Counter()

    def add(self, rows: int = 10, files: int = 1) -> None:
        """Write files; some keys come often, most come now and then."""
        for _ in range(files):
            lines = []
            for _ in range(rows):
                number = min(int(self._random.expovariate(3 / self._keys)), self._keys - 1)
                key = f"key-{number}"
                self.counts[key] += 1
                lines.append(json.dumps({"key": key, "number": self.counts[key]}))
            self._files += 1
            (self.folder / f"f{self._files:05d}.json").write_text("\n".join(lines) + "\n")

    def expected(self) -> set[tuple[str, int, int, int]]:
        """Key, rows, last number and faults of every key."""
        return {(key, count, count, 0) for key, count in self.counts.items()}


def counter_options(source: Path, table: Path, **settings: Any) -> PipelineOptions:
    """The pipeline over such files; `write` and every other setting as in `pipeline_options`."""
    write = settings.pop("write", "upsert")
    operator = OperatorOptions("counters", "counters:Counters", ("rows",), {"keys": ["key"]})
    schema = SchemaOptions(FIELDS)
    options = pipeline_options(
        "",
        "",
        sources=[FileSourceOptions("rows", str(source), poll_interval_secs=0.05, schema=schema)],
        operators=[operator],
        sinks=[DeltaSinkOptions("counts", str(table), input="counters", write=write, key=("key",))],
        **{"max_files": 1, "shards": 2, **settings},
    )
    return dataclasses.replace(options, operator_paths=(str(OPERATORS),))


def read_counts(table: str | Path) -> set[tuple[str, int, int, int]]:
    """What the table says, read by DuckDB from the files that its log names; a key that is there twice shows."""
    files = DeltaTable(str(table)).file_uris()
    if not files:
        return set()
    found = duck.execute("select key, rows, last, faults from read_parquet(?)", [files]).fetchall()
    keys = Counter(row[0] for row in found)
    doubled = [key for key, count in keys.items() if count > 1]
    assert not doubled, f"keys that are there more than once: {doubled[:5]}"
    return set(found)
