"""Upserts killed at every point that they reach, beside another writer's OPTIMIZE: the table is that of the changes.

These tests cover the fault points of `upsert.rewrite`; `test_fault_points.py` covers those that every run reaches.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.maintenance.gc import gc
from tests.support.ageing import DAY, age_table
from tests.support.kills import count_points, in_proof, kill, perform, spread
from tests.support.processes import KILLED
from tests.support.upserts import UpsertDriver, changes, read_by_delta, read_by_duckdb

pytestmark = pytest.mark.crash

SCHEMA = pa.schema([("id", pa.int64()), ("p", pa.string()), ("v", pa.string())])
WIDE = pa.schema([*SCHEMA, ("w", pa.int64())])
MOST_KILLS = in_proof(None)
CALLS = (
    "delta.create", "delta.evolve", "delta.commit", "delta.sync",
    "storage.folder", "storage.put", "storage.publish", "storage.delete", "stage.file", "upsert.rewrite",
)  # fmt: skip
POINTS = [f"{call}.{side}" for call in CALLS for side in ("before", "after")]

# Per epoch its changes: inserts, updates that move rows to another partition, deletes, a column that comes later.
EPOCHS: list[list[dict[str, Any]]] = [
    [{"id": n, "p": f"p{n % 2}", "v": "a"} for n in range(6)],
    [{"id": 1, "p": "p0", "v": "b"}, {"id": 2, "_op": "delete"}, {"id": 9, "p": "p1", "v": "b"}],
    [{"id": 9, "p": "p1", "v": "c", "w": 1}, {"id": 0, "p": "p0", "v": "c", "w": 2}, {"id": None, "v": "c"}],
    [{"id": None, "_op": "delete"}, {"id": 2, "p": "p1", "v": "d"}, {"id": 5, "_op": "delete"}],
]
FOREIGN = {100 + number: (100 + number, "p0", "foreign", None) for number in range(len(EPOCHS))}


def expected() -> dict[Any, tuple[Any, ...]]:
    rows: dict[Any, tuple[Any, ...]] = {}
    for epoch in EPOCHS:
        for row in epoch:
            rows[row["id"]] = tuple(row.get(name) for name in WIDE.names)
            if row.get("_op") == "delete":
                del rows[row["id"]]
    return rows


def disturb(table: str, epoch: int) -> None:
    """Another writer, just before our commit: it appends a row of its own, once, and compacts everything."""
    delta = DeltaTable(table)
    done = pa.table(delta.to_pyarrow_table()).column("id").to_pylist()
    if 99 + epoch not in done:
        schema = pa.schema(delta.schema().to_arrow())
        row = dict(zip(WIDE.names, FOREIGN[99 + epoch], strict=True))
        rows = pa.Table.from_pylist([{name: row[name] for name in schema.names}], schema=schema)
        write_deltalake(table, rows, mode="append")
    DeltaTable(table).optimize.compact()


def operate(table: str) -> None:
    """In a process of its own: go on from the epoch that the table holds."""
    driver = UpsertDriver(table, ["id"], partition_by=("p",), floor_behind=1)
    exchange, disturbed = driver.sink.table.exchange, set()

    def hooked(*arguments: Any, **named: Any) -> int:
        if driver.epoch not in disturbed:
            disturbed.add(driver.epoch)
            disturb(table, driver.epoch + 1)
        return exchange(*arguments, **named)

    driver.sink.table.exchange = hooked  # type: ignore[method-assign]
    while driver.epoch < len(EPOCHS):
        schema = SCHEMA if driver.epoch < 2 else WIDE
        driver.apply(changes(EPOCHS[driver.epoch], schema, driver.epoch))


def check(table: str, where: str) -> None:
    wanted = sorted([*expected().values(), *FOREIGN.values()], key=repr)
    assert sorted(read_by_duckdb(table, WIDE.names, ["p"]), key=repr) == wanted, where
    assert sorted(read_by_delta(table, WIDE.names), key=repr) == wanted, where


def named_from_the_floor_on(root: Path) -> set[str]:
    """The change files that entries of epochs 3 and 4 name, those of lost attempts too."""
    entries = [p for p in (root / "_firnline" / "demo" / "ledger").glob("*.json") if int(p.name[:20]) >= 3]
    return {file["path"] for p in entries for file in json.loads(p.read_bytes())["staged"]["delta"]}


def check_swept(table: str, where: str) -> None:
    """Once everything is old, a sweep leaves what the log names and the changes from the floor on."""
    root = Path(table)
    age_table(root, 40 * DAY)
    gc(table)
    files = {str(p.relative_to(root)) for p in root.rglob("*.parquet")}
    in_log = {str(Path(uri).relative_to(root)) for uri in DeltaTable(root).file_uris()}
    assert {f for f in files if not f.startswith("_")} == in_log, where
    assert {f for f in files if f.startswith("_firnline/demo/changes/")} == named_from_the_floor_on(root), where
    check(table, where)


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How often each point is reached without a kill."""
    table = str(tmp_path_factory.mktemp("whole") / "out")
    found = count_points(operate, table)
    check(table, "without a kill")
    return found


def test_every_point_that_an_upsert_reaches_is_tried(reached: Counter[str]) -> None:
    assert set(reached) == set(POINTS)


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_point(tmp_path: Path, reached: Counter[str], point: str) -> None:
    for number in spread(reached[point], MOST_KILLS, point):
        where = f"{point}:{number}"
        table = str(tmp_path / f"out-{number}")
        kill(where, operate, table)
        count_points(operate, table)
        check(table, where)
        check_swept(table, where)


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    """Kills in the recovery of kills."""
    rng = random.Random(seed)
    table, codes = str(tmp_path / "out"), []
    points = ["upsert.rewrite", "delta.commit", "delta.sync", "stage.file", "storage.put", "storage.delete"]
    for _ in range(6):
        fault = f"{rng.choice(points)}.{rng.choice(['before', 'after'])}:{rng.randint(1, 5)}:kill"
        codes.append(perform(fault, operate, table)[0])
    assert set(codes) <= {KILLED, 0}, f"a recovery failed: {codes}"
    assert codes.count(KILLED) >= 2
    count_points(operate, table)
    check(table, f"seed {seed}")
    check_swept(table, f"seed {seed}")
