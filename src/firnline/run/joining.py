"""History edits (rollback, fresh start, restore, rescale and so on): builds their entries, checks whether each sink can
apply them, decides them, and applies them to every sink.

"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import pyarrow as pa

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import (
    CheckpointError,
    CommitConflictError,
    LedgerHoleError,
    RollbackRefusedError,
    SinkDivergedError,
    SinkError,
)
from firnline.names import JOURNAL
from firnline.run.commits import bring_staged, entry_commit, name_in
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_from_json, schema_to_json
from firnline.sinks.base import (
    Effect,
    GoesBack,
    Head,
    KeepRows,
    ReplaceRows,
    RestoreVersion,
    RunTasks,
    Sink,
    SinkReturn,
)
from firnline.sinks.known import after_going_back, name_then
from firnline.topology.records import remember
from firnline.types import EntryRef, Json

logger = logging.getLogger(__name__)


def edit_checkpoint(
    pipeline: OpenPipeline,
    base: Checkpoint,
    held: Checkpoint | None,
    *,
    epoch: int,
    generation: int,
    run: str,
    kept: Mapping[str, int] | None = None,
) -> Checkpoint:
    """Return the checkpoint of a history edit: state and positions of `base` under a new epoch. The floor never
    decreases. `kept` says which epochs followers keep, see `after_going_back`."""
    version = max(base.schema_version, held.schema_version if held else 0)
    if held is not None and held.schema_fingerprint != base.schema_fingerprint:
        version += 1
    return replace(
        base,
        epoch=epoch,
        generation=generation,
        run=run,
        attempt=pipeline.ids.new(),
        created_at=pipeline.clock.now().isoformat(),
        schema_version=version,
        floor=max(base.floor, held.floor if held else 0),
        deciding=pipeline.deciding.identity,
        sinks=after_going_back(held.sinks, base.epoch, epoch, kept) if held else base.sinks,
        topology=remember({**base.topology, **(held.topology if held else {})}, (), epoch),
    )


def committed_columns(pipeline: OpenPipeline) -> list[dict[str, Json]]:
    """Return the current columns of the deciding sink, in the form of a ledger entry."""
    return schema_to_json(pipeline.deciding.find_committed_schema() or pa.schema([]))


def no_columns(pipeline: OpenPipeline) -> dict[str, list[dict[str, Json]]]:
    """Return the columns that an epoch without rows of their own gives the sinks which do not decide: none."""
    return {sink.name: [] for sink in pipeline.sinks if sink is not pipeline.deciding}


def find_effect(sink: Sink, entry: LedgerEntry, holds: int) -> Effect:
    """Return the effect of a history edit on the rows of a sink that holds epoch `holds`.

    Raises:
        RollbackRefusedError: the sink cannot go back to that epoch.
    """
    match entry.kind:
        case "restore" if sink.capabilities.fed_from_outbox:  # a savepoint has no rows of followers
            return KeepRows()
        case "fresh":
            return ReplaceRows() if entry.edit["truncate"] else KeepRows()
        case "restore":
            version = entry.edit["versions"].get(sink.name)
            if version is None and sink.name not in entry.staged:
                raise RollbackRefusedError(
                    f"sink {sink.name!r} holds epochs that a restore undid, and the savepoint does not have its table",
                    hint="Give the sink another name and another table, which begins as a new one.",
                )
            return ReplaceRows(tuple(entry.staged[sink.name])) if version is None else RestoreVersion(int(version))
        case "rescale" | "import" | "repair" | "position" | "recover" | "epoch":
            return KeepRows()
    to = int(entry.edit["to_epoch"])
    names = {sink.name, name_then(entry.checkpoint, sink.former_name or sink.name)}
    if holds <= to or not names.isdisjoint(entry.edit.get("left", [])) or sink.name == JOURNAL:
        return KeepRows()
    return RestoreVersion(sink.version_of(to))


NAMED = 3  # examples in a message


def plan_sink(
    sink: Sink, to: int, *, left: bool, accept: Collection[str]
) -> tuple[SinkReturn, list[RollbackRefusedError]]:
    """Plan the rollback of one sink to an epoch, at the sink's current version. Writes nothing."""
    try:
        fence = sink.read_fence()
    except SinkError as error:
        problem = RollbackRefusedError(
            f"{sink.name} cannot be read: {error.message}",
            hint=f"Repair it, or leave its rows as they are: --leave {sink.name}",
        )
        return SinkReturn(sink.name, sink.uri, 0, None, left=left), [] if left else [problem]
    if left or max(fence.epoch, fence.partial) <= to:
        version = fence.version if fence.exists else None
        return SinkReturn(sink.name, sink.uri, fence.epoch, version, left=left), []
    return sink.plan_return(to, accept)


