"""The source that captures changes, in the driver: plans over spool files and chunks of tables, which two threads of
its own write."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import ClassVar, Literal

from firnline.checkpoint.ledger import IDLE
from firnline.clock import monotonic
from firnline.errors import (
    ConfigError,
    DamagedError,
    FencedError,
    FirnlineError,
    SchemaError,
    SourceError,
    SourceGapError,
    SourceMovedError,
)
from firnline.names import chunk_parts, spool_parts
from firnline.options import names_tables
from firnline.sources.base import (
    MAIN_PORT,
    Backlog,
    CapturedTable,
    Limits,
    LogLag,
    PositionChange,
    PositionView,
    SnapshotProgress,
    Source,
    SourcePlan,
    Split,
)
from firnline.sources.cdc.chunks import (
    ChunkFile,
    SnapshotBegin,
    SnapshotPassed,
    TableLeft,
    TableLogged,
    WindowSeen,
    sees_epoch,
)
from firnline.sources.cdc.log import AWAY, RESNAPSHOT_ALL, LogStream, TableReader, at_first
from firnline.sources.cdc.options import LogSourceOptions
from firnline.sources.cdc.position import LogPosition, TableSnapshot
from firnline.sources.cdc.reader_settings import WARNINGS, LogReaderSettings
from firnline.sources.cdc.schemas import (
    KEYS,
    SILENT,
    VERSIONS,
    SchemaVersion,
    SilentChange,
    compare_shapes,
    new_versions,
)
from firnline.sources.cdc.snapshots import Asked, SnapshotTaker, is_to_be_read
from firnline.sources.cdc.spool import SpoolFile, delete_files, follow, list_all, list_names, read_facts
from firnline.sources.cdc.spooling import Awaited, GapConsent, Spooler, SpoolSettings
from firnline.sources.cdc.tables import TablePatterns, name_like, port_of, snapshot_command, tables_of_port
from firnline.storage import Storage, open_storage
from firnline.types import Json

logger = logging.getLogger(__name__)

_SCHEMES = {"postgres": ("postgresql", "postgres"), "mysql": ("mysql", "mariadb")}  # of addresses, by type

NO_LIMIT = 1 << 62
END_SECONDS = 1.0  # between two questions where the log ends
FIRST_WAIT_SECONDS = 0.05  # for a first transaction: then the run polls

# Inputs that have no file of their own.
Fact = SnapshotBegin | SnapshotPassed | WindowSeen | TableLeft | TableLogged
Input = SpoolFile | ChunkFile | Fact


class LogSource(Source):
    """The tables of a database. Each table is a port; the main port has the changes of all of them."""

    claims_first = True
    has_keys = True
    key_hint: ClassVar[str]  # how a table of this database gets a key
    has_log = True
    never_captured: tuple[str, ...] = ()  # schemas of the server's and of Firnline's own tables
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
        self._tables = TablePatterns(options.tables, default_schema, self.never_captured)
        self._once = once
        _check_scheme(options)
        self._moved = moved
        self._warned: set[str] = set()
        self._is_reading = True  # tables, or nobody knows yet which there are
        self._settings = SpoolSettings(max_ahead_bytes=options.spool.max_bytes)
        self._spooler: Spooler | None = None
        self._taker: SnapshotTaker | None = None
        self._is_closed = False
        self._changing = threading.Lock()  # the three above; a run may end while another of its threads plans
        self._consent: GapConsent | None = None  # to a gap of the log
        self._asked: dict[str, Asked] = {}  # snapshots that people asked for, by request
        self._check_holder: Callable[[], None] | None = None
        self._until: Json = None  # once: where the server's log ended when the run began
        self._end_stream: LogStream | None = None
        self._end: Awaited | None = None  # where the log ended after the last epoch; None: nobody has asked since
        self._may_ask_end = 0.0  # not before then
        self._released: Json = None  # up to where the server may forget its log
        self._keys: dict[str, tuple[str, ...]] = {}  # by port
        self._upserted: list[TablePatterns] = []  # tables that sinks of many upsert

    # -- to be written by a kind ----------------------------------------------------------------------

    @abstractmethod
    def open_stream(self) -> LogStream:
        """Return a stream that is not open yet."""

    @abstractmethod
    def open_tables(self) -> TableReader:
        """Return a reader of tables that has no connection yet."""

    @abstractmethod
    def describe_place(self, place: Json) -> dict[str, Json]:
        """Return a place of the server for people."""

    @abstractmethod
    def measure(self, place: Json) -> LogLag:
        """Return how far a place is behind the server; None is before the first transaction. Asks the server."""

    @abstractmethod
    def find_place(self, place: Json, words: str) -> Json:
        """Return the place that a person names, in the words of this kind; `end` is the end of the log.

        Raises:
            ConfigError: the words mean nothing, or the server's log has no such place.
        """

    @abstractmethod
    def distance(self, old: Json, new: Json) -> int:
        """Return the bytes of the log from one place to another, below 0 if the other one lies before; 1 or -1 if only
        their order is known."""

    @abstractmethod
    def place_text(self, place: Json) -> str:
        """Return a place in one word of the server."""

    def place_without(self, place: Json, words: str) -> Json:
        """Return the place that passes over the transaction which a person names.

        Raises:
            ConfigError: this kind cannot, or there is no such transaction.
        """
        raise ConfigError(
            f"source {self.name!r} cannot pass over a single transaction",
            hint=f"Set the position behind it: firnline position set {self.name} PLACE",
        )

    def keeps_from(self, place: Json) -> bool:
        """Return whether the server surely has its log from a place on."""
        return False

    @abstractmethod
    def read_key(self, table: str) -> tuple[str, ...] | None:
        """Return the columns that identify a row of a table in the log, as the server's catalogue has them now; none if
        it has no key, None if there is no such table.

        Raises:
            SourceError: the server does not answer.
        """

    @abstractmethod
    def find_names(self) -> Collection[str]:
        """Return the full names of all tables that the server shows, captured or not.

        Raises:
            SourceError: the server does not answer.
        """

    # -- positions ------------------------------------------------------------------------------------

    @property
    def location(self) -> str:
        return self._location

    @property
    def storage(self) -> Storage:
        """The storage of the spool."""
        return open_storage(self._home.root, self._home.storage_options)

    def has_port(self, port: str) -> bool:
        return port == MAIN_PORT or names_tables(port) or self._tables.may_cover(port)

    def known_ports(self) -> list[str]:
        patterns = [one for one in self._tables.patterns if not one.startswith("!")]
        return [MAIN_PORT, *(port_of(one, self._default_schema) for one in patterns)]

    def find_key(self, port: str) -> tuple[str, ...]:
        known = self._keys.get(port)
        if known is not None:
            return known
        table = port if "." in port else f"{self._default_schema}.{port}"
        found = self.read_key(table)
        if found is None:
            raise ConfigError(
                f"table {table} does not exist yet, so nobody knows what identifies its rows",
                hint=f"{name_like(table, self.find_names())}Create it first, or set `key` of the sinks that upsert it.",
            )
        if not found:
            raise ConfigError(
                f"table {table} has no key, so its changes can be appended and not upserted",
                hint=f"{self.key_hint} Or write `write: append`; or set `key` of the sink to columns that do identify "
                "a row, if the log has them of every deleted row.",
            )
        return self._keys.setdefault(port, found)

    def watch_keys(self, ports: Collection[str]) -> None:
        self._upserted = [tables_of_port(port, self._default_schema) for port in ports]

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

    def set_position(self, position: Json, words: str) -> PositionChange:
        known = LogPosition.from_json(position, self.kind)
        self._check_may_move(known)
        place = self._place_in(words) if words.startswith("{") else self.find_place(known.place, words)
        return self._change(known, place, to_end=words == "end")

    def skip(self, position: Json, words: str) -> PositionChange:
        known = LogPosition.from_json(position, self.kind)
        self._check_may_move(known)
        return self._change(known, self.place_without(known.place, words), to_end=False)

    def _check_may_move(self, known: LogPosition) -> None:
        if known.place is None:
            raise ConfigError(f"source {self.name!r} has not begun to read", hint="Run the pipeline once: firnline run")
        if known.running:
            raise ConfigError(
                f"the rows of {', '.join(known.running)} are being read: they belong to the position",
                hint="Let the run finish them first; `firnline snapshot` lists how far they are.",
            )

    def _place_in(self, words: str) -> Json:
        """Return the place of a position in JSON."""
        try:
            return LogPosition.from_json(json.loads(words), self.kind).place
        except (ValueError, DamagedError) as error:
            raise ConfigError(
                f"this is no position of source {self.name!r}: {error}",
                hint="`firnline position show --json` shows what one looks like.",
            ) from None

    def _change(self, known: LogPosition, place: Json, *, to_end: bool) -> PositionChange:
        """Describe the change to another place of the server's log."""
        old, new = self.place_text(known.place), self.place_text(place)
        moved = self.distance(known.place, place)
        if known.place == place or moved == 0:
            return PositionChange(known.to_json())
        text = f"the log from {new} to {old}" if moved < 0 else f"the log from {old} to {'its end' if to_end else new}"
        return PositionChange(
            replace(known, place=place).to_json(),
            again=(text,) if moved < 0 else (),
            never=(text,) if moved > 0 else (),
            again_count=max(0, -moved),
            never_count=max(0, moved),
            unit="byte" if abs(moved) > 1 else "range",
        )

    # -- the run that owns the pipeline ---------------------------------------------------------------

    def claimed(self, check_holder: Callable[[], None]) -> None:
        self._check_holder = check_holder
        self._stop_threads(is_closed=False)

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
        self._stop_threads(is_closed=True)

    def _stop_threads(self, *, is_closed: bool) -> None:
        with self._changing:
            self._is_closed = is_closed
            spooler, self._spooler = self._spooler, None
            taker, self._taker = self._taker, None
        if taker is not None:
            taker.stop()
        if spooler is not None:
            spooler.stop()

    def _make_spooler(self, position: LogPosition) -> Spooler:
        """Return what follows the spool behind a position, and reads on behind it once it is started."""
        assert self._check_holder is not None
        spooler = Spooler(
            self.open_stream(),
            self.storage,
            self._folder,
            files=self._find_spooled(position),
            number=position.spool if position.place is not None else self._last_number(),
            begin=position.mark,
            check_holder=self._check_holder,
            settings=self._settings,
            name=self.name,
            tables=self._tables.patterns,
            consent=self._consent,
        )
        spooler.release(self._released)
        return spooler

    def _last_number(self) -> int:
        """Return the number behind which a source begins. After a fresh start there are files from before: a run that
        slept may still delete those that no rollback needed, by their numbers."""
        names = list_names(self.storage, self._folder)
        return max((parts[0] for parts in map(spool_parts, names) if parts is not None), default=0)

    def _last_serial(self) -> int:
        """Return the same for snapshots."""
        names = list_all(self.storage, self._folder)
        return max((int(parts[0][:8]) for parts in map(chunk_parts, names) if parts is not None), default=0)

    def _find_spooled(self, position: LogPosition) -> list[SpoolFile]:
        """Return the files behind a position that a run before has spooled, up to the last whole transaction."""
        if position.place is None:
            return []
        storage = self.storage
        names = list_names(storage, self._folder)
        known: dict[str, SpoolFile] = {}
        while True:
            found, lacking = list[SpoolFile](), ""
            for name in follow(names, position.spool, position.mark):
                try:
                    known[name] = known.get(name) or read_facts(storage, self._folder, name)
                except FirnlineError as error:
                    logger.warning("spool file passed over", extra={"file": name, "reason": str(error)})
                    break
                if self._lacks_tables(known[name], position):
                    lacking = name
                    break
                found.append(known[name])
            if not lacking:
                break
            logger.info("spool file passed over: its run captured other tables", extra={"file": lacking})
            names.remove(lacking)
        while found and not found[-1].end.is_cut:
            found.pop()
        return found

    def _lacks_tables(self, file: SpoolFile, position: LogPosition) -> bool:
        """Return whether a file lacks changes: the spec of the run that wrote it left out a table of the position."""
        captured = TablePatterns(file.tables, self._default_schema, self.never_captured)
        needed = [table for table in position.tables if self._tables.covers(table)]
        return bool(file.tables) and not all(captured.covers(table) for table in needed)

    # -- planning -------------------------------------------------------------------------------------

    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        try:
            return self._plan(position, limits)
        except SourceGapError as error:
            raise self._with_accepted_way(error, position) from error

    def _plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        known = LogPosition.from_json(position, self.kind)
        if self._check_holder is None:
            return None  # a command that only looks
        new = self._make_spooler(known) if self._spooler is None else None
        with self._changing:
            spooler = self._spooler or new
            if self._is_closed or spooler is None:
                return None
            if spooler is new:
                self._spooler, self._end = spooler, None
                spooler.start()
            spooler.revive()
            taker = self._follow_tables(spooler, known)
        if self._once and (spooler is new or self._until is None):
            try:
                self._until = self._log_end()
            except SourceError as error:
                raise at_first(error) from error
        chosen = self._choose(spooler, taker, known, limits)
        failure: FirnlineError | None = None
        while not chosen and self._once:
            try:
                if self._has_all(spooler, taker, known):
                    break
            except FirnlineError as error:  # of one table: what there is of others comes first
                failure = error
                break
            if (lost := spooler.lost) is not None:
                raise lost
            if self._spooler is not spooler:  # the run has ended
                return None
            chosen = self._choose(spooler, taker, known, limits)
        if not chosen:  # the last ones may have come between the two questions
            chosen = self._choose(spooler, taker, known, limits, wait_seconds=0.0)
        if not chosen and failure is not None:
            raise failure
        self._is_reading = (
            bool(chosen) or taker is None or not taker.is_settled(known) or self._is_behind(spooler, known)
        )
        if chosen:
            self._end = None
        return self._make_plan(position, chosen, limits.parallelism) if chosen else None

    def _is_behind(self, spooler: Spooler, known: LogPosition) -> bool:
        """Return whether there is more of the log than a position has, by what the server said last of its end."""
        if self._once:
            return False  # it ends where the log ended at first
        if spooler.files_after(known.spool, 0.0):
            return True
        now = monotonic()
        if self._end is None and now >= self._may_ask_end:
            self._may_ask_end = now + END_SECONDS
            with contextlib.suppress(SourceError, ConfigError):  # of a server that does not answer, the run warns
                self._end = spooler.wait_for(self._log_end())
        return self._end is None or self._end.file is None or self._end.file > known.spool

    def _follow_tables(self, spooler: Spooler, known: LogPosition) -> SnapshotTaker | None:
        """Read the rows of tables on behind a position; None before the first epoch, which says where the log is."""
        if known.place is None:
            return None
        if self._taker is None:
            assert self._check_holder is not None
            self._taker = SnapshotTaker(
                self.open_tables(),
                spooler,
                self.storage,
                self._folder,
                mode=self._options.snapshot,
                check_holder=self._check_holder,
                name=self.name,
                named=[one for one in self._tables.names if self._tables.covers(one)],
                serial=self._last_serial(),
            )
            for asked in self._asked.values():
                self._taker.ask(asked)
            self._taker.start()
        self._taker.follow(known)
        return self._taker

    def _choose(
        self,
        spooler: Spooler,
        taker: SnapshotTaker | None,
        known: LogPosition,
        limits: Limits,
        wait_seconds: float = FIRST_WAIT_SECONDS,
    ) -> list[Input]:
        """Choose the inputs of a slice: snapshots that begin and chunks first, then spool files."""
        if taker is not None and taker.ready(known, known.spool):
            wait_seconds = 0.0
        files = _take(spooler.files_after(known.spool, wait_seconds), limits)
        if taker is None:
            return list(files[:1])  # nobody knows the tables yet
        if taker.holds_log(known):  # asked after the files were taken: what is in them is older than the hold
            files = []
        left_out = {**known.left_out, **taker.left_out(known)}
        files = [replace(file, left_out=left_out) for file in files]
        end = files[-1].number if files else known.spool
        begins = taker.begins(known)
        if any(file.gap for file in files):  # a table is emptied behind the changes before the gap
            begins = [one for one in begins if not one.empties]
        gone = taker.find_gone(known)
        left = [TableLeft(table) for table in known.tables if table in gone or not self._tables.covers(table)]
        anew = {one.table for one in begins} | {one.table for one in left}
        chunks = [one for one in taker.ready(known, end) if one.table not in anew]
        passed = [one for one in taker.passed(known) if one.table not in anew]
        if any(file.gap for file in files):  # chunks that were read before it miss changes
            chunks = []
        chunks = _take_chunks(chunks, limits)
        trims = taker.trims(known, chunks) if files or chunks else []
        logged = [one for one in taker.find_logged(known) if one.table not in anew]
        if not (left or begins or passed or chunks or files):  # what is new of a table makes no epoch alone
            logged = [one for one in logged if one.reason]
        return [*left, *begins, *passed, *trims, *logged, *taker.wholes(begins), *chunks, *files]

    def _has_all(self, spooler: Spooler, taker: SnapshotTaker | None, known: LogPosition) -> bool:
        """Return whether a run with `once` has read everything."""
        return spooler.has_all_until(self._until) and (taker is None or taker.is_done(known))

    def _log_end(self) -> Json:
        if self._end_stream is None:
            self._end_stream = self.open_stream()
        return self._end_stream.end_position()

    def _make_plan(self, position: Json, inputs: Sequence[Input], parallelism: int) -> SourcePlan:
        begins = [one for one in inputs if isinstance(one, Fact)]
        chunks = [one for one in inputs if isinstance(one, ChunkFile)]
        files = [one for one in inputs if isinstance(one, SpoolFile)]
        groups: list[list[Input]] = [list(begins)] if begins else []
        groups += _share(chunks, parallelism) + _share(files, parallelism)
        splits = [Split([one.to_json() for one in group], NO_LIMIT, NO_LIMIT, NO_LIMIT) for group in groups]
        size = sum(one.size_bytes for one in chunks) + sum(one.size_bytes for one in files)
        return SourcePlan(self.name, position, splits, len(inputs), size)

    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        by_name = {str(item["path"]): item for item in outcomes}
        known = LogPosition.from_json(plan.base, self.kind)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        records: list[dict[str, Json]] = []
        for item in (item for split in plan.splits for item in split.inputs):
            outcome = by_name[str(item["path"])]
            self._warn(outcome.get(WARNINGS, ()))
            told = {name: outcome[name] for name in ("again", "seen", "moved") if name in outcome}
            if silent := [
                one for one in _of_tables(outcome.get(SILENT, []), known) if self._tables.covers(one["table"])
            ]:
                told[SILENT] = silent
            if "logged" in item and (lapse := TableLogged.from_json(item)).reason:
                place = self.place_text(known.place)
                told[SILENT] = [SilentChange(lapse.table, lapse.reason, place, "empty").to_json()]
            if not item.get("transactions", 1) and not item["rows"]:
                told[IDLE] = True
            record = {**item, "from": 0, "to": outcome["rows"], "status": "committed", "processed_time": now, **told}
            records.append({**record, VERSIONS: outcome[VERSIONS], **self._read_keys(outcome)})
        self._follow_keys(known, records)
        _find_overwritten(records)
        for record in records:
            if record.get("again"):
                facts = {"source": self.name, "chunk": record["path"], "reason": record["again"]}
                logger.info("chunk is read again", extra=facts)
        schemas = dict(known.schemas)
        for record in _in_log_order(records):
            record[VERSIONS] = [one for one in record[VERSIONS] if self._tables.covers(one["table"])]
            record[VERSIONS] = [one.to_json() for one in new_versions(schemas, _versions(record))]
        if not self._options.logs_statements:
            _compare_shapes(known, records)
        begun = {one["begins"]["table"] for one in records if "begins" in one and sees_epoch(one["begins"])}
        for record in records:
            if SILENT in record:
                changes = [SilentChange.from_json(one) for one in record[SILENT]]
                record[SILENT] = [self._answer(change, begun, known).to_json() for change in changes]
        return self._after(known, records).to_json(), records

    def _read_keys(self, outcome: Mapping[str, Json]) -> dict[str, Json]:
        """Return the keys that rows of tables name which sinks of many tables upsert."""
        keys = {
            table: found
            for table, found in outcome.get(KEYS, {}).items()
            if self._tables.covers(table) and any(tables.covers(table) for tables in self._upserted)
        }
        return {KEYS: keys} if keys else {}

    def _follow_keys(self, known: LogPosition, records: Sequence[dict[str, Json]]) -> None:
        """Find the tables whose rows have another key than the one by which sinks of many tables upsert them. Such rows
        go into no sink, and the table is read again: what sinks have of it goes, and they upsert it by its new key.

        The records get what the position takes from them: the first key after sinks lost a table, and the change.
        """
        for record in records:
            known = _after_begin(known, record)
            found = record.pop(KEYS, {})
            for table, keys in found.items():
                for key in map(tuple, keys):
                    if known.keys.get(table) is None:
                        known = known.with_key(table, key)
                        record.setdefault(KEYS, {})[table] = list(key)
                    elif known.loses_key(table, key):
                        change = self._describe_key(known, record, table, key)
                        if not self._reads_anew(known, table):
                            record.setdefault(SILENT, []).append(change.to_json())
                            known = replace(known, due={**known.due, table: True})

    def _reads_anew(self, known: LogPosition, table: str) -> bool:
        return known.due.get(table, False) or (table in known.left and self._options.snapshot != "never")

    def _describe_key(
        self, known: LogPosition, record: Mapping[str, Json], table: str, key: tuple[str, ...]
    ) -> SilentChange:
        """Return the change of a table's key.

        Raises:
            SchemaError: the table cannot be read again.
        """
        now = f"is {', '.join(key)} now" if key else "is gone"
        reason = f"its key was {', '.join(known.keys.get(table) or ()) or 'none'} and {now}"
        versions = [one for one in _versions(record) if one.table == table and set(one.key) == set(key)]
        position = versions[0].position if versions else self.place_text(known.place)
        change = SilentChange(table, reason, position, "key")
        obstacle = ""
        is_due = bool(key) and known.due.get(table, False)  # then a table with a key is read again in every mode
        if self._options.snapshot == "never" and not is_due and not self._is_asked(known, table):
            obstacle = "`snapshot: never` forbids to read the table again"
        elif not key and table in self.find_unkeyed():
            obstacle = "a system-versioned table cannot be read again"
        if obstacle:
            first = f"{self.key_hint} Then read it again once" if not key else "Read it again once"
            if table in self.find_unkeyed():
                first = "Take the versions away (ALTER TABLE ... DROP SYSTEM VERSIONING), then read it again once"
            raise SchemaError(
                f"table {table}: {reason}; sinks would no longer find its rows, and {obstacle}",
                hint=f"{first}, and nothing is lost: {snapshot_command(self.name, table, empties=True)}",
                table=table,
            )
        return change

    def _is_asked(self, known: LogPosition, table: str) -> bool:
        """Return whether a person asked for a snapshot of all rows of a table, and it is not done."""
        asked = [one for one in self._asked.values() if one.table == table and not one.where]
        begun = known.running.get(table)
        return bool(asked) or (begun is not None and bool(begun.request) and not begun.where)

    def _warn(self, warnings: Iterable[str]) -> None:
        """Log what workers found in the log and in chunks, each once in a run."""
        for text in warnings:
            if text not in self._warned:
                self._warned.add(text)
                logger.warning(text, extra={"source": self.name})

    def _answer(self, change: SilentChange, begun: Collection[str], known: LogPosition) -> SilentChange:
        """Log a change of rows that the log does not have, and ask for a snapshot of the table if that is wanted.

        A snapshot that `begun` in the same epoch sees the change. But it empties tables before the log of this epoch,
        whose rows may be gone by the change.
        """
        if change.again == "key":
            facts = {"source": self.name, "table": change.table, "position": change.position}
            text = "table has another key, %s: sinks that upsert all tables lose its rows, then it is read again"
            logger.warning(text, change.reason, extra=facts)
            return replace(change, asked=True)
        if change.again == "replace":
            is_wanted = self._options.snapshot != "never" and (change.table in known.snapshots or change.table in begun)
        else:
            is_wanted = self._options.on_ddl == "resnapshot" and bool(change.again)
        is_seen = change.table in begun and not change.empties
        state = self._taker.table_state(change.table) if self._taker is not None else "keyed"
        is_asked = is_wanted and not is_seen and (change.again == "replace" or state != "unkeyed")
        way = "the table is read again" if is_asked or is_seen else change.way_out(self.name, state).text
        facts = {"source": self.name, "table": change.table, "position": change.position}
        text = "rows may have changed that are not in the log: %s" + ("; %s" if way else "%s")
        logger.warning(text, change.reason, way, extra=facts)
        return replace(change, asked=is_asked)

    def replay(self, position: Json, records: Sequence[dict[str, Json]]) -> Json:
        known = LogPosition.from_json(position, self.kind)
        if not records:
            return position
        return self._after(known, records).to_json()

    def _after(self, known: LogPosition, records: Sequence[dict[str, Json]]) -> LogPosition:
        """Return the position after an epoch with these input records."""
        schemas, shapes = dict(known.schemas), dict(known.shapes)
        for record in _in_log_order(records):
            schemas |= {version.table: version.fingerprint for version in _versions(record)}
            if not self._options.logs_statements and not record.get("again"):
                shapes |= {version.table: version.shape for version in _versions(record)}
        after = _after(known, records, schemas)
        return replace(after, shapes={table: shape for table, shape in shapes.items() if table in after.schemas})

    def replan(self, position: Json, records: Sequence[dict[str, Json]], parallelism: int) -> SourcePlan:
        return self._make_plan(position, [_open_input(record) for record in records], parallelism)

    def backlog(self, position: Json) -> Backlog:
        spooler, known = self._spooler, LogPosition.from_json(position, self.kind)
        if spooler is None:
            waiting = self.measure(known.place).lag_bytes or 0
            return Backlog(int(waiting > 0), waiting)
        files = spooler.files_after(known.spool, 0.0)
        return Backlog(len(files), sum(file.size_bytes for file in files))

    def log_lag(self, position: Json) -> LogLag:
        place = LogPosition.from_json(position, self.kind).place
        try:
            return self.measure(place)
        except (SourceError, ConfigError) as error:
            place_text = self.place_text(place) if place is not None else ""
            return LogLag("", place_text, unknown=error.message, is_away=AWAY in error.fields)

    def unreachable(self) -> str | None:
        lost = self._spooler.lost if self._spooler is not None else None
        if lost is not None:
            return lost.message
        return self._taker.trouble if self._taker is not None else None

    def is_reading(self) -> bool:
        return self._is_reading

    # -- what people ask for --------------------------------------------------------------------------

    def find_gap(self, position: Json) -> SourceGapError | None:
        known = LogPosition.from_json(position, self.kind)
        if known.place is None:
            return None
        spooled = self._find_spooled(known)
        with contextlib.closing(self.open_stream()) as stream:
            try:
                stream.open(spooled[-1].end.place if spooled else known.place)
            except SourceGapError as error:
                return self._with_accepted_way(error, position)
        return None

    def _with_accepted_way(self, gap: SourceGapError, position: Json) -> SourceGapError:
        """Return a gap with a first command that is accepted: a table without a key cannot be read again, so that the
        person has to say that its changes may be lost."""
        way = RESNAPSHOT_ALL
        if way not in gap.hint:
            return gap
        try:
            lost = [one.name for one in self.find_losing(position) if not one.key]
        except FirnlineError:  # nobody knows the tables now; the command itself says what it lacks
            return gap
        if not lost:
            return gap
        verb, few = ("has", lost[0]) if len(lost) == 1 else ("have", f"{lost[0]} and {len(lost) - 1} more")
        hint = gap.hint.replace(way, f"{way.removesuffix('`')} --accept-gap`")
        hint += f" {few} {verb} no key and cannot be read again: what changed there in between is lost either way."
        return SourceGapError(gap.message, hint=hint, **gap.fields)

    def find_losing(self, position: Json, port: str = MAIN_PORT) -> list[CapturedTable]:
        known = LogPosition.from_json(position, self.kind).tables
        covers = tables_of_port(port if port != MAIN_PORT else "*", self._default_schema).covers
        captured = [one for one in self.find_captured(position) if covers(one.name)]
        return [one for one in captured if one.name in known or not one.would_read]

    def accept_gap(self, reads: Collection[str] = ()) -> None:
        self._consent = GapConsent(tuple(sorted(reads)))

    def table_name(self, words: str) -> str | None:
        name = words if "." in words else f"{self._default_schema}.{words}"
        return name if self._tables.covers(name) else None

    def check_snapshot(self, table: str) -> None:
        with contextlib.closing(self.open_tables()) as reader:
            found = {one.name: one for one in reader.find_tables()}
        if table not in found:
            raise ConfigError(
                f"source {self.name!r}: the server has no table {table} that is captured",
                hint="Check its name, and what `firnline dry-run` says of the table.",
            )
        if not found[table].key:
            raise ConfigError(
                f"table {table} has no key, so that it cannot be read again: its rows would come twice",
                hint=self.key_hint,
            )

    def snapshots(self, position: Json) -> Mapping[str, SnapshotProgress]:
        known = LogPosition.from_json(position, self.kind)
        due = {table: SnapshotProgress(0, 0, 0, False, is_due=True) for table in known.due}
        begun = {table: replace(one.progress, is_due=table in due) for table, one in known.snapshots.items()}
        return {**due, **begun}

    def find_captured(self, position: Json) -> list[CapturedTable]:
        known, mode = LogPosition.from_json(position, self.kind), self._options.snapshot
        given_on = known.schemas.keys() - known.left.keys()  # without a key, earlier rows cannot follow
        found = []
        with contextlib.closing(self.open_tables()) as reader:
            for table in reader.find_tables():
                begun = known.snapshots.get(table.name)
                is_new = begun is None and mode != "never" and table.can_be_read
                is_new = is_new and (bool(table.key) or table.name not in given_on)
                again = bool(table.key) and (mode == "always" or table.name in known.due)
                would_read = is_new or again or table.name in known.running
                port = port_of(table.name, self._default_schema)
                found.append(CapturedTable(table.name, table.key, would_read, table.rows, port))
            reader.check_may_read([one.name for one in found if one.would_read])
        return found

    def table_states(self) -> dict[str, Literal["keyed", "unkeyed"]]:
        with contextlib.closing(self.open_tables()) as reader:
            return {one.name: "keyed" if one.key else "unkeyed" for one in reader.find_tables()}

    def find_unread(self, position: Json) -> dict[str, FirnlineError | None]:
        known = LogPosition.from_json(position, self.kind)
        mode = self._options.snapshot
        given_on = known.schemas.keys() - known.snapshots.keys() - known.left.keys()
        with contextlib.closing(self.open_tables()) as reader:
            tables = {one.name: one for one in reader.find_tables()}
            never = {one.name for one in tables.values() if not one.can_be_read}
            never |= {one.name for one in tables.values() if not one.key and one.name in given_on}
            readable = {one for one in tables if is_to_be_read(known, one, mode)} | known.running.keys()
            hidden = {one for one in (*self._tables.names, *known.tables) if is_to_be_read(known, one, mode)}
            hidden = {one for one in hidden if self._tables.covers(one) and one not in tables}
            why = reader.find_unreadable(sorted(readable.union(hidden) - never))
        return {one: why.get(one) for one in sorted(readable.union(why) - never)}

    def snapshot(self, request: str, table: str, *, where: str, empties: bool) -> None:
        asked = self._asked.setdefault(request, Asked(request, table, where, empties))
        if self._taker is not None:
            self._taker.ask(asked)

    def answered(self, position: Json) -> frozenset[str]:
        known = LogPosition.from_json(position, self.kind)
        return frozenset(one.request for one in known.snapshots.values() if one.request)

    def has_answered(self, plan: SourcePlan, request: str) -> bool:
        begun = [item["begins"]["request"] for split in plan.splits for item in split.inputs if "begins" in item]
        return request in begun

    def refused(self) -> frozenset[str]:
        return self._taker.refused if self._taker is not None else frozenset()

    def forget_requests(self, names: Iterable[str]) -> None:
        gone = list(names)
        for name in gone:
            self._asked.pop(name, None)
        if self._taker is not None:
            self._taker.forget(gone)

    # -- after the commit -----------------------------------------------------------------------------

    def decided(self, position: Json) -> None:
        spooler = self._spooler
        known = LogPosition.from_json(position, self.kind)
        if spooler is not None and known.place is not None:
            if self._options.spool.keep == "durable":
                self._release(known.place)
            spooler.forget(known.spool)
        if self._taker is not None:
            self._taker.forget_decided(known)

    def _release(self, place: Json) -> None:
        """Let the server forget its log up to a place, now or when the stream is opened."""
        self._released = place
        if self._spooler is not None:
            self._spooler.release(place)

    def acknowledge(self, position: Json) -> None:
        """Delete spool files and chunks that no rollback needs any more."""
        known = LogPosition.from_json(position, self.kind)
        if self._options.spool.keep == "cache" and known.place is not None:
            self._release(known.place)
        storage = self.storage
        names = list_all(storage, self._folder)
        delete_files(storage, self._folder, [name for name in names if _is_past(name, known)])

    def reader_settings(self) -> dict[str, Json]:
        return LogReaderSettings(
            root=self._home.root,
            storage_options=dict(self._home.storage_options),
            folder=self._folder,
            default_schema=self._default_schema,
            include=self._options.include,
            unkeyed=self.find_unkeyed(),
        ).to_json()

    def find_unkeyed(self) -> tuple[str, ...]:
        """Return the captured tables whose log has rows of the past, so that they can be appended alone."""
        return ()

    def find_unavailable(
        self, position: Json, records: Sequence[Mapping[str, Json]], back_to: Json | None = None
    ) -> list[str]:
        names = set(list_all(self.storage, self._folder))
        needed = dict.fromkeys(name for record in records for name in _files_of(record))
        gone = [f"{name}: the spool file is gone" for name in needed if name not in names]
        if gone and back_to is not None and self._options.spool.keep == "cache":
            place = LogPosition.from_json(back_to, self.kind).place
            if place is not None and self.keeps_from(place):
                return []
        return gone


