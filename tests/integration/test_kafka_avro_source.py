"""The Kafka source with Avro values: fastavro writes them, a registry has their schemas, DuckDB reads the table."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pytest

from firnline.cli.main import run_command
from firnline.errors import ConfigError, SourceError
from firnline.history.quarantine import load_quarantine
from firnline.options import BatchOptions, FieldOptions, PipelineOptions, SchemaOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.spec.build import load_options
from firnline.testing.local import run_locally
from firnline.testing.sources import AddRecords, SourceConformance, SourceDriver
from tests.support.duck import execute
from tests.support.kafka import KafkaServer
from tests.support.processes import free_port
from tests.support.registry import Registry, running_registry

pytestmark = pytest.mark.kafka

FIRST = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
SECOND = {**FIRST, "fields": [*FIRST["fields"], {"name": "note", "type": ["null", "string"], "default": None}]}


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running_registry() as registry:
        yield registry


def avro(number: int, schema: Any, record: Any) -> bytes:
    """Return a value as Confluent's serializer makes it."""
    out = io.BytesIO()
    out.write(struct.pack(">bI", 0, number))
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), record)
    return out.getvalue()


def order(number: int, **more: Any) -> dict[str, Any]:
    return {"id": number, "price": Decimal(number) / 4, "tags": [f"t{number}"] * (number % 3), **more}


def options_of(
    kafka: KafkaServer, topic: str, registry: Registry | dict[str, Any], **settings: Any
) -> KafkaSourceOptions:
    at = {"url": registry.url} if isinstance(registry, Registry) else registry
    given = {"value": "avro", "registry": at, **settings}
    return KafkaSourceOptions("orders", brokers=kafka.bootstrap, topics=(topic,), **given)


def pipeline_of(source: KafkaSourceOptions, table: Path) -> PipelineOptions:
    batch = BatchOptions(max_events=100_000, max_bytes=64 << 20, max_ms=200)
    return PipelineOptions("p", (source,), (DeltaSinkOptions("out", str(table)),), batch=batch)


def rows_of(table: Path, columns: str) -> list[tuple[Any, ...]]:
    from deltalake import DeltaTable

    files = [uri.removeprefix("file://") for uri in DeltaTable(str(table)).file_uris()]
    return list(execute(f"SELECT {columns} FROM read_parquet({files}, union_by_name=true) ORDER BY ALL").fetchall())


def quarantined(options: PipelineOptions) -> dict[int, tuple[str, bytes]]:
    return {row["record"]: (row["reason"], row["raw"]) for row in load_quarantine(open_pipeline(options))}


class TestAvroSource(SourceConformance):
    """What every source promises, with Avro values."""

    max_batch = 20_000

    @pytest.fixture
    def options(self, kafka: KafkaServer, registry: Registry) -> KafkaSourceOptions:
        return options_of(kafka, kafka.new_topic(), registry)

    @pytest.fixture
    def elsewhere(self, kafka: KafkaServer, registry: Registry) -> KafkaSourceOptions:
        return options_of(kafka, kafka.new_topic(), registry)

    @pytest.fixture
    def add_records(self, kafka: KafkaServer, options: KafkaSourceOptions, registry: Registry) -> AddRecords:
        def add(records: Sequence[dict[str, Any]]) -> None:
            values = []
            for record in records:
                kinds = {int: "long", str: "string", float: "double", bool: "boolean"}
                fields = [{"name": name, "type": kinds[type(value)]} for name, value in record.items()]
                schema = {"type": "record", "name": "Any", "fields": fields}
                values.append(avro(registry.add(schema), schema, record))
            kafka.produce(options.topics[0], values)

        return add


