"""The checkpoints of a pipeline: a list, from the ledger and from the store where the ledger is folded; one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice

from firnline.checkpoint.codec import canonical
from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.errors import LedgerHoleError
from firnline.history.epoch import EpochView
from firnline.history.state import snapshots_of, state_bytes
from firnline.history.store import find_lost, savepoint_epochs
from firnline.run.observer import took_ms
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.status import has_died, load_runs
from firnline.sinks.base import Head
from firnline.stores.base import CheckpointStore
from firnline.stores.transfer import Version, walk_versions
from firnline.types import Json

COMMITS_BETWEEN = 100  # other writers' commits, claims and column changes among the newest epochs
ALL_COMMITS = 10_000  # for older commits only the epoch is shown, without table version and commit time


@dataclass(frozen=True, slots=True)
class CheckpointList:
    """A page of checkpoints.

    `damaged` names what could not be read: versions, or a hole in the ledger. `lost` is set when the table holds no
    epoch and every listed checkpoint comes from the store.
    """

    checkpoints: list[dict[str, Json]] = field(default_factory=list)
    more: bool = False
    damaged: list[dict[str, Json]] = field(default_factory=list)
    lost: str | None = None


def load_checkpoints(
    pipeline: OpenPipeline,
    limit: int | None,
    store: CheckpointStore | None = None,
    *,
    before: int | None = None,
    undone: bool = False,
) -> CheckpointList:
    """Return the newest checkpoints, at most `limit`, all before the epoch `before`.

    With `undone`, also return checkpoints in the store that a later rollback, fresh start or restore superseded.
    """
    damaged: list[dict[str, Json]] = []
    head = pipeline.load()
    lost = find_lost(pipeline, head, store)
    restored, saved = _restores(pipeline), savepoint_epochs(pipeline)
    if lost is not None and store is not None:
        found_rows = _lost_rows(pipeline, store, before, damaged)
    else:
        found_rows = _rows(pipeline, head, limit, store, before, undone, damaged)
    if before is None and lost is None:
        found_rows = _with_unfinished(pipeline, head, found_rows)
    rows = ({**row, "is_savepoint": row["epoch"] in saved, "path": restored.get(row["epoch"])} for row in found_rows)
    if limit is None:
        return CheckpointList(list(rows), damaged=damaged, lost=lost)
    found = list(islice(rows, limit + 1))
    return CheckpointList(found[:limit], len(found) > limit, damaged, lost)


def describe_epoch(pipeline: OpenPipeline, view: EpochView) -> dict[str, Json]:
    """Return what `firnline checkpoints show` shows of an epoch, as JSON has it."""
    entry = view.ledger_entry
    sealed = view.checkpoint.to_json()
    positions = pipeline.sources.describe(view.checkpoint.positions)
    snapshots = snapshots_of(view.checkpoint)
    return {
        "pipeline": pipeline.options.name,
        "epoch": view.epoch,
        "kind": view.kind,
        "status": "COMPLETED",
        "is_savepoint": view.is_savepoint,
        "undone": view.undone,
        "checkpoint": sealed,
        "positions": {name: position.facts for name, position in positions.items()},
        "operators": [asdict(one) for one in snapshots],
        "entry": view.entry.to_json() if view.entry else None,
        "inputs": entry.count_read() if entry else None,
        "rescued": entry.rescued if entry else None,
        "sinks": [sink.to_json() for sink in view.sinks],
        "sizes": {
            "checkpoint_bytes": len(canonical(sealed)),
            "entry_bytes": len(entry.to_bytes()) if entry else None,
            "state_bytes": sum(one.size_bytes for one in snapshots),
        },
        "durations_ms": view.durations_ms,
        "copies": [copy.to_json() for copy in view.copies],
    }


def _restores(pipeline: OpenPipeline) -> dict[int, str]:
    """Return the epochs that a run resumed after, with the source of the checkpoint; the newest run counts."""
    runs = load_runs(pipeline.storage, pipeline.options.name)
    return {int(r["resumed_after"]): str(r["recovery_path"]) for r in reversed(runs) if r.get("recovery_path")}


def _with_unfinished(pipeline: OpenPipeline, head: Head, rows: Iterator[dict[str, Json]]) -> Iterator[dict[str, Json]]:
    """Yield the checkpoints together with failed and unfinished attempts, newest epoch first.

    A staged attempt that no commit names is in progress while its run is alive, and failed afterwards. The history of
    runs has the attempts that failed during a run, with the reason.
    """
    runs = load_runs(pipeline.storage, pipeline.options.name)
    alive = {str(run["run"]) for run in runs if run["status"] == "running" and not has_died(run)}
    unfinished = []
    for entry in pipeline.ledger.staged_after(head.epoch):
        row = _entry_row(pipeline, entry, None, f"0/{len(pipeline.sinks)}", None)
        if entry.checkpoint.run in alive:
            unfinished.append({**row, "status": "IN_PROGRESS", "reason": "staged, not committed yet"})
        else:
            unfinished.append({**row, "status": "FAILED", "reason": "its run ended before the commit"})
    for run in runs:
        for failed in run["last_restarts"]:
            if failed.get("epoch") is not None:
                unfinished.append(_failed_row(pipeline, run, failed))
    unfinished.sort(key=lambda row: (int(row["epoch"]), str(row["trigger_timestamp"])))
    for row in rows:
        while unfinished and unfinished[-1]["epoch"] > row["epoch"]:
            yield unfinished.pop()
        yield row
        while unfinished and unfinished[-1]["epoch"] == row["epoch"]:
            yield unfinished.pop()
    yield from (row for row in reversed(unfinished) if head.epoch == 0)


def _failed_row(pipeline: OpenPipeline, run: dict[str, Json], failed: dict[str, Json]) -> dict[str, Json]:
    """Return the row of a failed attempt that was repeated."""
    return {
        "id": None,
        "epoch": int(failed["epoch"]),
        "status": "FAILED",
        "is_savepoint": False,
        "trigger_timestamp": str(failed["at"]),
        "latest_ack_timestamp": None,
        "end_to_end_duration_ms": None,
        "checkpointed_size_bytes": None,
        "state_size_bytes": 0,
        "acknowledged": f"0/{len(pipeline.sinks)}",
        "path": None,
        "table_version": None,
        "kind": "epoch",
        "generation": run["generation"],
        "run": run["run"],
        "files": None,
        "rows": None,
        "quarantined": None,
        "rescued": None,
        "last_committed_file": None,
        "read_from": "runs",
        "undone": False,
        "reason": str(failed["reason"]),
    }


def _lost_rows(
    pipeline: OpenPipeline, store: CheckpointStore, before: int | None, damaged: list[dict[str, Json]]
) -> Iterator[dict[str, Json]]:
    """Yield rows from the store for a pipeline whose table is gone: no sink holds any of these epochs."""
    for version in _stored(store, pipeline.options.name, damaged):
        if before is None or _epoch(version) < before:
            yield _stored_row(pipeline, version, f"0/{len(pipeline.sinks)}")


def _rows(
    pipeline: OpenPipeline,
    head: Head,
    limit: int | None,
    store: CheckpointStore | None,
    before: int | None,
    undone: bool,
    damaged: list[dict[str, Json]],
) -> Iterator[dict[str, Json]]:
    reached = [head.epoch, *(sink.load().epoch for sink in pipeline.sinks[1:])]
    scanned = ALL_COMMITS if limit is None or before is not None else limit + COMMITS_BETWEEN
    commits = pipeline.deciding.commit_times(head.version, scanned) if head.exists else {}

    def acknowledged(epoch: int) -> str:
        return f"{sum(1 for e in reached if e >= epoch)}/{len(reached)}"

    def wanted(epoch: int) -> bool:
        return before is None or epoch < before

    stored = _stored(store, pipeline.options.name, damaged) if store is not None else iter(())
    waiting: Version | None = None
    oldest: int | None = None
    edits: list[LedgerEntry | Fold] = []
    for entry in _entries(pipeline, head, damaged, edits, go_on=store is not None):
        oldest = entry.epoch
        waiting = waiting or (next(stored, None) if undone else None)
        while waiting is not None and _epoch(waiting) >= entry.epoch:
            if wanted(_epoch(waiting)) and head.epoch >= _epoch(waiting) > entry.epoch:
                yield _undone_row(pipeline, waiting)
            waiting = next(stored, None)
        if wanted(entry.epoch):
            yield _entry_row(pipeline, entry, commits.get(entry.epoch), acknowledged(entry.epoch), head.committed)
    for version in stored if waiting is None else chain([waiting], stored):
        epoch = _epoch(version)
        if not wanted(epoch) or epoch > head.epoch or (oldest is not None and epoch >= oldest):
            continue
        if not any(link.supersedes(epoch) for link in edits):
            yield _stored_row(pipeline, version, acknowledged(epoch))
        elif undone:
            yield _undone_row(pipeline, version)


def _entries(
    pipeline: OpenPipeline, head: Head, damaged: list[dict[str, Json]], edits: list[LedgerEntry | Fold], *, go_on: bool
) -> Iterator[LedgerEntry]:
    """Yield the entries that are not folded yet. Behind a hole the store continues, if there is one.

    Links with history edits are put into `edits`, folded or not.
    """
    try:
        for link in pipeline.ledger.chain(head.entry):
            if isinstance(link, Fold):
                if link.edits:
                    edits.append(link)
                continue
            if link.is_history_edit:
                edits.append(link)
            yield link
    except LedgerHoleError as error:
        if not go_on:
            raise
        damaged.append({"version": None, "problem": error.message})


def _stored(store: CheckpointStore, pipeline: str, damaged: list[dict[str, Json]]) -> Iterator[Version]:
    """Yield the versions that still count, newest first. For an epoch that was put again, only the newest counts."""
    lowest: int | None = None
    for version in walk_versions(store, pipeline):
        if version.record is None:
            damaged.append({"version": version.version, "problem": version.problem})
        elif lowest is None or version.record.epoch < lowest:
            lowest = version.record.epoch
            yield version


def _epoch(version: Version) -> int:
    assert version.record is not None
    return version.record.epoch


def _entry_row(
    pipeline: OpenPipeline, entry: LedgerEntry, commit: tuple[int, str] | None, acknowledged: str, committed: int | None
) -> dict[str, Json]:
    """Return a checkpoint of the ledger. In a two-stage table it is in progress until it is in the log
    (`committed`)."""
    checkpoint = entry.checkpoint
    staged = entry.staged.get(pipeline.counted, [])
    waits = committed is not None and entry.epoch > committed
    return {
        "id": checkpoint.attempt,
        "epoch": entry.epoch,
        "status": "IN_PROGRESS" if waits else "COMPLETED",
        "is_savepoint": False,
        "trigger_timestamp": checkpoint.created_at,
        "latest_ack_timestamp": commit[1] if commit else None,
        "end_to_end_duration_ms": took_ms(entry.durations_ms),
        "checkpointed_size_bytes": len(canonical(checkpoint.to_json())),
        "state_size_bytes": state_bytes(checkpoint),
        "acknowledged": acknowledged,
        "path": None,  # the source of a restore; empty if no run resumed after the epoch
        "table_version": commit[0] if commit else None,
        "kind": entry.kind,
        "generation": checkpoint.generation,
        "run": checkpoint.run,
        "files": sum(entry.count_read().values()),
        "rows": sum(int(f["rows"]) for f in staged),
        "quarantined": sum(int(q["rows"]) for q in entry.quarantine),
        "rescued": sum(int(one["values"]) for one in entry.rescued),
        "last_committed_file": _mark(pipeline, checkpoint.positions),
        "read_from": "ledger",
        "undone": False,
        "reason": "staged, waits for the committer" if waits else None,
    }


def _stored_row(pipeline: OpenPipeline, version: Version, acknowledged: str) -> dict[str, Json]:
    assert version.record is not None
    record, checkpoint = version.record, version.record.checkpoint
    sink, counted = record.sinks.get(pipeline.deciding.name, {}), record.sinks.get(pipeline.counted, {})
    return {
        "id": checkpoint.attempt,
        "epoch": record.epoch,
        "status": "COMPLETED",
        "is_savepoint": False,
        "trigger_timestamp": checkpoint.created_at,
        "latest_ack_timestamp": version.created_at,
        "end_to_end_duration_ms": took_ms(record.durations_ms),
        "checkpointed_size_bytes": len(canonical(checkpoint.to_json())),
        "state_size_bytes": state_bytes(checkpoint),
        "acknowledged": acknowledged,
        "path": None,
        "table_version": sink.get("version"),
        "kind": record.kind,
        "generation": checkpoint.generation,
        "run": checkpoint.run,
        "files": None,  # not recorded
        "rows": counted.get("rows"),
        "quarantined": None,
        "rescued": None,
        "last_committed_file": _mark(pipeline, checkpoint.positions),
        "read_from": "store",
        "undone": False,
        "reason": None,
    }


def _undone_row(pipeline: OpenPipeline, version: Version) -> dict[str, Json]:
    return {**_stored_row(pipeline, version, f"0/{len(pipeline.sinks)}"), "undone": True}


def _mark(pipeline: OpenPipeline, positions: dict[str, Json]) -> str | None:
    source = pipeline.sources.only
    if source is None or source.name not in positions:
        return None
    return pipeline.sources.describe(positions)[source.name].last
