"""Copies complete checkpoints of state between the local home and the remote one, file by file, COMMITTED last.

Names are the same in both homes. A copy may be broken off anywhere and is taken up again by the next call: what is
there already is not copied again, and a checkpoint counts in the other home only when its COMMITTED is there. What
lies there without a complete checkpoint that names it may be the rest of a broken copy, so its checksum is read.

One process replicates and sweeps the remote home of a pipeline, and does not do both at once: else a file could be
seen by the one and deleted by the other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime

from isal import isal_zlib

from firnline.errors import CheckpointError, StateConflictError, StateDamagedError
from firnline.faults import fault_point
from firnline.state.listing import list_folders
from firnline.state.refs import RunRef
from firnline.state.snapshot import file_crc32, load, load_with_texts
from firnline.state.sweep import Marks, Swept, sweep
from firnline.storage import Storage

ATOMIC_BYTES = 64 * 1024 * 1024  # a file up to this size is put in one piece: there wholly or not at all
_PIECE_BYTES = 8 * 1024 * 1024


class Replica:
    """The remote copy of a pipeline's state. Safe for several threads; one copies at a time."""

    def __init__(self, local: Storage, remote: Storage) -> None:
        self.local = local
        self.remote = remote
        self._lock = threading.Lock()
        self._held: dict[str, int] | None = None  # files that complete checkpoints in the remote home name, with sizes

    def replicate(self, checkpoint: str, expected_digest: str | None = None) -> int:
        """Copy a complete checkpoint to the remote home; returns the bytes that were copied. Repeatable.

        Raises:
            StateIncompleteError: it is not complete here.
            DamagedError, StateDamagedError: it, or a file of it, is damaged here.
            StateConflictError: the remote home has another checkpoint of this id.
            OSError: the remote home could not be written; the next call goes on from there.
        """
        with self._lock:
            if self._held is None:
                self._held = _named_files(self.remote)
            try:
                copied, files = _copy_checkpoint(self.local, self.remote, self._held, checkpoint, expected_digest)
            except BaseException:
                self._held = None  # it is not known what is there now
                raise
            self._held.update({path: ref.size_bytes for path, ref in files.items()})
            return copied

    def restore_missing(self, checkpoint: str, expected_digest: str | None = None) -> int:
        """Copy what the local home lacks of a checkpoint, or has in another form; returns the bytes copied.

        Raises:
            StateIncompleteError: the remote home does not have it.
            DamagedError, StateDamagedError: it, or a file of it, is damaged there.
            StateConflictError: the local home has another checkpoint of this id, and no digest tells which is meant.
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
        """Sweep the remote home, not while something is copied; a marked checkpoint may not have got there yet."""
        with self._lock:
            self._held = None
            limits = (grace_secs, keep_checkpoints, keep_aborted_secs)
            return sweep(self.remote, marks, now, *limits, absent_marks=True, referenced=referenced, delete=delete)


def _named_files(storage: Storage) -> dict[str, int]:
    """The files that complete checkpoints in a home name, and that are there, with their sizes."""
    folders = list_folders(storage)
    sizes = {key: stat.size_bytes for folder in folders for key, stat in folder.files.items()}
    found: dict[str, int] = {}
    for folder in folders:
        if folder.find_status() == "COMPLETED":
            with contextlib.suppress(CheckpointError):  # one that cannot be read says nothing about files
                refs = load(storage, folder.checkpoint_id).files()
                found.update({path: ref.size_bytes for path, ref in refs.items() if sizes.get(path) == ref.size_bytes})
    return found


def _copy_checkpoint(
    source: Storage, target: Storage, held: Mapping[str, int], checkpoint: str, expected_digest: str | None
) -> tuple[int, dict[str, RunRef]]:
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


def _is_there(target: Storage, ref: RunRef) -> bool:
    """Whether a file is there as it was written; what is left of a broken copy is deleted."""
    try:
        if target.stat(ref.path).size_bytes == ref.size_bytes and file_crc32(target, ref.path) == ref.crc32:
            return True
    except FileNotFoundError:
        return False
    fault_point("state.replicate.before")
    target.delete(ref.path)
    fault_point("state.replicate.after")
    return False


def _copy_file(source: Storage, target: Storage, ref: RunRef) -> None:
    """Copy one file, and refuse one that is not what its reference says."""
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


def _copy_large(source: Storage, target: Storage, ref: RunRef) -> None:
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


def _check(ref: RunRef, size: int, crc: int) -> None:
    if (size, crc) != (ref.size_bytes, ref.crc32):
        raise StateDamagedError(f"the file of state {ref.path} is not what was written", path=ref.path)


def _copy_text(target: Storage, key: str, data: bytes, *, replace: bool) -> int:
    """Create a file of metadata; `replace`: over a damaged one, because a sink names what is copied."""
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
