"""The true chain of a table's versions: a commit that takes the table back continues at the version it goes to. Pure.

Versions form a tree. The parent of a version is the one before it; the parent of a rollback or RESTORE is the version
that it goes back to; the parent of a commit that replaces all rows is -1, the table before its first commit. The path
from -1 to the newest version has every row that the table holds; versions beside it are undone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Path:
    """The way of a reader to the newest version."""

    undone: list[int]  # versions to take back first, newest first
    ahead: list[int]  # versions to read then, in order


def find_path(parent: Callable[[int], int], reader: int, newest: int) -> Path:
    """Return the way from one version to another; `parent` of a version is always smaller."""
    undone: list[int] = []
    ahead: list[int] = []
    while reader != newest:
        if newest > reader:
            ahead.append(newest)
            newest = parent(newest)
        else:
            undone.append(reader)
            reader = parent(reader)
    return Path(undone, ahead[::-1])
