"""All of Firnline's own storage I/O: one contract for local disk and object stores.

Names are keys below a root. A `put` is atomic and durable when it returns: on local disk it is written,
fsynced, renamed, and its folder fsynced. delta-rs does its own I/O; everything else passes through here,
so that tests can count, break and record every call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISDIR
from typing import Any, BinaryIO, Protocol, cast

from firnline.errors import ConfigError
from firnline.faults import fault_point
from firnline.names import temporary_name


@dataclass(frozen=True, slots=True)
class FileStat:
    """One stored object. `name` is the full name: an absolute path or a URI."""

    name: str
    size_bytes: int
    etag: str
    modified_at: datetime


class Readable(Protocol):
    """A stream of bytes. Those that a storage opens can also `seek` to an offset of the object."""

    def read(self, size: int = -1, /) -> bytes: ...

    def close(self) -> None: ...


class Writable(Protocol):
    """A new object that exists, complete and durable, once `close` has returned."""

    def write(self, data: Any, /) -> int: ...

    def close(self) -> None: ...


class Storage(Protocol):
    """Objects below a root. Errors of the machine are OSError; a missing object is FileNotFoundError."""

    root: str

    def get(self, key: str) -> bytes:
        """Return the whole object."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Create or replace atomically; durable on return."""
        ...

    def put_chunks(self, key: str, chunks: Iterable[bytes]) -> None:
        """Like `put`, for content in pieces. If that raises, nothing is created or replaced."""
        ...

    def put_new(self, key: str, data: bytes) -> None:
        """Create atomically, durable on return. Raises FileExistsError if it exists."""
        ...

    def delete(self, key: str) -> None:
        """Delete. A missing object is no error."""
        ...

    def list(self, prefix: str, after: str = "") -> Iterator[FileStat]:
        """Yield objects below the folder `prefix` after the full name `after`, in byte order of the whole name."""
        ...

    def stat(self, key: str) -> FileStat:
        """Return the metadata of one object."""
        ...

    def open_read(self, key: str, offset: int = 0) -> Readable:
        """Open a stream from `offset` on."""
        ...

    def create(self, key: str) -> Writable:
        """Create an object for large writes; its name must be unique."""
        ...

    def settle(self, key: str) -> None:
        """Make an object or a folder durable whose writer may have been killed before the fsync."""
        ...


def is_remote(uri: str) -> bool:
    """Return whether a path or URI is on an object store."""
    return "://" in uri and not uri.startswith("file://")


def normalise(uri: str) -> str:
    """Return the full name of a folder: an absolute path, or a URI, without a trailing slash."""
    if is_remote(uri):
        return uri.rstrip("/")
    return os.path.abspath(uri.removeprefix("file://"))


def open_storage(uri: str, options: Mapping[str, str] | None = None) -> Storage:
    """Open the storage whose root is `uri`."""
    root = normalise(uri)
    return ObjectStorage(root, options or {}) if is_remote(root) else LocalStorage(root)


_failed: dict[str, str] = {}  # path -> why its fsync failed


