"""The PostgreSQL source, in the driver."""

from __future__ import annotations

from firnline.sources.cdc.log import LogStream
from firnline.sources.cdc.reader import LogReaderSettings
from firnline.sources.cdc.source import LogSource
from firnline.sources.cdc.spooling import SpoolSettings
from firnline.sources.cdc.tables import TablePatterns
from firnline.sources.postgres.options import DEFAULT_SCHEMA, PostgresSourceOptions
from firnline.sources.postgres.position import describe_place
from firnline.sources.postgres.server import PostgresServer
from firnline.sources.postgres.stream import PostgresStream
from firnline.types import Json


class PostgresSource(LogSource):
    """The tables of a PostgreSQL database."""

    kind = "postgres"

    def __init__(self, options: PostgresSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> None:
        tables = TablePatterns(options.tables, DEFAULT_SCHEMA)
        super().__init__(
            options.name,
            location=options.location,
            home=options.home,
            folder=options.folder,
            tables=tables,
            once=once,
            moved=moved,
            settings=SpoolSettings(),
        )
        self.poll_interval_secs = options.poll_interval_secs
        self._options = options
        self._server = PostgresServer(options.dsn, f"source {options.name!r} at {options.location}")

    def open_stream(self) -> LogStream:
        options = self._options
        assert options.slot is not None
        return PostgresStream(
            self._server,
            options.slot,
            options.publication or options.slot,
            self._tables,
            creates=options.publication is None,
            name=f"firnline {options.name}",
            may_end_others=self.owns_pipeline,
        )

    def describe_place(self, place: Json) -> dict[str, Json]:
        return describe_place(place)

    def check(self) -> None:
        self._server.check_settings()

    def reader_settings(self) -> dict[str, Json]:
        options = self._options
        return LogReaderSettings(
            root=options.home.root,
            storage_options=dict(options.home.storage_options),
            folder=options.folder,
            default_schema=DEFAULT_SCHEMA,
            include=options.include,
        ).to_json()
