"""Restores a savepoint, into the tables that it was made of or into others: one epoch, decided like any other.

In this order:
1. Check the savepoint and every sink; refuse while nothing has changed.
2. Put operator state into the pipeline's home. Nothing names it yet.
3. Claim a generation in the deciding sink: from here on no other run commits.
4. Make the files available: a version that the log still has, or copies under names of their own.
5. Copy the ledger chain beside the table's own.
6. Stage one ledger entry with all of this, and commit it in the deciding sink.
7. Apply it to every other sink. After a kill, the next run does that when it joins the sink.
A repeated restore finds its entry in the true history and does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from firnline.checkpoint.ledger import Fold, LedgerEntry
from firnline.errors import DamagedError, FirnlineError, LedgerHoleError, RollbackRefusedError, SourceMovedError
from firnline.history.edits.restore_plan import Copies, SinkRestore, check_others, copy_ledger, plan_sink
from firnline.history.savepoints.catalog import load_savepoint
from firnline.history.savepoints.files import Progress
from firnline.history.savepoints.format import kept_bytes, read_saved
from firnline.history.savepoints.state import SavedStateSource
from firnline.history.store import on_record
from firnline.maintenance.survey import is_inside
from firnline.run.edits import perform_edit
from firnline.run.followers import check_owner, join
from firnline.run.joining import check_restored, check_unchanged, edit_checkpoint, find_lacking
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head, Sink
from firnline.sinks.delta.sink import as_delta
from firnline.sinks.known import KnownSink
from firnline.storage import normalise, open_storage
from firnline.stores.tiers import NewestCopy
from firnline.types import Json

NAMED = 3
_CREDENTIALS = re.compile(r"(?<=://)[^/@]+@")


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore. `epoch` is the pipeline's epoch now, `to_epoch` the savepoint's."""

    savepoint: str
    path: str
    from_epoch: int
    to_epoch: int
    epoch: int
    already: bool = False
    files: int = 0
    rows: int = 0
    copied_bytes: int = 0
    state_bytes: int = 0  # size of operator state; bytes of it copied
    state_copied_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


