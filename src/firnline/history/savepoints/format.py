"""The manifest of a savepoint: its contents and its format.

A savepoint is a folder that belongs to the user. Every name in it is relative, so that it can be moved:

    savepoint.json     the manifest; written last, it makes the savepoint
    ledger/<name>      the ledger chain of its epoch, byte for byte
    quarantine/<name>  the quarantine that the chain names
    data/<sink>/<path> with copies: the data files
    state/<path>       with copies: the files of operators' state
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.checkpoint.model import Checkpoint
from firnline.errors import DamagedError
from firnline.names import saved_data_key, saved_ledger_key, saved_quarantine_key, saved_state_key
from firnline.storage import Storage
from firnline.types import EntryRef, Json

MAX_MANIFEST_BYTES = 1 << 30
MAX_BYTES = 1 << 30  # of one file that is kept byte for byte
_ID = re.compile(r"[0-9a-f]{16}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_LEDGER_NAME = re.compile(r"(fold-)?[0-9]{20}-[0-9a-f]+\.json(\.zst)?")
_STATE_ID = re.compile(r"[0-9]{20}-[a-z0-9][a-z0-9-]{0,63}")
_STATE_NAME = re.compile(rf"{_STATE_ID.pattern}/(shard_[0-9]{{1,6}}/)?[A-Za-z0-9][A-Za-z0-9_.-]*")
_QUARANTINE_NAME = re.compile(r"[0-9]{20}-[0-9a-f]+-[0-9a-f]+\.parquet")


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One data file of a table. `path` is where it lies below the table; `sha256` is there for copies alone."""

    path: str
    size_bytes: int
    rows: int | None  # None: not in the log
    partition_values: dict[str, str | None]
    modification_time: int
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class SavedSink:
    """One table at the saved version. `table_id` is Delta's id, which distinguishes it from another table at the same
    path."""

    table: str
    table_id: str
    version: int
    schema: list[dict[str, Json]]
    partition_by: list[str]
    files: list[SavedFile]


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """One file of the ledger chain, of quarantine or of state; `sha256` is empty for state without copies."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedState:
    """One checkpoint of operator state. `digest` covers all of its files."""

    checkpoint: str
    digest: str


@dataclass(frozen=True, slots=True)
class Savepoint:
    """A pipeline at one epoch: its checkpoint, its ledger chain, and every sink's table."""

    id: str
    pipeline: str
    created_at: str
    by: dict[str, Json]  # user, host, run
    epoch: int
    checkpoint: Checkpoint
    entry: EntryRef
    copied: bool
    sinks: dict[str, SavedSink]
    ledger: list[SavedBytes] = field(default_factory=list)
    quarantine: list[SavedBytes] = field(default_factory=list)
    state: list[SavedState] = field(default_factory=list)  # references in the checkpoint, used by a restore
    state_files: list[SavedBytes] = field(default_factory=list)  # by name below a home of state
    state_home: str = ""  # the location of the state
    state_replayed: list[int] = field(default_factory=list)  # epochs since the snapshots: their input is read again

    @property
    def state_size_bytes(self) -> int:
        """The size of operator state, wherever it is, according to the checkpoint, without metadata."""
        return sum(int(ref["size_bytes"]) for ref in self.checkpoint.state.values())

    @property
    def size_bytes(self) -> int:
        """The size of the data files, wherever they are."""
        return sum(file.size_bytes for sink in self.sinks.values() for file in sink.files)

    def names(self) -> Iterator[str]:
        """Yield the names of everything in the savepoint's folder except the manifest."""
        for key, _ in kept_bytes(self):
            yield key
        if self.copied:
            for name, sink in self.sinks.items():
                for file in sink.files:
                    yield saved_data_key(name, file.path)
            for kept in self.state_files:
                yield saved_state_key(kept.name)

    def to_bytes(self) -> bytes:
        """Return the durable form."""
        body = {
            "id": self.id,
            "pipeline": self.pipeline,
            "created_at": self.created_at,
            "by": self.by,
            "epoch": self.epoch,
            "checkpoint": self.checkpoint.to_json(),
            "entry": self.entry.to_json(),
            "copied": self.copied,
            "sinks": {name: asdict(sink) for name, sink in self.sinks.items()},
            "ledger": [asdict(saved) for saved in self.ledger],
            "quarantine": [asdict(saved) for saved in self.quarantine],
            **({"state": self._state_json()} if self.state else {}),
        }
        return canonical(seal(body)) + b"\n"

    def _state_json(self) -> dict[str, Json]:
        return {
            "checkpoints": [asdict(state) for state in self.state],
            "files": [asdict(saved) for saved in self.state_files],
            "home": self.state_home,
            "replayed": self.state_replayed,
        }

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "the savepoint") -> Savepoint:
        """Parse the durable form and check every name in it.

        Raises:
            DamagedError: the content differs from what was written, or a name leads out of the folder.
            NewerFormatError: a newer Firnline wrote it.
        """
        try:
            body = unseal(parse(data, what), what)
            state = body.get("state") or {"checkpoints": [], "files": [], "home": "", "replayed": []}
            found = cls(
                id=str(body["id"]),
                pipeline=str(body["pipeline"]),
                created_at=str(body["created_at"]),
                by=dict(body["by"]),
                epoch=int(body["epoch"]),
                checkpoint=Checkpoint.from_json(body["checkpoint"], what),
                entry=EntryRef.from_json(body["entry"]),
                copied=bool(body["copied"]),
                sinks={str(name): _sink(sink) for name, sink in body["sinks"].items()},
                ledger=[_bytes(saved) for saved in body["ledger"]],
                quarantine=[_bytes(saved) for saved in body["quarantine"]],
                state=[SavedState(str(one["checkpoint"]), str(one["digest"])) for one in state["checkpoints"]],
                state_files=[_bytes(saved) for saved in state["files"]],
                state_home=str(state["home"]),
                state_replayed=[int(epoch) for epoch in state["replayed"]],
            )
            refs = found.checkpoint.state.values()
            named = {(str(ref["checkpoint"]), str(ref["digest"])) for ref in refs if int(ref["size_bytes"]) >= 0}
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error
        found._check(what)
        if not named <= {(one.checkpoint, one.digest) for one in found.state}:
            raise DamagedError(f"{what} cannot be used: it lacks state that its checkpoint names", what=what)
        return found

    def _check(self, what: str) -> None:
        problem = ""
        if not _ID.fullmatch(self.id):
            problem = f"its id is {self.id!r}"
        elif not (self.epoch == self.entry.epoch == self.checkpoint.epoch and self.epoch > 0):
            problem = "its checkpoint, its entry and its epoch differ"
        elif self.checkpoint.pipeline != self.pipeline:
            problem = "its checkpoint is of another pipeline"
        elif not any(s.name == self.entry.name and s.sha256 == self.entry.checksum for s in self.ledger):
            problem = "its ledger lacks the entry of its epoch"
        else:
            problem = next(_bad_names(self), "")
        if problem:
            raise DamagedError(f"{what} cannot be used: {problem}", what=what)


