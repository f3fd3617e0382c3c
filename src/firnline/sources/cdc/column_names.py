"""The names that the columns of captured tables get here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from firnline.options import FACTS, MISSING, MOVED, OP
from firnline.schema import BAD_NAME_CHARACTERS, is_column_name_ok

BEFORE = "_before"
_ADDED = frozenset((OP, MISSING, MOVED, BEFORE, *FACTS))  # columns of change rows that no table has
_ESCAPED = re.compile("~[0-9A-F]{2}")


def column_names(names: Sequence[str]) -> list[str]:
    """Return the names that the columns of a table get here: their own, if tables of Delta may have them.

    Characters that they must not have are written as `~` and two hex digits, and so is the first character of a name
    that a column of change rows has, and every character of one that differs from an earlier column in upper and lower
    case only. A name does not depend on columns that come behind it, so that it stays when they are added.
    """
    taken: set[str] = set()
    found = []
    for name in names:
        here = _fit(name)
        if here.lower() in taken:
            here = escape(name)
        taken.add(here.lower())
        found.append(here)
    return found


def _fit(name: str) -> str:
    here = _ESCAPED.sub(lambda found: escape("~") + found[0][1:], name)
    here = "".join(escape(one) if one in BAD_NAME_CHARACTERS else one for one in here)
    return here if is_column_name_ok(here) and here not in _ADDED else escape(here[:1]) + here[1:]


def escape(text: str) -> str:
    """Return a text with every byte as `~` and two hex digits."""
    return "".join(f"~{byte:02X}" for byte in text.encode()) or "~"


def names_here(some: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that some columns of a table get here; `names` are all of its columns."""
    here = dict(zip(names, column_names(names), strict=True))
    return tuple(here[name] for name in some)


def renamings(table: str, names: Sequence[str]) -> list[str]:
    """Return, in words, which columns of a table have another name here."""
    pairs = zip(names, column_names(names), strict=True)
    return [f"{table}.{name}: the column is named {here} here" for name, here in pairs if name != here]
