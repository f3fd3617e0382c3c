"""The files of a snapshot of sharded state, each created once and never changed; lists the snapshots of a home."""

from __future__ import annotations

from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeAlias

from isal import isal_zlib

from firnline.checkpoint.codec import checksum
from firnline.errors import (
    ConfigError,
    DamagedError,
    StateConflictError,
    StateDamagedError,
    StateIncompleteError,
)
from firnline.faults import fault_point
from firnline.names import ABORTED, COMMITTED, METADATA, aborted_key, committed_key, metadata_key, shard_folder
from firnline.state.manifest import (
    CheckpointPlan,
    CompleteCheckpoint,
    ShardContent,
    ShardState,
    assemble,
    check_id,
    check_path,
    find_epoch,
    read_sealed,
    write_sealed,
)
from firnline.storage import FileStat, Storage
from firnline.types import Json

_READERS = 8
_PIECE_BYTES = 1024 * 1024


def shard_key(checkpoint: str, shard: int) -> str:
    """Return the key of a shard's metadata. Raises ConfigError if `checkpoint` is not an id."""
    return metadata_key(shard_folder(check_id(checkpoint), shard))


# -- writing ------------------------------------------------------------------------------------------


def begin(storage: Storage, plan: CheckpointPlan) -> str:
    """Write the global metadata before any shard starts. Returns the id. Repeatable with the same plan.

    Raises:
        ConfigError: the plan's ranges are not all key groups.
        StateConflictError: the id was started with another plan.
    """
    if problem := plan.problem():
        raise ConfigError(f"a checkpoint of {plan.pipeline!r} cannot be made: {problem}")
    checkpoint, data = plan.checkpoint_id, plan.to_bytes()
    fault_point("state.begin.before")
    stands = _create(storage, metadata_key(checkpoint), data)
    fault_point("state.begin.after")
    if stands != data:
        raise StateConflictError(f"checkpoint {checkpoint} of state was begun with another plan", checkpoint=checkpoint)
    return checkpoint


def finish_shard(
    storage: Storage, checkpoint: str, shard: int, operators: Mapping[str, ShardState], report: Json = None
) -> tuple[ShardContent, str]:
    """Write a shard's metadata at the end of its task. Returns the stored content with its checksum.

    `operators` has every operator of the plan, including those without state. If an earlier attempt of the task, or a
    zombie, was first, its content counts and is returned; nothing refers to the files of this attempt.

    Raises:
        DamagedError: the stored content is damaged, or a file is outside the checkpoints.
    """
    content = ShardContent(check_id(checkpoint), shard, dict(operators), report)
    for state in operators.values():
        for file in state.files:
            check_path(file.path)
    key, data = shard_key(checkpoint, shard), content.to_bytes()
    fault_point("state.shard.before")
    stands = _create(storage, key, data)
    fault_point("state.shard.after")
    return ShardContent.from_bytes(stands, key, checkpoint, shard), checksum(stands)


def commit(storage: Storage, checkpoint: str, shards: Mapping[int, str]) -> str:
    """Write COMMITTED, given the checksum of every shard's metadata. Returns its digest. Repeatable.

    Raises:
        StateIncompleteError: it was never started, or a shard is missing.
        StateConflictError: it was aborted, or is committed with other shards.
    """
    metadata = _read(storage, metadata_key(check_id(checkpoint)), checkpoint)
    plan = CheckpointPlan.from_bytes(metadata, metadata_key(checkpoint), checkpoint)
    if sorted(shards) != [*range(len(plan.shards))]:
        raise StateIncompleteError(
            f"checkpoint {checkpoint} of state has {len(plan.shards)} shards; {sorted(shards)} reported",
            checkpoint=checkpoint,
        )
    _refuse_aborted(storage, checkpoint)
    sums = [shards[n] for n in sorted(shards)]
    data = write_sealed("committed", checkpoint, metadata=checksum(metadata), shards=sums)
    fault_point("state.commit.before")
    stands = _create(storage, committed_key(checkpoint), data)
    fault_point("state.commit.after")
    if stands != data:
        raise StateConflictError(
            f"checkpoint {checkpoint} of state is committed with other shards", checkpoint=checkpoint
        )
    _refuse_aborted(storage, checkpoint)
    return checksum(data)


