"""The conformance suite of sinks: a kind of sink is done when it passes.

A test class inherits `SinkConformance` and gives two fixtures: `open_sink`, which opens the same place again and again,
as processes do that follow each other, and `read_rows`, which returns the rows that readers see there. The place is
empty when a test begins. The kind must be registered (`firnline.sinks.KINDS`). Needs pytest.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.clock import SystemClock
from firnline.errors import CommitConflictError, FencedError, FirnlineError, RollbackRefusedError
from firnline.names import outbox_folder
from firnline.schema import schema_to_json
from firnline.sinks.base import (
    Effect,
    EpochCommit,
    GoesBack,
    KeepRows,
    ReplaceRows,
    RestoreVersion,
    Sink,
    SinkContext,
)
from firnline.sinks.registry import open_stager
from firnline.storage import LocalStorage
from firnline.testing.faults import failing_at, reached_points
from firnline.types import EntryRef, Json, Receipt

__all__ = ["OpenSink", "ReadRows", "SinkConformance", "SinkDriver"]

OpenSink: TypeAlias = Callable[[SinkContext], Sink]
ReadRows: TypeAlias = Callable[[], list[dict[str, Any]]]

PIPELINE = "demo"


def rows(*ids: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows to stage: an `id` each, and what else is given, the same in all."""
    return [{"id": number, **columns} for number in ids]


def open_in(ledger: Ledger, open_sink: OpenSink, *, decides: bool = False) -> Sink:
    """Open a sink of the pipeline `demo`, which has this ledger; with an outbox there if the sink is fed from it."""
    context = SinkContext(
        pipeline=PIPELINE,
        ledger=ledger,
        clock=SystemClock(),
        replay=lambda positions, _inputs: positions,
        decides=decides,
        input_port="numbers",
    )
    sink = open_sink(context)
    if not sink.capabilities.fed_from_outbox:
        return sink
    folder = {"root": ledger.storage.root, "storage_options": {}, "folder": outbox_folder(PIPELINE)}
    return open_sink(replace(context, outbox=folder))


