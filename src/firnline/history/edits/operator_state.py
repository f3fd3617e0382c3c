"""Changes operator state while no run is active: another number of shards, or imported keys.

Either change is a separate epoch, in a new generation, that reads nothing. It continues from the newest epoch with the
same positions, watermarks and columns, and names a new checkpoint of the state. Steps: 1 claim, which fences an active
run; 2 write the files and the checkpoint of the state, which nothing names yet; 3 commit the epoch, which names it.

A rescale does not need up-to-date state. If the newest snapshots lack epochs, the new checkpoint keeps naming them and
sets the new number of shards. The next run folds those epochs with that number, and ends with a checkpoint.

An import replaces some keys, or a whole snapshot. Tables keep their rows: an operator emits a key's rows only when
input for that key arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow as pa

from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, ConfigError, LedgerHoleError
from firnline.history.state import Stateful, find_stateful, refs_of
from firnline.history.store import on_record
from firnline.jobs.dataflow import dataflow_of
from firnline.operators.loading import build_operator
from firnline.process import this_process
from firnline.run.edits import perform_edit
from firnline.run.joining import committed_columns, edit_checkpoint
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head
from firnline.sources.columns import columns_from_json
from firnline.state import snapshot as layout
from firnline.state.columns import Layout
from firnline.state.export import StateReader
from firnline.state.home import StateHome
from firnline.state.keys import shard_ranges
from firnline.state.load import add_state, import_rows, locate_rows
from firnline.state.manifest import (
    CheckpointPlan,
    CompleteCheckpoint,
    OperatorInfo,
    OperatorState,
    Ranges,
    ShardState,
    SnapshotRef,
    Worker,
    assemble,
    rescale,
    snapshot_ref,
)
from firnline.state.remote import Replica, find_snapshot
from firnline.types import EntryRef, Json, Receipt

States = dict[str, OperatorState]


@dataclass(frozen=True, slots=True)
class StateTip:
    """The state after the newest epoch, as its checkpoint names it. `lacks` says why it is not up to date, if so."""

    head: Head
    checkpoint: Checkpoint
    states: States
    infos: dict[str, OperatorInfo]
    ranges: Ranges  # of the newest snapshot
    key_groups: int
    lacks: str = ""

    @property
    def epoch(self) -> int:
        return self.head.epoch

    @property
    def shards(self) -> int:
        """The number of shards that the next run would use."""
        return self.checkpoint.shards or len(self.ranges)

    def check_newest(self) -> None:
        """Refuse state that lacks epochs: only a run can fold them."""
        if self.lacks:
            hint = "Have a run make one: firnline checkpoint, while it runs. Or set checkpoint.trigger.every_epochs: 1."
            raise CheckpointError(self.lacks, hint=hint, epoch=self.epoch)


def load_tip(pipeline: OpenPipeline) -> StateTip:
    """Read the state after the newest epoch. Writes nothing.

    Raises:
        ConfigError: the pipeline keeps no state, or has none yet.
        CheckpointError: units wait for their committer.
    """
    if not dataflow_of(pipeline.options).stateful:
        raise ConfigError(
            f"pipeline {pipeline.options.name!r} has no stateful operator",
            hint="aggregate, deduplicate and correlate keep state, and so do operators of your own.",
        )
    head = pipeline.deciding.load()
    committed = pipeline.deciding.load_committed()
    if head.checkpoint is None or not head.checkpoint.state:
        raise ConfigError(f"pipeline {pipeline.options.name!r} has no state yet", hint="`firnline run` makes it.")
    if committed.epoch != head.epoch:
        raise CheckpointError(
            f"{pipeline.deciding.name} is at epoch {committed.epoch}; those up to {head.epoch} wait for a committer",
            hint="Commit them first: firnline committer --once",
        )
    refs = {name: SnapshotRef.from_json(value) for name, value in head.checkpoint.state.items()}
    lacks = _find_lacking(pipeline, head, refs)
    found: dict[str, CompleteCheckpoint] = {}
    for name, ref in refs.items():
        try:
            found[name], _ = find_snapshot(pipeline.state_home, ref, with_files=False).require()
        except CheckpointError as error:
            lacks = lacks or error.message
    newest = refs[max(refs, key=lambda name: refs[name].epoch)]
    key_groups = next((one.plan.key_groups for one in found.values()), pipeline.options.state.key_groups)
    return StateTip(
        head=head,
        checkpoint=head.checkpoint,
        states={name: complete.operators[name] for name, complete in found.items()},
        infos={name: complete.plan.operators[name] for name, complete in found.items()},
        ranges=tuple(shard_ranges(key_groups, newest.shards)),
        key_groups=key_groups,
        lacks=lacks,
    )


def _find_lacking(pipeline: OpenPipeline, head: Head, refs: dict[str, SnapshotRef]) -> str:
    """Return why the snapshots lack epochs; empty if they do not."""
    oldest = min(refs, key=lambda name: refs[name].epoch)
    try:
        for entry in pipeline.entries(head.entry):
            if entry.epoch <= refs[oldest].epoch:
                break
            if not entry.is_history_edit:
                return (
                    f"the newest snapshot of {oldest!r} is that of epoch {refs[oldest].epoch}, "
                    f"and the pipeline is at epoch {head.epoch}"
                )
    except LedgerHoleError as error:
        if refs[oldest].epoch < head.epoch:
            return f"whether the state is the newest cannot be told: {error.message}"
    return ""


# -- making one -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateEdit:
    """One change of state: its kind, the content of its entry, and how it derives the new state from the old.

    `change` gets the tip and the plan of the new checkpoint. It may write files into that checkpoint's folder, and
    returns the state of every operator, divided into `ranges`.
    """

    kind: str
    ranges: Ranges
    change: Callable[[StateTip, CheckpointPlan], States]
    facts: dict[str, Json]

    def perform(self, pipeline: OpenPipeline, run: str, report: Callable[[str], None] = lambda _: None) -> Receipt:
        """Perform the change. Raises the errors of `perform_edit` and `load_tip`."""
        first = load_tip(pipeline)  # errors known beforehand fence no run
        if self.kind != "rescale":
            first.check_newest()
        made: list[CheckpointPlan] = []

        def decide(generation: int) -> tuple[LedgerEntry, Head]:
            tip = load_tip(pipeline)
            if made:  # the table moved before the commit: nothing will ever name this checkpoint
                layout.abort(pipeline.state_home.storage, made[-1].checkpoint_id, "the table moved", unnamed=True)
            return self._entry(pipeline, tip, run, generation, made), tip.head

        what = "rescale" if self.kind == "rescale" else "import-state"
        with on_record(pipeline, what, run, from_epoch=first.epoch, to_epoch=None, **self.facts):
            return perform_edit(pipeline, run, decide, report, goes_on_from=first.head.entry)

    def _entry(
        self, pipeline: OpenPipeline, tip: StateTip, run: str, generation: int, made: list[CheckpointPlan]
    ) -> LedgerEntry:
        epoch = tip.epoch + 1
        checkpoint = edit_checkpoint(
            pipeline, tip.checkpoint, tip.checkpoint, epoch=epoch, generation=generation, run=run
        )
        if self.kind == "rescale" and tip.lacks:
            checkpoint = replace(checkpoint, shards=len(self.ranges))
        else:
            tip.check_newest()
            checkpoint = replace(checkpoint, shards=0, state=self._make_state(pipeline, tip, checkpoint, made))
        onto: EntryRef | None = tip.head.entry
        return LedgerEntry(
            checkpoint=checkpoint,
            previous=onto,
            previous_checkpoint=tip.checkpoint.checksum,
            inputs={},
            schema=committed_columns(pipeline),
            kind=self.kind,
            onto=onto,
            edit={"to_epoch": tip.epoch, **self.facts},
        )

    def _make_state(
        self, pipeline: OpenPipeline, tip: StateTip, checkpoint: Checkpoint, made: list[CheckpointPlan]
    ) -> dict[str, Json]:
        """Write a checkpoint of the changed state. Returns the references for the checkpoint of the epoch."""
        plan = CheckpointPlan(
            pipeline=pipeline.options.name,
            epoch=checkpoint.epoch,
            attempt=checkpoint.attempt,
            key_groups=tip.key_groups,
            shards=self.ranges,
            operators=tip.infos,
            positions=checkpoint.positions,
            watermarks=checkpoint.watermarks,
            workers=(Worker(**this_process().address),),
            created_at=checkpoint.created_at,
        )
        made.append(plan)
        ensure_here(pipeline.state_home, tip)
        return {name: ref.to_json() for name, ref in self._write(pipeline.state_home, plan, tip).items()}

    def _write(self, home: StateHome, plan: CheckpointPlan, tip: StateTip) -> dict[str, SnapshotRef]:
        """Write the checkpoint of the state, locally and in the remote tier."""
        layout.begin(home.storage, plan)
        states = self.change(tip, plan)
        contents, sums = [], {}
        for number in range(len(plan.shards)):
            head = {name: _in_shard(state, number) for name, state in states.items()}
            content, sums[number] = layout.finish_shard(home.storage, plan.checkpoint_id, number, head)
            contents.append(content)
        digest = layout.commit(home.storage, plan.checkpoint_id, sums)
        if home.fallback is not None:  # the next run may use another machine
            Replica(home.storage, home.fallback.storage).replicate(plan.checkpoint_id, digest)
        complete = assemble(plan, digest, contents)
        before = {name: SnapshotRef.from_json(value) for name, value in tip.checkpoint.state.items()}
        return {name: snapshot_ref(complete, name, before.get(name)) for name in plan.operators}


def _in_shard(state: OperatorState, number: int) -> ShardState:
    return state.shards[number][2] if state.shards else ShardState()


def ensure_here(home: StateHome, tip: StateTip) -> None:
    """Copy state that the home lacks from the remote tier: new checkpoints refer to its files.

    Raises:
        CheckpointError: no tier has it.
    """
    for ref in refs_of(tip.checkpoint).values():
        search = find_snapshot(home, ref, bring_home=True)
        if search.complete is None:
            raise search.problems[-1]


# -- another number of shards -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RescalePlan:
    """The plan of a rescale. `already`: the state already has this number of shards, and nothing is done.

    `by_next_run`: the snapshots lack epochs, so the next run reassigns the groups while it folds them.
    """

    pipeline: str
    epoch: int
    new_epoch: int
    shards_now: int
    shards: int
    key_groups: int
    operators: dict[str, dict[str, Json]]  # files and size_bytes of each
    already: bool
    by_next_run: bool = False


class Rescale:
    """Reassigns the key groups to another number of shards; no state file is rewritten.

    Raises:
        ConfigError: the spec sets another number, or there are too few key groups.
    """

    def __init__(self, pipeline: OpenPipeline, shards: int) -> None:
        set_to = pipeline.options.state.shards
        if set_to is not None and set_to != shards:
            raise ConfigError(
                f"the spec sets state.shards to {set_to}, so the next run would undo this",
                hint=f"Set state.shards: {shards} in the spec: the next run does it by itself.",
            )
        self._pipeline = pipeline
        self._shards = shards

    def plan(self) -> RescalePlan:
        """Return what the rescale would do. Raises the errors of `load_tip`."""
        tip = load_tip(self._pipeline)
        ranges, shards = self._ranges(tip), tip.shards
        files = {name: {f.path: f for _, _, shard in s.shards for f in shard.files} for name, s in tip.states.items()}
        dealt = [[(first, last) for first, last, _ in state.shards] for state in tip.states.values() if state.shards]
        return RescalePlan(
            pipeline=self._pipeline.options.name,
            epoch=tip.epoch,
            new_epoch=tip.epoch + 1,
            shards_now=shards,
            shards=self._shards,
            key_groups=tip.key_groups,
            operators={
                name: {"files": len(found), "size_bytes": sum(file.size_bytes for file in found.values())}
                for name, found in files.items()
            },
            already=shards == len(ranges) and all(tip.lacks or one == list(ranges) for one in dealt),
            by_next_run=bool(tip.lacks),
        )

    def perform(self, run: str, report: Callable[[str], None] = lambda _: None) -> tuple[RescalePlan, Receipt | None]:
        """Rescale. Returns the plan and the deciding sink's receipt; None if there was nothing to do.

        Raises:
            FencedError: another run took over meanwhile.
        """
        plan = self.plan()
        if plan.already:
            return plan, None
        ranges = self._ranges(load_tip(self._pipeline))

        def change(tip: StateTip, _: CheckpointPlan) -> States:
            return {name: rescale(state, ranges) for name, state in tip.states.items()}

        facts: dict[str, Json] = {"shards": self._shards, "shards_before": plan.shards_now}
        receipt = StateEdit("rescale", ranges, change, facts).perform(self._pipeline, run, report)
        return replace(plan, epoch=receipt.epoch - 1, new_epoch=receipt.epoch), receipt

    def _ranges(self, tip: StateTip) -> Ranges:
        return tuple(shard_ranges(tip.key_groups, self._shards))


def import_state(
    pipeline: OpenPipeline,
    operator: str,
    table: pa.Table,
    run: str,
    report: Callable[[str], None] = lambda _: None,
    *,
    replace_all: bool = False,
) -> Receipt | None:
    """Set the state of keys from rows. Returns None if there was nothing to do.

    Args:
        pipeline: The pipeline.
        operator: Its operator.
        table: The rows in the form of an export: the columns of key and state, and `_timer`; every key once.
        run: The id to claim with.
        report: Called with each step, for display.
        replace_all: Delete the state of keys without a row; otherwise they keep it.

    Raises:
        ConfigError: the operator is unknown, or the rows have other columns or a duplicate key; no run was fenced.
        CheckpointError: the newest snapshot is older than the newest epoch, or damaged.
        FencedError: another run took over meanwhile.
    """
    tip = load_tip(pipeline)
    tip.check_newest()
    found = find_stateful(pipeline, operator, tip.checkpoint)
    name, deciding = found.known_as, found.deciding
    if name not in tip.states or deciding is None:
        raise ConfigError(
            f"the checkpoint and the spec do not both have an operator {operator!r}",
            hint="An operator that is new begins with an exported state by initial_state: PATH.",
        )
    ensure_here(pipeline.state_home, tip)
    layout = _layout(pipeline, tip, found)
    locate_rows(table, layout, tip.key_groups, deciding, operator)
    if table.num_rows == 0 and not replace_all:
        return None
    ranges, home = tip.ranges, pipeline.state_home

    def change(now: StateTip, plan: CheckpointPlan) -> States:
        states = {known: rescale(state, ranges) for known, state in now.states.items()}
        added = import_rows(home, plan.checkpoint_id, table, layout, ranges, now.key_groups, deciding, name, plan.epoch)
        return {**states, name: added if replace_all else add_state(states[name], added)}

    facts = {"operator": name, "keys": table.num_rows, "replaced": replace_all}
    return StateEdit("import", ranges, change, facts).perform(pipeline, run, report)


def _layout(pipeline: OpenPipeline, tip: StateTip, found: Stateful) -> Layout:
    """Return the columns of an operator's state: those of its newest segment, otherwise those derived from its
    inputs."""
    state = tip.states[found.known_as]
    if any(shard.segments for _, _, shard in state.shards):
        return StateReader([pipeline.state_home], state, tip.key_groups, found.deciding).layout
    columns = columns_from_json(tip.checkpoint.columns)
    options = found.options
    if options is None or any(port not in columns for port in options.inputs):
        raise ConfigError(
            f"the state of {found.name!r} is empty, and its columns are not known yet",
            hint="Run the pipeline until the operator has seen rows, then import.",
        )
    inputs = {port: columns[port] for port in options.inputs}
    operator = build_operator(options, inputs, pipeline.options.operator_paths)
    return Layout(operator.state_key, operator.state_schema, timers=True)
