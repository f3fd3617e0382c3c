"""The checkpoint names the table that decides: another one, by a change of the spec or of the table, is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.checkpoint.model import Checkpoint
from firnline.errors import DecidingSinkError
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions, delta_tables
from tests.support.pipelines import pipeline_options, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids


@pytest.fixture
def options(tmp_path: Path, sample: SampleInput) -> PipelineOptions:
    """Two sinks, two epochs; one more file waits."""
    sinks = tuple(DeltaSinkOptions(name, str(tmp_path / name)) for name in "ab")
    made = pipeline_options(str(tmp_path / "in"), str(tmp_path / "a"), sinks=sinks, max_files=1)
    sample.add("f1.json", 3)
    run_to_end(made)
    sample.add("f3.json", 3)
    run_to_end(made)
    sample.add("f4.json", 3)
    return made


def swapped(options: PipelineOptions) -> PipelineOptions:
    return replace(options, sinks=options.sinks[::-1])


def optional(options: PipelineOptions) -> PipelineOptions:
    return replace(options, sinks=(replace(options.sinks[0], required=False), options.sinks[1]))


def crossed(options: PipelineOptions) -> PipelineOptions:
    """The names stay in their order, the tables change places."""
    a, b = delta_tables(options.sinks)
    return replace(options, sinks=(replace(a, table=b.table), replace(b, table=a.table)))


def removed(options: PipelineOptions) -> PipelineOptions:
    return replace(options, sinks=options.sinks[1:])


@pytest.mark.parametrize("change", [swapped, optional, crossed, removed])
def test_another_table_does_not_decide(
    options: PipelineOptions, sample: SampleInput, change: Callable[[PipelineOptions], PipelineOptions]
) -> None:
    changed = change(options)
    before = [table_ids(sink.location) for sink in options.sinks]
    run = run_once(changed)
    assert (run.exit_code, run.error_code) == (1, "deciding-sink")
    assert run.result.error is not None
    assert "'a'" in run.result.error.hint
    with pytest.raises(DecidingSinkError):
        load_status(open_pipeline(changed))
    assert [table_ids(sink.location) for sink in options.sinks] == before
    sample.add("f2.json", 3)  # late: only the ledger of the deciding table tells
    run_to_end(options)
    assert [table_ids(sink.location) for sink in options.sinks] == [sample.ids, sample.ids]


@pytest.mark.parametrize("change", [swapped, optional, crossed, removed])
def test_the_first_epoch_tells_who_decides_before_the_table_has_an_id(
    tmp_path: Path, sample: SampleInput, change: Callable[[PipelineOptions], PipelineOptions]
) -> None:
    sinks = tuple(DeltaSinkOptions(name, str(tmp_path / name)) for name in "ab")
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "a"), sinks=sinks)
    sample.add("f1.json", 3)
    run_to_end(options)
    sample.add("f2.json", 3)
    assert run_once(change(options)).error_code == "deciding-sink"


def test_a_sink_may_be_renamed_and_its_table_moved(
    options: PipelineOptions, sample: SampleInput, tmp_path: Path
) -> None:
    shutil.move(tmp_path / "a", tmp_path / "moved")
    alone = replace(options, sinks=(DeltaSinkOptions("renamed", str(tmp_path / "moved")),))
    run_to_end(alone)
    assert table_ids(tmp_path / "moved") == sample.ids


def test_a_copy_with_an_id_of_its_own_does_not_decide(options: PipelineOptions, tmp_path: Path) -> None:
    """As a table that was deleted and made again out of copied files."""
    log = tmp_path / "a" / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["id"] = "00000000-0000-0000-0000-000000000000"
    log.write_text("".join(json.dumps(action) + "\n" for action in actions))
    assert run_once(options).error_code == "deciding-sink"


def test_a_checkpoint_of_an_older_version_is_judged_by_where_the_ledger_lies(
    options: PipelineOptions, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no deciding sink."""
    write = Checkpoint.to_json
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "to_json", lambda self: write(replace(self, deciding={})))
        run_to_end(options)
    sample.add("f5.json", 3)
    run = run_once(swapped(options))
    assert (run.exit_code, run.error_code) == (1, "deciding-sink")
    run_to_end(options)
    assert [table_ids(sink.location) for sink in options.sinks] == [sample.ids, sample.ids]