def abort(storage: Storage, checkpoint: str, reason: str, *, unnamed: bool = False) -> None:
    """Write ABORTED: the checkpoint will never be complete. Repeatable; the first reason stays.

    `unnamed`: the caller knows that no sink names it or ever will, because it owns the pipeline, or dropped the epoch
    itself. Then a complete one is aborted too.

    Raises:
        StateConflictError: it is complete, and a sink may name it.
    """
    check_id(checkpoint)
    if not unnamed:
        _refuse_committed(storage, checkpoint)
    data = write_sealed("aborted", checkpoint, reason=reason)
    fault_point("state.abort.before")
    _create(storage, aborted_key(checkpoint), data)
    fault_point("state.abort.after")
    if not unnamed:
        _refuse_committed(storage, checkpoint)


def _create(storage: Storage, key: str, data: bytes) -> bytes:
    """Create a file unless it exists. Returns the stored content."""
    try:
        storage.put_new(key, data)
    except FileExistsError:
        return storage.get(key)
    return data


def _refuse_aborted(storage: Storage, checkpoint: str) -> None:
    if exists(storage, aborted_key(checkpoint)):
        raise StateConflictError(
            f"checkpoint {checkpoint} of state was aborted: {_reason(storage, checkpoint)}", checkpoint=checkpoint
        )


def _refuse_committed(storage: Storage, checkpoint: str) -> None:
    if exists(storage, committed_key(checkpoint)):
        raise StateConflictError(
            f"checkpoint {checkpoint} of state is complete and cannot be aborted", checkpoint=checkpoint
        )


# -- reading ------------------------------------------------------------------------------------------


def load(
    storage: Storage, checkpoint: str, expected_digest: str | None = None, *, named: bool = False
) -> CompleteCheckpoint:
    """Read a complete checkpoint, without its state files.

    `expected_digest` is the one that a sink names; `named` says that a sink names it, if the digest is not known.

    Raises:
        StateIncompleteError: it is not complete, was aborted, or lacks metadata.
        DamagedError: something differs from what was written, or from what the sink names.
        NewerFormatError: a newer Firnline wrote it.
    """
    return load_with_texts(storage, checkpoint, expected_digest, named=named)[0]


def load_with_texts(
    storage: Storage, checkpoint: str, expected_digest: str | None = None, *, named: bool = False
) -> tuple[CompleteCheckpoint, dict[str, bytes]]:
    """Like `load`, with the bytes of its metadata by key, in the order in which a copy writes them: COMMITTED last."""
    committed = committed_key(check_id(checkpoint))
    data = _read(storage, committed, checkpoint)
    digest = checksum(data)
    if expected_digest not in (None, digest):
        raise DamagedError(f"{committed} is not the one that was named", what=committed)
    if not named and expected_digest is None and exists(storage, aborted_key(checkpoint)):
        raise StateIncompleteError(
            f"checkpoint {checkpoint} of state was aborted: {_reason(storage, checkpoint)}", checkpoint=checkpoint
        )
    body = read_sealed(data, committed, "committed", checkpoint)
    try:
        sums = [str(value) for value in body["shards"]]
        metadata_sum = str(body["metadata"])
    except (KeyError, TypeError) as error:
        raise DamagedError(f"{committed} lacks {error}", what=committed) from error
    metadata = metadata_key(checkpoint)
    wanted = {**{shard_key(checkpoint, n): value for n, value in enumerate(sums)}, metadata: metadata_sum}
    with ThreadPoolExecutor(_READERS) as readers:
        texts = dict(zip(wanted, readers.map(lambda key: _read(storage, key, checkpoint), wanted), strict=True))
    for key, text in texts.items():
        if checksum(text) != wanted[key]:
            raise DamagedError(f"{key} does not match the checksum in {COMMITTED}", what=key)
    plan = CheckpointPlan.from_bytes(texts[metadata], metadata, checkpoint)
    keys = [shard_key(checkpoint, n) for n in range(len(sums))]
    contents = [ShardContent.from_bytes(texts[key], key, checkpoint, n) for n, key in enumerate(keys)]
    return assemble(plan, digest, contents), {**texts, committed: data}


