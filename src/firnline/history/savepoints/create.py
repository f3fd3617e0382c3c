"""Creates savepoints: user-owned folders that a pipeline can be restored from.

The folder must be separate from everything that the pipeline reads, writes or sweeps. The steps are ordered so that a
kill at any point leaves either a savepoint or something that `dispose` removes:
1. Read the head of every sink; all must hold the same epoch.
2. Pin its files in every table, and operator state. The pin names every file that will be written.
3. Check that every file still exists.
4. Copy the data files and the state, if requested; copy the ledger chain.
5. Put the manifest. Only now the savepoint exists.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from urllib.parse import unquote

from firnline.checkpoint.codec import short_number
from firnline.errors import CheckpointError, ConfigError, DamagedError, SinkError
from firnline.faults import fault_point
from firnline.history.savepoints.files import Progress, copy_file, each
from firnline.history.savepoints.format import (
    SavedBytes,
    SavedFile,
    SavedSink,
    Savepoint,
    is_relative,
)
from firnline.history.savepoints.pins import SHORT_ID, Pin, put_pin
from firnline.history.savepoints.state import check_still_there, copy_state, take_state
from firnline.history.state import state_bytes
from firnline.history.store import on_record
from firnline.maintenance.survey import is_inside
from firnline.names import (
    SAVEPOINT,
    STATE,
    quarantine_folder,
    saved_data_key,
    saved_ledger_key,
    saved_quarantine_key,
    saved_state_key,
)
from firnline.process import this_process
from firnline.run.open_pipeline import OpenPipeline
from firnline.schema import schema_to_json
from firnline.sinks.base import Head
from firnline.sinks.delta.contents import ListedFile, find_key, list_contents, special_features
from firnline.sinks.delta.sink import DeltaSink, as_delta
from firnline.sinks.delta.sweeps import SweepLog
from firnline.state.home import StateHome
from firnline.storage import Storage, is_remote, normalise, open_storage
from firnline.types import Json


def default_place(pipeline: OpenPipeline, epoch: int, identity: str) -> str:
    """Return the default folder: beside a store in a folder, otherwise beside the deciding sink's table."""
    store = pipeline.options.checkpoint.store
    beside = store.path if store is not None and store.type == "file" and store.path else pipeline.storage.root
    above = posixpath.dirname(beside.rstrip("/"))
    if above.endswith((":", ":/")):  # the table is a whole bucket
        raise ConfigError("there is no folder beside the table", hint="Name one with --path.")
    return f"{above}/savepoints/{pipeline.options.name}-{epoch}-{identity[:SHORT_ID]}"


def check_apart(pipeline: OpenPipeline, place: str) -> None:
    """Refuse a location that a source could read as input, or that a sweep or store could treat as its own."""
    mine = _real(place)
    for what, root in _used_places(pipeline):
        used = _real(root)
        if mine == used or mine.startswith(f"{used.rstrip('/')}/") or used.startswith(f"{mine.rstrip('/')}/"):
            raise ConfigError(
                f"{place} cannot hold a savepoint: {what} is {root}",
                hint="Name a folder apart from it with --path.",
            )


def _used_places(pipeline: OpenPipeline) -> Iterator[tuple[str, str]]:
    checkpoint = pipeline.options.checkpoint
    for source in pipeline.sources:
        yield f"the source {source.name}", source.location
    for sink in pipeline.sinks:
        yield f"the table of {sink.name}", sink.uri
    if checkpoint.store is not None and (checkpoint.store.path or checkpoint.store.uri):
        yield "the checkpoint store", checkpoint.store.path or checkpoint.store.uri
    if checkpoint.local is not None:
        yield "the local tier", checkpoint.local.path
    if checkpoint.remote is not None:
        yield "the remote tier", checkpoint.remote.uri


def _real(place: str) -> str:
    name = normalise(place)
    return name if is_remote(name) else os.path.realpath(name)


def check_writable(storage: Storage, identity: str) -> None:
    """Refuse a folder that is not writable, before anything is pinned."""
    probe = f".{identity}.tmp"
    try:
        storage.put(probe, b"")
        storage.delete(probe)
    except OSError as error:
        raise ConfigError(
            f"{storage.root} cannot be written: {error}", hint="Name a folder that can be, with --path."
        ) from error


