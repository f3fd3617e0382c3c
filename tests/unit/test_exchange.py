from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline import exchange
from firnline.errors import EngineError
from firnline.exchange import Edge, Exchanged, ExchangeWriter, read_exchange
from firnline.state.keys import encode_keys, key_groups_of, shard_of, shard_ranges

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])


def place(folder: Path) -> dict[str, Any]:
    return {"root": str(folder), "storage_options": {}, "folder": "exchange/attempt"}


def rows(keys: list[str | None]) -> pa.RecordBatch:
    at = pa.array(range(len(keys)), pa.int64()).cast(pa.timestamp("us", "UTC"))
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.string()), pa.array(range(len(keys))), at], schema=SCHEMA)


@settings(max_examples=30)
@given(st.lists(st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=20), max_size=5), st.integers(1, 6))
def test_every_row_reaches_the_shard_of_its_key_in_its_order(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[str | None]], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    ranges = tuple(shard_ranges(128, shards))
    writer = ExchangeWriter(Edge("x<a", ("k",), ranges, 128, "at"), place(folder))
    for keys in batches:
        writer.write(rows(keys))
    found = Exchanged.collect([{"exchanged": {"x<a": writer.close()}}], "x<a")
    assert found.rows == sum(map(len, batches))
    everything: list[dict[str, Any]] = []
    for shard in range(shards):
        told = [r for b in read_exchange(place(folder), found.files, SCHEMA, shard) for r in b.to_pylist()]
        for key in {r["k"] for r in told}:
            groups = key_groups_of(encode_keys(pa.table({"k": pa.array([key], pa.string())}), 1), 128)
            assert shard_of(groups, ranges)[0] == shard
        everything += told
    sent = [{"k": k, "n": n} for keys in batches for n, k in enumerate(keys)]
    for key in {r["k"] for r in sent}:
        assert [r["n"] for r in everything if r["k"] == key] == [r["n"] for r in sent if r["k"] == key]


def test_the_latest_time_is_told_and_more_rows_than_fit_make_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "FLUSH_BYTES", 200)
    writer = ExchangeWriter(Edge("x<a", ("k",), ((0, 128),), 128, "at"), place(tmp_path))
    for _ in range(4):
        writer.write(rows(["a"] * 7))
    told = writer.close()
    assert told["latest"] == 6
    assert len(told["files"]) > 1
    read = list(read_exchange(place(tmp_path), told["files"], SCHEMA))
    assert sum(b.num_rows for b in read) == 28


def test_a_column_that_only_some_files_have_is_null_in_the_others(tmp_path: Path) -> None:
    writer = ExchangeWriter(Edge("sql<a"), place(tmp_path))
    writer.write(rows(["a"]).select(["k"]))
    writer.write(rows(["b"]))
    read = [r for b in read_exchange(place(tmp_path), writer.close()["files"], SCHEMA) for r in b.to_pylist()]
    assert [(r["k"], r["n"]) for r in read] == [("a", None), ("b", 0)]


def test_a_file_that_is_gone_makes_the_epoch_run_again(tmp_path: Path) -> None:
    writer = ExchangeWriter(Edge("sql<a"), place(tmp_path))
    writer.write(rows(["a"]))
    files = writer.close()["files"]
    next((tmp_path / "exchange").rglob("*.arrow")).unlink()
    with pytest.raises(EngineError) as caught:
        list(read_exchange(place(tmp_path), files, SCHEMA))
    assert caught.value.retryable
