"""Where a pipeline stands, read from its sinks, ledger and run history; starts no JVM and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.checkpoint.codec import canonical
from firnline.checkpoint.ledger import LedgerEntry
from firnline.engine.history import has_died, load_runs
from firnline.engine.parts import Parts
from firnline.sinks.delta import DeltaSink
from firnline.sources.files.state import FileState
from firnline.types import Json

COMMITS_BETWEEN = 100  # commits of others, claims and column changes among the newest epochs
COMMITS_READ = 1000  # older commits keep their epoch, but table version and commit time are not looked up


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    """What `firnline status` shows; the field names are the same in JSON."""

    pipeline: str
    state: str  # new, running, done, failed, fenced, died (killed without a word)
    epoch: int
    generation: int
    table: str
    table_version: int | None
    sinks: list[dict[str, Json]]
    last_committed_file: str | None
    files_in_progress: int
    files_set_aside: int
    files_outstanding: int
    bytes_outstanding: int
    checkpoint_bytes: int
    repairs: list[str]
    restarts: int
    runs: list[dict[str, Json]] = field(default_factory=list)


def load_status(parts: Parts) -> PipelineStatus:
    """Read everything that `status` shows."""
    held = parts.load()
    stored = held.checkpoint.positions.get(parts.source.name) if held.checkpoint else None
    state = FileState.from_json(stored) if stored else None
    backlog = parts.source.backlog(stored or parts.source.start(None))
    on_record = load_runs(parts.storage, parts.options.name)
    runs = [{**run, "status": "died"} if has_died(run) else run for run in on_record]
    sinks = [_sink_row(sink) for sink in parts.sinks]
    return PipelineStatus(
        pipeline=parts.options.name,
        state=str(runs[0]["status"]) if runs else "new",
        epoch=held.epoch,
        generation=held.generation,
        table=parts.storage.root,
        table_version=held.version if held.exists else None,
        sinks=sinks,
        last_committed_file=state.mark if state else None,
        files_in_progress=sum(1 for p in state.files.values() if not p.finished) if state else 0,
        files_set_aside=len(state.set_aside) if state else 0,
        files_outstanding=backlog.files_outstanding,
        bytes_outstanding=backlog.bytes_outstanding,
        checkpoint_bytes=len(canonical(held.checkpoint.to_json())) if held.checkpoint else 0,
        repairs=list(held.repairs),
        restarts=sum(int(r["restarts"]) for r in runs),
        runs=runs,
    )


def _sink_row(sink: DeltaSink) -> dict[str, Json]:
    epoch = sink.load().epoch
    settled = sink.settled_epoch()
    pending = 0 if settled is None else epoch - settled
    return {"name": sink.name, "epoch": epoch, "required": sink.required, "epochs_pending": pending}


def load_checkpoints(parts: Parts, limit: int) -> list[dict[str, Json]]:
    """The newest checkpoints, in the order and words of CONVENTIONS; older ones are folded away."""
    held = parts.load()
    reached = [held.epoch, *(sink.load().epoch for sink in parts.sinks[1:])]
    commits = parts.deciding.commit_times(held.version, limit + COMMITS_BETWEEN) if held.exists else {}
    found = []
    for entry in islice(parts.entries(held.entry), limit):
        commit = commits.get(entry.epoch)
        holders = sum(1 for epoch in reached if epoch >= entry.epoch)
        found.append(_checkpoint_row(parts, entry, commit, f"{holders}/{len(reached)}"))
    return found


def _checkpoint_row(
    parts: Parts, entry: LedgerEntry, commit: tuple[int, str] | None, acknowledged: str
) -> dict[str, Json]:
    files = [f for files in entry.staged.values() for f in files]
    return {
        "id": entry.checkpoint.attempt,
        "epoch": entry.epoch,
        "status": "COMPLETED",
        "is_savepoint": False,
        "trigger_timestamp": entry.checkpoint.created_at,
        "latest_ack_timestamp": commit[1] if commit else None,
        "end_to_end_duration_ms": sum(entry.durations_ms.values()),
        "checkpointed_size_bytes": len(canonical(entry.checkpoint.to_json())),
        "state_size_bytes": 0,
        "acknowledged": acknowledged,
        "path": None,  # where a restore came from; an epoch's own checkpoint is no restore
        "table_version": commit[0] if commit else None,
        "kind": entry.kind,
        "generation": entry.checkpoint.generation,
        "run": entry.checkpoint.run,
        "files": len(entry.inputs.get(parts.source.name, [])),
        "rows": sum(int(f["rows"]) for f in files),
        "quarantined": sum(int(q["rows"]) for q in entry.quarantine),
        "last_committed_file": entry.checkpoint.positions[parts.source.name]["last_committed_file"],
    }


def load_files(parts: Parts) -> Iterator[dict[str, Json]]:
    """Every file that is known, in progress, set aside, late or still to be read, as CONVENTIONS names the fields."""
    held = parts.load()
    stored = held.checkpoint.positions.get(parts.source.name) if held.checkpoint else None
    position = stored or parts.source.start(None)
    state = FileState.from_json(position)
    commits = parts.deciding.commit_times(held.version, COMMITS_READ) if held.exists else {}
    seen: dict[str, str] = {}
    for record in parts.ledger_files(held.entry):
        path = state.current_name(str(record["path"]))
        if path in seen or record["status"] == "pending":
            continue
        seen[path] = str(record.get("etag", ""))
        yield _file_row(
            {**record, "path": path},
            _status_of(state, path),
            _reason_of(state, path),
            commits.get(record.get("epoch", -1)),
        )
    late = {stat.name for stat in parts.source.compare(position, seen).late}
    for stat in parts.source.list_all():
        if stat.name in seen:
            continue
        row = {"path": stat.name, "size_bytes": stat.size_bytes, "create_time": stat.modified_at.isoformat()}
        status = "late" if stat.name in late else _status_of(state, stat.name)
        yield _file_row(row, status if status != "committed" else "ignored", _reason_of(state, stat.name), None)


def _status_of(state: FileState, path: str) -> str:
    if path in state.set_aside:
        return "set_aside"
    if path in state.files:
        return "committed" if state.files[path].finished else "in_progress"
    return "pending" if state.is_after_mark(path) else "committed"


def _reason_of(state: FileState, path: str) -> str | None:
    if path in state.set_aside:
        return state.set_aside[path].reason
    return state.files[path].reason or None if path in state.files else None


def _file_row(
    record: dict[str, Json], status: str, reason: str | None, commit: tuple[int, str] | None
) -> dict[str, Json]:
    return {
        "path": record["path"],
        "size_bytes": record.get("size_bytes"),
        "create_time": record.get("create_time"),
        "discovery_time": record.get("discovery_time"),
        "processed_time": record.get("processed_time"),
        "commit_time": commit[1] if commit else None,
        "status": status,
        "epoch": record.get("epoch"),
        "table_version": commit[0] if commit else None,
        "records": record.get("to"),
        "reason": reason,
    }


def load_quarantine(parts: Parts) -> Iterator[dict[str, Json]]:
    """Bad records of committed epochs, newest epoch first: only what a commit's ledger entry names."""
    for link in parts.ledger.chain(parts.load().entry):
        for file in link.quarantine:
            data = parts.storage.get(f"_firnline/{parts.options.name}/quarantine/{file['name']}")
            yield from pq.ParquetFile(pa.BufferReader(data)).read().to_pylist()
