"""State seen and changed from outside a run: old epochs, other tiers, imports, snapshots, the Python interface."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

import firnline
from firnline.errors import CheckpointError, ConfigError, FencedError, NotRunningError, StateLostError
from firnline.history.diff import load_between
from firnline.history.edits.rollback import Rollback
from firnline.history.epoch import load_epoch
from firnline.history.state import load_state_view
from firnline.options import LocalTierOptions, PipelineOptions, RemoteTierOptions, TriggerOptions
from firnline.run.observer import EpochFacts, Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.testing.local import LocalEngine
from tests.support.keyed import (
    FIRST_TOTALS,
    FIRSTS,
    TOTALS,
    WINDOWS,
    KeyedInput,
    answers,
    answers_without_trouble,
    keyed_options,
    run_epochs,
)
from tests.support.pipelines import run_once, run_to_end
from tests.support.state_changes import import_rows_of, rescale_to, state_rows


def epoch_of(options: PipelineOptions) -> int:
    return open_pipeline(options).load().epoch


def pipeline_of(options: PipelineOptions) -> firnline.Pipeline:
    found = firnline.Pipeline.__new__(firnline.Pipeline)
    found._set_options(options)
    return found


def as_totals(rows: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """A table of answers (k, n, total) as rows of state."""
    return sorted(({"k": k, "_timer": None, "n": n, "total": total} for k, n, total in rows), key=str)


# -- looking ----------------------------------------------------------------------------------------------


def test_state_is_what_the_table_says_after_every_epoch(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    told = {}
    for epoch in range(1, 5):
        run_epochs(keyed, options, 1)
        told[epoch] = as_totals(answers(options.deciding.location))
    for epoch, rows in told.items():
        assert state_rows(options, "totals", at=epoch) == rows
        view = load_state_view(open_pipeline(options), "totals", at=epoch)
        assert (view.epoch, view.ref.epoch, view.note) == (epoch, epoch, "")


def test_a_snapshot_older_than_the_epoch_is_told(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, trigger=TriggerOptions(every_epochs=3))
    run_epochs(keyed, options, 5)
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    snapshot = int(checkpoint.state["totals"]["epoch"])
    assert snapshot < 5
    view = load_state_view(open_pipeline(options), "totals")
    assert (view.epoch, view.ref.epoch) == (5, snapshot)
    assert view.note == f"the newest snapshot at epoch 5 is that of epoch {snapshot}"
    assert view.facts()["snapshot_epoch"] == snapshot


def test_watermark_and_timers_are_those_of_the_snapshot(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, (WINDOWS,))
    run_epochs(keyed, options, 4)
    view = load_state_view(open_pipeline(options), "windows")
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    assert view.watermark == checkpoint.watermarks["windows"]["at"]
    counted = view.reader.count()
    assert counted.keys == counted.timers > 0
    assert all(row["_timer"] > view.watermark for row in state_rows(options, "windows"))


def test_what_the_local_tier_lacks_is_read_from_the_remote_one(tmp_path: Path, keyed: KeyedInput) -> None:
    tiers: dict[str, Any] = {
        "local": LocalTierOptions(str(tmp_path / "local")),
        "remote": RemoteTierOptions(str(tmp_path / "remote"), interval_ms=1),
    }
    options = keyed_options(tmp_path, **tiers)
    run_epochs(keyed, options, 3)
    rows = state_rows(options, "totals")
    for lost in ("*.arrow", "*"):
        for path in (tmp_path / "local").rglob(lost):
            if path.is_file():
                path.unlink()
        assert state_rows(options, "totals") == rows
        assert not list((tmp_path / "local").rglob("*.arrow")), "looking writes nothing"
    shutil.rmtree(tmp_path / "remote")
    with pytest.raises(CheckpointError):
        state_rows(options, "totals")


def test_unknown_operators_and_epochs_are_answered_with_known_ones(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        load_state_view(open_pipeline(options), "totals")
    run_epochs(keyed, options, 1)
    with pytest.raises(ConfigError, match="no operator 'total' that keeps state") as unknown:
        load_state_view(open_pipeline(options), "total")
    assert unknown.value.hint == "Did you mean 'totals'?"
    with pytest.raises(ConfigError, match="epoch 7 is not known; the nearest known is 1"):
        load_state_view(open_pipeline(options), "totals", at=7)


def test_an_operator_that_was_renamed_is_found_by_its_new_name(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_epochs(keyed, options, 2)
    rows = state_rows(options, "totals")
    renamed = keyed_options(tmp_path, (replace(TOTALS, name="sums", renamed_from="totals"),))
    assert state_rows(renamed, "sums") == rows
    gone = keyed_options(tmp_path, (replace(TOTALS, name="sums"),))
    reader = load_state_view(open_pipeline(gone), "totals").reader
    assert reader.count().keys == len(rows), "the spec no longer has it, but the checkpoint does"
    with pytest.raises(ConfigError, match="no longer has this operator"):
        reader.find(pa.table({"k": ["k1"]}))


# -- importing --------------------------------------------------------------------------------------------


def test_keys_move_from_one_pipeline_to_another(tmp_path: Path, keyed: KeyedInput) -> None:
    """What one pipeline counted so far, another one counts on with."""
    first = keyed_options(tmp_path, table="first")
    run_epochs(keyed, first, 3)
    counted = state_rows(first, "totals")
    assert len(counted) > 2
    other = tmp_path / "other"
    fresh = KeyedInput(other / "in", seed=5)
    second = keyed_options(other, shards=3)
    run_epochs(fresh, second, 1)
    own = {row["k"]: row for row in state_rows(second, "totals")}
    assert import_rows_of(second, "totals", counted) == 2
    expected = {**own, **{row["k"]: row for row in counted}}
    assert state_rows(second, "totals") == sorted(expected.values(), key=str)
    table = answers(second.deciding.location)
    run_epochs(fresh, second, 2)
    after = {row["k"]: row["n"] for row in state_rows(second, "totals")}
    assert sum(after.values()) == sum(row["n"] for row in expected.values()) + 2 * 6
    assert {row[0] for row in table} <= {row[0] for row in answers(second.deciding.location)}


def test_an_import_changes_state_alone(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, (FIRSTS, FIRST_TOTALS))
    run_epochs(keyed, options, 2)
    before, rows = open_pipeline(options).load().checkpoint, answers(options.deciding.location)
    firsts = state_rows(options, "firsts")
    import_rows_of(options, "totals", [{"k": "new", "n": 7, "total": 70}])
    after = open_pipeline(options).load().checkpoint
    assert before is not None
    assert after is not None
    assert (after.positions, after.watermarks, after.columns) == (before.positions, before.watermarks, before.columns)
    assert answers(options.deciding.location) == rows
    assert state_rows(options, "firsts") == firsts
    assert {"k": "new", "_timer": None, "n": 7, "total": 70} in state_rows(options, "totals")


def test_imported_timers_fire(tmp_path: Path, keyed: KeyedInput) -> None:
    """A window that is imported with its timer is closed when the watermark passes it."""
    options = keyed_options(tmp_path, (WINDOWS,))
    run_epochs(keyed, options, 3)
    row = max(state_rows(options, "windows"), key=lambda one: one["_timer"])
    import_rows_of(options, "windows", [{**row, "k": "new"}])
    assert any(one["k"] == "new" for one in state_rows(options, "windows"))
    run_epochs(keyed, options, 8)
    view = load_state_view(open_pipeline(options), "windows")
    assert view.watermark is not None
    assert view.watermark > row["_timer"]
    assert not any(one["k"] == "new" for one in state_rows(options, "windows"))


def test_one_can_go_back_before_an_import(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_epochs(keyed, options, 2)
    import_rows_of(options, "totals", [{"k": "k1", "n": 1000, "total": 0}])
    run_epochs(keyed, options, 1)
    Rollback(open_pipeline(options), 2).perform("back")
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_an_import_that_is_lost_is_never_replaced_by_what_was_before(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_epochs(keyed, options, 2)
    import_rows_of(options, "totals", [{"k": "k1", "n": 1000, "total": 0}])
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    home = Path(open_pipeline(options).state_home.root)
    shutil.rmtree(home / checkpoint.state["totals"]["checkpoint"])
    keyed.add()
    run = run_once(options)
    assert run.error_code == StateLostError.code
    assert "epoch 3 imported" in str(run.result.error)


def test_a_rescale_that_is_lost_costs_nothing(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, shards=None)
    run_epochs(keyed, options, 2)
    rescale_to(options, 4)
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    home = Path(open_pipeline(options).state_home.root)
    shutil.rmtree(home / checkpoint.state["totals"]["checkpoint"])
    run_epochs(keyed, options, 2)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_wrong_import_fences_nobody(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_epochs(keyed, options, 1)
    version = DeltaTable(options.deciding.location).version()
    for rows, told in (
        ([{"k": "a", "n": 1}], "lack total"),
        ([{"k": "a", "n": 1, "total": 1, "x": 1}], "have x"),
        ([{"k": "a", "n": 1, "total": 1}] * 2, "more than once"),
        ([{"k": 5, "n": 1, "total": 1}], "is int64, not string"),
    ):
        with pytest.raises(ConfigError, match=told):
            import_rows_of(options, "totals", rows)
    with pytest.raises(ConfigError, match="no operator 'nobody'"):
        import_rows_of(options, "nobody", [])
    assert DeltaTable(options.deciding.location).version() == version


def test_an_import_stands_in_the_history(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_epochs(keyed, options, 1)
    import_rows_of(options, "totals", [{"k": "new", "n": 7, "total": 70}])
    run_epochs(keyed, options, 1)
    pipeline = open_pipeline(options)
    between = load_between(pipeline, None, load_epoch(pipeline, None, 1), load_epoch(pipeline, None, 3))
    edit = {"epoch": 2, "kind": "import", "to_epoch": 1, "operator": "totals", "keys": 1, "replaced": False}
    assert between.edits == [edit]


# -- the Python interface ---------------------------------------------------------------------------------


def test_export_and_import_by_keys(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_epochs(keyed, options, 3)
    pipeline = pipeline_of(options)
    everything = pipeline.export_state_for_keys("totals", None)
    assert sorted(everything.to_pylist(), key=str) == state_rows(options, "totals")
    key = everything.column("k")[0].as_py()
    by_rows = pipeline.export_state_for_keys("totals", [{"k": key}, {"k": "nobody"}])
    by_table = pipeline.export_state_for_keys("totals", pa.table({"k": [key]}))
    assert by_rows.to_pylist() == by_table.to_pylist() == everything.slice(0, 1).to_pylist()
    changed = by_table.set_column(by_table.column_names.index("n"), "n", pa.array([900]))
    assert pipeline.import_state_for_keys("totals", changed) == 4
    assert pipeline.export_state_for_keys("totals", [{"k": key}]).column("n").to_pylist() == [900]
    assert pipeline.import_state_for_keys("totals", changed.slice(0, 0)) == 4, "nothing to do"
    with pytest.raises(ConfigError, match="the key has the columns k"):
        pipeline.export_state_for_keys("totals", [{"key": 1}])
    with pytest.raises(ConfigError, match="does not fit its column"):
        pipeline.export_state_for_keys("totals", [{"k": 1}])


def test_all_windows_of_a_key_by_its_first_column(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, (WINDOWS,))
    run_epochs(keyed, options, 4)
    rows = state_rows(options, "windows")
    key = rows[0]["k"]
    found = pipeline_of(options).export_state_for_keys("windows", [{"k": key}]).to_pylist()
    assert sorted(found, key=str) == [row for row in rows if row["k"] == key]


def test_snapshot_and_restore_of_one_operator(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_epochs(keyed, options, 2)
    then, pipeline = state_rows(options, "totals"), pipeline_of(options)
    path = tmp_path / "totals.parquet"
    assert pipeline.snapshot("totals", path) == len(then)
    import_rows_of(options, "totals", [{"k": "more", "n": 1, "total": 1}])
    assert len(state_rows(options, "totals")) == len(then) + 1
    assert pipeline.restore("totals", path) == 4
    assert state_rows(options, "totals") == then, "keys that the snapshot did not have are gone"
    run_epochs(keyed, options, 2)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_going_back_to_a_checkpoint_by_its_id(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    pipeline = pipeline_of(options)
    assert pipeline.restored_position() is None
    run_epochs(keyed, options, 2)
    held = open_pipeline(options).load()
    rows, state, position = (
        answers(options.deciding.location),
        state_rows(options, "totals"),
        pipeline.restored_position(),
    )
    assert position is not None
    assert position["files"]["last_committed_file"].endswith("f00002.json")
    run_epochs(keyed, options, 2)
    assert pipeline.restored_position() != position
    assert pipeline.restore_from_checkpoint(held.attempt) == 5
    assert (answers(options.deciding.location), state_rows(options, "totals")) == (rows, state)
    assert pipeline.restored_position() == position
    newest = open_pipeline(options).load().attempt
    assert pipeline.restore_from_checkpoint(newest) == 5, "it stands there already"
    with pytest.raises(ConfigError, match="has no checkpoint 'nosuch'"):
        pipeline.restore_from_checkpoint("nosuch")
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


class Followed(Observer):
    """Tells when an epoch was committed."""

    def __init__(self) -> None:
        self.has_committed = threading.Event()

    def committed(self, facts: EpochFacts) -> None:
        self.has_committed.set()


Started = Callable[[PipelineOptions], tuple[firnline.Pipeline, Followed]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts pipelines in threads of their own, without Spark, and stops them at the end."""
    monkeypatch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
    running: list[tuple[firnline.Pipeline, threading.Thread]] = []

    def start(options: PipelineOptions) -> tuple[firnline.Pipeline, Followed]:
        pipeline, followed = pipeline_of(options), Followed()
        thread = threading.Thread(target=lambda: pipeline.run(observer=followed), daemon=True)
        thread.start()
        running.append((pipeline, thread))
        assert followed.has_committed.wait(120)
        return pipeline, followed

    yield start
    for pipeline, thread in running:
        if pipeline._runner is not None:
            pipeline._runner.stop()
        thread.join(120)
        assert not thread.is_alive()


