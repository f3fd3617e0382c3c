"""The tiers of state: finds the home that serves a snapshot; copies snapshots to the remote tier and back."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from isal import isal_zlib

from firnline.errors import CheckpointError, StateConflictError, StateDamagedError, StateIncompleteError
from firnline.faults import fault_point
from firnline.state.home import StateHome
from firnline.state.manifest import CompleteCheckpoint, SegmentRef, SnapshotRef, find_epoch
from firnline.state.snapshot import file_crc32, list_folders, load, load_with_texts, verify_files
from firnline.state.sweep import Marks, Swept, sweep
from firnline.storage import Storage
from firnline.stores.replicator import Replication, Replicator

logger = logging.getLogger(__name__)

ATOMIC_BYTES = 64 * 1024 * 1024  # a file up to this size is put in one piece, atomically
_PIECE_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SnapshotSearch:
    """Which home serves a snapshot of operator state, and why the homes searched before it do not.

    `complete` and `home` are None if no home serves it. `tier` is `local` for the pipeline's own home, `remote` for the
    remote tier, empty if no home serves it. `problems` are in the order of the search, one per home that does not.
    """

    complete: CompleteCheckpoint | None
    home: StateHome | None
    tier: str
    problems: tuple[CheckpointError, ...] = ()

    def require(self) -> tuple[CompleteCheckpoint, StateHome]:
        """Return the snapshot and its home.

        Raises:
            CheckpointError: no home serves it; the message is about the pipeline's own home.
        """
        if self.complete is None or self.home is None:
            raise self.problems[0]
        return self.complete, self.home


def find_snapshot(
    home: StateHome, ref: SnapshotRef, *, with_files: bool = True, bring_home: bool = False
) -> SnapshotSearch:
    """Find the home that serves the snapshot that a checkpoint names for an operator.

    The search goes to the pipeline's own home first (the local tier, or the folder of the deciding table), then to the
    remote tier. A home serves a snapshot if the snapshot is complete there with the digest of the reference and, with
    `with_files`, every file of it exists with its size. A snapshot that is missing or damaged is no error here.

    With `bring_home` the own home serves it afterwards: what only the remote tier has is copied, COMMITTED last, and
    files of the own home with other content are replaced. Repeatable after a crash. Otherwise nothing is written, and a
    home that cannot be read now counts as one that lacks the snapshot.

    Raises:
        OSError: with `bring_home`, a home cannot be read or written now; older state must not replace it.
    """
    remote = home.fallback
    try:
        return SnapshotSearch(_load_from(home, ref, with_files=with_files, tolerant=not bring_home), home, "local")
    except CheckpointError as error:
        problem = error
    if remote is None:
        return SnapshotSearch(None, None, "", (problem,))
    try:
        if bring_home:
            Replica(home.storage, remote.storage).restore_missing(ref.checkpoint, ref.digest)
            return SnapshotSearch(load(home.storage, ref.checkpoint, ref.digest), home, "remote", (problem,))
        complete = _load_from(remote, ref, with_files=with_files, tolerant=True)
        return SnapshotSearch(complete, remote, "remote", (problem,))
    except CheckpointError as error:
        return SnapshotSearch(None, None, "", (problem, error))


def _load_from(home: StateHome, ref: SnapshotRef, *, with_files: bool, tolerant: bool) -> CompleteCheckpoint:
    try:
        complete = load(home.storage, ref.checkpoint, ref.digest)
        if with_files:
            verify_files(home.storage, complete, deep=False)
    except OSError as error:
        if not tolerant:
            raise
        raise StateIncompleteError(
            f"checkpoint {ref.checkpoint} of state cannot be read in {home.storage.root}: {error}",
            checkpoint=ref.checkpoint,
        ) from error
    return complete


class Replica:
    """The remote copy of a pipeline's state. Thread-safe; one thread copies at a time."""

    def __init__(self, local: Storage, remote: Storage) -> None:
        self.local = local
        self.remote = remote
        self._lock = threading.Lock()
        self._held: dict[str, int] | None = None  # files that complete checkpoints in the remote home name, with sizes

    def replicate(self, checkpoint: str, expected_digest: str | None = None) -> int:
        """Copy a complete checkpoint to the remote home. Returns the bytes copied. Repeatable.

        Raises:
            StateIncompleteError: it is not complete here.
            DamagedError, StateDamagedError: it, or a file of it, is damaged here.
            StateConflictError: the remote home has another checkpoint of this id.
            OSError: the remote home could not be written; the next call continues from there.
        """
        with self._lock:
            if self._held is None:
                self._held = _named_files(self.remote)
            try:
                copied, files = _copy_checkpoint(self.local, self.remote, self._held, checkpoint, expected_digest)
            except BaseException:
                self._held = None  # the remote content is unknown now
                raise
            self._held.update({path: ref.size_bytes for path, ref in files.items()})
            return copied

    def restore_missing(self, checkpoint: str, expected_digest: str | None = None) -> int:
        """Copy files of a checkpoint that the local home lacks, or has with other content. Returns the bytes copied.

        Raises:
            StateIncompleteError: the remote home does not have it.
            DamagedError, StateDamagedError: it, or a file of it, is damaged there.
            StateConflictError: the local home has another checkpoint of this id, and no digest decides between them.
        """
        with self._lock:
            return _copy_checkpoint(self.remote, self.local, {}, checkpoint, expected_digest)[0]

    def sweep_remote(
        self,
        marks: Marks,
        now: datetime,
        grace_secs: float,
        keep_checkpoints: int,
        keep_aborted_secs: float,
        referenced: Iterable[str] = (),
        delete: Callable[[Sequence[str]], None] | None = None,
    ) -> Swept:
        """Sweep the remote home, not during a copy. A marked checkpoint may not be there yet."""
        with self._lock:
            self._held = None
            limits = (grace_secs, keep_checkpoints, keep_aborted_secs)
            return sweep(self.remote, marks, now, *limits, absent_marks=True, referenced=referenced, delete=delete)