class SinkDriver:
    """One run of the pipeline `demo` into one sink, without an engine: it claims, stages and commits.

    Args:
        open_sink: Opens the sink.
        ledger: Of the pipeline.
        generation: None for the deciding sink; a further sink is given the generation that the deciding one has.
        run: Who claims; somebody new if it is not given.
        changes: Whether rows are staged as changes by key (`_op`, `_sequence`).
    """

    def __init__(
        self,
        open_sink: OpenSink,
        ledger: Ledger,
        *,
        generation: int | None = None,
        run: str = "",
        changes: bool = False,
    ) -> None:
        self.ledger = ledger
        self.sink = open_in(ledger, open_sink, decides=generation is None)
        self.run = run or secrets.token_hex(8)
        self._changes = changes
        head = self.sink.claim(self.run, generation)
        self.generation = head.generation
        self.epoch, self.entry, self.checkpoint = head.epoch, head.entry, head.checkpoint

    def stage_rows(self, rows: Iterable[dict[str, Any]], attempt: str) -> tuple[list[dict[str, Json]], pa.Schema]:
        """Stage rows as a task does; returns the files and the columns."""
        filled = [{**({"_op": "insert", "_sequence": 0} if self._changes else {}), **row} for row in rows]
        if not filled:
            return [], pa.schema([])
        batch = pa.RecordBatch.from_pylist(filled)
        stager = open_stager(json.loads(json.dumps(self.sink.stage_target())), attempt)
        stager.write(batch)
        return json.loads(json.dumps(stager.close())), batch.schema

    def stage(self, rows: Iterable[dict[str, Any]] = (), *, attempt: str = "", **changed: Any) -> EpochCommit:
        """Stage rows and the ledger entry of the next epoch; `changed` replaces fields of its checkpoint."""
        attempt = attempt or secrets.token_hex(8)
        files, schema = self.stage_rows(rows, attempt)
        checkpoint = replace(self._next_checkpoint(attempt), **changed)
        entry = LedgerEntry(
            checkpoint=checkpoint,
            previous=self.entry,
            previous_checkpoint=self.checkpoint.checksum if self.checkpoint else "",
            inputs={},
            staged={self.sink.name: files},
            schema=schema_to_json(self.sink.columns_of(schema)),
        )
        before = self.checkpoint.checksum if self.checkpoint else ""
        shape = json.loads(json.dumps(self.sink.shape()))
        return EpochCommit(checkpoint, self.ledger.stage(entry), self.entry, files, schema, before, shape=shape)

    def commit(self, commit: EpochCommit) -> Receipt:
        """Commit what was staged; the next epoch follows it."""
        receipt = self.sink.commit(commit)
        self._follow(commit)
        return receipt

    def apply(self, rows: Iterable[dict[str, Any]] = (), **changed: Any) -> Receipt:
        """Stage and commit."""
        return self.commit(self.stage(rows, **changed))

    def stage_edit(self, kind: str, epoch: int | None = None, **facts: Json) -> EpochCommit:
        """The ledger entry of a history edit, at the next epoch if none is given."""
        checkpoint = replace(self._next_checkpoint(secrets.token_hex(8)), epoch=epoch or self.epoch + 1)
        entry = LedgerEntry(checkpoint, self.entry, inputs={}, kind=kind, onto=self.entry, edit=facts)
        commit_facts = {"files": 0, "jump": facts}
        schema = self.sink.find_committed_schema() or pa.schema([])
        return EpochCommit(checkpoint, self.ledger.stage(entry), self.entry, [], schema, facts=commit_facts, kind=kind)

    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None = None) -> Receipt:
        """Carry out a history edit on top of the head."""
        receipt = self.sink.edit(commit, effect, onto or self.entry)
        self._follow(commit)
        return receipt

    def _next_checkpoint(self, attempt: str) -> Checkpoint:
        return Checkpoint(
            pipeline=PIPELINE,
            epoch=self.epoch + 1,
            generation=self.generation,
            run=self.run,
            attempt=attempt,
            created_at=datetime.now(UTC).isoformat(),
            positions={"numbers": self.epoch + 1},
            deciding=dict(self.sink.identity),
        )

    def _follow(self, commit: EpochCommit) -> None:
        self.epoch, self.entry, self.checkpoint = commit.checkpoint.epoch, commit.entry, commit.checkpoint


