"""The past of a pipeline: checkpoints, epochs, files, bad records, sinks, sources, schemas, state, runs, audit.

Reads only. The rows are those of the command line's JSON.
"""

from __future__ import annotations

import base64
import logging
from collections import Counter
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from fastapi import Path as PathParameter

from firnline.checkpoint.ledger import LedgerEntry
from firnline.history.checkpoints import describe_epoch, load_checkpoints
from firnline.history.dead_letters import LetterFilter, load_dead_letters
from firnline.history.diff import diff_epochs
from firnline.history.epoch import RecordedSteps, load_epoch, load_steps
from firnline.history.inputs import load_inputs
from firnline.history.quarantine import load_quarantine
from firnline.history.savepoints.catalog import list_savepoints
from firnline.history.schemas import load_column_changes, load_schema_history
from firnline.history.sinks import load_sinks
from firnline.history.snapshots import load_progress
from firnline.history.state import load_state_view, snapshots_of
from firnline.history.status import load_files
from firnline.history.store import load_audit_rows, read_with_store
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.status import load_runs_marked
from firnline.service.answers import kept
from firnline.service.api.common import ApiRoute, Name, Reader, TheService
from firnline.service.api.paging import DEFAULT_LIMIT, After, Limit, page, read_next, write_next
from firnline.types import Json

logger = logging.getLogger(__name__)

router = APIRouter(prefix="/pipelines/{name}", tags=["history"], route_class=ApiRoute)

Epoch = Annotated[int, PathParameter(ge=0, le=2**62)]
Text = Annotated[str | None, Query(max_length=200)]
COMPARED_EPOCHS = 300  # the newest ones, whose columns are compared


def _warn(text: str) -> None:
    logger.warning("%s", text)


