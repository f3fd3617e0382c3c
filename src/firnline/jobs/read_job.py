"""The read job of an epoch: every split of every source, in one Spark job, until all tasks agree on types.

Driver and workers exchange the values in this module: `read_task` performs a `ReadTask` and returns a `ReadReport`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import pyarrow as pa

from firnline.errors import BadRecordsError, EngineError, FirnlineError, SchemaError
from firnline.exchange import Exchanged
from firnline.jobs.engine import Engine, Output
from firnline.jobs.heartbeat import Watch, run_watched
from firnline.options import LINEAGE, SourceOptions, StrictColumn
from firnline.rescued import Rescued, add_rescued
from firnline.schema import RESCUED_COLUMN, merge, schema_from_json, schema_to_json, type_to_text, widen
from firnline.sinks.base import Sink
from firnline.sources.base import ReadColumns, SourcePlan, Split, SplitEnd, port_name
from firnline.sources.columns import (
    IS_DECLARED,
    LINEAGE_TYPES,
    Columns,
    agree,
    declared,
    find_kept,
    find_wider,
    new_kinds,
)
from firnline.sources.group import EpochPlan
from firnline.types import Json

logger = logging.getLogger(__name__)

FIRST_BAD = 3  # bad records that a message names
JUDGED_RECORDS = 100  # with fewer records, a ratio of bad ones says little
SCHEMA_ROUNDS = 8  # types only widen, so this is never reached; it stops an endless loop after a bug


# -- the columns of a port ----------------------------------------------------------------------------


RefuseWidening: TypeAlias = Callable[[Mapping[str, pa.DataType]], dict[str, str]]


def refuse_every_widening(types: Mapping[str, pa.DataType]) -> dict[str, str]:
    """Refuse to widen any column."""
    return dict.fromkeys(types, "nothing is written")


@dataclass(frozen=True, slots=True)
class PortContext:
    """A port of a source in one epoch: its known columns, and the destinations of its rows."""

    source: SourceOptions
    port: str
    output: Output  # sinks that take the rows unchanged, and edges to operators
    base: pa.Schema | None  # the known columns; None before there are any
    refuse_widening: RefuseWidening = refuse_every_widening  # which of these columns may not get a wider type, and why
    after: pa.Schema | None = None  # in a replay: the columns after the epoch, whose types are not inferred again
    keys: tuple[str, ...] = ()  # columns that identify a row of an upserted sink: a record without one is bad
    strict: Mapping[str, StrictColumn] = field(default_factory=dict)  # other columns on which an upserted sink relies
    may_widen: bool = True  # False: `refuse_widening` refuses every column, whatever its sinks could do
    table_key: tuple[str, ...] = ()  # of a captured table, where an upserted sink takes its key from there

    @property
    def is_inferring(self) -> bool:
        """Whether no record and no declaration has given the columns yet; the columns that every table starts with do
        not count."""
        if self.source.schema_of(self.port).fields:
            return False
        partitions = {name for target in self.output.targets for name in target["partition_by"]}
        return self.base is None or set(self.base.names) <= {RESCUED_COLUMN, *LINEAGE, *partitions}

    @property
    def evolution(self) -> Literal["add", "rescue", "fail"]:
        """How to treat an unknown field. While columns are inferred, every field becomes a column."""
        return "add" if self.is_inferring else self.source.schema_of(self.port).evolution


def columns_of(context: PortContext, constants: Collection[str]) -> Columns:
    """Decide which columns come from records and which the reader adds (`constants`)."""
    spec = declared(context.source, context.port)
    known = merge(context.base, spec, frozen=context.base.names) if context.base is not None else spec
    types: dict[str, str] = {}
    for name in sorted(constants):
        index = known.get_field_index(name)
        types[name] = type_to_text(known.field(index)) if index >= 0 else "string"
    foreign = {f.name for f in known if not _is_supported(f)}  # columns that only another writer can fill
    taken = {*types, *LINEAGE, *foreign}
    decoded = pa.schema([f for f in known if f.name not in taken])
    return Columns(
        decoded=decoded,
        frozen=frozenset(decoded.names),
        constants=types,
        reserved=frozenset({*types, *foreign}),
        kinds={
            **{name: one.type for name, one in context.strict.items() if one.type},
            **(new_kinds(context.base, context.after) if context.after is not None else {}),
        },
        evolution=context.evolution,
        infer_timestamps=context.source.schema_of(context.port).infer_timestamps,
        strict={name: one.words for name, one in context.strict.items() if one.type},
        may_widen=context.may_widen,
        keys=frozenset({*context.keys, *context.table_key}),
        table_key=frozenset(context.table_key),
    )


def known_columns(context: PortContext) -> pa.Schema | None:
    """Return the columns of a port's rows before it gave any in this epoch; None while unknown."""
    if context.is_inferring:
        return None
    if context.base is not None:
        return pa.schema([column for column in context.base if _is_supported(column)])
    return staged_schema(context, columns_of(context, ()))