class SinkConformance:
    """What every kind of sink promises, and what its `capabilities` promise beyond that."""

    writes_changes = False  # whether rows are staged as changes by the key `id`

    @pytest.fixture
    def ledger(self, tmp_path: Path) -> Ledger:
        return Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)

    @pytest.fixture
    def drive(self, open_sink: OpenSink, ledger: Ledger) -> Callable[..., SinkDriver]:
        """Begin another run, as the deciding sink where the kind can decide, and as a further one where it cannot."""
        claims = iter(range(1, 1000))

        def begin(**settings: Any) -> SinkDriver:
            number = next(claims)
            if not self.capabilities(open_sink, ledger).decides:
                settings = {"generation": number, **settings}
            return SinkDriver(open_sink, ledger, changes=self.writes_changes, **settings)

        return begin

    def capabilities(self, open_sink: OpenSink, ledger: Ledger) -> Any:
        return self.peek(open_sink, ledger).capabilities

    def peek(self, open_sink: OpenSink, ledger: Ledger) -> Sink:
        """The sink as somebody else opens it, who claims nothing."""
        return open_in(ledger, open_sink)

    def ids(self, read_rows: ReadRows) -> list[int]:
        return sorted(int(row["id"]) for row in read_rows())

    # -- the head -------------------------------------------------------------------------------------

    def test_an_empty_place_has_no_head(self, open_sink: OpenSink, ledger: Ledger, read_rows: ReadRows) -> None:
        sink = self.peek(open_sink, ledger)
        head = sink.load()
        assert (head.epoch, head.entry, head.checkpoint, head.attempt) == (0, None, None, "")
        assert (sink.read_fence().epoch, sink.read_fence().digest) == (0, None)
        assert sink.find_receipt(1) is None
        assert read_rows() == []
        assert sink.load() == head, "reading writes nothing"

    def test_the_head_is_what_was_committed(
        self, drive: Callable[..., SinkDriver], open_sink: OpenSink, ledger: Ledger, read_rows: ReadRows
    ) -> None:
        run = drive()
        for numbers in ((1, 2), (3,), ()):
            commit = run.stage(rows(*numbers))
            receipt = run.commit(commit)
            head = self.peek(open_sink, ledger).load()
            assert (head.exists, head.epoch, head.entry) == (True, commit.checkpoint.epoch, commit.entry)
            assert (head.checkpoint, head.generation) == (commit.checkpoint, run.generation)
            assert (receipt.epoch, receipt.attempt) == (commit.checkpoint.epoch, commit.checkpoint.attempt)
            assert (receipt.run, receipt.generation) == (run.run, run.generation)
            assert receipt.checkpoint_checksum == commit.checkpoint.checksum
            assert (receipt.sink, receipt.rows) == (run.sink.name, len(numbers))
        assert self.ids(read_rows) == [1, 2, 3]

    def test_the_fence_is_the_committed_head_without_its_checkpoint(
        self, drive: Callable[..., SinkDriver], open_sink: OpenSink, ledger: Ledger, read_rows: ReadRows
    ) -> None:
        run = drive()
        run.apply(rows(1))
        read_rows()  # whoever commits what is pending has done so
        sink = self.peek(open_sink, ledger)
        head, fence = sink.load_committed(), sink.read_fence()
        assert head.entry is not None
        assert (fence.exists, fence.version, fence.epoch) == (True, head.version, head.epoch)
        assert (fence.generation, fence.digest) == (head.generation, short_number(head.entry.checksum))
        sink.check_holder(run.generation)
        with pytest.raises(FencedError):
            sink.check_holder(run.generation - 1)

    def test_receipts_are_found_by_their_epoch(
        self, drive: Callable[..., SinkDriver], open_sink: OpenSink, ledger: Ledger
    ) -> None:
        run = drive()
        made = [run.apply(rows(number)) for number in (1, 2, 3)]
        sink = self.peek(open_sink, ledger)
        for receipt in made:
            found = sink.find_receipt(receipt.epoch)
            assert found is not None
            assert (found.attempt, found.checkpoint_checksum) == (receipt.attempt, receipt.checkpoint_checksum)
            assert (found.rows, found.size_bytes) == (receipt.rows, receipt.size_bytes)
        assert sink.find_receipt(4) is None

    # -- claims ---------------------------------------------------------------------------------------

    def test_a_claim_fences_every_older_run(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        old = drive()
        old.apply(rows(1))
        waiting = old.stage(rows(2))
        new = drive()
        assert new.generation > old.generation
        assert (new.epoch, new.entry) == (1, waiting.previous), "the new run goes on from the head"
        with pytest.raises(FencedError):
            old.commit(waiting)
        new.apply(rows(3))
        with pytest.raises(FencedError):
            old.sink.commit(waiting)
        assert self.ids(read_rows) == [1, 3]

    def test_a_repeated_claim_takes_the_same_generation(self, drive: Callable[..., SinkDriver]) -> None:
        run = drive()
        run.apply(rows(1))
        given = None if run.sink.capabilities.decides else run.generation
        again = run.sink.claim(run.run, given, again=True)
        assert again.epoch == 1
        assert again.generation >= run.generation
        run.generation = again.generation
        run.apply(rows(2))
        assert run.sink.load().epoch == 2

    def test_a_run_that_was_replaced_may_not_claim_again(self, drive: Callable[..., SinkDriver]) -> None:
        old = drive()
        old.apply(rows(1))
        drive()
        with pytest.raises(FencedError):
            old.sink.claim(old.run, None if old.sink.capabilities.decides else old.generation, again=True)

    def test_a_further_sink_registers_the_generation_that_it_is_given(
        self, open_sink: OpenSink, ledger: Ledger
    ) -> None:
        def follow(generation: int) -> SinkDriver:
            return SinkDriver(open_sink, ledger, generation=generation, changes=self.writes_changes)

        first = follow(5)
        assert first.generation == 5
        first.apply(rows(1))
        assert follow(8).generation == 8
        with pytest.raises(FencedError):
            follow(6)

    # -- staging --------------------------------------------------------------------------------------

    def test_staged_rows_are_seen_by_nobody(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        run.apply(rows(1))
        waiting = run.stage(rows(2))
        assert all({"path", "rows", "size_bytes"} <= file.keys() for file in waiting.files)
        assert (waiting.rows, self.ids(read_rows)) == (1, [1])
        assert run.sink.find_missing_staged(waiting.files) == []

    def test_two_attempts_never_write_to_the_same_place(
        self, drive: Callable[..., SinkDriver], read_rows: ReadRows
    ) -> None:
        run = drive()
        lost, kept = run.stage(rows(1, 2)), run.stage(rows(1))
        assert not {str(file["path"]) for file in lost.files} & {str(file["path"]) for file in kept.files}
        run.commit(kept)
        assert self.ids(read_rows) == [1]

    def test_a_stager_discards_what_it_wrote(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        run.apply(rows(1))
        stager = open_stager(run.sink.stage_target(), secrets.token_hex(8))
        columns = {"_op": ["insert"], "_sequence": [0]} if self.writes_changes else {}
        stager.write(pa.RecordBatch.from_pydict({"id": [2], **columns}))
        assert stager.files >= 1
        stager.discard()
        run.apply(rows(3))
        assert self.ids(read_rows) == [1, 3]

    # -- commits --------------------------------------------------------------------------------------

    def test_a_repeated_commit_writes_nothing(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        commit = run.stage(rows(1, 2))
        first = run.commit(commit)
        head = run.sink.load()
        second = run.sink.commit(commit)
        assert (second.attempt, second.epoch, second.rows) == (first.attempt, first.epoch, first.rows)
        assert second.version == first.version
        assert run.sink.load() == head
        assert self.ids(read_rows) == [1, 2]

    def test_an_epoch_of_another_author_is_refused(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        run.apply(rows(1))
        run.apply(rows(2))
        assert self.ids(read_rows) == [1, 2]  # committed, also where somebody else commits what is staged
        for epoch in (1, 2):
            with pytest.raises(FencedError):
                run.sink.commit(run.stage(rows(9), epoch=epoch))
        assert self.ids(read_rows) == [1, 2]

    def test_a_commit_onto_another_head_is_refused(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        run.apply(rows(1))
        head = run.sink.load()
        stranger = EntryRef(1, "elsewhere", "0" * 64)
        for previous, epoch in ((stranger, 2), (head.entry, 4)):
            wrong = replace(run.stage(rows(9), epoch=epoch), previous=previous)
            with pytest.raises(FencedError):
                run.sink.commit(wrong)
            assert run.sink.load().entry == head.entry
        assert self.ids(read_rows) == [1]

    def test_columns_may_be_added(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        run.apply(rows(1))
        run.apply(rows(2, name="two"))
        schema = run.sink.find_schema()
        assert schema is not None or not run.sink.capabilities.has_columns
        assert schema is None or {"id", "name"} <= set(schema.names)
        assert {row["id"]: row.get("name") for row in read_rows()} == {1: None, 2: "two"}

    def test_housekeeping_changes_nothing_that_is_held(
        self, drive: Callable[..., SinkDriver], read_rows: ReadRows
    ) -> None:
        run = drive()
        run.apply(rows(1))
        head = run.sink.load()
        run.sink.maintain()
        run.sink.make_durable()
        run.sink.check_whole()
        run.sink.check()
        assert run.sink.load() == head
        assert self.ids(read_rows) == [1]

    def test_a_failure_at_any_point_leaves_an_epoch_whole_or_absent(
        self, drive: Callable[..., SinkDriver], read_rows: ReadRows
    ) -> None:
        """Every fault point of a claim and a commit fails once; whoever comes next finishes the epoch, once."""
        with reached_points() as reached:
            drive().apply(rows(0))
            drive().apply(rows(1))
        expected = [0, 1]
        for number, point in enumerate(sorted(reached), start=2):
            commit = None
            with failing_at(point), suppress(FirnlineError, OSError):
                broken = drive()
                commit = broken.stage(rows(number))
                broken.commit(commit)
            run = drive()
            assert run.epoch in (number, number + 1) or commit is None, point
            if run.epoch == number and commit is not None and run.sink.load().partial:
                run.commit(commit)  # a further sink that holds a part of an epoch gets the rest of the same one
            elif run.epoch == number:
                run.apply(rows(number))
            else:
                assert commit is not None
                assert (run.epoch, run.entry) == (number + 1, commit.entry), point
                found = run.sink.find_receipt(run.epoch)
                assert found is not None
                assert found.attempt == commit.checkpoint.attempt, point
            expected.append(number)
            assert self.ids(read_rows) == expected, point

    # -- history edits --------------------------------------------------------------------------------

    def test_an_edit_that_keeps_rows_moves_the_head(
        self, drive: Callable[..., SinkDriver], open_sink: OpenSink, ledger: Ledger, read_rows: ReadRows
    ) -> None:
        run = drive()
        run.apply(rows(1))
        read_rows()  # whoever commits what is pending has done so
        before = run.entry
        edit = run.stage_edit("fresh", epoch=5, truncate=False)
        receipt = run.edit(edit, KeepRows())
        assert run.sink.edit(edit, KeepRows(), before).version == receipt.version, "the repeat returns the receipt"
        head = self.peek(open_sink, ledger).load()
        assert (head.epoch, head.entry, head.checkpoint) == (5, edit.entry, edit.checkpoint)
        run.apply(rows(2))
        assert self.ids(read_rows) == [1, 2]

    def test_an_edit_of_another_head_or_by_an_older_run_is_refused(
        self, drive: Callable[..., SinkDriver], read_rows: ReadRows
    ) -> None:
        old = drive()
        old.apply(rows(1))
        read_rows()
        edit = old.stage_edit("fresh", truncate=False)
        with pytest.raises((CommitConflictError, FencedError)):
            old.sink.edit(edit, KeepRows(), EntryRef(1, "elsewhere", "0" * 64))
        new = drive()
        with pytest.raises(FencedError):
            old.sink.edit(edit, KeepRows(), old.entry)
        assert new.sink.load().epoch == 1
        assert self.ids(read_rows) == [1]

    def test_going_back_is_exact_or_refused(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        for number in (1, 2, 3):
            run.apply(rows(number))
            read_rows()
        plan, refused = run.sink.plan_return(1, ())
        assert (plan.name, plan.epoch) == (run.sink.name, 3)
        edit = run.stage_edit("rollback", to_epoch=1)
        if run.sink.capabilities.goes_back is GoesBack.NOT_AT_ALL:
            assert refused
            with pytest.raises(RollbackRefusedError):
                run.sink.version_of(1)
            with pytest.raises(RollbackRefusedError):
                run.edit(edit, RestoreVersion(run.sink.load().version))
            assert self.ids(read_rows) == [1, 2, 3]
            return
        assert refused == []
        version = run.sink.version_of(1)
        assert plan.version_then == version
        run.edit(edit, RestoreVersion(version))
        assert self.ids(read_rows) == [1]
        run.apply(rows(4))
        assert self.ids(read_rows) == [1, 4]

    def test_emptying_is_exact_or_refused(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        run.apply(rows(1, 2))
        read_rows()
        edit = run.stage_edit("fresh", truncate=True)
        if run.sink.capabilities.goes_back is GoesBack.NOT_AT_ALL:
            with pytest.raises(RollbackRefusedError):
                run.edit(edit, ReplaceRows())
            assert self.ids(read_rows) == [1, 2]
        else:
            run.edit(edit, ReplaceRows())
            assert read_rows() == []

    # -- changes by key -------------------------------------------------------------------------------

    def test_changes_are_applied_by_key(self, drive: Callable[..., SinkDriver], read_rows: ReadRows) -> None:
        run = drive()
        assert run.sink.capabilities.upserts == self.writes_changes
        if not self.writes_changes:
            return
        run.apply(rows(1, 2, 3, v="a"))
        run.apply([{"id": 1, "v": "b", "_op": "update"}, {"id": 2, "v": None, "_op": "delete"}])
        assert {row["id"]: row["v"] for row in read_rows()} == {1: "b", 3: "a"}
