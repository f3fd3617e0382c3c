"""A Delta sink with a template: a follower with many parts, one Delta table each. It is atomic per part.

The sink's head lies beside the parts, below `_firnline/` of the folder that all of them lie in. An epoch is delivered
in these steps:
1. The rows are read from the outbox, and staged as files of the parts that they name.
2. The head names these parts as open.
3. Each of them gets its files in one Delta commit, with the checkpoint. Its fence asks for the entry that last touched
   this part. Parts that hold the epoch already are left alone.
4. The head says that the sink holds the epoch, and for each part which entry touched it last.

After a kill between 2 and 4 the epoch is delivered again: every part says itself whether it holds it. A run of an older
generation that is still at step 3 writes the very rows that were decided, or finds them there. A history edit touches
all parts that are open, so that such a run finds another entry than it asks for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import ClassVar, TypeVar

import pyarrow as pa

from firnline.checkpoint.codec import canonical, checksum
from firnline.errors import (
    BadRowError,
    CommitConflictError,
    FencedError,
    FirnlineError,
    LedgerHoleError,
    RollbackRefusedError,
    SchemaError,
    SinkWentBackError,
)
from firnline.names import probe_key, progress_folder
from firnline.rescued import Rescued, add_rescued
from firnline.sinks.base import (
    Capabilities,
    Decided,
    Effect,
    EpochCommit,
    GoesBack,
    Head,
    KeepRows,
    ReplaceRows,
    RestoreVersion,
    RunTasks,
    SinkContext,
    SinkReturn,
    Stager,
)
from firnline.sinks.changes import table_columns
from firnline.sinks.delta.kind import open_stager
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.delta.parts.captured import (
    PartColumns,
    PartKey,
    name_part,
    options_from_json,
    options_to_json,
)
from firnline.sinks.delta.parts.state import (
    Held,
    Part,
    Parts,
    add_epoch,
    close_parts,
    find_lost,
    go_back_to,
    judge,
    newest_epoch,
    open_parts,
    own_of,
    parts_of,
    rescued_of,
)
from firnline.sinks.delta.parts.table import PartTable, PartUpsertTable, entry_of, ref_of, refuse_name
from firnline.sinks.delta.stage import MAX_GATHERED_BYTES, ParquetStager
from firnline.sinks.delta.table import check_put_if_absent
from firnline.sinks.follower import EpochDelivery, Follower, FollowerHead, head_after
from firnline.sinks.numbered import NumberedFiles
from firnline.sinks.table_rows import SourceTable
from firnline.sinks.templates import NameTemplate, Share, too_many_parts
from firnline.sources.cdc.position import reads_anew
from firnline.storage import open_storage
from firnline.types import Delivery, EntryRef, Json, Receipt

WORKERS = 4  # parts that are committed at the same time
READERS = 16  # parts that are read at the same time
TABLES = "tables"  # in the shape of an epoch: its rows are those of captured tables; the rules about new columns
T = TypeVar("T")
R = TypeVar("R")


class DeltaPartsSink(Follower):
    """Delta tables with a template. See the module's docstring."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        Delivery.EXACTLY_ONCE_PER_PART,
        goes_back=GoesBack.EXACTLY,
        fed_from_outbox=True,
        has_columns=False,
    )
    can_empty = True

    def __init__(self, options: DeltaPartsOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        upserts = options.write == "upsert"
        self.capabilities = replace(  # type: ignore[misc]  # they depend on the settings
            type(self).capabilities, upserts=upserts, replaces=not upserts
        )
        self._settings = options
        self._storage = open_storage(options.root, options.storage_options)
        self._files = NumberedFiles(self._storage, progress_folder(context.pipeline, self.head_name), "parts.head")
        self._run = ""
        self._check_due = True  # whether the parts are to be compared with the head when it is read next
        self._lowered: tuple[str, FollowerHead] | None = None  # a head by its key, and what its parts still hold of it
        self._tables: dict[tuple[str, bytes], PartTable] = {}  # by name and settings
        self._keys: dict[str, tuple[str, ...] | None] = {}  # of captured tables, by part, as the newest head has them
        self._touched: set[str] = set()  # since the last housekeeping

    def keeps_old(self, own: Mapping[str, Json]) -> bool:
        return True

    def moves(self, own: Mapping[str, Json]) -> bool:
        return True

    def shape(self) -> dict[str, Json]:
        shape, more = super().shape(), dict[str, Json]()
        if self._settings.takes_tables:
            more[TABLES] = options_to_json(self.context.input_schema)
        elif self._settings.write == "upsert":
            more["key"] = list(self.context.key_of(self._settings))
        return {**shape, "own": {**shape["own"], **more, "of_records": self.context.input_is_source}}

    # -- the head -------------------------------------------------------------------------------------

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
        self._run = run
        return super().claim(run, generation, baseline, onto, again=again, decided=decided)

    def end_unfinished(self) -> None:
        """Have the parts compared with the head when it is read next: one of them may have lost what it held."""
        self._check_due = True

    def read_head(self) -> FollowerHead | None:
        found = self._load()
        return found[1] if found is not None else None

    def _load(self) -> tuple[str, FollowerHead] | None:
        """Return the key and the content of the head; lowered if a part lost entries."""
        found = self._files.load()
        if found is None:
            return None
        key, head = found[0], FollowerHead.from_json(found[1], f"{self._storage.root}/{found[0]}")
        self._keys = {name: part.key for name, part in parts_of(head.own).items()}
        if self._check_due:
            self._lowered = self._lower(key, head)
            self._check_due = False
        return self._lowered if self._lowered is not None and self._lowered[0] == key else (key, head)

    def _lower(self, key: str, head: FollowerHead) -> tuple[str, FollowerHead] | None:
        """Compare the parts with the head; returns the head as low as the part that lost most, None if none did."""
        parts = parts_of(head.own)
        tables = {name: self._open_part(name) for name in parts}
        found = dict(zip(tables, _at_once(PartTable.find_held, tables.values(), READERS), strict=True))
        lost = find_lost(parts, found)
        if not lost:
            return None
        epoch, parts = go_back_to(head.epoch, parts, lost)
        lowered = replace(head, epoch=0, entry=None, checkpoint=None, rows=0, size_bytes=0)
        lowered = replace(lowered, own=own_of(parts, rescued_of(head.own, epoch)))
        try:
            for entry, ref in self.context.ledger.entries(head.entry):
                if entry.epoch <= epoch:
                    return key, replace(lowered, epoch=entry.epoch, entry=ref, checkpoint=entry.checkpoint)
        except LedgerHoleError as error:
            name = min(lost)
            raise SinkWentBackError(
                f"{tables[name].uri}, a part of sink {self.name!r}, lost epoch {parts_of(head.own)[name].held.epoch},"
                f" and the ledger no longer has what came after epoch {epoch}",
                hint=f"Bring the table back from a backup, or copy the sink anew: firnline sinks resync {self.name}",
                sink=self.name,
                epoch=epoch,
            ) from error
        return key, lowered

    def load(self) -> Head:
        found = self._load()
        head = super().load()
        newest = newest_epoch(parts_of(found[1].own)) if found is not None else 0
        return replace(head, partial=newest if newest > head.epoch else 0)

    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        if expected is None:
            # Another sink of this run may have the same folder.
            probe = f"{self._run}-{checksum(self.head_name.encode())[:8]}"
            check_put_if_absent(self._storage, probe_key(self.context.pipeline, probe))
        found = self._load()
        head = found[1] if found is not None else None
        self._require(head, expected, new)
        number = int(found[0].rpartition("/")[2].removesuffix(".json")) + 1 if found is not None else 1
        if not self._files.append(number, new.to_json()):
            held = self.read_head()
            if held != new:  # else this run wrote it, and the answer was lost
                self._require(held, expected, new)
                raise CommitConflictError(f"sink {self.name!r} holds another head than expected; nothing was written")

    def _require(self, head: FollowerHead | None, expected: FollowerHead | None, new: FollowerHead) -> None:
        if head is not None and head.generation > new.generation:
            raise FencedError(f"generation {head.generation} took sink {self.name!r} over", generation=head.generation)
        if head != expected:
            raise CommitConflictError(f"sink {self.name!r} holds another head than expected; nothing was written")

    def find_rescued(self) -> list[tuple[int, Rescued]]:
        head = self.read_head()
        return [(epoch, one) for epoch, found in rescued_of(head.own if head else {}) for one in found]

    def _receipt(self, head: FollowerHead) -> Receipt:
        rescued = [one.to_json() for epoch, found in rescued_of(head.own) if epoch == head.epoch for one in found]
        return replace(super()._receipt(head), rescued=rescued)

    def find_parts(self) -> list[str]:
        head = self.read_head()
        return [self._uri(name) for name in sorted(parts_of(head.own))] if head is not None else []

    # -- parts ----------------------------------------------------------------------------------------

    def _uri(self, name: str) -> str:
        return f"{self._storage.root}/{name}"

    def _open_part(self, name: str, own: Mapping[str, Json] | None = None) -> PartTable:
        """Open the table of a part, for an epoch with these settings; reads nothing yet."""
        if own is None:
            own = {**self._settings.own_shape(), "of_records": self.context.input_is_source}
            if self._settings.takes_tables:
                own = own_of_table(own, self._keys.get(name))
        settings = self._settings
        key = (name, canonical(dict(own)))
        table = self._tables.get(key)
        if table is None:
            options = DeltaSinkOptions(
                self.name,
                self._uri(name),
                write=own["write"],
                key=tuple(own["key"]),
                partition_by=settings.partition_by,
                file_size=settings.file_size,
                interop="none",
                evolution=settings.evolution,
                storage_options=settings.storage_options,
                sequence_by=own["sequence_by"],
                delete_when={column: tuple(values) for column, values in own["delete_when"].items()},
            )
            context = replace(self.context, input_is_source=bool(own["of_records"]))
            kind = PartUpsertTable if own["write"] == "upsert" else PartTable
            table = self._tables[key] = kind(options, context, self.head_name)
        return table

    def open_tables(self, also: Collection[str] = ()) -> list[PartTable]:
        """Return the tables of all parts, by name: those that the head names, and those at the locations `also`, which
        may not exist yet. Reads the head only."""
        head = self.read_head()
        parts = parts_of(head.own) if head is not None else {}
        prefix = f"{self._storage.root}/"
        names = {uri.removeprefix(prefix) for uri in also if uri.startswith(prefix)}
        tables = []
        for name in sorted(parts.keys() | names):
            table = self._open_part(name)
            self._begin(table, parts.get(name, Part(0)))
            tables.append(table)
        return tables

    # -- delivery -------------------------------------------------------------------------------------

    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        try:
            return self._deliver(delivery)
        except SinkWentBackError:
            self._check_due = True
            raise

    def _deliver(self, delivery: EpochDelivery) -> FollowerHead:
        parts, entry = parts_of(delivery.head.own), entry_of(delivery.commit)
        while True:
            staging = (_TableStaging if TABLES in delivery.shape else _Staging)(self, delivery, parts)
            try:
                bad = staging.run()
            except BaseException:
                staging.discard()
                raise
            if not bad:
                break
            staging.discard()
            letters = delivery.rows.letters(bad)
            delivery.refuse(letters)
            delivery = delivery.without(letters)
        if delivery.is_copy and delivery.shape["write"] == "append":  # it takes the place of all rows
            staging.files = {**{name: [] for name in parts.keys() - staging.held}, **staging.files}
        names, head = sorted({*staging.files, *staging.held}), delivery.head
        if names:
            parts = open_parts(parts, names, entry.epoch, staging.tables, staging.keys_after)
            opened = replace(head, own=own_of(parts, rescued_of(head.own)))
            if opened != head:
                self.swap_head(head, opened)
            self._commit(delivery, staging, parts)
        rescued = add_epoch(rescued_of(head.own), entry.epoch, staging.find_rescued())
        after = replace(delivery.final_head, own=own_of(close_parts(parts, names, entry), rescued))
        self.swap_head(opened if names else head, after)
        self._touched |= set(names)
        return after

    def _commit(self, delivery: EpochDelivery, staging: _Staging, parts: Parts) -> None:
        """Commit the staged files of each part."""
        replaces = delivery.is_copy and delivery.shape["write"] == "append"
        run_tasks = _one_at_a_time(delivery.run_tasks) if delivery.run_tasks is not None else None

        def commit(name: str) -> None:
            table, files = self._open_part(name, staging.own_of(name)), staging.files[name]
            table.begin(self._run, self._generation, parts[name], replaces=replaces or name in staging.replaced)
            schema = staging.schema_of(name) if files else pa.schema([])
            table.commit(self._part_commit(delivery.commit, name, parts[name].held, files, schema), run_tasks)
            table.delete_changes(files)

        _at_once(commit, sorted(staging.files))

    def _begin(self, table: PartTable, part: Part) -> None:
        table.begin(self._run, self._generation, part)

    @staticmethod
    def _part_commit(
        commit: EpochCommit, name: str, before: Held, files: list[dict[str, Json]], schema: pa.Schema
    ) -> EpochCommit:
        """Return the commit of one part; what came before is the entry that last touched it."""
        facts = {**commit.facts, "part": name}
        return replace(commit, files=files, schema=schema, previous=ref_of(before), source_state=None, facts=facts)

    # -- checks ---------------------------------------------------------------------------------------

    def check(self) -> None:
        head = self.read_head()
        _at_once(lambda name: self._open_part(name).check(), parts_of(head.own if head is not None else {}), READERS)

    def check_columns(self, rows: pa.Schema) -> None:
        if self._settings.takes_tables:
            return
        NameTemplate(self._settings.template, self._settings.parts_allowed, refuse_name).check(rows)

    def columns_of(self, rows: pa.Schema) -> pa.Schema:
        return table_columns(rows) if self._settings.write == "upsert" else rows

    def maintain(self) -> None:
        for name in sorted(self._touched):
            self._open_part(name).maintain()
        self._touched.clear()

    # -- history edits --------------------------------------------------------------------------------

    def version_of(self, epoch: int) -> int:
        def check(one: tuple[str, Part]) -> None:
            table = self._open_part(one[0])
            self._begin(table, one[1])
            table.effect_here(RestoreVersion(epoch), table.find_held())

        _at_once(check, self._later_parts(epoch), READERS)
        return epoch

    def _later_parts(self, epoch: int) -> list[tuple[str, Part]]:
        """Return the parts that hold rows of later epochs, or may get some."""
        head = self.read_head()
        return [(name, part) for name, part in parts_of(head.own if head else {}).items() if part.newest > epoch]

    def plan_return(self, to_epoch: int, accept: Collection[str]) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        fence = self.read_fence()
        plan = SinkReturn(self.name, self.uri, fence.epoch, fence.version)
        problems: list[RollbackRefusedError] = []
        parts = self._later_parts(to_epoch)
        for found, refused in _at_once(lambda one: self._plan_part(*one, to_epoch, accept), parts, READERS):
            problems += refused
            if found is not None:
                plan = _add(plan, found)
        return replace(plan, version_then=None if problems else to_epoch), problems

    def _plan_part(
        self, name: str, part: Part, to_epoch: int, accept: Collection[str]
    ) -> tuple[SinkReturn | None, list[RollbackRefusedError]]:
        table = self._open_part(name)
        self._begin(table, part)
        held = table.find_held()
        if held.epoch < part.held.epoch:
            return None, [RollbackRefusedError(table.went_back().message, hint="Run the pipeline first.")]
        try:
            effect = table.effect_here(RestoreVersion(to_epoch), held)
        except RollbackRefusedError as error:
            return None, [error]
        if not isinstance(effect, RestoreVersion):
            return None, []
        return table.history.plan_version(held.epoch, effect.version, accept)

    def find_missing(self, effect: Effect) -> list[str]:
        if isinstance(effect, ReplaceRows) and effect.files:
            return [str(file["path"]) for file in effect.files]
        if not isinstance(effect, RestoreVersion):
            return []

        def find(one: tuple[str, Part]) -> list[str]:
            table = self._open_part(one[0])
            self._begin(table, one[1])
            try:
                own = table.effect_here(effect, table.find_held())
            except RollbackRefusedError as error:
                return [error.message]
            return [f"{one[0]}/{path}" for path in table.find_missing(own)]

        found = _at_once(find, self._later_parts(effect.version), READERS)
        return [path for missing in found for path in missing]

    def keep_rows(self, head: FollowerHead, commit: EpochCommit) -> FollowerHead:
        """Move the head. A part that is open gets the edit, too: then no older run can write to it any more."""
        names = [name for name, part in parts_of(head.own).items() if part.open]
        return self._edit_parts(head, commit, KeepRows(), names, head.epoch)

    def go_back(self, head: FollowerHead, commit: EpochCommit, effect: Effect) -> FollowerHead:
        """Take every part back that holds later rows, or that may get some; the head comes last."""
        if isinstance(effect, ReplaceRows) and effect.files:
            raise RollbackRefusedError(
                f"{self.name} cannot get back rows that it no longer holds", hint="Take the sink out of the spec."
            )
        to = effect.version if isinstance(effect, RestoreVersion) else -1
        names = [name for name, part in parts_of(head.own).items() if part.newest > to]
        return self._edit_parts(head, commit, effect, names, to)

    def _edit_parts(
        self, head: FollowerHead, commit: EpochCommit, effect: Effect, names: Sequence[str], to: int
    ) -> FollowerHead:
        """Edit these parts; the sink has the rows of epochs up to `to` afterwards."""
        parts = parts_of(head.own)

        def edit(name: str) -> None:
            table = self._open_part(name)
            self._begin(table, parts[name])
            table.apply_edit(self._part_commit(commit, name, parts[name].held, [], pa.schema([])), effect)

        _at_once(edit, sorted(names))
        if self._settings.takes_tables:
            parts |= {name: _key_after(parts[name], commit.checkpoint.epoch, effect) for name in names}
        own = own_of(close_parts(parts, names, entry_of(commit)), rescued_of(head.own, to))
        after = replace(head_after(head, commit), own=own)
        self.swap_head(head, after)
        self._touched |= set(names)
        return after


class _Staging:
    """Stages the rows of an epoch as files of the parts that they name."""

    def __init__(self, sink: DeltaPartsSink, delivery: EpochDelivery, parts: Parts) -> None:
        self._sink = sink
        self._delivery = delivery
        self._parts = parts
        self._own = delivery.shape
        self._most = sink._settings.max_parts
        self._template = NameTemplate(sink._settings.template, str(self._own["parts_allowed"]), self._refuse)
        self._stagers: dict[str, Stager] = {}
        self._entry = entry_of(delivery.commit)
        self._schema = delivery.rows.shape.schema_of(delivery.rows.schema)
        self.files: dict[str, list[dict[str, Json]]] = {}
        self.held: set[str] = set()  # parts that hold the epoch already, from an earlier try
        self.tables: dict[str, str] = {}  # captured tables, by part
        # Of captured tables that are upserted, by part: the key that the epoch is written by, and the one from then on.
        self.keys: dict[str, tuple[str, ...]] = {}
        self.keys_after: dict[str, tuple[str, ...] | None] = {}
        self.replaced: set[str] = set()  # parts that lose their rows, and are appended to

    def own_of(self, name: str) -> Mapping[str, Json]:
        """Return the settings of a part."""
        return self._own

    def schema_of(self, name: str) -> pa.Schema:
        """Return the columns of the rows for a part."""
        return self._schema

    def run(self) -> dict[int, str]:
        """Stage all rows. Returns the numbers of rows that no part can hold, each with the reason.

        Raises:
            SinkError: the rows name more parts than the sink may have.
        """
        bad: dict[int, str] = {}
        for rows in self._delivery.rows.read():
            if not rows.batch.num_rows:
                continue
            for batch, numbers, is_for_all in self._template.cut(
                rows.batch, rows.numbers, upserts=self._own["write"] == "upsert"
            ):
                if is_for_all:
                    shares = [Share(name, batch, numbers) for name in sorted({*self._parts, *self._stagers})]
                else:
                    shares, wrong = self._template.split(batch, numbers, self._most)
                    bad |= wrong
                for share in shares if not bad else ():
                    self._write(share)
        if not bad:
            self.files = {name: stager.close() for name, stager in self._stagers.items()}
        return bad

    def _write(self, share: Share) -> None:
        if share.name in self.held:
            return
        stager = self._stagers.get(share.name)
        if stager is None and self._has(share.name):
            self.held.add(share.name)
            return
        if stager is None:
            known = len(self._parts.keys() | self._stagers.keys() | {share.name})
            if share.name not in self._parts and known > self._most:
                raise too_many_parts(known, self._most)
            target = self._sink._open_part(share.name, self.own_of(share.name)).stage_target()
            stager = self._stagers[share.name] = open_stager(target, self._delivery.rows.attempt)
        stager.write(share.batch)
        self._relieve()

    def _has(self, name: str) -> bool:
        """Return whether a part holds the epoch: then it needs no files. Only a part of an earlier try may."""
        part = self._parts.get(name)
        if part is None or part.newest < self._entry.epoch:
            return False
        table = self._sink._open_part(name, self.own_of(name))
        self._sink._begin(table, part)
        return judge(part, table.find_held(), self._entry) == "has"

    def _relieve(self) -> None:
        """Keep memory bounded, whatever the number of parts."""
        stagers = [stager for stager in self._stagers.values() if isinstance(stager, ParquetStager)]
        while sum(stager.gathered_bytes for stager in stagers) > MAX_GATHERED_BYTES:
            max(stagers, key=lambda stager: stager.gathered_bytes).relieve()

    def _refuse(self, name: str) -> str:
        """Return why a name cannot be that of a part; it may be a table of somebody else."""
        reason = refuse_name(name)
        if reason or name in self._parts:
            return reason
        owner = self._sink._open_part(name, self.own_of(name)).find_owner()
        return f"table {name!r} belongs to {owner}" if owner else ""

    def find_rescued(self) -> list[Rescued]:
        """Return the values that did not fit the columns of their part, once all rows are staged."""
        return []

    def discard(self) -> None:
        """Delete the files that no commit names."""
        for stager in self._stagers.values():
            with contextlib.suppress(OSError, FirnlineError):  # a sweep deletes what stays
                stager.discard()


class _TableStaging(_Staging):
    """Stages the rows of captured tables, each as files of its own part, by its own key and with its own columns."""

    def __init__(self, sink: DeltaPartsSink, delivery: EpochDelivery, parts: Parts) -> None:
        super().__init__(sink, delivery, parts)
        self._columns: dict[str, PartColumns] = {}
        self._names: dict[SourceTable, str] = {}
        self._left_out: set[int] = set()  # by their place in the epoch: batches that go into no part

    def own_of(self, name: str) -> Mapping[str, Json]:
        return own_of_table(self._own, self.keys.get(name))

    def schema_of(self, name: str) -> pa.Schema:
        return self._columns[name].schema

    def find_rescued(self) -> list[Rescued]:
        found = add_rescued(one for columns in self._columns.values() for one in columns.rescued)
        return [replace(one, source=self._sink.context.input_port) for one in found]

    def run(self) -> dict[int, str]:
        """Stage all rows: first their columns are known, then they are written.

        Raises:
            BadRowError: a table cannot have a part, because of its name.
            SchemaError: a table has another key, or columns that cannot be added.
        """
        self._find_columns()
        for place, rows in enumerate(self._delivery.rows.read()):
            name = self._name_of(rows.table) if rows.batch.num_rows and place not in self._left_out else ""
            if name in self._columns:
                self._write(Share(name, self._columns[name].fit(rows.batch), rows.numbers))
        self.files = {name: stager.close() for name, stager in self._stagers.items()}
        for name in self.replaced - self.files.keys():
            if self._has(name):
                self.held.add(name)
            else:
                self.files[name] = []
        return {}

    def _find_columns(self) -> None:
        """Find the key and the columns of every part that the epoch touches."""
        found: dict[str, dict[int, tuple[pa.Schema, SourceTable]]] = {}
        keys: dict[str, PartKey] = {}
        upserts = self._own["write"] == "upsert"
        for place, rows in enumerate(self._delivery.rows.read()):
            if not rows.batch.num_rows:
                continue
            table = rows.table
            assert table is not None
            name = self._name_of(table)
            taken = found.setdefault(name, {})
            if upserts:
                key = keys.setdefault(name, self._key_before(name))
                if not key.takes(table, reads_anew=self._reads_anew(table)):
                    self._left_out.add(place)
                    continue
                if table.anew and key.is_emptied:  # rows before it are gone, and may have another key
                    self._left_out |= taken.keys()
                    taken.clear()
            taken[place] = rows.batch.schema, table
        for name, taken in found.items():
            if upserts and not self._choose_key(name, keys[name], taken):
                continue
            if not taken:
                continue
            schemas = dict(taken.values())
            self._columns[name] = self._begin_columns(name, next(iter(schemas.values())))
            self._check_key_delivered(name)
            for schema in schemas:
                self._columns[name].add(schema)

    def _key_before(self, name: str) -> PartKey:
        """Return the key of a part before the epoch."""
        part, epoch = self._parts.get(name), self._entry.epoch
        return PartKey(part.key_before(epoch), any(part.keys_before(epoch))) if part is not None else PartKey(None)

    def _reads_anew(self, table: SourceTable) -> bool:
        positions = self._delivery.commit.checkpoint.positions
        return reads_anew(positions, self._sink.context.input_port, table.full_name)

    def _choose_key(self, name: str, found: PartKey, taken: dict[int, tuple[pa.Schema, SourceTable]]) -> bool:
        """Take the key of a part from what its rows say; returns whether the epoch touches the part. A part that is
        emptied and gets no rows is written by the key that it had."""
        part, key = self._parts.get(name), found.key
        if key is None and part is not None:
            key = next(reversed(part.keys_before(self._entry.epoch)), None)
        if key is None:  # a table without a part was emptied
            return False
        self.keys[name] = key
        if taken or found.is_emptied:
            self.keys_after[name] = found.key
        if found.is_emptied and not key:
            self.replaced.add(name)
            empties = [place for place, (_, table) in taken.items() if table.anew]
            self._left_out |= set(empties)
            for place in empties:
                del taken[place]
        return True

    def _begin_columns(self, name: str, table: SourceTable) -> PartColumns:
        known = self._sink._open_part(name, self.own_of(name)).find_schema() if name in self._parts else None
        key = self.keys.get(name) or table.key
        return PartColumns.begin(replace(table, key=key), known, options_from_json(self._own[TABLES]))

    def _check_key_delivered(self, name: str) -> None:
        """Refuse an upsert whose key `exclude` leaves out."""
        lost = [column for column in self.keys.get(name, ()) if column in self._delivery.rows.shape.exclude]
        if lost:
            raise SchemaError(
                f"{lost[0]} is a column of the key of part {name}, and `exclude` leaves it out",
                hint="Mask it instead, or exclude the table in `tables` of the source.",
                column=lost[0],
            )

    def _name_of(self, table: SourceTable | None) -> str:
        assert table is not None
        if table not in self._names:
            settings = self._sink._settings
            name = name_part(settings.template, table, str(self._own["parts_allowed"]))
            owner = self.tables.setdefault(name, known.table if (known := self._parts.get(name)) else table.full_name)
            reason = self._refuse(name)
            if owner != table.full_name:
                reason = f"table {name!r} has the rows of {owner or 'an input that is no captured table'}"
            if reason:
                raise BadRowError(
                    f"sink {self._sink.name!r} cannot have a table for {table.full_name}: {reason}",
                    hint="Exclude the table in `tables` of the source, and take back the epoch that has its rows: "
                    f"firnline rollback --to {self._delivery.commit.checkpoint.epoch - 1}",
                    sink=self._sink.name,
                )
            self._names[table] = name
        return self._names[table]


def _key_after(part: Part, epoch: int, effect: Effect) -> Part:
    """Return a part with the key that it has after a history edit."""
    if isinstance(effect, RestoreVersion):
        return part.with_key(epoch, part.key_before(effect.version + 1))
    return part.with_key(epoch, None) if isinstance(effect, ReplaceRows) and part.key else part


def own_of_table(own: Mapping[str, Json], key: tuple[str, ...] | None) -> dict[str, Json]:
    """Return the settings of the part of a captured table: without a key it is appended to."""
    write = "upsert" if own["write"] == "upsert" and key else "append"
    return {**own, "write": write, "key": list(key or ()) if write == "upsert" else []}


def _at_once(call: Callable[[T], R], items: Iterable[T], workers: int = 0) -> list[R]:
    """Call a function for all items, a few at a time; all calls end before the first error is raised."""
    chosen = list(items)
    if len(chosen) < 2:
        return [call(item) for item in chosen]
    with ThreadPoolExecutor(min(workers or WORKERS, len(chosen)), "firnline parts") as pool:
        calls = [pool.submit(call, item) for item in chosen]
    errors = [error for one in calls if (error := one.exception()) is not None]
    if errors:
        raise next((error for error in errors if isinstance(error, FencedError)), errors[0])
    return [one.result() for one in calls]


def _one_at_a_time(run_tasks: RunTasks) -> RunTasks:
    """Return a function that runs the tasks of one part after those of another: an attempt has one folder for them."""
    lock = threading.Lock()

    def run(attempt: str, tasks: list[dict[str, Json]]) -> list[dict[str, Json]]:
        with lock:
            return run_tasks(attempt, tasks)

    return run


def _add(plan: SinkReturn, part: SinkReturn) -> SinkReturn:
    """Return the plan of a sink with that of one more part."""
    return replace(
        plan,
        files_removed=plan.files_removed + part.files_removed,
        rows_removed=plan.rows_removed + part.rows_removed,
        files_restored=plan.files_restored + part.files_restored,
        rows_restored=plan.rows_restored + part.rows_restored,
        columns_removed=list(dict.fromkeys([*plan.columns_removed, *part.columns_removed])),
        properties_changed=list(dict.fromkeys([*plan.properties_changed, *part.properties_changed])),
        others=[*plan.others, *part.others],
        foreign_commits=plan.foreign_commits + part.foreign_commits,
    )
