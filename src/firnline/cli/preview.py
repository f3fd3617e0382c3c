"""What a run would do, found out by reading only: backlog, plan, columns, guarantees, where it would resume."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from firnline.cli.columns import (
    check_tables,
    known_columns,
    operator_schemas,
    schema_rows,
    sinks_of,
    source_schemas,
    type_words,
)
from firnline.cli.graph import draw_graph, graph_json
from firnline.cli.sampling import Sampled, SampleTotals, sample_source
from firnline.errors import ConfigError, LedgerHoleError, SinkError
from firnline.graph import sink_input, stateful
from firnline.history.status import load_lease
from firnline.jobs.spark import SparkEngine, find_java
from firnline.options import DeltaSinkOptions
from firnline.process import has_exited
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sources.base import Source, SourcePlan
from firnline.sources.known import KnownFiles
from firnline.storage import is_remote
from firnline.types import Json


@dataclass(slots=True)
class _Reading:
    """What is found out on the way."""

    pipeline: OpenPipeline
    held: Head
    warnings: list[str] = field(default_factory=list)
    positions: dict[str, Json] = field(default_factory=dict)
    known: dict[str, KnownFiles] | None = field(
        default_factory=dict
    )  # files that the ledger knows; None when that cannot be told


def preview(pipeline: OpenPipeline) -> dict[str, Any]:
    """Everything that `dry-run` shows. Only queries start Spark.

    Raises:
        FirnlineError: a run would fail, as far as can be told without writing.
    """
    for source in pipeline.sources:
        source.check()
    reading = _Reading(pipeline, pipeline.load())
    away = _check_sinks(reading)
    copies = _copies(reading)
    lease = _lease(reading)
    _resume(reading)
    sources = [_source(reading, source) for source in pipeline.sources]
    parallelism = SparkEngine(pipeline.options.name, pipeline.options.spark).parallelism
    plan = pipeline.sources.plan(reading.positions, pipeline.limits(parallelism))
    sampled, sample = _sample(reading, plan.plans if plan is not None else {})
    reading.warnings += sample.warnings
    schemas = _schemas(reading, sampled)
    java = find_java()
    if java is None:
        reading.warnings.append("no Java found: a run needs Java 17 or newer on PATH or in JAVA_HOME")
    for source, found in zip(pipeline.sources, sources, strict=True):
        if not found["files_outstanding"] and not found["late_files"]:
            reading.warnings.append(f"there is nothing to read below {source.location}")
    held, only, shards = reading.held, sources[0] if len(sources) == 1 else None, _shards(reading, parallelism)
    return {
        "pipeline": pipeline.options.name,
        "source": {k: v for k, v in only.items() if k in _SOURCE_FIELDS} if only else None,
        "sources": sources,
        "first_epoch": {"files": plan.files if plan else 0, "size_bytes": plan.size_bytes if plan else 0},
        "epochs_about": _epochs(pipeline, sources),
        "sinks": [_sink(pipeline, options, options.name in away) for options in pipeline.options.ordered_sinks],
        "copies": copies,
        "lease": lease,
        "resume": {
            "path": "sink" if reading.known and any(reading.known.values()) and not held.checkpoint else held.path,
            "epoch": held.epoch,
            "generation": held.generation,
            "last_committed_file": only["last_committed_file"] if only else None,
        },
        "schema": schema_rows(pipeline, sampled, schemas),
        "schemas": [
            {"name": port, "columns": [{"name": f.name, "type": type_words(f)} for f in schema]}
            for port, schema in schemas.items()
        ],
        "graph": {**graph_json(pipeline.options, shards), "drawing": draw_graph(pipeline.options, shards)},
        "sample": sample.to_json(),
        "java": java,
        "warnings": [*reading.warnings, *held.repairs],
    }


# -- sources ------------------------------------------------------------------------------------------

_SOURCE_FIELDS = ("path", "files_outstanding", "bytes_outstanding", "late_files")


def _resume(reading: _Reading) -> None:
    """Find the positions that a run would start at, and the files that are known."""
    pipeline, held = reading.pipeline, reading.held
    if held.checkpoint is not None:
        reading.positions = pipeline.sources.start(held.checkpoint.positions)
        try:
            reading.known = {name: KnownFiles() for name in pipeline.sources.names}
            pipeline.add_known(reading.known, held.entry)
        except LedgerHoleError as error:
            reading.warnings.append(f"late files cannot be told: {error.message}")
            reading.known = None
        return
    reading.positions = pipeline.sources.start({})
    scan = pipeline.options.checkpoint.recovery_scan_commits
    foreign = pipeline.deciding.find_foreign(held.version, scan, accept_older=False) if held.exists else None
    if foreign is None:
        return
    source = pipeline.sources.only
    if source is None:
        raise ConfigError(
            f"the table {pipeline.storage.root} was filled by another tool, from one source; the spec has several",
            hint="Take over with a spec of that one source first, or write to another table.",
        )
    reading.warnings.append("the table holds another tool's progress; a run would take it over")
    reading.positions[source.name], baseline = source.adopt(foreign)
    known = KnownFiles((str(record["path"]), str(record["etag"])) for record in baseline)
    reading.known = {source.name: known}


def _source(reading: _Reading, source: Source) -> dict[str, Any]:
    """What a run would read of one source."""
    position = reading.positions[source.name]
    backlog = source.backlog(position)
    return {
        "name": source.name,
        "path": next(o.location for o in reading.pipeline.options.sources if o.name == source.name),
        "files_outstanding": backlog.files_outstanding,
        "bytes_outstanding": backlog.bytes_outstanding,
        "late_files": _late(reading, source),
        "last_committed_file": source.describe(position).last,
    }


def _late(reading: _Reading, source: Source) -> int:
    if reading.known is None:
        return 0
    found = source.find_late(reading.positions[source.name], reading.known.get(source.name, KnownFiles()))
    if found.changed:
        reading.warnings.append(f"{len(found.changed)} processed file(s) changed later: {found.changed[0]}")
    return len(found.late) if source.late_files != "ignore" else 0


def _epochs(pipeline: OpenPipeline, sources: list[dict[str, Any]]) -> int:
    """About how many epochs; several sources share the limits of one."""
    batch = pipeline.options.batch
    files, size = max(1, batch.max_files // len(sources)), max(1, batch.max_bytes // len(sources))
    by_files = [math.ceil(int(source["files_outstanding"] + source["late_files"]) / files) for source in sources]
    return max([*by_files, *(math.ceil(int(source["bytes_outstanding"]) / size) for source in sources)])


# -- columns ------------------------------------------------------------------------------------------


def _sample(reading: _Reading, plans: Mapping[str, SourcePlan]) -> tuple[dict[str, Sampled], SampleTotals]:
    """The columns that the first files of every source need, merged with those that are known."""
    pipeline, totals = reading.pipeline, SampleTotals()
    found: dict[str, Sampled] = {}
    for options in pipeline.options.sources:
        plan = plans.get(options.name)
        if plan is not None and plan.splits:
            targets = [sink.stage_target() for sink in sinks_of(pipeline, options.name)]
            base = known_columns(pipeline, reading.held, options.name)
            sampled = sample_source(pipeline.sources[options.name], options, plan, base, targets, totals)
            if sampled is not None:
                found[options.name] = sampled
    return found, totals


def _schemas(reading: _Reading, sampled: Mapping[str, Sampled]) -> dict[str, pa.Schema]:
    """The columns of every source, operator and port, as far as they can be told."""
    options = reading.pipeline.options
    found = source_schemas(reading.pipeline, reading.held, sampled)
    found |= operator_schemas(options, found)
    check_tables(reading.pipeline, found)
    for operator in options.operators:
        if operator.name not in found:
            reading.warnings.append(f"the columns of operator {operator.name} cannot be told: it has no input yet")
    return found


# -- operators and access -----------------------------------------------------------------------------


def _shards(reading: _Reading, parallelism: int) -> int | None:
    """How many tasks share the keys of an operator; None where only the stored state tells."""
    state, held = reading.pipeline.options.state, reading.held
    if state.shards is None and held.checkpoint is not None and held.checkpoint.state:
        return None
    return state.shards or min(parallelism, state.key_groups)


def _copies(reading: _Reading) -> list[dict[str, Any]]:
    """What the store and the tiers hold; one that a run would refuse is refused here, too."""
    pipeline = reading.pipeline
    found = []
    for look in pipeline.recorder.inspect(reading.held, pipeline.load):
        name = "checkpoint store" if look.path == "store" else f"{look.path} tier"
        writable = _writable(look.place) if os.path.isabs(look.place) else None
        if writable is False and look.path == "local" and stateful(pipeline.options):
            raise SinkError(
                f"the local tier {look.place} cannot be written, and the operators' state lies there",
                hint="Allow this user to write there, or take checkpoint.local out of the spec.",
            )
        problem = look.unreachable or look.damaged or ("cannot be written" if writable is False else "")
        if problem:
            words = f"the {name} {look.place}: {problem}"
            reading.warnings.append(f"{words}; a run would go on, and bring it up to date when it can")
        epoch = look.epoch if look.record is not None else None
        found.append(
            {"path": look.path, "place": look.place, "epoch": epoch, "writable": writable, "problem": problem or None}
        )
    return found


def _lease(reading: _Reading) -> dict[str, Json] | None:
    """Who holds the lease, as `status` tells it."""
    lease = load_lease(reading.pipeline)
    if lease and "unreadable" in lease:
        reading.warnings.append(f"the lease cannot be read ({lease['unreadable']}); a run would go on without one")
    elif lease and not lease["released"] and not has_exited(str(lease["host"]), int(lease["pid"])):
        holder = f"run {lease['holder']} on {lease['host']}:{lease['pid']}"
        reading.warnings.append(f"{holder} holds the lease: a run would take it over, and with --standby wait for it")
    return lease


def _check_sinks(reading: _Reading) -> set[str]:
    """Refuse tables that a run would refuse; returns the optional sinks that cannot be read, whose rows would wait."""
    pipeline, away = reading.pipeline, set[str]()
    for sink in pipeline.sinks:
        try:
            sink.check()
        except (SinkError, OSError) as error:
            if sink.required or pipeline.options.batch.commit_policy == "all":
                raise
            away.add(sink.name)
            reading.warnings.append(f"the optional sink {sink.name} cannot be read, its rows would wait: {error}")
    return away


def _sink(pipeline: OpenPipeline, options: DeltaSinkOptions, is_away: bool) -> dict[str, Any]:
    sink = pipeline.sink(options.name)
    held = sink.load() if not is_away else Head(exists=False, version=-1)
    root = sink.uri
    writable = _writable(root)
    if writable is False and not is_away:
        raise SinkError(f"{root} cannot be written", hint="Allow this user to write there.", table=root)
    return {
        "name": sink.name,
        "table": root,
        "input": sink_input(pipeline.options, options),
        "write": options.write,
        "exists": held.exists,
        "version": held.version if held.exists else None,
        "delivery": sink.capabilities.delivery.value,
        "required": sink.required,
        "writable": writable,
    }


def _writable(root: str) -> bool | None:
    """Whether a table's folder can be written; None when only writing could tell."""
    if is_remote(root):
        return None
    folder = Path(root)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return folder == Path(root) and os.access(folder, os.W_OK)  # a database file, or a file in the way
    return os.access(folder, os.W_OK | os.X_OK)
