"""The base of followers: sinks that get every decided epoch from the outbox (Kafka, PostgreSQL, Redis, HTTP).

A follower never decides. Its own transaction carries the checkpoint: its head says which epoch it holds, and of the
next one how many rows. The head is read from the sink itself, so a lost answer or a crash is settled by reading it.

A kind of follower implements three methods, all of them about the head:
- `read_head` reads it;
- `swap_head` replaces it if it is still the expected one;
- `deliver` writes the rows of one epoch, and moves the head in the same transaction as the rows.

Everything else (claim and fence, receipts, history edits, what is staged) follows from them.
"""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from firnline.checkpoint.codec import seal, short_number, unseal
from firnline.checkpoint.model import Checkpoint
from firnline.errors import (
    BadRowError,
    CommitConflictError,
    ConfigError,
    DamagedError,
    FencedError,
    LedgerHoleError,
    SchemaError,
    SinkDivergedError,
    SinkWentBackError,
)
from firnline.faults import fault_point
from firnline.names import rebuilt_key
from firnline.operators.columns import align
from firnline.options import MISSING, MOVED, FollowerOptions
from firnline.schema import schema_from_json, schema_to_json
from firnline.sinks.base import (
    Capabilities,
    Decided,
    Effect,
    EpochCommit,
    Head,
    KeepRows,
    RunTasks,
    Sink,
    SinkContext,
)
from firnline.sinks.changes import find_truncates
from firnline.sinks.dead_letters import DeadLetter, DeadLetters
from firnline.sinks.encoding import encode_rows
from firnline.sinks.known import COPY
from firnline.sinks.outbox import KEY, find_missing
from firnline.sinks.outbox_rows import outbox_target, read_outbox
from firnline.sinks.shaping import RowShape, ShapedRows
from firnline.sinks.table_rows import table_of
from firnline.storage import Storage, open_storage
from firnline.types import EntryRef, Json, Receipt

logger = logging.getLogger(__name__)


def unseal_head(value: Json, what: str) -> dict[str, Json]:
    """Check a head, or a record with one, as `codec.unseal` does.

    Nothing else says for sure what the sink holds, so a person must decide.

    Raises:
        DamagedError: it differs from what was sealed.
        NewerFormatError: a newer Firnline wrote it.
    """
    try:
        return unseal(value, what)
    except DamagedError as error:
        raise DamagedError(
            error.message,
            hint="Restore the target from a backup. Without one, delete the record: the sink then counts as one that "
            "went back, and gets again all that is in the outbox, rows that it holds included.",
            **error.fields,
        ) from error


