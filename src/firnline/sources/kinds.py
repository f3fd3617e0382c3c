"""The kinds of sources: one line each, naming the classes of `firnline.sources.base` that make the kind.

The classes are imported when they are needed: a driver that reads no rows loads no decoder, and a worker no planner.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from firnline.errors import ConfigError, DamagedError
from firnline.sources.base import PositionView, Source
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.options import SourceOptions


@dataclass(frozen=True, slots=True)
class SourceKind:
    """Where the classes of a kind lie, as `module:class`."""

    source: str

    def load_source(self) -> type[Source]:
        return cast("type[Source]", _load(self.source))


KINDS: dict[str, SourceKind] = {
    "files": SourceKind("firnline.sources.files.source:FileSource"),
}


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def open_source(options: SourceOptions, *, once: bool = False, moved: tuple[str, str] | None = None) -> Source:
    """Open a source; nothing is read yet. See `Source` for the arguments.

    Raises:
        ConfigError: there is no such kind, or the settings contradict each other.
    """
    return cast("Any", _kind(options.kind).load_source())(options, once=once, moved=moved)  # type: ignore[no-any-return]


def describe_unknown(position: Json) -> PositionView:
    """Describe a position whose source is no longer in the spec, by the kind that can open it."""
    for kind in KINDS.values():
        try:
            return kind.load_source().describe(position)
        except DamagedError:
            continue
    return PositionView(facts=position if isinstance(position, dict) else {"position": position})


def _kind(name: str) -> SourceKind:
    try:
        return KINDS[name]
    except KeyError:
        raise ConfigError(f"there is no kind of source {name!r}", hint=f"Known kinds: {', '.join(KINDS)}.") from None