def _bad_names(savepoint: Savepoint) -> Iterator[str]:
    """Yield what is wrong with names and numbers; each of them becomes part of a path."""
    for pattern, kept in ((_LEDGER_NAME, savepoint.ledger), (_QUARANTINE_NAME, savepoint.quarantine)):
        for saved in kept:
            if not pattern.fullmatch(saved.name) or not _SHA256.fullmatch(saved.sha256) or saved.size_bytes < 0:
                yield f"{saved.name!r} is no file of a ledger or of quarantine"
    for one in savepoint.state:
        if not _STATE_ID.fullmatch(one.checkpoint) or not _SHA256.fullmatch(one.digest):
            yield f"{one.checkpoint!r} is no checkpoint of state"
    for saved in savepoint.state_files:
        sealed = _SHA256.fullmatch(saved.sha256) if savepoint.copied else saved.sha256 == ""
        if not _STATE_NAME.fullmatch(saved.name) or saved.size_bytes < 0 or not sealed:
            yield f"{saved.name!r} is no file of state, or has no size or no checksum"
    for name, sink in savepoint.sinks.items():
        if not _NAME.fullmatch(name) or ".." in name:
            yield f"{name!r} is no name of a sink"
        for file in sink.files:
            if not is_relative(file.path):
                yield f"{file.path!r} leads out of its folder"
            if file.size_bytes < 0 or not (_SHA256.fullmatch(file.sha256) if savepoint.copied else file.sha256 == ""):
                yield f"{file.path!r} has no size or no checksum"
            if sorted(file.partition_values) != sorted(sink.partition_by):
                yield f"{file.path!r} has other partition values than its table"
    names = list(savepoint.names())
    if len(set(names)) != len(names):
        yield "it names a file twice"


def _sink(value: Json) -> SavedSink:
    return SavedSink(
        table=str(value["table"]),
        table_id=str(value["table_id"]),
        version=int(value["version"]),
        schema=list(value["schema"]),
        partition_by=[str(name) for name in value["partition_by"]],
        files=[_file(file) for file in value["files"]],
    )


def _file(value: Json) -> SavedFile:
    return SavedFile(
        path=str(value["path"]),
        size_bytes=int(value["size_bytes"]),
        rows=None if value["rows"] is None else int(value["rows"]),
        partition_values={str(k): None if v is None else str(v) for k, v in value["partition_values"].items()},
        modification_time=int(value["modification_time"]),
        sha256=str(value["sha256"]),
    )


def _bytes(value: Json) -> SavedBytes:
    return SavedBytes(str(value["name"]), int(value["size_bytes"]), str(value["sha256"]))


def is_relative(key: str) -> bool:
    """Return whether a key names something below its folder."""
    parts = key.split("/")
    return not ("\0" in key or "\\" in key or "://" in key or any(part in ("", ".", "..") for part in parts))


def kept_bytes(savepoint: Savepoint) -> Iterator[tuple[str, SavedBytes]]:
    """Yield every file that is kept byte for byte, with its path in the savepoint."""
    for saved in savepoint.ledger:
        yield saved_ledger_key(saved.name), saved
    for saved in savepoint.quarantine:
        yield saved_quarantine_key(saved.name), saved


def read_saved(storage: Storage, key: str, saved: SavedBytes) -> bytes:
    """Return the bytes of a file in a savepoint, verified by checksum.

    Raises:
        DamagedError: it is missing or differs.
    """
    what = f"{key} of the savepoint"
    try:
        if storage.stat(key).size_bytes != saved.size_bytes or saved.size_bytes > MAX_BYTES:
            raise DamagedError(f"{what} does not have the size that it was saved with", what=what)
        data = storage.get(key)
    except FileNotFoundError as error:
        raise DamagedError(f"{what} is missing", what=what) from error
    if hashlib.sha256(data).hexdigest() != saved.sha256:
        raise DamagedError(f"{what} is not what was saved", what=what)
    return data
