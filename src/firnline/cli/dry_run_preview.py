"""Computes, read-only, what a run would do: backlog, plan, columns, guarantees, and where it would resume."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from firnline.cli.common import silent_text
from firnline.cli.dry_run_columns import (
    Sampled,
    SampleTotals,
    check_tables,
    declared_warnings,
    known_columns,
    operator_schemas,
    partition_warnings,
    sample_source,
    schema_rows,
    sinks_of,
    source_schemas,
    type_words,
    unknown_column_warnings,
    wanted_ports,
)
from firnline.cli.text import shorten
from firnline.errors import ConfigError, LedgerHoleError, SinkError, SourceError
from firnline.graph import Graph, Node, find_source, graph_of, sink_input, stateful, topological
from firnline.history.schemas import silent_facts
from firnline.history.status import load_lease
from firnline.jobs.engine import Output
from firnline.jobs.read_job import PortContext, refuse_widening
from firnline.jobs.spark import SparkEngine, find_java
from firnline.names import HOME, OWN_FILE
from firnline.options import FollowerOptions, PipelineOptions, SinkOptions, names_tables
from firnline.process import has_exited
from firnline.run.fill import check_new, describe_fill
from firnline.run.new_tables import NewTable, find_new_tables
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head, Sink
from firnline.sinks.delta.options import DeltaPartsOptions
from firnline.sinks.known import check_known, find_new, known_sinks
from firnline.sinks.table_rows import SourceTable
from firnline.sources.base import CapturedTable, Limits, Source, SourcePlan, Split
from firnline.sources.known import KnownFiles
from firnline.storage import is_remote
from firnline.types import Delivery, Json

MAX_LISTED = 100_000  # files to choose a sample from
NO_LIMIT = 1 << 62


@dataclass(slots=True)
class _Findings:
    """What the dry run has found out so far."""

    pipeline: OpenPipeline
    head: Head
    warnings: list[str] = field(default_factory=list)
    positions: dict[str, Json] = field(default_factory=dict)
    known: dict[str, KnownFiles] | None = field(
        default_factory=dict
    )  # files that the ledger knows; None if it has a hole
    joining: dict[str, NewTable] = field(default_factory=dict)  # tables that were added to a pipeline with history
    # Where sinks with a template write captured tables, with the names of sink and table.
    places: dict[str, tuple[str, str]] = field(default_factory=dict)


def preview(pipeline: OpenPipeline, width: int | None = None) -> dict[str, Any]:
    """Return everything that `dry-run` shows; `width` is that of the screen. Only queries start Spark.

    Raises:
        FirnlineError: a run would fail, as far as a check without writing can find out.
    """
    for source in pipeline.sources:
        source.check()
    findings = _Findings(pipeline, pipeline.load())
    heads = _check_sinks(findings)
    copies = _copies(findings)
    lease = _lease(findings)
    _resume(findings)
    _check_gaps(findings, lease)
    parallelism = SparkEngine(pipeline.options.name, pipeline.options.spark).parallelism
    limits = replace(pipeline.limits(parallelism), any_age=True)
    plan = pipeline.sources.plan(findings.positions, limits)
    everything = pipeline.sources.plan(findings.positions, _without_end(limits)) if plan is not None else None
    sampled, sample = _sample(findings, plan.plans if plan else {}, everything.plans if everything else {})
    sources = [_source(findings, source) for source in pipeline.sources]  # a sample tells the size of records
    findings.warnings += [*sample.warnings, *declared_warnings(pipeline, findings.head)]
    findings.warnings += partition_warnings(pipeline, sampled)
    schemas = _schemas(findings, sampled)
    java = find_java()
    if java is None:
        findings.warnings.append("no Java found: a run needs Java 17 or newer on PATH or in JAVA_HOME")
    for source, found in zip(pipeline.sources, sources, strict=True):
        findings.warnings += source.remarks()
        if not found["files_outstanding"] and not found["late_files"] and not source.claims_first:
            findings.warnings.append(f"there is nothing to read below {source.location}")
    findings.warnings += [*_whole_transactions(pipeline), *_silent_changes(pipeline)]
    tables = {sink.name: schema_rows(pipeline, sink.name, sampled, schemas) for sink in pipeline.options.sinks}
    head, only, shards = findings.head, sources[0] if len(sources) == 1 else None, _shards(findings, parallelism)
    return {
        "pipeline": pipeline.options.name,
        "source": {k: v for k, v in only.items() if k in _SOURCE_FIELDS} if only else None,
        "sources": sources,
        "first_epoch": _first_epoch(plan.plans if plan else {}, sample),
        "epochs_about": _epochs(pipeline, sources, sample),
        "journal": _journal(findings),
        "sinks": [_sink(findings, one, heads.get(one.name)) for one in _own_sinks(pipeline.options)],
        "copies": copies,
        "lease": lease,
        "resume": {
            "path": "sink" if findings.known and any(findings.known.values()) and not head.checkpoint else head.path,
            "epoch": head.epoch,
            "generation": head.generation,
            "last_committed_file": only["last_committed_file"] if only else None,
        },
        "schema": tables[pipeline.counted],
        "tables": [{"sink": name, "columns": columns} for name, columns in tables.items()],
        "schemas": [
            {"name": port, "columns": [{"name": f.name, "type": type_words(f)} for f in schema]}
            for port, schema in schemas.items()
        ],
        "graph": {**graph_json(pipeline.options, shards), "drawing": draw_graph(pipeline.options, shards, width)},
        "sample": {**sample.to_json(), **_waiting(sources)},
        "java": java,
        "warnings": [*findings.warnings, *head.repairs],
    }


# -- sources ------------------------------------------------------------------------------------------

# What is atomic in a sink that delivers an epoch in parts.
_PARTS = {"delta": "table", "kafka": "lane", "redis": "script"}
_SOURCE_FIELDS = ("path", "inputs", "files_outstanding", "bytes_outstanding", "late_files", "tables")


def _resume(findings: _Findings) -> None:
    """Find the positions that a run would start at, and the files that are known."""
    pipeline, head = findings.pipeline, findings.head
    if head.checkpoint is not None:
        findings.positions = pipeline.sources.start(head.checkpoint.positions)
        try:
            findings.known = {name: KnownFiles() for name in pipeline.sources.names}
            pipeline.add_known(findings.known, head.entry)
        except LedgerHoleError as error:
            findings.warnings.append(f"late files are unknown: {error.message}")
            findings.known = None
        return
    findings.positions = pipeline.sources.start({})
    scan = pipeline.options.checkpoint.recovery_scan_commits
    foreign = pipeline.deciding.find_foreign(head.version, scan, accept_older=False) if head.exists else None
    if foreign is None:
        return
    source = pipeline.sources.only
    if source is None:
        raise ConfigError(
            f"the table {pipeline.storage.root} was filled by another tool, from one source; the spec has several",
            hint="Take over with a spec of that one source first, or write to another table.",
        )
    findings.warnings.append("the table holds another tool's progress; a run would take it over")
    findings.positions[source.name], baseline = source.adopt(foreign)
    known = KnownFiles((str(record["path"]), str(record["etag"])) for record in baseline)
    findings.known = {source.name: known}


def _check_gaps(findings: _Findings, lease: Mapping[str, Json] | None) -> None:
    """Refuse a log that does not continue behind the position, as a run does. The log of a run that is alive is read:
    nobody else may open it.

    Raises:
        SourceGapError: it has the ways out.
    """
    checkpoint = findings.head.checkpoint
    if checkpoint is None or (lease is not None and ("unreadable" in lease or _is_held(lease))):
        return
    for source in findings.pipeline.sources:
        position = checkpoint.positions.get(source.name)
        if not source.has_log or position is None:
            continue
        try:
            gap = source.find_gap(position)
        except SourceError as error:
            findings.warnings.append(f"whether the log of source {source.name} continues is unknown: {error.message}")
            continue
        if gap is not None:
            raise gap


def _whole_transactions(pipeline: OpenPipeline) -> list[str]:
    """Say that a setting has no effect on captured databases."""
    captured = [source.name for source in pipeline.sources if source.has_log]
    if pipeline.options.batch.respect_source_tx or not captured:
        return []
    return [
        f"batch.respect_source_tx: false has no effect on source {name}: a transaction of a captured database always "
        "stays in one epoch"
        for name in captured
    ]


def _silent_changes(pipeline: OpenPipeline) -> list[str]:
    """Say which rows of captured tables may differ from the database, since the log does not have their change."""
    if not any(source.has_log for source in pipeline.sources):
        return []
    with contextlib.suppress(LedgerHoleError):
        return [silent_text(change) for changes in silent_facts(pipeline).values() for change in changes]
    return []


def _source(findings: _Findings, source: Source) -> dict[str, Any]:
    """Return what a run would read of one source."""
    position = findings.positions[source.name]
    backlog = source.backlog(position)
    tables = source.find_captured(position)
    _check_parts(findings, source.name, tables or ())
    return {
        "name": source.name,
        "path": next(o.location for o in findings.pipeline.options.sources if o.name == source.name),
        "inputs": source.inputs_are,
        "files_outstanding": backlog.files_outstanding,
        "bytes_outstanding": backlog.bytes_outstanding,
        "late_files": _late(findings, source),
        "last_committed_file": source.describe(position).last,
        "tables": [table.to_json() for table in tables] if tables is not None else None,
    }


def _check_parts(findings: _Findings, source: str, tables: Sequence[CapturedTable]) -> None:
    """Refuse sinks that would write two captured tables, or a table and another sink, to the same place.

    Raises:
        ConfigError: it names the table, and both sinks.
    """
    from firnline.sinks.delta.parts.captured import name_part

    options = findings.pipeline.options
    for sink in options.sinks:
        if not isinstance(sink, DeltaPartsOptions) or not sink.takes_tables:
            continue
        found = find_source(options, sink_input(options, sink))
        for table in tables if found is not None and found[0].name == source else ():
            if found is None or not _is_at(found[1], table):
                continue
            schema, _, name = table.name.partition(".")
            own = SourceTable(schema, name, table.port != table.name, table.key)
            place = f"{sink.root}/{name_part(sink.template, own, sink.parts_allowed)}"
            other = findings.places.setdefault(place, (sink.name, table.name))
            if other != (sink.name, table.name):
                raise ConfigError(
                    f"sink {sink.name!r} would write table {table.name} to {place}, and so would sink {other[0]!r} "
                    f"with table {other[1]}",
                    hint="Give one of them another `table`, such as a folder of its own; or exclude the table in "
                    "`tables` of the source.",
                )


def _is_at(port: str, table: CapturedTable) -> bool:
    """Return whether a port with a pattern has the rows of a table."""
    if "." in port or port == "*":
        return fnmatch.fnmatchcase(table.name, port)
    return "." not in table.port and fnmatch.fnmatchcase(table.port, port)


def _first_epoch(plans: Mapping[str, SourcePlan], sample: SampleTotals) -> dict[str, int]:
    """Return how much the first epoch reads. The sample tells the size of records whose plan does not."""
    inputs = [(name, item) for name, plan in plans.items() for split in plan.splits for item in split.inputs]
    mean = sample.size_bytes / sample.records if sample.records else 0.0
    sizes = [plan.size_bytes or int(mean * sum(split.max_records for split in plan.splits)) for plan in plans.values()]
    return {"files": len({(name, str(item.get("path"))) for name, item in inputs}), "size_bytes": sum(sizes)}


def _waiting(sources: list[dict[str, Any]]) -> dict[str, int]:
    """Return how much a sample was taken from."""
    return {
        "of_files": sum(int(source["files_outstanding"] + source["late_files"]) for source in sources),
        "of_bytes": sum(int(source["bytes_outstanding"]) for source in sources),
    }


def _late(findings: _Findings, source: Source) -> int:
    if findings.known is None:
        return 0
    reconciled = source.find_late(findings.positions[source.name], findings.known.get(source.name, KnownFiles()))
    for names, what in ((reconciled.changed, "were replaced"), (reconciled.grown, "grew")):
        if names:
            findings.warnings.append(f"{len(names)} file(s) {what} after they were read: {names[0]}")
    return reconciled.rest + (reconciled.late_count if source.late_files != "ignore" else 0)


def _epochs(pipeline: OpenPipeline, sources: list[dict[str, Any]], sample: SampleTotals) -> int:
    """Estimate the number of epochs; several sources share the limits of one. The sample tells records per byte."""
    batch = pipeline.options.batch
    files, size = max(1, batch.max_files // len(sources)), max(1, batch.max_bytes // len(sources))
    by_files = [math.ceil(int(source["files_outstanding"] + source["late_files"]) / files) for source in sources]
    outstanding = sum(int(source["bytes_outstanding"]) for source in sources)
    records = sample.records * max(1.0, outstanding / sample.size_bytes) if sample.size_bytes else sample.records
    by_files.append(math.ceil(records / batch.max_events))
    return max([*by_files, *(math.ceil(int(source["bytes_outstanding"]) / size) for source in sources)])


# -- columns ------------------------------------------------------------------------------------------


def _without_end(limits: Limits) -> Limits:
    """Return limits for a plan of everything that waits, up to `MAX_LISTED` files."""
    return replace(limits, max_files=MAX_LISTED, max_bytes=NO_LIMIT, max_events=NO_LIMIT, max_output_files=NO_LIMIT)


def _later(source: Source, first: SourcePlan, everything: SourcePlan | None) -> SourcePlan | None:
    """Return the part of a plan of everything that comes after the first epoch."""
    inputs = source.inputs_after(first, everything) if everything is not None else []
    if everything is None or not inputs:
        return None
    return replace(everything, splits=[Split(inputs, NO_LIMIT, NO_LIMIT, NO_LIMIT)], files=len(inputs))


def _sample(
    findings: _Findings, plans: Mapping[str, SourcePlan], everything: Mapping[str, SourcePlan]
) -> tuple[dict[str, Sampled], SampleTotals]:
    """Return the columns of a sample of every source, by port, merged with the known ones."""
    pipeline, totals = findings.pipeline, SampleTotals()
    ports: dict[str, list[PortContext]] = {}
    for name, (source, port) in wanted_ports(pipeline.options).items():
        output = Output(tuple(sink.stage_target() for sink in sinks_of(pipeline, name)))
        base = known_columns(pipeline, findings.head, name)
        has_operators = any(name in operator.inputs for operator in pipeline.options.operators)
        refuse = partial(
            refuse_widening,
            sinks=sinks_of(pipeline, name),
            deciding=pipeline.deciding.name,
            has_operators=has_operators,
        )
        ports.setdefault(source.name, []).append(PortContext(source, port, output, base, refuse))
    sampled: dict[str, Sampled] = {}
    for name, of_source in ports.items():
        plan = plans.get(name)
        if plan is not None and plan.splits:
            later = _later(pipeline.sources[name], plan, everything.get(name))
            sampled |= sample_source(pipeline.sources[name], of_source, plan, later, totals)
    return sampled, totals


def _schemas(findings: _Findings, sampled: Mapping[str, Sampled]) -> dict[str, pa.Schema]:
    """Return the columns of every source, operator and port, as far as they are known."""
    options = findings.pipeline.options
    schemas = source_schemas(findings.pipeline, findings.head, sampled)
    schemas |= operator_schemas(options, schemas)
    check_tables(findings.pipeline, schemas)
    findings.warnings += unknown_column_warnings(findings.pipeline, schemas)
    for operator in options.operators:
        if operator.name not in schemas:
            findings.warnings.append(f"the columns of operator {operator.name} are unknown: it has no input yet")
    return schemas


# -- operators and access -----------------------------------------------------------------------------


def _shards(findings: _Findings, parallelism: int) -> int | None:
    """Return the number of shards; None if only the stored state knows it."""
    state, head = findings.pipeline.options.state, findings.head
    if state.shards is None and head.checkpoint is not None and head.checkpoint.state:
        return None
    return state.shards or min(parallelism, state.key_groups)


def _copies(findings: _Findings) -> list[dict[str, Any]]:
    """Inspect the copies in store and tiers; refuse a copy that a run would refuse."""
    pipeline = findings.pipeline
    copies = []
    for copy in pipeline.recorder.inspect(findings.head, pipeline.load):
        name = "checkpoint store" if copy.tier == "store" else f"{copy.tier} tier"
        writable = _writable(copy.location) if os.path.isabs(copy.location) else None
        if writable is False and copy.tier == "local" and stateful(pipeline.options):
            raise SinkError(
                f"the local tier {copy.location} cannot be written, and the operators' state lies there",
                hint="Allow this user to write there, or remove checkpoint.local from the spec.",
            )
        problem = copy.unreachable or copy.damaged or ("cannot be written" if writable is False else "")
        if problem:
            words = f"the {name} {copy.location}: {problem}"
            findings.warnings.append(f"{words}; a run would continue, and bring it in sync when it can")
        epoch = copy.epoch if copy.record is not None else None
        copies.append(
            {
                "path": copy.tier,
                "place": copy.location,
                "epoch": epoch,
                "writable": writable,
                "problem": problem or None,
            }
        )
    return copies


def _lease(findings: _Findings) -> dict[str, Json] | None:
    """Load the lease, as `status` shows it."""
    lease = load_lease(findings.pipeline)
    if lease and "unreadable" in lease:
        findings.warnings.append(f"the lease cannot be read ({lease['unreadable']}); a run would continue without one")
    elif lease and _is_held(lease):
        holder = f"run {lease['holder']} on {lease['host']}:{lease['pid']}"
        findings.warnings.append(
            f"{holder} holds the lease: while it is alive a run is refused (exit code 6); with --take-over the run "
            "would end it, with --standby wait for it"
        )
    return lease


def _is_held(lease: Mapping[str, Json]) -> bool:
    """Return whether the run that took the lease may be alive."""
    return not lease["released"] and not has_exited(str(lease["host"]), int(lease["pid"]), str(lease["start"]))


def _check_sinks(findings: _Findings) -> dict[str, Head]:
    """Refuse sinks that a run would refuse; returns the heads of the others.

    An optional sink that cannot be used now has none: its rows would wait.
    """
    pipeline, heads = findings.pipeline, dict[str, Head]()
    check_known(known_sinks(findings.head.checkpoint), pipeline.options.followers)
    check_new(pipeline, findings.head)
    for sink in pipeline.sinks:
        try:
            findings.warnings += sink.find_caveats()
            sink.check()
            heads[sink.name] = findings.head if sink is pipeline.deciding else sink.load()
        except (SinkError, OSError) as error:
            if sink.required:
                raise _naming(sink, error) from error
            findings.warnings.append(f"the optional sink {sink.name} cannot be used, its rows would wait: {error}")
    findings.joining = {one.name: one for one in find_new_tables(pipeline, findings.head, heads)}
    return heads


def _naming(sink: Sink, error: SinkError | OSError) -> SinkError | OSError:
    """Return the error of a follower with the name of the sink in the message; a table's path says it."""
    is_named = not sink.capabilities.fed_from_outbox or f"sink {sink.name!r}" in str(error)
    if not isinstance(error, SinkError) or is_named:
        return error
    return type(error)(f"sink {sink.name!r}: {error.message}", hint=error.hint, **error.fields)


