"""`FIRNLINE__A__B=value`: environment variables that override single keys of a spec."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from firnline.spec.problems import KeyPath, Origin, Problem
from firnline.spec.spark_keys import ALLOWED_KEYS
from firnline.spec.yamltree import TEXT_SECTIONS, Tree, parse_scalar

__all__ = ["PREFIX", "apply_overrides"]

PREFIX = "FIRNLINE__"


def apply_overrides(tree: Tree, environ: Mapping[str, str]) -> None:
    """Write every override into the tree, with its variable as the origin.

    Two underscores lead one level down. Keys match without regard to case, and any sign in a key matches
    an underscore, so that `FIRNLINE__SPARK__SPARK_MASTER` reaches `spark.master`. A number picks an item of a
    list; the number after the last adds one. Values are YAML scalars.
    """
    for variable in sorted(environ):
        if variable.startswith(PREFIX):
            _apply(tree, variable, environ[variable])


def _apply(tree: Tree, variable: str, text: str) -> None:
    parts = variable[len(PREFIX) :].split("__")
    origin = Origin(variable)
    if not all(parts):
        tree.problems.append(Problem(origin, (), "not a key path (two underscores lead one level down)"))
        return
    if tree.data is None:
        tree.data = {}
    at: Any = tree.data
    path: KeyPath = ()
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        key, problem = _step(at, path, part)
        if problem is not None:
            tree.problems.append(Problem(origin, path, problem))
            return
        path = (*path, key)
        if last:
            _store(at, key, _value(path, text))
            _forget_below(tree, path)
            tree.origins[path] = origin
        else:
            at = _descend(at, key, _is_index(parts[depth + 1]))
            tree.origins.setdefault(path, origin)


def _value(path: KeyPath, text: str) -> Any:
    return text if any(part in TEXT_SECTIONS for part in path[:-1]) else parse_scalar(text)


def _forget_below(tree: Tree, path: KeyPath) -> None:
    """Drop the recorded lines and problems of the value that is replaced."""
    for known in [p for p in tree.origins if p[: len(path)] == path]:
        del tree.origins[known]
    tree.problems[:] = [p for p in tree.problems if p.path[: len(path)] != path or p.path == ()]


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit()


def _step(at: Any, path: KeyPath, part: str) -> tuple[str | int, str | None]:
    """Return the key or index that `part` means below `at`, or what is wrong with it."""
    if isinstance(at, list):
        if not _is_index(part):
            return part, f'a list is reached by number, not by "{part.lower()}"'
        index = int(part)
        return index, None if index <= len(at) else f"has {len(at)} items; {index} is too high"
    if not isinstance(at, dict):
        return part, f'holds a single value; "{part.lower()}" cannot be set below it'
    found = _matches(part, at)
    if len(found) > 1:
        return part, f"{part} could mean {' or '.join(found)}"
    if not found and path[-1:] == ("spark",):
        found = _matches(part, ALLOWED_KEYS) or [part.lower().replace("_", ".")]
    return (found[0] if found else part.lower()), None


def _matches(part: str, keys: Iterable[str]) -> list[str]:
    keys = list(keys)
    return [part] if part in keys else [key for key in keys if _loose(key) == _loose(part)]


def _loose(key: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", key.lower())


def _store(at: Any, key: str | int, value: Any) -> None:
    if isinstance(at, list) and key == len(at):
        at.append(value)
    else:
        at[key] = value


def _descend(at: Any, key: str | int, by_index: bool) -> Any:
    """Return the value below a key, created if it is missing or empty: a list if a number comes next."""
    inner = at[key] if (isinstance(at, dict) and key in at) or (isinstance(key, int) and key < len(at)) else None
    if inner is None:
        inner = [] if by_index else {}
        _store(at, key, inner)
    return inner
