"""Finds what must not be deleted: everything that the log, units, ledger entries, pins or an active writer may name.

The order of reading is part of the safety, because a name moves from one record to another:
- A committer writes the log, then deletes the unit. Compaction writes the log, then deletes its pin. So units and pins
  are read before the log.
- A unit moves between pending and set aside by a copy. So pending is read, then set aside, then pending again.
- The files themselves are listed before all of that.
An unreadable record might name anything: it stops the sweep.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta

from firnline.checkpoint.codec import check_format, parse, unseal
from firnline.checkpoint.ledger import Ledger, LedgerEntry
from firnline.checkpoint.model import Checkpoint
from firnline.errors import CheckpointError, DamagedError, NewerFormatError, SinkError
from firnline.maintenance.log_names import LogNames, LogTail, file_retention
from firnline.maintenance.survey import Candidates, TableFile, older_than, walk
from firnline.names import (
    CHANGE_FILE,
    HOME,
    OWN_FILE,
    PENDING,
    PINS,
    SET_ASIDE,
    commit_key,
    entry_epoch,
    epoch_txn,
    generation_owner,
    generation_txn,
    ledger_owner,
    runs_folder,
    unit_of,
)
from firnline.process import has_exited, is_this_host
from firnline.sinks.delta.log import DeltaLog
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.unit import Unit, parse_unit
from firnline.storage import Storage, open_storage
from firnline.topology.records import TopologyHome
from firnline.types import Json

SET_ASIDE_KEPT = timedelta(days=30)
COMPACTION_KEPT = timedelta(days=1)  # of a pin that a killed compaction or restore left behind
EPOCHS_IN_FLIGHT = 16  # more than a run ever has between plan and commit
COMMITS_SCANNED = 10_000
_ATTEMPT = re.compile(r"[0-9a-f]{16}")
_UNIT_WORDS = {PENDING: "pending", SET_ASIDE: "set aside"}
_READERS = 8


class References:
    """Reads everything that names files of one table, and removes those files from the candidates."""

    def __init__(
        self,
        storage: Storage,
        table: Table,
        options: dict[str, str],
        now: datetime,
        ledgers: Mapping[str, Storage] | None = None,
    ) -> None:
        self._storage = storage
        self._table = table
        self._options = options
        self._now = now
        self._ledgers = dict(ledgers or {})
        self.log = LogNames(storage, table, options)
        self.retention = file_retention(table)
        self._version: int | None = None  # up to which the log was applied
        self._read: set[tuple[str, float]] = set()  # units and pins that were applied, by key and time
        self._entries_read: set[tuple[str, str]] = set()
        self._changes_read: set[tuple[str, str]] = set()
        self.oldest_pending: dict[str, int] = {}  # per pipeline, its oldest pending epoch
        self.expired_units: list[TableFile] = []
        self.expired_pins: list[TableFile] = []
        self.live: set[str] = set()  # pipelines with a run that may still be active
        self.notes: list[str] = []
        self.pipelines: set[str] = set()

    def apply(self, candidates: Candidates) -> None:
        """Remove every candidate that something names. Repeated before each deletion; then it reads only what is
        new."""
        self._apply_pins(candidates)
        self._apply_units(PENDING, candidates)
        self._apply_units(SET_ASIDE, candidates)
        self._apply_units(PENDING, candidates)
        if self._version is None:
            self._find_pipelines()
        self._table.refresh()
        self._table.make_durable()  # a file that only this version gave up must not go before the version is durable
        self._apply_entries(candidates)
        self._apply_changes(candidates)
        if self._version is None:
            self._apply_writers(candidates)
        self._apply_log(candidates)

    # -- pins -----------------------------------------------------------------------------------------

    def _apply_pins(self, candidates: Candidates) -> None:
        for file in walk(self._storage, PINS):
            name = file.key.rsplit("/", 1)[-1]
            if name.startswith(".") or self._is_read(file):
                continue
            data = self._find(file.key)
            if data is None:
                continue
            pin = _parse_pin(data, file.key)
            if pin.get("kind") in ("compaction", "restore") and self._is_abandoned(file, pin):
                self.expired_pins.append(file)
                continue
            if pin.get("kind") == "topology" and self._is_given_up(pin):
                self.expired_pins.append(file)
                continue
            for path in pin.get("files", []):
                candidates.drop(self.log.keys(str(path)), "pinned")
            for version in pin.get("versions", []):
                candidates.drop(self.log.pinned(int(version)), "pinned")
            if isinstance(since := pin.get("since"), int):
                self._keep_since(since, candidates)
            reason = "being restored" if pin.get("kind") == "restore" else "being compacted"
            self._drop_attempts(candidates, set(map(str, pin.get("attempts", []))), reason)

    def _keep_since(self, version: int, candidates: Candidates) -> None:
        """Keep every file that the table had at a version, or that a later commit names."""
        if version >= 0:
            candidates.drop(self.log.pinned(version), "pinned")
        self._table.refresh()
        named = self.log.named_between(version, self._table.version)
        if named is None:
            raise SinkError(
                f"the log of {self._table.uri} lacks a version after {version}, and a topology's snapshot keeps all",
                hint="Nothing was deleted. Drop the snapshot: firnline topology drop ID",
            )
        candidates.drop(named, "pinned")

    def _is_given_up(self, pin: dict[str, Json]) -> bool:
        """Return whether a snapshot of a topology was aborted or dropped; False if its home cannot be read."""
        try:
            home = TopologyHome(open_storage(str(pin["home"]), self._options), str(pin["topology"]))
            return home.may_unpin(str(pin["snapshot"]), ordered=True)
        except (OSError, DamagedError, KeyError):
            return False

    def _is_abandoned(self, file: TableFile, pin: dict[str, Json]) -> bool:
        return older_than(file, self._now, COMPACTION_KEPT) and not (_is_here(pin) and _lives(pin))

    # -- units ----------------------------------------------------------------------------------------

    def _apply_units(self, folder: str, candidates: Candidates) -> None:
        new = []
        for file in walk_units(self._storage, folder):
            if self._is_read(file):
                continue
            if folder == SET_ASIDE and older_than(file, self._now, SET_ASIDE_KEPT):
                self.expired_units.append(file)
            else:
                new.append(file)
        attempts: set[str] = set()
        with ThreadPoolExecutor(_READERS) as readers:
            for file, data in zip(new, readers.map(lambda f: self._find(f.key), new), strict=True):
                if data is None:
                    continue  # committed, or moved to where it is read next
                name = str(unit_of(file.key))
                if folder == PENDING:
                    attempts.update(self._apply_pending(name, file.key, data, candidates))
                else:
                    attempts.update(self._apply_set_aside(name, data, candidates))
        self._drop_attempts(candidates, attempts, _UNIT_WORDS[folder])

    def _apply_pending(self, name: str, key: str, data: bytes, candidates: Candidates) -> set[str]:
        """Keep the files of a unit. Returns the attempts whose files stay too."""
        try:
            unit = parse_unit(name, data)
        except NewerFormatError:
            raise
        except DamagedError as error:
            raise CheckpointError(
                f"{key} cannot be read, and might name any file: {error.message}",
                hint="Nothing was deleted. A committer sets it aside; or move it away by hand. See `firnline staging`.",
                unit=name,
            ) from error
        if isinstance(unit, Unit):
            oldest = self.oldest_pending.get(unit.pipeline, unit.epoch)
            self.oldest_pending[unit.pipeline] = min(oldest, unit.epoch)
            paths, attempts = [str(f["path"]) for f in unit.files], {unit.checkpoint.attempt}
        else:
            paths, attempts = [unit.path], set()
        for path in paths:
            candidates.drop((path, *self.log.keys(path)), _UNIT_WORDS[PENDING])
        return attempts

    def _apply_set_aside(self, name: str, data: bytes, candidates: Candidates) -> set[str]:
        """Keep everything that the name or text of a unit set aside may refer to, because it may be damaged."""
        try:
            body = parse(data, name)
            paths = list(_paths_of(body))
        except (DamagedError, KeyError, TypeError, AttributeError):
            body, paths = {}, []
        for path in paths:
            candidates.drop((path, *self.log.keys(path)), _UNIT_WORDS[SET_ASIDE])
        if not paths:
            text = _raw_text(body, data)
            candidates.drop_where(lambda f: os.path.basename(f.key).encode() in text, _UNIT_WORDS[SET_ASIDE])
        return {name} if _ATTEMPT.fullmatch(name) else set()

    def _drop_attempts(self, candidates: Candidates, attempts: set[str], reason: str) -> None:
        if attempts:
            candidates.drop_where(lambda f: _attempt_of(f) in attempts, reason)

    # -- ledger entries -------------------------------------------------------------------------------

    def _find_pipelines(self) -> None:
        for file in walk(self._storage, HOME):
            owner = ledger_owner(file.key)
            if owner is not None:
                self.pipelines.add(owner)

    def _apply_entries(self, candidates: Candidates) -> None:
        """Keep the files of entries beyond the log's epoch: a run of the newest generation may commit them at any
        moment."""
        attempts: set[str] = set()
        for pipeline in self.pipelines:
            epoch = self._table.txn(epoch_txn(pipeline)) or 0
            generation = self._table.txn(generation_txn(pipeline)) or 0
            for entry in self._new_entries(self._storage, pipeline, epoch, self._entries_read):
                if entry.checkpoint.generation >= generation:
                    attempts.add(self._drop_entry(entry, candidates))
        for pipeline, storage in self._ledgers.items():
            epoch = self._table.txn(epoch_txn(pipeline)) or 0
            for entry in self._new_entries(storage, pipeline, epoch, self._entries_read):
                attempts.add(self._drop_entry(entry, candidates))
        self._drop_attempts(candidates, attempts, "in flight")

    def _drop_entry(self, entry: LedgerEntry, candidates: Candidates) -> str:
        for files in entry.staged.values():
            candidates.drop((str(f["path"]) for f in files), "in flight")
        return entry.checkpoint.attempt

    def _apply_changes(self, candidates: Candidates) -> None:
        """Keep change rows while an entry from the floor on names them, because no log names them.

        The floor is the one in this table's own newest commit. It may be older than the deciding sink's, never newer.
        """
        found = (CHANGE_FILE.fullmatch(key) for key in candidates.files)
        for pipeline in sorted({match["pipeline"] for match in found if match}):
            storage = self._ledgers.get(pipeline, self._storage)
            floor = self._find_floor(pipeline)
            for entry in self._new_entries(storage, pipeline, floor - 1, self._changes_read):
                for files in entry.staged.values():
                    candidates.drop((str(f["path"]) for f in files), "named from the floor on")

    def _find_floor(self, pipeline: str) -> int:
        """Return the floor in the newest commit of a pipeline; 0 if no commit has one."""
        for commit in DeltaLog(self._storage).backwards(self._table.version, COMMITS_SCANNED):
            info = commit.find_info(pipeline)
            if info is not None and "checkpoint" in info:
                try:
                    return Checkpoint.from_json(info["checkpoint"]).floor
                except DamagedError:
                    return 0
        return 0

    def _new_entries(
        self, storage: Storage, pipeline: str, above: int, read: set[tuple[str, str]]
    ) -> Iterator[LedgerEntry]:
        """Yield the entries of epochs above one that were not read before, and mark them as read."""
        folder = Ledger(storage, pipeline).folder
        for stat in storage.list(folder):
            name = stat.name.rsplit("/", 1)[-1]
            epoch = entry_epoch(name)
            if epoch is None or epoch <= above or (pipeline, name) in read:
                continue
            try:
                entry = LedgerEntry.from_bytes(storage.get(f"{folder}/{name}"), f"ledger entry {name}")
            except FileNotFoundError:
                continue
            except NewerFormatError:
                raise
            except DamagedError as error:
                raise CheckpointError(
                    f"{folder}/{name} cannot be read, and a run may still commit what it names: {error.message}",
                    hint="Nothing was deleted. Let the pipeline run past that epoch, or move the entry away by hand.",
                    pipeline=pipeline,
                ) from error
            read.add((pipeline, name))
            yield entry

    # -- running writers ------------------------------------------------------------------------------

    def _apply_writers(self, candidates: Candidates) -> None:
        """Keep the unnamed files of an active run: those since the last epochs that it committed."""
        places = {**self._ledgers, **dict.fromkeys(self.pipelines, self._storage)}
        for pipeline, storage in sorted(places.items(), key=lambda place: place[0]):
            generation = self._table.txn(generation_txn(pipeline)) or 0
            if not is_live(storage, pipeline, generation):
                continue
            self.live.add(pipeline)
            since = self._writing_since(pipeline, generation)
            found = [f.key for f in candidates.files.values() if since is None or f.modified_at >= since]
            candidates.drop((key for key in found if _attempt_of(candidates.files[key])), "a run may be writing")

    def is_at_work(self, pipeline: str) -> bool:
        """Return whether an active run may have rows in flight in this table; it may have no ledger yet."""
        return is_live(self._storage, pipeline, self._table.txn(generation_txn(pipeline)) or 0)

    def _writing_since(self, pipeline: str, generation: int) -> datetime | None:
        """Return when the oldest epoch in flight was planned, by the storage's clock; None if unknown."""
        epochs, claim = 0, None
        for commit in DeltaLog(self._storage).backwards(self._table.version, COMMITS_SCANNED):
            txns = {str(t["appId"]): int(t["version"]) for t in commit.txns()}
            held = txns.get(generation_txn(pipeline))
            if held is not None and held < generation:
                return claim
            if held == generation or epoch_txn(pipeline) in txns:
                claim = self._storage.stat(commit_key(commit.version)).modified_at
            epochs += epoch_txn(pipeline) in txns
            if epochs > EPOCHS_IN_FLIGHT or commit.version == 0:
                return claim
        return None

    # -- the log --------------------------------------------------------------------------------------

    def _apply_log(self, candidates: Candidates) -> None:
        """Apply the whole log at first, later only new commits."""
        self._table.refresh()
        version = self._table.version
        if self._version is not None:
            named = self.log.named_between(self._version, version)
            if named is not None:
                candidates.drop(named, "named by the log")
                self._version = version
                return
        tail = self.log.tail(self._now, self.retention)
        self._keep_elsewhere(tail, candidates)
        candidates.drop(self.log.snapshot(), "named by the log")
        candidates.drop(tail.recent, "named by the log")
        candidates.drop(self.unexpired(tail, self.retention), "removed within retention")
        self._version = min(version, tail.version)

    def unexpired(self, tail: LogTail, retention: timedelta) -> Iterator[str]:
        """Yield tombstones that must stay; one without a time, or from the future, stays."""
        for key, tombstone in tail.tombstones.items():
            if tombstone.deleted_at is None or self._now - tombstone.deleted_at < retention:
                yield key

    def _keep_elsewhere(self, tail: LogTail, candidates: Candidates) -> None:
        """Keep files of pipelines whose ledger is in another table: epochs decided there may still be committed
        here."""
        known = {owner for app_id in tail.app_ids if (owner := generation_owner(app_id)) is not None}
        unknown = sorted(known - self.pipelines - set(self._ledgers))
        if not unknown:
            return
        candidates.drop_where(lambda f: _attempt_of(f) != "", "ledger in another table")
        self.notes.append(
            f"the ledger of {', '.join(unknown)} lies in another table, so staged files were kept; "
            "name the spec instead of the table to sweep them"
        )

    def _is_read(self, file: TableFile) -> bool:
        """Return whether a unit or pin was already applied, and mark it as applied."""
        mark = (file.key, file.modified_at.timestamp())
        if mark in self._read:
            return True
        self._read.add(mark)
        return False

    def _find(self, key: str) -> bytes | None:
        return _find_in(self._storage, key)