def _open_input(value: Mapping[str, Json]) -> Input:
    """Return the input that a record of the ledger names."""
    if "begins" in value:
        return SnapshotBegin.from_json(value)
    if "passed" in value:
        return SnapshotPassed.from_json(value)
    if "trims" in value:
        return WindowSeen.from_json(value)
    if "left" in value:
        return TableLeft.from_json(value)
    if "logged" in value:
        return TableLogged.from_json(value)
    return ChunkFile.from_json(value) if "chunk" in value else SpoolFile.from_json(value)


def _files_of(record: Mapping[str, Json]) -> list[str]:
    """Return the files that reading an input again needs."""
    one = _open_input(record)
    if isinstance(one, WindowSeen):
        return list(one.window)
    if isinstance(one, Fact):
        return []
    return [one.name, *one.window] if isinstance(one, ChunkFile) else [one.name]


def _in_log_order(records: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return records in the order in which their schemas came into force: a chunk has that of the end of its epoch."""
    return sorted(records, key=lambda record: "chunk" in record)


def _of_tables(changes: Sequence[Mapping[str, Json]], known: LogPosition) -> Iterator[Mapping[str, Json]]:
    """Return changes table by table; some are of a whole database, `database.*`."""
    for change in changes:
        database, _, name = str(change["table"]).partition(".")
        if name != "*":
            yield change
        else:
            yield from ({**change, "table": one} for one in known.tables if one.partition(".")[0] == database)


def _find_overwritten(records: Sequence[dict[str, Json]]) -> None:
    """Have chunks read again whose table has another schema in the log of their epoch: rows of the log, which come
    behind those of the chunk, do not have its columns."""
    in_log: dict[str, list[SchemaVersion]] = {}
    for record in records:
        if "chunk" not in record:
            for version in map(SchemaVersion.from_json, record[VERSIONS]):
                in_log.setdefault(version.table, []).append(version)
    for record in records:
        if "chunk" in record and record["chunk"]["key"] and not record["again"]:
            for own in map(SchemaVersion.from_json, record[VERSIONS]):
                if any(one.fingerprint != own.fingerprint for one in in_log.get(own.table, ())):
                    record["again"] = "the table was changed meanwhile"


def _versions(record: Mapping[str, Json]) -> list[SchemaVersion]:
    return [SchemaVersion.from_json(one) for one in record[VERSIONS]]


def _compare_shapes(known: LogPosition, records: Sequence[dict[str, Json]]) -> None:
    """Add to the records of an epoch what a new schema may mean for rows from before.

    A snapshot of all rows whose first chunk has the schema means nothing more: it has all of them. A chunk that is
    read again means nothing.
    """
    shapes = dict(known.shapes)
    begun = {one.id for one in known.snapshots.values() if one.after is not None or one.where}
    begun |= {one["begins"]["snapshot"] for one in records if "begins" in one and one["begins"]["where"]}
    for record in _in_log_order(records):
        if record.get("again"):
            continue
        snapshot = record["chunk"]["snapshot"] if "chunk" in record else None
        found = list(record.get(SILENT, []))
        for version in _versions(record):
            if version.table in known.schemas or version.table in shapes:
                change = compare_shapes(shapes.get(version.table, ""), version)
                if change is not None and (snapshot is None or snapshot in begun):
                    found.append(change.to_json())
            shapes[version.table] = version.shape
        if found:
            record[SILENT] = found
        if snapshot is not None:
            begun.add(snapshot)


def _check_scheme(options: LogSourceOptions) -> None:
    """Refuse the address of another kind of server.

    Raises:
        ConfigError: it names the source, and the type to write.
    """
    scheme = options.dsn.partition("://")[0] if "://" in options.dsn else ""
    kind = next((kind for kind, schemes in _SCHEMES.items() if scheme in schemes), "")
    if not scheme or kind == options.type:
        return
    wanted = _SCHEMES.get(options.type, (options.type,))[0]
    other = f"Write `type: {kind}` in source {options.name}, or a dsn" if kind else "Write a dsn"
    raise ConfigError(
        f"source {options.name!r} has type {options.type}, and its dsn begins with {scheme}://",
        hint=f"{other} that begins with {wanted}:// .",
    )


def _after(known: LogPosition, records: Sequence[Mapping[str, Json]], schemas: Mapping[str, str]) -> LogPosition:
    """Return the position after an epoch with these input records."""
    snapshots = dict(known.snapshots)
    place, spool, seen = known.place, known.spool, 0
    left, schemas, logged = dict(known.left), dict(schemas), dict(known.logged)
    files: list[str] = []
    due = dict(known.due)
    for record in records:
        one = _open_input(record)
        for change in (SilentChange.from_json(value) for value in record.get(SILENT, ())):
            if change.asked:
                due[change.table] = due.get(change.table, False) or change.empties
        if isinstance(one, SnapshotBegin):
            if not one.where:
                due.pop(one.table, None)
            snapshots[one.table] = TableSnapshot(
                one.snapshot,
                estimate=one.estimate,
                where=one.where,
                request=one.request,
                sees=one.sees,
                high=one.high,
                identity=one.identity,
            )
            if not one.where:
                left.pop(one.table, None)
            if one.logged and not one.where:
                logged[one.table] = one.logged
        elif isinstance(one, SnapshotPassed):
            snapshots[one.table] = replace(snapshots[one.table], sees=None, high=None)
        elif isinstance(one, WindowSeen):
            seen = max(seen, int(record["seen"]))
        elif isinstance(one, TableLeft):
            left[one.table] = known.serial
            for facts in (snapshots, schemas, due, logged):
                facts.pop(one.table, None)
        elif isinstance(one, TableLogged):
            logged[one.table] = one.logged
        elif isinstance(one, ChunkFile):
            snapshots[one.table] = _after_chunk(snapshots[one.table], one, str(record["again"]))
            seen = max(seen, int(record["seen"]))
        else:
            place, spool = one.end.place, one.number
            files.append(one.name)
            if one.gap:  # of a table that was read whole, what came between its snapshot and the gap's end is lost
                for table in [table for table, state in snapshots.items() if state.sees is not None]:
                    left[table] = known.serial
                    for facts in (snapshots, schemas, due, logged):
                        facts.pop(table, None)
            due |= dict.fromkeys(one.reads, True)
            for table in known.running if one.gap else record.get("moved", ()):
                if table in known.running and table in snapshots:
                    begun = snapshots[table]
                    snapshots[table] = replace(begun, after=None, order=None, rows=0, again=begun.again + 1, done=False)
    after = replace(known, place=place, spool=spool, schemas=schemas, snapshots=snapshots, left=left, due=due)
    keyed = _keys_after(known, records)
    after = replace(after, logged=logged, keys=keyed.keys, unkeyed=keyed.unkeyed)
    if not after.running:
        return replace(after, window=())
    # The first chunk of a snapshot sees all of the epoch in which the snapshot began.
    return replace(after, window=(*known.window[seen:], *files) if known.running else ())


def _after_begin(known: LogPosition, record: Mapping[str, Json]) -> LogPosition:
    """Return what a position says of the keys of tables once a record begins a snapshot."""
    begins = record.get("begins")
    if not begins or begins["where"]:
        return known
    table = str(begins["table"])
    known = replace(
        known,
        due={name: empties for name, empties in known.due.items() if name != table},
        left={name: serial for name, serial in known.left.items() if name != table},
    )
    return known.emptied(table) if begins["empties"] else known


def _keys_after(known: LogPosition, records: Sequence[Mapping[str, Json]]) -> LogPosition:
    """Return a position with the keys of tables after an epoch with these input records."""
    for record in records:
        known = _after_begin(known, record)
        for table, key in record.get(KEYS, {}).items():
            known = known.with_key(table, tuple(key))
    return known


def _after_chunk(state: TableSnapshot, chunk: ChunkFile, again: str) -> TableSnapshot:
    if chunk.again != state.again:  # one before it must be read again, and so must those behind
        return state
    if again:
        return replace(state, again=state.again + 1)
    rows = state.rows + chunk.rows
    return replace(state, after=chunk.last, order=chunk.order, chunks=chunk.number, rows=rows, done=chunk.is_last)


def _is_past(name: str, floor: LogPosition) -> bool:
    """Return whether no epoch behind `floor` needs a file."""
    log = spool_parts(name)
    if log is not None:
        return log[0] <= floor.spool and name not in floor.window
    chunk = chunk_parts(name)
    if chunk is None:
        return False
    snapshot, number, _ = chunk
    if int(snapshot[:8]) > floor.serial:
        return False
    running = {one.id: one.chunks for one in floor.running.values()}
    return number <= running.get(snapshot, number)


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


def _take_chunks(chunks: Sequence[ChunkFile], limits: Limits) -> list[ChunkFile]:
    """Choose the chunks of a slice: the first, and more while the limits allow it."""
    chosen: list[ChunkFile] = []
    rows, size = 0, 0
    for chunk in chunks:
        rows, size = rows + chunk.rows, size + chunk.size_bytes
        if chosen and (rows > limits.max_events or size > limits.max_bytes):
            break
        chosen.append(chunk)
    return chosen


def _share(files: Sequence[SpoolFile] | Sequence[ChunkFile], tasks: int) -> list[list[Input]]:
    """Share files among tasks: contiguous, by size."""
    total = sum(file.size_bytes for file in files)
    tasks = max(1, min(tasks, len(files)))
    groups: list[list[Input]] = []
    size = 0
    for file in files:
        if not groups or size + file.size_bytes / 2 > total * len(groups) / tasks:
            groups.append([])
        groups[-1].append(file)
        size += file.size_bytes
    return groups
