"""Decides history edits (rollback, fresh start, restore, rescale, import) and brings every sink through them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.errors import (
    CheckpointError,
    CommitConflictError,
    FencedError,
    FirnlineError,
    LedgerHoleError,
    RollbackRefusedError,
    SinkDivergedError,
    SinkError,
)
from firnline.run.commits import bring_staged, entry_commit, new_sink_error
from firnline.run.edit_entries import (
    find_effect,
)
from firnline.run.open_pipeline import OpenPipeline
from firnline.run.rollback_sinks import check_restored, plan_sink
from firnline.schema import schema_from_json
from firnline.sinks.base import Head, RestoreVersion, RunTasks, Sink
from firnline.types import EntryRef, Receipt

logger = logging.getLogger(__name__)


TRIES = 20

Look = Callable[[int], tuple[LedgerEntry, Head]]


def perform_edit(
    pipeline: OpenPipeline,
    run: str,
    look: Look,
    tell: Callable[[str], None] = lambda _: None,
    *,
    generation: int | None = None,
    goes_on_from: EntryRef | None = None,
    leave: Collection[str] = (),
    replaces: bool = False,
) -> Receipt:
    """Claim a generation everywhere, decide a history edit in the deciding sink, and bring every other sink through it.

    The claims come first: they fence an active run before anything is checked. `look` is given the generation. It
    checks everything under the current version of the deciding sink, and returns the entry to commit and the committed
    head of that sink. When the sink moves before the commit, both are done again. Once the edit is decided, nothing
    fails any more: a sink that cannot follow now does so when the next run joins it. An optional sink holds up no
    edit when the ledger no longer tells the epochs that it lacks.

    Args:
        generation: Only given for a deciding sink that does not exist yet.
        goes_on_from: The entry that the history goes on from; a staged sink adopts no pending units beyond it.
        leave: Sinks that need not be reached now.
        replaces: Whatever a sink holds is replaced: it need not be brought in sync first.

    Raises:
        FencedError: another run took over meanwhile.
        SinkError: a sink cannot be claimed; nothing is decided.
        LedgerHoleError: the ledger does not tell what a required sink lacks; nothing is decided.
    """
    deciding = pipeline.deciding
    held = deciding.claim(run, generation=generation)
    generation = held.generation
    tell(f"claimed generation {generation}")
    for sink in pipeline.sinks[1:]:
        try:
            join_sink(pipeline, sink, run, generation, None if replaces else held.entry, goes_on_from)
        except (SinkError, RollbackRefusedError, SinkDivergedError, LedgerHoleError) as error:
            is_untold = isinstance(error, LedgerHoleError) and not sink.required
            if sink.name not in leave and not is_untold:
                raise
            tell(f"{sink.name} is left as it is: {error.message}")
    ref, receipt = _decide(pipeline, look, generation)
    tell(f"{deciding.name} stands at epoch {receipt.epoch}, version {receipt.version}")
    for sink in pipeline.sinks[1:]:
        try:
            tell(f"{sink.name} stands at epoch {settle_edits(pipeline, sink, ref)}")
        except LedgerHoleError as error:
            logger.warning("sink stays behind", extra={"sink": sink.name, "reason": error.message})
            tell(f"{sink.name} stays behind: {error.message}. {error.hint}")
        except (SinkError, CheckpointError, OSError) as error:
            logger.warning("sink follows later", extra={"sink": sink.name, "reason": str(error)})
            tell(f"{sink.name} follows when the next run joins it: {error}")
    _record(pipeline)
    return receipt


def _decide(pipeline: OpenPipeline, look: Look, generation: int) -> tuple[EntryRef, Receipt]:
    deciding = pipeline.deciding
    for _ in range(TRIES):
        entry, committed = look(generation)
        if committed.exists and committed.generation != generation:
            raise FencedError("another run took over while this one looked")
        ref = pipeline.ledger.stage(entry)
        as_it_is = committed.exists and entry.kind != "restore"
        schema = deciding.find_committed_schema() if as_it_is else None
        if schema is None:
            schema = schema_from_json(entry.schema)
        commit = entry_commit(pipeline, deciding, entry, ref, schema)
        effect = find_effect(deciding, entry, committed.epoch)
        try:
            version = committed.version if committed.exists else None
            return ref, deciding.edit(commit, effect, committed.entry, version)
        except CommitConflictError:
            continue
    raise SinkError(f"{deciding.name}: gave up after {TRIES} conflicts with other writers; try again")


def _record(pipeline: OpenPipeline) -> None:
    """Bring store and tiers in sync with the edit; if that fails now, the next run does it when it starts."""
    try:
        pipeline.recorder.look()
        pipeline.recorder.begin(pipeline.deciding.load())
    except (FirnlineError, OSError) as error:
        logger.warning("history edit not recorded in the store yet", extra={"reason": str(error)})
    finally:
        pipeline.recorder.close(drain=True)


# -- the other sinks ----------------------------------------------------------------------------------


def check_new_sinks(pipeline: OpenPipeline, tip: EntryRef | None, epochs: Mapping[str, int]) -> None:
    """Refuse a sink that was added to a pipeline with history: it would lack the rows made before it.

    Where a hole of the ledger hides the beginning nobody can tell a new sink from one that lags; its join fails then.

    Raises:
        ConfigError: it names the sink.
    """
    for name, epoch in epochs.items():
        if tip is None or tip.epoch == 0 or epoch or name == pipeline.deciding.name:
            continue
        try:
            first = _find_first(pipeline, tip)
        except LedgerHoleError as error:
            logger.warning("sink may be new", extra={"sink": name, "reason": error.message})
            continue
        if first is None or (first.kind != "fresh" and name not in first.staged):
            raise new_sink_error(name)


def _find_first(pipeline: OpenPipeline, tip: EntryRef) -> LedgerEntry | None:
    """The newest entry that gives a sink all its rows; None when it is folded. LedgerHoleError when a hole hides it."""
    for link in pipeline.ledger.chain(tip):
        if isinstance(link, Fold):
            if link.is_bridge:
                raise LedgerHoleError(f"ledger entry {link.last.name} is lost", epoch=link.last.epoch)
            return None
        if link.epoch == 1 or link.kind in ("restore", "fresh"):
            return link
    return None


def join_sink(
    pipeline: OpenPipeline,
    sink: Sink,
    run: str,
    generation: int,
    tip: EntryRef | None,
    goes_on_from: EntryRef | None,
    run_tasks: RunTasks | None = None,
) -> int:
    """Register our generation in a further sink and bring it through the history edits that it lacks.

    Returns the epoch that it holds then.

    A staged sink adopts only such pending units as lie on the history down from `goes_on_from`.

    Raises:
        SinkDivergedError: it holds an epoch that does not lie on the decided chain. Numbers prove nothing here.
        LedgerHoleError: the ledger does not tell any more what it lacks.
    """

    def decided(epoch: int) -> set[int]:
        return {short_number(ref.checksum) for _, ref in ahead_of(pipeline, goes_on_from, epoch, sink.name)}

    held = sink.claim(run, generation=generation, decided=decided)
    if tip is None:
        return held.epoch
    if held.epoch < tip.epoch:
        settle_edits(pipeline, sink, tip, run_tasks)
        held = sink.load()
    prove_on_chain(pipeline, sink.name, held, tip)
    return held.epoch


def prove_on_chain(pipeline: OpenPipeline, name: str, held: Head, tip: EntryRef) -> None:
    """Compare the newest entry of a further sink, by checksum, with the one of its epoch on the chain down from `tip`.

    Raises:
        SinkDivergedError: it is another one, or lies beyond the tip.
        LedgerHoleError: the ledger does not tell what lies between the two.
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
            hint=f"Restore {name!r} from a savepoint (firnline restore), or take it out of the spec: the others go on.",
            sink=name,
            epoch=held.epoch,
        )


