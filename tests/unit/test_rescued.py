"""Counts of rescued values: added up, bounded, shown, stored in the ledger and logged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.history.status import load_status
from firnline.options import SchemaOptions
from firnline.rescued import MAX_COLUMNS, OTHER_COLUMNS, Rescued, add_rescued
from firnline.run.observer import EpochFacts
from firnline.run.open_pipeline import open_pipeline
from firnline.service.metrics import PipelineMetrics
from tests.support.pipelines import pipeline_options, run_once


def test_counts_add_up_and_the_first_value_stays() -> None:
    one, two = Rescued("a", 1, "int64", "1.5", "in/a.json", 3), Rescued("a", 2, "int64", "2.5", "in/b.json", 1)
    assert add_rescued([one, two]) == [Rescued("a", 3, "int64", "1.5", "in/a.json", 3)]
    assert Rescued.from_json(one.to_json()) == one


def test_the_number_of_columns_is_bounded() -> None:
    found = add_rescued(Rescued(f"c{n}", 2) for n in range(MAX_COLUMNS + 50))
    assert len(found) == MAX_COLUMNS + 1
    assert found[-1] == Rescued(OTHER_COLUMNS, 100)
    assert add_rescued(found) == found


def test_a_count_as_text() -> None:
    assert Rescued("price", 1000, "int64", "1.5", "in/b.json", 1).text() == (
        "1,000 values of price (expected int64, first: in/b.json line 1: 1.5)"
    )
    assert Rescued(OTHER_COLUMNS, 1).text() == "1 value of other columns"
    assert Rescued("due", 1, "date32", "1.5", table="shop.orders").text() == (
        "1 value of shop.orders.due (expected date32, first: 1.5)"
    )


def test_rescued_values_and_added_columns_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    options = pipeline_options(str(folder), str(tmp_path / "out"), schema=SchemaOptions(on_widen="rescue"))
    (folder / "a.json").write_text("".join(f'{{"price": {n}}}\n' for n in range(40)))
    assert run_once(options).exit_code == 0
    assert not [record for record in caplog.records if record.getMessage().startswith(("rescued", "added"))]
    (folder / "b.json").write_text("".join(f'{{"price": {n}.5, "x": 1.5}}\n' for n in range(40)))
    with caplog.at_level(logging.WARNING, "firnline"):
        assert run_once(options).exit_code == 0

    told = {record.getMessage() for record in caplog.records}
    assert f"rescued 40 values of price (expected int64, first: {folder}/b.json line 1: 0.5)" in told
    (added,) = [record for record in caplog.records if record.getMessage() == "added column x (float64)"]
    assert (added.__dict__["table"], added.__dict__["epoch"]) == (str(tmp_path / "out"), 2)

    rows = DeltaTable(str(tmp_path / "out")).to_pyarrow_table()
    assert rows["price"].null_count == 40
    status = load_status(open_pipeline(options))
    (found,) = status.rescued
    assert (found["column"], found["values"], found["expected"], found["line"]) == ("price", 40, "int64", 1)
    assert status.rescued_since == 1


def test_the_metric_has_a_bounded_number_of_labels() -> None:
    metrics = PipelineMetrics("demo", lambda: 0.0)
    for start in (0, MAX_COLUMNS):
        metrics.committed(_facts(tuple(Rescued(f"c{start + n}", 1) for n in range(MAX_COLUMNS))))
    (family,) = [one for one in metrics.collect() if one.name == "firnline_rescued_values"]
    counts = {sample.labels["column"]: sample.value for sample in family.samples}
    assert len(counts) == MAX_COLUMNS + 1
    assert counts[OTHER_COLUMNS] == MAX_COLUMNS


def _facts(rescued: tuple[Rescued, ...]) -> EpochFacts:
    return EpochFacts(
        epoch=1,
        attempt="a",
        sink="delta",
        version=1,
        files=1,
        records=1,
        rows=1,
        bad={},
        bytes_read=1,
        raw_bytes=1,
        staged_files=1,
        staged_bytes=1,
        late_files=0,
        checkpoint_bytes=1,
        state_files=0,
        set_aside=0,
        rescued=rescued,
    )