def fsync_path(path: str) -> None:
    """Make a file's or a folder's content durable.

    A failure is final: the system may drop what it could not write and call the rest clean, so that the next fsync
    succeeds although the data is lost. This process never again trusts a path whose fsync failed.
    """
    if path in _failed:
        raise OSError(errno.EIO, f"an earlier fsync failed ({_failed[path]}), so what was written may be lost", path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        _failed[path] = error.strerror or type(error).__name__
        raise OSError(error.errno or errno.EIO, f"fsync failed: {_failed[path]}", path) from error
    finally:
        os.close(descriptor)


def confirm_path(path: str) -> None:
    """Make a small file of another process durable, and compare it with the content on disk.

    If an fsync of that process failed, ours may succeed without writing anything. The cached pages are therefore
    dropped and the file is read from disk again. Raises OSError if the disk has other content.
    """
    with open(path, "rb", buffering=0) as stream:
        cached = stream.read()
        fsync_path(path)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        stream.seek(0)
        if stream.read() != cached:
            raise OSError(errno.EIO, "the disk does not hold what was written", path)


_FOLDERS_REMEMBERED = 4096
_durable_folders: dict[str, tuple[int, int]] = {}  # path -> device and inode of a folder whose name is durable
_making_a_folder = threading.Lock()  # threads that need the same folder create it once


def make_folders(folder: str) -> None:
    """Create a folder and its parents if missing, and make each durable in its parent.

    An existing folder may be from a process that was killed before it made the name durable.
    """
    pending = []
    while folder and not os.path.ismount(folder):
        identity = _folder_identity(folder)
        if identity is not None and _durable_folders.get(folder) == identity:
            break
        pending.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(pending):
        if _create_missing(path):
            fsync_path(os.path.dirname(path))
        else:
            with contextlib.suppress(PermissionError):  # far above there may be folders that only others may read
                fsync_path(os.path.dirname(path))
        _remember_folder(path)


def _create_missing(folder: str) -> bool:
    with _making_a_folder:
        if _folder_identity(folder) is not None:
            return False
        fault_point("storage.folder.before")
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.mkdir(folder)
        fault_point("storage.folder.after")
        return True


def _remember_folder(folder: str) -> None:
    identity = _folder_identity(folder)
    if identity is not None:
        if len(_durable_folders) >= _FOLDERS_REMEMBERED:
            _durable_folders.clear()
        _durable_folders[folder] = identity


def _folder_identity(folder: str) -> tuple[int, int] | None:
    """Return device and inode of a folder; None if it is missing."""
    try:
        found = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return (found.st_dev, found.st_ino) if S_ISDIR(found.st_mode) else None


class LocalStorage:
    """A folder on local disk."""

    def __init__(self, root: str) -> None:
        self.root = root

    def _path(self, key: str) -> str:
        return os.path.join(self.root, key) if key else self.root

    def path_of(self, key: str) -> str:
        """Return the path of a key, for memory mapping."""
        return self._path(key)

    def get(self, key: str) -> bytes:
        return Path(self._path(key)).read_bytes()

    def put(self, key: str, data: bytes) -> None:
        self._put(key, (data,), os.replace)

    def put_chunks(self, key: str, chunks: Iterable[bytes]) -> None:
        self._put(key, chunks, os.replace)

    def put_new(self, key: str, data: bytes) -> None:
        self._put(key, (data,), _link_new)

    def _put(self, key: str, chunks: Iterable[bytes], publish: Any) -> None:
        path = self._path(key)
        folder = os.path.dirname(path)
        make_folders(folder)
        temporary = os.path.join(folder, temporary_name(uuid.uuid4().hex))
        fault_point("storage.put.before")
        try:
            with open(temporary, "wb") as stream:
                for data in chunks:
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            fault_point("storage.publish.before")
            publish(temporary, path)
        except Exception as error:
            with contextlib.suppress(OSError):  # failed writes must not fill a full disk
                os.unlink(temporary)
            if isinstance(error, FileExistsError):
                self.settle(key)  # a caller that learns that it exists builds on it
            raise
        fault_point("storage.publish.after")
        fsync_path(folder)
        fault_point("storage.put.after")

    def delete(self, key: str) -> None:
        fault_point("storage.delete.before")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key))
        fault_point("storage.delete.after")

    def list(self, prefix: str, after: str = "") -> Iterator[FileStat]:
        folder = self._path(prefix.rstrip("/"))
        if os.path.isdir(folder):
            yield from _walk(folder, after)

    def stat(self, key: str) -> FileStat:
        path = self._path(key)
        return _local_stat(path, os.stat(path))

    def open_read(self, key: str, offset: int = 0) -> Readable:
        stream = open(self._path(key), "rb", buffering=0)  # noqa: SIM115  # the caller closes it
        if offset:
            stream.seek(offset)
        return stream

    def create(self, key: str) -> Writable:
        path = self._path(key)
        make_folders(os.path.dirname(path))
        return _DurableFile(path)

    def settle(self, key: str) -> None:
        path = self._path(key)
        folder = os.path.dirname(path)
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: there is nothing to build on
            fsync_path(path)
            fsync_path(folder)
            make_folders(folder)


