"""Another number of shards changes nothing: N -> M -> N equals a pipeline that was never rescaled."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from firnline.errors import CheckpointError, CommitConflictError, ConfigError
from firnline.history.checkpoints import load_checkpoints
from firnline.history.edits.operator_state import Rescale
from firnline.history.edits.rollback import Rollback
from firnline.history.status import load_status
from firnline.options import (
    LocalTierOptions,
    OperatorOptions,
    PipelineOptions,
    RemoteTierOptions,
    TriggerOptions,
)
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink
from firnline.sources.files.options import FileSourceOptions
from tests.support.committers import commit_table
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
from tests.support.pipelines import checkpoint_of, delta_table, pipeline_options, run_once, run_to_end
from tests.support.samples import SampleInput
from tests.support.state_changes import rescale_to, state_rows


def shards_of(options: PipelineOptions) -> dict[str, int]:
    return {name: int(ref["shards"]) for name, ref in checkpoint_of(options).state.items()}


def test_state_is_dealt_out_anew_and_nothing_is_rewritten(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None)
    run_epochs(keyed, options, 3)
    before, rows = answers(options.deciding.location), state_rows(options, "totals")
    version = DeltaTable(options.deciding.location).version()
    home = Path(open_pipeline(options).state_home.root)
    files = set(home.rglob("*.arrow"))
    plan, receipt = Rescale(open_pipeline(options), 5).perform("test")
    assert receipt is not None
    assert (plan.shards_now, plan.shards, receipt.epoch, plan.new_epoch) == (1, 5, 4, 4)
    assert DeltaTable(options.deciding.location).version() == version + 2, "a claim, and one commit"
    assert shards_of(options) == {"totals": 5}
    assert set(home.rglob("*.arrow")) == files
    assert (answers(options.deciding.location), state_rows(options, "totals")) == (before, rows)
    run_epochs(keyed, options, 3)
    assert shards_of(options) == {"totals": 5}, "a run goes on with as many as it finds"
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_positions_watermarks_and_columns_stay(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, (WINDOWS,), shards=None)
    run_epochs(keyed, options, 3)
    before = open_pipeline(options).load().checkpoint
    rescale_to(options, 3)
    after = open_pipeline(options).load().checkpoint
    assert before is not None
    assert after is not None
    assert before.watermarks["windows"]["at"] is not None
    for name in ("positions", "watermarks", "columns", "schema_fingerprint", "schema_version", "floor"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.generation == before.generation + 1


def test_repeating_it_changes_nothing(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None)
    run_epochs(keyed, options, 1)
    assert rescale_to(options, 3) == 2
    version = DeltaTable(options.deciding.location).version()
    plan, receipt = Rescale(open_pipeline(options), 3).perform("again")
    assert (plan.already, receipt) == (True, None)
    assert DeltaTable(options.deciding.location).version() == version


STEPS = st.lists(
    st.tuples(st.sampled_from(["rescale", "spec"]), st.integers(1, 16), st.integers(0, 3)), min_size=2, max_size=4
)


@settings(
    max_examples=8, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    steps=STEPS,
    graph=st.sampled_from([(TOTALS,), (WINDOWS,), (FIRSTS, FIRST_TOTALS)]),
    keys=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_any_way_of_rescaling_equals_none(
    tmp_path: Path, steps: list[tuple[str, int, int]], graph: tuple[OperatorOptions, ...], keys: int, seed: int
) -> None:
    """By command or by the spec, up and down and back, with epochs in between."""
    folder = tmp_path / "example"
    shutil.rmtree(folder, ignore_errors=True)
    keyed, options = KeyedInput(folder / "in", seed, keys), keyed_options(folder, graph, shards=None, key_groups=16)
    run_epochs(keyed, options, 2)
    first = next(iter(shards_of(options).values()))
    for how, shards, epochs in [*steps, ("rescale", first, 1)]:
        if how == "rescale":
            rescale_to(options, shards)
        by_spec = replace(options, state=replace(options.state, shards=shards))
        run_epochs(keyed, by_spec if how == "spec" else options, epochs)
    never = answers_without_trouble(folder, options)
    assert answers(options.deciding.location) == never
    untroubled = replace(options, sinks=(replace(delta_table(options), table=str(folder / "untroubled-delta")),))
    for operator in graph:
        assert state_rows(options, operator.name) == state_rows(untroubled, operator.name)


@pytest.mark.parametrize("graph", [(TOTALS,), (WINDOWS,)], ids=["totals", "windows"])
def test_runs_that_were_cut_are_merged_in_time(tmp_path: Path, graph: tuple[OperatorOptions, ...]) -> None:
    """After many epochs at each number of shards, what several shards shared has been merged away."""
    keyed, options = KeyedInput(tmp_path / "in", keys=30), keyed_options(tmp_path, graph, shards=None, key_groups=8)
    for shards in (3, 8, 1):
        run_epochs(keyed, options, 7)
        rescale_to(options, shards)
    run_epochs(keyed, options, 7)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
    home = Path(open_pipeline(options).state_home.root)
    assert len(list(home.rglob("*.arrow"))) > 30, "each epoch wrote its own"
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    newest = next(iter(checkpoint.state.values()))
    assert newest["rows"] < 500, "old runs were merged"


# -- the history ------------------------------------------------------------------------------------------


def test_one_can_go_back_before_it_and_to_it(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None)
    run_epochs(keyed, options, 2)
    assert rescale_to(options, 4) == 3
    run_epochs(keyed, options, 2)
    Rollback(open_pipeline(options), 3).perform("back to it")
    assert shards_of(options) == {"totals": 4}
    Rollback(open_pipeline(options), 2).perform("back before it")
    assert shards_of(options) == {"totals": 1}
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_it_stands_in_the_list_of_checkpoints(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None)
    run_epochs(keyed, options, 1)
    rescale_to(options, 2)
    run_epochs(keyed, options, 1)
    rows = load_checkpoints(open_pipeline(options), None).checkpoints
    assert [(row["epoch"], row["kind"], row["undone"]) for row in rows] == [
        (3, "epoch", False),
        (2, "rescale", False),
        (1, "epoch", False),
    ]


def test_further_sinks_come_through_it(tmp_path: Path) -> None:
    keyed = KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path, shards=None)
    raw = DeltaSinkOptions("raw", str(tmp_path / "raw"), input="files")
    options = replace(options, sinks=(*options.sinks, raw))
    run_epochs(keyed, options, 2)
    rescale_to(options, 3)
    assert [sink.load().epoch for sink in open_pipeline(options).sinks] == [3, 3]
    run_epochs(keyed, options, 2)
    assert DeltaTable(raw.table).to_pyarrow_table().num_rows == 4 * 6
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


# -- refusals ---------------------------------------------------------------------------------------------


def test_a_number_in_the_spec_is_changed_in_the_spec(tmp_path: Path) -> None:
    options = keyed_options(tmp_path, shards=2)
    with pytest.raises(ConfigError, match=r"sets state\.shards to 2") as refused:
        Rescale(open_pipeline(options), 4)
    assert "state.shards: 4" in refused.value.hint
    Rescale(open_pipeline(options), 2)


def test_more_shards_than_key_groups_are_refused(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None, key_groups=4)
    run_epochs(keyed, options, 1)
    with pytest.raises(ConfigError, match="4 key groups"):
        rescale_to(options, 5)


def test_where_snapshots_lack_epochs_the_next_run_deals_the_state_out(tmp_path: Path) -> None:
    keyed = KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path, shards=None, trigger=TriggerOptions(every_epochs=100))
    run_epochs(keyed, options, 3)
    before = checkpoint_of(options)
    assert before.state["totals"]["epoch"] == 1, "the trigger left the newest epochs without a snapshot"
    assert Rescale(open_pipeline(options), 3).plan().by_next_run
    assert rescale_to(options, 3) == 4
    after = checkpoint_of(options)
    assert (after.state, after.positions, after.shards) == (before.state, before.positions, 3)
    assert load_status(open_pipeline(options)).shards == 3
    assert rescale_to(options, 3) == 4, "there are so many already"
    run_epochs(keyed, options, 2)
    done = checkpoint_of(options)
    assert (done.state["totals"]["epoch"], done.state["totals"]["shards"], done.shards) == (5, 3, 0)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)


def test_a_rescale_that_waits_for_the_next_run_can_be_changed_and_taken_back(tmp_path: Path) -> None:
    keyed = KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path, shards=None, trigger=TriggerOptions(every_epochs=100))
    run_epochs(keyed, options, 2)
    shards = checkpoint_of(options).state["totals"]["shards"]
    assert rescale_to(options, 3) == 3
    assert rescale_to(options, 5) == 4
    assert checkpoint_of(options).shards == 5
    Rollback(open_pipeline(options), 2).perform("rollback-1")
    run_epochs(keyed, options, 1)
    done = checkpoint_of(options)
    assert (done.state["totals"]["shards"], done.shards) == (shards, 0)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)


def test_a_pipeline_without_state_is_refused(tmp_path: Path, sample: SampleInput) -> None:
    sample.add("a.json", 3)
    options = pipeline_options(str(tmp_path / "in"), str(tmp_path / "out"))
    run_to_end(options)
    with pytest.raises(ConfigError, match="no stateful operator"):
        rescale_to(options, 2)
    with pytest.raises(ConfigError, match="has no state yet"):
        rescale_to(keyed_options(tmp_path, table="other", shards=None), 2)


# -- tiers ------------------------------------------------------------------------------------------------


def tiers(tmp_path: Path, machine: str) -> dict[str, Any]:
    return {
        "local": LocalTierOptions(str(tmp_path / machine)),
        "remote": RemoteTierOptions(str(tmp_path / "remote"), interval_ms=1),
    }


def test_a_run_on_another_machine_finds_it_in_the_remote_tier(tmp_path: Path) -> None:
    keyed, here = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None, **tiers(tmp_path, "here"))
    run_epochs(keyed, here, 2)
    rescale_to(here, 4)
    shutil.rmtree(tmp_path / "here")
    there = keyed_options(tmp_path, shards=None, **tiers(tmp_path, "there"))
    assert shards_of(there) == {"totals": 4}
    run_epochs(keyed, there, 2)
    assert shards_of(there) == {"totals": 4}
    assert answers(there.deciding.location) == answers_without_trouble(tmp_path, there)


def test_two_sources_and_the_state_of_both(tmp_path: Path) -> None:
    """A state that several inputs feed is dealt out like any other."""
    one, two = KeyedInput(tmp_path / "in", 1), KeyedInput(tmp_path / "in2", 2)
    both = replace(TOTALS, inputs=("files", "more"))
    options = keyed_options(tmp_path, (both,), shards=None)
    schema = options.sources[0].schema
    options = replace(
        options, sources=(*options.sources, FileSourceOptions("more", str(tmp_path / "in2"), schema=schema))
    )
    for shards in (3, 2):
        two.add()
        run_epochs(one, options, 2)
        rescale_to(options, shards)
    two.add()
    run_epochs(one, options, 2)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_pipeline_that_a_run_finds_rescaled_is_at_its_end_with_nothing_to_do(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None)
    run_epochs(keyed, options, 1)
    rescale_to(options, 4)
    run = run_once(options)
    assert (run.exit_code, run.result.epochs) == (0, 0)


def test_units_that_wait_for_a_committer_are_not_dropped(tmp_path: Path) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, (FIRSTS,), shards=None)
    sink = DeltaSinkOptions("delta", str(tmp_path / "out"), input="firsts", mode="staged")
    options = replace(options, sinks=(sink,))
    run_epochs(keyed, options, 1)
    commit_table(sink.table)
    run_epochs(keyed, options, 1)
    with pytest.raises(CheckpointError, match="those up to 2 wait for a committer"):
        rescale_to(options, 3)
    commit_table(sink.table)
    assert rescale_to(options, 3) == 3
    run_epochs(keyed, options, 1)
    commit_table(sink.table)
    assert shards_of(options) == {"firsts": 3}
    rows = answers(sink.table)
    assert len(rows) == len({(row[1], row[2]) for row in rows}) == len(state_rows(options, "firsts"))


def test_a_table_that_moves_meanwhile_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyed, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, shards=None)
    run_epochs(keyed, options, 2)
    original, calls = DeltaSink.edit, []

    def once_too_late(sink: DeltaSink, *args: Any) -> Any:
        calls.append(sink)
        if len(calls) == 1:
            raise CommitConflictError("the table moved")
        return original(sink, *args)

    monkeypatch.setattr(DeltaSink, "edit", once_too_late)
    assert rescale_to(options, 3) == 3
    home = Path(open_pipeline(options).state_home.root)
    made = sorted(path for path in home.iterdir() if path.name.startswith(f"{3:020d}"))
    assert sorted((path / "ABORTED").exists() for path in made) == [False, True], "nobody will ever name the first"
    run_epochs(keyed, options, 1)
    assert shards_of(options) == {"totals": 3}
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