def staged_schema(context: PortContext, columns: Columns) -> pa.Schema:
    """Return every column that the staged files may have, and the table must have when they are committed."""
    schemas = [declared(context.source, context.port), *([context.base] if context.base is not None else [])]
    required = {f.name for schema in schemas for f in schema if not f.nullable}
    # A key column that must have values here may be null in the table, unless the spec or the table says otherwise.
    fields = [
        f.with_nullable(True) if f.name in context.keys and f.name not in required else f for f in columns.decoded
    ]
    added = [{"name": n, "type": t, "nullable": True} for n, t in columns.constants.items()]
    fields += list(schema_from_json(added))
    names = {f.name for f in fields}
    for target in context.output.targets:
        for name in target["partition_by"]:
            if name not in names:
                fields.append(pa.field(name, pa.string()))
                names.add(name)
    if not fields:
        fields.append(pa.field(RESCUED_COLUMN, pa.string()))
    if context.source.lineage:
        fields += [pa.field(n, k) for n, k in zip(LINEAGE, LINEAGE_TYPES, strict=True)]
    return pa.schema(fields)


def check_fields(origin: str, fields: Iterable[pa.Field], partitions: Collection[str]) -> None:
    """Check that a Delta table can hold the columns of some rows.

    Raises:
        SchemaError: two names differ only in case, or a partition column is nested.
    """
    seen: dict[str, str] = {}
    for column in fields:
        other = seen.setdefault(column.name.lower(), column.name)
        if other != column.name:
            raise SchemaError(
                f"{origin}: columns {other!r} and {column.name!r} differ in case alone",
                hint="Spell partition_by, declared fields and folder names as the records do.",
            )
        if column.name in partitions and pa.types.is_nested(column.type):
            raise SchemaError(
                f"{origin}: partition_by names {column.name!r}, which holds {type_to_text(column)}",
                hint="Choose a column of single values for partition_by.",
            )


def _is_supported(field: pa.Field) -> bool:
    try:
        schema_to_json(pa.schema([field]))
    except ValueError:
        return False
    return True


# -- wider types --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Widening:
    """The known columns of a port whose numbers need a wider type: those that get one, and those that keep theirs."""

    types: dict[str, pa.DataType] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)  # with the reason; their values are rescued


def decide_widening(
    context: PortContext, columns: Columns, rescued: Sequence[Rescued], rows: int, known: Collection[str] = ()
) -> Widening:
    """Decide by the rescued values of an epoch which columns get a wider type, apart from the `known` decisions.

    Raises:
        SchemaError: `on_widen` is `fail`.
    """
    policy, names = context.source.schema_of(context.port).on_widen, declared(context.source, context.port).names
    wanted = {name: kind for name, kind in find_wider(columns, names, rescued, rows).items() if name not in known}
    kept = {name: why for name, why in find_kept(columns, names, rescued, rows).items() if name not in known}
    if policy == "rescue":
        return Widening()
    undeclared = {*wanted, *(name for name, reason in kept.items() if reason != IS_DECLARED)}
    if policy == "fail" and undeclared:
        first = next(one for one in rescued if one.column in undeclared)
        raise SchemaError(
            f"{first.file} line {first.line}: {first.first} does not fit column {first.column} ({first.expected})",
            hint="Set schema.on_widen to rewrite or rescue, or correct the input.",
        )
    refused = context.refuse_widening(wanted) if wanted else {}
    return Widening({name: kind for name, kind in wanted.items() if name not in refused}, {**kept, **refused})


