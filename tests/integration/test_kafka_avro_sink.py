"""The Kafka sink with Avro values: fastavro reads them with the schemas of a registry, which a kill never confuses."""

from __future__ import annotations

import io
import json
import ssl
import struct
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest

from firnline.errors import BadRowError, SinkError, SpecError
from firnline.schema_registry import RegistryError, SchemaRegistry
from firnline.sinks.dead_letters import list_dead_letters, read_letters
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.kafka.sink import KafkaSink
from firnline.spec.loading import load_spec
from firnline.testing.sinks import OpenSink, ReadRows, SinkConformance
from tests.support.certificates import make_certificate
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import SinkRuns, kafka_sink, new_sink_name, table_and_topic
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import free_port
from tests.support.registry import Registry, running_registry
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.kafka


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as registry:
        yield registry


def avro_sink(kafka: KafkaServer, topic: str, registry: Registry, **settings: Any) -> Any:
    at = {"url": registry.url, **settings.pop("login", {})}
    return kafka_sink(kafka, topic, value="avro", registry=at, **settings)


def read_avro(kafka: KafkaServer, topic: str, registry: Registry) -> list[Any]:
    """Return the records of a topic as fastavro reads them; None for a tombstone."""
    found: list[Any] = []
    for value in kafka.values(topic):
        if value is None:
            found.append(None)
            continue
        magic, number = struct.unpack(">bI", value[:5])
        assert magic == 0
        stream = io.BytesIO(value[5:])
        schema = fastavro.parse_schema(json.loads(registry.schemas[number]["schema"]))
        found.append(fastavro.schemaless_reader(stream, schema, None))
        assert not stream.read(1)
    return found


class TestAvroSink(SinkConformance):
    """What every sink promises, with Avro values."""

    @pytest.fixture
    def topic(self, kafka: KafkaServer) -> str:
        return kafka.new_topic(3)

    @pytest.fixture
    def open_sink(self, kafka: KafkaServer, topic: str, registry: Registry) -> OpenSink:
        registry.compatibility[f"{topic}-value"] = "NONE"  # the suite's rows have columns of any type
        options = KafkaSinkOptions(
            new_sink_name(), kafka.bootstrap, topic, key=("id",), value="avro", registry={"url": registry.url}
        )  # fmt: skip
        return lambda context: KafkaSink(options, context)

    @pytest.fixture
    def read_rows(self, kafka: KafkaServer, topic: str, registry: Registry) -> ReadRows:
        return lambda: [row for row in read_avro(kafka, topic, registry) if row is not None]


