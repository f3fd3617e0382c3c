"""The kind `delta`: the versions of a Delta table.

Modules are imported on demand: a driver loads no reader, a worker no planner and no spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sources.base import PositionView, Source, Split, SplitReader
    from firnline.sources.columns import Columns
    from firnline.sources.delta.config import DeltaSourceConfig
    from firnline.sources.delta.options import DeltaSourceOptions


def config_model() -> type[DeltaSourceConfig]:
    """Return the model of a Delta source's keys in a spec."""
    from firnline.sources.delta.config import DeltaSourceConfig

    return DeltaSourceConfig


def open_source(options: DeltaSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> Source:  # noqa: ARG001
    """Open a table."""
    from firnline.sources.delta.source import DeltaSource

    return DeltaSource(options, moved=moved)


def open_reader(settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> SplitReader:
    """Open the reader of data files."""
    from firnline.sources.delta.reader import DeltaReader

    return DeltaReader(settings, split, columns)


def describe(position: Json) -> PositionView:
    """Describe a position of a table. Raises DamagedError if it is not one."""
    from firnline.sources.delta.position import DeltaPosition

    return DeltaPosition.from_json(position).describe()
