"""Ports of a source on real Spark: a query joins two of them, and a sink reads a third.

The source is of a kind that an installed package registers, in the driver and in every worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.jobs.spark import SparkEngine
from firnline.options import OperatorOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.packages import install
from tests.support.pipelines import Recorder, pipeline_options
from tests.support.shop import ShopOptions, write_changes

pytestmark = pytest.mark.spark

QUERY = """
SELECT o.id, u.name FROM `shop.orders` o JOIN `shop.users` u ON o.user = u.id
"""


def rows_of(table: Path) -> list[dict[str, Any]]:
    return sorted(DeltaTable(str(table)).to_pyarrow_table().to_pylist(), key=lambda row: int(row["id"]))


def test_a_query_joins_two_ports_and_a_sink_reads_a_third(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install(tmp_path / "site", "acme-shop", {"firnline.sources": {"shop": "tests.support.shop"}})
    monkeypatch.syspath_prepend(str(site))
    changes = tmp_path / "changes"
    users = [("users", {"id": number, "name": f"n{number}"}) for number in range(3)]
    orders = [("orders", {"id": number, "user": number % 3}) for number in range(6)]
    write_changes(changes, *users, *orders, ("", {"id": 7}), ("stock", {"id": 8}))
    options = pipeline_options(
        "",
        "",
        sources=[ShopOptions("shop", str(changes))],
        operators=[OperatorOptions("joined", "sql", ("shop.orders", "shop.users"), {"query": QUERY})],
        sinks=[
            DeltaSinkOptions("joined", str(tmp_path / "joined"), input="joined"),
            DeltaSinkOptions("rest", str(tmp_path / "rest"), input="shop"),
            DeltaSinkOptions("orders", str(tmp_path / "orders"), input="shop.orders"),
        ],
    )
    engine = SparkEngine("ports", {"spark.master": "local[2]", "spark.executorEnv.PYTHONPATH": str(site)})
    told = Recorder()
    try:
        result = Runner(open_pipeline(options, once=True), engine, told, once=True).run()
    finally:
        engine.stop()
    assert result.exit_code == 0, (result, told.troubles)
    assert rows_of(tmp_path / "joined") == [{"id": number, "name": f"n{number % 3}"} for number in range(6)]
    assert [row["id"] for row in rows_of(tmp_path / "rest")] == [7]
    assert rows_of(tmp_path / "orders") == [row for _, row in orders]
    assert (told.epochs[0].records, told.epochs[0].sources) == (10, {"shop": 10})