def _own_sinks(options: PipelineOptions) -> list[SinkOptions]:
    """Return the sinks of the spec, the deciding one first."""
    return [sink for sink in options.ordered_sinks if sink is not options.journal]


def _journal(findings: _Findings) -> dict[str, Any] | None:
    """Return where the journal lies; None if a sink decides."""
    if findings.pipeline.options.journal is None:
        return None
    return _place(findings, findings.pipeline.deciding, findings.head, is_away=False)


def _sink(findings: _Findings, options: SinkOptions, head: Head | None) -> dict[str, Any]:
    pipeline = findings.pipeline
    sink = pipeline.sink(options.name)
    new = find_new(pipeline.options, findings.head.checkpoint)
    place = _place(findings, sink, head or Head(exists=False, version=-1), is_away=head is None)
    return {
        "name": sink.name,
        "type": options.type,
        "table": place["table"],
        "decides": sink is pipeline.deciding,
        "input": sink_input(pipeline.options, options),
        "write": options.write,
        "key": list(_key(findings, options)),
        "sequence_by": getattr(options, "sequence_by", None),
        "delete_when": {name: list(values) for name, values in getattr(options, "delete_when", {}).items()},
        "exists": place["exists"],
        "version": place["version"],
        "epoch": head.epoch if head else None,
        "delivery": sink.capabilities.delivery.value,
        "guarantee": _guarantee(options, sink.capabilities.delivery),
        "filled": _describe_first(findings, new, sink.name),
        "required": sink.required,
        "reachable": head is not None,
        "writable": place["writable"],
    }