@dataclass(frozen=True, slots=True)
class FollowerHead:
    """What a follower holds of one pipeline, in its durable form: one record in the sink.

    `epoch` is the newest complete one. `partial` is the entry of the next one if its first `row` rows are delivered.
    """

    pipeline: str
    sink: str
    generation: int
    run: str  # the run that claimed this generation
    epoch: int = 0
    entry: EntryRef | None = None
    checkpoint: Checkpoint | None = None
    rows: int = 0  # of the newest complete epoch
    size_bytes: int = 0
    partial: EntryRef | None = None
    row: int = 0
    own: Mapping[str, Json] = field(default_factory=dict)  # what the kind keeps there, such as the parts of a template

    def to_json(self) -> dict[str, Json]:
        """Return the sealed form, with format number and checksum."""
        return seal(
            {
                "pipeline": self.pipeline,
                "sink": self.sink,
                "generation": self.generation,
                "run": self.run,
                "epoch": self.epoch,
                "entry": self.entry.to_json() if self.entry else None,
                "checkpoint": self.checkpoint.to_json() if self.checkpoint else None,
                "rows": self.rows,
                "size_bytes": self.size_bytes,
                "partial": {"entry": self.partial.to_json(), "row": self.row} if self.partial else None,
                **({"own": dict(self.own)} if self.own else {}),
            }
        )

    @classmethod
    def from_json(cls, value: Json, what: str) -> FollowerHead:
        """Parse the sealed form.

        Raises:
            DamagedError: it is invalid.
            NewerFormatError: a newer Firnline wrote it.
        """
        body = unseal_head(value, what)
        try:
            partial = body["partial"]
            return cls(
                pipeline=str(body["pipeline"]),
                sink=str(body["sink"]),
                generation=int(body["generation"]),
                run=str(body["run"]),
                epoch=int(body["epoch"]),
                entry=EntryRef.from_json(body["entry"]) if body["entry"] else None,
                checkpoint=Checkpoint.from_json(body["checkpoint"], what) if body["checkpoint"] else None,
                rows=int(body["rows"]),
                size_bytes=int(body["size_bytes"]),
                partial=EntryRef.from_json(partial["entry"]) if partial else None,
                row=int(partial["row"]) if partial else 0,
                own=dict(body.get("own") or {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True, eq=False)
class EpochRows:
    """The rows of one epoch for one follower, read from the outbox in the order of the ledger entry.

    Plain JSON describes it to a worker, so that tasks can deliver parts of an epoch.
    """

    pipeline: str
    sink: str
    epoch: int
    attempt: str
    port: str
    outbox: Mapping[str, Json]  # root, storage options and folder
    files: Sequence[dict[str, Json]]
    schema: pa.Schema
    shape: RowShape
    dead: frozenset[int] = frozenset()  # row numbers of dead letters, which are not delivered

    @property
    def rows(self) -> int:
        """The number of rows, with those that a filter leaves out."""
        return sum(int(file["rows"]) for file in self.files)

    def read(self, first: int = 0, most: int | None = None) -> Iterator[ShapedRows]:
        """Yield the rows from number `first` on, shaped; in batches of at most `most` rows if that is given.

        A batch may be empty after filtering: it still moves the row number.

        Raises:
            DamagedError: a file of the outbox is missing or damaged.
        """
        storage, number = open_storage(self.outbox["root"], self.outbox["storage_options"]), first
        for batch in read_outbox(storage, self.files, skip=first):
            fitted = batch if table_of(batch.schema) is not None else align(batch, self.schema)
            if fitted.num_rows != batch.num_rows:
                raise DamagedError(f"the columns of epoch {self.epoch} are not known for sink {self.sink!r}")
            for start in range(0, fitted.num_rows, most or max(1, fitted.num_rows)):
                part = fitted.slice(start, most) if most else fitted
                yield self.shape.apply(part, number, self.dead)
                number += part.num_rows

    def take(self, numbers: Sequence[int]) -> pa.Table:
        """Return the rows with these numbers, shaped, in this order. None of them is a dead letter yet.

        Raises:
            DamagedError: a file of the outbox is missing or damaged.
        """
        wanted, found = pa.array(numbers, pa.int64()), list[pa.Table]()
        taken: list[int] = []
        for part in replace(self, shape=replace(self.shape, where="")).read(min(numbers)):
            mask = pc.is_in(part.numbers, wanted)
            if pc.any(mask).as_py():
                found.append(pa.Table.from_batches([part.batch.filter(mask)]))
                taken += part.numbers.filter(mask).to_pylist()
            if part.end > max(numbers):
                break
        places = {number: place for place, number in enumerate(taken)}
        return pa.concat_tables(found).take(pa.array([places[number] for number in numbers], pa.int64()))

    def find_unfit(self) -> list[DeadLetter]:
        """Return the rows on which the condition fails, as bad rows.

        Raises:
            DamagedError: a file of the outbox is missing or damaged.
        """
        if not self.shape.where:
            return []
        bad = [
            number
            for part in replace(self, shape=RowShape()).read()
            for number in part.numbers.filter(self.shape.find_unfit(part.batch)).to_pylist()
        ]
        texts = encode_rows(self.take(bad).combine_chunks().to_batches()[0]).to_pylist() if bad else []
        reason = f"the condition {self.shape.where!r} fails on it"
        return [DeadLetter(number, reason, json.loads(text)) for number, text in zip(bad, texts, strict=True)]

    def find_lacking(
        self,
        needed: Collection[str] = (),
        *,
        keeps_old: bool = False,
        can_empty: bool = False,
        moves: Collection[str] | None = None,
    ) -> list[DeadLetter]:
        """Return the change rows that an upsert cannot apply, as bad rows.

        Args:
            needed: Columns without whose values no row can be written.
            keeps_old: Whether other columns keep their old values where a change row has none.
            can_empty: Whether the sink can empty its target.
            moves: Columns with one value in all rows of a target, within which a row whose key changes takes its old
                values along; None if it never does.

        Raises:
            DamagedError: a file of the outbox is missing or damaged.
        """
        if MISSING not in self.schema.names:  # a change row that empties a table lacks all values
            return []
        judged = pa.array(sorted(self.shape.condition_columns), pa.string())
        wanted = pa.array(sorted(needed), pa.string())
        reasons: dict[int, str] = {}
        homes = _Homes(moves) if moves is not None and MOVED in self.schema.names else None
        for part in replace(self, shape=RowShape()).read():
            lacks, fulfils = part.batch.column(MISSING), self.shape.fulfils(part.batch, lenient=True)
            empties = find_truncates(part.batch)
            if empties is not None:
                lacks = pc.if_else(empties, pa.scalar(None, lacks.type), lacks)
                refused = part.numbers.filter(pc.and_(empties, fulfils)) if not can_empty else pa.array([])
                reasons |= dict.fromkeys(refused.to_pylist(), "it empties the table, which this sink cannot do")
            names, owners = lacks.flatten(), pc.list_parent_indices(lacks)
            plain, delivered = pc.utf8_lower(names), fulfils.take(owners)
            lost = pc.and_(delivered, pc.is_in(plain, wanted)) if keeps_old else delivered
            lost = pc.or_(lost, pc.is_in(plain, judged))  # then nobody knows whether the row fulfils the condition
            if MOVED in self.schema.names:  # the values are those of another key, which is deleted
                moved = part.batch.column(MOVED).fill_null(False)
                moved = pc.and_not(moved, homes.find(part, fulfils)) if homes is not None else moved
                lost = pc.or_(lost, pc.and_(delivered, moved.take(owners)))
            found: dict[int, list[str]] = {}
            for number, name in zip(
                part.numbers.take(owners.filter(lost)).to_pylist(), names.filter(lost).to_pylist(), strict=True
            ):
                found.setdefault(number, []).append(name)
            for number, columns in found.items():
                reasons[number] = f"the log of the database does not have its value of {', '.join(columns)}"
        return self.letters(reasons) if reasons else []

    def letters(self, reasons: Mapping[int, str]) -> list[DeadLetter]:
        """Return dead letters of the rows with these numbers: their values, each with its reason."""
        wanted, found = pa.array(sorted(reasons), pa.int64()), list[DeadLetter]()
        for part in replace(self, shape=replace(self.shape, where="")).read():
            mask = pc.is_in(part.numbers, wanted)
            if pc.any(mask).as_py():
                kept = zip(part.numbers.filter(mask).to_pylist(), part.batch.filter(mask).to_pylist(), strict=True)
                found += [DeadLetter(number, reasons[number], _plain(values)) for number, values in kept]
        return found

    def event_ids(self, numbers: pa.Array) -> pa.Array:
        """Return the ids of events: `<pipeline>/<epoch>/<port>/<index>`."""
        return self.shape.event_ids(self.id_prefix, numbers)

    @property
    def id_prefix(self) -> str:
        """The part of an event's id that all rows of this epoch share."""
        return f"{self.pipeline}/{self.epoch}/{self.port}/"

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "pipeline": self.pipeline,
            "sink": self.sink,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "port": self.port,
            "outbox": dict(self.outbox),
            "files": list(self.files),
            "schema": schema_to_json(self.schema),
            "shape": self.shape.to_json(),
            "dead": sorted(self.dead),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> EpochRows:
        """Parse the output of `to_json`."""
        return cls(
            pipeline=str(value["pipeline"]),
            sink=str(value["sink"]),
            epoch=int(value["epoch"]),
            attempt=str(value["attempt"]),
            port=str(value["port"]),
            outbox=value["outbox"],
            files=value["files"],
            schema=schema_from_json(value["schema"]),
            shape=RowShape.from_json(value["shape"]),
            dead=frozenset(int(number) for number in value["dead"]),
        )


_LACKING_HINT = (
    "Let the server log whole rows from now on (PostgreSQL: ALTER TABLE ... REPLICA IDENTITY FULL; MySQL and MariaDB: "
    "SET GLOBAL binlog_row_image = 'FULL'), and copy the sink anew from a Delta table of the pipeline that has these "
    "rows: firnline sinks resync {sink} --from SINK --yes"
)


class _Homes:
    """Finds, batch by batch, rows whose row before is delivered into the same target."""

    def __init__(self, columns: Collection[str]) -> None:
        self._columns = sorted(columns)
        self._last: tuple[int, list[pa.Array]] = (-2, [])  # the last row that is delivered: its number and its target

    def find(self, part: ShapedRows, fulfils: pa.Array) -> pa.Array:
        """Return which rows of the next batch directly follow a delivered row of their target."""
        kept = part.numbers.filter(fulfils)
        if not len(kept):
            return pa.repeat(pa.scalar(False), len(part.numbers))
        number, values = self._last
        follows = pc.equal(pc.subtract(kept, 1), pa.concat_arrays([pa.array([number], pa.int64()), kept[:-1]]))
        ends: list[pa.Array] = []
        for at, name in enumerate(self._columns):
            column = part.batch.column(name).filter(fulfils).cast(pa.string())
            before = pa.concat_arrays([values[at] if values else column[:1], column[:-1]])
            follows = pc.and_(follows, pc.fill_null(pc.equal(column, before), False))
            ends.append(column[-1:])
        self._last = (kept[-1].as_py(), ends)
        return pc.is_in(part.numbers, kept.filter(follows))


@dataclass(frozen=True, slots=True, eq=False)
class EpochDelivery:
    """One epoch to deliver: its rows, and the heads that go with them."""

    commit: EpochCommit
    rows: EpochRows
    head: FollowerHead  # before the delivery
    run_tasks: RunTasks | None = None  # runs tasks on the engine
    dead_letters: DeadLetters | None = None  # None: a bad row stops the sink

    @property
    def shape(self) -> Mapping[str, Json]:
        """The kind's own settings, as they were when the epoch was made."""
        own: Mapping[str, Json] = self.commit.shape.get("own", {})
        return own

    @property
    def is_copy(self) -> bool:
        """Whether the rows are a copy of everything: a sink that `replaces` removes those that it wrote before."""
        return bool(self.commit.shape.get(COPY, False))

    @property
    def first_row(self) -> int:
        """The number of the first row that is not delivered yet."""
        return self.head.row

    def partial_head(self, row: int) -> FollowerHead:
        """Return the head once the first `row` rows are delivered, and the epoch is not complete."""
        return replace(self.head, partial=self.commit.entry, row=row)

    @property
    def final_head(self) -> FollowerHead:
        """The head once the epoch is complete."""
        return head_after(self.head, self.commit)

    def refuse(self, bad: Sequence[DeadLetter], *, hint: str = "Correct the target") -> None:
        """Take rows out of the delivery that the sink can never hold: they are durable as dead letters on return.

        The caller then delivers the rest; a repeated delivery leaves the same rows out. `hint` says how the sink can
        hold them after all.

        Raises:
            BadRowError: the sink has `on_bad_row: stop`.
        """
        if self.dead_letters is None:
            first = bad[0]
            raise BadRowError(
                f"sink {self.rows.sink!r} cannot hold row {self.rows.id_prefix}{first.row}: {first.reason}",
                hint=f"{hint}, or set `on_bad_row: dead_letter` on sink {self.rows.sink!r}; "
                f"`firnline trace {self.rows.id_prefix}{first.row}` shows where the row comes from.",
                sink=self.rows.sink,
                epoch=self.rows.epoch,
            )
        self.dead_letters.put(bad, self.rows.take([letter.row for letter in bad]))

    def without(self, bad: Sequence[DeadLetter]) -> EpochDelivery:
        """Return the delivery without these rows, which `refuse` has made durable."""
        return replace(self, rows=replace(self.rows, dead=self.rows.dead | {one.row for one in bad}))


def head_after(head: FollowerHead, commit: EpochCommit) -> FollowerHead:
    """Return the head of a follower once it holds the epoch of a commit."""
    return replace(
        head,
        epoch=commit.checkpoint.epoch,
        entry=commit.entry,
        checkpoint=commit.checkpoint,
        rows=commit.rows,
        size_bytes=commit.size_bytes,
        partial=None,
        row=0,
    )


class Follower(Sink):
    """A sink that is delivered from the outbox. See the module's docstring for what a kind implements.

    Calls come one at a time. `_generation` is the generation that this run claimed; 0 before the claim.
    """

    capabilities: ClassVar[Capabilities]
    storage = None
    can_empty: bool = False  # upsert: a change row can empty the target

    def __init__(self, options: FollowerOptions, context: SinkContext) -> None:
        self.name, self.required, self.uri = options.name, options.required, options.location
        self.former_name = options.renamed_from
        self.head_name = options.head_name
        self.context = context
        self._options = options
        self._generation = 0

    # -- to be written by a kind ----------------------------------------------------------------------

    @abstractmethod
    def read_head(self) -> FollowerHead | None:
        """Read the head from the sink; None if the sink has none of this pipeline and sink. Writes nothing.

        A head that is behind a transaction whose outcome is open is unknown, not old: wait for it, or raise.

        Raises:
            SinkError: the sink cannot be reached, or the head is unknown now.
        """

    @abstractmethod
    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        """Replace the head by `new`, atomically, if the sink still holds `expected`; durable on return.

        Raises:
            FencedError: the sink holds a newer generation than `new`.
            CommitConflictError: the sink holds another head; nothing was written.
            CommitUnknownError: the answer was lost.
        """

    @abstractmethod
    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        """Write the rows of an epoch from `delivery.first_row` on, and return the head afterwards: the final one.

        Each transaction writes rows and moves the head together, and requires, inside itself, that the sink still
        holds the head that it builds on. An epoch may take several transactions, with heads of
        `delivery.partial_head` in between.

        Raises:
            FencedError: the sink holds a newer generation.
            CommitUnknownError: the answer to a transaction was lost; the caller reads the head.
            BadRowError: a row can never be held, and `on_bad_row` is stop.
        """

    def keeps_old(self, own: Mapping[str, Json]) -> bool:
        """Return whether an upsert with these settings keeps the old values of columns that a change row lacks."""
        return False

    def moves(self, own: Mapping[str, Json]) -> bool:
        """Return whether an upsert with these settings gives a row whose key changes the old values that it lacks."""
        return False

    def find_caveats(self) -> list[str]:
        if self._options.write != "upsert" or self.context.find_input_key is None:
            return []
        keeps_old = self.keeps_old(self._options.own_shape())
        unable = [] if keeps_old else ["lacks a value that the log of the database left out"]
        unable += [] if self.can_empty else ["empties its table (TRUNCATE)"]
        if not unable:
            return []
        return [f"sink {self.name}: a change row that {' or '.join(unable)} is a bad row there; `on_bad_row` decides"]

    def keep_rows(self, head: FollowerHead, commit: EpochCommit) -> FollowerHead:
        """Carry out a history edit that leaves the rows as they are. Default: only the head moves."""
        after = head_after(head, commit)
        self.swap_head(head, after)
        return after

    def go_back(self, head: FollowerHead, commit: EpochCommit, effect: Effect) -> FollowerHead:
        """Carry out a history edit that removes rows, atomically with the new head. Default: refuse."""
        raise self._no_way_back()

    # -- the head -------------------------------------------------------------------------------------

    def load(self) -> Head:
        head = self.read_head()
        if head is None:
            return Head(exists=False, version=-1)
        return Head(
            exists=True,
            version=head.epoch,
            generation=head.generation,
            epoch=head.epoch,
            entry=head.entry,
            checkpoint=head.checkpoint,
            partial=head.partial.epoch if head.partial else 0,
            partial_entry=head.partial,
            path="sink" if head.checkpoint else "fresh",
        )

    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
        decided: Decided | None = None,
    ) -> Head:
        if generation is None:
            raise ConfigError(f"sink {self.name!r} cannot decide", hint="List a Delta table before it.")
        head = self.read_head()
        if head is not None and head.generation > generation:
            raise FencedError(f"generation {head.generation} took sink {self.name!r} over", generation=head.generation)
        # Two runs may have the same generation before the deciding table exists. Only one of them creates it.
        if head is None or (head.generation, head.run) != (generation, run):
            empty = FollowerHead(self.context.pipeline, self.head_name, generation, run)
            new = replace(head, generation=generation, run=run) if head is not None else empty
            fault_point("follower.claim.before")
            self.swap_head(head, new)
            fault_point("follower.claim.after")
        self._generation = generation
        return self.load()

    # -- staging --------------------------------------------------------------------------------------

    def stage_target(self) -> dict[str, Json]:
        assert self.context.outbox is not None
        return outbox_target(self.name, dict(self.context.outbox), self.context.input_port)

    def shape(self) -> dict[str, Json]:
        rows, own = RowShape.of(self._options).to_json(), self._options.own_shape()
        return {"rows": rows, "own": own, "port": self.context.input_port}

    def refuse_widening(self, types: Mapping[str, pa.DataType]) -> dict[str, str]:
        return {}  # a row is delivered with the types that its epoch has

    def fetch_staged(self, outbox: Storage, files: Sequence[dict[str, Json]]) -> None:
        """Do nothing: rows are delivered from the outbox itself."""

    def find_missing_staged(self, files: Sequence[dict[str, Json]], outbox: Storage | None = None) -> list[str]:
        missing = find_missing(self.outbox, [str(file[KEY]) for file in files])
        rebuilt = {key: rebuilt_key(key) for key in missing}
        gone = set(find_missing(self.outbox, rebuilt.values()))
        return [key for key, again in rebuilt.items() if again in gone]

    @property
    def outbox(self) -> Storage:
        """The storage of the outbox."""
        assert self.context.outbox is not None
        return open_storage(self.context.outbox["root"], self.context.outbox["storage_options"])

    # -- commit ---------------------------------------------------------------------------------------

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        head = self._require_claim()
        epoch = commit.checkpoint.epoch
        if head.epoch >= epoch:
            return self._first_receipt(head, commit)
        self._require_onto(head, commit.previous)
        if epoch != head.epoch + 1:
            raise FencedError(f"sink {self.name!r} holds epoch {head.epoch}, so epoch {epoch} cannot follow")
        if head.partial is not None and head.partial != commit.entry:
            raise SinkDivergedError(
                f"sink {self.name!r} holds {head.row} rows of another epoch {head.partial.epoch} than was decided",
                hint=f"Copy it anew: firnline sinks resync {self.name}",
                sink=self.name,
                epoch=head.partial.epoch,
            )
        fault_point("follower.commit.before")
        delivery = self._delivery(commit, head, run_tasks)
        after = self._deliver_fitting(delivery)
        if after is None:
            return self.commit(commit, run_tasks)  # without the refused rows, from where the sink is now
        fault_point("follower.commit.after")
        self._log_dead_letters(delivery)
        return self._receipt(after)

    def _deliver_fitting(self, delivery: EpochDelivery) -> FollowerHead | None:
        """Deliver an epoch; None if rows that can never be delivered were taken out of it instead.

        Raises:
            SchemaError: the columns do not fit. It names the sink, and the ways out of settings that an epoch keeps.
        """
        if self._options.write == "upsert" and (lacking := self._find_lacking(delivery)):
            delivery.refuse(lacking, hint=_LACKING_HINT.format(sink=self.name))
            return None
        try:
            try:
                return self.deliver(delivery)
            except SchemaError:
                unfit = delivery.rows.find_unfit()
                if not unfit:
                    raise
            delivery.refuse(unfit)
            return None
        except SchemaError as error:
            name, message = self.name, error.message
            hint = "" if error.hint == SchemaError.default_hint else f"{error.hint} "
            ways = (
                f"Epoch {delivery.rows.epoch} keeps the columns, key and condition that the sink had when it was made."
                f" If those were wrong, correct the spec, then: firnline sinks resync {name} --yes, or to go on without"
                f" what it lacks: firnline sinks resume {name} --accept-gap --yes"
            )
            message = message if f"sink {name!r}" in message else f"sink {name!r}: {message}"
            raise type(error)(message, hint=f"{hint}{ways}", **{**error.fields, "sink": name}) from error

    def _find_lacking(self, delivery: EpochDelivery) -> list[DeadLetter]:
        """Return the change rows of an epoch that the sink cannot apply."""
        own = delivery.shape
        order = [own["sequence_by"]] if own.get("sequence_by") else []
        named = [name for names in self._options.named_columns.values() for name in names]
        needed = {name.lower() for name in (*named, *own.get("key", ()), *order, *own.get("delete_when", ()))}
        targets = {name for setting in ("table", "topic") for name in self._options.named_columns.get(setting, ())}
        return delivery.rows.find_lacking(
            needed,
            keeps_old=self.keeps_old(own),
            can_empty=self.can_empty,
            moves=targets if self.moves(own) else None,
        )

    def _log_dead_letters(self, delivery: EpochDelivery) -> None:
        """Log how many rows of an epoch the sink refused; they are durable already."""
        letters = delivery.dead_letters.load() if delivery.dead_letters is not None else []
        if letters:
            logger.warning(
                "sink %s refused %s of epoch %d: %s; kept as dead letters, see `firnline dead-letters list --sink %s`",
                self.name,
                "1 row" if len(letters) == 1 else f"{len(letters):,} rows",
                delivery.rows.epoch,
                letters[0].reason,
                self.name,
            )

    def _delivery(self, commit: EpochCommit, head: FollowerHead, run_tasks: RunTasks | None) -> EpochDelivery:
        assert self.context.outbox is not None
        checkpoint = commit.checkpoint
        letters = DeadLetters(self.outbox, self.context.pipeline, self.head_name, checkpoint.epoch, checkpoint.attempt)
        # Whatever the spec says now: a row that is a dead letter of this epoch stays one.
        dead = letters.load_rows() if commit.files else frozenset[int]()
        may_refuse = bool(commit.files) and self._options.on_bad_row == "dead_letter"
        rows = EpochRows(
            pipeline=self.context.pipeline,
            sink=self.name,
            epoch=checkpoint.epoch,
            attempt=checkpoint.attempt,
            port=str(commit.shape.get("port", self.context.input_port)),
            outbox=self.context.outbox,
            files=commit.files,
            schema=commit.schema,
            shape=RowShape.from_json(commit.shape["rows"]) if "rows" in commit.shape else RowShape.of(self._options),
            dead=dead,
        )
        return EpochDelivery(commit, rows, head, run_tasks, letters if may_refuse else None)

    def _require_claim(self) -> FollowerHead:
        """Return the head.

        Raises:
            FencedError: a newer generation claimed the sink.
            SinkWentBackError: our claim is gone: somebody emptied the sink, or restored it from a backup.
        """
        head = self.read_head()
        if head is None or head.generation < self._generation:
            raise self._went_back(head)
        if head.generation > self._generation:
            raise FencedError(f"generation {head.generation} took sink {self.name!r} over", generation=head.generation)
        return head

    def _require_onto(self, head: FollowerHead, onto: EntryRef | None) -> None:
        """Check that the newest epoch of the head is that of an entry, by number and checksum.

        Raises:
            FencedError: it is an epoch of another history.
            SinkWentBackError: it is an older one.
        """
        if _is_at(head, onto):
            return
        if onto is not None and head.epoch < onto.epoch:
            raise self._went_back(head)
        raise FencedError(f"sink {self.name!r} holds epoch {head.epoch} of another history")

    def _went_back(self, head: FollowerHead | None) -> SinkWentBackError:
        now = f"holds epoch {head.epoch} of generation {head.generation} now" if head is not None else "is empty now"
        return SinkWentBackError(f"sink {self.name!r} lost what this run wrote: it {now}", sink=self.name)

    def _first_receipt(self, head: FollowerHead, commit: EpochCommit) -> Receipt:
        """Return the receipt of an epoch that the sink holds; refuse another epoch of the same number."""
        receipt = self._find_receipt(head, commit.checkpoint.epoch)
        if receipt is None or receipt.attempt != commit.checkpoint.attempt:
            raise FencedError(f"sink {self.name!r} holds another epoch {commit.checkpoint.epoch}")
        return receipt

    def find_receipt(self, epoch: int) -> Receipt | None:
        head = self.read_head()
        return self._find_receipt(head, epoch) if head is not None else None

    def _find_receipt(self, head: FollowerHead, epoch: int) -> Receipt | None:
        """Return the receipt of an epoch at or below the head: of an older one from the ledger's chain."""
        if head.epoch == epoch and head.checkpoint is not None:
            return self._receipt(head)
        if head.epoch < epoch or head.entry is None:
            return None
        try:
            for entry, ref in self.context.ledger.entries(head.entry):
                if entry.epoch == epoch:
                    files = entry.staged.get(self.name, [])
                    return self._receipt(
                        replace(
                            head,
                            epoch=epoch,
                            entry=ref,
                            checkpoint=entry.checkpoint,
                            rows=sum(int(file["rows"]) for file in files),
                            size_bytes=sum(int(file["size_bytes"]) for file in files),
                        )
                    )
                if entry.epoch < epoch:
                    return None
        except LedgerHoleError:
            return None
        return None

    def _receipt(self, head: FollowerHead) -> Receipt:
        checkpoint = head.checkpoint
        assert checkpoint is not None
        return Receipt(
            sink=self.name,
            epoch=checkpoint.epoch,
            generation=checkpoint.generation,
            run=checkpoint.run,
            attempt=checkpoint.attempt,
            checkpoint_checksum=checkpoint.checksum,
            version=checkpoint.epoch,
            rows=head.rows,
            size_bytes=head.size_bytes,
            entry=head.entry.checksum if head.entry else "",
        )

    # -- history edits --------------------------------------------------------------------------------

    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None, version: int | None = None) -> Receipt:
        head = self._require_claim()
        if head.entry == commit.entry:
            return self._receipt(head)
        if not _is_at(head, onto) or (version is not None and version != head.epoch):
            raise CommitConflictError(f"sink {self.name!r} holds epoch {head.epoch}, which was not expected")
        fault_point("follower.edit.before")
        after = self.keep_rows(head, commit) if isinstance(effect, KeepRows) else self.go_back(head, commit, effect)
        fault_point("follower.edit.after")
        return self._receipt(after)

    def find_schema(self) -> pa.Schema | None:
        return None


def _is_at(head: FollowerHead, entry: EntryRef | None) -> bool:
    """Return whether the newest complete epoch of a head is that of an entry, by number and checksum."""
    if entry is None or head.entry is None:
        return head.entry is None and entry is None
    return (head.epoch, short_number(head.entry.checksum)) == (entry.epoch, short_number(entry.checksum))


def _plain(value: Json) -> Json:
    """Return a value as plain JSON: what JSON has no word for becomes text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, bool | int | str) else str(value)
