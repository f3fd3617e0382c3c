"""The names that the columns of captured tables get here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from firnline.options import FACTS, MISSING, MOVED, OP
from firnline.schema import BAD_NAME_CHARACTERS, is_column_name_ok

BEFORE = "_before"
_ADDED = frozenset((OP, MISSING, MOVED, BEFORE, *FACTS))  # columns of change rows that no table has
_TO_UNDERSCORES = str.maketrans(dict.fromkeys(BAD_NAME_CHARACTERS, "_"))


def column_names(names: Sequence[str]) -> list[str]:
    """Return the names that the columns of a table get here: their own, if tables of Delta may have them.

    Characters that they must not have become `_`. A name that is taken gets `_` at its end: by a column of change rows,
    by another column, or by one that differs in upper and lower case only. The result for names that fit is the same
    names.
    """
    fitting = {number for number, name in enumerate(names) if is_column_name_ok(name) and name not in _ADDED}
    taken: set[str] = set()
    found = list(names)
    for number in sorted(range(len(names)), key=lambda number: number not in fitting):
        name = names[number].translate(_TO_UNDERSCORES)
        if not is_column_name_ok(name):
            name = f"column{name}"  # empty, or a prefix that is kept for Firnline
        while name in _ADDED or name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        found[number] = name
    return found


def names_here(some: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that some columns of a table get here; `names` are all of its columns."""
    here = dict(zip(names, column_names(names), strict=True))
    return tuple(here[name] for name in some)