def _link_new(temporary: str, path: str) -> None:
    os.link(temporary, path)  # unlike rename, this refuses to replace
    os.unlink(temporary)


class _DurableFile:
    """A new local file, fsynced with its folder when it is closed."""

    def __init__(self, path: str) -> None:
        self._folder = os.path.dirname(path)
        self._stream: BinaryIO = open(path, "xb", buffering=1024 * 1024)  # noqa: SIM115  # closed by close()
        self.closed = False

    def write(self, data: Any, /) -> int:
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        if self.closed:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        fsync_path(self._folder)
        self.closed = True


def _walk(folder: str, after: str) -> Iterator[FileStat]:
    """Yield files below a folder in byte order of the whole name; folders entirely before `after` are skipped."""
    names: list[bytes] = []
    try:
        with os.scandir(os.fsencode(folder)) as entries:
            for entry in entries:
                names.append(entry.name + b"/" if entry.is_dir() else entry.name)
    except FileNotFoundError:
        return
    names.sort()
    bound = os.fsencode(after)
    base = os.fsencode(folder) + b"/"
    for name in names:
        full = base + name
        if name.endswith(b"/"):
            if full <= bound and not bound.startswith(full):
                continue
            yield from _walk(os.fsdecode(full[:-1]), after)
        elif full > bound:
            path = os.fsdecode(full)
            with contextlib.suppress(FileNotFoundError):  # gone between listing and stat: as if never seen
                yield _local_stat(path, os.stat(path))


def _local_stat(path: str, stat: os.stat_result) -> FileStat:
    modified_at = datetime.fromtimestamp(stat.st_mtime, UTC)
    return FileStat(path, stat.st_size, f"{stat.st_mtime_ns:x}-{stat.st_size:x}", modified_at)


# Options that configure the HTTP client, and options that only delta-rs knows; both take the same ones.
_CLIENT_OPTIONS = ("allow_http", "allow_invalid_certificates", "connect_timeout", "proxy_url", "timeout")
_DELTA_OPTIONS = ("conditional_put", "s3_allow_unsafe_rename", "s3_locking_provider")


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Translate obstore's errors into the built-in ones that local disk raises."""
    from obstore import exceptions as found

    try:
        yield
    except found.NotFoundError as error:
        raise FileNotFoundError(str(error)) from error
    except found.AlreadyExistsError as error:
        raise FileExistsError(str(error)) from error
    except (found.PermissionDeniedError, found.UnauthenticatedError) as error:
        raise PermissionError(str(error)) from error
    except found.BaseError as error:
        raise OSError(str(error)) from error


def _without_secrets(uri: str) -> str:
    """Return a URI without user, password, query and fragment."""
    scheme, _, rest = re.split(r"[?#]", uri, maxsplit=1)[0].partition("://")
    bucket, slash, path = rest.partition("/")
    return f"{scheme}://{bucket.rpartition('@')[2]}{slash}{path}"


