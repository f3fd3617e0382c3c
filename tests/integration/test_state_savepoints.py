"""Savepoints of pipelines with state: whatever happens afterwards, a restore brings rows, progress and state back."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import CheckpointError, DamagedError, FirnlineError, RollbackRefusedError
from firnline.history.edits.restore import Restored, restore_savepoint
from firnline.history.savepoints.catalog import dispose_savepoint, list_savepoints
from firnline.history.savepoints.create import create_savepoint
from firnline.history.savepoints.format import Savepoint
from firnline.history.savepoints.state import is_behind
from firnline.maintenance.gc import gc
from firnline.maintenance.state import sweep_state
from firnline.names import temporary_name
from firnline.options import LocalTierOptions, PipelineOptions, RemoteTierOptions, TriggerOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.keyed import GRAPHS, KeyedInput, answers, answers_without_trouble, keyed_options, run_each_epoch
from tests.support.pipelines import delta_table, run_once, run_to_end, state_folder
from tests.support.samples import files_below


def save(options: PipelineOptions, path: Path, *, copy: bool) -> Savepoint:
    return create_savepoint(open_pipeline(options), str(path), copy=copy, run="test")[0]


def restore(options: PipelineOptions, path: Path, **settings: Any) -> Restored:
    return restore_savepoint(open_pipeline(options), str(path), "test", **settings)


def sweep(options: PipelineOptions) -> None:
    """Everything goes that may, at once."""
    gc(options.deciding.location, grace_seconds=0)
    sweep_state(open_pipeline(options), grace_seconds=0)


@pytest.mark.parametrize("copy", [False, True], ids=["pinned", "copied"])
@pytest.mark.parametrize("graph", list(GRAPHS))
def test_state_comes_back_and_the_rest_is_folded_again(
    tmp_path: Path, keyed: KeyedInput, graph: str, copy: bool
) -> None:
    options = keyed_options(tmp_path, GRAPHS[graph], rollback_window=1, keep_checkpoints=0)
    run_each_epoch(keyed, options, 3)
    before = answers(options.deciding.location)
    made = save(options, tmp_path / "saved", copy=copy)
    kept = files_below(tmp_path / "saved")
    run_each_epoch(keyed, options, 5)
    sweep(options)
    result = restore(options, tmp_path / "saved")
    assert (result.to_epoch, result.state_bytes) == (3, made.state_size_bytes)
    assert made.state_size_bytes > 0
    assert answers(options.deciding.location) == before
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)
    assert files_below(tmp_path / "saved") == kept
    assert restore(options, tmp_path / "saved").already


def test_a_pinned_savepoint_keeps_its_state_from_sweeps_until_it_is_disposed_of(
    tmp_path: Path, keyed: KeyedInput
) -> None:
    options = keyed_options(tmp_path, rollback_window=1, keep_checkpoints=0)
    run_each_epoch(keyed, options, 2)
    made = save(options, tmp_path / "saved", copy=False)
    (listed,) = list_savepoints(open_pipeline(options))
    assert listed.state_size_bytes == made.state_size_bytes
    run_each_epoch(keyed, options, 6)
    sweep(options)
    assert all((state_folder(options) / file.name).is_file() for file in made.state_files)
    dispose_savepoint(open_pipeline(options), made.id)
    sweep(options)
    (state,) = made.state
    assert not (state_folder(options) / state.checkpoint / "COMMITTED").exists()


def test_a_copy_restores_where_nothing_else_is_left(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, GRAPHS["two operators"])
    run_each_epoch(keyed, options, 3)
    save(options, tmp_path / "saved", copy=True)
    shutil.move(tmp_path / "saved", tmp_path / "moved")
    shutil.rmtree(options.deciding.location)
    local = LocalTierOptions(str(tmp_path / "local"))
    there = dataclasses.replace(
        options,
        sinks=(dataclasses.replace(delta_table(options), table=str(tmp_path / "elsewhere")),),
        checkpoint=dataclasses.replace(options.checkpoint, local=local),
    )
    result = restore(there, tmp_path / "moved")
    assert result.state_copied_bytes >= result.state_bytes > 0
    assert str(state_folder(there)).startswith(local.path)
    run_each_epoch(keyed, there, 2)
    assert answers(there.deciding.location) == answers_without_trouble(tmp_path, there)


def test_without_copies_another_table_takes_the_state_from_where_it_was_saved(
    tmp_path: Path, keyed: KeyedInput
) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 3)
    save(options, tmp_path / "saved", copy=False)
    there = dataclasses.replace(
        options, sinks=(dataclasses.replace(delta_table(options), table=str(tmp_path / "elsewhere")),)
    )
    result = restore(there, tmp_path / "saved")
    assert result.state_copied_bytes > 0
    run_each_epoch(keyed, there, 2)
    assert answers(there.deciding.location) == answers_without_trouble(tmp_path, there)


def test_sweeping_goes_on_after_a_restore_elsewhere(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, rollback_window=100, keep_checkpoints=0)
    run_each_epoch(keyed, options, 4)
    save(options, tmp_path / "saved", copy=True)
    there = dataclasses.replace(
        options, sinks=(dataclasses.replace(delta_table(options), table=str(tmp_path / "elsewhere")),)
    )
    restore(there, tmp_path / "saved")
    run_each_epoch(keyed, there, 1)
    (swept,) = sweep_state(open_pipeline(there), grace_seconds=0)
    assert any("cannot go back" in note for note in swept.notes)
    run_each_epoch(keyed, there, 1)
    assert answers(there.deciding.location) == answers_without_trouble(tmp_path, there)


def test_state_that_only_the_remote_tier_has_is_saved_from_there(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(
        tmp_path,
        local=LocalTierOptions(str(tmp_path / "local"), interval_ms=1),
        remote=RemoteTierOptions(str(tmp_path / "remote"), interval_ms=1),
    )
    run_each_epoch(keyed, options, 2)
    shutil.rmtree(state_folder(options))
    made = save(options, tmp_path / "saved", copy=True)
    assert made.state_size_bytes > 0
    shutil.rmtree(tmp_path / "remote" / "state")
    restore(options, tmp_path / "saved")
    run_each_epoch(keyed, options, 2)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


# -- snapshots that are older than the epoch --------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True], ids=["pinned", "copied"])
def test_epochs_since_the_snapshot_are_folded_again(tmp_path: Path, keyed: KeyedInput, copy: bool) -> None:
    options = keyed_options(tmp_path, trigger=TriggerOptions(every_epochs=4))
    run_each_epoch(keyed, options, 3)
    assert is_behind(open_pipeline(options))
    made = save(options, tmp_path / "saved", copy=copy)
    assert made.state_replayed == [2, 3]
    run_each_epoch(keyed, options, 3)
    told: list[str] = []
    restore(options, tmp_path / "saved", report=told.append)
    assert any("folded again" in line for line in told)
    run_to_end(options)
    assert answers(options.deciding.location) == answers_without_trouble(tmp_path, options)


def test_a_savepoint_whose_state_could_not_be_made_again_is_refused(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, trigger=TriggerOptions(every_epochs=4))
    run_each_epoch(keyed, options, 3)
    (keyed.folder / "f00002.json").unlink()
    with pytest.raises(CheckpointError, match=r"f00002\.json: gone"):
        save(options, tmp_path / "saved", copy=False)
    assert not (tmp_path / "saved" / "savepoint.json").exists()
    assert list_savepoints(open_pipeline(options)) == []


def test_a_restore_whose_state_could_not_be_made_again_is_refused_while_nothing_has_changed(
    tmp_path: Path, keyed: KeyedInput
) -> None:
    options = keyed_options(tmp_path, trigger=TriggerOptions(every_epochs=4))
    run_each_epoch(keyed, options, 3)
    save(options, tmp_path / "saved", copy=True)
    (keyed.folder / "f00003.json").unlink()
    before = open_pipeline(options).load()
    with pytest.raises(RollbackRefusedError, match=r"f00003\.json: gone"):
        restore(options, tmp_path / "saved")
    assert open_pipeline(options).load() == before


@pytest.mark.parametrize("copy", [False, True], ids=["pinned", "copied"])
def test_an_older_snapshot_that_a_restore_goes_on_from_is_saved_too(
    tmp_path: Path, keyed: KeyedInput, copy: bool
) -> None:
    """What feeds an operator must not be ahead of it, so not every snapshot that the checkpoint names can be used."""
    options = keyed_options(tmp_path, GRAPHS["two operators"], mode="per_operator", rollback_window=1)
    options = dataclasses.replace(options, checkpoint=dataclasses.replace(options.checkpoint, keep_checkpoints=0))
    for due in ((), (), ("totals",), ("firsts",), ()):  # the first epoch makes a snapshot of both
        run_each_epoch(keyed, every(options, due), 1)
    rare = every(options, ())
    held = open_pipeline(rare).load().checkpoint
    assert held is not None
    assert {name: ref["epoch"] for name, ref in held.state.items()} == {"firsts": 4, "totals": 3}
    made = save(rare, tmp_path / "saved", copy=copy)
    assert made.state_replayed == [2, 3, 4, 5]
    assert sorted(int(one.checkpoint[:20]) for one in made.state) == [1, 3, 4]
    run_each_epoch(keyed, every(options, ("firsts", "totals")), 5)
    sweep(options)
    assert all((state_folder(options) / file.name).is_file() for file in made.state_files) or copy
    there = dataclasses.replace(
        rare, sinks=(dataclasses.replace(delta_table(options), table=str(tmp_path / "elsewhere")),)
    )
    restore(there, tmp_path / "saved")
    run_to_end(there)
    assert answers(there.deciding.location) == answers_without_trouble(tmp_path, there)


def every(options: PipelineOptions, due: tuple[str, ...]) -> PipelineOptions:
    """The same pipeline, in which these operators are snapshot after every epoch and the others never again."""
    operators = (dataclasses.replace(o, interval_ms=0 if o.name in due else 10**9) for o in options.operators)
    return dataclasses.replace(options, operators=tuple(operators))


# -- damage -----------------------------------------------------------------------------------------------


def test_rot_in_any_copied_file_of_state_is_found_while_nothing_has_changed(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path, GRAPHS["windows"])
    run_each_epoch(keyed, options, 2)
    save(options, tmp_path / "saved", copy=True)
    there = dataclasses.replace(
        options, sinks=(dataclasses.replace(delta_table(options), table=str(tmp_path / "elsewhere")),)
    )
    generator = random.Random(1)
    files = sorted(p for p in (tmp_path / "saved" / "state").rglob("*") if p.is_file())
    assert {p.name for p in files} >= {"COMMITTED", "metadata.json"}
    assert any(p.suffix == ".arrow" for p in files)
    for path in files:
        whole = path.read_bytes()
        for damaged in (_flipped(whole, generator), whole[:-1], whole + b"x", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(DamagedError):
                restore(there, tmp_path / "saved")
            path.write_bytes(whole)
    assert not (tmp_path / "elsewhere").exists()
    restore(there, tmp_path / "saved")
    run_each_epoch(keyed, there, 1)
    assert answers(there.deciding.location) == answers_without_trouble(tmp_path, there)


def _flipped(whole: bytes, generator: random.Random) -> bytes:
    data = bytearray(whole)
    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(data)


def test_rot_in_the_home_does_not_get_into_a_copy(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 2)
    for path in state_folder(options).rglob("*.arrow"):
        path.write_bytes(_flipped(path.read_bytes(), random.Random(2)))
    with pytest.raises(CheckpointError, match="checksum"):
        save(options, tmp_path / "saved", copy=True)
    assert not (tmp_path / "saved" / "savepoint.json").exists()


def test_a_link_among_the_copies_is_refused(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 1)
    save(options, tmp_path / "saved", copy=True)
    path = next((tmp_path / "saved" / "state").rglob("*.arrow"))
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(DamagedError, match="link"):
        restore(options, tmp_path / "saved")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["checkpoints"][0].update(checkpoint="../../etc"),
        lambda state: state["checkpoints"][0].update(digest="0" * 64),
        lambda state: state["files"][0].update(name="../outside"),
        lambda state: state["files"][0].update(name=f"{'1'.zfill(20)}-a/../../outside"),
        lambda state: state["files"][0].update(sha256=""),
        lambda state: state["checkpoints"].clear(),
        lambda state: state.pop("files"),
    ],
)
def test_a_manifest_with_other_state_than_its_checkpoint_names_is_refused(
    tmp_path: Path, keyed: KeyedInput, change: Any
) -> None:
    from firnline.checkpoint.codec import canonical, seal

    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 1)
    save(options, tmp_path / "saved", copy=True)
    path = tmp_path / "saved" / "savepoint.json"
    body = json.loads(path.read_bytes())
    change(body["state"])
    del body["checksum"], body["format"]
    path.write_bytes(canonical(seal(body)))
    with pytest.raises(DamagedError):
        restore(options, tmp_path / "saved")


def test_a_broken_off_restore_is_taken_up_again(
    tmp_path: Path, keyed: KeyedInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 2)
    save(options, tmp_path / "saved", copy=True)
    there = dataclasses.replace(
        options, sinks=(dataclasses.replace(delta_table(options), table=str(tmp_path / "elsewhere")),)
    )
    broken = 0
    for count in range(1, 30):
        monkeypatch.setenv("FIRNLINE_FAULT", f"state.replicate.after:{count}:raise")
        try:
            restore(there, tmp_path / "saved")
            break
        except (OSError, FirnlineError):
            broken += 1
    monkeypatch.delenv("FIRNLINE_FAULT")
    assert broken > 0
    restore(there, tmp_path / "saved")
    run_each_epoch(keyed, there, 1)
    assert answers(there.deciding.location) == answers_without_trouble(tmp_path, there)
    assert not [name for name in os.listdir(tmp_path / "elsewhere" / "_firnline" / "pins") if "restore" in name]


def test_disposing_of_a_copy_deletes_its_state(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 1)
    made = save(options, tmp_path / "saved", copy=True)
    dispose_savepoint(open_pipeline(options), made.id)
    assert not (tmp_path / "saved").exists()
    assert run_once(options).exit_code == 0


def test_disposing_of_a_copy_deletes_files_of_killed_writes(tmp_path: Path, keyed: KeyedInput) -> None:
    """Of the savepoint's own folders alone, and only files of a name that Firnline gives them."""
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 1)
    saved = tmp_path / "saved"
    made = save(options, saved, copy=True)
    folders = [saved, *{path.parent for path in (saved / "state").rglob("*") if path.is_file()}]
    assert len(folders) > 1
    for folder in folders:
        (folder / temporary_name("0123456789abcdef" * 2)).write_bytes(b"half")
    (saved / ".notes.tmp").write_text("mine")
    planned = dispose_savepoint(open_pipeline(options), made.id, dry_run=True)
    gone = dispose_savepoint(open_pipeline(options), made.id)
    assert gone.files == planned.files
    assert [path.name for path in saved.rglob("*")] == [".notes.tmp"]


def test_disposing_of_a_copy_that_was_killed_leaves_no_empty_folders(tmp_path: Path, keyed: KeyedInput) -> None:
    options = keyed_options(tmp_path)
    run_each_epoch(keyed, options, 1)
    made = save(options, tmp_path / "saved", copy=True)
    (tmp_path / "saved" / "savepoint.json").unlink()
    for path in (tmp_path / "saved" / "state").rglob("shard_1/*"):
        path.unlink()  # the folder was made, the file was not
    dispose_savepoint(open_pipeline(options), made.id)
    assert not (tmp_path / "saved").exists()
