"""The kinds of sources by name. To add one: a folder with a module like `sources/files/kind.py`, and a line in `KINDS`.

Such a module has three functions:
- `open_source(options, *, once, moved) -> Source`, in the driver;
- `open_reader(settings, split, columns) -> SplitReader`, in a worker; `settings` comes from `Source.reader_settings`;
- `describe(position) -> PositionView`, without a source: its spec may be gone. DamagedError: the position is not one of
  this kind.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from firnline.errors import ConfigError, DamagedError
from firnline.sources.base import PositionView, Source, Split, SplitReader
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.options import SourceOptions
    from firnline.sources.columns import Columns

KINDS = {
    "files": "firnline.sources.files.kind",
}  # by `type` of the spec: the module, imported when a source of that kind is opened


def open_source(options: SourceOptions, *, once: bool = False, moved: tuple[str, str] | None = None) -> Source:
    """Open a source. Reads nothing yet. See `Source` for the arguments.

    Raises:
        ConfigError: there is no such kind, or the settings contradict each other.
    """
    source: Source = _kind(options.type).open_source(options, once=once, moved=moved)
    return source


def open_reader(kind: str, settings: dict[str, Json], split: Split, columns: Columns) -> SplitReader:
    """Open the reader of a split, in a worker."""
    reader: SplitReader = _kind(kind).open_reader(settings, split, columns)
    return reader


def describe(position: Json) -> PositionView:
    """Describe a position whose source is not in the spec, by the kind that can parse it."""
    for kind in KINDS:
        try:
            view: PositionView = _kind(kind).describe(position)
        except DamagedError:
            continue
        return view
    return PositionView(facts=position if isinstance(position, dict) else {"position": position})


def _kind(name: str) -> Any:
    if name not in KINDS:
        raise ConfigError(f"there is no kind of source {name!r}", hint=f"Known kinds: {', '.join(KINDS)}.")
    return importlib.import_module(KINDS[name])
