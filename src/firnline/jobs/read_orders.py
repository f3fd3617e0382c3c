"""Turns a plan into orders for tasks, and their reports into what an epoch produced. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa

from firnline.errors import EngineError
from firnline.exchange import Edge
from firnline.jobs.read_task import LINEAGE, folder_values, retyped
from firnline.ndjson import add_counts, choose, json_paths, settle
from firnline.ndjson.kinds import Counts
from firnline.ndjson.tree import outer_paths
from firnline.options import FileSourceOptions
from firnline.schema import RESCUED_COLUMN, merge, schema_from_json, schema_from_spec, schema_to_json, type_to_text
from firnline.sources.base import SourcePlan
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Context:
    """What the orders that read one source in one epoch have in common."""

    epoch: int
    attempt: str
    options: FileSourceOptions
    root: str  # of the source
    targets: list[dict[str, Json]]  # one per sink that takes the rows as they are, from `Sink.stage_target`
    quarantine: dict[str, Json]
    base: pa.Schema | None  # the columns that are known, None before there are any
    edges: list[Edge] = field(default_factory=list)  # to operators
    exchange: dict[str, Json] = field(default_factory=dict)  # where rows for operators are put
    replay: bool = False  # only state is made anew: bad records are in quarantine already

    @property
    def is_inferring(self) -> bool:
        """Whether no record and no declaration has told the columns yet; what every table begins with tells nothing."""
        if self.options.schema.fields:
            return False
        partitions = {name for target in self.targets for name in target["partition_by"]}
        return self.base is None or set(self.base.names) <= {RESCUED_COLUMN, *LINEAGE, *partitions}

    @property
    def evolution(self) -> Literal["add", "rescue", "fail"]:
        """What an unknown field becomes. While the columns are still to be inferred, every field is a column."""
        return "add" if self.is_inferring else self.options.schema.evolution


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the columns of an epoch come from."""

    decoded: pa.Schema  # from records
    frozen: frozenset[str]  # their types are fixed: the table has them, or the spec declares them
    folder: dict[str, str]  # from `name=value` folders, with their types
    reserved: frozenset[str] = frozenset()  # never taken from records: such values are rescued
    kinds: dict[str, str] = field(
        default_factory=dict
    )  # by path: what new fields are, chosen by all values of the epoch


@dataclass(slots=True)
class Produced:
    """What the tasks of an epoch staged, added up."""

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
        """Take in what another source gave."""
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
        """Take in files that were staged for sinks."""
        for sink, files in staged.items():
            self.staged.setdefault(sink, []).extend(files)
        self.schemas |= schemas


def declared(options: FileSourceOptions) -> pa.Schema:
    """The columns that the spec declares."""
    fields = options.schema.fields
    return schema_from_spec([{"name": f.name, "type": f.type, "nullable": f.nullable} for f in fields])


def columns_from_json(value: Mapping[str, Json]) -> dict[str, pa.Schema]:
    """The columns of sources as a checkpoint holds them."""
    return {name: schema_from_json(columns) for name, columns in value.items()}


def columns_of(context: Context, plan: SourcePlan) -> Columns:
    """Decide which columns come from records and which from folders."""
    spec = declared(context.options)
    known = merge(context.base, spec, frozen=context.base.names) if context.base is not None else spec
    folders: dict[str, str] = {}
    for item in (item for split in plan.splits for item in split.inputs):
        for name in folder_values(item["path"], context.root):
            index = known.get_field_index(name)
            folders[name] = type_to_text(known.field(index)) if index >= 0 else "string"
    foreign = {f.name for f in known if not _is_supported(f)}  # columns that only another writer can fill
    taken = {*folders, *LINEAGE, *foreign}
    decoded = pa.schema([f for f in known if f.name not in taken])
    return Columns(
        decoded=decoded,
        frozen=frozenset(decoded.names),
        folder=dict(sorted(folders.items())),
        reserved=frozenset({*folders, *foreign}),
    )


def known_columns(context: Context) -> pa.Schema | None:
    """The columns of a source's rows before it has given any in this epoch; None while nothing tells them."""
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