def settle_edits(pipeline: OpenPipeline, sink: Sink, tip: EntryRef | None, run_tasks: RunTasks | None = None) -> int:
    """Bring a sink that was claimed through every history edit on the true chain that it lacks; returns its epoch then.

    Epochs before an edit are committed on the way; those after it follow in their own time.

    Raises:
        RollbackRefusedError: it cannot go back to where the edit went; the message says why.
        SinkError: it waits for its committer.
        LedgerHoleError: the ledger does not tell any more what it lacks.
    """
    before = -1
    for _ in range(TRIES * TRIES):
        fence = sink.read_fence()
        epoch = fence.epoch
        ahead = _since_restore(list(ahead_of(pipeline, tip, epoch, sink.name)))
        at = next((n for n, (entry, _) in enumerate(ahead) if entry.is_jump), None)
        if at is None:
            return epoch
        entry, ref = ahead[0]
        columns = entry.jump.get("schemas", {}).get(sink.name, entry.schema_of(sink.name))
        commit = entry_commit(pipeline, sink, entry, ref, schema_from_json(columns))
        if at > 0:  # an epoch before the edit that this sink still lacks
            if epoch == before:
                raise SinkError(f"{sink.name} waits for its committer, which has not committed epoch {epoch + 1} yet")
            before = epoch
            bring_staged(pipeline, sink, entry)
            sink.commit(commit, run_tasks)
            continue
        onto = _find_held(pipeline, entry, epoch, fence.digest)
        version = _check_return(pipeline, sink, entry, epoch)
        try:
            sink.edit(commit, find_effect(sink, entry, epoch), onto, version)
        except CommitConflictError:
            continue  # somebody wrote since it was looked at
    raise SinkError(f"{sink.name}: gave up after {TRIES * TRIES} conflicts with other writers")


