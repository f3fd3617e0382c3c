"""Captured changes in a topic, in the envelope of Debezium, as a consumer reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.options import BatchOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.kafka.envelope import UNAVAILABLE
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import ORDERS, captured, execute, query
from tests.support.kafka import KafkaServer
from tests.support.kafka_sinks import kafka_sink
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end

pytestmark = pytest.mark.kafka
FACTS = ("committed_at", "position", "transaction")
LARGE = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) g)"


def read(kafka: KafkaServer, topic: str) -> list[tuple[Any, dict[str, Any]]]:
    return [(json.loads(one.key) if one.key else None, json.loads(one.value or b"")) for one in kafka.read(topic)]


def test_changes_of_postgres(postgres: str, tmp_path: Path, kafka: KafkaServer) -> None:
    execute(postgres, ORDERS)
    topic = kafka.new_topic(1)
    options = captured(postgres, tmp_path, include=FACTS)
    sink = kafka_sink(kafka, topic, input="db.orders", envelope="debezium", key=())
    options = replace(options, sinks=(options.sinks[0], sink))
    run_to_end(options)
    execute(postgres, f"INSERT INTO orders VALUES (1, 1.50, {LARGE}), (2, 2, NULL)")
    execute(postgres, "UPDATE orders SET amount = 3 WHERE id = 1", "UPDATE orders SET id = 20 WHERE id = 2")
    execute(postgres, "DELETE FROM orders WHERE id = 20", "TRUNCATE orders", "INSERT INTO orders VALUES (3, 3, 'é')")
    run_to_end(options)
    found = read(kafka, topic)
    assert [(key, value["op"]) for key, value in found] == [
        ({"id": 1}, "c"), ({"id": 2}, "c"), ({"id": 1}, "u"), ({"id": 2}, "d"), ({"id": 20}, "c"), ({"id": 20}, "d"),
        (None, "t"), ({"id": 3}, "c"),
    ]  # fmt: skip
    values = [value for _, value in found]
    assert {tuple(value) for value in values} == {("before", "after", "source", "op", "ts_ms")}
    assert values[1]["after"] == {"id": 2, "amount": 2.00, "note": None}
    assert values[1]["before"] is None
    assert values[2]["after"] == {"id": 1, "amount": 3.00, "note": UNAVAILABLE}
    assert values[2]["source"]["missing"] == ["note"]
    assert (values[3]["before"]["id"], values[3]["after"]) == (2, None)
    assert (values[6]["before"], values[6]["after"]) == (None, None)
    source = values[0]["source"]
    assert (source["name"], source["table"], source["snapshot"]) == ("db", "orders", "false")
    assert abs(source["ts_ms"] - int(query(postgres, "SELECT extract(epoch FROM now()) * 1000")[0][0])) < 3_600_000
    assert values[0]["ts_ms"] == source["ts_ms"]
    end = query(postgres, "SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")[0][0]
    assert 0 < source["lsn"] <= end
    assert [value["source"]["lsn"] for value in values] == sorted(value["source"]["lsn"] for value in values)
    assert values[0]["source"]["txId"] == values[1]["source"]["txId"] != values[2]["source"]["txId"]
    state: dict[int, Any] = {}
    for key, value in found:  # as a consumer would
        if value["op"] == "t":
            state.clear()
        elif value["op"] == "d":
            del state[key["id"]]
        else:
            state[key["id"]] = value["after"]
    assert sorted(state) == [row[0] for row in query(postgres, "SELECT id FROM orders ORDER BY id")]


def test_whole_old_rows(postgres: str, tmp_path: Path, kafka: KafkaServer) -> None:
    execute(postgres, ORDERS, "ALTER TABLE orders REPLICA IDENTITY FULL")
    topic = kafka.new_topic(1)
    options = captured(postgres, tmp_path, include=("before",))
    sink = kafka_sink(kafka, topic, input="db.orders", envelope="debezium", key=("id",))
    options = replace(options, sinks=(options.sinks[0], sink))
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')", "UPDATE orders SET note = 'b'", "DELETE FROM orders")
    run_to_end(options)
    values = [value for _, value in read(kafka, topic)]
    first, second = {"id": 1, "amount": 1.00, "note": "a"}, {"id": 1, "amount": 1.00, "note": "b"}
    assert [(value["before"], value["after"]) for value in values] == [(None, first), (first, second), (second, None)]
    assert values[0]["source"]["lsn"] is None  # nothing was included


def test_changes_of_a_binlog(binlog_server: BinlogServer, tmp_path: Path, kafka: KafkaServer) -> None:
    binlog_server.run("CREATE DATABASE shop", "CREATE TABLE shop.t (id int PRIMARY KEY, note varchar(9))")
    topic = kafka.new_topic(1)
    options = PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{binlog_server.dsn}/shop", ("t",), include=FACTS),),
        sinks=(
            DeltaSinkOptions("history", str(tmp_path / "history"), input="db.t"),
            kafka_sink(kafka, topic, input="db.t", envelope="debezium", key=()),
        ),
        batch=BatchOptions(max_events=1000),
    )
    run_to_end(options)
    binlog_server.run("INSERT INTO shop.t VALUES (1, 'a')", "UPDATE shop.t SET note = 'b'", "DELETE FROM shop.t")
    run_to_end(options)
    found = read(kafka, topic)
    assert [(key["id"], value["op"]) for key, value in found] == [(1, "c"), (1, "u"), (1, "d")]
    places = [(value["source"]["file"], value["source"]["pos"]) for _, value in found]
    assert places == sorted(places)
    assert all(file and pos > 0 for file, pos in places)
    assert all(value["source"]["gtid"] for _, value in found)
    assert [value["after"] for _, value in found] == [{"id": 1, "note": "a"}, {"id": 1, "note": "b"}, None]