class ObjectStorage:
    """A prefix in a bucket, through obstore: the same code for S3, GCS and Azure."""

    def __init__(self, root: str, options: Mapping[str, str]) -> None:
        import obstore.store

        self.root = root
        scheme, _, rest = root.partition("://")
        bucket, _, self._prefix = rest.partition("/")
        self._bucket = f"{scheme}://{bucket}"
        config: dict[str, str] = {}
        client: dict[str, Any] = {}
        for key, value in options.items():
            name = key.lower()
            plain = name.removeprefix("aws_")
            if plain in _CLIENT_OPTIONS:
                client[plain] = value.lower() == "true" if plain.startswith("allow_") else value
            elif plain not in _DELTA_OPTIONS:
                config[name] = value
        try:
            self._store = obstore.store.from_url(
                self._bucket, config=cast(Any, config), client_options=cast(Any, client)
            )
        except Exception as error:  # obstore raises classes of its own for bad URLs and options
            shown = _without_secrets(root)
            reason = str(error).replace(root, shown).replace(self._bucket, _without_secrets(self._bucket))
            raise ConfigError(f"cannot use {shown!r} as storage: {reason}", uri=shown) from error

    def _key(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, key) if part)

    def get(self, key: str) -> bytes:
        import obstore

        with _os_errors():
            return bytes(obstore.get(self._store, self._key(key)).bytes())

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data, "overwrite")

    def put_chunks(self, key: str, chunks: Iterable[bytes]) -> None:
        fault_point("storage.put.before")
        writer = self.create(key)
        for data in chunks:
            writer.write(data)
        writer.close()  # the object exists from here on
        fault_point("storage.put.after")

    def put_new(self, key: str, data: bytes) -> None:
        self._put(key, data, "create")

    def _put(self, key: str, data: bytes, mode: Any) -> None:
        import obstore

        fault_point("storage.put.before")
        with _os_errors():
            obstore.put(self._store, self._key(key), data, mode=mode)
        fault_point("storage.put.after")

    def delete(self, key: str) -> None:
        import obstore

        fault_point("storage.delete.before")
        with contextlib.suppress(FileNotFoundError), _os_errors():
            obstore.delete(self._store, self._key(key))
        fault_point("storage.delete.after")

    def list(self, prefix: str, after: str = "") -> Iterator[FileStat]:
        import obstore

        offset = after.removeprefix(self._bucket + "/") if after else None
        folder = self._key(prefix).rstrip("/")
        with _os_errors():
            for page in obstore.list(self._store, folder + "/" if folder else None, offset=offset):
                for meta in page:
                    if offset is None or meta["path"] > offset:
                        yield self._stat_of(meta)

    def stat(self, key: str) -> FileStat:
        import obstore

        with _os_errors():
            return self._stat_of(obstore.head(self._store, self._key(key)))

    def _stat_of(self, meta: Any) -> FileStat:
        name = f"{self._bucket}/{meta['path']}"
        etag = (meta["e_tag"] or "").strip('"') or f"{int(meta['last_modified'].timestamp())}-{meta['size']}"
        return FileStat(name, int(meta["size"]), etag, meta["last_modified"].astimezone(UTC))

    def open_read(self, key: str, offset: int = 0) -> Readable:
        import obstore

        with _os_errors():
            reader = obstore.open_reader(self._store, self._key(key), buffer_size=8 * 1024 * 1024)
            if offset:
                reader.seek(offset)
        return _RemoteReader(reader)

    def create(self, key: str) -> Writable:
        import obstore

        with _os_errors():
            return _RemoteWriter(obstore.open_writer(self._store, self._key(key)))

    def settle(self, key: str) -> None:
        """Do nothing: a listed object in a bucket is durable."""


class _RemoteReader:
    """obstore's reader, giving plain bytes and built-in errors."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self, size: int = -1, /) -> bytes:
        with _os_errors():
            return bytes(self._reader.read(size if size >= 0 else None))

    def seek(self, offset: int, /) -> int:
        with _os_errors():
            return int(self._reader.seek(offset))

    def close(self) -> None:
        self._reader.close()


class _RemoteWriter:
    """obstore's writer, with built-in errors; the object exists once `close` has returned."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, data: Any, /) -> int:
        with _os_errors():
            return int(self._writer.write(data))

    def close(self) -> None:
        with _os_errors():
            self._writer.close()
