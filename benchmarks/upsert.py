"""Upserts: 10,000 random keys into a table of 5,000,000 rows, beside MERGE of Spark with delta-spark."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from benchmarks.cases import Row, World
from benchmarks.turns import round_off
from firnline.clock import monotonic
from tests.support.upserts import UpsertDriver

ROWS = 5_000_000
KEYS = 10_000
FILES = 8
ROUNDS = 3  # counted; one more before them warms both up
AIM = 3.0


def _rows(ids: Any, word: str, rng: np.random.Generator) -> pa.Table:
    """Rows as a customer table has them."""
    count = len(ids)
    name = pc.binary_join_element_wise(pa.repeat(word, count), pa.array(ids, pa.int64()).cast(pa.string()), "-")
    updated = 1_700_000_000_000_000 + rng.integers(0, 10**12, count)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": name,
            "amount": rng.random(count) * 1000,
            "updated": pa.array(updated, pa.timestamp("us", "UTC")),
        }
    )


def _make_table(folder: Path, rows: int, rng: np.random.Generator) -> None:
    for ids in np.array_split(np.arange(rows), FILES):
        write_deltalake(folder, _rows(ids, "customer", rng), mode="append")


def _merge(spark: Any, table: Path, changed: Path) -> float:
    spark.read.parquet(str(changed)).createOrReplaceTempView("changed")
    began = monotonic()
    spark.sql(
        f"merge into delta.`{table}` as t using changed as c on t.id = c.id "
        "when matched then update set * when not matched then insert *"
    ).collect()
    return monotonic() - began


def _upsert(driver: UpsertDriver, changed: pa.Table) -> float:
    count = changed.num_rows
    marked = changed.append_column("_op", pa.repeat("update", count))
    marked = marked.append_column("_sequence", pa.repeat(pa.scalar(driver.epoch, pa.int64()), count))
    began = monotonic()
    driver.apply(*marked.combine_chunks().to_batches())
    return monotonic() - began


def _content(table: Path) -> tuple[Any, ...]:
    """Counts and sums by another reader, to compare the two tables."""
    files = [str(uri) for uri in DeltaTable(table).file_uris()]
    query = "select count(*), count(distinct id), sum(id), sum(hash(id, name, amount, updated)) from read_parquet(?)"
    found = duckdb.execute(query, [files]).fetchone()
    assert found is not None
    return tuple(found)


def upsert(world: World) -> list[Row]:
    """The same table and the same changes for both, in turns; half of a percent of the keys are new."""
    rows, keys = max(10_000, int(ROWS * world.scale)), max(100, int(KEYS * world.scale))
    rng = np.random.default_rng(7)
    mine, theirs = world.folder / "upsert-a", world.folder / "upsert-b"
    _make_table(mine, rows, rng)
    shutil.copytree(mine, theirs)
    driver = UpsertDriver(str(mine), ["id"])
    times: list[tuple[float, float]] = []
    for number in range(world.rounds(ROUNDS) + 1):
        ids = rng.choice(rows + rows // 200, keys, replace=False)
        changed = _rows(ids, f"changed{number}", rng)
        path = world.folder / f"changed-{number}.parquet"
        pq.write_table(changed, path)
        pair = (_upsert(driver, changed), _merge(world.spark, theirs, path))
        if number:
            times.append(pair)
        assert _content(mine) == _content(theirs), "the two tables differ"
    ours, peer = (statistics.median(pair[side] for pair in times) for side in (0, 1))
    ratio = statistics.median(b / a for a, b in times)
    shutil.rmtree(mine)
    shutil.rmtree(theirs)
    return [
        Row(
            f"upsert of {keys:,} keys into {rows:,} rows",
            round_off(ours),
            "s",
            round_off(peer),
            round_off(ratio),
            f">= {AIM:g} times as fast as MERGE",
            ratio >= AIM,
        )
    ]
