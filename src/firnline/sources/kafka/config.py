"""The keys of a Kafka source in a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import Flag, ReadSecret, Seconds, differ, fail
from firnline.config.kafka import (
    Brokers,
    ClientOption,
    RegistryConfig,
    SaslConfig,
    TlsConfig,
    Topic,
    check_client_options,
    check_registry,
)
from firnline.config.secrets import MaskedDict
from firnline.kafka_client import CONSUMER_OPTIONS, security_settings
from firnline.options import SourceOptions
from firnline.sources.config import SourceConfig
from firnline.sources.kafka.options import KafkaSourceOptions

Included = Literal["key", "headers", "timestamp", "topic", "partition", "offset"]


class KafkaSourceConfig(SourceConfig):
    """A Kafka source: reads the committed records of topics."""

    other_words: ClassVar[dict[str, str]] = {
        "bootstrap_servers": "brokers", "bootstrap": "brokers", "topic": "topics", "subscribe": "topics",
        "starting_offsets": "start", "auto_offset_reset": "start", "group_id": "group", "fail_on_data_loss": "on_gap",
        "format": "value", "schema_registry": "registry",
    }  # fmt: skip
    options_class = KafkaSourceOptions
    batch_defaults: ClassVar[Mapping[str, int]] = {"max_events": 100_000, "max_bytes": 64 * 1024 * 1024, "max_ms": 200}

    type: Literal["kafka"] = Field(default="kafka", description="Kind of source.")
    brokers: Brokers = Field(description="Brokers to begin with: host:port, several with commas or as a list.")
    topics: tuple[Topic, ...] = Field(default=(), description="Topics to read.")
    pattern: str = Field(
        default="",
        description="Instead of topics: a regular expression for whole topic names. Topics that appear later are read "
        "from their beginning.",
    )
    start: str = Field(
        default="earliest",
        description="Where a topic begins that no epoch has read: earliest, latest, or a time (RFC 3339, with a zone): "
        "the first record at or after it. New partitions of a known topic are always read from their beginning.",
    )
    value: Literal["json", "avro", "raw"] = Field(
        default="json",
        description="json: each value is a JSON object whose fields become columns, as in files; avro: an Avro record "
        "with the id of its schema in the registry, whose fields become columns; raw: the bytes go into one column "
        "named value.",
    )
    registry: RegistryConfig | None = Field(default=None, description="The schema registry of Avro values.")
    include: tuple[Included, ...] = Field(
        default=(),
        description="Facts about records that become columns: key, headers, timestamp, topic, partition and offset, in "
        "the columns _key, _headers, _timestamp, _topic, _partition and _offset.",
    )
    key: Literal["text", "raw"] = Field(
        default="text",
        description="The column _key: text (a record whose key is not UTF-8 is a bad record), or raw bytes.",
    )
    tombstones: Literal["row", "skip"] = Field(
        default="row",
        description="A record without a value: row makes a row without values, skip leaves it out.",
    )
    on_gap: Literal["fail", "continue"] = Field(
        default="fail",
        description="Records that the broker lost or deleted before they were read (retention, a topic that was "
        "deleted and created again): fail stops the run and names them, continue logs them and reads on.",
    )
    group: str | None = Field(
        default=None,
        description="Consumer group in which acknowledged offsets are committed, for tools that show its lag; never "
        "read. Default: firnline-<pipeline>. Empty: none.",
    )
    tls: TlsConfig | Flag | None = Field(
        default=None, description="Encrypted connections: true, or certificates and keys. Default: not encrypted."
    )
    sasl: SaslConfig | None = Field(default=None, description="How to log in.")
    client: dict[str, ClientOption] = Field(
        default={}, description="Options of the client library (librdkafka), of a fixed list."
    )
    poll_interval_secs: Seconds = Field(default=0.1, description="Seconds between two looks for new records.")

    @field_validator("topics")
    @classmethod
    def _topics_differ(cls, topics: tuple[str, ...]) -> tuple[str, ...]:
        return differ(topics, "topic")

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise fail(f"is no regular expression: {error}") from None
        return pattern

    @field_validator("start")
    @classmethod
    def _start_is_known(cls, start: str) -> str:
        if start in ("earliest", "latest"):
            return start
        try:
            time = datetime.fromisoformat(start)
        except ValueError:
            raise fail(f'"{start}" is neither earliest nor latest nor a time such as 2024-05-01T12:00:00Z') from None
        if time.tzinfo is None:
            raise fail(f'the time "{start}" has no zone (write {start.replace(" ", "T")}Z for UTC)')
        return start

    @field_validator("client")
    @classmethod
    def _client_options_are_allowed(cls, client: dict[str, str]) -> dict[str, str]:
        return check_client_options(client, CONSUMER_OPTIONS)

    @model_validator(mode="after")
    def _one_way_to_name_topics(self) -> KafkaSourceConfig:
        if bool(self.topics) == bool(self.pattern):
            raise fail("give either topics or pattern", "topics")
        check_registry(self.value, self.registry)
        return self

    def build(self, name: str, read_secret: ReadSecret) -> SourceOptions:
        """Return the options of the source."""
        values: dict[str, Any] = self.plain(read_secret)
        for key in ("type", "schema_"):
            values.pop(key)
        security = security_settings(values.pop("tls"), values.pop("sasl"))
        values |= {"security": MaskedDict(security), "client": dict(self.client)}
        return KafkaSourceOptions(name=name, schema=self.schema_.build(), **values)
