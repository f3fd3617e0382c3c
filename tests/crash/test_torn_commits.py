"""A commit file that a power cut cut off: named, mended by the command that the error gives, no row lost or doubled."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from firnline.errors import FirnlineError, TornCommitError
from firnline.maintenance.compact import compact
from firnline.options import PipelineOptions, StoreOptions
from tests.support.committers import bring_file, commit_table
from tests.support.damage import commit_files, commits_of
from tests.support.pipelines import MakeOptions, make_epochs, run_once
from tests.support.processes import KILLED, Launcher
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash


def lengths(path: Path) -> list[int]:
    """Where to cut: nothing, the middle of each line, and after each line but the last."""
    found, at = [0], 0
    lines = path.read_bytes().splitlines(keepends=True)
    for line in lines:
        found += [at + len(line) // 2, at + len(line)]
        at += len(line)
    return found[:-1]


def mend(error: FirnlineError) -> Path:
    """Do what the hint says; returns the file that was taken out of the log."""
    found = re.search(r"mv ('.*')", error.hint)
    assert found, error.hint
    torn, aside = (Path(name) for name in shlex.split(found[1]))
    torn.rename(aside)
    return torn


def each_cut(table: Path, commit: Path, tmp_path: Path) -> list[Callable[[], None]]:
    """One change per length: the table as it was, with the commit cut to that length."""
    whole = tmp_path / "whole"
    shutil.copytree(table, whole)
    data = commit.read_bytes()

    def cut(length: int) -> None:
        shutil.rmtree(table)
        shutil.copytree(whole, table)
        commit.write_bytes(data[:length])

    return [lambda length=length: cut(length) for length in lengths(commit)]  # type: ignore[misc]


def run_mended(options: PipelineOptions, commit: Path) -> bool:
    """Run; where the commit is torn, mend it as the error says and run again. Returns whether it was torn."""
    run = run_once(options)
    if run.exit_code == 0:
        return False
    assert (run.exit_code, run.error_code) == (1, "torn-commit"), run.result
    assert run.result.error is not None
    assert str(commit) in run.result.error.message
    assert "<unknown>" not in run.result.error.message
    assert mend(run.result.error) == commit
    assert run_once(options).exit_code == 0
    return True


@pytest.mark.parametrize("version", [0, -1])
def test_a_torn_commit_is_never_built_on(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path, version: int
) -> None:
    """Cut at any line, or inside one: refused, or of no consequence, as an empty one is."""
    options = make_options(max_files=1)
    sample.add("f001.json", 3)
    make_epochs(sample, options, 1, first=2)
    table = Path(options.deciding.location)
    if version == 0:
        for commit in commit_files(table)[1:]:
            commit.unlink()
    commit = commit_files(table)[version]
    sample.add("g.json", 3)
    torn = []
    for number, cut in enumerate(each_cut(table, commit, tmp_path)):
        cut()
        torn.append(run_mended(options, commit))
        assert table_ids(table) == sample.ids, number
    assert torn == [version == 0, *[True] * (len(torn) - 1)]


def test_a_torn_commit_of_other_programs_files_is_never_built_on(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path
) -> None:
    """The rows would be there, and the transaction that says so would not: they would be committed twice."""
    options = make_options(mode="staged")
    table = Path(options.deciding.location)
    make_epochs(sample, options, 1)
    commit_table(table)
    bring_file(table, "u1", {"id": [901]})
    bring_file(table, "u2", {"id": [902]})
    pending = {path: path.read_bytes() for path in (table / "_staging/pending").iterdir()}
    commit_table(table)
    after = table_ids(table)
    commit = commit_files(table)[-1]
    for number, cut in enumerate(each_cut(table, commit, tmp_path)):
        cut()
        for path, data in pending.items():  # a power cut takes their deletion back, too
            path.write_bytes(data)
        if number:
            with pytest.raises(TornCommitError) as caught:
                commit_table(table)
            assert mend(caught.value) == commit
        commit_table(table)
        assert table_ids(table) == after, number


def test_a_compaction_that_is_torn_between_removal_and_addition_is_refused(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    table = Path(options.deciding.location)
    compact(str(table))
    commit = commit_files(table)[-1]
    sample.add("g.json", 3)
    for number, cut in enumerate(each_cut(table, commit, tmp_path)):
        cut()
        run_mended(options, commit)
        assert table_ids(table) == sample.ids, number


def test_a_torn_commit_that_others_built_on_is_not_taken_out(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    table = Path(options.deciding.location)
    commit = commit_files(table)[-2]
    commit.write_bytes(commit.read_bytes()[:-20])
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "torn-commit")
    assert run.result.error is not None
    assert f"Restore {commit} from a backup" in run.result.error.hint


def test_a_torn_commit_is_found_before_any_copy_is_made_of_it(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1, store=StoreOptions(path=str(tmp_path / "store")))
    sample.add("a.json", 3)
    assert run_once(options).exit_code == 0
    sample.add("b.json", 3)
    assert launcher.run(options, "delta.sync.before:3:kill").exit_code == KILLED
    newest = commit_files(Path(options.deciding.location))[-1]
    lines = newest.read_bytes().splitlines(keepends=True)
    epoch = next(number for number, line in enumerate(lines) if f'"firnline:{options.name}"'.encode() in line)
    newest.write_bytes(b"".join(lines[: epoch + 1]))  # of the transactions, the power cut left the first
    run = run_once(options)  # there is nothing new to read
    assert run.error_code == "torn-commit"
    assert run.result.error is not None
    mend(run.result.error)
    assert run_once(options).exit_code == 0
    assert table_ids(options.deciding.location) == sample.ids


def test_an_emptied_commit_that_others_built_on_is_told(sample: SampleInput, make_options: MakeOptions) -> None:
    options = make_options(max_files=1)
    make_epochs(sample, options, 3)
    emptied = commits_of(options.deciding.location, options.name)[1]
    emptied.write_bytes(b"")
    sample.add("z.json", 3)
    run = run_once(options)
    assert (run.exit_code, run.error_code) == (1, "torn-commit")
    assert run.result.error is not None
    assert str(emptied) in run.result.error.message