def read_pins(storage: Storage) -> Iterator[dict[str, Json]]:
    """Yield every pin of a table, of any owner.

    Raises:
        CheckpointError: a pin cannot be read, and might name any file.
    """
    for file in walk(storage, PINS):
        if not file.key.rsplit("/", 1)[-1].startswith("."):
            data = _find_in(storage, file.key)
            if data is not None:
                yield _parse_pin(data, file.key)


def is_live(storage: Storage, pipeline: str, generation: int) -> bool:
    """Return whether a run of a pipeline, whose ledger is in this table, may still be active."""
    return any(_may_live(run, generation) for run in _runs(storage, pipeline))


def _find_in(storage: Storage, key: str) -> bytes | None:
    try:
        return storage.get(key)
    except FileNotFoundError:
        return None


def _runs(storage: Storage, pipeline: str) -> Iterator[dict[str, Json]]:
    """Yield the records of a pipeline's runs, beside its ledger."""
    for file in walk(storage, runs_folder(pipeline)):
        data = _find_in(storage, file.key) if file.key.endswith(".json") else None
        if data is None:
            continue
        try:
            yield unseal(parse(data, file.key), file.key)
        except NewerFormatError:
            raise
        except DamagedError:
            yield {"status": "running"}  # unknown: assume the worst


