"""The location of state files, and how they become verified files on this machine's disk.

A file in a local home is used in place. A file of a remote home is fetched once into a cache folder. Size and checksum
are compared with the reference on the first use in a process. A missing or damaged file is fetched from the fallback
home (the remote tier), verified, and put back under its own name. Without a fallback, it is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import stat
import tempfile
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from isal import isal_zlib

from firnline.errors import DamagedError, StateDamagedError
from firnline.faults import fault_point
from firnline.names import cache_folder, temporary_beside, temporary_name
from firnline.state.manifest import SegmentRef
from firnline.storage import Storage, fsync_path, is_remote, make_folders, normalise, open_storage
from firnline.types import Json

logger = logging.getLogger(__name__)

CACHE_BYTES = 16 * 1024**3  # limit of cached files of remote homes; the least recently used are deleted first
_PIECE = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StateHome:
    """The folder that state references are relative to; sent to workers as JSON.

    `fallback` is another home with copies under the same names. `cache` is the local folder for files of a remote home;
    empty: a folder of this user among the temporary files.
    """

    root: str
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    fallback: StateHome | None = None
    cache: str = ""

    @property
    def storage(self) -> Storage:
        """The storage whose root is this home."""
        return _open_storage(normalise(self.root), tuple(sorted(self.storage_options.items())))

    @property
    def is_remote(self) -> bool:
        return is_remote(self.root)

    def to_json(self) -> dict[str, Json]:
        """Return the form for workers. It is never durable, because the options may hold secrets."""
        fallback = None if self.fallback is None else self.fallback.to_json()
        options = dict(self.storage_options)
        return {"root": self.root, "storage_options": options, "fallback": fallback, "cache": self.cache}

    @classmethod
    def from_json(cls, value: Json) -> StateHome:
        """Parse the output of `to_json`."""
        fallback = None if value["fallback"] is None else cls.from_json(value["fallback"])
        return cls(str(value["root"]), dict(value["storage_options"]), fallback, str(value["cache"]))


@lru_cache(maxsize=32)
def _open_storage(root: str, options: tuple[tuple[str, str], ...]) -> Storage:
    return open_storage(root, dict(options))


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A verified file. Another file under the same name is another value, and so is the same file after a write.

    Two files created within one clock tick have the same times, but not the same inode. A write that resets the
    modification time does not reset the change time.
    """

    path: str
    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int

    @classmethod
    def of(cls, path: str, descriptor: int) -> LocalFile:
        """Return the identity of the file open under a descriptor."""
        found = os.fstat(descriptor)
        return cls(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)


def load_file(home: StateHome, ref: SegmentRef) -> LocalFile:
    """Return a state file on this machine's disk, verified; fetched or repaired if needed.

    Raises:
        StateDamagedError: it is missing or damaged, and no fallback has it.
        OSError: the home could not be read.
    """
    _check_name(ref)
    try:
        return _load_cached(home, ref) if home.is_remote else _verify(_path_in(home, ref), ref)
    except StateDamagedError as error:
        if home.fallback is None:
            raise
        return _repair(home, home.fallback, ref, error)


def _check_name(ref: SegmentRef) -> None:
    """Refuse a name from a checkpoint that leads out of the home."""
    parts = ref.path.split("/")
    if os.path.isabs(ref.path) or not all(parts) or ".." in parts or "." in parts or "\0" in ref.path:
        raise DamagedError(f"{ref.path!r} cannot be the name of a file of state", path=ref.path)


def _path_in(home: StateHome, ref: SegmentRef) -> str:
    return os.path.join(normalise(home.root), ref.path)


# --- verifying -------------------------------------------------------------------------------------------

_MOST_CHECKSUMS = 4096
_checksums: OrderedDict[LocalFile, int] = OrderedDict()  # of files that this process has verified
_checksums_lock = threading.Lock()


def _damaged(ref: SegmentRef, problem: str) -> StateDamagedError:
    return StateDamagedError(f"the file of state {ref.path} {problem}", path=ref.path, epoch=ref.epoch)


