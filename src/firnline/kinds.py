"""Kinds of sources and sinks: modules that a registry names, or that an installed package registers.

A package registers a kind as an entry point of the group `firnline.sources` or `firnline.sinks`: the name is the `type`
of the spec, the value is the module. Every process that has the package installed knows its kinds. A module is imported
when its kind is used, so a broken package stops only the pipelines that use it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from firnline.errors import ConfigError

if TYPE_CHECKING:  # loads much of the standard library
    from importlib.metadata import EntryPoint

GROUPS = {"source": "firnline.sources", "sink": "firnline.sinks"}


@dataclass(frozen=True, slots=True)
class Models:
    """The spec models of all kinds that have one, and why a kind cannot be used; both by name of the kind."""

    models: dict[str, Any] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def known_kinds(kinds: Mapping[str, str], what: str) -> list[str]:
    """Return the names of all kinds, those of installed packages last; `what` is source or sink."""
    return list(dict.fromkeys([*kinds, *_installed(what)]))


def load_kind(kinds: Mapping[str, str], what: str, name: str) -> Any:
    """Return the module of a kind; `what` is source or sink. `check_kind` has refused a name that is taken twice.

    Raises:
        ConfigError: there is no such kind, or the package that registers it cannot be imported.
    """
    if name in kinds:
        return importlib.import_module(kinds[name])
    if name not in _installed(what):
        raise ConfigError(
            f"there is no kind of {what} {name!r}",
            hint=f"Known kinds: {', '.join(known_kinds(kinds, what))}. A package that has this one must be installed "
            "in the environment of the driver and of every worker.",
        )
    check_kind(kinds, what, name)
    entry = _installed(what)[name][0]
    try:
        return entry.load()
    except Exception as error:  # whatever a foreign package raises
        raise ConfigError(
            f"the {what} kind {name!r} of {_package(entry)} cannot be imported: {type(error).__name__}: {error}",
            hint=f"Repair or update {_package(entry)}; other kinds work without it.",
        ) from error


def check_kind(kinds: Mapping[str, str], what: str, name: str) -> None:
    """Refuse a name that two modules have. For the driver: it looks at all installed packages.

    Raises:
        ConfigError: an installed package registers a name that is built in or that another package registers.
    """
    modules = {entry.value: f"{entry.value} of {_package(entry)}" for entry in _installed(what).get(name, [])}
    if name in kinds:
        modules.pop(kinds[name], None)
        modules = {kinds[name]: f"{kinds[name]} of firnline", **modules}
    if len(modules) > 1:
        raise ConfigError(
            f"the {what} kind {name!r} is taken twice: by {' and '.join(modules.values())}",
            hint="Uninstall the package that is not meant, or have it register the kind under another name.",
        )


def load_models(kinds: Mapping[str, str], what: str) -> Models:
    """Return the spec models of all kinds. A kind without a model cannot stand in a spec."""
    found = Models()
    for name in known_kinds(kinds, what):
        try:
            check_kind(kinds, what, name)
        except ConfigError as error:
            found.problems[name] = error.message
        if name in kinds:
            module = load_kind(kinds, what, name)
            if hasattr(module, "config_model"):
                found.models[name] = module.config_model()
        elif name not in found.problems:
            _load_foreign_model(kinds, what, name, found)
    return found


def _load_foreign_model(kinds: Mapping[str, str], what: str, name: str, found: Models) -> None:
    """Add the model of an installed package's kind, or the reason why there is none."""
    try:
        module = load_kind(kinds, what, name)
        if hasattr(module, "config_model"):
            found.models[name] = module.config_model()
    except ConfigError as error:
        found.problems[name] = error.message
    except Exception as error:  # whatever a foreign package raises
        package = _package(_installed(what)[name][0])
        found.problems[name] = f"the {what} kind {name!r} of {package} has no model: {type(error).__name__}: {error}"


def _installed(what: str) -> dict[str, list[EntryPoint]]:
    return _entry_points(tuple(sys.path))[GROUPS[what]]


@functools.cache
def _entry_points(path: tuple[str, ...]) -> dict[str, dict[str, list[EntryPoint]]]:  # noqa: ARG001  # key of the cache
    """Return the entry points of the packages on a module path, by group and name; read once for each path."""
    from importlib.metadata import entry_points

    found = entry_points()
    groups: dict[str, dict[str, list[EntryPoint]]] = {}
    for group in GROUPS.values():
        names = groups.setdefault(group, {})
        for entry in sorted(found.select(group=group), key=lambda entry: (entry.name, entry.value)):
            names.setdefault(entry.name, []).append(entry)
    return groups


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an installed package"