def _named_files(storage: Storage) -> dict[str, int]:
    """Return the existing files that complete checkpoints in a home name, with their sizes."""
    folders = list_folders(storage)
    sizes = {key: stat.size_bytes for folder in folders for key, stat in folder.files.items()}
    found: dict[str, int] = {}
    for folder in folders:
        if folder.find_status() == "COMPLETED":
            with contextlib.suppress(CheckpointError):  # an unreadable one names no files
                refs = load(storage, folder.checkpoint_id).files()
                found.update({path: ref.size_bytes for path, ref in refs.items() if sizes.get(path) == ref.size_bytes})
    return found


def _copy_checkpoint(
    source: Storage, target: Storage, held: Mapping[str, int], checkpoint: str, expected_digest: str | None
) -> tuple[int, dict[str, SegmentRef]]:
    """Copy files, then the metadata of shards, the global metadata, and COMMITTED at the end."""
    complete, texts = load_with_texts(source, checkpoint, expected_digest)
    files = complete.files()
    copied = 0
    for path, ref in sorted(files.items()):
        if held.get(path) != ref.size_bytes and not _is_there(target, ref):
            _copy_file(source, target, ref)
            copied += ref.size_bytes
    for key, data in texts.items():
        copied += _copy_text(target, key, data, replace=expected_digest is not None)
    return copied, files


def _is_there(target: Storage, ref: SegmentRef) -> bool:
    """Return whether a file exists as it was written. The rest of a broken copy is deleted."""
    try:
        if target.stat(ref.path).size_bytes == ref.size_bytes and file_crc32(target, ref.path) == ref.crc32:
            return True
    except FileNotFoundError:
        return False
    fault_point("state.replicate.before")
    target.delete(ref.path)
    fault_point("state.replicate.after")
    return False


def _copy_file(source: Storage, target: Storage, ref: SegmentRef) -> None:
    """Copy one file. Refuses a file that does not match its reference."""
    try:
        if ref.size_bytes <= ATOMIC_BYTES:
            data = source.get(ref.path)
            _check(ref, len(data), isal_zlib.crc32(data))
            fault_point("state.replicate.before")
            target.put(ref.path, data)
            fault_point("state.replicate.after")
        else:
            _copy_large(source, target, ref)
    except FileNotFoundError as error:
        raise StateDamagedError(f"the file of state {ref.path} is missing", path=ref.path) from error


def _copy_large(source: Storage, target: Storage, ref: SegmentRef) -> None:
    size = crc = 0
    reader = source.open_read(ref.path)
    try:
        fault_point("state.replicate.before")
        writer = target.create(ref.path)
        try:
            while data := reader.read(_PIECE_BYTES):
                writer.write(data)
                size, crc = size + len(data), isal_zlib.crc32(data, crc)
        finally:
            writer.close()
        fault_point("state.replicate.after")
    finally:
        reader.close()
    try:
        _check(ref, size, crc)
    except StateDamagedError:
        target.delete(ref.path)
        raise


def _check(ref: SegmentRef, size: int, crc: int) -> None:
    if (size, crc) != (ref.size_bytes, ref.crc32):
        raise StateDamagedError(f"the file of state {ref.path} is not what was written", path=ref.path)


def _copy_text(target: Storage, key: str, data: bytes, *, replace: bool) -> int:
    """Create a metadata file. With `replace`, over a damaged one, because a sink names the copy."""
    fault_point("state.replicate.before")
    try:
        target.put_new(key, data)
    except FileExistsError:
        if target.get(key) == data:
            return 0
        if not replace:
            raise StateConflictError(f"{key} in {target.root} is another one", key=key) from None
        target.put(key, data)
    fault_point("state.replicate.after")
    return len(data)


@dataclass(frozen=True, slots=True)
class CheckpointCopy:
    """A complete checkpoint of state to copy; `digest` as the sink names it."""

    checkpoint: str
    digest: str | None = None

    @property
    def epoch(self) -> int:
        return find_epoch(self.checkpoint) or 0


class StateReplicator(Replicator[CheckpointCopy]):
    """Copies checkpoints of state to the remote home; `copied` is called with the id of each finished one."""

    def __init__(
        self,
        replica: Replica,
        interval_ms: int,
        monotonic: Callable[[], float],
        report: Callable[[Replication], None] = lambda _: None,
        copied: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__("remote", replica.remote.root, interval_ms / 1000, monotonic, report)
        self._replica = replica
        self._notify_copied = copied

    @property
    def taken(self) -> str | None:
        """The id of the checkpoint being copied now."""
        with self._changed:
            return self._taken.item.checkpoint if self._taken else None

    def copy(self, item: CheckpointCopy) -> str:
        self._replica.replicate(item.checkpoint, item.digest)
        self._held = item.epoch
        return ""

    def copied(self, item: CheckpointCopy) -> None:
        self._notify_copied(item.checkpoint)

    def log_failure(self, facts: dict[str, object], *, unexpected: bool) -> None:
        logger.warning("state not replicated", extra=facts, exc_info=unexpected)

    def log_recovery(self, facts: dict[str, object]) -> None:
        logger.info("state replicated again", extra=facts)
