"""State that is made again begins with the first epoch that its operator folded; a damaged ledger entry stops nobody
while another copy tells the same.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from firnline.history.edits.ledger_repair import LedgerRepair
from firnline.history.edits.operator_state import Rescale, import_state
from firnline.history.edits.restore import restore_savepoint
from firnline.history.edits.rollback import Rollback
from firnline.history.savepoints.create import create_savepoint
from firnline.history.state import load_state_view
from firnline.options import (
    CheckpointOptions,
    LocalTierOptions,
    OperatorOptions,
    PipelineOptions,
    StateOptions,
    StoreOptions,
    TriggerOptions,
)
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.state.export import write_export
from tests.support.damage import break_info, commits_of, ledger_files
from tests.support.keyed import FIRSTS, TOTALS, WINDOWS, KeyedInput, answers, answers_without_trouble, keyed_options
from tests.support.pipelines import checkpoint_of, run_once, run_to_end

ADDED = OperatorOptions("second", "deduplicate", ("files",), {"keys": ["k"]}, initial_state="empty")
EVERY_TWO = CheckpointOptions(trigger=TriggerOptions(every_epochs=2))


class Story:
    """A pipeline that totals its input, and later tells the first row of each key, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = 0
        (folder / "in").mkdir(parents=True)

    def add(self, *keys: str) -> None:
        self.files += 1
        lines = [json.dumps({"k": key, "v": self.files, "at": "2026-01-01T00:00:00Z"}) for key in keys]
        (self.folder / "in" / f"f{self.files:05d}.json").write_text("\n".join(lines) + "\n")

    def options(self, *added: OperatorOptions, **settings: Any) -> PipelineOptions:
        plain = keyed_options(self.folder, **settings)
        rows = DeltaSinkOptions("rows", str(self.folder / "rows"), input=added[0].name if added else "files")
        return replace(plain, operators=(TOTALS, *added), sinks=(*plain.sinks, rows))

    def run(self, options: PipelineOptions, *keys: str) -> None:
        self.add(*keys)
        run_to_end(options)

    def seen(self) -> list[str]:
        """The keys of the rows that went to the further table, in the order of the epochs."""
        return [row[1] for row in sorted(answers(self.folder / "rows"), key=lambda row: row[2])]

    def lose_state(self) -> None:
        shutil.rmtree(self.folder / "out" / "_firnline" / "demo" / "state")

    def births(self, options: PipelineOptions) -> dict[str, int | None]:
        return {name: ref.get("born") for name, ref in checkpoint_of(options).state.items()}


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """Epoch 1 has the key `a`; the operator `second` is added with epoch 2, which has `b`."""
    story = Story(tmp_path)
    story.run(story.options(), "a")
    story.run(story.options(ADDED), "b")
    return story


def test_state_of_an_operator_is_never_made_from_input_that_came_before_it(story: Story) -> None:
    options = story.options(ADDED)
    assert story.births(options) == {"totals": 1, "second": 2}
    story.lose_state()
    story.run(options, "a", "b")
    assert story.seen() == ["a", "b", "a"]
    assert [row[:2] for row in answers(story.folder / "out")] == [("a", 2), ("b", 2)]


def test_a_birth_follows_its_operator_through_a_new_name_a_rescale_and_a_rollback(story: Story) -> None:
    renamed = replace(ADDED, name="firsts", renamed_from="second", initial_state="")
    options = replace(story.options(renamed), state=StateOptions())
    story.run(options, "c")
    assert Rescale(open_pipeline(options), 3).perform("rescale-1")[1] is not None
    story.run(options, "d")
    Rollback(open_pipeline(options), 3).perform("rollback-1")
    assert story.births(options) == {"totals": 1, "firsts": 2}
    story.lose_state()
    story.add("a", "c")
    run_to_end(options)
    assert story.births(options) == {"totals": 1, "firsts": 2}
    assert sorted(story.seen()) == ["a", "a", "b", "c", "d"]


def test_an_older_snapshot_under_the_old_name_is_found_after_a_rename(story: Story) -> None:
    renamed = replace(ADDED, name="firsts", renamed_from="second", initial_state="")
    story.run(story.options(renamed), "c")
    newest = checkpoint_of(story.options(renamed)).state["firsts"]["checkpoint"]
    shutil.rmtree(story.folder / "out" / "_firnline" / "demo" / "state" / newest)
    (story.folder / "in" / "f00002.json").unlink()  # only its snapshot tells the second epoch
    story.run(story.options(renamed), "b", "c", "d")
    assert story.seen() == ["a", "b", "c", "d"]


def test_an_operator_that_comes_back_begins_anew(story: Story) -> None:
    without = replace(story.options(), state=StateOptions(dropped=("second",), shards=2))
    story.run(without, "c")
    options = story.options(ADDED)
    story.run(options, "d")
    assert story.births(options) == {"totals": 1, "second": 4}
    story.lose_state()
    story.run(options, "c", "d")
    assert story.seen() == ["a", "b", "c", "d", "c"]


