"""The options of a Kafka source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from firnline.options import Home, SourceOptions


@dataclass(frozen=True, slots=True)
class KafkaSourceOptions(SourceOptions):
    """A Kafka source: reads the committed records of topics by offset ranges."""

    type: ClassVar[str] = "kafka"
    counts: ClassVar[str] = "partition"
    waits_for: ClassVar[str] = "message"

    brokers: str  # host:port, with commas
    topics: tuple[str, ...] = ()
    pattern: str = ""  # instead of `topics`: a regular expression for whole names
    start: str = "earliest"  # or latest, or an RFC 3339 time
    value: Literal["json", "avro", "raw"] = "json"
    include: tuple[str, ...] = ()  # of key, headers, timestamp, topic, partition, offset
    key: Literal["text", "raw"] = "text"
    tombstones: Literal["row", "skip"] = "row"
    on_gap: Literal["fail", "continue"] = "fail"
    group: str | None = None  # where acknowledged offsets are committed; None: firnline-<pipeline>; empty: nowhere
    security: Mapping[str, str] = field(default_factory=dict, repr=False)  # settings of the client; hold secrets
    client: Mapping[str, str] = field(default_factory=dict)
    registry: Mapping[str, Any] | None = None  # of Avro values; see `SchemaRegistry`
    poll_interval_secs: float = field(default=0.1, kw_only=True)

    @property
    def replay_obstacle(self) -> str:
        lost = [name for name in ("key", "headers", "timestamp") if name in self.include]
        return f"the quarantine does not hold the {lost[0]} of a record, which `include` names" if lost else ""

    @property
    def location(self) -> str:
        return f"/{self.pattern}/" if self.pattern else ",".join(sorted(self.topics))

    def covers(self, topic: str) -> bool:
        """Return whether the source reads a topic of this name."""
        return bool(re.fullmatch(self.pattern, topic)) if self.pattern else topic in self.topics

    def for_pipeline(self, name: str, home: Home) -> KafkaSourceOptions:
        return replace(self, group=f"firnline-{name}") if self.group is None else self