def check_replaceable(sinks: Iterable[Sink]) -> None:
    """Refuse an edit that replaces rows, before anything is claimed, if a sink cannot remove rows.

    Raises:
        RollbackRefusedError: it names the sinks.
    """
    fixed = [sink.name for sink in sinks if sink.capabilities.goes_back is GoesBack.NOT_AT_ALL]
    if fixed:
        raise RollbackRefusedError(
            f"{', '.join(fixed)} cannot take rows back",
            hint="Keep the rows, or take that sink out of the spec.",
            sinks=fixed,
        )


def check_restored(sink: Sink, entry: LedgerEntry, deciding: str) -> int:
    """Check whether a further sink can apply a restore. Returns the sink version that was checked.

    The version is -1 without a table: if another writer creates the table meanwhile, it is checked first.

    Raises:
        RollbackRefusedError: others changed rows since the restore was planned, or files that it needs are gone.
    """
    edit = entry.edit
    to, again = int(edit["to_epoch"]), f"firnline run --from-savepoint {edit['path']}"
    leave = f"Or take {sink.name} out of the spec."
    if deciding in edit["versions"] and entry.checkpoint.floor <= to:
        leave = f"Or leave it as it is: firnline rollback --to {to} --leave {sink.name}"
    version = sink.read_fence().version  # before the checks: whoever commits meanwhile makes the commit onto it fail
    check_unchanged(sink, entry, edit.get("accepted", []), f"{again}{{flags}}. {leave}")
    missing = find_lacking(sink, entry)
    if missing:
        raise RollbackRefusedError(
            f"{sink.name} cannot follow the restore to epoch {to}: {len(missing)} file(s) that it needs are gone:"
            f" {', '.join(missing[:NAMED])}",
            hint=f"Restore once more, with copies of them: {again}. {leave}",
        )
    return version


def check_unchanged(sink: Sink, entry: LedgerEntry, accept: Collection[str], way_out: str) -> None:
    """Refuse if others changed rows of a sink since a restore was planned; `way_out` takes `{flags}`.

    An old entry without the time of its plan is not checked.
    """
    planned_at = entry.edit.get("planned_at", {}).get(sink.name)
    if planned_at is None:
        return
    try:
        strangers = [s for s in sink.find_strangers(int(planned_at)) if s.name not in accept]
    except RollbackRefusedError as error:
        raise RollbackRefusedError(f"{sink.name}: {error.message}", hint=way_out.replace("{flags}", "")) from error
    if strangers:
        names = ", ".join(f"{s.name} (version {', '.join(map(str, s.versions[:NAMED]))})" for s in strangers)
        flags = "".join(f" --accept {s.name}" for s in strangers)
        raise RollbackRefusedError(
            f"{sink.name}: others changed rows since the restore was planned, and they would be lost: {names}",
            hint="If they may be lost: " + way_out.replace("{flags}", flags),
        )


def find_lacking(sink: Sink, entry: LedgerEntry) -> list[str]:
    """Return the files that a restore needs in a sink and that are gone."""
    return sink.find_missing(find_effect(sink, entry, entry.epoch))


TRIES = 20


# -- the other sinks ----------------------------------------------------------------------------------


def join_sink(
    pipeline: OpenPipeline,
    sink: Sink,
    run: str,
    generation: int,
    tip: EntryRef | None,
    goes_on_from: EntryRef | None,
    run_tasks: RunTasks | None = None,
    begins: EntryRef | None = None,
) -> int:
    """Register our generation in a further sink and apply the history edits that it lacks. Returns its epoch
    afterwards.

    A staged sink adopts only pending units on the history down from `goes_on_from`. A sink without a head begins after
    the epoch of `begins`, if it is given.

    Raises:
        SinkDivergedError: the sink holds an epoch that is not on the decided chain; epoch numbers alone prove nothing.
        LedgerHoleError: the ledger no longer has the epochs that the sink lacks.
    """

    def decided(epoch: int) -> set[int]:
        return {short_number(ref.checksum) for _, ref in ahead_of(pipeline, goes_on_from, epoch, sink.name)}

    held = sink.claim(run, generation=generation, baseline=begins, decided=decided)
    if tip is None:
        return held.epoch
    if held.epoch < tip.epoch:
        settle_edits(pipeline, sink, tip, run_tasks)
        held = sink.load()
    prove_on_chain(pipeline, sink.name, held, tip)
    return held.epoch


