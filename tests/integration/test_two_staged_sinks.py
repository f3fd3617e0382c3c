"""Several sinks of which the deciding one is a two-stage table: a further sink gets what that table's log holds."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.model import Checkpoint
from firnline.committer.committer import Committer
from firnline.errors import ConfigError, FencedError
from firnline.history.status import load_status
from firnline.options import PipelineOptions, StoreOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.base import EpochCommit, RunTasks
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import as_delta
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.discard import discard
from firnline.sinks.staged.sink import StagedDeltaSink
from firnline.storage import open_storage
from firnline.testing.local import LocalEngine
from tests.support.committers import commit_table, pending_units
from tests.support.pipelines import Recorder, pipeline_options, run_once, run_to_end
from tests.support.samples import SampleInput, table_ids

SECONDS = 60  # for a thread that hangs; nobody waits so long


def two_sinks(folder: Path, **settings: Any) -> PipelineOptions:
    sinks = tuple(DeltaSinkOptions(name, str(folder / name), mode="staged") for name in "ab")
    return pipeline_options(str(folder / "in"), str(folder / "a"), sinks=sinks, **{"max_files": 1, **settings})


def commit_all(folder: Path) -> None:
    for table in "ab":
        if (folder / table / "_staging").exists():
            commit_table(folder / table)


def go_round(options: PipelineOptions, folder: Path) -> None:
    """As a schedule does: the deciding table is committed, a run gives the other what it lacks, that is committed."""
    run_to_end(options)
    commit_all(folder)
    run_to_end(options)
    commit_all(folder)


def test_a_further_sink_gets_an_epoch_once_the_deciding_tables_log_holds_it(
    tmp_path: Path, sample: SampleInput
) -> None:
    options = two_sinks(tmp_path)
    sample.add("f1.json", 3)
    sample.add("f2.json", 3)
    run_to_end(options)
    assert len(pending_units(tmp_path / "a")) == 2
    assert not pending_units(tmp_path / "b")
    found = load_status(open_pipeline(options)).sinks
    assert [(sink["epoch"], sink["epochs_pending"]) for sink in found] == [(2, 2), (0, 0)]
    commit_table(tmp_path / "a")
    run_to_end(options)
    commit_all(tmp_path)
    assert table_ids(tmp_path / "a") == table_ids(tmp_path / "b") == sample.ids


def test_units_discarded_in_the_deciding_table_are_in_no_other(tmp_path: Path, sample: SampleInput) -> None:
    options = two_sinks(tmp_path)
    sample.add("f1.json", 3)
    go_round(options, tmp_path)
    sample.add("f2.json", 3)
    run_to_end(options)
    commit_table(tmp_path / "b")
    discard(Table(str(tmp_path / "a"), {}), open_storage(str(tmp_path / "a")), "demo", 2, "person")
    sample.add("f3.json", 3)
    go_round(two_sinks(tmp_path, max_files=10), tmp_path)
    sample.add("f4.json", 3)
    go_round(options, tmp_path)
    assert table_ids(tmp_path / "a") == table_ids(tmp_path / "b") == sample.ids


class Zombie:
    """A run that stands still just before it puts an epoch, and goes on while another one claims."""

    def __init__(self, options: PipelineOptions, patch: pytest.MonkeyPatch) -> None:
        self._stands, self._goes = threading.Event(), threading.Event()
        self._pipeline = open_pipeline(options, once=True)
        self.runner = Runner(self._pipeline, LocalEngine(1), Recorder(), once=True)
        self._thread = threading.Thread(target=self.runner.run)
        commit = StagedDeltaSink.commit

        def stands_still(sink: StagedDeltaSink, epoch: EpochCommit, run_tasks: RunTasks | None = None) -> Any:
            if sink is as_delta(self._pipeline.deciding):
                self._stands.set()
                assert self._goes.wait(SECONDS)
            return commit(sink, epoch, run_tasks)

        patch.setattr(StagedDeltaSink, "commit", stands_still)

    def stand_before_put(self) -> None:
        self._thread.start()
        assert self._stands.wait(SECONDS)

    def go_on_to_the_end(self) -> None:
        self._goes.set()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def take_over_while_it_goes_on(options: PipelineOptions, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Another run lists the units, the zombie goes on to its end and committers run, then the claim is written."""
    zombie = Zombie(options, patch)
    zombie.stand_before_put()
    list_units, once = StagedDeltaSink._claim_tip, list[str]()

    def late(sink: StagedDeltaSink) -> Any:
        tip = list_units(sink)
        if sink.name == "a" and not once:
            once.append("late")
            zombie.go_on_to_the_end()
            if (folder / "b" / "_staging").exists():
                commit_table(folder / "b")
        return tip

    patch.setattr(StagedDeltaSink, "_claim_tip", late)
    run = run_once(options)
    assert once
    return run.exit_code


