"""A Delta table as a sink: claims, fences, commits with the checkpoint inside, and reads its head."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from firnline.checkpoint.codec import short_number
from firnline.checkpoint.model import Checkpoint
from firnline.clock import jitter
from firnline.errors import (
    CommitConflictError,
    CommitUnknownError,
    ConfigError,
    DecidingSinkError,
    FencedError,
    RollbackRefusedError,
    SchemaError,
    SinkError,
    TableLostError,
)
from firnline.names import JOURNAL, WIDENED, probe_key
from firnline.options import LINEAGE, MISSING, MOVED
from firnline.schema import RESCUED_COLUMN, type_to_text, widen, wider_columns
from firnline.sinks.base import (
    FORBIDDEN,
    Capabilities,
    Decided,
    Effect,
    EpochCommit,
    Fence,
    GoesBack,
    Head,
    LoggedCommit,
    ReplaceRows,
    RunTasks,
    Sink,
    SinkContext,
    SinkReturn,
    Stranger,
)
from firnline.sinks.delta.contents import as_in_table, changed_columns, log_added, missing_fields
from firnline.sinks.delta.durable import check_epochs, check_whole
from firnline.sinks.delta.history_edit import TableHistory, apply_effect, read_commits
from firnline.sinks.delta.log import DeltaLog, encode_blizzard
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.recovery import find_checkpoint, find_foreign
from firnline.sinks.delta.stage import CHANGE_COUNTS, CHANGES
from firnline.sinks.delta.table import CREATED_WITH, UNCHANGED, Table, check_put_if_absent
from firnline.sinks.delta.widen import Widening, find_obstacles
from firnline.sinks.guard import GuardedSink
from firnline.storage import Storage, open_storage
from firnline.types import Delivery, EntryRef, Json, Receipt

logger = logging.getLogger(__name__)

CONFLICT_TRIES = 100  # each is another writer's commit that landed first
_NOW_AND_THEN = frozenset({RESCUED_COLUMN, MISSING, MOVED})  # columns that some rows have, whatever the input is


class DeltaSink(Sink):
    """One Delta table. The ledger is in the deciding sink's table; other sinks get it passed in."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.EXACTLY_ONCE, decides=True, goes_back=GoesBack.EXACTLY)
    storage: Storage

    def __init__(self, options: DeltaSinkOptions, context: SinkContext) -> None:
        self.name = options.name
        self.required = options.required
        self.storage = open_storage(options.table, options.storage_options)
        self.uri = self.storage.root
        self._options = options
        self._context = context
        self._pipeline = context.pipeline
        self._ledger = context.ledger
        self._clock = context.clock
        self._table = Table(self.storage.root, options.storage_options)
        self._log = DeltaLog(self.storage)
        self._history = TableHistory(self.name, self._pipeline, self._table, self._log, self.storage)
        self._run = ""
        self._deciding = True
        self._deferred = False
        self._generation = 0
        self._decided: Decided | None = None  # what the newest claim was given
        self._begins: EntryRef | None = None  # a further table that has no head begins after this entry
        self._owned = 0  # the generation of our newest claim that the log is known to hold
        self._table_id = ""  # known once the table was read
        self._widening: Widening | None = None  # rewritten files of an attempt that is not committed yet
        self._checkpointed: int | None = None  # the version of Delta's newest checkpoint, once it is known

    # -- what it holds --------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """Refuse a table whose newest commit is torn, or that lost an epoch to an emptied commit file."""
        if self._table.refresh():
            check_whole(self.storage, self._table.version)
            if self.settled_epoch() is None:  # a committer's commit may hold several epochs
                check_epochs(self.storage, self._table.version, self._pipeline)

    def load(self) -> Head:
        return self._read_head() if self._table.refresh() else self._first_head()

    def _first_head(self) -> Head:
        """Return the head of a table that does not exist: nothing, or where it begins once it is created."""
        begins = self._begins
        if begins is None:
            return Head(exists=False, version=-1)
        checkpoint = self._ledger.load(begins).checkpoint
        return Head(False, -1, self._generation, begins.epoch, begins, checkpoint)

    def _read_head(self, *, ask_copies: bool = True) -> Head:
        """Return the head at the version of the table handle."""
        table = self._table
        self._table_id = table.id
        epoch, generation = table.txn(self._id("")), table.txn(self._id("-gen"))
        if epoch is None:
            return Head(exists=True, version=table.version, generation=generation or 0)
        found = find_checkpoint(
            self._log,
            self._ledger,
            self._pipeline,
            table.version,
            epoch,
            table.txn(self._id("-entry")),
            self._context.replay,
            self._context.copies,
            ask_copies=ask_copies,
        )
        if self._context.decides:
            self._check_decides(found.checkpoint)
        return Head(
            exists=True,
            version=table.version,
            generation=generation or 0,
            epoch=epoch,
            entry=found.entry,
            checkpoint=found.checkpoint,
            repairs=found.repairs,
            path=found.path,
        )

    def load_committed(self) -> Head:
        """Return the head in the table's log; for most sinks that is all there is."""
        return self._read_head() if self._table.refresh() else Head(exists=False, version=-1)

    def read_fence(self) -> Fence:
        if self._table.refresh():
            return self._fence()
        begins = self._begins
        if begins is None:
            return Fence()
        return Fence(-1, begins.epoch, short_number(begins.checksum), self._generation)

    def _fence(self) -> Fence:
        """Return the fence at the version of the table handle."""
        table = self._table
        epoch, generation = table.txn(self._id("")) or 0, table.txn(self._id("-gen")) or 0
        return Fence(table.version, epoch, table.txn(self._id("-entry")), generation)

    def make_durable(self) -> None:
        self._table.make_durable()

    def find_foreign(self, version: int, scan_commits: int, *, accept_older: bool) -> Json | None:
        return find_foreign(self.storage, version, scan_commits, accept_older=accept_older)

    @property
    def table(self) -> Table:
        """The table handle, at the version that was last read. For commands that are about Delta tables."""
        return self._table

    @property
    def log(self) -> DeltaLog:
        """The table's log. For commands that are about Delta tables."""
        return self._log

    @property
    def identity(self) -> dict[str, Json]:
        return {"sink": self.name, **({"table": self._table_id} if self._table_id else {})}

    def _check_decides(self, checkpoint: Checkpoint) -> None:
        """Refuse to decide if another table decided so far: this one may lag, and it has no ledger."""
        sink, table = checkpoint.deciding.get("sink", self.name), checkpoint.deciding.get("table", "")
        if table == self._table_id or (not table and (sink == self.name or self._ledger.newest_epoch())):
            return  # before the table had an id, its name and the ledger decide
        raise DecidingSinkError(
            f"{self._table.uri} (sink {self.name!r}) would decide, but sink {sink!r}"
            f"{f' with the table id {table}' if table else ''} decided epoch {checkpoint.epoch} of {self._pipeline!r}",
            hint=self._way_back(sink),
            epoch=checkpoint.epoch,
        )

    def _way_back(self, sink: str) -> str:
        """Return how to let the sink decide again that decided so far."""
        back = f"List the sink {sink!r} first, with required: true and the table that it had."
        if sink == JOURNAL:
            back = f"Set required: false on sink {self.name!r}, so that the journal in the pipeline's home decides."
        elif self.name == JOURNAL:
            back = "Set `home` to the home that this pipeline had."
        return f"{back} To let another table decide, start a pipeline of another name with tables of its own."

    def find_schema(self) -> pa.Schema | None:
        return self.find_committed_schema()

    def find_committed_schema(self) -> pa.Schema | None:
        return self._table.schema() if self._table.refresh() else None

    def check_columns(self, rows: pa.Schema) -> None:
        missing_fields(self.find_schema() or pa.schema([]), self.columns_of(rows))

    def find_values(self, column: str) -> set[str]:
        found: set[str] = set()
        try:
            if not self._table.refresh() or column not in self._table.schema().names:
                return found
            for batch in self._table.delta.to_pyarrow_dataset().to_batches(columns=[column]):
                found.update(str(value) for value in pc.unique(batch.column(0)).to_pylist() if value is not None)
        except (DeltaError, OSError) as error:
            raise SinkError(f"cannot read the rows of {self.name}: {error}") from error
        return found

    def read_rows(self, epoch: int | None = None) -> Iterator[pa.RecordBatch]:
        try:
            if self._table.refresh():
                table = self._table.delta if epoch is None else self._table.at(self.version_of(epoch))
                yield from table.to_pyarrow_dataset().to_batches()
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise SinkError(f"cannot read the rows of {self.name}: {error}") from error

    def find_receipt(self, epoch: int) -> Receipt | None:
        return self._find_logged(epoch)

    def _find_logged(self, epoch: int) -> Receipt | None:
        """Return the receipt of an epoch from the table's own log."""
        if not self._table.refresh() or (self._table.txn(self._id("")) or 0) < epoch:
            return None
        for commit in self._log.backwards(self._table.version):
            info = commit.find_info(self._pipeline)
            if info is None or "checkpoint" not in info or info["epoch"] > epoch:
                continue
            if info["epoch"] < epoch:
                return None
            self._table.make_durable()  # the caller takes the epoch for committed
            return self._receipt(info, commit.version)
        return None

    def _receipt(self, info: dict[str, Json], version: int) -> Receipt:
        checkpoint = info["checkpoint"]
        return Receipt(
            sink=self.name,
            epoch=int(info["epoch"]),
            generation=int(checkpoint["generation"]),
            run=str(checkpoint["run"]),
            attempt=str(checkpoint["attempt"]),
            checkpoint_checksum=str(checkpoint["checksum"]),
            version=version,
            rows=int(info["rows"]),
            size_bytes=int(info["size_bytes"]),
            changes={name: int(info[name]) for name in CHANGE_COUNTS if name in info},
            entry=str((info.get("entry") or {}).get("checksum", "")),
        )

    # -- claim ----------------------------------------------------------------------------------------

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
        self._decided = decided
        self._deferred = False
        self._deciding = generation is None
        self._begins = None if self._deciding else baseline
        for _ in range(CONFLICT_TRIES):
            if not self._table.refresh():
                self._generation = generation or 1
                self._deferred = True  # the commit that creates the table carries the claim
                return replace(self._first_head(), generation=self._generation)
            at = self._table.version
            check_whole(self.storage, at)
            self._check_joinable()
            owner = self._table.txn(self._id("-gen")) or 0
            if generation is not None and owner > generation:
                raise FencedError(f"{self.name} is held by generation {owner}", generation=owner)
            if again and owner != self._owned and self._newest_claim().get("run") != run:
                raise FencedError(f"another run has claimed {self.name} since", generation=owner)
            self._generation = generation if generation is not None else owner + 1
            if owner == self._generation and self._claimed_by(run):
                return self._own()
            tip_epoch, tip = self._claim_tip()
            txns = {self._id("-gen"): self._generation, self._id("-tip-epoch"): tip_epoch, self._id("-tip"): tip or 0}
            begins = baseline if self._table.txn(self._id("")) is None else None
            if begins is not None:
                if self._deciding and at != onto:
                    raise CommitConflictError("the table moved since another tool's progress was read")
                txns |= self._head_txns(begins)
            info = self._info("claim", baseline=begins.to_json() if begins else None)
            try:
                self._table.append("delta.claim", [], info, txns, {}, onto=at)
            except (CommitConflictError, CommitUnknownError) as error:
                self._pause()
                self._table.refresh()
                if not self._claimed_by(run):
                    if isinstance(error, CommitUnknownError):
                        raise SinkError(f"cannot claim {self._table.uri}: {error.message}") from error
                    continue
            self._table.refresh()
            if self._table.txn(self._id("-gen")) != self._generation:
                raise FencedError("another run claimed this pipeline at the same time")
            return self._own()
        raise SinkError(
            f"cannot claim {self._table.uri}: gave up after {CONFLICT_TRIES} conflicts with other writers",
            table=self._table.uri,
        )

    def _head_txns(self, entry: EntryRef) -> dict[str, int]:
        return {self._id(""): entry.epoch, self._id("-entry"): short_number(entry.checksum)}

    def _own(self) -> Head:
        """Confirm our claim at the version read, and make what it adopted durable."""
        self._owned = self._generation
        self.make_durable()
        return self._read_head()

    def _claim_tip(self) -> tuple[int, int | None]:
        """Return the epoch, and the digest of its entry, that a claim adopts: the log's head."""
        return self._table.txn(self._id("")) or 0, self._table.txn(self._id("-entry"))

    def _claimed_by(self, run: str) -> bool:
        """Return whether the newest claim in the log is this run's, of the wanted generation."""
        claim = self._newest_claim()
        return (claim.get("run"), claim.get("generation")) == (run, self._generation)

    def _newest_claim(self) -> dict[str, Json]:
        """Return the newest claim in the log; empty if there is none among the newest commits."""
        for commit in self._log.backwards(self._table.version, CONFLICT_TRIES):
            info = commit.find_info(self._pipeline)
            if info is not None and info.get("kind") in ("claim", "create"):
                return info
        return {}

    def check(self) -> None:
        if self._table.refresh():
            self._check_joinable()

    def _check_joinable(self) -> None:
        """Check that an existing table has the spec's partitions, and no rules that we do not enforce."""
        found = self._table.partition_columns()
        wanted = list(self._options.partition_by)
        if wanted != found:
            raise SchemaError(
                f"the table {self._table.uri} is partitioned by {found}, the spec says {wanted}",
                hint="Set partition_by as the table has it, or name another table.",
            )
        rules = self._table.rules()
        if rules:
            raise SchemaError(
                f"the table {self._table.uri} has rules that Firnline does not enforce: {', '.join(rules)}",
                hint="Drop them, or write to a table of its own and check there.",
            )

    # -- commit ---------------------------------------------------------------------------------------

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        for _ in range(CONFLICT_TRIES):
            if not self._table.refresh():
                self._create(commit)
                continue
            if self._deferred:
                self._claim_created()
                continue
            onto = self._table.version
            repeated = self._check_fence(commit)
            if repeated is not None:
                return repeated
            try:
                self._check_evolution(commit.schema)
                if self._evolve(commit.schema, onto, commit.checkpoint.epoch):
                    continue  # the version moved: the fence must hold under the new one
                version = self._append(commit, onto, run_tasks)
            except CommitConflictError:
                # A retried request may meet its own first write: only the log tells whose it is.
                receipt = self.find_receipt(commit.checkpoint.epoch)
                if receipt is not None and receipt.attempt == commit.checkpoint.attempt:
                    return receipt
                self._pause()
                continue
            return self._receipt(json.loads(self._commit_info(commit, onto)), version)
        raise SinkError(f"gave up on {self._table.uri} after {CONFLICT_TRIES} conflicts with other writers")

    def _create(self, commit: EpochCommit) -> None:
        begins = self._begins
        if commit.kind == "epoch" and (not _is_same(commit.previous, begins) or not self._deferred):
            raise TableLostError(f"the table {self._table.uri} is gone", table=self._table.uri)
        columns = commit.schema if len(commit.schema) else self._placeholder()
        txns = {self._id("-gen"): self._generation, **(self._head_txns(begins) if begins is not None else {})}
        self._create_table(columns, txns, begins)

    def _create_table(self, columns: pa.Schema, txns: Mapping[str, int], begins: EntryRef | None = None) -> None:
        """Create the table, unless another run has created it meanwhile."""
        check_put_if_absent(self.storage, probe_key(self._pipeline, self._run))
        info = self._info("create", **({"baseline": begins.to_json()} if begins is not None else {}))
        try:
            self._table.create(columns, list(self._options.partition_by), info, txns)
        except (CommitConflictError, CommitUnknownError) as error:
            if not self._table.refresh():
                raise SinkError(f"cannot create the table {self._table.uri}: {error}") from error

    def _placeholder(self) -> pa.Schema:
        """Return the first columns of a table whose rows are still to come: a table has at least one column."""
        names = (*self._options.partition_by, RESCUED_COLUMN)
        return pa.schema([pa.field(name, pa.string()) for name in names])

    def _claim_created(self) -> None:
        """Claim a table that appeared since it was claimed as missing: by our own create, or another run's."""
        self._table_id = self._table.id
        if self._claimed_by(self._run):
            self._deferred = False
            self._owned = self._generation
        elif self._deciding:
            raise FencedError("another run created this table at the same time")
        else:
            # An older run's late create: register over it.
            self.claim(self._run, self._generation, self._begins, decided=self._decided)

    def _check_fence(self, commit: EpochCommit) -> Receipt | None:
        """Check, at the version read, our generation and the previous entry; or that the epoch is already committed."""
        table, checkpoint = self._table, commit.checkpoint
        owner = table.txn(self._id("-gen")) or 0
        epoch = table.txn(self._id("")) or 0
        if epoch >= checkpoint.epoch:
            receipt = self.find_receipt(checkpoint.epoch)
            if receipt is not None and receipt.checkpoint_checksum == checkpoint.checksum:
                return receipt
            raise FencedError(f"epoch {checkpoint.epoch} of {self.name} has another author", epoch=checkpoint.epoch)
        if owner != self._generation:
            raise FencedError(f"generation {owner} holds {self.name}, not {self._generation}", generation=owner)
        entry = table.txn(self._id("-entry"))
        expected = short_number(commit.previous.checksum) if commit.previous else None
        before = commit.previous.epoch if commit.previous else 0
        if (epoch, entry, checkpoint.epoch) != (before, expected, before + 1):
            raise FencedError(f"{self.name} is at epoch {epoch}, not at the one before {checkpoint.epoch}")
        return None

    def _check_evolution(self, wanted: pa.Schema) -> None:
        """Refuse columns that the table lacks, or that need a wider type, if the spec says so.

        The first columns of rows are no change, nor is a column that rows have only now and then.
        """
        if self._options.evolution != "fail":
            return
        table = self._table.schema()
        if set(table.names) <= {RESCUED_COLUMN, *LINEAGE, *self._options.partition_by}:
            return
        missing = [one for one in missing_fields(table, as_in_table(wanted, table)) if one.name not in _NOW_AND_THEN]
        changes = [f"lacks the column {one.name!r} ({type_to_text(one)})" for one in missing]
        for name, kind in wider_columns(table, wanted).items():
            old, new = type_to_text(table.field(name)), type_to_text(pa.field(name, kind))
            changes.append(f"has {name!r} as {old}, and the rows have {new}")
        if changes:
            raise SchemaError(
                f"the table {self._table.uri} {'; it '.join(changes)}, and the sink {self.name} has evolution: fail",
                hint=f"Set `evolution: add` on the sink {self.name}, or change the table yourself; then run again.",
                **{FORBIDDEN: True, "table": self._table.uri},
            )

    def _evolve(self, wanted: pa.Schema, onto: int, epoch: int) -> bool:
        """Add missing columns to the table, in a separate commit just before the data. Returns whether it did.

        Columns with a wider type stay as they are: the commit of the data gives them that type.
        """
        table = self._table.schema()
        missing = missing_fields(table, as_in_table(wanted, table))
        if missing:
            self._table.add_columns(pa.schema(missing), onto=onto)
            log_added(self._table.uri, table, missing, epoch)
        return bool(missing)

    def _append(self, commit: EpochCommit, onto: int, run_tasks: RunTasks | None) -> int:
        if any(file.get("kind") == CHANGES for file in commit.files):
            raise ConfigError(
                f"epoch {commit.checkpoint.epoch} of {self.name} was made of changes, and the spec says append",
                hint="Set write: upsert and the key again until the sink is in sync.",
            )
        txns, expiring = self._transactions(commit, onto)
        info = self._commit_info(commit, onto)
        types = wider_columns(self._table.schema(), commit.schema)
        if not types:
            return self._table.append("delta.commit", commit.files, info, txns, expiring, onto=onto)
        return self._replace_all(commit, types, commit.files, frozenset(), info, onto, run_tasks)

    def _replace_all(
        self,
        commit: EpochCommit,
        types: dict[str, pa.DataType],
        files: Sequence[dict[str, Json]],
        replaced: Collection[str],
        info: str,
        onto: int,
        run_tasks: RunTasks | None,
    ) -> int:
        """Commit files, and give columns a wider type: every file is rewritten but those that `files` replace."""
        rewritten = self._open_widening(commit, types).rewrite(self._table, run_tasks, replaced)
        txns, expiring = self._transactions(commit, onto)
        if not replaced:  # readers of the table's versions see what is new, and that no row went
            rewritten = [{**file, UNCHANGED: True} for file in rewritten]
            info = self._commit_info(replace(commit, facts={**commit.facts, WIDENED: sorted(types)}), onto)
        version = self._table.replace_all("delta.commit", types, [*rewritten, *files], info, txns, expiring, onto=onto)
        for name, kind in types.items():
            facts = {"table": self._table.uri, "epoch": commit.checkpoint.epoch, "files_rewritten": len(rewritten)}
            logger.warning("widened column %s to %s", name, type_to_text(pa.field(name, kind)), extra=facts)
        self._widening = None
        return version

    def _open_widening(self, commit: EpochCommit, types: dict[str, pa.DataType]) -> Widening:
        """Return the earlier work on this attempt, if its commit met a conflict."""
        attempt = commit.checkpoint.attempt
        if self._widening is None or (self._widening.attempt, self._widening.types) != (attempt, types):
            self._widening = Widening(attempt, types, self.storage, self._options)
        return self._widening

    def refuse_widening(self, types: Mapping[str, pa.DataType]) -> dict[str, str]:
        table = Table(self.uri, self._options.storage_options)  # a handle of its own: commits go by the other one
        return find_obstacles(table, types) if table.refresh() else dict.fromkeys(types, "the table is gone")

    def _transactions(self, commit: EpochCommit, onto: int) -> tuple[dict[str, int], dict[str, int]]:
        """Return the transaction ids of a commit: permanent ones, and those that expire."""
        checkpoint = commit.checkpoint
        txns = {
            self._id(""): checkpoint.epoch,
            self._id("-gen"): self._generation,  # ours, also where an older run's epoch is caught up on
            self._id("-entry"): short_number(commit.entry.checksum),
        }
        expiring: dict[str, int] = {}
        if commit.source_state is not None and self._writes_interchange():
            extra = {
                "pipeline": self._pipeline,
                "epoch": checkpoint.epoch,
                "generation": checkpoint.generation,
                "entry": commit.entry.to_json(),
            }
            app_id = encode_blizzard(commit.source_state, onto, extra)
            expiring[app_id] = int(self._clock.now().timestamp() * 1000)
        return txns, expiring

    def _writes_interchange(self) -> bool:
        if self._options.interop != "auto":
            return self._options.interop == "blizzard"
        key = "delta.setTransactionRetentionDuration"  # tables of other owners would grow for ever
        return self._table.setting(key) == CREATED_WITH[key]

    def _commit_info(self, commit: EpochCommit, onto: int) -> str:
        return self._info(
            commit.kind,
            epoch=commit.checkpoint.epoch,
            checkpoint=commit.checkpoint.to_json(),
            entry=commit.entry.to_json(),
            previous=commit.previous.to_json() if commit.previous else None,
            delta_version=onto,
            rows=commit.rows,
            size_bytes=commit.size_bytes,
            **commit.facts,
        )

    def _info(self, kind: str, **fields: Json) -> str:
        body = {"kind": kind, "pipeline": self._pipeline, "run": self._run, "generation": self._generation, **fields}
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False)

    # -- history edits ----------------------------------------------------------------------------------

    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None, version: int | None = None) -> Receipt:
        checkpoint = commit.checkpoint
        for _ in range(CONFLICT_TRIES):
            if not self._table.refresh():
                self._create(commit)
                self._deferred = False
                continue
            at = self._table.version
            fence = self._fence()
            epoch, generation = fence.epoch, fence.generation
            receipt = self._find_logged(checkpoint.epoch) if epoch >= checkpoint.epoch else None
            if receipt is not None and receipt.attempt == checkpoint.attempt:
                return receipt
            if generation != self._generation:
                raise FencedError(f"generation {generation} holds {self.name} by now", generation=generation)
            # Before the entry is compared: a committer may have moved it on, and then the caller has to look again.
            if version is not None and at != version:
                raise CommitConflictError("the table changed since it was read", version=at)
            if (epoch, fence.digest) != ((onto.epoch, short_number(onto.checksum)) if onto else (0, None)):
                raise CommitConflictError(f"{self.name} is at epoch {epoch} by now", epoch=epoch)
            txns, expiring = self._transactions(commit, at)
            try:
                table = self._table.schema()
                types = changed_columns(table, commit.schema) if isinstance(effect, ReplaceRows) else {}
                same = widen(commit.schema, {name: table.field(name).type for name in types})
                if isinstance(effect, ReplaceRows) and self._evolve(same, at, commit.checkpoint.epoch):
                    version = None if version is None else version + 1
                    continue
                info = self._commit_info(commit, at)
                if isinstance(effect, ReplaceRows) and types:  # all rows go: their columns may have any type
                    made = self._table.replace_all("delta.jump", types, effect.files, info, txns, expiring, onto=at)
                else:
                    made = apply_effect(self._table, effect, info, txns, expiring, onto=at)
            except (CommitConflictError, CommitUnknownError) as error:
                self._table.refresh()
                receipt = self._find_logged(checkpoint.epoch)
                if receipt is not None and receipt.attempt == checkpoint.attempt:
                    return receipt
                if version is not None or isinstance(error, CommitUnknownError):
                    raise
                self._pause()
                continue
            return self._receipt(json.loads(self._commit_info(commit, at)), made)
        raise SinkError(f"gave up on {self._table.uri} after {CONFLICT_TRIES} conflicts with other writers")

    def version_of(self, epoch: int) -> int:
        return self._history.version_of(epoch)

    def plan_return(self, to_epoch: int, accept: Collection[str]) -> tuple[SinkReturn, list[RollbackRefusedError]]:
        return self._history.plan_return(self.read_fence().epoch, to_epoch, accept)

    def find_strangers(self, since: int) -> list[Stranger]:
        if not self._table.refresh():
            return []
        return self._history.find_strangers(since if self._table.version >= since else -1)  # -1: another table by now

    def find_missing(self, effect: Effect) -> list[str]:
        return self._history.find_missing(effect, exists=self._table.refresh())

    def read_log(self, version: int | None = None, limit: int | None = None) -> Iterator[LoggedCommit]:
        if version is None:
            table = Table(self.uri, self._options.storage_options)  # a handle of its own: commits go by the other one
            if not table.refresh():
                return iter(())
            version = table.version
        return read_commits(self._log, self._pipeline, version, limit)

    # -- the rest -------------------------------------------------------------------------------------

    def stage_target(self) -> dict[str, Json]:
        outbox = self._context.outbox
        return {
            "type": self._options.type,
            "sink": self.name,
            "table": self.storage.root,
            "storage_options": dict(self._options.storage_options),
            "partition_by": list(self._options.partition_by),
            "file_size_bytes": self._options.file_size,
            "pipeline": self._pipeline,
            "shape": {"write": self._options.write, "key": list(self._options.key)},
            **({"outbox": dict(outbox)} if outbox is not None else {}),
        }

    def maintain(self) -> None:
        """Write Delta's own checkpoint if due, off the commit path."""
        if not self._table.refresh():
            return
        if self._checkpointed is None:  # counted over runs, so that many short ones write it too
            self._checkpointed = self._log.checkpoint_version()
        interval = int(self._table.setting("delta.checkpointInterval") or 100)
        if self._table.version - self._checkpointed >= interval:
            self._table.checkpoint()
            self._checkpointed = self._table.version

    def _id(self, part: str) -> str:
        return f"firnline{part}:{self._pipeline}"

    def _pause(self) -> None:
        self._clock.sleep(jitter(0.005, 0.05))


def _is_same(one: EntryRef | None, other: EntryRef | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.epoch, short_number(one.checksum)) == (other.epoch, short_number(other.checksum))


def as_delta(sink: Sink) -> DeltaSink:
    """Return a sink as a Delta table, for commands about files and versions of Delta tables.

    Raises:
        ConfigError: it is of another kind.
    """
    inner = sink.inner if isinstance(sink, GuardedSink) else sink
    if not isinstance(inner, DeltaSink):
        raise ConfigError(f"sink {sink.name!r} is no Delta table", hint="Savepoints and sweeps need Delta tables.")
    return inner
