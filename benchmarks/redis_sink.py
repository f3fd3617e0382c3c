"""The Redis sink: rows of an epoch from the outbox into a stream, beside pipelined XADD of the same fields."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

from benchmarks.cases import Row, World
from benchmarks.turns import in_turns, p50
from firnline.checkpoint.ledger import Ledger
from firnline.sinks.redis.kind import open_sink
from firnline.sinks.redis.options import RedisSinkOptions
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, SinkDriver
from tests.support.redis import RedisServer, running_redis

ROWS, ROUNDS, CHUNK = 100_000, 5, 1000
AIM = 0.9


def redis_sink(world: World) -> list[Row]:
    """Rows per second, with the encoding on our side, and with fields that are text already on the other."""
    count = max(1000, int(ROWS * world.scale))
    rows: list[dict[str, Any]] = [
        {"id": n, "name": f"customer {n}", "amount": n / 7, "city": f"c{n % 97}", "paid": n % 3 == 0}
        for n in range(count)
    ]
    texts = [{name: str(value) for name, value in row.items()} for row in rows]
    folder = world.folder / "redis"
    folder.mkdir()
    with running_redis() as server:
        ledger = Ledger(LocalStorage(str(folder)), PIPELINE)
        options = RedisSinkOptions("copy", server.url, stream="ours")
        driver = SinkDriver(lambda context: open_sink(options, context), ledger, generation=1)
        files, schema = driver.stage_rows(rows, "a" * 16)

        def ours() -> None:
            commit = driver.stage([])
            driver.commit(replace(commit, files=files, schema=schema))
            server.client().delete("ours")

        ours_ms, theirs_ms = in_turns([ours, lambda: _xadd(server, texts)], rounds=world.rounds(ROUNDS), each=1)
    shutil.rmtree(folder)
    ours_rate, theirs_rate = (count * 1000 / p50(times) for times in (ours_ms, theirs_ms))
    ratio = ours_rate / theirs_rate
    return [
        Row("redis stream: rows", round(ours_rate), "per s", round(theirs_rate), ratio, f">= {AIM:g}x", ratio >= AIM)
    ]


def _xadd(server: RedisServer, rows: list[dict[str, Any]]) -> None:
    client: Any = server.client()
    for start in range(0, len(rows), CHUNK):
        pipeline = client.pipeline(transaction=False)
        for row in rows[start : start + CHUNK]:
            pipeline.xadd("theirs", row)
        pipeline.execute()
    client.delete("theirs")
