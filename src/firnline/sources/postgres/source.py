"""The PostgreSQL source, in the driver."""

from __future__ import annotations

from dataclasses import replace

from firnline.errors import ConfigError, DamagedError, SlotLagError
from firnline.sources.base import Limits, LogLag, SourcePlan
from firnline.sources.cdc.column_names import names_here, renamings
from firnline.sources.cdc.log import LogStream, TableReader
from firnline.sources.cdc.source import LogSource
from firnline.sources.cdc.tables import TablePatterns, name_like, snapshot_command
from firnline.sources.postgres.messages import format_lsn, parse_lsn
from firnline.sources.postgres.options import DEFAULT_SCHEMA, PostgresSourceOptions
from firnline.sources.postgres.position import LogPlace, describe_place
from firnline.sources.postgres.server import KINDS, OWN_SCHEMA, PostgresServer, identify, sql_name
from firnline.sources.postgres.stream import PostgresStream
from firnline.sources.postgres.tables import PostgresTables
from firnline.types import Json


class PostgresSource(LogSource):
    """The tables of a PostgreSQL database."""

    kind = "postgres"
    never_captured = (OWN_SCHEMA, "pg_catalog", "information_schema")
    key_hint = "Give it one (ALTER TABLE ... ADD PRIMARY KEY)."

    def __init__(self, options: PostgresSourceOptions, *, once: bool, moved: tuple[str, str] | None) -> None:
        super().__init__(options, default_schema=DEFAULT_SCHEMA, once=once, moved=moved)
        self._postgres = options
        self._too_much: str | None = None  # why there is an alarm, since the last measurement
        place = f"source {options.name!r} at {options.location}"
        self._server = PostgresServer(options.dsn, place, options.publication or "")

    def open_stream(self) -> LogStream:
        options = self._postgres
        assert options.slot is not None
        return PostgresStream(
            self._server,
            options.slot,
            options.publication or options.slot,
            self._tables,
            creates=options.publication is None,
            failover=options.failover,
            name=f"firnline {options.name}",
            may_end_others=self.owns_pipeline,
        )

    def open_tables(self) -> TableReader:
        options = self._postgres
        assert options.slot is not None
        return PostgresTables(
            self._server,
            options.publication or options.slot,
            self._tables,
            creates=options.publication is None,
            name=f"firnline {options.name}",
        )

    def describe_place(self, place: Json) -> dict[str, Json]:
        return describe_place(place)

    def read_key(self, table: str) -> tuple[str, ...] | None:
        key = self._server.find_key(table)
        return key and names_here(key, self._server.find_columns(table))

    def find_names(self) -> list[str]:
        return [table.name for table in self._server.find_tables(TablePatterns(("*.*",), DEFAULT_SCHEMA))]

    def check(self) -> None:
        assert self._postgres.slot is not None
        self._server.check_settings()
        if self._postgres.failover:
            self._server.check_failover(self._postgres.slot)
        self._server.check_room(self._postgres.slot)
        tables = self._server.find_tables(self._tables)
        if self._postgres.publication is not None:
            self._server.require_publication(self._postgres.publication, tables)
        else:
            self._server.check_may_publish(self._postgres.slot, tables)
        if self._postgres.snapshot != "never":
            self._server.check_may_read([table.name for table in tables])
            self._server.check_sees_all(tables)

    def measure(self, place: Json) -> LogLag:
        assert self._postgres.slot is not None
        log = self._server.read_log(self._postgres.slot)
        known = LogPlace.from_json(place) if place is not None else None
        self._too_much = alarm = self._alarm(log.retained_bytes)
        if known is None:
            return LogLag(format_lsn(log.end), "", retained_bytes=log.retained_bytes, alarm=alarm)
        if not log.has_slot:
            alarm = f"the slot {self._postgres.slot} does not exist any more: the next run stops, and says how to go on"
        behind = max(0, log.end - known.lsn)
        seconds = max(0.0, (log.now - known.reached_at) / 1e6) if known.reached_at else None
        return LogLag(
            format_lsn(log.end),
            format_lsn(known.lsn),
            behind,
            round(seconds, 3) if seconds is not None and behind else 0.0 if not behind else None,
            log.retained_bytes,
            alarm,
        )

    def _alarm(self, retained_bytes: int | None) -> str | None:
        most, slot = self._postgres.max_slot_lag_bytes, self._postgres.slot
        if most is None or retained_bytes is None or retained_bytes <= most:
            return None
        return (
            f"the slot {slot} makes the server keep {retained_bytes:,} bytes of its log, more than max_slot_lag_bytes "
            f"({most:,})"
        )

    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        if self._too_much is not None and self._postgres.on_slot_lag == "stop":
            raise SlotLagError(f"{self._server.place}: {self._too_much}")
        return super().plan(position, limits)

    def find_place(self, place: Json, words: str) -> Json:
        known, end = LogPlace.from_json(place), self._server.end_lsn()
        try:
            lsn = end if words == "end" else parse_lsn(words)
        except DamagedError as error:
            raise ConfigError(error.message, hint="Write a place like 16/B374D848, or end.") from None
        if lsn > end:
            raise ConfigError(f"{self._server.place}: the log ends at {format_lsn(end)}, before {words}")
        found = replace(known, lsn=lsn, last=None, seen_at=0, is_chosen=True)
        if lsn < known.lsn and not self.keeps_from(found.to_json()):
            raise ConfigError(
                f"{self._server.place}: the server was told that it may forget its log before {words}",
                hint="Go back to an earlier epoch instead, which reads the spool: firnline rollback --to EPOCH",
            )
        return found.to_json()

    def distance(self, old: Json, new: Json) -> int:
        return LogPlace.from_json(new).lsn - LogPlace.from_json(old).lsn

    def place_text(self, place: Json) -> str:
        return format_lsn(LogPlace.from_json(place).lsn)

    def keeps_from(self, place: Json) -> bool:
        assert self._postgres.slot is not None
        slot = self._server.find_slot(self._postgres.slot)
        return slot is not None and slot.confirmed <= LogPlace.from_json(place).lsn

    def remarks(self) -> list[str]:
        found = self._server.find_tables(self._tables)
        names = {table.name for table in found}
        missing = [name for name in self._tables.names if name not in names]
        others = self.find_names() if missing else ()
        told = [f"table {name} does not exist yet. {name_like(name, others)}".rstrip(". ") for name in missing]
        if not found and not told:
            told.append("no table of the database matches `tables`")
        publication = self._postgres.publication
        published = self._server.published(publication) if publication is not None else None
        if publication is not None and published and "truncate" not in self._server.published_kinds(publication):
            told.append(
                f"publication {publication} does not publish TRUNCATE, so that sinks keep the rows of a table that is "
                f"emptied so (ALTER PUBLICATION {sql_name(publication)} SET (publish = '{', '.join(KINDS)}'))"
            )
        for table in found:
            told += renamings(table.name, self._server.find_columns(table.name))
            if table.generated:
                names_of = ", ".join(table.generated)
                told.append(f"{table.name}: the log does not have generated columns, so that no sink gets {names_of}")
            if table.is_partitioned:
                told.append(
                    f"table {table.name} is partitioned: the log has not that rows go when a partition alone is "
                    "emptied, dropped or detached; DELETE them, or read the table again afterwards "
                    f"({snapshot_command(self.name, table.name, empties=True)})"
                )
            way_out = identify(table.unnamed)
            if publication is not None and published is not None and table.name not in published:
                # Without an identity the server would refuse the application's own updates of a published table.
                first = "" if table.has_identity else f"{way_out}; then "
                told.append(
                    f"publication {publication} has not the table {table.name}, so that its changes are not captured "
                    f"({first}ALTER PUBLICATION {sql_name(publication)} ADD TABLE {sql_name(table.name)})"
                )
            elif not table.has_identity and published is not None and published[table.name]:
                effect = "updates and deletes do not name the row"
                if table.refuses_changes:
                    effect = "the server refuses the application's own updates and deletes of it while "
                    effect += f"{publication} publishes them"
                told.append(f"{table.flaw}, so that {effect} ({way_out})")
            elif not table.has_identity:
                told.append(f"{table.flaw}: only its inserts are captured ({way_out} captures all changes)")
            elif table.partial:
                told.append(
                    f"table {table.name} has partitions whose old rows are not whole in the log, though its replica "
                    f"identity is FULL: partitions do not inherit it ({identify(table.partial)})"
                )
        return told
