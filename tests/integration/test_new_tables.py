"""A Delta table that is added to a pipeline with history: where it begins, and what happens to it afterwards."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from firnline.cli.dry_run_preview import preview
from firnline.errors import ConfigError, RollbackRefusedError, StoreAheadError
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.create import create_savepoint
from firnline.options import CheckpointOptions, OperatorOptions, PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.spec.build import load_options
from tests.support.pipelines import MakeOptions, make_epochs, run_once, run_to_end, run_until_epoch
from tests.support.samples import SampleInput, table_ids

Add = Callable[..., PipelineOptions]


@pytest.fixture
def first(make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """A pipeline with one table."""
    return make_options(max_files=1, sinks=(DeltaSinkOptions("main", str(tmp_path / "one")),))


@pytest.fixture
def add(first: PipelineOptions, tmp_path: Path) -> Add:
    """The pipeline with a second table."""

    def make(**settings: Any) -> PipelineOptions:
        table = DeltaSinkOptions("more", str(tmp_path / "two"), **{"start": "now", **settings})
        return replace(first, sinks=(*first.sinks, table))

    return make


def since(sample: SampleInput, before: Counter[int]) -> Counter[int]:
    return sample.ids - before


def more(sample: SampleInput, *names: str) -> None:
    for name in names:
        sample.add(f"{name}.json", 3)


def roll_back(options: PipelineOptions, to: int, **settings: Any) -> None:
    Rollback(open_pipeline(options), to, **settings).perform("test")


def stands(options: PipelineOptions) -> list[int]:
    return [sink.load().epoch for sink in open_pipeline(options).sinks]


@pytest.mark.parametrize("required", [True, False])
def test_a_table_that_is_added_gets_every_later_epoch(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path, required: bool
) -> None:
    make_epochs(sample, first, 3)
    before, options = sample.ids.copy(), add(required=required)
    run_to_end(options)  # nothing to do: nothing is written
    assert not (tmp_path / "two").exists()
    more(sample, "b1", "b2")
    run_to_end(options)
    more(sample, "b3")
    run_to_end(options)
    assert table_ids(tmp_path / "two") == since(sample, before)
    assert table_ids(tmp_path / "one") == sample.ids
    assert stands(options) == [6, 6]


def test_dry_run_says_what_a_table_that_is_added_gets(sample: SampleInput, first: PipelineOptions, add: Add) -> None:
    make_epochs(sample, first, 3)
    found = preview(open_pipeline(add()))
    assert [sink["filled"] for sink in found["sinks"]] == [
        None,
        "begins after epoch 3: it does not get what was before",
    ]
    with pytest.raises(ConfigError, match="files is no captured database, whose rows can be read again") as refused:
        preview(open_pipeline(add(start="")))
    assert "`start: now`" in refused.value.hint
    run = run_once(add(start="snapshot"))
    assert (run.exit_code, run.error_code) == (2, "config")


def test_a_table_may_hold_rows_of_others(sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path) -> None:
    make_epochs(sample, first, 2)
    before = sample.ids.copy()
    write_deltalake(tmp_path / "two", pa.table({"id": [-1], "month": ["2026-01"], "v": [0.5]}))
    more(sample, "b1", "b2")
    options = add()
    run_to_end(options)
    assert table_ids(tmp_path / "two") == since(sample, before) + Counter([-1])
    roll_back(options, 1)
    assert table_ids(tmp_path / "two") == Counter([-1])
    more(sample, "b3")
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert sum(table_ids(tmp_path / "two").values()) == 1 + 4 * 3  # from the second file on


@pytest.mark.parametrize("to", [2, 3, 4])
def test_a_rollback_to_before_it_was_added_empties_it(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path, to: int
) -> None:
    """The table begins after epoch 3. What is read again goes to both."""
    make_epochs(sample, first, 3)
    options = add()
    more(sample, "b1", "b2")
    run_to_end(options)
    roll_back(options, to)
    assert sum(table_ids(tmp_path / "two").values()) == max(0, to - 3) * 3
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert sum(table_ids(tmp_path / "two").values()) == (5 - min(to, 3)) * 3
    roll_back(options, stands(options)[0] - 1)
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert sum(table_ids(tmp_path / "two").values()) == (5 - min(to, 3)) * 3
    assert len(set(stands(options))) == 1


def test_a_rollback_before_its_first_epoch(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path
) -> None:
    make_epochs(sample, first, 3)
    options = add()
    roll_back(options, 2)
    assert not (tmp_path / "two").exists()
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert sum(table_ids(tmp_path / "two").values()) == 3


def test_an_optional_table_that_cannot_be_reached_gets_its_epochs_later(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path
) -> None:
    make_epochs(sample, first, 2)
    before, options = sample.ids.copy(), add(required=False)
    (tmp_path / "two").touch()
    more(sample, "b1", "b2")
    assert run_once(options).exit_code == 0
    roll_back(options, 3, leave=("more",))
    (tmp_path / "two").unlink()
    more(sample, "b3")
    for _ in range(2):
        run_to_end(options)
    assert table_ids(tmp_path / "two") == since(sample, before)
    assert table_ids(tmp_path / "one") == sample.ids


def test_a_table_that_is_gone_is_no_new_one(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path
) -> None:
    make_epochs(sample, first, 2)
    options = add()
    more(sample, "b1")
    run_to_end(options)
    away = tmp_path / "away"
    (tmp_path / "two").rename(away)
    more(sample, "b2")
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "table-lost")
    assert not (tmp_path / "two" / "_delta_log").exists()
    shutil.rmtree(tmp_path / "two", ignore_errors=True)
    away.rename(tmp_path / "two")
    run_to_end(options)
    assert sum(table_ids(tmp_path / "two").values()) == 6


def test_a_table_that_epochs_were_made_without_is_refused(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path
) -> None:
    make_epochs(sample, first, 2)
    more(sample, "b1")
    run_to_end(add())
    more(sample, "b2")
    run_to_end(first)
    more(sample, "b3")
    run = run_once(add())
    assert (run.exit_code, run.error_code) == (2, "config")
    assert "epoch 4 was made without it" in str(run.result.error)
    run_to_end(first)
    assert table_ids(tmp_path / "one") == sample.ids


def test_a_table_that_is_renamed_goes_on(sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path) -> None:
    make_epochs(sample, first, 2)
    before, options = sample.ids.copy(), add()
    more(sample, "b1")
    run_to_end(options)
    options = replace(options, sinks=(options.sinks[0], replace(options.sinks[1], name="other")))
    more(sample, "b2")
    run_to_end(options)
    assert table_ids(tmp_path / "two") == since(sample, before)


def test_an_older_run_ends_and_leaves_the_table_alone(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path
) -> None:
    """A run with the spec before the change claims in between; the next one with the table goes on where it is."""
    make_epochs(sample, first, 2)
    more(sample, "b1", "b2")
    options = add()
    run_until_epoch(options, 3)
    more(sample, "b3")
    before = stands(options)
    run_to_end(options)
    assert before[0] == 3
    assert sum(table_ids(tmp_path / "two").values()) == 9


def test_the_output_of_an_operator_in_a_table_of_its_own(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    counts = OperatorOptions(
        "counts", "aggregate", ("files",), {"keys": ["month"], "aggregates": [{"name": "n", "function": "count"}]}
    )
    main = DeltaSinkOptions("main", str(tmp_path / "one"), input="files")
    first = make_options(max_files=1, sinks=(main,), operators=(counts,))
    make_epochs(sample, first, 2)
    table = DeltaSinkOptions("counts", str(tmp_path / "two"), input="counts", write="upsert", start="now")
    options = replace(first, sinks=(main, table))
    sample.add("b.json", 6)
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert {row["month"]: row["n"] for row in _rows(tmp_path / "two")} == {f"2026-0{n}": 4 for n in (1, 2, 3)}


def _rows(table: Path) -> list[dict[str, Any]]:
    from tests.support.samples import table_rows

    return table_rows(table)


def test_a_savepoint_from_before_it_was_added(
    sample: SampleInput, first: PipelineOptions, add: Add, tmp_path: Path
) -> None:
    make_epochs(sample, first, 2)
    path = str(tmp_path / "saved")
    create_savepoint(open_pipeline(first), path)
    options = add()
    more(sample, "b1")
    run_to_end(options)
    with pytest.raises(RollbackRefusedError, match="the savepoint has the sinks main; the spec has main, more"):
        restore_savepoint(open_pipeline(options), path, "test")
    restore_savepoint(open_pipeline(first), path, "test")
    assert "the savepoint does not have its table" in str(run_once(options).result.error)
    options = replace(first, sinks=(*first.sinks, DeltaSinkOptions("new", str(tmp_path / "three"), start="now")))
    run_to_end(options)
    assert table_ids(tmp_path / "one") == sample.ids
    assert sum(table_ids(tmp_path / "three").values()) == 3


def test_in_a_pipeline_that_decides_in_its_journal(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    parts = DeltaPartsOptions("parts", f"{tmp_path}/lake/{{month}}")
    first = make_options(max_files=1, sinks=(parts,), home=tmp_path / "home")
    make_epochs(sample, first, 2)
    before = sample.ids.copy()
    options = replace(first, sinks=(parts, DeltaSinkOptions("more", str(tmp_path / "two"), start="now")))
    more(sample, "b1", "b2")
    run_to_end(options)
    assert table_ids(tmp_path / "two") == since(sample, before)


SPEC = """
name: shop
sources: {files: {path: in}}
sinks:
- {table: "lake/{month}"}
"""


def test_a_table_with_start_never_decides(tmp_path: Path) -> None:
    spec = tmp_path / "firnline.yml"
    spec.write_text(SPEC + "- {table: two, start: now}\n")
    options = load_options(spec, environ={})
    assert options.journal is not None
    table = options.sinks[1]
    assert isinstance(table, DeltaSinkOptions)
    assert table.start == "now"
    spec.write_text(SPEC + "- {table: two}\n")
    options = load_options(spec, environ={})
    assert options.deciding.name == "delta-2"


@pytest.mark.parametrize(
    ("sink", "words"),
    [("{table: two, start: beginning}", "only with a template"), ('{table: "b/{x}", start: snapshot}', "not with a")],
)
def test_a_start_that_a_table_cannot_have(tmp_path: Path, sink: str, words: str) -> None:
    spec = tmp_path / "firnline.yml"
    spec.write_text(SPEC + f"- {sink}\n")
    with pytest.raises(ConfigError, match=words):
        load_options(spec, environ={})


def test_a_table_that_would_decide_in_place_of_the_journal_is_refused(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    parts = DeltaPartsOptions("parts", f"{tmp_path}/lake/{{month}}")
    first = make_options(max_files=1, sinks=(parts,), home=tmp_path / "home")
    make_epochs(sample, first, 2)
    options = replace(first, sinks=(parts, DeltaSinkOptions("more", str(tmp_path / "two"))), journal=None)
    run = run_once(options)
    assert run.exit_code != 0
    assert run.result.error is not None
    assert "`start` in the spec (now, or snapshot)" in run.result.error.hint
    assert not (tmp_path / "two").exists()


def test_dry_run_offers_to_delete_nothing_where_a_table_would_decide_in_place_of_the_journal(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    parts = DeltaPartsOptions("parts", f"{tmp_path}/lake/{{month}}")
    store = CheckpointOptions(store=StoreOptions("file", str(tmp_path / "store")))
    first = replace(make_options(max_files=1, sinks=(parts,), home=tmp_path / "home"), checkpoint=store)
    make_epochs(sample, first, 2)
    options = replace(first, sinks=(parts, DeltaSinkOptions("more", str(tmp_path / "two"))), journal=None)
    with pytest.raises(StoreAheadError) as refused:
        preview(open_pipeline(options))
    assert "`start` in the spec (now, or snapshot)" in refused.value.hint
    assert "delete" not in refused.value.hint
