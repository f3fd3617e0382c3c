"""The kind `mysql`: the changes of tables of a MySQL or MariaDB server.

Modules are imported on demand: a driver loads no decoder, a worker no planner and no spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sources.base import PositionView, Source, Split, SplitReader
    from firnline.sources.columns import Columns
    from firnline.sources.mysql.config import MySqlSourceConfig
    from firnline.sources.mysql.options import MySqlSourceOptions


def config_model() -> type[MySqlSourceConfig]:
    """Return the model of a MySQL source's keys in a spec."""
    from firnline.sources.mysql.config import MySqlSourceConfig

    return MySqlSourceConfig


def open_source(options: MySqlSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> Source:
    """Open a server."""
    from firnline.sources.mysql.source import MySqlSource

    return MySqlSource(options, once=once, moved=moved)


def warm_up(_options: MySqlSourceOptions) -> None:
    """Compile the decoder, or load it."""
    from firnline.sources.mysql.decode import warm_up

    warm_up()


def open_reader(settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> SplitReader:
    """Open the reader of spool files."""
    from firnline.sources.cdc.reader import LogReader
    from firnline.sources.mysql.decode import MySqlDecoder

    return LogReader(settings, split, columns, lambda before, keys: MySqlDecoder(with_before=before, keys=keys))


def describe(position: Json) -> PositionView:
    """Describe the place of a position."""
    from firnline.sources.cdc.position import LogPosition
    from firnline.sources.mysql.source import describe_place

    known = LogPosition.from_json(position, "mysql")
    return known.describe(describe_place(known.place))