def prove_on_chain(pipeline: OpenPipeline, name: str, held: Head, tip: EntryRef) -> None:
    """Compare the newest entry of a further sink, by checksum, with the entry of its epoch on the chain down from
    `tip`.

    Raises:
        SinkDivergedError: the entries differ, or the sink is beyond the tip.
        LedgerHoleError: the ledger lacks entries between the two.
    """
    if held.epoch == 0 or held.entry is None:
        return
    decided: EntryRef | None = tip
    if held.epoch < tip.epoch:
        above = next(iter(ahead_of(pipeline, tip, held.epoch, name)))[0]
        decided = above.previous
    if decided is None or (decided.epoch, short_number(decided.checksum)) != (
        held.epoch,
        short_number(held.entry.checksum),
    ):
        raise SinkDivergedError(
            f"sink {name!r} holds an epoch {held.epoch} that {pipeline.deciding.name!r}, "
            f"which decides, never committed",
            hint=f"Restore a savepoint (firnline run --from-savepoint PATH), or take {name!r} out of the spec: the "
            "others go on.",
            sink=name,
            epoch=held.epoch,
        )


def settle_edits(pipeline: OpenPipeline, sink: Sink, tip: EntryRef | None, run_tasks: RunTasks | None = None) -> int:
    """Apply every history edit that a claimed sink lacks. Returns the sink's epoch afterwards.

    Epochs before an edit are committed on the way. Epochs after it follow as ordinary commits.

    Raises:
        RollbackRefusedError: the sink cannot go back to the epoch of the edit; the message says why.
        SinkError: the sink waits for its committer.
        LedgerHoleError: the ledger no longer has the epochs that the sink lacks.
    """
    before = -1
    for _ in range(TRIES * TRIES):
        fence = sink.read_fence()
        epoch = fence.epoch
        ahead = list(ahead_of(pipeline, tip, epoch, sink.name))
        if not sink.capabilities.fed_from_outbox:
            ahead = _since_restore(ahead)
        at = next((n for n, (entry, _) in enumerate(ahead) if entry.is_history_edit), None)
        if at is None:
            return epoch
        entry, ref = ahead[0]
        schema = schema_from_json(_columns_for(entry, sink))
        if at > 0:  # an epoch before the edit that this sink still lacks
            if epoch == before:
                raise SinkError(f"{sink.name} waits for its committer, which has not committed epoch {epoch + 1} yet")
            before = epoch
            staged = bring_staged(pipeline, sink, entry)
            sink.commit(entry_commit(pipeline, sink, entry, ref, schema, staged), run_tasks)
            continue
        onto = _find_held(pipeline, entry, epoch, fence.digest)
        version = _check_return(pipeline, sink, entry, max(epoch, fence.partial))
        try:
            commit = entry_commit(pipeline, sink, entry, ref, schema)
            sink.edit(commit, find_effect(sink, entry, max(epoch, fence.partial)), onto, version)
        except CommitConflictError:
            continue  # another writer committed after the check
    raise SinkError(f"{sink.name}: gave up after {TRIES * TRIES} conflicts with other writers")


def _columns_for(entry: LedgerEntry, sink: Sink) -> list[dict[str, Json]]:
    """Return the columns that an entry gives a sink which does not decide. A history edit gives it none, unless it
    restores rows: those in the entry are of the sink that decides."""
    if entry.is_history_edit and entry.kind != "restore":
        return []
    restored: dict[str, list[dict[str, Json]]] = entry.edit.get("schemas", {})
    return restored.get(sink.name, entry.schema_of(name_in(entry, sink) or sink.name))


def _check_return(pipeline: OpenPipeline, sink: Sink, entry: LedgerEntry, holds: int) -> int | None:
    """Check, as the edit did, whether this sink can apply it. Returns the sink version that was checked."""
    if entry.kind == "restore" and not sink.capabilities.fed_from_outbox:
        return check_restored(sink, entry, pipeline.deciding.name)
    if entry.kind != "rollback" or not isinstance(find_effect(sink, entry, holds), RestoreVersion):
        return None
    to = int(entry.edit["to_epoch"])
    plan, problems = plan_sink(sink, to, left=False, accept=entry.edit.get("accepted", []))
    if problems:
        raise RollbackRefusedError(
            f"{sink.name} cannot follow the rollback to epoch {to}: {'; '.join(p.message for p in problems)}",
            hint=f"Go back once more and leave it as it is: firnline rollback --to {to} --leave {sink.name}",
        )
    return plan.version_now


