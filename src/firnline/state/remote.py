"""The remote tier of state: copies complete snapshots there and back, in the background, COMMITTED last."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from isal import isal_zlib

from firnline.errors import CheckpointError, FirnlineError, StateConflictError, StateDamagedError
from firnline.faults import fault_point
from firnline.state.manifest import find_epoch
from firnline.state.refs import SegmentRef
from firnline.state.snapshot import file_crc32, list_folders, load, load_with_texts
from firnline.state.sweep import Marks, Swept, sweep
from firnline.storage import Storage
from firnline.stores.replicator import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, TOLD_FAILURES, Replication

logger = logging.getLogger(__name__)

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


def _copy_file(source: Storage, target: Storage, ref: SegmentRef) -> None:
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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The newest checkpoint that is to be copied, and the oldest that it stands for: its epoch, when it was made."""

    checkpoint: str
    digest: str | None
    epoch: int
    first: int
    since: float


class StateReplicator:
    """Copies the newest complete checkpoint to the remote home once per interval, until it is there.

    A newer checkpoint takes the place of one that waits. A failure is tried again with a back-off and kept for
    `replication`; nobody waits for it but `close`, and that one not for ever. `offer` is called from the epoch loop,
    the rest from whichever thread.
    """

    def __init__(
        self,
        replica: Replica,
        interval_ms: int,
        monotonic: Callable[[], float],
        tell: Callable[[Replication], None] = lambda _: None,
        copied: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the homes; `copied` hears the id of every checkpoint that got there, `tell` of every try."""
        self._replica = replica
        self._interval = interval_ms / 1000
        self._monotonic = monotonic
        self._tell = tell
        self._copied = copied
        self._changed = threading.Condition()
        self._waiting: _Waiting | None = None
        self._taken: _Waiting | None = None
        self._due_at = float("-inf")
        self._failures = 0
        self._reason = ""
        self._hurried = False
        self._closed = False
        self._held = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to copy in the background; repeatable."""
        with self._changed:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="firnline state replication", daemon=True)
                self._thread.start()

    def holds(self, epoch: int) -> None:
        """Take note of the newest checkpoint that the remote home already has."""
        with self._changed:
            self._held = epoch

    def offer(self, checkpoint: str, digest: str | None = None) -> None:
        """Take a complete checkpoint, to be copied once the interval has passed."""
        epoch = find_epoch(checkpoint) or 0
        with self._changed:
            before = self._waiting
            first, since = (before.first, before.since) if before else (epoch, self._monotonic())
            self._waiting = _Waiting(checkpoint, digest, epoch, first, since)
            self._changed.notify_all()

    @property
    def taken(self) -> str | None:
        """The id of the checkpoint that is being copied now."""
        with self._changed:
            return self._taken.checkpoint if self._taken else None

    def replication(self) -> Replication:
        """How far the remote home is behind now, and why the last try failed if it did."""
        with self._changed:
            oldest, newest = self._taken or self._waiting, self._waiting or self._taken
            return Replication(
                path="remote",
                place=self._replica.remote.root,
                epoch=self._held,
                epochs_behind=max(1, newest.epoch - oldest.first + 1) if oldest and newest else 0,
                since=oldest.since if oldest else None,
                reason=self._reason,
            )

    def lag_seconds(self) -> float:
        """For how long the remote home has lacked a checkpoint; 0 when it is level."""
        return self.replication().lag_seconds(self._monotonic())

    def turn(self) -> float | None:
        """Copy if that is due; returns the seconds until the next turn, None when nothing waits."""
        if self._wait_seconds() == 0:
            self._copy()
        return self._wait_seconds()

    def _wait_seconds(self) -> float | None:
        with self._changed:
            if self._waiting is None or self._taken is not None or self._closed:
                return None
            return 0 if self._hurried else max(0.0, self._due_at - self._monotonic())

    def _copy(self) -> None:
        with self._changed:
            taken, self._waiting = self._waiting, None
            self._taken, self._hurried = taken, False
        if taken is None:
            return
        problem = self._try(taken)
        with self._changed:
            self._taken, self._reason = None, problem
            now = self._monotonic()
            if problem:
                newer = self._waiting or taken
                self._waiting = _Waiting(newer.checkpoint, newer.digest, newer.epoch, taken.first, taken.since)
                self._failures += 1
                # The exponent is bounded too: an outage of days must not make a number that overflows.
                backoff = FIRST_BACKOFF_SECONDS * 2.0 ** min(self._failures - 1, 16)
                self._due_at = now + min(backoff, MAX_BACKOFF_SECONDS)
            else:
                recovered, self._failures = self._failures, 0
                self._held = taken.epoch
                self._due_at = now + self._interval
                self._hurried = self._hurried and self._waiting is not None
                if recovered:
                    logger.info("state replicated again", extra=self._facts(taken))
            self._changed.notify_all()
        if not problem:
            self._copied(taken.checkpoint)
        self._tell(self.replication())

    def _try(self, taken: _Waiting) -> str:
        """Copy a checkpoint; returns what went wrong."""
        try:
            self._replica.replicate(taken.checkpoint, taken.digest)
        except Exception as error:  # whatever it is, the next try may go well, and nobody else would make one
            reason = str(error) or type(error).__name__
            if self._failures % TOLD_FAILURES == 0:
                unexpected = not isinstance(error, OSError | FirnlineError)
                facts = {**self._facts(taken), "reason": reason}
                logger.warning("state not replicated", extra=facts, exc_info=unexpected)
            return reason
        return ""

    def _facts(self, taken: _Waiting) -> dict[str, object]:
        return {"tier": "remote", "place": self._replica.remote.root, "epoch": taken.epoch}

    def _run(self) -> None:
        while True:
            self.turn()
            with self._changed:
                if self._closed:
                    return
                wait = self._wait_seconds()
                if wait != 0:  # nothing came in the meantime
                    self._changed.wait(wait)

    def flush(self, seconds: float) -> bool:
        """Copy what waits now, whatever interval and back-off say; whether the remote home is level.

        Waits until it is, until a try from now on has failed, or for so long at most.
        """
        with self._changed:
            failures, was_taken = self._failures, self._taken is not None
            self._hurried = not self._level()
            self._changed.notify_all()
            if self._thread is not None:
                self._changed.wait_for(lambda: self._level() or self._failures > failures + was_taken, timeout=seconds)
                return self._level()
        self.turn()
        return self._level()

    def _level(self) -> bool:
        return self._waiting is None and self._taken is None

    def close(self, *, drain_seconds: float = 0.0) -> bool:
        """Stop; with `drain_seconds`, copy what waits first, for so long at most. Whether the remote home is level.

        Does not wait for a copy that is under way beyond that: it ends with the process, and is taken up again later.
        """
        level = self.flush(drain_seconds) if drain_seconds > 0 else self._level()
        with self._changed:
            self._closed = True
            self._thread = None
            self._changed.notify_all()
        return level
