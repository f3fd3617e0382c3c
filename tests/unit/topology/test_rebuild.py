"""How the table of a channel is built anew: which commits stand for which versions."""

from __future__ import annotations

from firnline.history.topology.rebuild import group_versions
from firnline.sinks.delta.contents import ListedFile

FILES = {0: [], 1: ["a"], 2: ["b"], 3: [], 4: ["c"], 5: ["d", "e"]}


def files_of(number: int) -> list[ListedFile]:
    """What each version adds; a version that begins the table has all before it, too."""
    return [ListedFile(name, 1, 1, {}, 0) for name in FILES[number]]


def names(base: int, ahead: list[int], boundaries: set[int]) -> tuple[list[str], dict[int, int]]:
    made = group_versions(base, ahead, boundaries, files_of)
    assert made.version == len(made.commits)
    return ["".join(file.path for file in commit.files) for commit in made.commits], made.versions


def test_one_commit_per_boundary_and_one_for_the_cut() -> None:
    assert names(1, [2, 3, 4, 5], {1, 2}) == (["a", "b", "cde"], {1: 1, 2: 2, 3: 3, 4: 3, 5: 3})


def test_a_boundary_without_rows_is_the_version_before() -> None:
    assert names(1, [2, 3, 4], {2, 3}) == (["a", "b", "c"], {1: 1, 2: 2, 3: 2, 4: 3})


def test_readers_at_the_cut_need_one_commit() -> None:
    assert names(5, [], {5}) == (["de"], {5: 1})


def test_a_reader_that_has_read_nothing_is_at_the_empty_table() -> None:
    assert names(-1, [0, 1, 2], {-1}) == (["ab"], {-1: 0, 0: 1, 1: 1, 2: 1})