def ahead_of(
    pipeline: OpenPipeline, tip: EntryRef | None, epoch: int, sink: str
) -> Iterator[tuple[LedgerEntry, EntryRef]]:
    """Return the entries on the chain down from `tip` that are newer than a sink's epoch, oldest first.

    They are consecutive. Only entries below a restore may be left out, because a restore replaces all rows of a table.

    Raises:
        LedgerHoleError: some entries are lost or folded; it names the sink and the epochs.
    """
    found: list[tuple[LedgerEntry, EntryRef]] = []
    if tip is None or tip.epoch <= epoch:
        return iter(found)
    cause: LedgerHoleError | None = None
    try:
        for entry, ref in pipeline.ledger.entries(tip):
            found.append((entry, ref))
            if entry.previous is None or entry.previous.epoch <= epoch:
                return reversed(found)
    except LedgerHoleError as error:
        cause = error
    replaced = any(entry.kind == "restore" for entry, _ in found)
    if replaced and not pipeline.sink(sink).capabilities.fed_from_outbox:
        return reversed(found)
    untold = found[-1][0].previous if found else tip
    assert untold is not None
    raise _untold_error(pipeline, sink, epoch, untold, cause) from cause


def _untold_error(
    pipeline: OpenPipeline, sink: str, epoch: int, newest: EntryRef, cause: LedgerHoleError | None
) -> LedgerHoleError:
    """Return the error for a sink at `epoch` that lacks epochs up to `newest` which the ledger no longer has."""
    lacks = f"epoch {newest.epoch}" if newest.epoch == epoch + 1 else f"epochs {epoch + 1} to {newest.epoch}"
    reason = cause.message if cause else f"ledger entry {newest.name} is lost or folded"
    return LedgerHoleError(
        f"sink {sink!r} holds epoch {epoch} and cannot be given {lacks}: {reason}",
        hint=f"Bring that entry back from a copy: firnline ledger repair --from COPY, or, if the ledger was repaired "
        f"since, put the file into {pipeline.storage.root}/{pipeline.ledger.folder}. Without a copy set "
        f"`required: false` for {sink!r}, or take it out of the spec: the others go on, and it stays behind.",
        sink=sink,
        epoch=newest.epoch,
    )


def _since_restore(ahead: list[tuple[LedgerEntry, EntryRef]]) -> list[tuple[LedgerEntry, EntryRef]]:
    """Return the entries from the last restore on: a restore replaces all rows, so earlier entries are not needed."""
    last = max((n for n, (entry, _) in enumerate(ahead) if entry.kind == "restore"), default=0)
    return ahead[last:]


def _find_held(pipeline: OpenPipeline, edit: LedgerEntry, epoch: int, digest: int | None) -> EntryRef | None:
    """Return the entry of a sink's head, proven to be on the history that the edit leaves or continues from."""
    if epoch == 0:
        return None
    for start in (edit.previous, edit.onto):
        found = find_in_history(pipeline, start, epoch, digest)
        if found is not None:
            return found
    if edit.kind == "restore" and digest is not None:  # the edit replaces all rows; the epoch is enough for the fence
        return EntryRef(epoch, "", f"{digest << 1:016x}")
    if edit.kind == "recover":
        for value in edit.edit["carried"].values():
            carried = EntryRef.from_json(value)
            if (carried.epoch, short_number(carried.checksum)) == (epoch, digest):
                return carried
    raise CheckpointError(f"a sink holds an epoch {epoch} that the ledger does not know", epoch=epoch)


def find_in_history(pipeline: OpenPipeline, start: EntryRef | None, epoch: int, digest: int | None) -> EntryRef | None:
    """Find an entry by epoch and digest, on the chain down from `start` and on those that its history edits left."""
    left = []
    try:
        for entry, ref in pipeline.ledger.entries(start):
            if ref.epoch < epoch:
                break
            if ref.epoch == epoch and short_number(ref.checksum) == digest:
                return ref
            if entry.is_history_edit:
                left.append(entry.onto)
    except LedgerHoleError:
        pass  # abandoned entries are swept in time; a sink is never behind the floor
    return next((found for one in left if (found := find_in_history(pipeline, one, epoch, digest)) is not None), None)
