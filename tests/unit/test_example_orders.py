"""The example with four kinds of sinks: its generator writes what its spec reads, and the spec loads."""

from __future__ import annotations

import json
from pathlib import Path

from firnline.spec.build import load_options
from tests.support.examples import load_example

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "orders"


def test_the_spec_loads_with_and_without_addresses() -> None:
    options = load_options(EXAMPLE, environ={})
    kinds = {sink.name: (sink.type, sink.input, sink.required) for sink in options.sinks}
    assert kinds == {
        "lake": ("delta", "orders", True),
        "topic": ("kafka", "orders", True),
        "shop": ("postgres", "customers", True),
        "cache": ("redis", "customers", False),
    }
    assert options.journal is None
    environ = {"KAFKA_BROKERS": "k:9", "SHOP_DSN": "postgresql://h:8/d", "REDIS_URL": "redis://r:7/1"}
    places = {sink.name: sink.location for sink in load_options(EXAMPLE, environ=environ).sinks}
    assert places["topic"] == "kafka://k:9/orders"
    assert places["shop"] == "postgresql://h:8/d/public.customers"
    assert places["cache"] == "redis://r:7/1/customer:{customer}"


def test_the_generator_writes_the_columns_that_the_spec_names(tmp_path: Path) -> None:
    generate = load_example("generate", EXAMPLE)
    assert generate.write(tmp_path, files=2, orders=3) == 6
    rows = [json.loads(line) for path in sorted(tmp_path.iterdir()) for line in path.read_text().splitlines()]
    assert [row["order_id"] for row in rows] == list(range(6))
    assert all({"order_id", "customer", "cents"} == set(row) for row in rows)
