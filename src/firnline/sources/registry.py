"""The kinds of sources by name. To add one: a folder with a module like `sources/files/kind.py`, and a line in `KINDS`.

Kinds of installed packages are known, too (`firnline.kinds`).

Such a module imports the others of its folder on demand, and has four functions:
- `open_source(options, *, once, moved) -> Source`, in the driver;
- `open_reader(settings, split, columns) -> SplitReader`, in a worker; `settings` comes from `Source.reader_settings`;
- `describe(position) -> PositionView`, without a source: its spec may be gone. DamagedError: the position is not one of
  this kind;
- `config_model() -> type[SourceConfig]`, in the driver: the keys of the kind in a spec. A kind without it is for Python
  only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from firnline.errors import ConfigError, FirnlineError
from firnline.kinds import Models, check_kind, known_kinds, load_kind, load_models
from firnline.types import Json

if TYPE_CHECKING:  # a spec is read without Arrow
    from firnline.options import SourceOptions
    from firnline.sources.base import PositionView, Source, Split, SplitReader
    from firnline.sources.columns import Columns

KINDS = {
    "files": "firnline.sources.files.kind",
    "delta": "firnline.sources.delta.kind",
    "kafka": "firnline.sources.kafka.kind",
    "mysql": "firnline.sources.mysql.kind",
    "postgres": "firnline.sources.postgres.kind",
}  # by `type` of the spec: the module, imported when a source of that kind is opened


def config_models() -> Models:
    """Return the models (`SourceConfig`) of all kinds of sources that a spec may name, by `type`."""
    return load_models(KINDS, "source")


def open_source(options: SourceOptions, *, once: bool = False, moved: tuple[str, str] | None = None) -> Source:
    """Open a source. Reads nothing yet. See `Source` for the arguments.

    Raises:
        ConfigError: there is no such kind, or the settings contradict each other.
    """
    check_kind(KINDS, "source", options.type)
    try:
        source: Source = load_kind(KINDS, "source", options.type).open_source(options, once=once, moved=moved)
    except (FirnlineError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"source {options.name!r} ({options.type}) cannot be opened: {reason}") from error
    return source


def open_reader(kind: str, settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> SplitReader:
    """Open the reader of a split, in a worker. `columns` has the wanted ports."""
    reader: SplitReader = load_kind(KINDS, "source", kind).open_reader(settings, split, columns)
    return reader


def warm_up(sources: Iterable[SourceOptions]) -> None:
    """Compile what the readers of these sources need, or load it, before workers do. A kind may define `warm_up`."""
    for options in sources:
        prepare = getattr(load_kind(KINDS, "source", options.type), "warm_up", None)
        if prepare is not None:
            prepare(options)


def describe(position: Json) -> PositionView:
    """Describe a position whose source is not in the spec, by the kind that can parse it."""
    from firnline.sources.base import PositionView

    for kind in known_kinds(KINDS, "source"):
        with contextlib.suppress(Exception):  # DamagedError, or whatever else an own kind raises
            view: PositionView = load_kind(KINDS, "source", kind).describe(position)
            return view
    return PositionView(facts=position if isinstance(position, dict) else {"position": position})