def test_a_checkpoint_on_demand(tmp_path: Path, keyed: KeyedInput, started: Started) -> None:
    options = keyed_options(tmp_path, poll_interval_secs=3600.0, trigger=TriggerOptions(every_epochs=100))
    keyed.add()
    pipeline, _ = started(options)
    keyed.add()
    found = pipeline.trigger_checkpoint()
    held = open_pipeline(options).load()
    assert held.attempt == found
    assert held.checkpoint is not None
    assert int(held.checkpoint.state["totals"]["epoch"]) == held.epoch, "the state too, whatever the trigger says"


def test_a_checkpoint_needs_a_run_state_and_sources(tmp_path: Path, keyed: KeyedInput) -> None:
    pipeline = pipeline_of(keyed_options(tmp_path))
    with pytest.raises(NotRunningError, match="is not running in this process"):
        pipeline.trigger_checkpoint()
    with pytest.raises(ConfigError, match="no stateful operator"):
        pipeline_of(replace(pipeline.options, operators=())).trigger_checkpoint()
    with pytest.raises(ConfigError, match="has no source"):
        pipeline_of(replace(pipeline.options, sources=())).trigger_checkpoint()


def test_a_run_is_fenced_by_an_import(tmp_path: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run does after somebody changed its state never lands on top of it."""
    monkeypatch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
    options = keyed_options(tmp_path, poll_interval_secs=3600.0)
    keyed.add()
    pipeline, followed = pipeline_of(options), Followed()
    ends: list[BaseException] = []

    def run() -> None:
        try:
            pipeline.run(observer=followed)
        except FencedError as error:
            ends.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert followed.has_committed.wait(120)
    rows = [{"k": "new", "n": 7, "total": 70}]
    assert import_rows_of(options, "totals", rows) == 2
    keyed.add()
    with pytest.raises(NotRunningError, match="ended before it took the checkpoint"):
        pipeline.trigger_checkpoint()
    thread.join(120)
    assert [type(error) for error in ends] == [FencedError]
    assert epoch_of(options) == 2
    run_to_end(options)
    assert {"k": "new", "_timer": None, "n": 7, "total": 70} in state_rows(options, "totals")