def test_a_zombies_last_unit_reaches_no_further_sink(
    tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = two_sinks(tmp_path)
    sample.add("f1.json", 3)
    go_round(options, tmp_path)
    sample.add("f2.json", 3)
    with monkeypatch.context() as patch:
        assert take_over_while_it_goes_on(options, tmp_path, patch) == 0
    sample.add("f3.json", 3)
    go_round(options, tmp_path)
    assert table_ids(tmp_path / "a") == table_ids(tmp_path / "b") == sample.ids


def test_a_zombies_last_unit_is_in_no_store_and_stops_no_run(
    tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StoreOptions(path=str(tmp_path / "store"))
    options = pipeline_options(
        str(tmp_path / "in"),
        str(tmp_path / "a"),
        sinks=(DeltaSinkOptions("a", str(tmp_path / "a"), mode="staged"),),
        max_files=1,
        store=store,
    )
    sample.add("f1.json", 3)
    go_round(options, tmp_path)
    sample.add("f2.json", 3)
    with monkeypatch.context() as patch:
        assert take_over_while_it_goes_on(options, tmp_path, patch) == 0
    assert recorded(options) == 1  # what is only staged is recorded nowhere
    go_round(options, tmp_path)
    assert table_ids(tmp_path / "a") == sample.ids
    assert recorded(options) == 2


def recorded(options: PipelineOptions) -> int:
    """The newest epoch in the store, as `status` reads it."""
    copies = load_status(open_pipeline(options)).copies
    return int(next(copy["epoch"] or 0 for copy in copies if copy["path"] == "store"))


def test_a_run_that_goes_on_gives_further_sinks_what_the_committer_has_committed(
    tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = {"a": threading.Event(), "b": threading.Event()}
    commit = StagedDeltaSink.commit

    def told(sink: StagedDeltaSink, epoch: EpochCommit, run_tasks: RunTasks | None = None) -> Any:
        receipt = commit(sink, epoch, run_tasks)
        put[sink.name].set()
        return receipt

    monkeypatch.setattr(StagedDeltaSink, "commit", told)
    sample.add("f1.json", 3)
    runner = Runner(open_pipeline(two_sinks(tmp_path)), LocalEngine(1))
    thread = threading.Thread(target=runner.run)
    thread.start()
    try:
        assert put["a"].wait(SECONDS)
        assert not put["b"].is_set()
        commit_table(tmp_path / "a")
        assert put["b"].wait(SECONDS)
    finally:
        runner.stop()
        thread.join(SECONDS)
    commit_all(tmp_path)
    assert table_ids(tmp_path / "b") == sample.ids


@pytest.mark.parametrize("more", [True, False])
def test_a_sink_that_holds_another_chain_is_refused_by_name(tmp_path: Path, sample: SampleInput, more: bool) -> None:
    """Both hold an epoch 1, of another author each: by its number the second sink would be in sync."""
    for table in "ab":
        alone = (DeltaSinkOptions(table, str(tmp_path / table)),)
        sample.add(f"{table}.json", 3)
        run_to_end(pipeline_options(str(tmp_path / "in"), str(tmp_path / table), sinks=alone))
    if more:
        sample.add("c.json", 3)
    sinks = (DeltaSinkOptions("a", str(tmp_path / "a")), DeltaSinkOptions("b", str(tmp_path / "b")))
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "a"), sinks=sinks)
    before = table_ids(tmp_path / "b")
    run = run_once(options)
    assert (run.exit_code != 0, run.error_code) == (True, "sink-diverged")
    assert run.result.error is not None
    assert "'b'" in run.result.error.message
    assert "epoch 1" in run.result.error.message
    assert table_ids(tmp_path / "b") == before


def test_a_run_whose_unit_was_replaced_in_the_log_stops(tmp_path: Path, sample: SampleInput) -> None:
    options = two_sinks(tmp_path)
    sample.add("f1.json", 3)
    sink = as_delta(run_once(options).pipeline.deciding)
    assert isinstance(sink, StagedDeltaSink)
    sink._chain[1] += 1  # the run takes its own unit for another one
    commit_table(tmp_path / "a")
    with pytest.raises(FencedError, match="another unit"):
        sink.read_settled()


def test_units_that_a_person_discards_while_they_are_validated_are_not_committed(
    tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "a"), max_files=1, mode="staged")
    sample.add("f1.json", 3)
    go_round(options, tmp_path)
    sample.add("f2.json", 3)
    sample.add("f3.json", 3)
    run_to_end(options)
    validate, gone = Committer._valid_prefix, list[str]()

    def interrupted(committer: Committer, *arguments: Any) -> Any:
        found = validate(committer, *arguments)
        if found and not gone:
            table = str(tmp_path / "a")
            gone.extend(discard(Table(table, {}), open_storage(table), "demo", 2, "person").pending)
        return found

    monkeypatch.setattr(Committer, "_valid_prefix", interrupted)
    assert commit_table(tmp_path / "a").units == 0
    assert len(gone) == 2
    go_round(options, tmp_path)
    assert table_ids(tmp_path / "a") == sample.ids


