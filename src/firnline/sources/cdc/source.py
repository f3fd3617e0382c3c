"""The source that captures changes, in the driver: plans over spool files, which a thread of its own writes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar

from firnline.checkpoint.ledger import IDLE
from firnline.errors import ConfigError, FencedError, FirnlineError, SourceError, SourceMovedError
from firnline.names import spool_parts
from firnline.sources.base import MAIN_PORT, Backlog, Limits, LogLag, PositionView, Source, SourcePlan, Split
from firnline.sources.cdc.log import LogStream
from firnline.sources.cdc.options import LogSourceOptions
from firnline.sources.cdc.position import LogPosition
from firnline.sources.cdc.reader_settings import LogReaderSettings
from firnline.sources.cdc.schemas import VERSIONS, SchemaVersion, new_versions
from firnline.sources.cdc.spool import SpoolFile, delete_files, follow, list_names, read_facts
from firnline.sources.cdc.spooling import Spooler, SpoolSettings
from firnline.sources.cdc.tables import TablePatterns
from firnline.storage import Storage, open_storage
from firnline.types import Json

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 62
FIRST_WAIT_SECONDS = 0.05  # for a first transaction: then the run polls


class LogSource(Source):
    """The tables of a database. Each table is a port; the main port has the changes of all of them."""

    claims_first = True
    has_keys = True
    key_hint: ClassVar[str]  # how a table of this database gets a key
    has_log = True
    inputs_are = "spool file"
    kind: str

    def __init__(
        self,
        options: LogSourceOptions,
        *,
        default_schema: str,
        once: bool,
        moved: tuple[str, str] | None,
    ) -> None:
        self.name = options.name
        self.poll_interval_secs = options.poll_interval_secs
        self._options = options
        self._location = options.location
        self._home = options.home
        self._folder = options.folder
        self._default_schema = default_schema
        self._tables = TablePatterns(options.tables, default_schema)
        self._once = once
        self._moved = moved
        self._settings = SpoolSettings(max_ahead_bytes=options.spool.max_bytes)
        self._spooler: Spooler | None = None
        self._check_holder: Callable[[], None] | None = None
        self._until: Json = None  # once: where the server's log ended when the run began
        self._end_stream: LogStream | None = None
        self._released: Json = None  # up to where the server may forget its log
        self._keys: dict[str, tuple[str, ...]] = {}  # by port

    # -- to be written by a kind ----------------------------------------------------------------------

    @abstractmethod
    def open_stream(self) -> LogStream:
        """Return a stream that is not open yet."""

    @abstractmethod
    def describe_place(self, place: Json) -> dict[str, Json]:
        """Return a place of the server for people."""

    @abstractmethod
    def measure(self, place: Json) -> LogLag:
        """Return how far a place is behind the server; None is before the first transaction. Asks the server."""

    def keeps_from(self, place: Json) -> bool:
        """Return whether the server surely has its log from a place on."""
        return False

    def read_key(self, table: str) -> tuple[str, ...] | None:
        """Return the columns that identify a row of a table in the log, as the server's catalogue has them now; none if
        it has no key, None if there is no such table.

        Raises:
            SourceError: the server does not answer.
        """
        raise NotImplementedError

    # -- positions ------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self._location

    @property
    def storage(self) -> Storage:
        """The storage of the spool."""
        return open_storage(self._home.root, self._home.storage_options)

    def has_port(self, port: str) -> bool:
        return port == MAIN_PORT or self._tables.may_cover(port)

    def find_key(self, port: str) -> tuple[str, ...]:
        known = self._keys.get(port)
        if known is not None:
            return known
        table = port if "." in port else f"{self._default_schema}.{port}"
        found = self.read_key(table)
        if found is None:
            raise ConfigError(
                f"table {table} does not exist yet, so nobody knows what identifies its rows",
                hint="Create it first, or set `key` of the sinks that upsert it.",
            )
        if not found:
            raise ConfigError(
                f"table {table} has no key, so its changes can be appended and not upserted",
                hint=f"{self.key_hint} Or write `write: append`; or set `key` of the sink to columns that do identify "
                "a row, if the log has them of every deleted row.",
            )
        return self._keys.setdefault(port, found)

    def start(self, position: Json | None) -> Json:
        if position is None:
            return LogPosition(self.kind, self._location).to_json()
        known = LogPosition.from_json(position, self.kind)
        if self._moved is not None and known.location == self._moved[0]:
            return replace(known, location=self._location).to_json()
        if known.location != self._location:
            raise SourceMovedError(
                f"source {self.name!r} read {known.location}, and now names {self._location}",
                hint="For another database, give the source another name. If the same server has another address, run "
                f"once with --source-moved {known.location}={self._location}.",
            )
        return known.to_json()

    def describe(self, position: Json) -> PositionView:
        known = LogPosition.from_json(position, self.kind)
        return known.describe(self.describe_place(known.place) if known.place is not None else {})

    # -- the run that owns the pipeline ---------------------------------------------------------------

    def claimed(self, check_holder: Callable[[], None]) -> None:
        self._check_holder = check_holder
        self._stop_spooler()

    def owns_pipeline(self) -> bool:
        """Return whether this run owns the pipeline: then it may end the stream of a run that owned it before."""
        if self._check_holder is None:
            return False
        try:
            self._check_holder()
        except FencedError:
            return False
        return True

    def close(self) -> None:
        self._stop_spooler()

    def _stop_spooler(self) -> None:
        spooler, self._spooler = self._spooler, None
        if spooler is not None:
            spooler.stop()

    def _start_spooler(self, position: LogPosition) -> Spooler:
        """Follow what is spooled behind a position, and read on behind it."""
        assert self._check_holder is not None
        spooler = Spooler(
            self.open_stream(),
            self.storage,
            self._folder,
            files=self._find_spooled(position),
            number=position.spool,
            begin=position.mark,
            check_holder=self._check_holder,
            settings=self._settings,
            name=self.name,
        )
        spooler.release(self._released)
        spooler.start()
        return spooler

    def _find_spooled(self, position: LogPosition) -> list[SpoolFile]:
        """Return the files behind a position that a run before has spooled, up to the last whole transaction."""
        found: list[SpoolFile] = []
        storage = self.storage
        for name in follow(list_names(storage, self._folder), position.spool, position.mark):
            try:
                found.append(read_facts(storage, self._folder, name))
            except FirnlineError as error:
                logger.warning("spool file passed over", extra={"file": name, "reason": str(error)})
                break
        while found and not found[-1].end.is_cut:
            found.pop()
        return found

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        known = LogPosition.from_json(position, self.kind)
        if self._check_holder is None:
            return None  # a command that only looks
        if self._spooler is None:
            self._spooler = self._start_spooler(known)
            if self._once:
                self._until = self._log_end()
        spooler = self._spooler
        files = spooler.files_after(known.spool, FIRST_WAIT_SECONDS)
        while not files and self._once and not spooler.has_all_until(self._until):
            if spooler.lost is not None:
                raise SourceError(spooler.lost)
            files = spooler.files_after(known.spool, FIRST_WAIT_SECONDS)
        if not files:  # the last ones may have come between the two questions
            files = spooler.files_after(known.spool, 0.0)
        chosen = _take(files, limits)
        if not chosen:
            return None
        return self._make_plan(position, chosen, limits.parallelism)

    def _log_end(self) -> Json:
        if self._end_stream is None:
            self._end_stream = self.open_stream()
        return self._end_stream.end_position()

    def _make_plan(self, position: Json, files: Sequence[SpoolFile], parallelism: int) -> SourcePlan:
        tasks = max(1, min(parallelism, len(files)))
        groups = _share(files, tasks)
        splits = [Split([file.to_json() for file in group], NO_LIMIT, NO_LIMIT, NO_LIMIT) for group in groups]
        return SourcePlan(self.name, position, splits, len(files), sum(file.size_bytes for file in files))

    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        by_name = {str(item["path"]): item for item in outcomes}
        inputs = [item for split in plan.splits for item in split.inputs]
        known = LogPosition.from_json(plan.base, self.kind)
        records: list[dict[str, Json]] = []
        schemas = dict(known.schemas)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for item in inputs:
            outcome = by_name[str(item["path"])]
            records.append(
                {
                    **item,
                    **({IDLE: True} if not item["transactions"] and not item["rows"] else {}),
                    "from": 0,
                    "to": outcome["rows"],
                    "status": "committed",
                    "processed_time": now,
                    VERSIONS: [one.to_json() for one in _new_versions(schemas, outcome)],
                }
            )
        return self._after(known, records, schemas).to_json(), records

    def _after(
        self, known: LogPosition, records: Sequence[Mapping[str, Json]], schemas: Mapping[str, str]
    ) -> LogPosition:
        last = SpoolFile.from_json(records[-1])
        return replace(known, place=last.end.place, spool=last.number, schemas=dict(schemas))

    def replay(self, position: Json, records: Sequence[dict[str, Json]]) -> Json:
        known = LogPosition.from_json(position, self.kind)
        if not records:
            return position
        schemas = dict(known.schemas)
        for record in records:
            _new_versions(schemas, record)
        return self._after(known, records, schemas).to_json()

    def replan(self, position: Json, records: Sequence[dict[str, Json]], parallelism: int) -> SourcePlan:
        return self._make_plan(position, [SpoolFile.from_json(record) for record in records], parallelism)

    def backlog(self, position: Json) -> Backlog:
        spooler, known = self._spooler, LogPosition.from_json(position, self.kind)
        if spooler is None:
            waiting = self.measure(known.place).lag_bytes or 0
            return Backlog(int(waiting > 0), waiting)
        files = spooler.files_after(known.spool, 0.0)
        return Backlog(len(files), sum(file.size_bytes for file in files))

    def log_lag(self, position: Json) -> LogLag:
        return self.measure(LogPosition.from_json(position, self.kind).place)

    def unreachable(self) -> str | None:
        return self._spooler.lost if self._spooler is not None else None

    # -- after the commit -----------------------------------------------------------------------------

    def decided(self, position: Json) -> None:
        spooler = self._spooler
        known = LogPosition.from_json(position, self.kind)
        if spooler is not None and known.place is not None:
            if self._options.spool.keep == "durable":
                self._release(known.place)
            spooler.forget(known.spool)

    def _release(self, place: Json) -> None:
        """Let the server forget its log up to a place, now or when the stream is opened."""
        self._released = place
        if self._spooler is not None:
            self._spooler.release(place)

    def acknowledge(self, position: Json) -> None:
        """Delete spool files that no rollback needs any more."""
        known = LogPosition.from_json(position, self.kind)
        number = known.spool
        if self._options.spool.keep == "cache" and known.place is not None:
            self._release(known.place)
        storage = self.storage
        names = list_names(storage, self._folder)
        delete_files(storage, self._folder, [name for name in names if (spool_parts(name) or (0,))[0] <= number])

    def reader_settings(self) -> dict[str, Json]:
        return LogReaderSettings(
            root=self._home.root,
            storage_options=dict(self._home.storage_options),
            folder=self._folder,
            default_schema=self._default_schema,
            include=self._options.include,
        ).to_json()

    def find_unavailable(
        self, position: Json, records: Sequence[Mapping[str, Json]], back_to: Json | None = None
    ) -> list[str]:
        names = set(list_names(self.storage, self._folder))
        gone = [f"{record['path']}: the spool file is gone" for record in records if record["path"] not in names]
        if gone and back_to is not None and self._options.spool.keep == "cache":
            place = LogPosition.from_json(back_to, self.kind).place
            if place is not None and self.keeps_from(place):
                return []
        return gone


def _new_versions(known: dict[str, str], value: Mapping[str, Json]) -> list[SchemaVersion]:
    return new_versions(known, [SchemaVersion.from_json(one) for one in value[VERSIONS]])


def _take(files: Sequence[SpoolFile], limits: Limits) -> list[SpoolFile]:
    """Choose the files of a slice: the first whole transactions, and more while the limits allow it."""
    chosen: list[SpoolFile] = []
    whole, rows, size = 0, 0, 0
    for file in files:
        rows, size = rows + file.rows, size + file.size_bytes
        if whole and (rows > limits.max_events or size > limits.max_bytes):
            break
        chosen.append(file)
        if file.end.is_cut:
            whole = len(chosen)
    return chosen[:whole]


def _share(files: Sequence[SpoolFile], tasks: int) -> list[list[SpoolFile]]:
    """Share files among tasks: contiguous, by size."""
    total = sum(file.size_bytes for file in files)
    groups: list[list[SpoolFile]] = [[]]
    size = 0
    for file in files:
        if groups[-1] and size + file.size_bytes / 2 > total * len(groups) / tasks:
            groups.append([])
        groups[-1].append(file)
        size += file.size_bytes
    return groups
