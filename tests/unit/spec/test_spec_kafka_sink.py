"""The keys of a Kafka sink in a spec."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from firnline.sinks.kafka.config import KafkaSinkConfig
from firnline.sinks.kafka.options import KafkaSinkOptions


def config(**keys: Any) -> KafkaSinkConfig:
    return KafkaSinkConfig.model_validate({"type": "kafka", "name": "topic", "brokers": "h:9092", "topic": "t", **keys})


def build(**keys: Any) -> KafkaSinkOptions:
    options = config(**keys).build("orders", lambda text, _: text.replace("${env:P}", "hunter2"))
    assert isinstance(options, KafkaSinkOptions)
    return options


def test_defaults() -> None:
    options = build()
    assert (options.brokers, options.topic, options.key, options.lanes) == ("h:9092", "t", (), 1)
    assert (options.partitions, options.transaction_timeout_ms, options.tls, options.sasl) == (0, 60_000, None, None)
    assert options.location == "kafka://h:9092/t"


def test_all_keys() -> None:
    options = build(
        brokers=["a:1", "b:2"],
        topic="o.{region}",
        topics_allowed=r"o\.[a-z]+",
        key=["id"],
        partitions=6,
        lanes=3,
        max_transaction_bytes="1MiB",
        transaction_timeout="2m",
        tls=True,
        sasl={"username": "u", "password": "${env:P}"},
        client={"compression.type": "zstd", "linger.ms": 20},
    )
    assert (options.brokers, options.key, options.partitions, options.lanes) == ("a:1,b:2", ("id",), 6, 3)
    assert (options.max_transaction_bytes, options.transaction_timeout_ms) == (1 << 20, 120_000)
    assert options.sasl is not None
    assert options.sasl["password"] == "hunter2"
    assert "hunter2" not in repr(options)
    assert options.client == {"compression.type": "zstd", "linger.ms": "20"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"topic": "a b"}, "cannot be a topic name"),
        ({"topic": "o.{}"}, "no template"),
        ({"topic": "o.{r"}, "no template"),
        ({"topic": "o.{r}"}, "needs a pattern"),
        ({"topics_allowed": "x"}, "only with a template"),
        ({"topic": "o.{r}", "topics_allowed": "("}, "no regular expression"),
        ({"topic": "o.{r}", "topics_allowed": "x", "exclude": ["r"]}, "not delivered"),
        ({"brokers": "nowhere"}, "no broker"),
        ({"lanes": 0}, "greater than or equal to 1"),
        ({"envelope": "debezium", "write": "upsert", "key": ["id"]}, "only with write: append"),
        (
            {"envelope": "debezium", "value": "avro", "registry": {"url": "http://localhost:8081"}},
            "only with value: json",
        ),
        ({"client": {"transactional.id": "x"}}, "may not be set"),
        ({"client": {"sasl.jaas.config": "x"}}, "may not be set"),
        ({"client": {"plugin.library.paths": "x"}}, "may not be set"),
        ({"value": "xml"}, "json"),
        ({"key": ["id"], "columns": ["v"]}, "not delivered"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**keys)


def test_the_shape_of_an_epoch_has_what_decides_its_messages() -> None:
    assert build(key=["id"], lanes=2).own_shape() == {
        "topic": "t",
        "topics_allowed": "",
        "key": ["id"],
        "write": "append",
        "value": "json",
        "lanes": 2,
    }
