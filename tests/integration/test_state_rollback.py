"""Rollback and fresh start of pipelines with state: table, positions, watermarks and state go back together, or not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from firnline.errors import RollbackRefusedError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.rollback import Rollback, RollbackPlan
from firnline.options import LocalTierOptions, PipelineOptions, RemoteTierOptions, StateOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.keyed import GRAPHS, KeyedInput, answers, answers_without_trouble, keyed_options, run_each_epoch
from tests.support.pipelines import checkpoint_of, run_once, run_to_end, state_folder


def plan(options: PipelineOptions, to: int) -> RollbackPlan:
    return Rollback(open_pipeline(options), to).plan()


def go_back(options: PipelineOptions, to: int) -> None:
    Rollback(open_pipeline(options), to).perform("test")


def reasons(options: PipelineOptions, to: int) -> list[str]:
    return [error.message for error in plan(options, to).refusals]


def test_the_plan_tells_what_state_goes_back(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, GRAPHS["windows"])
    run_each_epoch(keyed, options, 2)
    then = checkpoint_of(options)
    run_each_epoch(keyed, options, 3)
    found = plan(options, 2)
    assert [(one.operator, one.epoch) for one in found.state_now] == [("windows", 5)]
    (back,) = found.state_then
    ref = then.state["windows"]
    assert (back.operator, back.epoch, back.size_bytes, back.rows) == ("windows", 2, ref["size_bytes"], ref["rows"])
    assert back.size_bytes > 0
    assert (found.state_replayed, found.refusals) == ([], [])


def test_the_watermark_goes_back_with_the_state(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, GRAPHS["windows"])
    run_each_epoch(keyed, options, 2)
    then = checkpoint_of(options)
    run_each_epoch(keyed, options, 4)
    assert checkpoint_of(options).watermarks["windows"]["at"] > then.watermarks["windows"]["at"]
    go_back(options, 2)
    now = checkpoint_of(options)
    assert (now.watermarks, now.state, now.columns) == (then.watermarks, then.state, then.columns)
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


@pytest.mark.parametrize("graph", list(GRAPHS))
def test_twice_and_over_a_rescale(tmp_path: Path, keyed: KeyedInput, graph: str) -> None:
    options = keyed_options(tmp_path, GRAPHS[graph])
    run_each_epoch(keyed, options, 4)
    options = replace(options, state=StateOptions(shards=3))
    run_each_epoch(keyed, options, 2)
    go_back(options, 3)  # to before the rescale
    run_each_epoch(keyed, options, 1)
    go_back(options, 7)  # to the first rollback
    options = replace(options, state=StateOptions(shards=1))
    run_each_epoch(keyed, options, 1)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


# -- what stands in the way -------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["COMMITTED", "metadata.json", "shard_0/metadata.json"])
def test_state_that_is_not_whole_is_refused(tmp_path: Path, keyed: KeyedInput, lost: str) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 3)
    (folder,) = state_folder(options).glob(f"{2:020d}-*")
    (folder / lost).rename(tmp_path / "away")
    (message,) = reasons(options, 2)
    assert "the state of epoch 2 is not whole" in message
    before = open_pipeline(options).load()
    with pytest.raises(RollbackRefusedError, match="not whole"):
        go_back(options, 2)
    assert open_pipeline(options).load() == before
    assert reasons(options, 1) == []
    (tmp_path / "away").rename(folder / lost)
    assert reasons(options, 2) == []


def test_a_missing_or_shortened_file_of_state_is_refused(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, shards=1)
    run_each_epoch(keyed, options, 3)
    (path,) = state_folder(options).glob(f"{1:020d}-*/shard_0/*.arrow")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert "bytes, not" in reasons(options, 1)[0]
    path.unlink()
    assert "is missing" in reasons(options, 1)[0]
    path.write_bytes(whole)
    assert reasons(options, 1) == []


def test_the_remote_tier_stands_in_for_the_home(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(
        tmp_path,
        local=LocalTierOptions(str(tmp_path / "local"), interval_ms=1),
        remote=RemoteTierOptions(str(tmp_path / "remote"), interval_ms=1),
    )
    run_each_epoch(keyed, options, 4)
    shutil.rmtree(state_folder(options))
    before = {str(p) for p in tmp_path.rglob("*")}
    assert reasons(options, 2) == []
    assert {str(p) for p in tmp_path.rglob("*")} == before  # a plan writes nothing
    go_back(options, 2)
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
    shutil.rmtree(tmp_path / "remote" / "state")
    shutil.rmtree(state_folder(options))
    assert "not whole" in reasons(options, 2)[0]


def test_epochs_since_an_older_snapshot_need_their_input(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, trigger=TriggerOptions(every_epochs=4))
    run_each_epoch(keyed, options, 7)  # snapshots after 1 and 5
    found = plan(options, 3)
    assert ([one.epoch for one in found.state_then], found.state_replayed, found.refusals) == ([1], [2, 3], [])
    (keyed.folder / "f00002.json").rename(tmp_path / "away")
    (message,) = reasons(options, 3)
    assert "2 epoch(s) since its snapshot" in message
    assert "f00002.json: gone" in message
    assert reasons(options, 5) == []
    (tmp_path / "away").rename(keyed.folder / "f00002.json")
    go_back(options, 3)
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_an_operator_that_the_spec_no_longer_has_is_refused(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, GRAPHS["two operators"])
    run_each_epoch(keyed, options, 2)
    (totals,) = GRAPHS["one operator"]
    without = replace(options, operators=(totals,))
    assert "which the spec no longer has" in reasons(without, 1)[0]
    assert reasons(replace(without, state=StateOptions(shards=2, dropped=("firsts",))), 1) == []


# -- fresh starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", list(GRAPHS))
def test_a_fresh_start_begins_with_empty_state(tmp_path: Path, keyed: KeyedInput, graph: str) -> None:
    options = keyed_options(tmp_path, GRAPHS[graph])
    run_each_epoch(keyed, options, 3)
    start_over(open_pipeline(options), 3, "test", truncate=True)
    now = checkpoint_of(options)
    assert (now.state, now.watermarks, now.columns) == ({}, {}, {})
    assert answers(options.deciding.location) == []
    run_to_end(options)
    run_each_epoch(keyed, options, 1)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_fresh_start_that_keeps_rows_gives_keys_that_come_again_new_answers(
    tmp_path: Path, keyed: KeyedInput
) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 2)
    before = answers(options.deciding.location)
    start_over(open_pipeline(options), 2, "test")
    assert answers(options.deciding.location) == before
    run_to_end(options)
    assert answers(options.deciding.location) == before  # counted once, not on top of what was there


def test_one_may_go_back_to_a_fresh_start_and_to_what_came_before_it(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 2)
    start_over(open_pipeline(options), 2, "test", truncate=True)
    run_to_end(options)
    go_back(options, 3)
    assert checkpoint_of(options).state == {}
    assert run_once(options).exit_code == 0
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
