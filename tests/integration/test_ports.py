"""Sources with several ports, end to end, without Spark: each sink and operator gets the rows of its port alone."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from firnline.errors import ConfigError
from firnline.history.quarantine import load_quarantine
from firnline.jobs.dataflow import dataflow_of
from firnline.options import FieldOptions, OperatorOptions, PipelineOptions, SchemaOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources import registry
from firnline.testing.sources import AddRecords, SourceConformance
from tests.support.pipelines import pipeline_options, run_once
from tests.support.shop import ShopOptions, write_changes

TABLES = ("orders", "users", "")


@pytest.fixture(autouse=True)
def shop_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.KINDS, "shop", "tests.support.shop")


class TestShop(SourceConformance):
    ports = TABLES

    @pytest.fixture
    def options(self, tmp_path: Path) -> ShopOptions:
        (tmp_path / "here").touch()
        return ShopOptions("shop", str(tmp_path / "here"))

    @pytest.fixture
    def elsewhere(self, tmp_path: Path) -> ShopOptions:
        (tmp_path / "there").touch()
        return ShopOptions("shop", str(tmp_path / "there"))

    @pytest.fixture
    def add_records(self, tmp_path: Path) -> AddRecords:
        return lambda records: write_changes(tmp_path / "here", *((TABLES[r["id"] % 3], r) for r in records))


@pytest.fixture
def changes(tmp_path: Path) -> Path:
    (tmp_path / "changes").touch()
    return tmp_path / "changes"


def shop_options(
    folder: Path, inputs: Sequence[str], operators: Sequence[OperatorOptions] = (), **settings: Any
) -> PipelineOptions:
    """A shop, and a table for every input, named after it."""
    names = {field.name for field in dataclasses.fields(ShopOptions)} & settings.keys()
    of_source = {name: settings.pop(name) for name in names}
    source = ShopOptions("shop", str(folder / "changes"), poll_interval_secs=0.05, **of_source)
    sinks = [DeltaSinkOptions(text, str(folder / text), input=text) for text in inputs]
    return pipeline_options("", "", sources=[source], sinks=sinks, operators=operators, **settings)


def rows_of(table: Path) -> list[dict[str, Any]]:
    return list(DeltaTable(str(table)).to_pyarrow_table().to_pylist())


def counts(*inputs: str) -> OperatorOptions:
    aggregates = [{"name": "n", "function": "count"}]
    settings = {"keys": ["who"], "aggregates": aggregates, "delay_us": 0, "emit": "changes", "before": False}
    return OperatorOptions("totals", "aggregate", inputs, settings)


def columns_of_checkpoint(options: PipelineOptions) -> set[str]:
    checkpoint = open_pipeline(options, once=True).deciding.load().checkpoint
    assert checkpoint is not None
    return set(checkpoint.columns)


# -- sinks --------------------------------------------------------------------------------------------


def test_two_sinks_read_two_ports_and_nobody_reads_the_others(tmp_path: Path, changes: Path) -> None:
    options = shop_options(tmp_path, ["shop.orders", "shop.users"])
    write_changes(changes, ("orders", {"id": 1, "v": 5}), ("stock", {"id": 9}), ("", {"id": 8}))
    write_changes(changes, ("orders", {"id": 2, "v": 6}), b"{broken")
    first = run_once(options)
    assert first.exit_code == 0, first.result
    assert rows_of(tmp_path / "shop.orders") == [{"id": 1, "v": 5}, {"id": 2, "v": 6}]
    assert rows_of(tmp_path / "shop.users") == [], "the port has no row yet, and no columns"
    facts = first.told.epochs[0]
    assert (facts.records, facts.bad, facts.sources) == (3, {"no JSON": 1}, {"shop": 3})
    assert [row["raw"] for row in load_quarantine(first.pipeline)] == [b"{broken"]

    write_changes(changes, ("users", {"id": "u1", "v": "text"}), ("orders", {"id": 3, "v": 7}))
    assert run_once(options).exit_code == 0
    assert [(row["id"], row["v"]) for row in rows_of(tmp_path / "shop.users")] == [("u1", "text")]
    assert sorted(row["id"] for row in rows_of(tmp_path / "shop.orders")) == [1, 2, 3]
    assert columns_of_checkpoint(options) == {"shop.users"}, "the deciding table has the columns of its own port"


def test_the_main_port_is_a_port_like_others(tmp_path: Path, changes: Path) -> None:
    write_changes(changes, *((TABLES[number % 3], {"id": number}) for number in range(200)))
    options = shop_options(tmp_path, ["shop", "shop.orders"], lineage=True)
    assert run_once(options).exit_code == 0
    assert [row["id"] for row in rows_of(tmp_path / "shop")] == list(range(2, 200, 3))
    orders = rows_of(tmp_path / "shop.orders")
    assert [row["id"] for row in orders] == [row["_firnline_record"] for row in orders] == list(range(0, 200, 3))


def test_columns_evolve_per_port(tmp_path: Path, changes: Path) -> None:
    schema = SchemaOptions((FieldOptions("id", "int64"),), "rescue")
    options = shop_options(tmp_path, ["shop", "shop.orders", "shop.users"], schema=schema)
    write_changes(changes, ("", {"id": 1, "x": 1}), ("orders", {"id": 1, "x": 1}), ("users", {"name": "a"}))
    assert run_once(options).exit_code == 0
    write_changes(changes, ("orders", {"id": 2, "x": "no number", "y": 2}), ("users", {"name": "b"}))
    assert run_once(options).exit_code == 0
    assert rows_of(tmp_path / "shop") == [{"id": 1, "_rescued_data": '{"x":1}'}], "declared: nothing is inferred"
    first, second = sorted(rows_of(tmp_path / "shop.orders"), key=lambda row: int(row["id"]))
    assert (first["id"], first["x"], first["_rescued_data"]) == (1, 1, None)
    assert (second["id"], second["x"], second["_rescued_data"]) == (2, None, '{"x":"no number","y":2}')
    assert sorted(row["name"] for row in rows_of(tmp_path / "shop.users")) == ["a", "b"]


def test_a_column_that_widens_restarts_its_port_alone(tmp_path: Path, changes: Path) -> None:
    write_changes(changes, *(("orders", {"v": 1 if number < 60 else 0.5}) for number in range(120)))
    write_changes(changes, *(("users", {"v": number}) for number in range(120)))
    assert run_once(shop_options(tmp_path, ["shop.orders", "shop.users"])).exit_code == 0
    assert [row["v"] for row in rows_of(tmp_path / "shop.orders")] == [1.0] * 60 + [0.5] * 60
    users = DeltaTable(str(tmp_path / "shop.users")).to_pyarrow_table()
    assert (str(users.schema.field("v").type), users.num_rows) == ("int64", 120)


def test_rows_that_nobody_wants_are_dropped_and_counted(
    tmp_path: Path, changes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_changes(changes, *((TABLES[number % 3], {"id": number}) for number in range(9)))
    with caplog.at_level(logging.WARNING):
        run = run_once(shop_options(tmp_path, ["shop.orders"], leaks=True))
    assert run.exit_code == 0
    assert [row["id"] for row in rows_of(tmp_path / "shop.orders")] == [0, 3, 6]
    dropped = [record for record in caplog.records if record.message.startswith("rows dropped")]
    assert [record.__dict__["rows"] for record in dropped] == [6]


# -- operators ----------------------------------------------------------------------------------------


def test_an_operator_reads_a_port_and_its_state_is_made_again_from_it(tmp_path: Path, changes: Path) -> None:
    options = shop_options(tmp_path, ["totals", "shop.users"], [counts("shop.orders")], shards=2, per_slice=4)
    for number in range(6):
        write_changes(changes, ("orders", {"who": f"w{number % 2}"}), ("users", {"who": "u"}), ("stock", {"who": "s"}))
    assert run_once(options).exit_code == 0
    shutil.rmtree(tmp_path / "totals" / "_firnline" / options.name / "state")  # lost: every epoch is read again
    write_changes(changes, ("orders", {"who": "w0"}))
    run = run_once(options)
    assert run.exit_code == 0, run.result
    latest = {row["who"]: row["n"] for row in sorted(rows_of(tmp_path / "totals"), key=lambda row: row["n"])}
    assert latest == {"w0": 4, "w1": 3}
    assert [row["who"] for row in rows_of(tmp_path / "shop.users")] == ["u"] * 6
    assert columns_of_checkpoint(options) == {"shop.orders", "shop.users"}


def test_an_operator_reads_two_ports_of_one_source(tmp_path: Path, changes: Path) -> None:
    options = shop_options(tmp_path, ["totals"], [counts("shop.orders", "shop")], shards=2)
    write_changes(changes, ("orders", {"who": "a"}), ("", {"who": "a", "v": 1}), ("users", {"who": "a"}))
    assert run_once(options).exit_code == 0
    assert [row["n"] for row in rows_of(tmp_path / "totals")][-1] == 2
    assert columns_of_checkpoint(options) == {"shop.orders", "shop"}
    assert dataflow_of(options).wanted_ports == {"shop": ("", "orders")}


def test_a_port_that_is_read_later_gives_the_rows_from_then_on(tmp_path: Path, changes: Path) -> None:
    write_changes(changes, ("orders", {"who": "a"}), ("users", {"who": "a"}))
    assert run_once(shop_options(tmp_path, ["totals"], [counts("shop.orders")], shards=2)).exit_code == 0
    write_changes(changes, ("users", {"who": "a"}))
    both = shop_options(tmp_path, ["totals"], [counts("shop.orders", "shop.users")], shards=2)
    assert run_once(both).exit_code == 0
    assert max(row["n"] for row in rows_of(tmp_path / "totals")) == 2


# -- ports that are not there -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["shop.stock"], 'sink "shop.stock" reads "shop.stock", but source "shop" has no port "stock"'),
        (["shop"], 'sink "shop" reads "shop", but source "shop" has no main port'),
    ],
)
def test_a_port_that_the_source_does_not_have_is_refused(tmp_path: Path, inputs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        open_pipeline(shop_options(tmp_path, inputs, closed=True), once=True)
    assert refused.value.hint == "Read one of these: shop.orders, shop.users."
