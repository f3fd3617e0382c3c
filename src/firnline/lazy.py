"""Lets a package export names without importing the modules that define them until a name is used."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any


def load_name(package: str, name: str, exported: Collection[str], elsewhere: Mapping[str, str]) -> Any:
    """The value of a name that a package exports: from the module `elsewhere` has for it, or the package's `base`.

    Raises:
        AttributeError: the package does not export it.
    """
    if name not in exported:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(elsewhere.get(name, f"{package}.base")), name)
