"""Redis sinks in tests: their rows as another client reads them, and pipelines from files to a table and a sink."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.redis.options import RedisSinkOptions
from tests.support.pipelines import MakeOptions
from tests.support.redis import RedisServer

SMALL_RANGES = {"firnline.sinks.redis.sink:RANGE_ROWS": 40}
STREAM: dict[str, Any] = {"stream": "rows"}
HASH: dict[str, Any] = {"mode": "hash", "write": "upsert", "key": ("id",), "keys": "row:{id}"}


def stream_entries(server: RedisServer, stream: str = "rows") -> list[tuple[str, dict[str, str]]]:
    """The entries of a stream in order: id and fields."""
    client: Any = server.client()
    found = client.xrange(stream)
    return [(number.decode(), {k.decode(): v.decode() for k, v in fields.items()}) for number, fields in found]


def hashes(server: RedisServer, pattern: str = "row:*") -> dict[str, dict[str, str]]:
    """Every hash whose key fits a pattern."""
    client: Any = server.client()
    return {
        key.decode(): {k.decode(): v.decode() for k, v in client.hgetall(key).items()} for key in client.keys(pattern)
    }


def redis_ids(server: RedisServer, mode: str) -> Counter[int]:
    """How often each `id` is in the sink."""
    rows = [row for _, row in stream_entries(server)] if mode == "stream" else hashes(server).values()
    return Counter(int(row["id"]) for row in rows)


def check_order(server: RedisServer) -> None:
    """The ids of a stream are epoch and row: every epoch is there from its first row on, without a gap."""
    places: dict[int, list[int]] = {}
    for number, _ in stream_entries(server):
        epoch, row = map(int, number.split("-"))
        places.setdefault(epoch, []).append(row)
    assert all(rows == list(range(len(rows))) for rows in places.values()), places
    assert list(places) == sorted(places)


def to_redis(
    make_options: MakeOptions, folder: Path, url: str, copy: dict[str, Any] | None = None, **settings: Any
) -> PipelineOptions:
    """A pipeline from files to a Delta table, which decides, and to Redis."""
    sink = RedisSinkOptions("copy", url, **(STREAM if copy is None else copy))
    return make_options(
        **{"max_files": 1, "sinks": (DeltaSinkOptions("table", str(folder / "table")), sink), **settings}
    )
