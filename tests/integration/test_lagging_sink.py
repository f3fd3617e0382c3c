"""A sink that lags while the ledger is damaged or the spec leaves it out: it stops nobody, and its rows are kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from firnline.cli.dry_run_preview import preview
from firnline.errors import ConfigError, LedgerHoleError
from firnline.history.edits.ledger_repair import LedgerRepair
from firnline.history.edits.rollback import Rollback
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from tests.support.committers import commit_table
from tests.support.damage import ledger_files
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids

UNTOLD = "sink 'copy' holds epoch 1 and cannot be given epochs 2 to 3"


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions, tmp_path: Path) -> PipelineOptions:
    """Four epochs of one file each; the optional sink was away from the second one on, and is back."""
    main, copy = tmp_path / "main", tmp_path / "copy"
    sinks = (DeltaSinkOptions("main", str(main)), DeltaSinkOptions("copy", str(copy), required=False))
    options = make_options(max_files=1, commit_policy="required", sinks=sinks)
    sample.add("a1.json", 3)
    run_to_end(options)
    copy.rename(tmp_path / "away")
    copy.touch()
    for number in (2, 3, 4):
        sample.add(f"a{number}.json", 3)
    run_to_end(options)
    copy.unlink()
    (tmp_path / "away").rename(copy)
    return options


def entry_of(options: PipelineOptions, epoch: int) -> Path:
    return ledger_files(options.deciding.location, options.name)[epoch - 1]


def repair(options: PipelineOptions) -> list[str]:
    told: list[str] = []
    LedgerRepair(open_pipeline(options), processed=["*"]).perform("person", told.append)
    return told


def failing(options: PipelineOptions) -> str:
    return str(load_status(open_pipeline(options)).sinks[1]["error"])


def test_a_lost_entry_that_only_an_optional_sink_needs_stops_nobody(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    held = table_ids(tmp_path / "copy")
    lost = entry_of(options, 3)
    data = lost.read_bytes()
    lost.unlink()
    sample.add("a5.json", 3)
    assert run_once(options).error_code == "ledger-hole"  # of late files, after everything new was read
    assert table_ids(tmp_path / "main") == sample.ids
    assert UNTOLD in failing(options)
    plan = LedgerRepair(open_pipeline(options), processed=["*"]).plan()
    assert [(behind.sink, behind.epoch) for behind in plan.sinks_behind] == [("copy", 1)]
    assert any(f"copy stays behind: {UNTOLD}" in line for line in repair(options))
    for number in (6, 7):
        sample.add(f"a{number}.json", 3)
        run_to_end(options)  # never fenced by a list of epochs with a gap
        assert table_ids(tmp_path / "main") == sample.ids
        assert table_ids(tmp_path / "copy") == held
        assert UNTOLD in failing(options)
    refusals = Rollback(open_pipeline(options), 7).plan().refusals
    assert any(UNTOLD in refusal.message and "--leave copy" in refusal.hint for refusal in refusals)
    lost.write_bytes(data)  # all that waits for the sink is still there
    for _ in range(2):
        run_to_end(options)
    assert table_ids(tmp_path / "copy") == sample.ids


def test_an_optional_sink_that_never_held_anything_is_not_taken_for_a_new_one(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    sinks = (
        DeltaSinkOptions("main", str(tmp_path / "main")),
        DeltaSinkOptions("copy", str(tmp_path / "copy"), required=False),
    )
    options = make_options(max_files=1, commit_policy="required", sinks=sinks)
    (tmp_path / "copy").touch()
    for number in (1, 2, 3):
        sample.add(f"a{number}.json", 3)
    run_to_end(options)
    (tmp_path / "copy").unlink()
    entry_of(options, 2).unlink()
    sample.add("a4.json", 3)
    assert run_once(options).error_code == "ledger-hole"
    repair(options)
    run_to_end(options)
    assert table_ids(tmp_path / "main") == sample.ids
    assert "cannot be given epochs 1 to 2" in failing(options)


def test_a_required_sink_that_cannot_be_told_what_it_lacks_is_named_with_the_way_out(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    sinks = (
        DeltaSinkOptions("main", str(tmp_path / "main"), mode="staged"),
        DeltaSinkOptions("copy", str(tmp_path / "copy"), mode="staged"),
    )
    options = make_options(max_files=1, sinks=sinks)
    for number in (1, 2):
        sample.add(f"a{number}.json", 3)
        run_to_end(options)
        commit_table(tmp_path / "main")
        if number == 1:
            run_to_end(options)
            commit_table(tmp_path / "copy")
    entry_of(options, 2).unlink()
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "ledger-hole")
    assert run.result.error is not None
    assert "sink 'copy' holds epoch 1 and cannot be given epoch 2" in run.result.error.message
    assert "required: false" in run.result.error.hint
    before = open_pipeline(options).load()
    with pytest.raises(LedgerHoleError, match="sink 'copy' holds epoch 1") as refused:
        repair(options)
    assert "required: false" in refused.value.hint
    assert open_pipeline(options).load() == before
    options = replace(options, sinks=(sinks[0], replace(sinks[1], required=False)))
    repair(options)
    sample.add("a3.json", 3)
    run_to_end(options)
    commit_table(tmp_path / "main")
    assert table_ids(tmp_path / "main") == sample.ids


def test_rows_that_wait_for_a_sink_outlast_a_run_without_it(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    told = sample.ids.copy()
    sample.add("a5.json", 3)
    run_to_end(replace(options, sinks=options.sinks[:1]))
    for _ in range(2):
        assert run_once(options).exit_code == 0
    assert table_ids(tmp_path / "copy") == told
    assert "was added to a pipeline that has history" in failing(options)  # it was not there for the fifth epoch


def test_dry_run_refuses_a_new_sink_as_a_run_does(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    sample.add("a0.json", 3)
    options = make_options()
    run_to_end(options)
    options = replace(options, sinks=(*options.sinks, DeltaSinkOptions("more", str(tmp_path / "more"))))
    assert run_once(options).error_code == "config"
    with pytest.raises(ConfigError, match="was added to a pipeline that has history"):
        preview(open_pipeline(options))