def _verify(path: str, ref: SegmentRef, *, touch: bool = False) -> LocalFile:
    """Compare a file with its reference. The content is read only once per file and process.

    With `touch` the time of use is set on the file.
    """
    try:
        with open(path, "rb") as stream:
            file = LocalFile.of(path, stream.fileno())
            if file.size_bytes != ref.size_bytes:
                raise _damaged(ref, f"has {file.size_bytes:,} bytes, not {ref.size_bytes:,}")
            checksum = _checksums.get(file)
            if checksum is None:
                checksum = _checksum(stream.fileno(), file.size_bytes)
            if touch and checksum == ref.crc32:
                os.utime(stream.fileno(), ns=(time.time_ns(), file.modified_ns))  # changes the change time
                file = LocalFile.of(path, stream.fileno())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise _damaged(ref, "is missing") from error
    if checksum != ref.crc32:
        raise _damaged(ref, "does not match its checksum")
    with _checksums_lock:
        _checksums[file] = checksum
        _checksums.move_to_end(file)
        while len(_checksums) > _MOST_CHECKSUMS:
            _checksums.popitem(last=False)
    return file


def _checksum(descriptor: int, size: int) -> int:
    if size == 0:
        return 0
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) as mapped:
        return int(isal_zlib.crc32(mapped))


# --- fetching --------------------------------------------------------------------------------------------


def _fetch(home: StateHome, ref: SegmentRef, path: str) -> None:
    """Copy a file of a home to a new local file, and delete it again if it does not match the reference."""
    checksum = size = 0
    try:
        source = home.storage.open_read(ref.path)
    except FileNotFoundError as error:
        raise _damaged(ref, f"is missing in {normalise(home.root)}") from error
    try:
        with open(path, "xb") as target:
            while piece := source.read(_PIECE):
                target.write(piece)
                checksum = isal_zlib.crc32(piece, checksum)
                size += len(piece)
            target.flush()
            os.fsync(target.fileno())
        if (size, checksum) != (ref.size_bytes, ref.crc32):
            raise _damaged(ref, f"is not what was written, in {normalise(home.root)}")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        source.close()


def _load_cached(home: StateHome, ref: SegmentRef) -> LocalFile:
    """Return the cached copy of a remote file. A damaged one is fetched again."""
    path = _cache_path(home, ref)
    with contextlib.suppress(StateDamagedError, OSError):
        return _verify(path, ref, touch=True)
    temporary = temporary_beside(path, uuid.uuid4().hex)
    _fetch(home, ref, temporary)
    os.replace(temporary, path)
    _shrink_cache(os.path.dirname(path), keep=path)
    return _verify(path, ref)


def _cache_path(home: StateHome, ref: SegmentRef) -> str:
    folder = home.cache or os.path.join(tempfile.gettempdir(), cache_folder(os.getuid()))
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    name = hashlib.sha256(f"{normalise(home.root)}\n{ref.path}".encode()).hexdigest()[:40]
    return os.path.join(folder, f"{name}-{ref.crc32:08x}.arrow")


def _shrink_cache(folder: str, keep: str) -> None:
    """Delete the least recently used files until the rest fits; a mapped file stays readable."""
    entries = []
    with os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat(follow_symlinks=False)
                entries.append((about.st_atime_ns, entry.path, about.st_size))
    total = sum(size for _, _, size in entries)
    for _, path, size in sorted(entries):
        if total <= CACHE_BYTES:
            break
        if path != keep:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


# --- repair ----------------------------------------------------------------------------------------------


def _repair(home: StateHome, fallback: StateHome, ref: SegmentRef, reason: StateDamagedError) -> LocalFile:
    """Put the fallback's copy into the home again, under the same name."""
    path = _cache_path(home, ref) if home.is_remote else _path_in(home, ref)
    folder = os.path.dirname(path)
    temporary = os.path.join(folder, temporary_name(uuid.uuid4().hex))
    make_folders(folder)
    fault_point("state.repair.before")
    try:
        _fetch(fallback, ref, temporary)
    except StateDamagedError as error:
        message = f"{reason.message}; in the remote tier, {error.message}"
        raise StateDamagedError(message, path=ref.path, epoch=ref.epoch) from error
    if home.is_remote:
        _upload(temporary, home, ref)
    os.replace(temporary, path)
    fsync_path(folder)
    fault_point("state.repair.after")
    facts = {"path": ref.path, "reason": reason.message}
    logger.warning("state repaired from the remote tier", extra=facts)
    return _verify(path, ref)


def _upload(path: str, home: StateHome, ref: SegmentRef) -> None:
    target = home.storage.create(ref.path)
    with open(path, "rb") as source:
        while piece := source.read(_PIECE):
            target.write(piece)
    target.close()
