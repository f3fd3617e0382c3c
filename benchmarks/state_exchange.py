"""How rows come to the task of their shard: by exchange files between two jobs, or by a shuffle within one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.cases import Row, World
from benchmarks.turns import in_turns, p50, round_off
from firnline.exchange import Edge
from firnline.state.keys import shard_ranges
from firnline.types import Json

SHARDS = 2
GROUPS = 128
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
ROUNDS = 5

Batches = Iterator[pa.RecordBatch]
Sums = tuple[int, int]


def exchange_choice(world: World) -> list[Row]:
    """The same rows, read from the same Arrow files and added up by the same fold, on both ways."""
    result = []
    session = world.engine.session
    for most in (100_000, 1_000_000):
        rows = max(1000, int(most * world.scale))
        paths = [_write(world.folder / f"rows-{rows}-{part}.arrow", rows // SHARDS, part) for part in range(SHARDS)]
        place = {"root": str(world.folder), "storage_options": {}, "folder": f"exchange-{rows}"}

        def by_files(paths: list[str] = paths, place: dict[str, Json] = place) -> Sums:
            return _by_files(session, paths, place)

        def by_shuffle(paths: list[str] = paths) -> Sums:
            return _by_shuffle(session, paths)

        found = by_files()
        assert found == by_shuffle()
        assert found[0] == rows // SHARDS * SHARDS
        works: list[Callable[[], object]] = [by_files, by_shuffle]
        files, shuffle = (p50(times) for times in in_turns(works, rounds=world.rounds(ROUNDS), each=2))
        name = f"{rows:,} rows to their shards by files, beside repartitionById"
        result.append(Row(name, round_off(files), "ms", round_off(shuffle), shuffle / files))
    return result


def _write(path: Path, rows: int, seed: int) -> str:
    draw = np.random.default_rng(seed)
    keys = [f"key-{key:08}" for key in draw.integers(0, 1_000_000, rows).tolist()]
    table = pa.table([pa.array(keys), pa.array(draw.integers(0, 1000, rows))], schema=SCHEMA)
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, SCHEMA) as writer:
        writer.write_table(table, max_chunksize=64 * 1024)
    return str(path)


def _edge() -> Edge:
    ranges = tuple((first, last) for first, last in shard_ranges(GROUPS, SHARDS))
    return Edge("totals<rows", ("k",), ranges, GROUPS)


def _by_files(session: Any, paths: list[str], place: dict[str, Json]) -> Sums:
    """One job writes the rows of every shard, the next reads them."""
    tasks = session.range(0, len(paths), 1, len(paths))
    reports = [json.loads(row.report) for row in tasks.mapInArrow(_dealer(paths, place), "report string").collect()]
    files = [file for report in reports for file in report["files"]]
    shards = session.range(0, SHARDS, 1, SHARDS)
    return _total(shards.mapInArrow(_folder_of_files(files, place), "rows long, total long").collect())


def _by_shuffle(session: Any, paths: list[str]) -> Sums:
    """One job: the rows go through the JVM, which sends each to its partition."""
    tasks = session.range(0, len(paths), 1, len(paths)).mapInArrow(_marker(paths), "k string, v long, shard int")
    dealt = tasks.repartitionById(SHARDS, "shard")
    return _total(dealt.mapInArrow(_folder_of_rows(), "rows long, total long").collect())


def _total(found: list[Any]) -> Sums:
    return sum(row.rows for row in found), sum(row.total for row in found)


# What workers call is made in functions, and travels by value.


def _dealer(paths: list[str], place: dict[str, Json]) -> Any:
    edge = _edge().to_json()

    def deal(batches: Batches) -> Batches:
        import pyarrow

        from firnline.exchange import Edge, ExchangeWriter

        for batch in batches:
            for number in batch.column(0).to_pylist():
                writer = ExchangeWriter(Edge.from_json(edge), place)
                for rows in pyarrow.ipc.open_file(pyarrow.memory_map(paths[number])).read_all().to_batches():
                    writer.write(rows)
                yield pyarrow.RecordBatch.from_pydict({"report": [json.dumps(writer.close())]})

    return deal


def _folder_of_files(files: list[dict[str, Json]], place: dict[str, Json]) -> Any:
    columns = SCHEMA

    def fold(batches: Batches) -> Batches:
        import pyarrow
        import pyarrow.compute

        from firnline.exchange import read_exchange

        for batch in batches:
            for shard in batch.column(0).to_pylist():
                parts = list(read_exchange(place, files, columns, shard))
                total = sum(pyarrow.compute.sum(part.column(1)).as_py() for part in parts)
                counted = sum(part.num_rows for part in parts)
                yield pyarrow.RecordBatch.from_pydict({"rows": [counted], "total": [total]})

    return fold


def _marker(paths: list[str]) -> Any:
    edge = _edge()
    ranges, groups = edge.ranges, edge.groups

    def mark(batches: Batches) -> Batches:
        import pyarrow

        from firnline.state.keys import encode_keys, key_groups_of, shard_of

        for batch in batches:
            for number in batch.column(0).to_pylist():
                table = pyarrow.ipc.open_file(pyarrow.memory_map(paths[number])).read_all().combine_chunks()
                found = key_groups_of(encode_keys(table.select(["k"]), table.num_rows), groups)
                shards = pyarrow.array(shard_of(found, ranges).astype("int32"))
                yield from table.append_column("shard", shards).to_batches()

    return mark


def _folder_of_rows() -> Any:
    def fold(batches: Batches) -> Batches:
        import pyarrow
        import pyarrow.compute

        counted = total = 0
        for batch in batches:
            counted += batch.num_rows
            total += pyarrow.compute.sum(batch.column(1)).as_py() or 0
        yield pyarrow.RecordBatch.from_pydict({"rows": [counted], "total": [total]})

    return fold