def _describe_first(findings: _Findings, new: list[FollowerOptions], name: str) -> str | None:
    """Return what a sink gets first that was added to a pipeline with history."""
    if name in findings.joining:
        return findings.joining[name].describe()
    return next((describe_fill(one) for one in new if one.name == name), None)


def _key(findings: _Findings, options: SinkOptions) -> tuple[str, ...]:
    """Return the key of an upsert: of the spec, or of the captured table that it reads."""
    pipeline = findings.pipeline
    found = find_source(pipeline.options, sink_input(pipeline.options, options))
    if options.write != "upsert" or options.key or found is None or names_tables(found[1]):
        return options.key
    return pipeline.sources[found[0].name].find_key(found[1]) or ()


def _guarantee(options: SinkOptions, delivery: Delivery) -> str:
    """Return what a sink guarantees, in plain words."""
    if delivery is Delivery.AT_LEAST_ONCE:
        return "at least once: after a failure rows may come again, with the same idempotency key"
    if delivery is Delivery.EXACTLY_ONCE:
        return "exactly once: one transaction holds the rows of an epoch and its checkpoint"
    part = _PARTS.get(options.type, "part")
    return (
        f"exactly once per {part}: each {part} has its rows and its checkpoint in one transaction; an epoch is atomic "
        f"per {part}: a reader may see one {part} of it before the next"
    )