def test_each_record_has_its_own_schema_and_new_fields_become_columns(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    topic = kafka.new_topic()
    first, second = registry.add(FIRST), registry.add(SECOND)
    values = [
        avro(second, SECOND, order(n, note=f"n{n}")) if n % 3 == 1 else avro(first, FIRST, order(n)) for n in range(50)
    ]
    kafka.produce(topic, [*values, None])
    options = pipeline_of(options_of(kafka, topic, registry), tmp_path / "t")
    assert run_locally(options).exit_code == 0
    wanted = [(n, Decimal(n) / 4, [f"t{n}"] * (n % 3), f"n{n}" if n % 3 == 1 else None) for n in range(50)]
    found = rows_of(tmp_path / "t", "id, price, tags, note")
    assert found == [*wanted, (None, None, None, None)]
    asked = [path for _, path in registry.requests if path.startswith("/schemas/ids/")]
    assert sorted(asked) == [f"/schemas/ids/{first}", f"/schemas/ids/{second}"]
    kafka.produce(topic, [avro(first, FIRST, order(99))])
    assert run_locally(options).exit_code == 0
    assert rows_of(tmp_path / "t", "count(*), max(id)") == [(52, 99)]


def test_what_cannot_be_decoded_goes_to_quarantine_with_its_bytes(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    topic, number = kafka.new_topic(), registry.add(FIRST)
    protobuf = registry.add({"syntax": "proto3"}, kind="PROTOBUF")
    loop = {"type": "record", "name": "Loop", "fields": [{"name": "next", "type": ["null", "Loop"]}]}
    recursive = registry.add(loop)
    registry.schemas[77] = {"schema": "[" * 100_000, "schemaType": "AVRO", "references": []}
    good = avro(number, FIRST, order(1))
    bad = {
        1: ("not-avro", b'{"id": 1}'),
        2: ("not-avro", b""),
        3: ("not-avro", b"\0\0\0"),
        4: ("not-avro", good[:-1]),
        5: ("not-avro", good + b"\0"),
        6: ("unknown-schema", b"\0\0\0\xff\xff" + good[5:]),
        7: ("unsupported-schema", struct.pack(">bI", 0, protobuf) + b"x"),
        8: ("unsupported-schema", struct.pack(">bI", 0, recursive) + b"\0"),
        9: ("invalid-utf8", avro(number, FIRST, order(1, tags=["x"]))[:-2] + b"\xff\0"),
        10: ("not-avro", b"\x01" + good[1:]),
        11: ("unsupported-schema", struct.pack(">bI", 0, 77) + b"\0"),
    }
    kafka.produce(topic, [good, *(value for _, value in bad.values()), good])
    options = pipeline_of(options_of(kafka, topic, registry, max_bad_ratio=1.0), tmp_path / "t")
    assert run_locally(options).exit_code == 0
    assert rows_of(tmp_path / "t", "id") == [(1,), (1,)]
    assert quarantined(options) == bad


def test_values_that_do_not_fit_their_column_are_rescued(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    """A declared column keeps its type; text is no number."""
    topic = kafka.new_topic()
    text = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}
    kafka.produce(topic, [avro(registry.add(FIRST), FIRST, order(1)), avro(registry.add(text), text, {"id": "x"})])
    source = options_of(kafka, topic, registry, schema=SchemaOptions(fields=(FieldOptions("id", "int64"),)))
    assert run_locally(pipeline_of(source, tmp_path / "t")).exit_code == 0
    assert rows_of(tmp_path / "t", "id, _rescued_data") == [(1, None), (None, '{"id":"x"}')]


def test_schemas_that_refer_to_others(kafka: KafkaServer, registry: Registry, tmp_path: Path) -> None:
    address = {"type": "record", "name": "shop.Address", "fields": [{"name": "city", "type": "string"}]}
    order_ = {"type": "record", "name": "shop.Order", "fields": [{"name": "to", "type": "shop.Address"}]}
    registry.register("address", address)
    number = registry.add(order_, references=[{"name": "shop.Address", "subject": "address", "version": 1}])
    out = io.BytesIO()
    names: dict[str, Any] = {}
    fastavro.parse_schema(address, named_schemas=names)
    fastavro.schemaless_writer(out, fastavro.parse_schema(order_, named_schemas=names), {"to": {"city": "Bonn"}})
    topic = kafka.new_topic()
    kafka.produce(topic, [struct.pack(">bI", 0, number) + out.getvalue()])
    assert run_locally(pipeline_of(options_of(kafka, topic, registry), tmp_path / "t")).exit_code == 0
    assert rows_of(tmp_path / "t", '"to".city') == [("Bonn",)]


@pytest.mark.parametrize(
    ("settings", "header"),
    [
        ({"username": "u", "password": "hidden-word"}, "Basic dTpoaWRkZW4td29yZA=="),
        ({"token": "hidden-word"}, "Bearer hidden-word"),
    ],
)
def test_a_registry_with_a_login(
    kafka: KafkaServer, registry: Registry, settings: dict[str, str], header: str, tmp_path: Path
) -> None:
    topic, registry.authorization = kafka.new_topic(), header
    kafka.produce(topic, [avro(registry.add(FIRST), FIRST, order(1))])
    login = {"url": registry.url, **settings}
    source = options_of(kafka, topic, login)
    assert run_locally(pipeline_of(source, tmp_path / "t")).exit_code == 0
    registry.authorization = "another"
    driver = SourceDriver(options_of(kafka, topic, {**login, "timeout_secs": 9}))
    with pytest.raises(ConfigError, match="refuses this user") as caught:
        driver.source.check()
    assert "hidden-word" not in f"{caught.value} {caught.value.hint}"


def test_a_registry_that_is_away_delays_and_quarantines_nothing(
    kafka: KafkaServer, registry: Registry, tmp_path: Path
) -> None:
    topic = kafka.new_topic()
    kafka.produce(topic, [avro(registry.add(FIRST), FIRST, order(1))])
    for settings in ({"url": f"http://127.0.0.1:{free_port()}"}, {"url": registry.url, "timeout_secs": 5}):
        registry.status = 503
        driver = SourceDriver(options_of(kafka, topic, settings))
        with pytest.raises(SourceError, match="the registry"):
            driver.source.check()
        with pytest.raises(SourceError, match="the registry"):
            driver.step(driver.source.start(None))
    registry.status = 404  # of a proxy, say: no word about the schema
    with pytest.raises(SourceError, match="status 404"):
        driver.step(driver.source.start(None))
    registry.status = 0
    options = pipeline_of(options_of(kafka, topic, registry), tmp_path / "t")
    assert run_locally(options).exit_code == 0
    assert rows_of(tmp_path / "t", "id") == [(1,)]
    assert quarantined(options) == {}


def test_a_spec_with_a_login_is_sampled_and_shows_no_secret(
    kafka: KafkaServer,
    registry: Registry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic, registry.authorization = kafka.new_topic(), "Bearer hidden-word"
    first, second = registry.add(FIRST), registry.add(SECOND)
    kafka.produce(topic, [avro(first, FIRST, order(1)), avro(second, SECOND, order(2, note="n")), b"broken"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGISTRY_TOKEN", "hidden-word")
    access = f"registry: {{url: '{registry.url}', token: '${{env:REGISTRY_TOKEN}}'}}"
    (tmp_path / "firnline.yml").write_text(
        f"name: p\nsources:\n  orders: {{type: kafka, brokers: '{kafka.bootstrap}', topics: [{topic}], value: avro, "
        f"{access}}}\nsinks:\n  - {{name: out, type: delta, table: t}}\n"
        f"  - {{name: copy, type: kafka, brokers: '{kafka.bootstrap}', topic: {topic}, value: avro, {access}}}\n"
    )
    assert run_command(["dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    columns = {column["name"]: column["type"] for column in found["schema"]}
    assert columns == {"id": "int64", "price": "decimal(9,2)", "tags": "list<string>", "note": "string"}
    assert (found["sample"]["records"], found["sample"]["bad"]) == (3, 1)
    assert "hidden-word" not in shown.out + shown.err
    options = load_options(environ={"REGISTRY_TOKEN": "hidden-word"}, cwd=tmp_path)
    assert "hidden-word" not in repr(options)
