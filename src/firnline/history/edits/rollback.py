"""Takes a pipeline back to an earlier epoch: table, columns, state and checkpoint together, in one Delta commit.

A rollback is a separate epoch, in a new generation. It restores the table version of epoch k, and has epoch k's
positions, watermarks, state references and ledger chain. State files never change, so none is copied. Input read after
k no longer counts, so the next run reads it again. Dead letters that a later epoch answered are open again, unless
their sink keeps the rows of that epoch (`KnownSink.undone`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

from firnline.checkpoint.ledger import LedgerEntry, edit_name
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, LedgerHoleError, RollbackRefusedError, SinkError
from firnline.history.agreed import check_agreed
from firnline.history.dead_letters import count_letters
from firnline.history.savepoints.pins import RestorePins
from firnline.history.schemas import in_force, load_schema_history
from firnline.history.state import OperatorSnapshot, check_state, snapshots_of
from firnline.history.store import nothing_to_leave, on_record
from firnline.run.commits import check_staged
from firnline.run.edits import claim_sinks, perform_edit, refuse_filling
from firnline.run.joining import ahead_of, committed_columns, edit_checkpoint, plan_sink
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import GoesBack, Head, Sink, SinkReturn
from firnline.sinks.known import KnownSink, after_going_back, find_known, known_sinks
from firnline.sources.base import PositionView
from firnline.sources.group import Records
from firnline.types import EntryRef, Json, Receipt

NAMED = 3  # examples in a message


@dataclass(frozen=True, slots=True)
class LetterChange:
    """The dead letters of one sink that are not answered."""

    sink: str
    now: int
    then: int


@dataclass(frozen=True, slots=True)
class SchemaReturn:
    """A captured table whose schema was another version then; 0: it had none."""

    source: str
    table: str
    version_now: int
    version_then: int


@dataclass(frozen=True, slots=True)
class RollbackPlan:
    """The plan of a rollback, made at one version of the deciding table."""

    pipeline: str
    from_epoch: int
    to_epoch: int
    new_epoch: int
    version: int  # of the deciding table
    floor: int
    sinks: list[SinkReturn]
    positions_now: dict[str, Json]
    positions_then: dict[str, Json]
    input_files: int = 0  # read again afterwards
    input_records: int = 0
    input_bytes: int = 0
    quarantined: int = 0  # records of the epochs undone
    pending_units: int = 0  # of a staged table, dropped
    state_now: list[OperatorSnapshot] = field(default_factory=list)
    state_then: list[OperatorSnapshot] = field(default_factory=list)
    state_replayed: list[int] = field(default_factory=list)  # epochs after the snapshots of that time, folded again
    schemas: list[SchemaReturn] = field(default_factory=list)  # of captured tables whose schema was another one then
    dead_letters: list[LetterChange] = field(default_factory=list)  # of sinks where the number changes
    not_undone: list[str] = field(default_factory=list)
    history_edits: list[int] = field(default_factory=list)  # those among the epochs undone
    refusals: list[RollbackRefusedError] = field(default_factory=list)

    def restored(self) -> dict[str, tuple[str, ...]]:
        """The files that come back, per table."""
        return {sink.table: sink.restored for sink in self.sinks}

    def to_json(self) -> dict[str, Json]:
        """Return the fields that `firnline rollback --json` shows."""
        return {**asdict(self), "refusals": [error.message for error in self.refusals]}

    def agreed(self) -> dict[str, Json]:
        """Return what somebody who confirms the plan agrees to. Further epochs of the pipeline itself change none."""
        sinks = {
            sink.name: {
                "table": sink.table,
                "version_then": sink.version_then,
                "left": sink.left,
                "others": sink.others,
                "foreign_commits": sink.foreign_commits,
                "properties_changed": sink.properties_changed,
            }
            for sink in self.sinks
        }
        return {"to_epoch": self.to_epoch, "history_edits": self.history_edits, "sinks": sinks}

    def check(self) -> None:
        """Raise an error with every obstacle in one message."""
        if not self.refusals:
            return
        reasons = "; ".join(error.message for error in self.refusals)
        raise RollbackRefusedError(
            f"cannot go back to epoch {self.to_epoch}: {reasons}",
            hint=self.refusals[0].hint,
            to_epoch=self.to_epoch,
            reasons=[error.message for error in self.refusals],
        )


@dataclass(frozen=True, slots=True)
class _Current:
    """The plan, and the entries that it needs."""

    plan: RollbackPlan
    target: LedgerEntry
    target_ref: EntryRef
    committed: Head  # the head of the deciding table's log
    newest: Head  # including pending units
    retried: list[str]  # files set aside at that time and read since
    kept: dict[str, int]  # the newest epoch that each left follower keeps, by the name that its target knows it by


class Rollback:
    """One rollback: `plan` only reads, `perform` does it.

    Args:
        to_epoch: The epoch to go back to.
        accept: Names of others whose rows may be lost: pipelines, applications, operations.
        leave: Sinks that keep their rows although they cannot go back, and get them again.
        restore: The restore of a topology that this rollback is a part of. Then the pipeline may be at that epoch
            already: its rows stay.
        covered: Sources whose input that restore checks: what they have read beyond its cut is undone, too, and is not
            needed again.
    """

    def __init__(
        self,
        pipeline: OpenPipeline,
        to_epoch: int,
        *,
        accept: Sequence[str] = (),
        leave: Sequence[str] = (),
        restore: str = "",
        covered: Collection[str] = (),
    ) -> None:
        self._pipeline = pipeline
        self._to = to_epoch
        self._covered = frozenset(covered)
        self._accept = frozenset(accept)
        self._leave = frozenset(leave)
        self._restore = restore
        unknown = self._leave - {sink.name for sink in pipeline.sinks[1:]}
        if unknown:
            others = ", ".join(sink.name for sink in pipeline.sinks[1:])
            first = f"{pipeline.deciding.name} decides, and cannot be left."
            raise RollbackRefusedError(
                f"{', '.join(sorted(unknown))}: no sink that could be left as it is",
                hint=f"Sinks that can be left: {others}; {first}" if others else f"There is no further sink; {first}",
            )

    def plan(self) -> RollbackPlan:
        """Return what the rollback would do. Read-only: claims and writes nothing."""
        return self._read_current().plan

    def perform(
        self,
        run: str,
        report: Callable[[str], None] = lambda _: None,
        agreed: Mapping[str, Json] | None = None,
    ) -> tuple[RollbackPlan, Receipt]:
        """Roll back. Returns the performed plan and the deciding sink's receipt.

        Args:
            agreed: `RollbackPlan.agreed` of the plan that somebody confirmed; None if nobody was asked.

        Raises:
            PlanChangedError: it would be another rollback than the one that was agreed to. Nothing changed, or only
                the generation.
            RollbackRefusedError: it is not possible. Nothing changed, or only the generation if the reason appeared
                late; an active run is fenced then.
            FencedError: another run or rollback took over meanwhile.
        """
        first = self._read_current()
        first.plan.check()  # errors known beforehand fence no run
        check_agreed(agreed, first.plan.agreed())
        plans: list[RollbackPlan] = []

        def decide(generation: int) -> tuple[LedgerEntry, Head]:
            found = self._read_current()
            found.plan.check()
            if pins.keep(found.plan.restored()):  # more files than in the first plan: check again under the pin
                found = self._read_current()
                found.plan.check()
            check_agreed(agreed, found.plan.agreed())
            if not plans:
                self._ask_again(found)
            plans.append(found.plan)
            return self._entry(found, run, generation), found.committed

        names = {"accepted": sorted(self._accept), "left": sorted(self._leave)}
        with (
            on_record(self._pipeline, "rollback", run, from_epoch=first.plan.from_epoch, to_epoch=self._to, **names),
            RestorePins(self._pipeline) as pins,
        ):
            pins.keep(first.plan.restored())  # pin against sweeps; the files are checked under the pin
            receipt = perform_edit(
                self._pipeline,
                run,
                decide,
                report,
                goes_on_from=first.target_ref,
                leave=self._leave,
                restore=self._restore,
            )
        return plans[-1], receipt

    def check(self, run: str, report: Callable[[str], None] = lambda _: None) -> None:
        """Check all that stands against the rollback, under claims of every sink: what `perform` does before it
        decides.

        Raises:
            FirnlineError: it is not possible. Nothing changed but the generation.
        """
        first = self._read_current()
        first.plan.check()
        claim_sinks(
            self._pipeline, run, report, goes_on_from=first.target_ref, leave=self._leave, restore=self._restore
        )
        self._read_current().plan.check()

    def _ask_again(self, current: _Current) -> None:
        """Request a retry again for a file that was set aside at that time and retried since."""
        for path in current.retried:
            self._pipeline.requests.ask_retry(path, changed=True, ids=self._pipeline.ids)

    def _entry(self, current: _Current, run: str, generation: int) -> LedgerEntry:
        base = current.target.checkpoint
        plan = current.plan
        checkpoint = edit_checkpoint(
            self._pipeline,
            base,
            current.newest.checkpoint,
            epoch=plan.new_epoch,
            generation=generation,
            run=run,
            kept=current.kept,
        )
        return LedgerEntry(
            checkpoint=checkpoint,
            previous=current.target_ref,
            previous_checkpoint=base.checksum,
            inputs={},
            schema=committed_columns(self._pipeline),
            kind="rollback",
            onto=current.committed.entry,
            edit={
                "to_epoch": plan.to_epoch,
                "from_epoch": plan.from_epoch,
                "from_version": plan.version,
                "to_version": plan.sinks[0].version_then,
                "left": sorted(self._leave),
                "accepted": sorted(self._accept),
                **({"restore": self._restore} if self._restore else {}),
            },
        )

    # -- reading --------------------------------------------------------------------------------------

    def _read_current(self) -> _Current:
        pipeline = self._pipeline
        newest = pipeline.deciding.load()
        committed = pipeline.deciding.load_committed()
        if not committed.exists or committed.checkpoint is None or newest.checkpoint is None:
            raise nothing_to_leave(pipeline, committed)
        undone, target, target_ref = self._find_target(newest, committed)
        refusals = []
        floor = committed.checkpoint.floor
        if self._to < floor:
            reachable = [entry.epoch for entry in undone[1:] if entry.epoch >= floor]
            hint = f"Nearest possible: --to {min(reachable)}. " if reachable else ""
            refusals.append(
                RollbackRefusedError(
                    f"epoch {self._to} lies below the floor, {floor}; what it needs may have been swept",
                    hint=f"{hint}checkpoint.rollback_window sets how far back a rollback can go.",
                )
            )
        now, then = newest.checkpoint.positions, target.checkpoint.positions
        inputs = [entry.inputs for entry in undone if not entry.is_history_edit]  # a repair names files of other epochs
        records = [record for one in inputs for files in one.values() for record in files]
        refusals += self._check_sources(now, then, inputs)
        state = check_state(pipeline, target.checkpoint, target_ref, now)
        refusals += state.problems
        sinks, fixed = [], {}
        for sink in pipeline.sinks:
            found, problems = self._plan_sink(sink, target_ref)
            sinks.append(found)
            if found.epoch > self._to and problems and sink.capabilities.goes_back is GoesBack.NOT_AT_ALL:
                fixed[sink.name] = problems
            else:
                refusals += problems
        refusals = self._refuse_fixed(fixed, newest.epoch) + refusals
        filling = refuse_filling(pipeline, committed)
        refusals += [filling] if filling is not None else []
        kept = self._find_kept(newest.checkpoint)
        pending = newest.epoch - committed.epoch
        plan = RollbackPlan(
            pipeline=pipeline.options.name,
            from_epoch=newest.epoch,
            to_epoch=self._to,
            new_epoch=newest.epoch + 1,
            version=committed.version,
            floor=floor,
            sinks=sinks,
            positions_now=now,
            positions_then=then,
            input_files=len({str(record["path"]) for record in records}),
            input_records=sum(int(r.get("to", 0)) - int(r.get("from", 0)) for r in records),
            input_bytes=sum({str(r["path"]): int(r.get("size_bytes", 0)) for r in records}.values()),
            quarantined=sum(int(q["rows"]) for entry in undone for q in entry.quarantine),
            pending_units=pending,
            state_now=snapshots_of(newest.checkpoint) if pipeline.options.operators else [],
            state_then=state.snapshots,
            state_replayed=state.replayed,
            schemas=self._find_schemas(newest.epoch),
            dead_letters=self._find_letters(newest.checkpoint, kept),
            not_undone=self._not_undone(sinks, then),
            history_edits=sorted(entry.epoch for entry in undone if entry.is_history_edit),
            refusals=refusals,
        )
        read = {str(record["path"]) for record in records if int(record.get("to", 0)) > int(record.get("from", 0))}
        aside = {path for position in pipeline.sources.describe(then).values() for path in position.set_aside}
        retried = sorted(read & aside)
        return _Current(plan, target, target_ref, committed, newest, retried, kept)

    def _find_target(self, newest: Head, committed: Head) -> tuple[list[LedgerEntry], LedgerEntry, EntryRef]:
        """Return the entries after the target, newest first, and the target itself."""
        if self._to == 0:
            raise RollbackRefusedError(
                "epoch 0 has no checkpoint: it is the state before the first epoch",
                hint="To remove all rows and read all input again: "
                f"firnline run --fresh-after {newest.epoch} --truncate --yes",
                to_epoch=0,
            )
        pending = newest.epoch > committed.epoch
        if self._to > committed.epoch or (self._to == committed.epoch and pending and not self._restore):
            hint = "See `firnline checkpoints`."
            if newest.epoch > committed.epoch:
                hint = f"Pending units are dropped with: firnline staging TABLE --discard-from {self._to + 1} --yes"
            missing = f"epoch {self._to} does not exist yet: " if self._to > newest.epoch else ""
            raise RollbackRefusedError(f"{missing}{self._pipeline.decided_in} is at epoch {committed.epoch}", hint=hint)
        if self._to == committed.epoch and not self._restore:
            raise RollbackRefusedError(f"{self._pipeline.decided_in} is at epoch {self._to} already")
        undone: list[LedgerEntry] = []
        known: list[int] = []
        try:
            for entry, ref in self._pipeline.ledger.entries(newest.entry):
                if entry.epoch == self._to and entry.kind != "baseline":
                    return undone, entry, ref
                known.append(entry.epoch)
                if entry.epoch < self._to:
                    break
                undone.append(entry)
        except LedgerHoleError as error:
            raise RollbackRefusedError(f"the way back to epoch {self._to} has a hole: {error.message}") from error
        floor = committed.checkpoint.floor if committed.checkpoint else 0
        raise self._unknown_target(undone, [epoch for epoch in known if epoch >= floor])

    def _unknown_target(self, undone: list[LedgerEntry], known: list[int]) -> RollbackRefusedError:
        edit = next((e for e in undone if e.supersedes(self._to)), None)
        if edit is not None and (edit.onto is None or self._to <= edit.onto.epoch):
            what = edit_name(edit.kind)
            why = f"epoch {self._to} no longer belongs to the history: epoch {edit.epoch} was a {what}"
        else:
            why = f"epoch {self._to} is older than the ledger's entries, or never existed"
        below = max((e for e in known if e < self._to), default=None)
        above = min((e for e in known[1:] if e > self._to), default=None)  # not the newest: it is already there
        near = [e for e in (below, above) if e is not None]
        return RollbackRefusedError(why, hint=f"Nearest possible: --to {' or '.join(map(str, near))}" if near else None)

    def _check_sources(
        self, now: dict[str, Json], then: dict[str, Json], inputs: Sequence[Records]
    ) -> list[RollbackRefusedError]:
        own = {name: position for name, position in now.items() if name not in self._covered}
        lost = self._pipeline.sources.find_unavailable(own, inputs, then)
        if not lost:
            return []
        shown = ", ".join(lost[:NAMED]) + (" ..." if len(lost) > NAMED else "")
        return [
            RollbackRefusedError(
                f"the source no longer has {len(lost)} file(s) that would be read again: {shown}",
                hint="Bring the files back as they were, or go back less far.",
                files=len(lost),
            )
        ]

    def _plan_sink(self, sink: Sink, target: EntryRef) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        left = sink.name in self._leave
        plan, problems = plan_sink(sink, self._to, left=left, accept=self._accept)
        if plan.version_now is not None and plan.epoch < self._to and not left:
            try:
                lacks = [entry for entry, _ in ahead_of(self._pipeline, target, plan.epoch, sink.name)]
            except LedgerHoleError as error:
                hint = f"Leave it as it is: --leave {sink.name}, or go back to epoch {plan.epoch} or before."
                return plan, [*problems, RollbackRefusedError(error.message, hint=hint)]
            for entry in lacks:
                try:
                    check_staged(sink, entry, self._pipeline.storage)
                except CheckpointError as error:
                    problems.append(RollbackRefusedError(error.message, hint=error.hint))
        return plan, problems

    def _find_kept(self, newest: Checkpoint) -> dict[str, int]:
        """Return the newest epoch that each left follower keeps; of one that cannot be read, what it was seen to hold.

        Such a follower may hold more: then a row that it holds is a dead letter again, and a person decides.
        """
        known, kept = known_sinks(newest), {}
        for one in self._pipeline.options.followers:
            seen = find_known(known, one.name, one.renamed_from)
            if one.name in self._leave and seen is not None:
                try:
                    kept[one.head_name] = self._pipeline.sink(one.name).read_fence().epoch
                except SinkError:
                    kept[one.head_name] = seen.held
        return kept

    def _find_letters(self, newest: Checkpoint, kept: Mapping[str, int]) -> list[LetterChange]:
        after = after_going_back(newest.sinks, self._to, newest.epoch + 1, kept)
        now = count_letters(self._pipeline, known_sinks(newest))
        then = count_letters(self._pipeline, {name: KnownSink.from_json(one) for name, one in after.items()})
        return [
            LetterChange(name, number, number_then)
            for name, number in now.items()
            if number is not None and (number_then := then.get(name)) is not None and number != number_then
        ]

    def _refuse_fixed(self, fixed: dict[str, list[RollbackRefusedError]], newest: int) -> list[RollbackRefusedError]:
        """Return the refusals of sinks that can never take rows back, with a hint that solves them all at once."""
        deciding = self._pipeline.deciding.name
        fields: dict[str, Json] = {}
        if deciding in fixed:
            hint = (
                f"{deciding} decides, so it cannot be left as it is either: no rollback is possible. To read all input "
                f"again and keep the rows: firnline run --fresh-after {newest}"
            )
        else:
            fields["leave"] = names = sorted(self._leave | set(fixed))
            hint = f"Leave the rows as they are: {' '.join(f'--leave {name}' for name in names)}"
        refused = (error for errors in fixed.values() for error in errors)
        return [RollbackRefusedError(error.message, hint=hint, **fields) for error in refused]

    def _find_schemas(self, newest: int) -> list[SchemaReturn]:
        """Return the captured tables whose schema was another version then."""
        if not any(source.has_log for source in self._pipeline.sources):
            return []
        history = load_schema_history(self._pipeline)
        then = {(one.source, one.version.table): one.number for one in in_force(history, self._to)}
        return [
            SchemaReturn(one.source, one.version.table, one.number, then.get((one.source, one.version.table), 0))
            for one in in_force(history, newest)
            if one.number != then.get((one.source, one.version.table), 0)
        ]

    def _not_undone(self, sinks: Sequence[SinkReturn], positions_then: dict[str, Json]) -> list[str]:
        found = []
        then = self._pipeline.sources.describe(positions_then)
        for source in self._pipeline.sources:
            old, new = then[source.name].location if source.name in then else source.location, source.location
            if old and old != new:
                found.append(f"the source lay at {old} then: run with --source-moved {old}={new}")
        for sink in sinks:
            if sink.version_then is not None:
                found.append(
                    f"{sink.name}: readers that already consumed versions {sink.version_then + 1}-{sink.version_now} "
                    "are not undone; the commit names what was taken back"
                )
            if sink.left:
                found.append(f"{sink.name}: left as it is: its rows and columns stay, and the rows are written again")
        return found


def find_epoch_at(pipeline: OpenPipeline, moment: datetime) -> int:
    """Return the newest epoch of the true history that was committed at or before a time.

    Raises:
        RollbackRefusedError: no such epoch is known any more.
    """
    head = pipeline.deciding.load_committed()
    if head.checkpoint is None:
        raise nothing_to_leave(pipeline, head)
    times = pipeline.deciding.commit_times(head.version, head.version + 1) if head.exists else {}
    entries = [entry for entry in pipeline.entries(head.entry) if entry.kind != "baseline"]
    found, reached, oldest = 0, None, ""
    for entry in reversed(entries):
        committed = times.get(entry.epoch, (0, ""))[1] or entry.checkpoint.created_at
        oldest = oldest or committed
        # If a clock went back, an epoch still counts as no older than the one before it.
        reached = max(reached, datetime.fromisoformat(committed)) if reached else datetime.fromisoformat(committed)
        if reached <= moment:
            found = entry.epoch
    if found:
        return found
    known = "there is none at all"
    if entries:
        at = datetime.fromisoformat(oldest).isoformat(timespec="seconds")
        known = f"the oldest that is known is epoch {entries[-1].epoch}, of {at}"
    raise RollbackRefusedError(f"no epoch was committed by {moment.isoformat(timespec='seconds')}: {known}")


def position_text(position: PositionView | None) -> str:
    """Return a position as the plan names it: the last input read, or the facts of a source without named inputs."""
    if position is None:
        return "the beginning"
    if position.by_input:
        return position.last or "the beginning"
    return ", ".join(f"{name} {value}" for name, value in position.facts.items())


def find_position_texts(pipeline: OpenPipeline, plan: RollbackPlan) -> dict[str, tuple[str, str]]:
    """Return the position of each source now and then, in words."""
    now, then = pipeline.sources.describe(plan.positions_now), pipeline.sources.describe(plan.positions_then)
    return {name: (position_text(position), position_text(then.get(name))) for name, position in now.items()}
