"""The lakehouse example on real Spark and with Kafka, as a user runs it: `python incident.py`.

`tests/integration/test_example_lakehouse.py` has it without both. The tables are read by DuckDB and delta-rs, the topic
by a plain consumer, whatever the script itself has found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from tests.support.examples import CHAIN
from tests.support.kafka import KafkaServer

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.timeout(3600)]

LAKEHOUSE = CHAIN.parent / "lakehouse"
TOPIC = "lakehouse.customers"
WAIT = 3500


def read_table(table: Path, columns: str) -> Counter[tuple[object, ...]]:
    with duckdb.connect() as connection:
        files = DeltaTable(str(table)).file_uris()
        return Counter(connection.read_parquet(files, union_by_name=True).project(columns).fetchall())


def test_a_bad_deployment_is_undone_in_every_table(tmp_path: Path, kafka: KafkaServer) -> None:
    lake = tmp_path / "lake"
    shutil.copytree(LAKEHOUSE, lake, ignore=shutil.ignore_patterns("in", "out", "data", "*.log"))
    environment = {**os.environ, "FIRNLINE_BROKERS": kafka.bootstrap}
    ended = subprocess.run(
        [sys.executable, "incident.py"], cwd=lake, env=environment, capture_output=True, text=True, timeout=WAIT
    )
    logs = "".join(path.read_text()[-2000:] for path in sorted(lake.glob("*.log")))
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr[-2000:]}{logs}"
    lines = [line.partition(" ")[2] for line in ended.stdout.splitlines()]
    assert lines[0] == "a normal day: bronze is right, silver is right, gold is right"
    assert lines[1].endswith(": 3 members, none of them stopped")
    assert lines[2] == "after a bad deployment of gold: bronze is right, silver is right, gold IS WRONG"
    assert lines[3] == "restored: bronze, silver and gold are what they were at the snapshot"
    assert lines[4] == "the good gold again, with the orders since: bronze is right, silver is right, gold is right"

    check(lake, kafka)


def check(lake: Path, kafka: KafkaServer) -> None:
    """Compute from the files what the tables and the topic must hold, and compare."""
    arrived = [json.loads(line) for file in (lake / "in").glob("*.json") for line in file.read_text().splitlines()]
    orders = [(one["order_id"], one["customer"], one["cents"]) for one in arrived]
    assert len(set(orders)) < len(orders), "some arrive twice"
    gold: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for _, customer, cents in set(orders):
        gold[customer][0] += 1
        gold[customer][1] += cents
    assert read_table(lake / "out/bronze", "order_id, customer, cents") == Counter(orders)
    assert read_table(lake / "out/silver", "order_id, customer, cents") == Counter(set(orders))
    found = read_table(lake / "out/gold", "customer, orders, cents")
    assert found == Counter((customer, *sums) for customer, sums in gold.items())

    records = kafka.read(TOPIC)
    told = [json.loads(one.value or b"") for one in records if "firnline-control" not in one.headers]
    assert len(told) < len(records), "a record says what was undone"
    newest = {one["customer"]: [one["orders"], one["cents"]] for one in told}
    assert newest == gold, "the newest message of each customer is right again"