@router.get("/checkpoints")
@kept
def list_checkpoints(
    service: TheService, name: Name, _: Reader, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> dict[str, Json]:
    """List checkpoints, newest first."""
    pipeline = service.open(name)
    before = read_next(after)
    listing = read_with_store(pipeline, lambda store: load_checkpoints(pipeline, limit, store, before=before), _warn)
    rows = listing.checkpoints
    more = write_next(int(rows[-1]["epoch"])) if listing.more and rows else None
    return {"pipeline": name, "checkpoints": rows, "next": more, "damaged": listing.damaged, "lost": listing.lost}


@router.get("/checkpoints/diff")
@kept
def compare_checkpoints(
    service: TheService,
    name: Name,
    _: Reader,
    one: Annotated[int, Query(alias="from", ge=0, le=2**62)],
    other: Annotated[int, Query(alias="to", ge=0, le=2**62)],
) -> dict[str, Json]:
    """Show what changed between two epochs."""
    pipeline = service.open(name)
    return read_with_store(pipeline, lambda store: diff_epochs(pipeline, store, one, other), _warn)


@router.get("/checkpoints/{epoch}")
@router.get("/epochs/{epoch}")
@kept
def show_checkpoint(service: TheService, name: Name, epoch: Epoch, _: Reader) -> dict[str, Json]:
    """Show one checkpoint, and which of its copies are intact. `position_views`: the positions for people."""
    pipeline = service.open(name)
    view = read_with_store(pipeline, lambda store: load_epoch(pipeline, store, epoch), _warn)
    views = {source: asdict(one) for source, one in pipeline.sources.describe(view.checkpoint.positions).items()}
    return {**describe_epoch(pipeline, view), "position_views": views}


@router.get("/epochs")
@kept
def list_epochs(
    service: TheService, name: Name, _: Reader, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> dict[str, Json]:
    """List the epochs of the ledger, newest first, with the duration of each step."""
    pipeline = service.open(name)
    head = pipeline.load()
    before = read_next(after)
    entries = (entry for entry in pipeline.entries(head.entry) if before is None or entry.epoch < before)
    rows, more = page((_epoch_row(pipeline, entry) for entry in entries), limit, None)
    if rows:
        newest, oldest = int(rows[0]["epoch"]), int(rows[-1]["epoch"])
        steps = read_with_store(pipeline, lambda store: load_steps(store, name, newest, oldest) if store else {}, _warn)
        rows = [_with_steps(row, steps.get(int(row["epoch"]))) for row in rows]
    return {"pipeline": name, "epochs": rows, "next": write_next(int(rows[-1]["epoch"])) if more else None}


def _with_steps(row: dict[str, Json], steps: RecordedSteps | None) -> dict[str, Json]:
    """Add what only the checkpoint store has: the steps from the commit on, and when the checkpoint was recorded."""
    if steps is None:
        return {**row, "recorded_at": None}
    return {**row, "durations_ms": {**row["durations_ms"], **steps.durations_ms}, "recorded_at": steps.recorded_at}


def _epoch_row(pipeline: OpenPipeline, entry: LedgerEntry) -> dict[str, Json]:
    staged = entry.staged.get(pipeline.counted, [])
    return {
        "epoch": entry.epoch,
        "kind": entry.kind,
        "created_at": entry.checkpoint.created_at,
        "run": entry.checkpoint.run,
        "rows": sum(int(file["rows"]) for file in staged),
        "files": sum(entry.count_read().values()),
        "quarantined": sum(int(one["rows"]) for one in entry.quarantine),
        "durations_ms": entry.durations_ms,
    }


@router.get("/files")
@kept
def list_files(
    service: TheService,
    name: Name,
    _: Reader,
    status: Text = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> dict[str, Json]:
    """List files with their state."""
    rows, more = page(
        (row for row in load_files(service.open(name)) if status is None or row["status"] == status), limit, after
    )
    return {"pipeline": name, "files": rows, "next": more}


@router.get("/quarantine")
@kept
def list_quarantine(
    service: TheService,
    name: Name,
    identity: Reader,
    reason: Text = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> dict[str, Json]:
    """List records that could not be decoded. Without the right `data`: only how many there are, by reason."""
    found = (row for row in load_quarantine(service.open(name)) if reason is None or row["reason"] == reason)
    if not identity.data:
        counts = Counter(str(row["reason"]) for row in found)
        return {"pipeline": name, "reasons": dict(sorted(counts.items())), "quarantine": None, "next": None}
    rows, more = page(found, limit, after)
    shown = [{**row, "raw": base64.b64encode(row["raw"]).decode()} for row in rows]
    return {"pipeline": name, "reasons": None, "quarantine": shown, "next": more}


@router.get("/dead-letters")
@kept
def list_dead_letters(
    service: TheService,
    name: Name,
    identity: Reader,
    sink: Text = None,
    limit: Limit = DEFAULT_LIMIT,
    after: After = None,
) -> dict[str, Json]:
    """List rows that a sink refused. Without the right `data`, without their values."""
    rows, more = page(load_dead_letters(service.open(name), LetterFilter(sink, None, None)), limit, after)
    if not identity.data:
        rows = [{**row, "values": None} for row in rows]
    return {"pipeline": name, "dead_letters": rows, "next": more}


@router.get("/sinks")
@kept
def list_sinks(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List the sinks with their heads, and how far each is behind."""
    epoch, rows = load_sinks(service.open(name))
    return {"pipeline": name, "epoch": epoch, "sinks": rows}


@router.get("/sources")
@kept
def list_sources(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List the sources with position and backlog, and how far captured tables have been read."""
    pipeline = service.open(name)
    sources = [source.to_json() for source in load_inputs(pipeline, pipeline.load()).sources]
    snapshots = [one.to_json() for one in load_progress(pipeline)]
    return {"pipeline": name, "sources": sources, "snapshots": snapshots}


@router.get("/schemas")
@kept
def list_schemas(
    service: TheService, name: Name, _: Reader, table: Text = None, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> dict[str, Json]:
    """List the schemas that captured tables had, newest first; `changes`: what each changed of the one before.

    `columns`, on the first page: the columns that the newest epochs added to sinks or changed.
    """
    pipeline = service.open(name)
    found = _with_changes([one.to_json() for one in load_schema_history(pipeline, table or "")])
    rows, more = page(reversed(found), limit, after)
    columns = [asdict(one) for one in load_column_changes(pipeline, COMPARED_EPOCHS)] if after is None else []
    return {"pipeline": name, "schemas": rows, "columns": columns, "columns_of": COMPARED_EPOCHS, "next": more}


def _with_changes(rows: list[dict[str, Json]]) -> list[dict[str, Json]]:
    """Add to each schema, oldest first, the columns that it added, removed or changed."""
    before: dict[tuple[Json, Json], dict[str, Json]] = {}
    found = []
    for row in rows:
        key = (row["source"], row["table"])
        columns = {str(one["name"]): one for one in row["columns"]}
        known = before.get(key)
        changes = None
        if known is not None:
            changes = {
                "added": [one for one in columns if one not in known],
                "removed": [one for one in known if one not in columns],
                "changed": [one for one in columns if one in known and columns[one] != known[one]],
            }
        before[key] = columns
        found.append({**row, "changes": changes})
    return found


@router.get("/state")
@kept
def list_state(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List the operators' state that the newest checkpoint names."""
    return {"pipeline": name, "operators": [asdict(one) for one in snapshots_of(service.open(name).load().checkpoint)]}


@router.get("/state/{operator}")
@kept
def show_state(
    service: TheService,
    name: Name,
    operator: Annotated[str, PathParameter(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}$")],
    _: Reader,
) -> dict[str, Json]:
    """Show the facts of an operator's state, without its rows."""
    return load_state_view(service.open(name), operator).facts()


@router.get("/savepoints")
@kept
def show_savepoints(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List the savepoints."""
    pipeline = service.open(name)
    found = list_savepoints(pipeline, dict(pipeline.options.home.storage_options))
    return {"pipeline": name, "savepoints": [asdict(one) for one in found]}


@router.get("/runs")
@kept
def list_runs(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List the recorded runs, newest first, and the launches of the service."""
    pipeline = service.open(name)
    runs = load_runs_marked(pipeline.storage, name)
    glance = service.supervisor.get(name).glance
    found = glance.launches if glance else []
    launches = [{**launch.to_json(), "alive": launch.is_alive} for launch in reversed(found)]
    return {"pipeline": name, "runs": runs, "launches": launches}


@router.get("/audit")
@kept
def list_audit(
    service: TheService, name: Name, _: Reader, limit: Limit = DEFAULT_LIMIT, after: After = None
) -> dict[str, Json]:
    """List who changed the history of the pipeline, newest first.

    `wishes`, on the first page: who wanted it to run, paused or stopped, and since when; the newest 20.
    """
    found = load_audit_rows(service.open(name), limit, read_next(after))
    more = write_next(int(found.rows[-1]["version"])) if found.more and found.rows else None
    wishes = [asdict(one) for one in service.supervisor.load_wishes(name)] if after is None else []
    return {"pipeline": name, "audit": found.rows, "wishes": wishes, "next": more}
