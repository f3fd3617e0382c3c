"""The kind `redis`. Modules are imported on demand: a worker loads neither the client nor the models of a spec."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firnline.sinks.base import Sink, SinkContext
    from firnline.sinks.redis.config import RedisSinkConfig
    from firnline.sinks.redis.options import RedisSinkOptions


def config_model() -> type[RedisSinkConfig]:
    """Return the model of the keys of the kind in a spec."""
    from firnline.sinks.redis.config import RedisSinkConfig

    return RedisSinkConfig


def open_sink(options: RedisSinkOptions, context: SinkContext) -> Sink:
    """Open a sink. Connects to no server yet.

    Raises:
        ConfigError: the URL or the names of keys are invalid, or an upsert has no key.
        MissingExtraError: the Redis client is not installed.
    """
    from firnline.options import template_columns
    from firnline.sinks.redis.sink import RedisSink

    key = options.key or (context.input_key if options.write == "upsert" else ())
    key = key or (tuple(template_columns(options.keys)) if options.write == "upsert" else ())
    return RedisSink(replace(options, key=key), context)
