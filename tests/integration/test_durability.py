"""Nothing builds on what a power cut could still take away, and a failed fsync is never taken for a success."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from deltalake import DeltaTable

from firnline.errors import NotDurableError
from firnline.maintenance.gc import vacuum
from firnline.sinks.delta.table import Table
from firnline.storage import LocalStorage, fsync_path
from tests.support.committers import bring_file, commit_table, pending_units
from tests.support.pipelines import MakeOptions, make_epochs, run_once, run_to_end
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids

Fsyncs = list[tuple[str, frozenset[str]]]


def commit_name(version: int) -> str:
    return f"{version:020d}.json"


@pytest.fixture
def fsyncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fsyncs:
    """Every fsync of this process: the path, and the names that the table's log has at that moment."""
    found: Fsyncs = []
    log = tmp_path / "out" / "_delta_log"

    def fsync(descriptor: int) -> None:
        names = frozenset(os.listdir(log)) if log.exists() else frozenset()
        found.append((os.readlink(f"/proc/self/fd/{descriptor}"), names))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def fail_fsync(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """From here on the fsync of some paths fails once: the next one finds clean pages and succeeds."""
    real = os.fsync
    failed: set[str] = set()

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if fails(path) and path not in failed:
            failed.add(path)
            raise OSError(errno.EIO, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)


def test_an_adopted_commit_is_durable_before_anything_builds_on_it(
    sample: SampleInput, make_options: MakeOptions, launcher: Launcher, fsyncs: Fsyncs, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    sample.add("a.json", 3)
    assert launcher.run(options, "delta.sync.before:2:kill").exit_code == KILLED  # after the commit, before its fsync
    log = tmp_path / "out" / "_delta_log"
    assert (log / commit_name(1)).exists()
    sample.add("b.json", 3)
    run_to_end(options)
    synced = dict(reversed(fsyncs))  # the first fsync of each path
    assert commit_name(2) not in synced[str(log / commit_name(1))]
    assert commit_name(2) not in synced[str(log)]
    assert table_ids(tmp_path / "out") == sample.ids


@pytest.mark.parametrize("what", ["commit", "folder"])
def test_a_failed_fsync_of_a_commit_ends_the_run(
    sample: SampleInput, make_options: MakeOptions, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 1)
    sample.add("b.json", 3)
    suffix = commit_name(3) if what == "commit" else "_delta_log"  # version 2 is the claim

    def fails(path: str) -> bool:
        return path.endswith(suffix) and os.path.exists(
            os.path.join(options.sinks[0].location, "_delta_log", commit_name(3))
        )

    fail_fsync(monkeypatch, fails)
    run = run_once(options)
    assert (run.exit_code, run.error_code, run.told.epochs) == (1, "not-durable", [])
    assert run_once(options).exit_code == 1  # this process does not ask again: the answer would be worth nothing
    assert launcher.run(options).exit_code == 0
    assert table_ids(options.sinks[0].location) == sample.ids


def test_an_adopted_commit_that_the_disk_does_not_hold_is_refused(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An fsync of the process before failed, and the system called the lost pages clean."""
    options = make_options()
    make_epochs(sample, options, 1)
    commit = Path(options.sinks[0].location, "_delta_log", commit_name(1))

    def drop(descriptor: int, *_: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(commit):
            commit.write_bytes(b"")

    monkeypatch.setattr(os, "posix_fadvise", drop)
    sample.add("b.json", 3)
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "not-durable")


def test_a_unit_is_deleted_only_after_its_commit_is_durable(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(mode="staged")
    sample.add("a.json", 3)
    run_to_end(options)
    table = options.sinks[0].location
    fail_fsync(monkeypatch, lambda path: path.endswith(".json") and path.startswith(f"{table}/_delta_log/"))
    for _ in range(2):  # the second finds the transaction in the log
        with pytest.raises(NotDurableError):
            commit_table(table)
        assert len(pending_units(table)) == 1


def test_files_of_other_writers_are_durable_before_they_are_committed(
    sample: SampleInput, make_options: MakeOptions, fsyncs: Fsyncs
) -> None:
    options = make_options(mode="staged")
    sample.add("a.json", 3)
    run_to_end(options)
    table = Path(options.sinks[0].location)
    bring_file(table, "foreign", {"id": [901]}, at="deep/er/foreign.parquet")
    fsyncs.clear()
    commit_table(table)
    paths = [path for path, _ in fsyncs]
    last = max(number for number, path in enumerate(paths) if path.startswith(f"{table}/_delta_log/"))
    for path in (table / "deep/er/foreign.parquet", table / "deep/er", table / "deep"):
        assert str(path) in paths[:last]


def test_a_delta_checkpoint_is_durable_before_older_commits_are_deleted(
    sample: SampleInput, make_options: MakeOptions, fsyncs: Fsyncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options()
    make_epochs(sample, options, 2)
    table = Table(options.sinks[0].location, {})
    table.refresh()
    seen: list[str] = []
    real = DeltaTable.cleanup_metadata

    def clean_up(self: DeltaTable) -> None:
        seen.extend(path for path, _ in fsyncs)
        real(self)

    monkeypatch.setattr(DeltaTable, "cleanup_metadata", clean_up)
    fsyncs.clear()
    table.checkpoint()
    log = f"{options.sinks[0].location}/_delta_log"
    made = f"{log}/{table.version:020d}.checkpoint.parquet"
    assert {made, f"{log}/_last_checkpoint", log} <= set(seen)
    assert seen.index(made) < len(seen) - seen[::-1].index(log)


def test_a_sweep_makes_the_version_durable_that_it_follows(
    sample: SampleInput, make_options: MakeOptions, fsyncs: Fsyncs
) -> None:
    options = make_options()
    make_epochs(sample, options, 1)
    fsyncs.clear()
    vacuum(options.sinks[0].location)
    assert f"{options.sinks[0].location}/_delta_log/{commit_name(1)}" in [path for path, _ in fsyncs]


def test_a_failed_fsync_is_never_repeated_as_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    fail_fsync(monkeypatch, lambda _: True)
    for _ in range(2):
        with pytest.raises(OSError, match="fsync failed"):
            fsync_path(str(path))


def test_a_key_that_is_taken_is_durable(tmp_path: Path, fsyncs: Fsyncs) -> None:
    """A writer was killed between its link and the fsync of the folder; whoever finds the key builds on it."""
    (tmp_path / "new" / "folder").mkdir(parents=True)
    (tmp_path / "new" / "folder" / "key").write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        LocalStorage(str(tmp_path)).put_new("new/folder/key", b"ours")
    paths = {path for path, _ in fsyncs}
    assert {str(tmp_path / "new" / "folder" / "key"), str(tmp_path / "new" / "folder"), str(tmp_path / "new")} <= paths
