"""Starting over: only for the epoch that is named, once, with a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.errors import RollbackRefusedError
from firnline.history.edits.fresh_start import FreshStart, start_over
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.committers import commit_table
from tests.support.pipelines import MakeOptions, run_to_end
from tests.support.samples import SampleInput, table_ids


def fresh(options: PipelineOptions, after: int, *, truncate: bool = False) -> FreshStart:
    return start_over(open_pipeline(options), after, "test", truncate=truncate)


def doubled(sample: SampleInput) -> dict[int, int]:
    return {number: 2 * count for number, count in sample.ids.items()}


@pytest.mark.parametrize("truncate", [True, False])
def test_everything_is_read_again(sample: SampleInput, make_options: MakeOptions, truncate: bool) -> None:
    options = make_options(max_files=1, partition_by=("month",))
    for name in ("a.json", "b.json"):
        sample.add(name, 3)
    run_to_end(options)
    version = DeltaTable(options.deciding.location).version()
    found = fresh(options, 2, truncate=truncate)
    assert found == FreshStart(3, 2, truncate)
    assert DeltaTable(options.deciding.location).version() == version + 2, "a claim, and one commit with everything"
    assert sum(table_ids(options.deciding.location).values()) == (0 if truncate else 6)
    run_to_end(options)
    assert table_ids(options.deciding.location) == (sample.ids if truncate else doubled(sample))
    assert open_pipeline(options).deciding.load().epoch == 5


def test_a_restart_with_the_same_words_does_not_repeat_it(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    sample.add("a.json", 3)
    run_to_end(options)
    fresh(options, 1, truncate=True)
    assert fresh(options, 1, truncate=True) == FreshStart(2, 1, True, already=True)
    run_to_end(options)
    sample.add("b.json", 3)
    run_to_end(options)
    assert fresh(options, 1, truncate=True).already
    assert table_ids(options.deciding.location) == sample.ids
    fresh(options, 4, truncate=True)
    run_to_end(options)
    assert table_ids(options.deciding.location) == sample.ids


def test_another_epoch_is_refused(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    with pytest.raises(RollbackRefusedError, match="no history"):
        fresh(options, 0)
    sample.add("a.json", 3)
    sample.add("b.json", 3)
    run_to_end(options)
    version = DeltaTable(options.deciding.location).version()
    for epoch in (0, 1, 3):
        with pytest.raises(RollbackRefusedError, match=f"holds epoch 2, not {epoch}") as caught:
            fresh(options, epoch)
        assert caught.value.hint.endswith("--fresh-after 2")
    assert DeltaTable(options.deciding.location).version() == version


def test_two_sinks(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> None:
    sinks = (DeltaSinkOptions("main", str(tmp_path / "one")), DeltaSinkOptions("copy", str(tmp_path / "two")))
    options = make_options(max_files=1, sinks=sinks)
    sample.add("a.json", 3)
    run_to_end(options)
    fresh(options, 1, truncate=True)
    for sink in sinks:
        assert not table_ids(sink.table)
    run_to_end(options)
    for sink in sinks:
        assert table_ids(sink.table) == sample.ids


def test_a_staged_table_drops_what_is_pending(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1, mode="staged")
    sample.add("a.json", 3)
    run_to_end(options)
    commit_table(options.deciding.location)
    sample.add("b.json", 3)
    run_to_end(options)
    assert fresh(options, 2, truncate=True).epoch == 3
    commit_table(options.deciding.location)
    assert not table_ids(options.deciding.location)
    run_to_end(options)
    commit_table(options.deciding.location)
    assert table_ids(options.deciding.location) == sample.ids


def test_one_cannot_go_back_behind_it(sample: SampleInput, make_options: MakeOptions) -> None:
    from firnline.history.edits.rollback import Rollback

    options = make_options(max_files=1)
    sample.add("a.json", 3)
    sample.add("b.json", 3)
    run_to_end(options)
    fresh(options, 2)
    with pytest.raises(RollbackRefusedError, match="epoch 3 was a fresh"):
        Rollback(open_pipeline(options), 1).plan()