def _place(findings: _Findings, sink: Sink, head: Head, *, is_away: bool) -> dict[str, Any]:
    """Return where a sink or journal lies, and whether a run can write there. Warns of other things there."""
    root = sink.uri
    writable = _writable(root)
    if writable is False and not is_away:
        raise SinkError(f"{root} cannot be written", hint="Allow this user to write there.", table=root)
    others = _other_things(root) if not head.exists and not is_away else []
    if others:
        more = f" and {len(others) - 1:,} more" if others[1:] else ""
        findings.warnings.append(
            f"{root} is no Delta table, and not empty: a run would create the table beside {others[0]}{more}, and a "
            "vacuum of the table may delete them; choose an empty folder"
        )
    return {
        "table": root,
        "exists": head.exists,
        "version": head.version if head.exists else None,
        "writable": writable,
    }


def _other_things(root: str) -> list[str]:
    """Return the names of files and folders in a local folder that are not Firnline's.

    A run that failed before its first commit leaves data files beside its home.
    """
    if is_remote(root) or not Path(root).is_dir():
        return []
    names = [entry.name for entry in Path(root).iterdir()]
    is_ours = OWN_FILE.fullmatch if HOME in names else lambda _name: None
    return sorted(name for name in names if not (name.startswith((HOME, "_delta")) or is_ours(name)))


