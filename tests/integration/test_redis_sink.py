"""The Redis sink against a real server: the suite of sinks, and what other clients read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firnline.sinks.redis.kind import open_sink as open_redis
from firnline.sinks.redis.options import RedisSinkOptions
from firnline.testing.sinks import OpenSink, ReadRows, SinkConformance
from tests.support.redis import RedisServer


def stream_rows(server: RedisServer, stream: str = "rows") -> list[dict[str, Any]]:
    """The entries of a stream, in order, by XRANGE."""
    return [{k.decode(): v.decode() for k, v in fields.items()} for _, fields in server.client().xrange(stream)]


class TestStream(SinkConformance):
    @pytest.fixture
    def open_sink(self, redis_server: RedisServer) -> OpenSink:
        options = RedisSinkOptions("copy", redis_server.url, stream="rows", event_id=True)
        return lambda context: open_redis(options, context)

    @pytest.fixture
    def read_rows(self, redis_server: RedisServer) -> ReadRows:
        return lambda: [{**row, "id": int(row["id"])} for row in stream_rows(redis_server)]


class TestHash(SinkConformance):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, redis_server: RedisServer) -> OpenSink:
        options = RedisSinkOptions("copy", redis_server.url, mode="hash", write="upsert", key=("id",))
        return lambda context: open_redis(options, context)

    @pytest.fixture
    def read_rows(self, redis_server: RedisServer) -> ReadRows:
        def read() -> list[dict[str, Any]]:
            client = redis_server.client()
            found = [client.hgetall(key) for key in client.keys("copy:*")]
            return [{k.decode(): int(v) if k == b"id" else v.decode() for k, v in row.items()} for row in found]

        return read


class TestString(SinkConformance):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, redis_server: RedisServer) -> OpenSink:
        options = RedisSinkOptions("copy", redis_server.url, mode="string", write="upsert", key=("id",), keys="n:{id}")
        return lambda context: open_redis(options, context)

    @pytest.fixture
    def read_rows(self, redis_server: RedisServer) -> ReadRows:
        def read() -> list[dict[str, Any]]:
            client = redis_server.client()
            return [json.loads(client.get(key)) for key in client.keys("n:*")]

        return read