def restore_savepoint(
    pipeline: OpenPipeline,
    path: str,
    run: str,
    storage_options: dict[str, str] | None = None,
    *,
    accept: Collection[str] = (),
    positions: Mapping[str, Json] | None = None,
    filled: Collection[str] = (),
    report: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Restored:
    """Take the pipeline to the epoch of a savepoint. The savepoint is only read.

    Args:
        path: The savepoint's folder or URI.
        accept: Other pipelines and programs whose rows in the tables may be lost.
        positions: Positions of sources that are not those of the checkpoint, because their tables were built anew. Then
            the pipeline is a new one, and no member of the old topology: its followers begin after the restore.
        filled: Followers of a new pipeline whose targets have what the savepoint has for them.
        report: Called with each step, for display.
        stopping: Called before each file is copied. If it returns True, KeyboardInterrupt is raised, with nothing
            decided.

    Raises:
        ConfigError: there is no savepoint.
        DamagedError: the savepoint, or a file of it, differs from what was saved.
        RollbackRefusedError: it does not fit this pipeline, files are gone, or rows of others would be lost; nothing
            changed.
        SourceMovedError: it was made on another source root, and the options do not say that the files moved.
        FencedError: another run took over meanwhile.
    """
    making = _Restore(pipeline, path, run, storage_options, frozenset(accept), report, positions, filled)
    return making.perform(progress, stopping)


def is_restored(pipeline: OpenPipeline, path: str, storage_options: dict[str, str] | None = None) -> bool:
    """Return whether the pipeline has gone on from a savepoint already. Changes nothing."""
    return _Restore(pipeline, path, "", storage_options, frozenset(), lambda _: None).is_done()


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore would do. `sinks` is empty if it was done already."""

    from_epoch: int
    to_epoch: int
    already: bool
    positions: dict[str, Json]
    sinks: list[SinkRestore] = field(default_factory=list)


def plan_restore(
    pipeline: OpenPipeline, path: str, storage_options: dict[str, str] | None = None, accept: Collection[str] = ()
) -> RestorePlan:
    """Plan a restore, with every check that `restore_savepoint` makes first. Changes nothing, and raises as it does."""
    return _Restore(pipeline, path, "", storage_options, frozenset(accept), lambda _: None).plan()


@dataclass(frozen=True, slots=True)
class _Current:
    """The heads of the sinks at one moment."""

    newest: Head  # of the deciding sink, with pending units
    committed: Head  # according to its log
    epochs: dict[str, int]  # of the other sinks that exist
    generations: list[int]


class _Restore:
    def __init__(
        self,
        pipeline: OpenPipeline,
        path: str,
        run: str,
        storage_options: dict[str, str] | None,
        accept: frozenset[str],
        report: Callable[[str], None],
        positions: Mapping[str, Json] | None = None,
        filled: Collection[str] = (),
    ) -> None:
        self._pipeline = pipeline
        self._run = run
        self._accept = accept
        self._report = report
        self._storage = open_storage(path, storage_options)
        self._path = _CREDENTIALS.sub("", normalise(path))
        self._saved = load_savepoint(self._storage)
        self._base = self._saved.checkpoint  # what the new epoch goes on from
        self._is_new = positions is not None
        self._filled = filled
        if positions is not None:
            self._base = replace(self._base, positions={**self._base.positions, **positions}, topology={})
        self._state = SavedStateSource(pipeline, self._saved, self._storage, storage_options or {})
        self._warnings: list[str] = []

    def is_done(self) -> bool:
        self._check_fits()
        return self._find_done(self._pipeline.deciding.load()) is not None

    def plan(self) -> RestorePlan:
        saved = self._saved
        self._check_fits()
        current = self._read_current()
        already = self._find_done(current.newest) is not None
        sinks = [] if already else self._plan_sinks(current)
        return RestorePlan(current.newest.epoch, saved.epoch, already, dict(saved.checkpoint.positions), sinks)

    def _plan_sinks(self, current: _Current) -> list[SinkRestore]:
        """Check everything that can be checked before anything changes."""
        self._check_source()
        self._check_ledger()
        self._check_state()
        plans = [plan_sink(as_delta(sink), self._saved, self._storage, self._accept) for sink in self._pipeline.tables]
        self._check_generations(current)
        for sink in self._followers():
            check_owner(self._pipeline, sink, current.newest)
        return plans

    def _followers(self) -> list[Sink]:
        """Return the sinks that begin after the restore, because the pipeline is a new one."""
        names = {one.name for one in self._pipeline.options.followers} if self._is_new else set()
        return [sink for sink in self._pipeline.sinks if sink.name in names]

    def perform(self, progress: Progress | None, stopping: Callable[[], bool]) -> Restored:
        saved = self._saved
        self._check_fits()
        newest = self._pipeline.deciding.load()
        done = self._find_done(newest)  # first: a killed restore may have left transactions open in other sinks
        if done is not None:
            back = f" (to go back to it: firnline rollback --to {done})" if done < newest.epoch else ""
            self._report(f"savepoint {saved.id} was restored as epoch {done} already; going on{back}")
            return Restored(saved.id, self._path, newest.epoch, saved.epoch, done, already=True)
        current = self._read_current()
        plans = self._plan_sinks(current)
        self._warn(current, plans)
        epochs = {"from_epoch": current.newest.epoch, "to_epoch": saved.epoch}
        with on_record(self._pipeline, "restore", self._run, **epochs, savepoint=saved.id, path=self._path):
            return self._restore(
                current, plans, Copies(saved, self._storage, self._pipeline.ids.new(), progress, stopping)
            )

    def _restore(self, before: _Current, plans: Sequence[SinkRestore], copies: Copies) -> Restored:
        saved = self._saved
        staged: dict[str, list[dict[str, Json]]] = {}

        def decide(generation: int) -> tuple[LedgerEntry, Head]:
            if not staged:
                staged.update(copies.copy_data(plans))
                copy_ledger(self._pipeline, self._storage, saved)
            found = self._read_current()
            entry = self._entry(found, generation, plans, staged)
            self._check_again(found, plans, entry)
            return entry, found.committed

        generation = self._new_generation(before)
        with copies.pinned(plans):
            brought = self._state.bring_back()
            receipt = perform_edit(
                self._pipeline,
                self._run,
                decide,
                self._report,
                generation=generation,
                skip={sink.name for sink in self._followers()},
                replaces=True,
            )
            # Again: a sweep without the new history may have run meanwhile.
            copy_ledger(self._pipeline, self._storage, saved)
        self._begin_followers(receipt.generation)
        files = [file for plan in plans for file in plan.saved.files]
        return Restored(
            savepoint=saved.id,
            path=self._path,
            from_epoch=before.newest.epoch,
            to_epoch=saved.epoch,
            epoch=receipt.epoch,
            files=len(files),
            rows=sum(file.rows or 0 for file in files),
            copied_bytes=sum(int(file["size_bytes"]) for one in staged.values() for file in one),
            state_bytes=saved.state_size_bytes,
            state_copied_bytes=brought,
            warnings=self._warnings,
        )

    def _begin_followers(self, generation: int) -> None:
        """Give the followers of a new pipeline the head of the restore. If that fails, the next run does it."""
        decided = self._pipeline.deciding.load()
        for sink in self._followers():
            try:
                epoch = join(self._pipeline, sink, self._run, generation, decided)
                self._report(f"{sink.name} is at epoch {epoch}")
            except (FirnlineError, OSError) as error:
                self._report(f"{sink.name} follows when the next run joins it: {error}")

    # -- reading --------------------------------------------------------------------------------------

    def _check_fits(self) -> None:
        saved, name = self._saved, self._pipeline.options.name
        if saved.pipeline != name:
            raise RollbackRefusedError(f"{self._path} is a savepoint of {saved.pipeline!r}, not of {name!r}")
        sinks = sorted(sink.name for sink in self._pipeline.tables)
        if sorted(saved.sinks) != sinks:
            raise RollbackRefusedError(
                f"the savepoint has the sinks {', '.join(sorted(saved.sinks))}; the spec has {', '.join(sinks)}",
                hint="Give the sinks the names that they had when the savepoint was made.",
            )
        if sorted(saved.checkpoint.positions) != sorted(self._pipeline.sources.names):
            raise RollbackRefusedError(
                f"the savepoint was made with the source {', '.join(saved.checkpoint.positions)};"
                f" the spec has {', '.join(self._pipeline.sources.names)}",
                hint="Give the source the name that it had when the savepoint was made.",
            )

    def _check_source(self) -> None:
        """Refuse another source root before anything changes, because the next run would refuse it."""
        try:
            self._pipeline.sources.start(self._base.positions)
        except SourceMovedError as error:
            raise SourceMovedError(
                f"the savepoint {self._path} does not fit the source: {error.message}", hint=error.hint
            ) from error

    def _check_again(self, current: _Current, plans: Sequence[SinkRestore], entry: LedgerEntry) -> None:
        """Check that the plan is still valid, for the deciding sink at exactly the version of the commit."""
        deciding = self._pipeline.deciding
        if current.committed.exists:
            for operation in check_others(as_delta(deciding), self._saved, self._accept, plans[0].planned_at):
                if operation not in plans[0].undone:
                    plans[0].undone.append(operation)
                    self._add_warning(f"{deciding.name}: {operation}, made at this moment, is taken back")
        self._state.check_spared()
        missing = find_lacking(deciding, entry)
        if missing:
            raise RollbackRefusedError(
                f"{deciding.name}: {len(missing)} file(s) of the savepoint were deleted at this moment:"
                f" {', '.join(missing[:NAMED])}",
                hint="Run the same command again; what a savepoint has copies of is copied then.",
            )
        for sink in self._pipeline.tables[1:]:
            check_restored(sink, entry, deciding.name)

    def _read_current(self) -> _Current:
        newest = self._pipeline.deciding.load()
        committed = self._pipeline.deciding.load_committed()
        fences = {sink.name: sink.read_fence() for sink in self._pipeline.sinks[1:]}
        others = {name: fence for name, fence in fences.items() if fence.exists}
        epochs = {name: fence.epoch for name, fence in others.items()}
        return _Current(newest, committed, epochs, [fence.generation for fence in others.values()])

    def _find_done(self, head: Head) -> int | None:
        """Return the epoch that restored this savepoint, if the true history has it and every sink can apply it."""
        done: int | None = None
        newest: LedgerEntry | None = None  # the restore, if nothing came after it
        try:
            for link in self._pipeline.ledger.chain(head.entry):
                edits = link.edits if isinstance(link, Fold) else [_as_edit(link)]
                for edit in edits:
                    if edit["kind"] == "restore" and edit["jump"].get("savepoint") == self._saved.id:
                        done = done or int(edit["epoch"])
                        if isinstance(link, LedgerEntry) and link.epoch == head.epoch:
                            newest = link
        except LedgerHoleError as error:
            if done is None:
                raise RollbackRefusedError(
                    f"cannot find out whether this savepoint was restored already: {error.message}",
                    hint="Restore the ledger entry, or restore the savepoint into another table.",
                ) from error
            copy_ledger(self._pipeline, self._storage, self._saved)
        return None if newest is not None and self._must_repeat(newest) else done

    def _must_repeat(self, done: LedgerEntry) -> bool:
        """Return whether a sink lacks a restore and cannot apply it, so that only another restore brings it in sync.

        Raises:
            RollbackRefusedError: others wrote to that sink since, and may not lose their rows.
        """
        for sink in self._pipeline.tables[1:]:
            if sink.read_fence().epoch >= done.epoch:
                continue
            try:
                check_restored(sink, done, self._pipeline.deciding.name)
            except RollbackRefusedError as error:
                accept = self._accept | set(done.edit.get("accepted", []))
                check_unchanged(sink, done, accept, f"firnline run --from-savepoint {self._path}{{flags}}")
                self._accept = accept
                self._report(f"{error.message}; restoring once more")
                return True
        return False

    def _check_ledger(self) -> None:
        """Check every file of the chain and of its quarantine before anything changes."""
        for key, saved in kept_bytes(self._saved):
            if not is_inside(self._storage, key):
                raise DamagedError(f"{key} of the savepoint is a link")
            read_saved(self._storage, key, saved)

    def _check_state(self) -> None:
        """Check every file of the operator state, and the input of the epochs since its snapshots."""
        found = self._state.check()
        if found.problems:
            raise RollbackRefusedError(
                f"the savepoint {self._path} cannot be restored: {found.problems[0].message}",
                hint=found.problems[0].hint,
            )
        if found.replayed:
            self._report(f"{len(found.replayed)} epoch(s) since the snapshots of the state are folded again")

    def _check_generations(self, current: _Current) -> None:
        """Refuse a sink with a newer generation than the deciding one: it would reject the commit."""
        newest = max(current.generations, default=0)
        if current.committed.exists and newest > current.committed.generation + 1:
            raise RollbackRefusedError(
                f"a sink knows generation {newest}, but {self._pipeline.deciding.name} "
                f"only {current.committed.generation}:"
                " they are not of the same history",
                hint="Restore into tables that belong together, or into empty ones.",
            )

    def _warn(self, current: _Current, plans: Sequence[SinkRestore]) -> None:
        for plan in plans:
            if plan.undone:
                self._add_warning(f"{plan.sink.name}: {', '.join(plan.undone)} since the savepoint is taken back")
        for follower in self._pipeline.options.followers:
            if not self._is_new:
                again = "what is read again after the restore comes there again"
                self._add_warning(f"{follower.name} keeps its rows: {again}")
            elif follower.name not in self._filled:
                self._add_warning(f"{follower.name} begins after the restore: the savepoint does not have its rows")
        lost = self._find_lost(current)
        if lost:
            shown = ", ".join(lost[:NAMED]) + (" ..." if len(lost) > NAMED else "")
            self._add_warning(f"{len(lost)} file(s) that were read after the savepoint cannot be read again: {shown}")

    def _add_warning(self, warning: str) -> None:
        self._warnings.append(warning)
        self._report(f"warning: {warning}")

    def _find_lost(self, current: _Current) -> list[str]:
        """Return input that was read after the savepoint and is gone from the source, as far as the history knows."""
        inputs: list[dict[str, list[dict[str, Json]]]] = []
        try:
            for entry, ref in self._pipeline.ledger.entries(current.newest.entry):
                if ref == self._saved.entry and current.newest.checkpoint is not None:
                    return self._pipeline.sources.find_unavailable(current.newest.checkpoint.positions, inputs)
                inputs.append(entry.inputs)
        except (FirnlineError, OSError) as error:
            return [f"unknown, the source cannot be looked at ({error})"] if any(inputs) else []
        return []

    # -- doing ----------------------------------------------------------------------------------------

    def _new_generation(self, current: _Current) -> int | None:
        """Return a generation for a new table: newer than any that a copy or another sink has for this pipeline."""
        if current.committed.exists:
            return None
        known = [self._saved.checkpoint.generation, *current.generations]
        known += [found.record.checkpoint.generation for found in self._recorded() if found.record is not None]
        return max(known) + 1

    def _recorded(self) -> list[NewestCopy]:
        return [store.read() for store in self._pipeline.recorder.stores]

    def _entry(
        self, current: _Current, generation: int, plans: Sequence[SinkRestore], staged: dict[str, list[dict[str, Json]]]
    ) -> LedgerEntry:
        saved = self._saved
        recorded = [found.epoch for found in self._recorded()]
        epoch = max(current.newest.epoch, saved.epoch, *current.epochs.values(), *recorded) + 1
        head = current.newest.checkpoint
        schema = plans[0].saved.schema
        followers = self._pipeline.options.followers  # they keep their rows
        # Where there is no history, the pipeline is a new one: the snapshots of a topology are those of the old one.
        base = self._base if head is not None else replace(self._base, topology={})
        checkpoint = edit_checkpoint(
            self._pipeline,
            base,
            head,
            epoch=epoch,
            generation=generation,
            run=self._run,
            kept={one.head_name: current.epochs.get(one.name, 0) for one in followers},
        )
        if self._is_new:
            begun = {one.name: KnownSink(one.target, epoch, epoch, one.head_name) for one in followers}
            checkpoint = replace(checkpoint, sinks={name: one.to_json() for name, one in begun.items()})
        return LedgerEntry(
            checkpoint=checkpoint,
            previous=saved.entry,
            previous_checkpoint=saved.checkpoint.checksum,
            inputs={},
            staged=staged,
            schema=schema,
            kind="restore",
            onto=current.committed.entry,
            edit={
                "savepoint": saved.id,
                "path": self._path,
                "from_epoch": current.newest.epoch,
                "to_epoch": saved.epoch,
                "versions": {plan.sink.name: plan.version for plan in plans if plan.version is not None},
                "planned_at": {plan.sink.name: plan.planned_at for plan in plans},
                "schemas": {plan.sink.name: plan.saved.schema for plan in plans[1:] if plan.saved.schema != schema},
                "accepted": sorted(self._accept),
            },
        )


def _as_edit(entry: LedgerEntry) -> dict[str, Json]:
    return {"epoch": entry.epoch, "kind": entry.kind, "jump": entry.edit}
