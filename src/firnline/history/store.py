"""The checkpoint store of a pipeline: compares it with the sink and the ledger, exports it, writes its audit trail."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from firnline.errors import (
    ConfigError,
    DamagedError,
    FirnlineError,
    LedgerHoleError,
    RollbackRefusedError,
    SinkError,
    StoreUnsafeError,
)
from firnline.history.savepoints.pins import load_pins
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.sinks.base import Head
from firnline.stores.archive import Manifest, Stored, write_archive
from firnline.stores.audit import AuditRecord, append_audit, audited, load_audit, make_record
from firnline.stores.base import CheckpointStore, encode
from firnline.stores.record import CheckpointRecord
from firnline.stores.transfer import Truth, stored_versions, walk_versions
from firnline.types import EntryRef, Json

T = TypeVar("T")


def find_store(pipeline: OpenPipeline) -> CheckpointStore | None:
    """Return the checkpoint store, opened read-only; None without one, or while a local one does not exist yet."""
    options = pipeline.options.checkpoint.store
    if options is None or options.type == "memory" or (options.path and not os.path.exists(options.path)):
        return None
    return _open(pipeline, read_only=True)


def read_with_store(
    pipeline: OpenPipeline, read: Callable[[CheckpointStore | None], T], warn: Callable[[str], None]
) -> T:
    """Call `read` with the checkpoint store, or with None if there is none, it is empty, or it cannot be read."""
    try:
        store = find_store(pipeline)
        if store is None:
            return read(None)
        with closing(store):
            return read(store)
    except (OSError, StoreUnsafeError, DamagedError) as error:
        result = read(None)  # raises again if the store was not the cause
        warn(f"the checkpoint store cannot be read, so the output comes from the table alone: {error}")
        return result


def load_audit_rows(pipeline: OpenPipeline, limit: int | None, before: int | None) -> AuditRows:
    """Return the audit trail as JSON has it, newest first, at most `limit` records before the version `before`.

    Raises:
        ConfigError: the spec names no store that outlives a process.
        SinkError: the store cannot be read.
    """
    check_store(pipeline)
    try:
        store = find_store(pipeline)
        if store is None:
            return AuditRows([], more=False, has_store=False)
        with closing(store):
            entries = load_audit(store, pipeline.options.name, None if limit is None else limit + 1, before)
    except OSError as error:
        options = pipeline.options.checkpoint.store
        location = (options.path or options.uri or options.type) if options is not None else ""
        raise SinkError(
            f"the checkpoint store ({location}) cannot be read: {error}",
            hint="Make it reachable, then try again: only the store holds the audit trail.",
        ) from error
    rows = [
        {"version": entry.version, **(entry.record.to_json() if entry.record else {}), "problem": entry.problem or None}
        for entry in entries[:limit]
    ]
    return AuditRows(rows, more=limit is not None and len(entries) > limit, has_store=True)


@dataclass(frozen=True, slots=True)
class AuditRows:
    """A page of the audit trail."""

    rows: list[dict[str, Json]]
    more: bool
    has_store: bool  # False: no run has made the store yet


def check_store(pipeline: OpenPipeline) -> None:
    """Raise ConfigError if the spec names no store that outlives a process."""
    options = pipeline.options.checkpoint.store
    if options is None or options.type == "memory":
        raise ConfigError(
            "this pipeline has no checkpoint store that outlives a process",
            hint="Set checkpoint.store in the spec, e.g. store: {type: file}.",
        )


def open_for_writing(pipeline: OpenPipeline) -> CheckpointStore:
    """Return the checkpoint store, opened for writing.

    Raises:
        ConfigError: the spec names none that outlives a process.
    """
    check_store(pipeline)
    return _open(pipeline)


def _open(pipeline: OpenPipeline, *, read_only: bool = False) -> CheckpointStore:
    from firnline.stores import open_store

    options = pipeline.options.checkpoint.store
    assert options is not None
    return open_store(options, held_by=pipeline.deciding.name, read_only=read_only)


def savepoint_epochs(pipeline: OpenPipeline) -> frozenset[int]:
    """Return the epochs that savepoints hold."""
    return frozenset(pin.epoch for pin in load_pins(pipeline.storage, pipeline.options.name) if pin.completed)


def load_truth(pipeline: OpenPipeline) -> Truth:
    """Return the deciding sink's head, to compare copies with it."""
    head = pipeline.load()
    entries: dict[int, EntryRef] = {}
    try:
        entries.update((ref.epoch, ref) for _, ref in pipeline.ledger.entries(head.entry))
    except LedgerHoleError:
        entries.clear()  # a broken chain is not compared, but the newest epoch is
    return Truth(
        epoch=head.epoch,
        entry=head.entry,
        # A record rebuilt from remaining data may differ in details.
        checkpoint_checksum=head.checkpoint.checksum if head.checkpoint and not head.repairs else "",
        entries=entries,
    )


def records_from_ledger(pipeline: OpenPipeline) -> Iterator[CheckpointRecord]:
    """Yield the records that a store would have for entries that are not folded yet, newest first."""
    for entry, ref in pipeline.ledger.entries(pipeline.load().entry):
        sinks = {
            name: {
                "rows": sum(int(f["rows"]) for f in files),
                "size_bytes": sum(int(f["size_bytes"]) for f in files),
            }
            for name, files in entry.staged.items()
        }
        yield CheckpointRecord(entry.checkpoint, ref, entry.kind, sinks, entry.durations_ms)


