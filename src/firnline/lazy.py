"""Lets a package export names without importing the modules that define them until a name is used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from types import ModuleType
from typing import Any


def lazy_exports(
    package: str, exported: Collection[str], elsewhere: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that loads its names on first use.

    `dir` and completion list these names before that, and no helper of the package. Define both under
    `if not TYPE_CHECKING`, and import the names under `if TYPE_CHECKING`: type checkers then know each name, and refuse
    a name that does not exist.

    Args:
        package: The name of the package.
        exported: Its `__all__`.
        elsewhere: The module of each name that is not in the package's `base`.
    """

    def load(name: str) -> Any:
        if name not in exported:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(elsewhere.get(name, f"{package}.base")), name)

    def names() -> list[str]:
        loaded = vars(sys.modules[package]).items()
        return sorted({*exported, *(n for n, value in loaded if n.startswith("__") or isinstance(value, ModuleType))})

    return load, names