def verify_files(storage: Storage, checkpoint: CompleteCheckpoint, *, deep: bool) -> int:
    """Check that every state file exists with its size and, with `deep`, its content. Returns their bytes.

    Raises:
        StateDamagedError: a file is missing or damaged.
    """
    total = 0
    for path, ref in sorted(checkpoint.files().items()):
        try:
            size = storage.stat(path).size_bytes
            found = file_crc32(storage, path) if deep and size == ref.size_bytes else ref.crc32
        except FileNotFoundError as error:
            raise StateDamagedError(f"the file of state {path} is missing", path=path) from error
        if size != ref.size_bytes:
            raise StateDamagedError(f"the file of state {path} has {size:,} bytes, not {ref.size_bytes:,}", path=path)
        if found != ref.crc32:
            raise StateDamagedError(f"the file of state {path} does not match its checksum", path=path)
        total += size
    return total


def file_crc32(storage: Storage, path: str) -> int:
    """Return the CRC-32 of a whole file."""
    found = 0
    stream = storage.open_read(path)
    try:
        while data := stream.read(_PIECE_BYTES):
            found = isal_zlib.crc32(data, found)
    finally:
        stream.close()
    return found


def exists(storage: Storage, key: str) -> bool:
    """Return whether a file exists."""
    try:
        storage.stat(key)
    except FileNotFoundError:
        return False
    return True


def _read(storage: Storage, key: str, checkpoint: str) -> bytes:
    try:
        return storage.get(key)
    except FileNotFoundError as error:
        why = f"checkpoint {checkpoint} of state lacks {key.removeprefix(checkpoint + '/')}"
        if exists(storage, aborted_key(checkpoint)):
            why = f"checkpoint {checkpoint} of state was aborted: {_reason(storage, checkpoint)}"
        raise StateIncompleteError(why, checkpoint=checkpoint) from error


def _reason(storage: Storage, checkpoint: str) -> str:
    key = aborted_key(checkpoint)
    try:
        return str(read_sealed(storage.get(key), key, "aborted", checkpoint).get("reason", ""))
    except (DamagedError, FileNotFoundError):
        return "the reason cannot be read"


Status: TypeAlias = Literal["IN_PROGRESS", "COMPLETED", "FAILED"]


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one attempt at an epoch: a checkpoint, or segments that later checkpoints may refer to."""

    checkpoint_id: str
    epoch: int
    files: Mapping[str, FileStat]  # by key below the home

    def has(self, name: str) -> bool:
        """Return whether it has a file of this name."""
        return f"{self.checkpoint_id}/{name}" in self.files

    def find_status(self, named: Set[str] = frozenset()) -> Status | None:
        """Return the status of its checkpoint; None if none was started there.

        With both COMMITTED and ABORTED, it is complete only if it is among `named`, those that sinks name.
        """
        if self.has(COMMITTED) and (not self.has(ABORTED) or self.checkpoint_id in named):
            return "COMPLETED"
        if self.has(ABORTED):
            return "FAILED"
        return "IN_PROGRESS" if self.has(METADATA) else None


def list_folders(storage: Storage) -> list[Folder]:
    """Return every folder named by an id, oldest epoch first. Everything else in the home is left out."""
    start = len(storage.root.rstrip("/")) + 1
    found: dict[str, dict[str, FileStat]] = {}
    for stat in storage.list(""):
        key = stat.name[start:]
        found.setdefault(key.partition("/")[0], {})[key] = stat
    folders = []
    for name, files in sorted(found.items()):
        epoch = find_epoch(name)
        if epoch is not None:
            folders.append(Folder(name, epoch, files))
    return folders
