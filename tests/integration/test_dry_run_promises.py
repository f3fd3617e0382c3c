"""What `dry-run` accepts, a run accepts, with the promised types; what it refuses, a run refuses with the same code."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.cli.dry_run_columns import type_words
from firnline.cli.dry_run_preview import preview
from firnline.errors import FirnlineError, SchemaError
from firnline.options import FieldOptions, PipelineOptions, SchemaOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.pipelines import pipeline_options, run_once

SEEDS = range(2000) if os.environ.get("FIRNLINE_PROOF") else range(60)

NAMES = ("a", "b", "c", "d")
KINDS = ("int", "large", "fraction", "stamp", "nanos", "date", "text", "bool", "list", "object", "objects", "null")
TYPES = ("int32", "int64", "float64", "decimal(6,2)", "string", "timestamp", "date", "boolean", "json", "list<int64>")
TABLE_TYPES: tuple[pa.DataType, ...] = (
    pa.int32(),
    pa.int64(),
    pa.float64(),
    pa.string(),
    pa.timestamp("us", "UTC"),
    pa.date32(),
    pa.decimal128(6, 2),
    pa.struct([("x", pa.int64())]),
    pa.list_(pa.int64()),
)


class World:
    """A spec, its input and perhaps a table, all by chance."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rnd = folder, random.Random(seed)
        (folder / "in").mkdir()
        self._files = 0
        self._kinds: dict[str, str] = {}  # of most values of a field
        self.options = self._options()

    def _options(self) -> PipelineOptions:
        rnd = self.rnd
        declared = rnd.sample(NAMES, rnd.choice([0, 0, 0, 1, 2]))
        schema = SchemaOptions(
            tuple(FieldOptions(name, rnd.choice(TYPES), rnd.random() < 0.8) for name in declared),
            evolution=rnd.choice(["add", "add", "rescue", "fail"]),
            on_widen=rnd.choice(["rewrite", "rewrite", "rescue", "fail"]),
            infer_timestamps=rnd.random() < 0.7,
        )
        return pipeline_options(
            str(self.folder / "in"),
            str(self.folder / "out"),
            schema=schema,
            partition_by=tuple(rnd.sample([*NAMES, "region"], rnd.choice([0, 0, 0, 1, 2]))),
            on_bad_record=rnd.choice(["quarantine", "quarantine", "fail"]),
            max_bad_ratio=rnd.choice([0.5, 0.1]),
            lineage=rnd.random() < 0.2,
        )

    def add(self) -> None:
        """Write files whose columns are mostly, but not only, of one kind."""
        rnd = self.rnd
        for name in NAMES:
            before = self._kinds.get(name)
            later = [before, before, "fraction"] if before in ("int", "large", "list") else [before, rnd.choice(KINDS)]
            self._kinds[name] = rnd.choice(later) or rnd.choice(KINDS)
        kinds = {name: (self._kinds[name], rnd.choice(KINDS), rnd.choice([0, 0, 0.01, 0.3])) for name in NAMES}
        bad = rnd.choice([0, 0, 0, 0.05, 0.7])
        for _ in range(rnd.randint(1, 3)):
            lines = []
            for _ in range(rnd.choice([1, 20, 150])):
                chosen = {name: odd if rnd.random() < share else kind for name, (kind, odd, share) in kinds.items()}
                record = {name: self._value(kind) for name, kind in chosen.items() if rnd.random() < 0.9}
                lines.append("{oops" if rnd.random() < bad else json.dumps(record))
            self._files += 1
            (self.folder / "in" / f"{self._files:03}.json").write_text("\n".join(lines) + "\n")

    def _value(self, kind: str) -> Any:
        number = self.rnd.randrange(60)
        values = {
            "int": number,
            "large": 2**53 + 1 + 2 * number,
            "fraction": number + 0.5,
            "stamp": f"2024-05-01T12:30:{number:02}Z",
            "nanos": f"2024-05-01T12:30:00.0000001{number:02}Z",
            "date": f"2024-05-{1 + number % 28:02}",
            "text": f"word {number}",
            "bool": number % 2 == 0,
            "list": [number, self.rnd.choice([1, 1.5])],
            "object": {"x": number, "y": self.rnd.choice([1, "z"])},
            "objects": [{"x": number}],
        }
        return values.get(kind)

    def make_table(self) -> None:
        """Fill the table by an earlier run, or have another writer make it, or do nothing."""
        how = self.rnd.choice(["none", "run", "run", "other"])
        if how == "run":
            self.add()
            run_once(
                replace(
                    self.options,
                    sources=tuple(
                        replace(s, on_bad_record="quarantine", max_bad_ratio=1.0) for s in self.options.sources
                    ),
                )
            )
        elif how == "other":
            names = self.rnd.sample(NAMES, 2)
            columns = {name: pa.nulls(3, self.rnd.choice(TABLE_TYPES)) for name in names}
            write_deltalake(str(self.folder / "out"), pa.table({**columns, "id": pa.array([1, 2, 3], pa.int64())}))

    def types(self) -> dict[str, str]:
        schema = pa.schema(DeltaTable(str(self.folder / "out")).schema().to_arrow())
        return {field.name: type_words(field) for field in schema}


def dry_run(options: PipelineOptions) -> tuple[dict[str, Any] | None, FirnlineError | None]:
    try:
        return preview(open_pipeline(options)), None
    except FirnlineError as error:
        return None, error


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_keeps_what_dry_run_promised(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, seed)
    world.make_table()
    world.add()
    facts, error = dry_run(world.options)
    run = run_once(world.options)
    assert run.exit_code == (error.exit_code if error else 0), (error, run.result.error)
    if facts is None:
        return
    assert facts["sample"]["complete"]
    promised = {column["name"]: column["type"] for column in facts["schema"]}
    assert json_as_text(promised) == json_as_text(world.types())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"key": ("who",)}, "the key column 'who' is struct<id:int64>, which cannot identify a row"),
        ({"key": ("id",), "sequence_by": "at"}, "the sequence_by column 'at' is list<int64>, which has no order"),
    ],
)
def test_dry_run_and_run_refuse_the_same_columns_of_an_upsert(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.json").write_text('{"id": 1, "who": {"id": 1}, "at": [1]}\n')
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"), write="upsert", **settings)
    _, error = dry_run(options)
    run = run_once(options)
    assert isinstance(error, SchemaError)
    assert words in error.message
    assert isinstance(run.result.error, SchemaError)
    assert words in run.result.error.message


def json_as_text(types: dict[str, str]) -> dict[str, str]:
    """A table stores JSON text as a string."""
    return {name: kind.replace("json", "string") for name, kind in types.items()}
