"""The kind `postgres`: the changes of tables of a PostgreSQL database.

Modules are imported on demand: a driver loads no decoder, a worker no planner and no spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from firnline.types import Json

if TYPE_CHECKING:
    from firnline.sources.base import PositionView, Source, Split, SplitReader
    from firnline.sources.columns import Columns
    from firnline.sources.postgres.config import PostgresSourceConfig
    from firnline.sources.postgres.options import PostgresSourceOptions


def config_model() -> type[PostgresSourceConfig]:
    """Return the model of a PostgreSQL source's keys in a spec."""
    from firnline.sources.postgres.config import PostgresSourceConfig

    return PostgresSourceConfig


def open_source(options: PostgresSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> Source:
    """Open a database."""
    from firnline.sources.postgres.source import PostgresSource

    return PostgresSource(options, once=once, moved=moved)


def warm_up(_options: PostgresSourceOptions) -> None:
    """Compile the decoder, or load it."""
    from firnline.sources.postgres.decode import warm_up

    warm_up()


def open_reader(settings: dict[str, Json], split: Split, columns: Mapping[str, Columns]) -> SplitReader:
    """Open the reader of spool files."""
    from firnline.sources.cdc.reader import LogReader
    from firnline.sources.postgres.decode import PostgresDecoder

    return LogReader(settings, split, columns, lambda before, keys: PostgresDecoder(before=before, keys=keys))


def describe(position: Json) -> PositionView:
    """Describe the place of a position."""
    from firnline.sources.cdc.position import LogPosition
    from firnline.sources.postgres.position import describe_place

    known = LogPosition.from_json(position, "postgres")
    return known.describe(describe_place(known.place))
