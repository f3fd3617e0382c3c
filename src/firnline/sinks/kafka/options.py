"""The options of a Kafka sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from firnline.options import MEBIBYTE, OP, OPERATIONS, SEQUENCE, FollowerOptions, StrictColumn, template_columns


@dataclass(frozen=True, slots=True)
class KafkaSinkOptions(FollowerOptions):
    """Topics of one cluster."""

    type: ClassVar[str] = "kafka"

    brokers: str  # host:port, several with commas
    topic: str  # a name, or a template with {column}
    topics_allowed: str = field(default="", kw_only=True)  # a pattern for rendered names; empty: any
    partitions: int = field(default=0, kw_only=True)  # create missing topics with so many; 0: they must exist
    value: Literal["json", "avro"] = field(default="json", kw_only=True)
    envelope: Literal["plain", "debezium"] = field(default="plain", kw_only=True)  # around change rows
    registry: Mapping[str, Any] | None = field(default=None, kw_only=True)  # of Avro values; see `SchemaRegistry`
    subject: str = field(default="{topic}-value", kw_only=True)  # of Avro values; {topic} is the topic of a row
    record_name: str = field(default="firnline.Row", kw_only=True)  # of Avro values
    lanes: int = field(default=1, kw_only=True)
    max_transaction_bytes: int = field(default=256 * MEBIBYTE, kw_only=True)
    transaction_timeout_ms: int = field(default=60_000, kw_only=True)
    tls: Mapping[str, Any] | bool | None = field(default=None, kw_only=True, repr=False)
    sasl: Mapping[str, Any] | None = field(default=None, kw_only=True, repr=False)
    client: Mapping[str, str] = field(default_factory=dict, kw_only=True)  # allowed options of the client library

    @property
    def location(self) -> str:
        return f"kafka://{self.brokers}/{self.topic}"

    @property
    def target(self) -> str:
        return f"kafka:{self.topic}"  # a cluster has many brokers, and the list may change

    @property
    def strict_columns(self) -> Mapping[str, StrictColumn]:
        if self.write != "upsert":
            return {}
        return {OP: StrictColumn("string", OPERATIONS), SEQUENCE: StrictColumn("int64")}

    @property
    def named_columns(self) -> Mapping[str, tuple[str, ...]]:
        return {"key": self.key, "topic": tuple(template_columns(self.topic))}

    def own_shape(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "topics_allowed": self.topics_allowed,
            "key": list(self.key),
            "write": self.write,
            "value": self.value,
            "lanes": self.lanes,
            **({"subject": self.subject, "record_name": self.record_name} if self.value == "avro" else {}),
        }