def find_lost(pipeline: OpenPipeline, head: Head, store: CheckpointStore | None) -> str | None:
    """Return the message for a table that lost epochs which the store has; None if nothing is lost."""
    if head.checkpoint is not None or head.epoch or store is None:
        return None
    records = (version.record for version in walk_versions(store, pipeline.options.name))
    epoch = next((record.epoch for record in records if record is not None), None)
    if epoch is None:
        return None
    root = pipeline.storage.root
    lost = f"{pipeline.decided_in} is gone: nothing is at {root}"
    if head.exists:
        lost = f"{root} knows nothing of {pipeline.options.name!r}"
    return f"{lost}, but the checkpoint store {store.place} holds epoch {epoch}"


def nothing_to_leave(pipeline: OpenPipeline, head: Head) -> RollbackRefusedError:
    """Return why a rollback is impossible: no run ever committed, or the table is gone."""
    lost = None
    with contextlib.suppress(OSError, FirnlineError):  # an unreadable store proves nothing
        store = find_store(pipeline)
        if store is not None:
            with closing(store):
                lost = find_lost(pipeline, head, store)
    if lost is None:
        return RollbackRefusedError("there is no epoch to go back from", hint="`firnline run` makes the first.")
    return RollbackRefusedError(
        f"there is no epoch to go back from: {lost}",
        hint="Bring the right table back, or restore a savepoint: firnline run --from-savepoint PATH",
    )


def export_checkpoints(pipeline: OpenPipeline, path: str, *, replace: bool = False) -> Manifest:
    """Write the archive, atomically.

    Raises:
        ConfigError: the file exists and must not be replaced.
        LedgerHoleError: there is no store, and the ledger's chain is broken.
    """
    store = find_store(pipeline)
    if store is None:
        return _write(pipeline, path, _from_ledger(pipeline), "ledger", [], replace)
    with closing(store):
        return export_store(pipeline, store, path, replace=replace)


def export_store(pipeline: OpenPipeline, store: CheckpointStore, path: str, *, replace: bool = False) -> Manifest:
    """Write the archive from an open store."""
    name = pipeline.options.name
    left_out: list[str] = []
    if not store.list_versions(name, limit=1):
        kept = (item for item in stored_versions(store, name, left_out) if item.part == "audit")
        return _write(pipeline, path, chain(_from_ledger(pipeline), kept), "ledger", left_out, replace)
    return _write(pipeline, path, stored_versions(store, name, left_out), store.kind, left_out, replace)


def _write(
    pipeline: OpenPipeline, path: str, versions: Iterator[Stored], origin: str, left_out: list[str], replace: bool
) -> Manifest:
    created_at = pipeline.clock.now().isoformat()
    return write_archive(
        path,
        versions,
        pipeline=pipeline.options.name,
        created_at=created_at,
        origin=origin,
        left_out=left_out,
        replace=replace,
    )


def _from_ledger(pipeline: OpenPipeline) -> Iterator[Stored]:
    """Yield versions numbered as in a store that existed since the oldest entry."""
    for number, record in enumerate(list(records_from_ledger(pipeline))[::-1], 1):
        data = encode(record.to_json(), CheckpointRecord.__name__)
        yield Stored("checkpoints", number, record.checkpoint.created_at, f"epoch {record.epoch}", data)


@contextlib.contextmanager
def on_record(
    pipeline: OpenPipeline, what: str, run: str, *, from_epoch: int | None, to_epoch: int | None, **details: Json
) -> Iterator[dict[str, Json]]:
    """Record the start and the end of an action; the caller puts details into the yielded mapping.

    Raises:
        SinkError: the trail cannot be written; then nothing is done.
    """
    options = pipeline.options.checkpoint.store
    if options is None or options.type == "memory":
        yield {}
        return
    begun = make_record(
        pipeline.options.name,
        what,
        run=run,
        from_epoch=from_epoch,
        to_epoch=to_epoch,
        details=details,
        clock=pipeline.clock,
        actor=pipeline.actor,
    )
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(contextlib.closing(open_for_writing(pipeline)))
            found = stack.enter_context(audited(store, begun, pipeline.clock))
        except OSError as error:
            raise SinkError(
                f"the audit trail cannot be written: {error}",
                hint="Make the checkpoint store reachable, then try again; nothing was changed.",
            ) from error
        yield found


def record_end(pipeline: OpenPipeline, begun: AuditRecord) -> None:
    """Record the end of an action that was done, and whose process was killed before it could.

    Raises:
        OSError: the store cannot be written.
    """
    details = {**begun.details, **({"ended_by": pipeline.actor.name} if pipeline.actor else {})}
    ended = replace(begun, id=pipeline.ids.new(), at=pipeline.clock.now().isoformat(), outcome="done", details=details)
    with closing(open_for_writing(pipeline)) as store:
        append_audit(store, ended, pipeline.clock)


@contextlib.contextmanager
def deletion_on_record(options: PipelineOptions | None, what: str, **details: Json) -> Iterator[dict[str, Json]]:
    """Record a deletion; without a pipeline there is no audit trail to write to.

    Raises:
        SinkError: the trail cannot be written; then nothing is deleted.
    """
    if options is None:
        yield {}
        return
    with on_record(open_pipeline(options), what, "", from_epoch=None, to_epoch=None, **details) as found:
        yield found