def make_orders(context: Context, plan: SourcePlan, columns: Columns, only: Collection[int]) -> list[dict[str, Json]]:
    """One order per task, for the tasks whose numbers are in `only`. Plain JSON, since it travels to workers."""
    options = context.options
    common = {
        "kind": "read",
        "epoch": context.epoch,
        "attempt": context.attempt,
        "source": {"root": context.root, "storage_options": dict(options.storage_options)},
        "targets": context.targets,
        "quarantine": context.quarantine,
        "schema": schema_to_json(columns.decoded),
        "frozen": sorted(columns.frozen),
        "reserved": sorted(columns.reserved),
        "kinds": columns.kinds,
        "folder_types": columns.folder,
        "evolution": context.evolution,
        "on_bad_record": options.on_bad_record,
        "max_record_bytes": options.max_record_bytes,
        "lineage": options.lineage,
        "edges": [edge.to_json() for edge in context.edges],
        "exchange": context.exchange,
        "replay": context.replay,
    }
    return [
        {
            **common,
            "inputs": split.inputs,
            "max_records": split.max_records,
            "max_bytes": split.max_bytes,
            "max_output_files": split.max_output_files,
        }
        for number, split in enumerate(plan.splits)
        if number in only
    ]


def agree(columns: Columns, reports: Sequence[dict[str, Json]]) -> tuple[Columns, set[int]]:
    """Choose the types of new columns by the values of all tasks; tasks that wrote another type must run again.

    A choice stands: a task that runs again rescues the odd values, so they would no longer be counted. Fields inside a
    value that a task still holds as JSON text wait until that task has counted them, too.
    """
    counts: Counts = {}
    for report in reports:
        add_counts(counts, report["kinds"])
    found = [schema_from_json(report["schema"]) for report in reports]
    texts = {path for schema in found for path in json_paths(schema)}
    choices = {
        path: choose(path, counted).kind
        for path, counted in counts.items()
        if path not in columns.kinds and texts.isdisjoint(outer_paths(path))
    }
    kinds = columns.kinds | {path: kind for path, kind in choices.items() if kind is not None}
    settled = kinds | {path: "json" for path, kind in choices.items() if kind is None}  # to be counted again
    merged = settle(columns.decoded, settled)
    for schema in found:
        merged = merge(merged, settle(schema, settled), frozen=columns.frozen)
    again = {number for number, schema in enumerate(found) if retyped(schema, merged)}
    return replace(columns, decoded=merged, kinds=kinds), again


def collect(context: Context, columns: Columns, reports: Sequence[dict[str, Json]]) -> Produced:
    """Add the reports up."""
    out = Produced()
    source = context.options.name
    out.outcomes[source] = [outcome for report in reports for outcome in report["outcomes"]]
    for report in reports:
        out.quarantine += report["quarantine"]
        out.records += report["records"]
        out.bytes_read += report["bytes_read"]
        out.raw_bytes += report["raw_bytes"]
        for sink, files in report["staged"].items():
            out.staged.setdefault(sink, []).extend(files)
        for file in report["quarantine"]:
            out.bad.update(file["reasons"])
    out.read[source] = out.records
    schema = staged_schema(context, columns)
    if any(report["rescues"] for report in reports) and RESCUED_COLUMN not in schema.names:
        schema = schema.append(pa.field(RESCUED_COLUMN, pa.string()))
    if out.records > out.bad.total() or not context.is_inferring:  # else nothing has told any column yet
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
    """Every column that the staged files may have: what the table must have when they are committed."""
    fields = list(columns.decoded)
    folder_specs = [{"name": n, "type": t, "nullable": True} for n, t in columns.folder.items()]
    fields += list(schema_from_json(folder_specs))
    names = {f.name for f in fields}
    for target in context.targets:
        for name in target["partition_by"]:
            if name not in names:
                fields.append(pa.field(name, pa.string()))
                names.add(name)
    if not fields:
        fields.append(pa.field(RESCUED_COLUMN, pa.string()))
    if context.options.lineage:
        kinds = (pa.string(), pa.int64(), pa.int64())
        fields += [pa.field(n, k) for n, k in zip(LINEAGE, kinds, strict=True)]
    return pa.schema(fields)