def as_an_older_version(patch: pytest.MonkeyPatch) -> None:
    """Checkpoints name no deciding sink, and a further sink is given what was only put."""
    write = Checkpoint.to_json
    patch.setattr(Checkpoint, "to_json", lambda self: write(replace(self, deciding={})))
    told = StagedDeltaSink.settled_epoch
    patch.setattr(StagedDeltaSink, "settled_epoch", lambda sink: None if sink._context.decides else told(sink))


def test_a_discard_refuses_what_another_sink_holds(
    tmp_path: Path, sample: SampleInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = two_sinks(tmp_path)
    sample.add("f1.json", 3)
    go_round(options, tmp_path)
    sample.add("f2.json", 3)
    with monkeypatch.context() as patch:
        as_an_older_version(patch)
        run_to_end(options)
    commit_table(tmp_path / "b")
    first, second = ((Table(str(tmp_path / name), {}), open_storage(str(tmp_path / name))) for name in "ab")
    with pytest.raises(ConfigError, match="sinks a, b"):
        discard(*first, "demo", 2, "person")
    with pytest.raises(ConfigError, match="'b' holds epoch 2"):
        discard(*first, "demo", 2, "person", {"b": second})
    go_round(options, tmp_path)
    assert table_ids(tmp_path / "a") == table_ids(tmp_path / "b") == sample.ids


def test_units_discarded_in_a_further_table_are_put_again(tmp_path: Path, sample: SampleInput) -> None:
    """However often: the run that follows is not fenced by them."""
    options = two_sinks(tmp_path)
    sample.add("f1.json", 3)
    run_to_end(options)
    commit_table(tmp_path / "a")
    run_to_end(options)
    for _ in range(3):
        discard(Table(str(tmp_path / "b"), {}), open_storage(str(tmp_path / "b")), "demo", 1, "person")
    go_round(options, tmp_path)
    assert table_ids(tmp_path / "b") == sample.ids
