"""The kind `kafka`: topics of a Kafka cluster. Needs the extra `kafka`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sinks.base import Sink, SinkContext
    from firnline.sinks.kafka.config import KafkaSinkConfig
    from firnline.sinks.kafka.options import KafkaSinkOptions


def config_model() -> type[KafkaSinkConfig]:
    """Return the model of the sink's keys in a spec."""
    from firnline.sinks.kafka.config import KafkaSinkConfig

    return KafkaSinkConfig


def open_sink(options: KafkaSinkOptions, context: SinkContext) -> Sink:
    """Open a sink. Connects to nothing yet.

    Raises:
        MissingExtraError: the client library is not installed.
        ConfigError: an upsert has no key, neither in the spec nor from its input.
    """
    from firnline.kafka_client import load_library
    from firnline.sinks.kafka.sink import KafkaSink

    load_library()
    if options.write == "upsert":
        context.check_key(options)
    return KafkaSink(options, context)


def run_task(task: dict[str, Json]) -> dict[str, Json]:
    """Write one lane of an epoch."""
    from firnline.sinks.kafka.delivery import run_lane

    return run_lane(task)
