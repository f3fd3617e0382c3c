"""Kinds of sources and sinks: modules that a registry names. Each is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from firnline.errors import ConfigError


def load_kind(kinds: Mapping[str, str], what: str, name: str) -> Any:
    """Return the module of a kind; `what` is source or sink.

    Raises:
        ConfigError: there is no such kind.
    """
    if name not in kinds:
        raise ConfigError(f"there is no kind of {what} {name!r}", hint=f"Known kinds: {', '.join(kinds)}.")
    return importlib.import_module(kinds[name])


def load_models(kinds: Mapping[str, str], what: str) -> dict[str, Any]:
    """Return the spec model of every kind that has one, by name; a kind without one cannot stand in a spec."""
    modules = {name: load_kind(kinds, what, name) for name in kinds}
    return {name: module.config_model() for name, module in modules.items() if hasattr(module, "config_model")}
