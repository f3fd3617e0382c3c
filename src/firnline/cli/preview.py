"""What a run would do, found out by reading only: backlog, plan, schema, guarantees, where it would resume."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from firnline.engine.orders import Columns, Context, collect, columns_of, declared
from firnline.engine.parts import Parts
from firnline.engine.spark import SparkEngine, find_java
from firnline.errors import LedgerHoleError, SchemaError, SinkError, SourceError
from firnline.ndjson import (
    BrokenFileError,
    DecodeOptions,
    Decoder,
    MismatchError,
    UnexpectedFieldError,
    compression_of,
    open_blocks,
)
from firnline.schema import type_to_text
from firnline.sinks.base import Held
from firnline.sinks.delta.adopt import find_foreign
from firnline.sinks.delta.columns import missing_fields
from firnline.sources.base import Backlog, SourcePlan
from firnline.storage import is_remote, open_storage
from firnline.types import Json

SAMPLE_FILES = 3
SAMPLE_RECORDS = 10_000  # of each file


def preview(parts: Parts) -> dict[str, Any]:
    """Everything that `dry-run` shows.

    Raises:
        FirnlineError: a run would fail, as far as can be told without writing.
    """
    _check_source(parts)
    held = parts.load()
    for sink in parts.sinks:
        sink.check()
    warnings: list[str] = []
    position, known = _resume(parts, held, warnings)
    late = _late(parts, position, known, warnings)
    backlog = parts.source.backlog(position)
    plan = parts.source.plan(position, parts.limits(SparkEngine(parts.options.name, parts.options.spark).parallelism))
    columns, schema, sample = _sample(parts, plan, warnings)
    java = find_java()
    if java is None:
        warnings.append("no Java found: a run needs Java 17 or newer on PATH or in JAVA_HOME")
    if not backlog.files_outstanding and not late:
        warnings.append(f"there is nothing to read below {parts.source.root}")
    return {
        "pipeline": parts.options.name,
        "source": {
            "path": parts.options.source.path,
            "files_outstanding": backlog.files_outstanding,
            "bytes_outstanding": backlog.bytes_outstanding,
            "late_files": late,
        },
        "first_epoch": {"files": plan.files if plan else 0, "size_bytes": plan.size_bytes if plan else 0},
        "epochs_about": _epochs(parts, backlog, late),
        "sinks": [_sink(parts, index) for index in range(len(parts.sinks))],
        "resume": {
            "path": "sink" if known and not held.checkpoint else held.path,
            "epoch": held.epoch,
            "generation": held.generation,
            "last_committed_file": position["last_committed_file"],
        },
        "schema": _schema_rows(parts, columns, schema),
        "sample": sample,
        "java": java,
        "warnings": [*warnings, *held.repairs],
    }


def _check_source(parts: Parts) -> None:
    root = parts.source.root
    if is_remote(root):
        return
    if not os.path.isdir(root):
        raise SourceError(
            f"{root}: no such folder", hint="Correct `path` of the source, or make the folder.", path=root
        )
    if not os.access(root, os.R_OK | os.X_OK):
        raise SourceError(f"{root} cannot be listed", hint="Allow this user to read the folder.", path=root)


def _resume(parts: Parts, held: Held, warnings: list[str]) -> tuple[Json, dict[str, str] | None]:
    """The position that a run would start at, and the files that are known; None when that cannot be told."""
    if held.checkpoint is not None:
        position = parts.source.start(held.checkpoint.positions.get(parts.source.name))
        try:
            return position, parts.known_files(held.entry)
        except LedgerHoleError as error:
            warnings.append(f"late files cannot be told: {error.message}")
            return position, None
    scan = parts.options.checkpoint.recovery_scan_commits
    foreign = find_foreign(parts.storage, held.version, scan, accept_older=False) if held.exists else None
    if foreign is None:
        return parts.source.start(None), {}
    warnings.append("the table holds another tool's progress; a run would take it over")
    position, baseline = parts.source.adopt(foreign)
    return position, {str(record["path"]): str(record["etag"]) for record in baseline}


def _late(parts: Parts, position: Json, known: dict[str, str] | None, warnings: list[str]) -> int:
    if known is None:
        return 0
    found = parts.source.compare(position, known)
    if found.changed:
        warnings.append(f"{len(found.changed)} processed file(s) changed later: {found.changed[0]}")
    return len(found.late) if parts.options.source.late_files != "ignore" else 0


def _epochs(parts: Parts, backlog: Backlog, late: int) -> int:
    batch = parts.options.batch
    by_files = math.ceil((backlog.files_outstanding + late) / batch.max_files)
    return max(by_files, math.ceil(backlog.bytes_outstanding / batch.max_bytes))


# -- schema -------------------------------------------------------------------------------------------


def _sample(
    parts: Parts, plan: SourcePlan | None, warnings: list[str]
) -> tuple[Columns | None, pa.Schema | None, dict[str, int]]:
    """The columns that the first files need, merged with the table's and the declared ones."""
    sample = {"files": 0, "records": 0, "bad": 0}
    base = parts.deciding.find_schema()
    if plan is None or not plan.tasks:
        return None, base, sample
    options = parts.options.source
    targets = [sink.stage_target() for sink in parts.sinks]
    context = Context(0, "", options, parts.source.root, targets, {}, base)
    columns = columns_of(context, plan)
    decoding = DecodeOptions(
        evolution=context.evolution,
        on_mismatch="fail" if context.evolution == "fail" else "rescue",
        reserved=columns.reserved,
    )
    decoder = Decoder(columns.decoded, columns.frozen, decoding)
    inputs = [item for task in plan.tasks for item in task.inputs]
    for item in inputs[:SAMPLE_FILES]:
        _sample_file(parts, str(item["path"]), decoder, sample, warnings)
    schema = collect(context, replace(columns, decoded=decoder.schema), []).schema
    for sink in parts.sinks:
        table = sink.find_schema()
        if table is not None:
            missing_fields(table, schema)  # SchemaError when they do not fit
    return columns, schema, sample