def widen_columns(context: PortContext, columns: Columns, types: Mapping[str, pa.DataType]) -> Columns:
    """Return the columns of a port with wider types."""
    decoded = widen(columns.decoded, types)
    if context.base is not None and RESCUED_COLUMN not in context.base.names:
        # Added for the values that now fit; added again if others are rescued.
        decoded = pa.schema([column for column in decoded if column.name != RESCUED_COLUMN])
    return replace(columns, decoded=decoded)


def refuse_widening(
    types: Mapping[str, pa.DataType], sinks: Sequence[Sink], deciding: str, has_operators: bool
) -> dict[str, str]:
    """Return which columns cannot get a wider type in the sinks that take them, with the reasons."""
    if reason := never_widens(sinks, deciding, has_operators):
        return dict.fromkeys(types, reason)
    refused: dict[str, str] = {}
    for sink in sinks:
        try:
            refused |= sink.refuse_widening(types)
        except FirnlineError as error:
            if sink.required:
                raise
            refused |= dict.fromkeys(types, f"sink {sink.name!r} does not answer: {error.message}")
    return refused


def never_widens(sinks: Sequence[Sink], deciding: str, has_operators: bool) -> str:
    """Return why no column of a port ever gets a wider type; empty: its sinks decide.

    The deciding sink must take the rows: it alone holds every row that another table may still wait for. Followers
    need no such table: each gets an epoch with the types that the epoch has.
    """
    if has_operators:
        return "an operator reads it"
    only_followers = bool(sinks) and all(sink.capabilities.fed_from_outbox for sink in sinks)
    if deciding not in [sink.name for sink in sinks] and not only_followers:
        return f"the deciding sink {deciding!r} does not take the rows"
    return ""


# -- what driver and workers exchange -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadPort:
    """A wanted port in a read task: its columns, and the destinations of its rows."""

    columns: Columns
    output: Output
    keys: tuple[str, ...] = ()  # columns that must have a value

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {"columns": self.columns.to_json(), "output": self.output.to_json(), "keys": list(self.keys)}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> ReadPort:
        """Parse the output of `to_json`."""
        return cls(Columns.from_json(value["columns"]), Output.from_json(value["output"]), tuple(value["keys"]))


