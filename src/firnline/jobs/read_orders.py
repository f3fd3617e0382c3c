"""The orders and reports between the driver and the read tasks, and their sum over an epoch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from firnline.errors import EngineError
from firnline.exchange import Edge
from firnline.options import SourceOptions
from firnline.schema import RESCUED_COLUMN, merge, schema_from_json, schema_to_json, type_to_text
from firnline.sources.base import SourcePlan, Split, SplitEnd
from firnline.sources.columns import LINEAGE, LINEAGE_TYPES, Columns, declared
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Context:
    """The common part of all orders that read one source in one epoch."""

    epoch: int
    attempt: str
    options: SourceOptions
    settings: dict[str, Json]  # of the source's reader
    targets: list[dict[str, Json]]  # one per sink that takes the rows unchanged, from `Sink.stage_target`
    quarantine: dict[str, Json]
    base: pa.Schema | None  # the known columns; None before there are any
    edges: list[Edge] = field(default_factory=list)  # to operators
    exchange: dict[str, Json] = field(default_factory=dict)  # the folder of rows for operators
    replay: bool = False  # only state is rebuilt: bad records are already in quarantine

    @property
    def is_inferring(self) -> bool:
        """Whether no record and no declaration has given the columns yet; the columns that every table starts with do
        not count."""
        if self.options.schema.fields:
            return False
        partitions = {name for target in self.targets for name in target["partition_by"]}
        return self.base is None or set(self.base.names) <= {RESCUED_COLUMN, *LINEAGE, *partitions}

    @property
    def evolution(self) -> Literal["add", "rescue", "fail"]:
        """How to treat an unknown field. While columns are inferred, every field becomes a column."""
        return "add" if self.is_inferring else self.options.schema.evolution


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """The input of one task, and the destination of its rows."""

    source_kind: str
    settings: dict[str, Json]  # of the source's reader
    split: Split
    columns: Columns
    epoch: int
    attempt: str
    targets: list[dict[str, Json]]
    quarantine: dict[str, Json]
    edges: list[Edge]
    exchange: dict[str, Json]
    lineage: bool
    replay: bool

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "kind": "read",
            "source_kind": self.source_kind,
            "settings": self.settings,
            "split": self.split.to_json(),
            "columns": self.columns.to_json(),
            "epoch": self.epoch,
            "attempt": self.attempt,
            "targets": self.targets,
            "quarantine": self.quarantine,
            "edges": [edge.to_json() for edge in self.edges],
            "exchange": self.exchange,
            "lineage": self.lineage,
            "replay": self.replay,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> ReadOrder:
        """Parse the output of `to_json`."""
        return cls(
            source_kind=str(value["source_kind"]),
            settings=dict(value["settings"]),
            split=Split.from_json(value["split"]),
            columns=Columns.from_json(value["columns"]),
            epoch=int(value["epoch"]),
            attempt=str(value["attempt"]),
            targets=list(value["targets"]),
            quarantine=dict(value["quarantine"]),
            edges=[Edge.from_json(edge) for edge in value["edges"]],
            exchange=dict(value["exchange"]),
            lineage=bool(value["lineage"]),
            replay=bool(value["replay"]),
        )


@dataclass(frozen=True, slots=True)
class ReadReport:
    """The work of one task, and the location of its rows. Rows are never sent back."""

    end: SplitEnd
    staged: dict[str, list[dict[str, Json]]]  # by sink
    exchanged: dict[str, Json]  # by edge
    quarantine: list[dict[str, Json]]
    rescues: bool  # some rows have `_rescued_data`
    records: int
    bad: int
    bytes_read: int
    raw_bytes: int

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the driver."""
        return {
            "outcomes": self.end.outcomes,
            "schema": schema_to_json(self.end.schema),
            "kinds": self.end.kinds,
            "staged": self.staged,
            "exchanged": self.exchanged,
            "quarantine": self.quarantine,
            "rescues": self.rescues,
            "records": self.records,
            "bad": self.bad,
            "bytes_read": self.bytes_read,
            "raw_bytes": self.raw_bytes,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> ReadReport:
        """Parse the output of `to_json`."""
        return cls(
            end=SplitEnd(list(value["outcomes"]), schema_from_json(value["schema"]), dict(value["kinds"])),
            staged=dict(value["staged"]),
            exchanged=dict(value["exchanged"]),
            quarantine=list(value["quarantine"]),
            rescues=bool(value["rescues"]),
            records=int(value["records"]),
            bad=int(value["bad"]),
            bytes_read=int(value["bytes_read"]),
            raw_bytes=int(value["raw_bytes"]),
        )


@dataclass(slots=True)
class Produced:
    """The staged output of an epoch's tasks, added up."""

    outcomes: dict[str, list[Json]] = field(default_factory=dict)  # by source
    staged: dict[str, list[dict[str, Json]]] = field(default_factory=dict)
    quarantine: list[dict[str, Json]] = field(default_factory=list)
    records: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    raw_bytes: int = 0
    schemas: dict[str, pa.Schema] = field(default_factory=dict)  # by sink: all columns of the staged files
    columns: dict[str, pa.Schema] = field(default_factory=dict)  # by source: all columns of its rows
    read: dict[str, int] = field(default_factory=dict)  # by source: records

    def add(self, other: Produced) -> None:
        """Add the output of another source."""
        self.outcomes |= other.outcomes
        self.quarantine += other.quarantine
        self.records += other.records
        self.bad.update(other.bad)
        self.bytes_read += other.bytes_read
        self.raw_bytes += other.raw_bytes
        self.columns |= other.columns
        self.read |= other.read
        self.stage(other.staged, other.schemas)

    def stage(self, staged: dict[str, list[dict[str, Json]]], schemas: dict[str, pa.Schema]) -> None:
        """Add files staged for sinks."""
        for sink, files in staged.items():
            self.staged.setdefault(sink, []).extend(files)
        self.schemas |= schemas


def columns_of(context: Context, plan: SourcePlan) -> Columns:
    """Decide which columns come from records and which the reader adds."""
    spec = declared(context.options)
    known = merge(context.base, spec, frozen=context.base.names) if context.base is not None else spec
    constants: dict[str, str] = {}
    for name in sorted(plan.constants):
        index = known.get_field_index(name)
        constants[name] = type_to_text(known.field(index)) if index >= 0 else "string"
    foreign = {f.name for f in known if not _is_supported(f)}  # columns that only another writer can fill
    taken = {*constants, *LINEAGE, *foreign}
    decoded = pa.schema([f for f in known if f.name not in taken])
    return Columns(
        decoded=decoded,
        frozen=frozenset(decoded.names),
        constants=constants,
        reserved=frozenset({*constants, *foreign}),
        evolution=context.evolution,
    )


def known_columns(context: Context) -> pa.Schema | None:
    """Return the columns of a source's rows before it gave any in this epoch; None while unknown."""
    if context.is_inferring:
        return None
    if context.base is not None:
        return pa.schema([found for found in context.base if _is_supported(found)])
    return staged_schema(context, columns_of(context, SourcePlan(context.options.name, None, [], 0, 0)))


def _is_supported(field: pa.Field) -> bool:
    try:
        schema_to_json(pa.schema([field]))
    except ValueError:
        return False
    return True


def make_orders(context: Context, plan: SourcePlan, columns: Columns, only: Collection[int]) -> list[ReadOrder]:
    """Return one order per split, for the splits whose numbers are in `only`."""
    return [
        ReadOrder(
            source_kind=context.options.type,
            settings=context.settings,
            split=split,
            columns=columns,
            epoch=context.epoch,
            attempt=context.attempt,
            targets=context.targets,
            quarantine=context.quarantine,
            edges=context.edges,
            exchange=context.exchange,
            lineage=context.options.lineage,
            replay=context.replay,
        )
        for number, split in enumerate(plan.splits)
        if number in only
    ]


def collect(context: Context, columns: Columns, reports: Sequence[ReadReport]) -> Produced:
    """Add up the reports."""
    out = Produced()
    source = context.options.name
    out.outcomes[source] = [outcome for report in reports for outcome in report.end.outcomes]
    for report in reports:
        out.quarantine += report.quarantine
        out.records += report.records
        out.bytes_read += report.bytes_read
        out.raw_bytes += report.raw_bytes
        for sink, files in report.staged.items():
            out.staged.setdefault(sink, []).extend(files)
        for file in report.quarantine:
            out.bad.update(file["reasons"])
    out.read[source] = out.records
    schema = staged_schema(context, columns)
    if any(report.rescues for report in reports) and RESCUED_COLUMN not in schema.names:
        schema = schema.append(pa.field(RESCUED_COLUMN, pa.string()))
    if out.records > out.bad.total() or not context.is_inferring:  # otherwise no column is known yet
        out.columns[source] = schema
    for target in context.targets:
        out.staged.setdefault(target["sink"], [])
        out.schemas[target["sink"]] = schema
    for sink in out.staged:
        rows = sum(int(file["rows"]) for file in out.staged[sink])
        if rows != out.records - out.bad.total():
            raise EngineError(f"{rows} rows were staged for {sink} from {out.records} records: refused")
    return out


def staged_schema(context: Context, columns: Columns) -> pa.Schema:
    """Return every column that the staged files may have, and the table must have when they are committed."""
    fields = list(columns.decoded)
    added = [{"name": n, "type": t, "nullable": True} for n, t in columns.constants.items()]
    fields += list(schema_from_json(added))
    names = {f.name for f in fields}
    for target in context.targets:
        for name in target["partition_by"]:
            if name not in names:
                fields.append(pa.field(name, pa.string()))
                names.add(name)
    if not fields:
        fields.append(pa.field(RESCUED_COLUMN, pa.string()))
    if context.options.lineage:
        fields += [pa.field(n, k) for n, k in zip(LINEAGE, LINEAGE_TYPES, strict=True)]
    return pa.schema(fields)
