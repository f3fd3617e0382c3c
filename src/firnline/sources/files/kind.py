"""Files as a kind of source, for `firnline.sources.registry`: drivers load no decoder, and workers no planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.sources.base import PositionView, Source, Split, SplitReader
from firnline.types import Json

if TYPE_CHECKING:
    from firnline.options import FileSourceOptions
    from firnline.sources.columns import Columns


def open_source(options: FileSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> Source:
    """Open a folder, glob or bucket prefix."""
    from firnline.sources.files.source import FileSource

    return FileSource(options, once=once, moved=moved)


def open_reader(settings: dict[str, Json], split: Split, columns: Columns) -> SplitReader:
    """Open the reader of a range of files."""
    from firnline.sources.files.reader import FileReader

    return FileReader(settings, split, columns)


def describe(position: Json) -> PositionView:
    """Describe a high-water mark and the files in progress."""
    from firnline.sources.files.position import FileState

    return FileState.from_json(position).describe()
