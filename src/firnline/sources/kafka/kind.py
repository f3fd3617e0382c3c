"""The kind `kafka`: topics of a Kafka cluster.

Modules are imported on demand: a driver loads no decoder, a worker no planner and no spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sources.base import PositionView, Source, Split, SplitReader
    from firnline.sources.columns import Columns
    from firnline.sources.kafka.config import KafkaSourceConfig
    from firnline.sources.kafka.options import KafkaSourceOptions


def config_model() -> type[KafkaSourceConfig]:
    """Return the model of a Kafka source's keys in a spec."""
    from firnline.sources.kafka.config import KafkaSourceConfig

    return KafkaSourceConfig


def open_source(options: KafkaSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> Source:
    """Open topics."""
    from firnline.sources.kafka.source import KafkaSource

    return KafkaSource(options, once=once, moved=moved)


def warm_up(options: KafkaSourceOptions) -> None:
    """Compile what the readers of a source need, or load it."""
    if options.value == "json":
        from firnline.ndjson import warm_up

        warm_up()
    elif options.value == "avro":
        from firnline.avro.decode import warm_up

        warm_up()


def open_reader(settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> SplitReader:
    """Open the reader of ranges of offsets."""
    from firnline.sources.kafka.reader import KafkaReader

    return KafkaReader(settings, split, columns)


def describe(position: Json) -> PositionView:
    """Describe the offsets of a position."""
    from firnline.sources.kafka.position import Position

    return Position.from_json(position).describe()
