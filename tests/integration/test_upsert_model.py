"""Change rows of a database that lack values, move keys and empty tables, against a model of the table."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from firnline.options import MISSING, MOVED, OP, SEQUENCE
from tests.support.upserts import UpsertDriver

KEYS, OTHERS = range(9), ("a", "b", "kind")
SCHEMA = pa.schema(
    [
        ("id", pa.int64()), ("a", pa.string()), ("b", pa.int64()), ("kind", pa.string()), (OP, pa.string()),
        (SEQUENCE, pa.int64()), (MISSING, pa.list_(pa.string())), (MOVED, pa.bool_()),
    ]
)  # fmt: skip
SEEDS = 60 if os.environ.get("FIRNLINE_PROOF") else 6
Model = dict[int, dict[str, Any]]


def draw(chance: random.Random, model: Model) -> dict[str, Any]:
    """A change: what it does, to which key, its new values, and which of those that stay the log leaves out."""
    op = chance.choices(["write", "move", "delete", "truncate"], [45, 40, 13, 2])[0]
    return {
        "op": op,
        "id": chance.choice(sorted(model) if op == "move" and model else KEYS),
        "to": chance.choice([key for key in KEYS if key not in model] or KEYS),
        "new": {"a": chance.choice(["x", "y", None]), "b": chance.randrange(9), "kind": chance.choice("kl")},
        "changed": {name for name in OTHERS if chance.random() < 0.3},
        "left_out": {name for name in OTHERS if chance.random() < 0.6},
    }


def log_of(change: dict[str, Any], model: Model) -> list[dict[str, Any]]:
    """Carry a change out in the model, and return the rows that a database logs for it."""
    key, op = change["id"], change["op"]
    if op == "truncate":
        model.clear()
        return [{OP: op, MISSING: ["id", *OTHERS]}]
    if key not in model:
        if op != "write":
            return []
        model[key] = {"id": key, **change["new"]}
        return [{**model[key], OP: "insert"}]
    if op == "delete":
        return [{"id": model.pop(key)["id"], OP: op}]
    target = change["to"] if op == "move" else key
    if op == "move" and target in model:
        return []
    lacks = sorted(change["left_out"] - change["changed"])
    row = {**model.pop(key), **{name: change["new"][name] for name in change["changed"]}, "id": target}
    model[target] = row
    logged: dict[str, Any] = {**row, **dict.fromkeys(lacks), MISSING: lacks or None}
    if op != "move":
        return [{**logged, OP: "update"}]
    return [{"id": key, OP: "delete"}, {**logged, OP: "insert", MOVED: True if lacks else None}]


@pytest.mark.parametrize("partition_by", [(), ("kind",)], ids=["plain", "partitioned"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_epoch_leaves_the_rows_of_the_database(partition_by: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    """An epoch comes in one file or in two, cut anywhere."""
    chance, model, moved = random.Random(seed), dict[int, dict[str, Any]](), 0
    driver = UpsertDriver(str(tmp_path), ["id"], partition_by=partition_by)
    for _ in range(12):
        logged = [log_of(draw(chance, model), model) for _ in range(chance.randrange(1, 12))]
        rows = [{**dict.fromkeys(SCHEMA.names), SEQUENCE: 0, **row} for one in logged for row in one]
        if not rows:
            continue
        cut = chance.randrange(len(rows) + 1)
        driver.apply(*(pa.RecordBatch.from_pylist(part, SCHEMA) for part in (rows[:cut], rows[cut:]) if part))
        moved += sum(bool(row[MOVED]) for row in rows)
        found = DeltaTable(str(tmp_path)).to_pyarrow_table().select(["id", *OTHERS]).to_pylist()
        assert sorted(found, key=lambda row: row["id"]) == [model[key] for key in sorted(model)]
    assert moved >= 5
