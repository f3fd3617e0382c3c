"""The kind `files`: a folder, glob or bucket prefix.

Modules are imported on demand: a driver loads no decoder, a worker no planner and no spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sources.base import PositionView, Source, Split, SplitReader
    from firnline.sources.columns import Columns
    from firnline.sources.files.config import FilesSourceConfig
    from firnline.sources.files.options import FileSourceOptions


def config_model() -> type[FilesSourceConfig]:
    """Return the model of a file source's keys in a spec."""
    from firnline.sources.files.config import FilesSourceConfig

    return FilesSourceConfig


def open_source(options: FileSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> Source:
    """Open a folder, glob or bucket prefix."""
    from firnline.sources.files.source import FileSource

    return FileSource(options, once=once, moved=moved)


def warm_up(options: FileSourceOptions) -> None:
    """Compile what the readers of a source need, or load it."""
    from firnline.sources.files.formats import open_format

    open_format(options.read_as).warm_up()


def open_reader(settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> SplitReader:
    """Open the reader of a range of files."""
    from firnline.sources.files.reader import FileReader

    return FileReader(settings, split, columns)


def describe(position: Json) -> PositionView:
    """Describe a high-water mark and the files in progress."""
    from firnline.sources.files.position import FileState

    return FileState.from_json(position).describe()
