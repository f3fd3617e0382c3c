"""Rebuilds a lost journal from what its sinks hold: the head of every follower carries the checkpoint of its epoch.

The recovery makes a new journal, with another id, and claims every sink for it. Then it decides a history edit: an
epoch that reads nothing, and continues after the newest epoch that is proven.
- If the ledger is still there, it knows more than one head: the recovery continues after the newest epoch that a sink
  holds, and after later ones whose rows are all in the outbox. Sinks that lag catch up.
- If the ledger is lost too, the recovery continues after the epoch that the named sink holds. A sink that lags gets no
  more of what it lacks: it is set aside. One that is ahead holds rows that come again: it is refused, unless the user
  leaves it.
What no sink holds is read again from the sources.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import (
    CheckpointError,
    ConfigError,
    FirnlineError,
    LedgerHoleError,
    SinkDivergedError,
    SinkError,
    StateLostError,
)
from firnline.history.edits.ledger_repair import GOES_ON, RepairFile, find_with_rows, fits_any
from firnline.history.store import on_record
from firnline.jobs.dataflow import dataflow_of
from firnline.names import GENERATION_LEAP, JOURNAL
from firnline.operators.columns import suggest
from firnline.run.commits import staged_for
from firnline.run.edits import apply_edit, decide_edit
from firnline.run.joining import ahead_of, committed_columns, edit_checkpoint, find_in_history, join_sink
from firnline.run.open_pipeline import OpenPipeline
from firnline.sinks.base import Head, Sink
from firnline.sinks.delta.journal import VERSIONS_PER_GENERATION, JournalSink
from firnline.sinks.delta.sink import as_delta
from firnline.sinks.known import KnownSink, check_known, find_known, known_sinks
from firnline.sources.base import processed_record
from firnline.state.manifest import SnapshotRef
from firnline.state.remote import find_snapshot
from firnline.stores.tiers import WAIT_SECONDS
from firnline.types import EntryRef, Json, Receipt

Becomes = Literal["in sync", "catches up", "set aside", "begins anew", "refused"]

NAMED = 3  # examples in a message


@dataclass(frozen=True, slots=True)
class RecoverySink:
    """What a sink holds, and what becomes of it."""

    name: str
    target: str
    required: bool
    epoch: int | None  # the newest that it holds; None: it has no head, or cannot be read
    partial: int  # the epoch of which it holds some rows; 0: none
    journal: str | None  # the id of the journal that its head names
    becomes: Becomes
    reason: str = ""
    left: bool = False  # the user leaves it: it is not touched now


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """What a recovery does. `already`: the newest epoch of the journal is this recovery."""

    pipeline: str
    sink: str
    home: str
    lost_journal: str
    epoch: int  # that the history continues after
    new_epoch: int
    ledger: Literal["kept", "lost"]
    positions: dict[str, Json]
    sinks: list[RecoverySink]
    files: list[RepairFile] = field(default_factory=list)  # without a ledger: files that may have been read
    refusals: list[FirnlineError] = field(default_factory=list)
    already: bool = False

    def check(self) -> None:
        """Raise the first reason why the recovery is refused."""
        if self.refusals:
            raise self.refusals[0]


@dataclass(frozen=True, slots=True)
class _Tip:
    """The epoch that the history continues after."""

    entry: EntryRef
    checkpoint: Checkpoint
    is_kept: bool  # whether the ledger has the entry


@dataclass(frozen=True, slots=True)
class _Found:
    plan: RecoveryPlan
    tip: _Tip
    heads: Mapping[str, Head]
    records: Mapping[str, list[dict[str, Json]]]  # files that count as processed, by source

    @property
    def generation(self) -> int:
        """The newest generation that any sink knows."""
        return max((head.generation for head in self.heads.values()), default=0)


class Recovery:
    """One recovery: `plan` is read-only, `perform` does it.

    Args:
        sink: The sink whose head is trusted.
        leave: Sinks that are not touched: they are set aside, whatever they hold.
        processed: Without a ledger: patterns of files to treat as processed.
        new: Patterns of files to read; this one wins if both match.
        accept_duplicates: Rows that the sink holds of an epoch whose entry is lost may come again.
    """

    def __init__(
        self,
        pipeline: OpenPipeline,
        sink: str,
        *,
        leave: Collection[str] = (),
        processed: Sequence[str] = (),
        new: Sequence[str] = (),
        accept_duplicates: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._sink = sink
        self._leave = frozenset(leave)
        self._processed = list(processed)
        self._new = list(new)
        self._accept_duplicates = accept_duplicates

    def plan(self) -> RecoveryPlan:
        """Return what the recovery would do. Writes nothing.

        Raises:
            ConfigError: the journal is not lost, or the named sink cannot serve.
        """
        done = self._find_done()
        return done if done is not None else self._read().plan

    def perform(self, run: str, tell: Callable[[str], None] = lambda _: None) -> tuple[RecoveryPlan, Receipt | None]:
        """Recover the journal. Returns no receipt if that was done already.

        Raises:
            FirnlineError: the first refusal of the plan; nothing was changed.
            CheckpointError: sinks or files moved since the plan was made; nothing is decided.
            FencedError: another recovery took over meanwhile.
            SinkError: a sink cannot be claimed; nothing is decided.
        """
        done = self._find_done()
        if done is not None:
            return done, None
        first, pipeline = self._read(), self._pipeline
        first.plan.check()
        details: dict[str, Json] = {
            "sink": self._sink,
            "lost_journal": first.plan.lost_journal,
            "ledger": first.plan.ledger,
            "sinks": {one.name: one.becomes for one in first.plan.sinks},
            "assume_processed": self._processed,
            "assume_new": self._new,
            "accept_duplicates": self._accept_duplicates,
        }
        with on_record(pipeline, "recover", run, from_epoch=first.plan.epoch, to_epoch=first.plan.new_epoch, **details):
            generation = self._claim_journal(run, first)
            done = self._find_done()
            if done is not None:
                return done, None
            tell(f"claimed generation {generation} in a new journal")
            for sink in self._touched(first):
                self._claim(sink, run, generation, first)
            receipt = self._decide(run, generation, first, tell)
        return replace(first.plan, new_epoch=receipt.epoch), receipt

    def _claim_journal(self, run: str, found: _Found) -> int:
        """Create the journal if it is not there yet, and claim it with a generation that no sink has seen."""
        deciding, newest = self._pipeline.deciding, found.generation
        leap = (newest // GENERATION_LEAP + 1) * GENERATION_LEAP  # the same for two recoveries at once
        cast("JournalSink", as_delta(deciding)).begin_anew(run, leap)
        owner = deciding.read_fence().generation
        return deciding.claim(run, generation=None if owner >= newest and owner else leap).generation

    def _touched(self, found: _Found) -> list[Sink]:
        """Return the sinks that have a head and are not left: they are claimed, so that no older run writes there."""
        return [sink for sink in self._pipeline.sinks[1:] if sink.name in found.heads and sink.name not in self._leave]

    def _claim(self, sink: Sink, run: str, generation: int, found: _Found) -> None:
        if not found.heads[sink.name].exists:
            return
        if sink.capabilities.fed_from_outbox:
            sink.end_unfinished()
            sink.claim(run, generation=generation)
        else:
            join_sink(self._pipeline, sink, run, generation, None, found.tip.entry if found.tip.is_kept else None)

    def _decide(self, run: str, generation: int, first: _Found, tell: Callable[[str], None]) -> Receipt:
        pipeline = self._pipeline

        def look(generation: int) -> tuple[LedgerEntry, Head]:
            now = self._read()
            if (now.tip.entry, now.plan.sinks, now.plan.files) != (first.tip.entry, first.plan.sinks, first.plan.files):
                raise CheckpointError(
                    "sinks or files moved since the plan was made",
                    hint=f"Look at the plan again: firnline recover --from {self._sink}",
                )
            return self._entry(now, generation, run), pipeline.deciding.load_committed()

        ref, receipt = decide_edit(pipeline, look, generation)
        tell(f"the new journal is at epoch {receipt.epoch}")
        carried = {one.name for one in first.plan.sinks if one.becomes in ("in sync", "catches up")}
        apply_edit(pipeline, [sink for sink in self._touched(first) if sink.name in carried], ref, tell)
        return receipt

    # -- reading --------------------------------------------------------------------------------------

    def _find_done(self) -> RecoveryPlan | None:
        """Return the plan of this recovery if it is the newest epoch of the journal.

        Raises:
            ConfigError: the journal is not lost.
        """
        pipeline = self._pipeline
        if pipeline.options.journal is None:
            raise ConfigError(
                f"pipeline {pipeline.options.name!r} decides in the table of sink {pipeline.deciding.name!r}, and has "
                "no journal: what that table lost, its sinks do not have",
                hint="Restore the table from a backup, or a savepoint: firnline run --from-savepoint PATH",
            )
        if all(sink.name != self._sink for sink in pipeline.sinks[1:]):
            names = [sink.name for sink in pipeline.sinks[1:]]
            raise ConfigError(f"the pipeline has no sink {self._sink!r}", hint=suggest(self._sink, names))
        head = pipeline.deciding.load()
        if head.checkpoint is None or head.entry is None:
            if head.exists and head.version < GENERATION_LEAP * VERSIONS_PER_GENERATION:
                root = pipeline.storage.root
                raise ConfigError(
                    f"a journal without an epoch lies in {root}: a run began anew there",
                    hint=f"Move {root}/_delta_log away, then repeat the command.",
                )
            return None
        entry = pipeline.ledger.find(head.entry)
        if isinstance(entry, LedgerEntry) and entry.kind == "recover" and entry.edit["from"] == self._sink:
            return RecoveryPlan(
                pipeline=pipeline.options.name,
                sink=self._sink,
                home=pipeline.storage.root,
                lost_journal=str(entry.edit["journal"]),
                epoch=int(entry.edit["to_epoch"]),
                new_epoch=entry.epoch,
                ledger="kept" if entry.previous else "lost",
                positions=dict(entry.checkpoint.positions),
                sinks=[],
                already=True,
            )
        raise ConfigError(
            f"the journal in {pipeline.storage.root} is not lost: it holds epoch {head.epoch}",
            hint="`firnline run` goes on there. See `firnline sinks list` for a sink that lags.",
        )

    def _read(self) -> _Found:
        pipeline = self._pipeline
        heads: dict[str, Head] = {}
        unread: dict[str, str] = {}
        for sink in pipeline.sinks[1:]:
            try:
                heads[sink.name] = sink.load()
            except (FirnlineError, OSError) as error:
                if sink.name == self._sink:
                    raise
                unread[sink.name] = error.message if isinstance(error, FirnlineError) else str(error)
        head = heads[self._sink]
        lost = self._find_journal(head)
        tip = self._find_tip(head, heads)
        known = known_sinks(tip.checkpoint)
        check_known(known, pipeline.options.followers)
        self._check_sources(tip.checkpoint)
        refusals: list[FirnlineError] = []
        sinks = [
            self._judge(sink, heads.get(sink.name), unread.get(sink.name, ""), tip, lost, known, refusals)
            for sink in pipeline.sinks[1:]
        ]
        files: list[RepairFile] = []
        records: dict[str, list[dict[str, Json]]] = {}
        if not tip.is_kept:
            self._check_state(tip, refusals)
            files, records = self._sort_files(tip.checkpoint, refusals)
        numbers = [tip.entry.epoch, pipeline.ledger.newest_epoch(), *(one.held for one in known.values())]
        numbers += [number for one in heads.values() for number in (one.epoch, one.partial)]
        numbers += self._copied_epochs(refusals)
        plan = RecoveryPlan(
            pipeline=pipeline.options.name,
            sink=self._sink,
            home=pipeline.storage.root,
            lost_journal=lost,
            epoch=tip.entry.epoch,
            new_epoch=max(numbers) + 1,
            ledger="kept" if tip.is_kept else "lost",
            positions=dict(tip.checkpoint.positions),
            sinks=sinks,
            files=files,
            refusals=refusals,
        )
        return _Found(plan, tip, heads, records)

    def _find_journal(self, head: Head) -> str:
        """Return the id of the lost journal, which the head of the named sink names."""
        name = self._pipeline.options.name
        if head.checkpoint is None or head.entry is None:
            raise ConfigError(
                f"sink {self._sink!r} holds no epoch of pipeline {name!r}, so nothing can be recovered from it",
                hint="Name another sink. Without one, move the home away and start anew: firnline run",
            )
        deciding = head.checkpoint.deciding
        if deciding.get("sink") != JOURNAL or not deciding.get("table"):
            raise ConfigError(
                f"the head of sink {self._sink!r} names no journal: {deciding.get('sink') or 'another version'} "
                f"decided epoch {head.epoch}",
                hint="What decided so far goes on deciding: list that table first, with required: true.",
            )
        return str(deciding["table"])

    def _find_tip(self, head: Head, heads: Mapping[str, Head]) -> _Tip:
        """Return the newest epoch that is proven, or whose rows are all in the outbox."""
        ledger = self._pipeline.ledger
        assert head.entry is not None
        assert head.checkpoint is not None
        if ledger.find(head.entry) is None:
            return _Tip(head.entry, head.checkpoint, is_kept=False)
        held = {ref for one in heads.values() for ref in (one.entry, one.partial_entry) if ref is not None}
        stateful = bool(dataflow_of(self._pipeline.options).stateful)
        found = _Tip(head.entry, head.checkpoint, is_kept=True)
        newest_held = 0
        ways: dict[EntryRef, int] = {head.entry: 0}  # entries that follow, with the newest on the way that a sink holds
        for epoch in range(head.epoch + 1, ledger.newest_epoch() + 1):
            for ref, data in ledger.candidates(epoch):
                entry = _parse(ref, data)
                if entry is None or entry.previous not in ways or entry.kind not in (*GOES_ON, "recover"):
                    continue
                if ref not in held and not self._is_whole(entry):
                    continue
                ways[ref] = ref.epoch if ref in held else ways[entry.previous]
                # State of an epoch that no sink has seen may not be complete: then only proven ones count.
                if (not stateful or ref in held) and (ways[ref], ref.epoch) > (newest_held, found.entry.epoch):
                    found, newest_held = _Tip(ref, entry.checkpoint, is_kept=True), ways[ref]
        return found

    def _is_whole(self, entry: LedgerEntry) -> bool:
        """Return whether the outbox has every row of an epoch."""
        return not any(
            sink.find_missing_staged(staged_for(entry, sink), self._pipeline.storage)
            for sink in self._pipeline.sinks[1:]
        )

    def _check_sources(self, checkpoint: Checkpoint) -> None:
        sources = self._pipeline.sources
        gone = [name for name in checkpoint.positions if name not in sources.names]
        if gone:
            raise ConfigError(
                f"the checkpoint knows a source {gone[0]!r}, which the spec no longer has",
                hint="Give the source the name that it had; to leave it out, keep it with a path that has no files.",
            )
        sources.start(checkpoint.positions)

    def _judge(
        self,
        sink: Sink,
        head: Head | None,
        unread: str,
        tip: _Tip,
        lost: str,
        known: Mapping[str, KnownSink],
        refusals: list[FirnlineError],
    ) -> RecoverySink:
        """Return what becomes of one sink, and note why the recovery is refused because of it."""
        one = find_known(known, sink.name, sink.former_name)
        becomes, reason, refusal = self._find_fate(sink, head, unread, tip, lost, one)
        left = sink.name in self._leave
        if left and sink.name != self._sink and sink.capabilities.fed_from_outbox:
            becomes, refusal = "set aside", None
            reason = reason or "it was left when the journal was recovered"
        if one is None and becomes == "set aside":  # nothing is remembered of it
            becomes, reason = "begins anew", "with the next epoch"
        if refusal is not None:
            becomes = "refused"
            refusals.append(refusal)
        journal = head.checkpoint.deciding.get("table") if head is not None and head.checkpoint is not None else None
        return RecoverySink(
            name=sink.name,
            target=sink.uri,
            required=sink.required,
            epoch=head.epoch if head is not None and head.checkpoint is not None else None,
            partial=head.partial if head is not None else 0,
            journal=str(journal) if journal else None,
            becomes=becomes,
            reason=reason,
            left=left,
        )

    def _find_fate(
        self, sink: Sink, head: Head | None, unread: str, tip: _Tip, lost: str, known: KnownSink | None
    ) -> tuple[Becomes, str, FirnlineError | None]:
        """Return what becomes of a sink, why, and the refusal if the recovery is impossible with it."""
        is_follower = sink.capabilities.fed_from_outbox
        way = f"To leave it as it is, set aside: --leave {sink.name}" if is_follower else ""
        if head is None:
            away = SinkError(f"sink {sink.name!r} cannot be read: {unread}", hint=f"Make it reachable. {way}")
            return "refused", unread, away
        if known is not None and known.set_aside:
            return "set aside", known.set_aside, None
        if known is not None and known.filled_from:
            if not tip.is_kept:
                return "set aside", f"it was being filled from {known.filled_from}", None
            return "catches up", f"it is filled from {known.filled_from}", None
        if head.checkpoint is None or head.entry is None:
            if not is_follower or known is None:
                return "begins anew", "it holds nothing", None
            lacks = self._find_lacking(sink, tip, known.born)
            return ("catches up", "", None) if not lacks else ("set aside", f"its head is gone, and {lacks}", None)
        if is_follower and head.checkpoint.deciding.get("table") not in (lost, *(known.former if known else ())):
            return (
                "refused",
                "another journal owns it",
                SinkDivergedError(
                    f"{sink.uri} (sink {sink.name!r}) names the journal {head.checkpoint.deciding.get('table')}, not"
                    f" {lost}",
                    hint=f"Name the sink whose journal is to come back with --from. {way}",
                    sink=sink.name,
                    epoch=head.epoch,
                ),
            )
        if head.partial_entry is not None and (refusal := self._check_partial(sink, head.partial_entry, tip, way)):
            return "refused", f"it holds a part of epoch {head.partial}", refusal
        if _is_same(head.entry, tip.entry):
            return "in sync", "", None
        behind = head.epoch < tip.entry.epoch
        if tip.is_kept and find_in_history(self._pipeline, tip.entry, head.epoch, short_number(head.entry.checksum)):
            lacks = self._find_lacking(sink, tip, head.epoch)
        elif behind and not tip.is_kept:
            lacks = f"epochs {head.epoch + 1} to {tip.entry.epoch} are lost with the ledger"
        else:
            return (
                "refused",
                "it holds epochs that the recovered history would lack",
                SinkDivergedError(
                    f"sink {sink.name!r} holds epoch {head.epoch}, which is not in the history of {self._sink!r} up to "
                    f"epoch {tip.entry.epoch}: what it holds beyond would come again",
                    hint=f"Recover from it: firnline recover --from {sink.name}. {way}",
                    sink=sink.name,
                    epoch=head.epoch,
                ),
            )
        if not lacks:
            return "catches up", f"epochs {head.epoch + 1} to {tip.entry.epoch}", None
        if is_follower and sink.name != self._sink:
            return "set aside", lacks, None
        return (
            "refused",
            lacks,
            LedgerHoleError(
                f"sink {sink.name!r} holds epoch {head.epoch}, and {lacks}",
                hint=f"Take it out of the spec; or, if it should be the newest: firnline recover --from {sink.name}",
                sink=sink.name,
                epoch=head.epoch,
            ),
        )

    def _check_partial(self, sink: Sink, entry: EntryRef, tip: _Tip, way: str) -> FirnlineError | None:
        """Return why a sink that holds some rows of an epoch is refused: those rows would come again."""
        if tip.is_kept and find_in_history(self._pipeline, tip.entry, entry.epoch, short_number(entry.checksum)):
            return None
        if sink.name == self._sink and self._accept_duplicates:
            return None
        what = f"sink {sink.name!r} holds some rows of epoch {entry.epoch}, whose ledger entry is lost: they come again"
        way = "If that may be: --accept-duplicates" if sink.name == self._sink else way
        return SinkDivergedError(what, hint=f"Bring the ledger back. {way}", sink=sink.name, epoch=entry.epoch)

    def _find_lacking(self, sink: Sink, tip: _Tip, epoch: int) -> str:
        """Return what a sink at an epoch can no longer be given, up to the tip; empty if it can be given everything."""
        if not tip.is_kept:
            return (
                f"epochs {epoch + 1} to {tip.entry.epoch} are lost with the ledger" if epoch < tip.entry.epoch else ""
            )
        try:
            for entry, _ in ahead_of(self._pipeline, tip.entry, epoch, sink.name):
                if not entry.is_history_edit and sink.find_missing_staged(
                    staged_for(entry, sink), self._pipeline.storage
                ):
                    return f"the rows of epoch {entry.epoch} are no longer in the outbox"
        except LedgerHoleError as error:
            return error.message
        return ""

    def _check_state(self, tip: _Tip, refusals: list[FirnlineError]) -> None:
        """Refuse state that is gone, or that lacks epochs which only the ledger could tell."""
        for name, value in tip.checkpoint.state.items():
            ref = SnapshotRef.from_json(value)
            if ref.epoch != tip.entry.epoch:
                refusals.append(
                    StateLostError(
                        f"the newest snapshot of operator {name!r} is that of epoch {ref.epoch}, and the ledger, which "
                        f"tells what was read up to epoch {tip.entry.epoch}, is lost",
                        hint="Bring the ledger back from a backup of the home; or start anew: firnline run.",
                        epoch=ref.epoch,
                    )
                )
            elif find_snapshot(self._pipeline.state_home, ref).complete is None:
                refusals.append(
                    StateLostError(
                        f"the state of operator {name!r} after epoch {ref.epoch} is gone: no tier has its snapshot",
                        hint="Bring the state back from a backup of the home, or of a tier (checkpoint.remote).",
                        epoch=ref.epoch,
                    )
                )

    def _copied_epochs(self, refusals: list[FirnlineError]) -> Iterator[int]:
        """Yield the newest epochs in store and tiers: their numbers are never used again."""
        for store in self._pipeline.recorder.stores:
            copy = store.read_within(WAIT_SECONDS)
            if copy.unreachable:
                refusals.append(
                    SinkError(f"{copy.location} cannot be read: {copy.unreachable}", hint="Make it reachable first.")
                )
            yield copy.epoch

    # -- files ----------------------------------------------------------------------------------------

    def _sort_files(
        self, checkpoint: Checkpoint, refusals: list[FirnlineError]
    ) -> tuple[list[RepairFile], dict[str, list[dict[str, Json]]]]:
        """Classify the files that only the ledger knew: those at or below the mark of a source."""
        files: list[RepairFile] = []
        records: dict[str, list[dict[str, Json]]] = {}
        for source in self._pipeline.sources:
            position = checkpoint.positions.get(source.name)
            if position is None:
                continue
            late = {str(one.record["path"]) for one in source.track(position).unread() if one.status == "late"}
            with_rows = find_with_rows(self._pipeline, source.name, position) if late else frozenset()
            for stat in source.list_inputs() if late else ():
                if stat.name not in late:
                    continue
                hint = "nothing tells"
                if stat.modified_at.isoformat() > checkpoint.created_at:
                    hint = f"changed after the newest epoch was made ({checkpoint.created_at})"
                if source.late_files == "ignore":
                    taken_as, how = "processed", "late files of this source are never read"
                elif stat.name in with_rows:
                    taken_as, how = "processed", "its rows are in a table"
                elif fits_any(stat.name, self._new):
                    taken_as, how = "new", f"you say so; {hint}"
                elif fits_any(stat.name, self._processed):
                    taken_as, how = "processed", f"you say so; {hint}"
                else:
                    taken_as, how = "unknown", hint
                created = stat.modified_at.isoformat()
                files.append(RepairFile(source.name, stat.name, stat.size_bytes, created, taken_as, how))
                if taken_as == "processed":
                    records.setdefault(source.name, []).append({**processed_record(stat), "how": how})
        unknown = [file.path for file in files if file.taken_as == "unknown"]
        if unknown:
            more = f" and {len(unknown) - NAMED:,} more" if len(unknown) > NAMED else ""
            refusals.append(
                ConfigError(
                    "the ledger is lost, and nothing tells whether these files, at or below the mark of their source, "
                    f"were processed: {', '.join(unknown[:NAMED])}{more}",
                    hint="Decide by name or pattern: --assume-processed PATTERN for those that were read, --assume-new "
                    "PATTERN for late ones that are to be read; '*' means all that are left.",
                    files=len(unknown),
                )
            )
        return files, records

    # -- the entry ------------------------------------------------------------------------------------

    def _entry(self, found: _Found, generation: int, run: str) -> LedgerEntry:
        pipeline, tip, plan = self._pipeline, found.tip, found.plan
        checkpoint = edit_checkpoint(
            pipeline, tip.checkpoint, None, epoch=plan.new_epoch, generation=generation, run=run
        )
        fates = {one.name: one for one in plan.sinks}
        known = known_sinks(tip.checkpoint)
        sinks: dict[str, Json] = {}
        for options in pipeline.options.followers:
            one = find_known(known, options.name, options.renamed_from)
            if one is None:
                continue
            former = tuple(dict.fromkeys((*one.former, plan.lost_journal)))
            held = max(one.held, fates[options.name].epoch or 0)
            reason = fates[options.name].reason if fates[options.name].becomes == "set aside" else ""
            if reason:
                one = replace(one, filled_from="", filled_since=0)
            sinks[options.name] = replace(one, former=former, held=held, set_aside=reason).to_json()
        carried = {
            name: head.entry.to_json()
            for name, head in found.heads.items()
            if head.entry is not None and fates[name].becomes in ("in sync", "catches up")
        }
        return LedgerEntry(
            checkpoint=replace(checkpoint, sinks=sinks, floor=checkpoint.floor if tip.is_kept else plan.new_epoch),
            previous=tip.entry if tip.is_kept else None,
            previous_checkpoint=tip.checkpoint.checksum if tip.is_kept else "",
            inputs=dict(found.records),
            schema=committed_columns(pipeline),
            kind="recover",
            edit={
                "to_epoch": plan.epoch,
                "from": self._sink,
                "journal": plan.lost_journal,
                "carried": carried,
                "set_aside": sorted(name for name, one in fates.items() if one.becomes == "set aside"),
            },
        )


def _is_same(one: EntryRef, other: EntryRef) -> bool:
    return (one.epoch, short_number(one.checksum)) == (other.epoch, short_number(other.checksum))


def _parse(ref: EntryRef, data: bytes) -> LedgerEntry | None:
    try:
        return LedgerEntry.from_bytes(data, f"ledger entry {ref.name}")
    except CheckpointError:
        return None