def _writable(root: str) -> bool | None:
    """Whether a table's folder can be written; None if only a write can find out."""
    if is_remote(root):
        return None
    folder = Path(root)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return folder == Path(root) and os.access(folder, os.W_OK)  # a database file, or a file in the way
    return os.access(folder, os.W_OK | os.X_OK)


ARROW = " ---> "
WIDE, NARROW = (21, 22), (14, 18)  # of names and of boxes, in a drawing for 80 and for 60 columns


def graph_json(options: PipelineOptions, shards: int | None) -> dict[str, Any]:
    """Return the graph as plain values: nodes in topological order, and the edges between them."""
    graph = graph_of(options)
    return {
        "nodes": [
            {
                "name": node.name,
                "kind": node.kind,
                "type": node.type,
                "shards": shards if _keeps_state(node) else None,
                "idle_after_secs": _idle_after(node, options),
            }
            for node in _in_order(options, graph)
        ],
        "edges": [
            {
                "from": edge.source.name,
                "port": edge.port or None,
                "to": edge.target.name,
                "to_kind": edge.target.kind,
            }
            for edge in graph.edges
        ],
    }


def draw_graph(options: PipelineOptions, shards: int | None, width: int | None = None) -> list[str]:
    """Draw the graph as lines: a box per node, from sources to sinks, with its inputs and its readers."""
    widths = NARROW if width is not None and width < 80 else WIDE
    graph = graph_of(options)
    lines: list[str] = []
    for node in _in_order(options, graph):
        reads = [edge for edge in graph.edges if edge.target == node]
        gives = [edge for edge in graph.edges if edge.source == node]
        left = [f"{e.source.name}.{e.port}" if e.port else e.source.name for e in reads]
        right = [f"{e.target.name} ({e.port})" if e.port else e.target.name for e in gives]
        lines += _box([node.name, _about(node, options, shards)], left, right, *widths)
    return lines