def test_an_operator_that_was_rolled_back_before_its_birth_is_born_again(story: Story) -> None:
    options = story.options(ADDED)
    Rollback(open_pipeline(options), 1).perform("rollback-1")
    story.run(options)
    assert story.births(options) == {"totals": 1, "second": 4}
    story.lose_state()
    story.run(options, "a", "b")
    assert story.seen() == ["a", "b", "a"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_restore_from_a_savepoint_keeps_the_births(story: Story, elsewhere: bool) -> None:
    options = story.options(ADDED)
    saved = str(story.folder / "saved")
    create_savepoint(open_pipeline(options), saved, copy=True, run="save-1")
    story.run(options, "c")
    if elsewhere:
        for table in ("out", "rows"):
            (story.folder / table).rename(story.folder / f"old-{table}")
    restore_savepoint(open_pipeline(options), saved, "restore-1")
    assert story.births(options) == {"totals": 1, "second": 2}
    story.lose_state()
    story.run(options, "a", "b", "c")
    assert story.seen() == ["a", "b", "c", "a"]


def test_imported_state_is_never_made_again_without_what_was_imported(story: Story) -> None:
    options = story.options(ADDED)
    view = load_state_view(open_pipeline(options), "second")
    assert import_state(open_pipeline(options), "second", pa.concat_tables(view.reader.scan()), "import-1") is not None
    assert story.births(options) == {"totals": 1, "second": 2}
    story.lose_state()
    story.add("a")
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "state-lost")


def test_an_operator_that_began_with_an_exported_state_begins_with_that_very_state_again(story: Story) -> None:
    path = story.folder / "exported.parquet"
    view = load_state_view(open_pipeline(story.options(ADDED)), "second")
    write_export(str(path), view.reader.schema, view.reader.scan(), {})
    options = story.options(ADDED, replace(ADDED, name="third", initial_state=str(path)))
    options = replace(options, sinks=(options.sinks[0], replace(options.sinks[1], input="second")))
    story.run(options, "c")
    expected = load_state_view(open_pipeline(options), "third").reader.count()
    story.lose_state()
    run_to_end(options)
    story.run(options, "c")
    assert load_state_view(open_pipeline(options), "third").reader.count() == expected
    story.lose_state()
    path.write_bytes(path.read_bytes()[:-1])
    story.add("c")
    run = run_once(options)
    assert run.error_code == "state-lost"
    assert "exported state" in str(run.result.error)


def test_an_operator_is_not_put_before_one_whose_snapshot_is_older(tmp_path: Path) -> None:
    source = KeyedInput(tmp_path / "in")
    options = keyed_options(tmp_path)
    options = replace(options, checkpoint=EVERY_TWO)
    for _ in range(2):  # the first epoch makes a snapshot, the second does not
        source.add()
    run_to_end(options)
    before = replace(FIRSTS, initial_state="empty")
    changed = replace(options, operators=(before, replace(TOTALS, inputs=("firsts",))))
    source.add()
    run = run_once(changed)
    assert run.exit_code == 2
    assert "was put before 'totals'" in str(run.result.error)


# -- checkpoints that do not tell births ---------------------------------------------------------------


def forget_births(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write references as a Firnline does that knows nothing of births."""
    from firnline.state.manifest import SnapshotRef

    plain = SnapshotRef.to_json

    def to_json(ref: SnapshotRef) -> dict[str, Any]:
        return {name: value for name, value in plain(ref).items() if name not in ("born", "initial")}

    monkeypatch.setattr(SnapshotRef, "to_json", to_json)


def test_without_a_recorded_birth_the_ledger_proves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_births(monkeypatch)
    story = Story(tmp_path)
    story.run(story.options(), "a")
    story.run(story.options(ADDED), "b")
    assert story.births(story.options(ADDED)) == {"totals": None, "second": None}
    story.lose_state()
    story.run(story.options(ADDED), "a", "b")
    assert story.seen() == ["a", "b", "a"]


def test_a_birth_that_nothing_proves_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is new since epoch 3, and so may the operator be, or older by its former name."""
    forget_births(monkeypatch)
    story = Story(tmp_path)
    story.run(story.options(), "a")
    story.run(story.options(ADDED), "b")
    story.run(story.options(replace(ADDED, name="firsts", renamed_from="second")), "c")
    options = story.options(replace(ADDED, name="firsts"))
    story.lose_state()
    story.add("b")
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "state-lost")
    assert "tell in which epoch" in str(run.result.error)
    run_to_end(story.options(replace(ADDED, name="firsts", renamed_from="second")))
    assert story.seen() == ["a", "b", "c"]