def test_a_schema_grows_with_the_columns_and_stays_compatible(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    topic = kafka.new_topic()
    run = SinkRuns(tmp_path, avro_sink(kafka, topic, registry, key=("id",))).begin()
    first: list[Any] = [
        {"id": 1, "price": Decimal("1.50"), "tags": ["a", None], "at": {"city": "Bonn"}},
        {"id": 2, "price": None, "tags": None, "at": None},
    ]
    second: list[Any] = [
        {"id": 3, "price": Decimal("3.50"), "tags": ["c"], "at": {"city": None}, "more": None},
        {"id": 4, "price": None, "tags": [], "at": {"city": "Ulm"}, "more": b"\0"},
    ]
    run.apply(first)
    run.apply(second)
    run.apply(first)
    assert read_avro(kafka, topic, registry) == [*first, *second, *first]
    versions = registry.versions(f"{topic}-value")
    assert {version["name"] for version in versions} == {"Row"}
    assert all(field["default"] is None for version in versions for field in version["fields"])


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_schema_that_the_registry_refuses_makes_bad_rows(
    kafka: KafkaServer, registry: Registry, tmp_path: Path, lanes: int
) -> None:
    topic = kafka.new_topic()
    options = avro_sink(kafka, topic, registry, key=("id",), lanes=lanes, on_bad_row="dead_letter")
    runs = SinkRuns(tmp_path, options)
    run = runs.begin()
    run.apply([{"id": 1, "x": 1}])
    run.apply([{"id": n, "x": f"text {n}"} for n in range(2, 6)])  # text is no number
    run.apply([{"id": 6, "x": 6}])
    assert sorted(row["id"] for row in read_avro(kafka, topic, registry)) == [1, 6]
    [letters] = list_dead_letters(run.ledger.storage, "demo")
    found = read_letters(run.ledger.storage, letters)
    assert [letter.row for letter in found] == [0, 1, 2, 3]
    assert all("409" in letter.reason and "incompatible" in letter.reason for letter in found)
    stop = kafka_sink(kafka, topic, options.name, value="avro", registry=options.registry, key=("id",), lanes=lanes)
    run = runs.begin(stop)
    with pytest.raises(BadRowError, match="409"):
        run.apply([{"id": 7, "x": "text"}])


def test_a_registry_that_is_away_holds_rows_back_and_refuses_none(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    topic = kafka.new_topic()
    options = avro_sink(kafka, topic, registry, key=("id",), on_bad_row="dead_letter", login={"token": "hidden-word"})
    run = SinkRuns(tmp_path, options).begin()
    staged = run.stage([{"id": 1}])
    for status in (503, 401, 404, 302):
        registry.status = status
        with pytest.raises(SinkError, match=str(status)) as caught:
            run.sink.commit(staged)
        assert "hidden-word" not in f"{caught.value} {caught.value.hint}"
    assert kafka.values(topic) == []
    registry.status = 0
    run.commit(staged)
    assert read_avro(kafka, topic, registry) == [{"id": 1}]
    away = avro_sink(kafka, topic, registry, login={"url": f"http://127.0.0.1:{free_port()}"})
    with pytest.raises(SinkError, match="does not answer"):
        SinkRuns(tmp_path / "away", away).begin().sink.check()


def test_a_template_registers_one_subject_per_topic_that_is_allowed(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    name = kafka.new_topic(1)
    kafka.create_topic(f"{name}.eu")
    kafka.create_topic(f"{name}.us")
    options = avro_sink(
        kafka, name + ".{region}", registry, key=("id",), topics_allowed=rf"{name}\.(eu|us)",
        subject="rows.{topic}", record_name="shop.Order", on_bad_row="dead_letter",
    )  # fmt: skip
    registry.add("string")  # so that ids and versions differ
    run = SinkRuns(tmp_path, options).begin()
    run.apply([{"id": 1, "region": "eu"}, {"id": 2, "region": "us"}, {"id": 3, "region": "no/topic"}])
    assert [read_avro(kafka, f"{name}.{region}", registry) for region in ("eu", "us")] == [
        [{"id": 1, "region": "eu"}],
        [{"id": 2, "region": "us"}],
    ]
    assert sorted(registry.subjects) == [f"rows.{name}.eu", f"rows.{name}.us"]
    [schema] = registry.versions(f"rows.{name}.eu")
    assert (schema["namespace"], schema["name"]) == ("shop", "Order")


def test_an_upsert_deletes_with_tombstones(kafka: KafkaServer, registry: Registry, tmp_path: Path) -> None:
    topic = kafka.new_topic()
    run = SinkRuns(tmp_path, avro_sink(kafka, topic, registry, key=("id",), write="upsert")).begin()
    run.apply([{"id": 1, "_op": "insert", "_sequence": 0}, {"id": 1, "_op": "delete", "_sequence": 1}])
    assert read_avro(kafka, topic, registry) == [{"id": 1}, None]


def test_epochs_that_wait_are_delivered_as_avro_after_the_spec_says_json(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    topic = kafka.new_topic()
    options = avro_sink(kafka, topic, registry, key=("id",))
    runs = SinkRuns(tmp_path, options)
    staged = runs.begin().stage([{"id": 1}])
    without = kafka_sink(kafka, topic, options.name, key=("id",))
    with pytest.raises(SinkError, match="the spec has no registry"):
        runs.begin(without).sink.commit(staged)
    runs.begin(kafka_sink(kafka, topic, options.name, key=("id",), registry=options.registry)).sink.commit(staged)
    assert read_avro(kafka, topic, registry) == [{"id": 1}]


def test_a_registry_with_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with running_registry(context) as registry:
        number = registry.add("string")
        trusted = SchemaRegistry({"url": registry.url, "ca_file": str(certificate)})
        assert trusted.fetch(number).text == '"string"'
        with pytest.raises(RegistryError, match="certificate"):
            SchemaRegistry({"url": registry.url}).fetch(number)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("value: avro", "needs a schema registry"),
        ("value: avro, registry: {url: 'http://example.com'}", "without encryption"),
        ("value: avro, registry: {url: 'https://u:p@example.com'}", "user or a password"),
        ("value: avro, registry: {url: 'https://example.com', username: u}", "go together"),
        (
            "value: avro, registry: {url: 'https://x.com', token: '${env:T}', username: u, password: '${env:T}'}",
            "either",
        ),
        ("value: avro, record_name: a-b, registry: {url: 'https://example.com'}", "record_name"),
    ],
)
def test_registries_that_a_spec_may_not_have(tmp_path: Path, keys: str, words: str) -> None:
    spec = tmp_path / "firnline.yml"
    spec.write_text(
        "name: p\nsources:\n  s: {path: in}\nsinks:\n  - {type: delta, table: t}\n"
        f"  - {{type: kafka, brokers: 'h:1', topic: t, {keys}}}\n"
    )
    with pytest.raises(SpecError, match=words):
        load_spec(environ={"T": "token"}, cwd=tmp_path)


def test_the_whole_way_with_files(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, kafka: KafkaServer, registry: Registry
) -> None:
    topic = kafka.new_topic(2)
    options = make_options(max_files=1, sinks=table_and_topic(tmp_path, avro_sink(kafka, topic, registry)))
    for number in range(3):
        sample.add(f"{number}.json", 50)
    assert run_once(options).exit_code == 0
    assert Counter(row["id"] for row in read_avro(kafka, topic, registry)) == sample.ids
    assert table_ids(tmp_path / "table") == sample.ids
