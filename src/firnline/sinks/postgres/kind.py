"""The kind `postgres`: PostgreSQL tables that are appended to or upserted. Modules are imported on demand."""

from __future__ import annotations

from typing import TYPE_CHECKING

from firnline.errors import MissingExtraError

if TYPE_CHECKING:
    from firnline.sinks.base import Sink, SinkContext
    from firnline.sinks.postgres.config import PostgresSinkConfig
    from firnline.sinks.postgres.options import PostgresSinkOptions


def config_model() -> type[PostgresSinkConfig]:
    """Return the model of a table's keys in a spec."""
    from firnline.sinks.postgres.config import PostgresSinkConfig

    return PostgresSinkConfig


def open_sink(options: PostgresSinkOptions, context: SinkContext) -> Sink:
    """Open a table. Connects to nothing yet.

    Raises:
        ConfigError: an upsert has no key, neither in the spec nor from its input; or the dsn cannot be read.
        MissingExtraError: the driver is not installed.
    """
    try:
        from firnline.sinks.postgres.sink import PostgresSink, PostgresUpsertSink
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "psycopg":
            raise
        raise MissingExtraError(extra="postgres") from error
    if options.write == "append":
        return PostgresSink(options, context)
    context.check_key(options)
    return PostgresUpsertSink(options, context)