def _in_order(options: PipelineOptions, graph: Graph) -> list[Node]:
    order = {operator.name: number for number, operator in enumerate(topological(options))}
    operators = sorted((n for n in graph.nodes if n.kind == "operator"), key=lambda node: order[node.name])
    sources = [node for node in graph.nodes if node.kind == "source"]
    return [*sources, *operators, *(node for node in graph.nodes if node.kind == "sink")]


def _keeps_state(node: Node) -> bool:
    return node.kind == "operator" and node.type != "sql"


def _idle_after(node: Node, options: PipelineOptions) -> float | None:
    found = [o.idle_after for o in options.operators if o.name == node.name and o.idle_after is not None]
    return found[0].total_seconds() if found else None


def _about(node: Node, options: PipelineOptions, shards: int | None) -> str:
    if node.kind == "sink":
        write = next(sink.write for sink in options.sinks if sink.name == node.name)
        return f"{node.type}, {write}"
    if _keeps_state(node) and shards is not None:
        return f"{node.type}, {shards} shard{'' if shards == 1 else 's'}"
    return node.type


def _box(texts: list[str], left: list[str], right: list[str], name_width: int, box_width: int) -> list[str]:
    indent = " " * (name_width + len(ARROW))
    edge = f"{indent}+{'-' * box_width}+"
    lines = [edge]
    for row in range(max(len(texts), len(left), len(right))):
        read = f"{shorten(left[row], name_width):>{name_width}}{ARROW}" if row < len(left) else indent
        text = shorten(texts[row], box_width - 2) if row < len(texts) else ""
        given = f"{ARROW}{shorten(right[row], name_width)}" if row < len(right) else ""
        lines.append(f"{read}| {text:<{box_width - 2}} |{given}")
    return [*lines, edge]