def _sample_file(parts: Parts, path: str, decoder: Decoder, sample: dict[str, int], warnings: list[str]) -> None:
    options = parts.options.source
    storage = open_storage(parts.source.root, options.storage_options)
    key = path.removeprefix(parts.source.root).lstrip("/")
    try:
        blocks = open_blocks(
            storage.open_read(key),
            path=path,
            compression=compression_of(path),
            max_records=SAMPLE_RECORDS,
            max_record_bytes=options.max_record_bytes,
        )
        for block in blocks:
            decoded = decoder.decode(block)
            sample["records"] += block.records
            sample["bad"] += len(decoded.bad)
            if decoded.bad and options.on_bad_record == "fail":
                warnings.append(f"{path}, line {decoded.bad[0].line}: {decoded.bad[0].reason}; on_bad_record is fail")
    except (UnexpectedFieldError, MismatchError) as error:
        raise SchemaError(f"{path}: {error}", file=path) from error
    except (BrokenFileError, OSError) as error:
        warnings.append(f"{path} cannot be read: {error}")
        return
    sample["files"] += 1


def _schema_rows(parts: Parts, columns: Columns | None, schema: pa.Schema | None) -> list[dict[str, str]]:
    if schema is None:
        return []
    table = set((parts.deciding.find_schema() or pa.schema([])).names)
    spec = set(declared(parts.options.source).names)
    folders = set(columns.folder) if columns else set()
    rows = []
    for field in schema:
        origin = "table" if field.name in table else "declared" if field.name in spec else "new"
        if origin == "new" and field.name in folders:
            origin = "new, from a folder name"
        rows.append({"name": field.name, "type": _type_text(field), "origin": origin})
    return rows


def _type_text(field: pa.Field) -> str:
    try:
        return type_to_text(field)
    except ValueError:  # a type that only another writer makes
        return str(field.type)


# -- access -------------------------------------------------------------------------------------------


def _sink(parts: Parts, index: int) -> dict[str, Any]:
    sink = parts.sinks[index]
    held = sink.load()
    root = sink.storage.root
    writable = _writable(root)
    if writable is False:
        raise SinkError(f"{root} cannot be written", hint="Allow this user to write there.", table=root)
    return {
        "name": sink.name,
        "table": root,
        "exists": held.exists,
        "version": held.version if held.exists else None,
        "delivery": sink.delivery.value,
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
    return os.access(folder, os.W_OK | os.X_OK)