def is_temporary(name: str) -> bool:
    """Return whether a killed write leaves files of this name behind."""
    last = name.rsplit("/", 1)[-1]
    return last.startswith(".") and last.endswith(".tmp")


LOOKS = 50  # how long to wait for lagging sinks
LOOK_SECONDS = 0.2
FOLDS = 5  # epochs that may be committed while the ledger is copied
NAMED = 3
_READERS = 16


@dataclass(frozen=True, slots=True)
class _Taken:
    """One sink at the saved version. `paths` are spelled as in the log."""

    sink: DeltaSink
    saved: SavedSink
    paths: list[str]


def create_savepoint(
    pipeline: OpenPipeline,
    path: str | None = None,
    *,
    copy: bool = False,
    run: str = "",
    storage_options: dict[str, str] | None = None,
    progress: Progress | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[Savepoint, str]:
    """Save the current heads of the sinks. Returns the manifest and its location.

    Args:
        path: A folder or URI that does not exist yet, or is empty; chosen beside the checkpoint store if omitted.
        copy: Copy data files and state, too: the savepoint then survives the loss of the tables and any vacuum.
        stopping: Called before each file is copied. If it returns True, KeyboardInterrupt is raised, and `dispose`
            removes the rest.

    Raises:
        ConfigError: the path is not empty, not writable or in other use, or a table has features beyond plain files.
        CheckpointError: there is no epoch yet; or the operator state is incomplete, or older than the epoch and cannot
            be rebuilt from the input since.
        SinkError: a sink lags, or a file is missing.
    """
    head = _stand_together(pipeline)
    identity = pipeline.ids.new()
    place = normalise(path) if path is not None else default_place(pipeline, head.epoch, identity)
    storage = open_storage(place, storage_options)
    if any(not is_temporary(stat.name) for stat in storage.list("")):
        raise ConfigError(f"{place} is not empty", hint="Name a folder that does not exist yet.")
    check_apart(pipeline, place)
    check_writable(storage, identity)
    facts: dict[str, Json] = {"savepoint": identity, "path": place, "copied": copy}
    with on_record(pipeline, "savepoint-create", run, from_epoch=None, to_epoch=head.epoch, **facts):
        saved_home = StateHome(f"{place}/{STATE}", storage_options or {})
        making = _Making(pipeline, head, identity, storage, saved_home, copy=copy, run=run)
        made = making.make(progress, stopping)
    return made, place


def describe_savepoint(savepoint: Savepoint, location: str) -> dict[str, Json]:
    """Return what `firnline savepoint create` shows of a savepoint, as JSON has it."""
    files = [file for sink in savepoint.sinks.values() for file in sink.files]
    return {
        "id": savepoint.id,
        "pipeline": savepoint.pipeline,
        "epoch": savepoint.epoch,
        "created_at": savepoint.created_at,
        "path": location,
        "copied": savepoint.copied,
        "files": len(files),
        "rows": sum(file.rows or 0 for file in files),
        "size_bytes": savepoint.size_bytes,
        "state_size_bytes": savepoint.state_size_bytes,
        "state_replayed": savepoint.state_replayed,
        "has_state": bool(savepoint.state),
    }


def _stand_together(pipeline: OpenPipeline) -> Head:
    """Return the deciding sink's head once every other table has the same; table handles are at the versions read.

    Followers are not waited for: a savepoint does not hold their rows.
    """
    behind: list[str] = []
    for _ in range(LOOKS):
        head = pipeline.deciding.load_committed()
        if not head.exists or head.entry is None or head.checkpoint is None or head.epoch < 1:
            raise CheckpointError("there is no epoch to save yet", hint="`firnline run` makes the first.")
        wanted = head.epoch, short_number(head.entry.checksum)
        behind = []
        for sink in pipeline.tables[1:]:
            fence = sink.read_fence()
            if (fence.epoch, fence.digest) != wanted:
                behind.append(f"{sink.name} at epoch {fence.epoch}")
        if not behind:
            for sink in pipeline.tables:
                sink.make_durable()
            return head
        pipeline.clock.sleep(LOOK_SECONDS)
    raise SinkError(
        f"not every sink is at epoch {head.epoch}: {', '.join(behind)}",
        hint="Let the pipeline run until all sinks are in sync; see `firnline status`.",
    )


class _Making:
    """A savepoint in the making."""

    def __init__(
        self,
        pipeline: OpenPipeline,
        head: Head,
        identity: str,
        storage: Storage,
        saved_home: StateHome,
        *,
        copy: bool,
        run: str,
    ) -> None:
        self._saved_home = saved_home
        self._state = take_state(pipeline, head)
        self._pipeline = pipeline
        self._held = head
        self._id = identity
        self._storage = storage
        self._copy = copy
        self._run = run
        self._created_at = pipeline.clock.now().isoformat()
        links = pipeline.ledger.chain(head.entry)
        self._quarantine = [str(file["name"]) for link in links for file in link.quarantine]

    def make(self, progress: Progress | None, stopping: Callable[[], bool]) -> Savepoint:
        assert self._held.entry is not None
        assert self._held.checkpoint is not None
        taken = [self._take(as_delta(sink)) for sink in self._pipeline.tables]
        names = self._pipeline.ledger.chain_names(self._held.entry)
        for one in taken:  # the deciding table's pin first: `list` reads it
            put_pin(one.sink.storage, self._pin(one, taken, names))
        for one in taken:
            self._check_there(one)
        check_still_there(self._pipeline, self._state)
        copied = {one.sink.name: self._copy_data(one, progress, stopping) for one in taken}
        sinks = {one.sink.name: replace(one.saved, files=copied[one.sink.name]) for one in taken}
        state = self._state.saved
        if self._copy:
            state = copy_state(self._state, self._storage, self._saved_home, progress, stopping)
        ledger = self._save_ledger(taken, names)
        quarantine = self._save_quarantine()
        me = this_process()
        made = Savepoint(
            id=self._id,
            pipeline=self._pipeline.options.name,
            created_at=self._created_at,
            by={"user": me.user, "host": me.host, "run": self._run},
            epoch=self._held.epoch,
            checkpoint=self._held.checkpoint,
            entry=self._held.entry,
            copied=self._copy,
            sinks=sinks,
            ledger=ledger,
            quarantine=quarantine,
            state=self._state.states,
            state_files=state,
            state_home=self._pipeline.state_home.storage.root if state else "",
            state_replayed=self._state.replayed,
        )
        fault_point("savepoint.put.before")
        self._storage.put(SAVEPOINT, made.to_bytes())
        fault_point("savepoint.put.after")
        pin = self._pin(taken[0], taken, [saved.name for saved in ledger])
        put_pin(taken[0].sink.storage, replace(pin, completed=True))
        return made

    def _take(self, sink: DeltaSink) -> _Taken:
        """Return the files at the version of the sink's handle, with their storage keys."""
        delta = sink.table.delta
        special = special_features(delta)
        if special:
            raise ConfigError(
                f"{sink.table.uri} uses {', '.join(special)}, under which its files are not all there is",
                hint="Rewrite the table without them first.",
            )
        listed = list(list_contents(delta))
        with ThreadPoolExecutor(_READERS) as readers:
            found = list(readers.map(lambda file: find_key(sink.storage, file.path), listed))
        _check_whole(sink, listed, found)
        files = []
        for file, there in zip(listed, found, strict=True):
            assert there is not None
            key = there[0]
            if not is_relative(key) or not is_inside(sink.storage, key):
                raise ConfigError(f"{sink.name}: {file.path} lies outside the table; a savepoint cannot hold it")
            values = file.partition_values
            files.append(SavedFile(key, file.size_bytes, file.rows, values, file.modification_time))
        saved = SavedSink(
            table=sink.table.uri,
            table_id=str(delta.metadata().id),
            version=sink.table.version,
            schema=schema_to_json(sink.table.schema()),
            partition_by=sink.table.partition_columns(),
            files=files,
        )
        return _Taken(sink, saved, [file.path for file in listed])

    def _pin(self, one: _Taken, taken: list[_Taken], ledger: list[str]) -> Pin:
        writes: list[str] = []
        if one.sink.name == self._pipeline.deciding.name:
            writes = [saved_ledger_key(name) for name in ledger]
            writes += [saved_quarantine_key(name) for name in self._quarantine]
            if self._copy:
                writes += [saved_data_key(t.sink.name, file.path) for t in taken for file in t.saved.files]
                writes += [saved_state_key(name) for name in self._state.files]
        return Pin(
            id=self._id,
            pipeline=self._pipeline.options.name,
            epoch=self._held.epoch,
            created_at=self._created_at,
            path=self._storage.root,
            copied=self._copy,
            version=one.saved.version,
            size_bytes=sum(file.size_bytes for t in taken for file in t.saved.files),
            files=one.paths,
            writes=writes,
            state_size_bytes=state_bytes(self._held.checkpoint),
            state=self._state.refs if one.sink.name == self._pipeline.deciding.name else {},
        )

    def _check_there(self, one: _Taken) -> None:
        """Check the files again: a sweep may have run, or announced deletions, between the read of the log and the
        pin."""
        names = {name for file in one.saved.files for name in (file.path, unquote(file.path))}
        sweep = SweepLog(one.sink.storage, one.sink.table).find_after_pin(names)
        if sweep is not None:
            raise SinkError(
                f"{one.sink.name}: files that the savepoint needs are being deleted by {sweep}",
                hint=f"Try again. A sweep that died is finished by: firnline gc {one.sink.table.uri} --yes",
            )
        listed = [ListedFile(file.path, file.size_bytes, None, {}, 0) for file in one.saved.files]
        with ThreadPoolExecutor(_READERS) as readers:
            found = list(readers.map(lambda file: find_key(one.sink.storage, file.path), listed))
        _check_whole(one.sink, listed, found)

    def _copy_data(self, one: _Taken, progress: Progress | None, stopping: Callable[[], bool]) -> list[SavedFile]:
        if not self._copy:
            return one.saved.files

        def copy(file: SavedFile) -> SavedFile:
            fault_point("savepoint.copy.before")
            size, sha256 = copy_file(
                one.sink.storage, file.path, self._storage, saved_data_key(one.sink.name, file.path)
            )
            fault_point("savepoint.copy.after")
            if size != file.size_bytes:
                raise DamagedError(f"{one.sink.name}: {file.path} has {size} bytes, the log says {file.size_bytes}")
            return replace(file, sha256=sha256)

        what, files = f"copying {one.sink.name}", one.saved.files
        return each(what, files, copy, lambda f: f.size_bytes, progress, stopping)

    def _save_ledger(self, taken: list[_Taken], names: list[str]) -> list[SavedBytes]:
        """Copy the chain. Entries folded meanwhile are copied as their fold."""
        assert self._held.entry is not None
        folder = self._pipeline.ledger.folder
        done: dict[str, SavedBytes] = {}
        for _ in range(FOLDS):
            is_folded = False
            for name in (name for name in names if name not in done):
                try:
                    data = self._pipeline.storage.get(f"{folder}/{name}")
                except FileNotFoundError:
                    is_folded = True
                    break
                self._storage.put(saved_ledger_key(name), data)
                done[name] = SavedBytes(name, len(data), hashlib.sha256(data).hexdigest())
            if is_folded:
                names = self._pipeline.ledger.chain_names(self._held.entry)
                put_pin(taken[0].sink.storage, self._pin(taken[0], taken, [*done, *names]))
                continue
            for name in done.keys() - set(names):
                self._storage.delete(saved_ledger_key(name))
            return [done[name] for name in names]
        raise SinkError("the ledger changed during every attempt to copy it; try again")

    def _save_quarantine(self) -> list[SavedBytes]:
        """Copy the quarantine files that the chain names, except those that an earlier restore did not bring along."""
        done = []
        for name in self._quarantine:
            try:
                data = self._pipeline.storage.get(f"{quarantine_folder(self._pipeline.options.name)}/{name}")
            except FileNotFoundError:
                continue
            self._storage.put(saved_quarantine_key(name), data)
            done.append(SavedBytes(name, len(data), hashlib.sha256(data).hexdigest()))
        return done


def _check_whole(sink: DeltaSink, listed: list[ListedFile], found: list[tuple[str, int] | None]) -> None:
    bad = [file.path for file, there in zip(listed, found, strict=True) if there is None or there[1] != file.size_bytes]
    if bad:
        raise SinkError(
            f"{sink.name}: {len(bad)} file(s) that the table consists of are gone or changed: {', '.join(bad[:NAMED])}",
            hint="The table itself is damaged, or a sweep ran at this moment; try again.",
        )