def walk_units(storage: Storage, folder: str) -> Iterator[TableFile]:
    """Yield the units of a folder, without links."""
    prefix = storage.root + "/"
    for stat in storage.list(folder):
        key = stat.name.removeprefix(prefix)
        if unit_of(key) is not None:
            yield TableFile(key, stat.size_bytes, stat.modified_at)


def _attempt_of(file: TableFile) -> str:
    name = file.key.rsplit("/", 1)[-1]
    return name[:16] if OWN_FILE.fullmatch(name) else ""


def _parse_pin(data: bytes, key: str) -> dict[str, Json]:
    try:
        pin: dict[str, Json] = parse(data, key)
        if not isinstance(pin, dict):
            raise DamagedError(f"{key} is no object")
        if "checksum" in pin:
            pin = unseal(pin, key)
        check_format(pin, key)
        lists = [pin[k] for k in ("versions", "files", "attempts") if k in pin]
        if not lists or not all(isinstance(value, list) for value in lists):
            raise DamagedError(f"{key} names nothing")
        if not all(isinstance(v, int) for v in pin.get("versions", [])):
            raise DamagedError(f"{key} names versions that are no numbers")
    except NewerFormatError:
        raise
    except DamagedError as error:
        raise CheckpointError(
            f"the pin {key} cannot be read: {error.message}",
            hint="Nothing was deleted. Restore the pin, or delete it if nobody needs it any more.",
        ) from error
    return pin


def _paths_of(body: Json) -> Iterator[str]:
    if "files" in body:
        for file in body["files"]:
            yield str(file["path"])
    elif "path" in body:
        yield str(body["path"])


def _raw_text(body: Json, data: bytes) -> bytes:
    try:
        return data + base64.b64decode(body["raw"])
    except (KeyError, TypeError, binascii.Error, ValueError):
        return data


def _may_live(run: dict[str, Json], generation: int) -> bool:
    """Return whether a run may still be writing: it has no recorded end, and no other run took over."""
    if run.get("status") != "running":
        return False
    held = run.get("generation")
    return not (isinstance(held, int) and 0 < held < generation) and _lives(run)


def _is_here(record: dict[str, Json]) -> bool:
    return is_this_host(record.get("host")) and isinstance(record.get("pid"), int)


def _lives(record: dict[str, Json]) -> bool:
    """Return whether a process may be alive; only its own host can tell that it is not."""
    return not (_is_here(record) and has_exited(str(record["host"]), int(record["pid"])))
