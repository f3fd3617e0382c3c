"""Numbers that need a wider type than their column: `schema.on_widen`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.create import create_savepoint
from firnline.options import FieldOptions, PipelineOptions, SchemaOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.table import Table
from tests.support.committers import commit_table
from tests.support.pipelines import pipeline_options, run_once

Policy = Literal["rewrite", "rescue", "fail"]


class Shop:
    """A folder of files, and the table that a pipeline writes."""

    def __init__(self, root: Path) -> None:
        self.folder, self.table = root / "in", root / "out"
        self.folder.mkdir()
        self._files = 0

    def add(self, *prices: Any) -> None:
        self._files += 1
        lines = [f'{{"id": {self._files * 10_000 + n}, "price": {price}}}' for n, price in enumerate(prices)]
        (self.folder / f"{self._files:03}.json").write_text("\n".join(lines) + "\n")

    def options(self, policy: Policy = "rewrite", *fields: FieldOptions, **settings: Any) -> PipelineOptions:
        schema = SchemaOptions(fields, on_widen=policy)
        return pipeline_options(str(self.folder), str(self.table), schema=schema, **settings)

    def read(self) -> tuple[pa.DataType, list[Any]]:
        """Read the type and the values of `price`, by delta-rs and by DuckDB on the files that the log names."""
        delta = DeltaTable(str(self.table))
        rows = delta.to_pyarrow_table().sort_by("id")
        with duckdb.connect() as connection:
            found = connection.execute(
                "SELECT price FROM read_parquet($files, union_by_name := true) ORDER BY id",
                {"files": delta.file_uris()},
            ).fetchall()
        assert [row[0] for row in found] == rows["price"].to_pylist()
        return rows.schema.field("price").type, rows["price"].to_pylist()


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_integers_become_floats_in_the_commit_of_the_epoch(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.add(*range(1000))
    assert run_once(shop.options()).exit_code == 0
    assert shop.read() == (pa.int64(), list(range(1000)))
    version = DeltaTable(str(shop.table)).version()
    shop.add(*(n + 0.5 for n in range(1000)))
    with caplog.at_level(logging.WARNING, "firnline"):
        assert run_once(shop.options()).exit_code == 0
    kind, prices = shop.read()
    assert kind == pa.float64()
    assert prices == [*map(float, range(1000)), *(n + 0.5 for n in range(1000))]
    assert "_rescued_data" not in DeltaTable(str(shop.table)).to_pyarrow_table().column_names
    assert "widened column price to float64" in {record.getMessage() for record in caplog.records}
    assert DeltaTable(str(shop.table)).version() == version + 2  # the claim, then rows and type at once
    shop.add(1, 2, 3.25)
    assert run_once(shop.options()).exit_code == 0
    assert shop.read()[1][2000:] == [1.0, 2.0, 3.25]


def test_one_number_in_a_thousand_is_rescued(shop: Shop) -> None:
    shop.add(*range(10))
    assert run_once(shop.options()).exit_code == 0
    shop.add(*range(999), 0.5)
    assert run_once(shop.options()).exit_code == 0
    kind, prices = shop.read()
    assert (kind, prices.count(None)) == (pa.int64(), 1)


def test_integers_that_a_double_does_not_represent_are_never_rounded(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    large = 2**53 + 1
    shop.add(1, large)
    assert run_once(shop.options()).exit_code == 0
    shop.add(1.5)
    with caplog.at_level(logging.WARNING, "firnline"):
        assert run_once(shop.options()).exit_code == 0
    assert shop.read() == (pa.int64(), [1, large, None])
    assert any("beyond 2^53" in record.getMessage() for record in caplog.records)
    assert DeltaTable(str(shop.table)).to_pyarrow_table()["_rescued_data"].drop_null().to_pylist() == ['{"price":1.5}']


def test_large_integers_beside_fractions_are_rescued_with_all_digits(shop: Shop) -> None:
    shop.add(1)
    assert run_once(shop.options()).exit_code == 0
    shop.add(1.5, 2**53 + 1)
    assert run_once(shop.options()).exit_code == 0
    assert shop.read() == (pa.float64(), [1.0, 1.5, None])
    rescued = DeltaTable(str(shop.table)).to_pyarrow_table()["_rescued_data"].drop_null().to_pylist()
    assert [json.loads(text) for text in rescued] == [{"price": 2**53 + 1}]


def test_rescue_and_fail_leave_the_table_as_it_is(shop: Shop) -> None:
    shop.add(1)
    assert run_once(shop.options()).exit_code == 0
    shop.add(1.5)
    failed = run_once(shop.options("fail"))
    assert failed.exit_code != 0
    assert failed.result.error is not None
    assert "002.json line 1: 1.5 does not fit column price (int64)" in failed.result.error.message
    assert shop.read() == (pa.int64(), [1])
    assert run_once(shop.options("rescue")).exit_code == 0
    assert shop.read() == (pa.int64(), [1, None])


@pytest.mark.parametrize("policy", ["rewrite", "fail"])
def test_a_declared_column_is_never_widened(shop: Shop, policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    options = shop.options(policy, FieldOptions("price", "int64"))
    shop.add(1)
    assert run_once(options).exit_code == 0
    shop.add(1.5)
    with caplog.at_level(logging.WARNING, "firnline"):
        assert run_once(options).exit_code == 0
    assert shop.read() == (pa.int64(), [1, None])
    assert "column price stays int64: it is declared in the spec" in caplog.messages


@pytest.mark.parametrize(
    ("old", "new", "column", "expected"),
    [
        ('{"net": 1}', '{"net": 1.5}', "price.net", "int64"),
        ("[1, 2]", "[1, 2.5]", "price", "list<int64>"),
        ('[{"net": 1}]', '[{"net": 1.5}]', "price", "list<struct<net:int64>>"),
    ],
)
def test_nested_numbers_are_rescued_with_a_warning(
    shop: Shop, old: str, new: str, column: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    shop.add(old)
    assert run_once(shop.options()).exit_code == 0
    shop.add(new)
    failed = run_once(shop.options("fail"))
    assert failed.result.error is not None
    assert f"does not fit column {column} ({expected})" in failed.result.error.message
    with caplog.at_level(logging.WARNING, "firnline"):
        run = run_once(shop.options())
    assert f"column {column} stays {expected}: nested fields keep their types" in caplog.messages
    assert [(one.column, one.values) for epoch in run.told.epochs for one in epoch.rescued] == [(column, 1)]
    rescued = DeltaTable(str(shop.table)).to_pyarrow_table()["_rescued_data"].drop_null().to_pylist()
    assert [json.loads(text) for text in rescued] == [{"price": json.loads(new)}]


def test_a_decimal_column_keeps_its_precision(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    rows = pa.table({"id": [1], "price": pa.array([Decimal("1.25")], pa.decimal128(6, 2))})
    write_deltalake(str(shop.table), rows)
    shop.add("12345678901234567890.5", "7.5")
    with caplog.at_level(logging.WARNING, "firnline"):
        assert run_once(shop.options()).exit_code == 0
    assert "column price stays decimal(6,2): decimal columns keep precision and scale" in caplog.messages
    table = DeltaTable(str(shop.table)).to_pyarrow_table().sort_by("id")
    assert table["price"].to_pylist() == [Decimal("1.25"), None, Decimal("7.50")]
    assert table["_rescued_data"].drop_null().to_pylist() == ['{"price":12345678901234567890.5}']


@pytest.mark.parametrize(("prices", "kind"), [([2**40], pa.int64()), ([2**40, 1.5], pa.float64())])
def test_int32_of_another_writer_becomes_wider(shop: Shop, prices: list[float], kind: pa.DataType) -> None:
    rows = pa.table({"id": pa.array([1, 2], pa.int64()), "price": pa.array([7, None], pa.int32())})
    write_deltalake(str(shop.table), rows)
    shop.add(*prices)
    assert run_once(shop.options()).exit_code == 0
    assert shop.read() == (kind, [7, None, *prices])


def test_a_partition_column_keeps_its_type(shop: Shop) -> None:
    options = shop.options(partition_by=("price",))
    shop.add(*range(3))
    assert run_once(options).exit_code == 0
    shop.add(1.5)
    assert run_once(options).exit_code == 0
    table = DeltaTable(str(shop.table)).to_pyarrow_table()
    assert table.schema.field("price").type == pa.int64()
    assert table["price"].null_count == 1


def test_partitions_are_kept(shop: Shop) -> None:
    options = shop.options(partition_by=("id",))
    shop.add(1, 2)
    assert run_once(options).exit_code == 0
    shop.add(1.5)
    assert run_once(options).exit_code == 0
    delta = DeltaTable(str(shop.table))
    rows = delta.to_pyarrow_table().sort_by("id")
    assert rows["price"].to_pylist() == [1.0, 2.0, 1.5]
    assert len(delta.partitions()) == 3


def test_a_two_stage_table_rescues(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    options = shop.options(mode="staged")
    for price in (1, 1.5):
        shop.add(price)
        with caplog.at_level(logging.WARNING, "firnline"):
            assert run_once(options).exit_code == 0
        commit_table(str(shop.table))
    assert shop.read() == (pa.int64(), [1, None])
    assert any(record.getMessage().startswith("column price stays int64") for record in caplog.records)


def test_every_sink_gets_the_wider_column_also_one_that_lags(shop: Shop, tmp_path: Path) -> None:
    main, copy = DeltaSinkOptions("main", str(shop.table)), DeltaSinkOptions("copy", str(tmp_path / "two"))
    shop.add(1, 2)
    assert run_once(shop.options(sinks=(main, copy))).exit_code == 0
    optional = DeltaSinkOptions("copy", str(tmp_path / "two"), required=False)
    shop.add(3)
    with outage(tmp_path / "two"):
        run_once(shop.options(sinks=(main, optional)))
    shop.add(1.5)
    assert run_once(shop.options(sinks=(main, copy))).exit_code == 0
    assert shop.read() == (pa.float64(), [1.0, 2.0, 3.0, 1.5])
    shop.table = tmp_path / "two"
    assert shop.read() == (pa.float64(), [1.0, 2.0, 3.0, 1.5])


def test_a_rollback_takes_type_and_rows_back(shop: Shop) -> None:
    for prices in ((1, 2), (1.5,), (2.5,)):
        shop.add(*prices)
        assert run_once(shop.options()).exit_code == 0
    assert shop.read() == (pa.float64(), [1.0, 2.0, 1.5, 2.5])
    Rollback(open_pipeline(shop.options()), 1).perform("test")
    assert shop.read() == (pa.int64(), [1, 2])
    assert run_once(shop.options()).exit_code == 0
    assert shop.read() == (pa.float64(), [1.0, 2.0, 1.5, 2.5])


@pytest.mark.parametrize("copy", [False, True])
def test_a_savepoint_from_before_takes_type_and_rows_back(shop: Shop, tmp_path: Path, copy: bool) -> None:
    shop.add(1, 2)
    assert run_once(shop.options()).exit_code == 0
    place = tmp_path / "before"
    create_savepoint(open_pipeline(shop.options()), str(place), copy=copy, run="test")
    shop.add(1.5)
    assert run_once(shop.options()).exit_code == 0
    after = tmp_path / "after"
    create_savepoint(open_pipeline(shop.options()), str(after), copy=copy, run="test")
    restore_savepoint(open_pipeline(shop.options()), str(place), run="test")
    assert shop.read() == (pa.int64(), [1, 2])
    restore_savepoint(open_pipeline(shop.options()), str(after), run="test")
    assert shop.read() == (pa.float64(), [1.0, 2.0, 1.5])


def test_a_row_that_another_writer_adds_meanwhile_is_widened_too(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.add(1, 2)
    assert run_once(shop.options()).exit_code == 0
    original = Table.replace_all
    calls: list[int] = []

    def disturbed(self: Table, *arguments: Any, **named: Any) -> int:
        if not calls:
            write_deltalake(str(shop.table), pa.table({"id": [5], "price": [7]}), mode="append")
        calls.append(len(arguments[2]))
        return original(self, *arguments, **named)

    monkeypatch.setattr(Table, "replace_all", disturbed)
    shop.add(1.5)
    assert run_once(shop.options()).exit_code == 0
    assert shop.read() == (pa.float64(), [7.0, 1.0, 2.0, 1.5])
    assert calls == [2, 3]


@contextmanager
def outage(table: Path) -> Iterator[None]:
    """The table's log cannot be read."""
    (table / "_delta_log").rename(table / "_away")
    (table / "_delta_log").write_text("an outage")
    yield
    (table / "_delta_log").unlink()
    (table / "_away").rename(table / "_delta_log")