def _check_return(pipeline: OpenPipeline, sink: Sink, entry: LedgerEntry, holds: int) -> int | None:
    """Check, as the edit did, whether this sink can follow it; returns the version that this was found under."""
    if entry.kind == "restore":
        return check_restored(sink, entry, pipeline.deciding.name)
    if entry.kind != "rollback" or not isinstance(find_effect(sink, entry, holds), RestoreVersion):
        return None
    to = int(entry.jump["to_epoch"])
    plan, problems = plan_sink(sink, to, left=False, accept=entry.jump.get("accepted", []))
    if problems:
        raise RollbackRefusedError(
            f"{sink.name} cannot follow the rollback to epoch {to}: {'; '.join(p.message for p in problems)}",
            hint=f"Go back once more and leave it as it is: firnline rollback --to {to} --leave {sink.name}",
        )
    return plan.version_now


def ahead_of(
    pipeline: OpenPipeline, tip: EntryRef | None, epoch: int, sink: str
) -> Iterator[tuple[LedgerEntry, EntryRef]]:
    """The entries of the chain down from `tip` that lie above the epoch of a sink, oldest first; no other one is read.

    They follow on one another without a gap; only below a restore, which replaces all rows, some may be left out.

    Raises:
        LedgerHoleError: some of them are lost or folded; it names the sink and the epochs.
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
    if any(entry.kind == "restore" for entry, _ in found):
        return reversed(found)
    untold = found[-1][0].previous if found else tip
    assert untold is not None
    raise _untold_error(pipeline, sink, epoch, untold, cause) from cause


def _untold_error(
    pipeline: OpenPipeline, sink: str, epoch: int, newest: EntryRef, cause: LedgerHoleError | None
) -> LedgerHoleError:
    """A sink that holds `epoch` lacks those up to the one that `newest` names, and the ledger does not tell them."""
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
    """From the last restore on: it replaces all rows, so what came before is not needed, and may not be here."""
    last = max((n for n, (entry, _) in enumerate(ahead) if entry.kind == "restore"), default=0)
    return ahead[last:]


def _find_held(pipeline: OpenPipeline, edit: LedgerEntry, epoch: int, digest: int | None) -> EntryRef | None:
    """The entry that a sink holds, proven to lie on the history that the edit leaves or goes on from."""
    if epoch == 0:
        return None
    for start in (edit.previous, edit.onto):
        found = _search(pipeline, start, epoch, digest)
        if found is not None:
            return found
    if edit.kind == "restore" and digest is not None:  # whatever it holds is replaced; enough is known for the fence
        return EntryRef(epoch, "", f"{digest << 1:016x}")
    raise CheckpointError(f"a sink holds an epoch {epoch} that the ledger does not know", epoch=epoch)


def _search(pipeline: OpenPipeline, start: EntryRef | None, epoch: int, digest: int | None) -> EntryRef | None:
    """An entry by epoch and digest, down a chain and down the chains that its history edits left."""
    left = []
    try:
        for entry, ref in pipeline.ledger.entries(start):
            if ref.epoch < epoch:
                break
            if ref.epoch == epoch and short_number(ref.checksum) == digest:
                return ref
            if entry.is_jump:
                left.append(entry.onto)
    except LedgerHoleError:
        pass  # what was left behind is swept in time; a sink is never behind the floor
    return next((found for one in left if (found := _search(pipeline, one, epoch, digest)) is not None), None)