# -- a damaged entry of the ledger ---------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:  # one digit of the checkpoint in it
        at = data.index(b'"generation":') + len(b'"generation":')
        path.write_bytes(data[:at] + b"7" + data[at + 1 :])


@pytest.mark.parametrize("how", ["missing", "cut", "checkpoint"])
@pytest.mark.parametrize("which", [-1, -2])
def test_a_damaged_ledger_entry_stops_no_state(tmp_path: Path, how: str, which: int) -> None:
    source, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, late_files="ignore")
    for _ in range(3):
        source.add()
    run_to_end(options)
    damage(ledger_files(tmp_path / "out", "demo")[which], how)
    source.add()
    run_to_end(options)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)


def test_a_damaged_entry_that_every_sink_holds_stops_none_of_them(tmp_path: Path) -> None:
    story = Story(tmp_path)
    options = story.options(ADDED, late_files="ignore")
    for key in "abc":
        story.run(options, key)
    damage(ledger_files(tmp_path / "out", "demo")[-1], "missing")
    story.run(options, "a", "d")
    damage(ledger_files(tmp_path / "out", "demo")[-1], "cut")
    story.run(options, "d", "e")
    assert story.seen() == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("lost", ["entry and newest snapshot", "entry before the replayed epoch"])
def test_snapshots_and_watermarks_beyond_a_damaged_entry_are_found_by_its_copies(tmp_path: Path, lost: str) -> None:
    source, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, (WINDOWS,), late_files="ignore")
    if lost == "entry before the replayed epoch":
        options = replace(options, checkpoint=EVERY_TWO)
    for _ in range(4):
        source.add()
        run_to_end(options)
    state = tmp_path / "out" / "_firnline" / "demo" / "state"
    newest = checkpoint_of(options).state["windows"]
    if newest["epoch"] == 4:
        shutil.rmtree(state / newest["checkpoint"])
    damage(ledger_files(tmp_path / "out", "demo")[-2], "cut")
    source.add()
    run_to_end(options)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)


def test_an_entry_whose_checkpoint_is_damaged_is_made_whole_with_the_commits_copy(tmp_path: Path) -> None:
    source, options = (
        KeyedInput(tmp_path / "in"),
        replace(keyed_options(tmp_path, late_files="ignore"), checkpoint=EVERY_TWO),
    )
    for _ in range(2):
        source.add()
    run_to_end(options)
    damage(ledger_files(tmp_path / "out", "demo")[-1], "checkpoint")  # epoch 2 has no snapshot
    source.add()
    run_to_end(options)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)


def test_what_only_the_damaged_entry_told_is_said_with_the_way_out(tmp_path: Path) -> None:
    source, options = (
        KeyedInput(tmp_path / "in"),
        replace(keyed_options(tmp_path, late_files="ignore"), checkpoint=EVERY_TWO),
    )
    for _ in range(2):
        source.add()
    run_to_end(options)
    damage(ledger_files(tmp_path / "out", "demo")[-1], "missing")
    source.add()
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "state-lost")
    assert run.result.error is not None
    assert "firnline rollback --to" in (run.result.error.hint or "")


@pytest.mark.parametrize("copy", ["store", "local"])
def test_the_store_or_a_tier_stands_in_for_entry_and_commit(tmp_path: Path, copy: str) -> None:
    place = str(tmp_path / "copy")
    copies = {"store": StoreOptions("file", place)} if copy == "store" else {"local": LocalTierOptions(place, 1)}
    source, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, late_files="ignore", **copies)
    for _ in range(3):
        source.add()
        run_to_end(options)
    newest = checkpoint_of(options).state["totals"]
    state = Path(place) / "state" / "demo" if copy == "local" else tmp_path / "out" / "_firnline" / "demo" / "state"
    shutil.rmtree(state / newest["checkpoint"])
    damage(ledger_files(tmp_path / "out", "demo")[-2], "missing")
    break_info(commits_of(tmp_path / "out", "demo")[-2])
    source.add()
    run_to_end(options)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)


def test_snapshots_beyond_what_a_repair_of_the_ledger_leads_over_are_found(tmp_path: Path) -> None:
    source, options = KeyedInput(tmp_path / "in"), keyed_options(tmp_path, (WINDOWS,))
    for _ in range(4):
        source.add()
        run_to_end(options)
    newest = checkpoint_of(options).state["windows"]["checkpoint"]
    damage(ledger_files(tmp_path / "out", "demo")[-2], "missing")
    LedgerRepair(open_pipeline(options), processed=["*"]).perform("repair-1")
    shutil.rmtree(tmp_path / "out" / "_firnline" / "demo" / "state" / newest)
    source.add()
    run_to_end(options)
    assert answers(tmp_path / "out") == answers_without_trouble(tmp_path, options)