@dataclass(frozen=True, slots=True)
class ReadTask:
    """The input of one task, and the destinations of its rows."""

    source: str
    source_kind: str
    settings: dict[str, Json]  # of the source's reader
    split: Split
    ports: dict[str, ReadPort]  # the wanted ones
    epoch: int
    attempt: str
    quarantine: dict[str, Json]  # the folder of bad records
    exchange: dict[str, Json]  # the folder of rows for operators
    lineage: bool
    replay: bool  # only state is rebuilt: bad records are already in quarantine

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "kind": "read",
            "source": self.source,
            "source_kind": self.source_kind,
            "settings": self.settings,
            "split": self.split.to_json(),
            "ports": {name: port.to_json() for name, port in self.ports.items()},
            "epoch": self.epoch,
            "attempt": self.attempt,
            "quarantine": self.quarantine,
            "exchange": self.exchange,
            "lineage": self.lineage,
            "replay": self.replay,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> ReadTask:
        """Parse the output of `to_json`."""
        return cls(
            source=str(value["source"]),
            source_kind=str(value["source_kind"]),
            settings=dict(value["settings"]),
            split=Split.from_json(value["split"]),
            ports={str(name): ReadPort.from_json(port) for name, port in value["ports"].items()},
            epoch=int(value["epoch"]),
            attempt=str(value["attempt"]),
            quarantine=dict(value["quarantine"]),
            exchange=dict(value["exchange"]),
            lineage=bool(value["lineage"]),
            replay=bool(value["replay"]),
        )


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The result of one task, and the location of its rows. Rows are never sent back."""

    end: SplitEnd
    rows: dict[str, int]  # by wanted port
    rescues: list[str]  # ports with rows that have `_rescued_data`
    staged: dict[str, list[dict[str, Json]]]  # by sink
    exchanged: dict[str, Json]  # by edge
    quarantine: list[dict[str, Json]]
    records: int
    bad: int
    dropped: int  # rows on ports that are not wanted
    bytes_read: int
    raw_bytes: int
    rescued: list[Rescued] = field(default_factory=list)  # by port and column
    keyless: dict[str, dict[str, str]] = field(default_factory=dict)  # port -> key column -> the first row without it
    first_bad: list[str] = field(default_factory=list)  # for people: file, line, reason and the first bytes
    filled: dict[str, list[str]] = field(default_factory=dict)  # port -> partition columns that have a value

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the driver."""
        return {
            "outcomes": self.end.outcomes,
            "failed": dict(self.end.failed),
            "columns": {
                port: {"schema": schema_to_json(read.schema), "kinds": read.kinds}
                for port, read in self.end.columns.items()
            },
            "rows": self.rows,
            "rescues": self.rescues,
            "staged": self.staged,
            "exchanged": self.exchanged,
            "quarantine": self.quarantine,
            "records": self.records,
            "bad": self.bad,
            "dropped": self.dropped,
            "bytes_read": self.bytes_read,
            "raw_bytes": self.raw_bytes,
            "rescued": [one.to_json() for one in self.rescued],
            "keyless": self.keyless,
            "first_bad": self.first_bad,
            "filled": self.filled,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> ReadReport:
        """Parse the output of `to_json`."""
        columns = {
            str(port): ReadColumns(schema_from_json(read["schema"]), dict(read["kinds"]))
            for port, read in value["columns"].items()
        }
        return cls(
            end=SplitEnd(list(value["outcomes"]), columns, dict(value["failed"])),
            rows={str(port): int(rows) for port, rows in value["rows"].items()},
            rescues=list(value["rescues"]),
            staged=dict(value["staged"]),
            exchanged=dict(value["exchanged"]),
            quarantine=list(value["quarantine"]),
            records=int(value["records"]),
            bad=int(value["bad"]),
            dropped=int(value["dropped"]),
            bytes_read=int(value["bytes_read"]),
            raw_bytes=int(value["raw_bytes"]),
            rescued=[Rescued.from_json(one) for one in value.get("rescued", ())],
            keyless=dict(value.get("keyless", {})),
            first_bad=list(value.get("first_bad", ())),
            filled=dict(value.get("filled", {})),
        )


# -- the job ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadContext:
    """The common part of all tasks that read one source in one epoch."""

    epoch: int
    attempt: str
    options: SourceOptions
    settings: dict[str, Json]  # of the source's reader
    ports: dict[str, PortContext]  # the wanted ones
    quarantine: dict[str, Json]  # the folder of bad records
    exchange: dict[str, Json]  # the folder of rows for operators
    replay: bool = False  # only state is rebuilt


@dataclass(slots=True)
class Produced:
    """The staged output of an epoch's tasks, added up."""

    outcomes: dict[str, list[Json]] = field(default_factory=dict)  # by source
    failed: dict[str, str] = field(default_factory=dict)  # inputs that cannot be read as they are: name -> reason
    staged: dict[str, list[dict[str, Json]]] = field(default_factory=dict)
    quarantine: list[dict[str, Json]] = field(default_factory=list)
    records: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    raw_bytes: int = 0
    schemas: dict[str, pa.Schema] = field(default_factory=dict)  # by sink: all columns of the staged files
    columns: dict[str, pa.Schema] = field(default_factory=dict)  # by port (`shop`, `shop.orders`): all columns
    read: dict[str, int] = field(default_factory=dict)  # by source: records
    rescued: list[Rescued] = field(default_factory=list)  # by port and column
    partitions: dict[tuple[str, str], bool] = field(default_factory=dict)  # sink and column: whether a row has a value

    def add(self, other: Produced) -> None:
        """Add the output of another source."""
        self.outcomes |= other.outcomes
        self.failed |= other.failed
        self.quarantine += other.quarantine
        self.records += other.records
        self.bad.update(other.bad)
        self.bytes_read += other.bytes_read
        self.raw_bytes += other.raw_bytes
        self.columns |= other.columns
        self.read |= other.read
        self.rescued = add_rescued([*self.rescued, *other.rescued])
        self.partitions |= other.partitions
        self.stage(other.staged, other.schemas)

    def stage(self, staged: dict[str, list[dict[str, Json]]], schemas: dict[str, pa.Schema]) -> None:
        """Add files staged for sinks."""
        for sink, files in staged.items():
            self.staged.setdefault(sink, []).extend(files)
        self.schemas |= schemas


def _located(split: Split, quarantine: dict[str, Json]) -> Split:
    """Return a split whose quarantined records say where they are."""
    return replace(split, inputs=[{**i, "at": quarantine} if "quarantine" in i else i for i in split.inputs])


@dataclass(slots=True)
class _SourceRead:
    """One source while its tasks agree on types."""

    context: ReadContext
    plan: SourcePlan
    columns: dict[str, Columns]  # by port
    unread: set[int]  # splits to read, or to read again with other types
    reports: dict[int, ReadReport] = field(default_factory=dict)
    asked: set[tuple[str, str]] = field(default_factory=set)  # ports and columns whose widening was decided
    demanded: set[tuple[str, str]] = field(default_factory=set)  # ports and key columns that records must have

    @classmethod
    def begin(cls, context: ReadContext, plan: SourcePlan) -> _SourceRead:
        columns = {port: columns_of(one, plan.constants) for port, one in context.ports.items()}
        return cls(context, plan, columns, set(range(len(plan.splits))))

    def tasks(self) -> dict[int, ReadTask]:
        """Return a task for every split that must be read."""
        context = self.context
        ports = {name: ReadPort(self.columns[name], port.output, port.keys) for name, port in context.ports.items()}
        return {
            number: ReadTask(
                source=context.options.name,
                source_kind=context.options.type,
                settings=context.settings,
                split=_located(self.plan.splits[number], context.quarantine),
                ports=ports,
                epoch=context.epoch,
                attempt=context.attempt,
                quarantine=context.quarantine,
                exchange=context.exchange,
                lineage=context.options.lineage,
                replay=context.replay,
            )
            for number in sorted(self.unread)
        }

    def take(self, reports: Mapping[int, ReadReport]) -> None:
        """Take the reports of tasks, and find out which splits must be read again."""
        self.reports |= reports
        self.unread = set()
        numbers, no_rows = sorted(self.reports), ReadColumns(pa.schema([]))
        for port, columns in self.columns.items():
            read = [self.reports[number].end.columns.get(port, no_rows) for number in numbers]
            agreed, again = agree(columns, read)
            self.columns[port] = self._with_demanded(port, agreed)
            self.unread |= {numbers[index] for index in again}
        if not self.unread:
            for port in self.columns:
                self._widen(port)
        if not self.unread:
            for port in self.columns:
                self._demand_keys(port)
                self._demand_fit(port)

    def _with_demanded(self, port: str, columns: Columns) -> Columns:
        """Return columns whose keys must have values, also where splits without rows do not know them."""
        fields = [one.with_nullable(False) if (port, one.name) in self.demanded else one for one in columns.decoded]
        return replace(columns, decoded=pa.schema(fields))

    def _demand_keys(self, port: str) -> None:
        """Read splits again that have rows without a key, so that their readers report these records as bad.

        Only after types are settled: a key that needs a wider type is not a missing one.

        Raises:
            SchemaError: no record has a key column, or the reader does not report such records.
        """
        for number, report in self.reports.items():
            for name, row in report.keyless.get(port, {}).items():
                columns = self.columns[port]
                if name in columns.constants and name not in columns.needed:
                    self.columns[port] = replace(columns, needed=columns.needed | {name})
                    self.unread.add(number)
                    continue
                index = columns.decoded.get_field_index(name)
                if index < 0 or ((port, name) in self.demanded and not columns.decoded.field(index).nullable):
                    raise SchemaError(
                        f"{row}: no value in the key column {name!r}",
                        hint="Set the sink's key to columns that every record has, or correct the input.",
                        column=name,
                    )
                demanded = columns.decoded.field(index).with_nullable(False)
                self.columns[port] = replace(columns, decoded=columns.decoded.set(index, demanded))
                self.unread.add(number)
        self.demanded |= {(port, name) for report in self.reports.values() for name in report.keyless.get(port, {})}

    def _demand_fit(self, port: str) -> None:
        """Read splits again in which a value does not fit a strict column, so that their readers report these records.

        Only after types are settled: a number may need a wider type.

        Raises:
            SchemaError: the reader does not report such records.
        """
        before = dict(self.columns[port].strict)
        for number, report in self.reports.items():
            for one in report.rescued:
                if one.source != port or one.column not in self.context.ports[port].strict:
                    continue
                if one.column in before:
                    raise SchemaError(
                        f"{one.file} line {one.line}: {one.first} does not fit column {one.column} ({one.expected})",
                        hint="A sink orders or changes rows by this column: correct the input.",
                        column=one.column,
                    )
                strict = {**self.columns[port].strict, one.column: self.context.ports[port].strict[one.column].words}
                self.columns[port] = replace(self.columns[port], strict=strict)
                self.unread.add(number)

    def _widen(self, port: str) -> None:
        """Give columns of a port wider types if its numbers need them; then every split is read again.

        Raises:
            SchemaError: `on_widen` is `fail`.
        """
        if self.context.replay:
            return
        context, columns, reports = self.context.ports[port], self.columns[port], self.reports.values()
        rescued = add_rescued(one for report in reports for one in report.rescued if one.source == port)
        rows = sum(report.rows[port] for report in reports)
        known = {name for asked, name in self.asked if asked == port}
        widening = decide_widening(context, columns, rescued, rows, known)
        self.asked |= {(port, name) for name in (*widening.types, *widening.kept)}
        facts = {"source": port_name(self.context.options.name, port), "epoch": self.context.epoch}
        expected = {one.column: one.expected for one in rescued}
        for name, reason in sorted(widening.kept.items()):
            logger.warning("column %s stays %s: %s", name, expected[name], reason, extra=facts)
        if widening.types:
            self.columns[port] = widen_columns(context, columns, widening.types)
            self.unread = set(self.reports)


def read_sources(
    engine: Engine, plan: EpochPlan, contexts: Mapping[str, ReadContext], watch: Watch
) -> tuple[Produced, list[ReadReport]]:
    """Read the plan. Returns the output and the reports of all tasks, in the order of the rows.

    Raises:
        WorkerLostError: a task stopped its heartbeat, or the job took too long.
        SchemaError: tasks do not agree on the types of their columns.
        BadRecordsError: most records of a source are bad.
    """
    reads = {name: _SourceRead.begin(contexts[name], part) for name, part in plan.plans.items()}
    for _ in range(SCHEMA_ROUNDS):
        tasks = {(name, number): task for name, read in reads.items() for number, task in read.tasks().items()}
        if not tasks:
            break
        labels = [f"task {number} of source {name}" for name, number in tasks]
        reports = run_watched(engine, watch, [task.to_json() for task in tasks.values()], labels.__getitem__)
        by_source: dict[str, dict[int, ReadReport]] = {}
        for (name, number), report in zip(tasks, reports, strict=True):
            by_source.setdefault(name, {})[number] = ReadReport.from_json(report)
        for name, of_source in by_source.items():
            reads[name].take(of_source)
    else:
        epoch = next(iter(contexts.values())).epoch
        raise SchemaError(f"the tasks of epoch {epoch} do not agree on the types of their columns")
    produced = Produced()
    reports_in_order: list[ReadReport] = []
    for read in reads.values():
        of_read = [read.reports[number] for number in sorted(read.reports)]
        added = _add_up(read.context, read.columns, of_read)
        if not read.plan.notes.get("replay"):  # of records that were bad before, most may still be
            first = [one for report in of_read for one in report.first_bad]
            check_bad_ratio(added.bad, added.records, read.context.options.max_bad_ratio, first)
        produced.add(added)
        reports_in_order += of_read
    return produced, reports_in_order


def _add_up(context: ReadContext, columns: Mapping[str, Columns], reports: Sequence[ReadReport]) -> Produced:
    """Add up the reports of one source.

    Raises:
        EngineError: rows are missing, or there are too many.
    """
    out = Produced()
    source = context.options.name
    out.outcomes[source] = [outcome for report in reports for outcome in report.end.outcomes]
    for report in reports:
        out.failed |= report.end.failed
        out.quarantine += report.quarantine
        out.records += report.records
        out.bytes_read += report.bytes_read
        out.raw_bytes += report.raw_bytes
        for sink, files in report.staged.items():
            out.staged.setdefault(sink, []).extend(files)
        for file in report.quarantine:
            out.bad.update(file["reasons"])
    out.read[source] = out.records
    found = [one for report in reports for one in report.rescued]
    out.rescued = add_rescued(replace(one, source=port_name(source, one.source), wider={}) for one in found)
    for port, one in context.ports.items():
        schema = staged_schema(one, columns[port])
        if any(port in report.rescues for report in reports) and RESCUED_COLUMN not in schema.names:
            schema = schema.append(pa.field(RESCUED_COLUMN, pa.string()))
        if any(report.rows[port] for report in reports) or not one.is_inferring:  # otherwise no column is known yet
            out.columns[port_name(source, port)] = schema
        for target in one.output.targets:
            out.staged.setdefault(target["sink"], [])
            out.schemas[target["sink"]] = schema
            if any(report.rows[port] for report in reports):
                filled = {name for report in reports for name in report.filled.get(port, ())}
                out.partitions |= {(str(target["sink"]), name): name in filled for name in target["partition_by"]}
    _check_counts(context, out, reports)
    return out


def _check_counts(context: ReadContext, out: Produced, reports: Sequence[ReadReport]) -> None:
    """Check that every record became a row of its port in every sink, or a bad record."""
    source = context.options.name
    bad, dropped = sum(report.bad for report in reports), sum(report.dropped for report in reports)
    rows = {port: sum(report.rows[port] for report in reports) for port in context.ports}
    if sum(rows.values()) + dropped + bad != out.records:
        read = f"{sum(rows.values()) + dropped} rows and {bad} bad records"
        raise EngineError(f"source {source} handed on {read}, but counted {out.records} records: refused")
    if not context.replay and out.bad.total() != bad:
        raise EngineError(f"{out.bad.total()} of {bad} bad records of source {source} are in quarantine: refused")
    for port, one in context.ports.items():
        for sink in (str(target["sink"]) for target in one.output.targets):
            staged = sum(int(file["rows"]) for file in out.staged[sink])
            if staged != rows[port]:
                of_port = port_name(source, port)
                raise EngineError(f"{staged} rows were staged for {sink} from {rows[port]} rows of {of_port}: refused")
    if dropped:
        facts = {"source": source, "epoch": context.epoch, "rows": dropped}
        logger.warning("rows dropped: they are on a port that no sink or operator reads", extra=facts)


def exchanged(reports: Sequence[ReadReport], contexts: Mapping[str, ReadContext]) -> dict[str, Exchanged]:
    """Return the rows that the sources passed on to operators, by edge."""
    ports = [port for context in contexts.values() for port in context.ports.values()]
    names = {edge.name for port in ports for edge in port.output.edges}
    return {name: Exchanged.collect(({"exchanged": report.exchanged} for report in reports), name) for name in names}


def check_bad_ratio(bad_records: Counter[str], records: int, limit: float, first: Sequence[str]) -> None:
    """Refuse a slice of mostly bad records: the format is probably wrong."""
    bad = bad_records.total()
    if records >= JUDGED_RECORDS and bad > limit * records:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in bad_records.most_common())
        raise BadRecordsError(
            f"{bad:,} of {records:,} records are bad ({reasons}), more than max_bad_ratio ({limit:g}) allows;"
            f" the first: {'; '.join(first[:FIRST_BAD])}",
            hint="See them with `firnline quarantine --pending`. If the files have another format, set `format` of the"
            " source (csv, json, parquet); if so many bad records are expected, raise max_bad_ratio.",
        )
