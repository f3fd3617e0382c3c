"""The keys of a Kafka sink in a spec."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from firnline.config.fields import ColumnName, Count, Duration, Endpoint, Flag, ReadSecret, Size, fail
from firnline.config.kafka import (
    Brokers,
    ClientOption,
    RegistryConfig,
    SaslConfig,
    TlsConfig,
    check_client_options,
    check_registry,
    check_topic,
)
from firnline.config.units import size_text
from firnline.kafka_client import PRODUCER_OPTIONS
from firnline.options import MEBIBYTE, SinkOptions, template_columns
from firnline.sinks.config import FollowerConfig, check_pattern, check_template
from firnline.sinks.kafka.options import KafkaSinkOptions

MOST_LANES = 64
_DEFAULT_BYTES = 256 * MEBIBYTE


class KafkaSinkConfig(FollowerConfig):
    """Topics of a Kafka cluster. Needs `pip install 'firnline[kafka]'`."""

    other_words: ClassVar[dict[str, str]] = {
        "bootstrap_servers": "brokers",
        "bootstrap.servers": "brokers",
        "servers": "brokers",
        "topics": "topic",
        "options": "client",
        "format": "value",
        "schema_registry": "registry",
    }
    options_class = KafkaSinkOptions
    upserts_records = True

    type: Literal["kafka"] = Field(default="kafka", description="Kind of sink.")
    brokers: Brokers = Field(description="Where the cluster is found: host:port, several as a list or with commas.")
    topic: str = Field(description="The topic, or a template such as orders.{region} that names columns.")
    topics_allowed: str = Field(
        default="",
        description="Template: a regular expression that every rendered name must match as a whole, e.g. "
        r"orders\.(eu|us); a row with another name is a bad row.",
    )
    partitions: Count | None = Field(
        default=None, description="Create missing topics with this many partitions. Default: topics must exist."
    )
    key: tuple[ColumnName, ...] = Field(
        default=(),
        description="The columns of the message key: one as text, several as a JSON object. Upsert: the columns that "
        "identify a row, by default those of the operator or of the captured table.",
    )
    value: Literal["json", "avro"] = Field(
        default="json",
        description="How a row becomes the message's value: a JSON object, or an Avro record after the id of its "
        "schema, which the run registers.",
    )
    envelope: Literal["plain", "debezium"] = Field(
        default="plain",
        description="The value of a change row: the row itself with `_op`, or the envelope of Debezium (before, after, "
        "source, op, ts_ms), keyed by the table's key.",
    )
    registry: RegistryConfig | None = Field(default=None, description="The schema registry of Avro values.")
    subject: str = Field(
        default="{topic}-value",
        min_length=1,
        description="Avro: the subject in the registry; {topic} is the topic of a row.",
    )
    record_name: str = Field(
        default="firnline.Row",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
        description="Avro: the full name of the record. Another name is another schema to readers.",
    )
    lanes: int = Field(
        default=1,
        ge=1,
        le=MOST_LANES,
        description="Producers that write an epoch at the same time, each in a transaction of its own. With more than "
        "one, an epoch is atomic per lane only.",
    )
    max_transaction_bytes: Size = Field(
        default=_DEFAULT_BYTES,
        json_schema_extra={"default": size_text(_DEFAULT_BYTES)},
        description="An epoch with more bytes goes in several transactions, each with a range of its rows.",
    )
    transaction_timeout: Duration = Field(
        default=timedelta(seconds=60),
        json_schema_extra={"default": "60s"},
        description="After this time the broker ends a transaction whose producer is gone. At most the broker's "
        "transaction.max.timeout.ms.",
    )
    tls: TlsConfig | Flag | None = Field(default=None, description="true, or keys of its own, for encrypted brokers.")
    sasl: SaslConfig | None = Field(default=None, description="How to log in.")
    client: dict[str, ClientOption] = Field(
        default={},
        description="Options of librdkafka: " + ", ".join(sorted(PRODUCER_OPTIONS)) + ".",
    )

    @field_validator("topic")
    @classmethod
    def _topic_is_a_name(cls, topic: str) -> str:
        check_template(topic)
        check_topic(re.sub(r"\{[^{}]+\}", "x", topic))
        return topic

    @field_validator("topics_allowed")
    @classmethod
    def _pattern_is_valid(cls, pattern: str) -> str:
        return check_pattern(pattern)

    @field_validator("client")
    @classmethod
    def _options_are_allowed(cls, options: dict[str, str]) -> dict[str, str]:
        return check_client_options(options, PRODUCER_OPTIONS)

    @model_validator(mode="after")
    def _key_fits_write(self) -> KafkaSinkConfig:
        return self  # an append may have a key, too

    @model_validator(mode="after")
    def _envelope_fits(self) -> KafkaSinkConfig:
        if self.envelope == "debezium" and self.value != "json":
            raise fail("only with value: json", "envelope")
        if self.envelope == "debezium" and self.write != "append":
            raise fail(
                "only with write: append: an upsert writes whole rows and tombstones",
                "envelope",
                hint="Remove `write: upsert`; the messages keep the key of their row.",
            )
        return self

    @model_validator(mode="after")
    def _avro_has_a_registry(self) -> KafkaSinkConfig:
        check_registry(self.value, self.registry, alone=True)
        return self

    @model_validator(mode="after")
    def _template_fits(self) -> KafkaSinkConfig:
        columns = template_columns(self.topic)
        if columns and not self.topics_allowed:
            raise fail(
                "a topic with a template needs a pattern for the names that rows may give",
                "topics_allowed",
                hint=r"For example `topics_allowed: orders\.[a-z]+`.",
            )
        if self.topics_allowed and not columns:
            raise fail("only with a template in topic, such as orders.{region}", "topics_allowed")
        self.check_delivered("topic", columns)
        return self

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("topic", f"kafka://{','.join(sorted(self.brokers.split(',')))}/{self.topic}")

    def build(self, input_name: str, read_secret: ReadSecret) -> SinkOptions:
        values = self.follower_values(read_secret)
        values["transaction_timeout_ms"] = values.pop("transaction_timeout") // timedelta(milliseconds=1)
        return self.options_class(**{**values, "partitions": self.partitions or 0, "input": input_name})
