"""The outbox: rows that wait for an optional sink, beside the ledger that names them.

Tasks stage the files of an optional sink here, in the deciding table's own storage, invisible to its readers. The
sink's lane copies them to their final paths in the sink's table, then commits. An unreachable sink therefore blocks
nothing, and later gets exactly what was decided. A file is deleted once the sink holds its epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

from isal import isal_zlib

from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import outbox_folder, rebuilt_key
from firnline.storage import Storage, Writable
from firnline.types import Json

CHUNK_BYTES = 4 * 1024 * 1024
_READERS = 16
KEY = "outbox"  # of a staged file: its key in the deciding table's storage, until it is copied


class CountedStream:
    """A stream that counts its bytes; the part of a file that Arrow's writers need."""

    def __init__(self, stream: Writable) -> None:
        self._stream = stream
        self._written = 0
        self.crc32 = 0  # of everything written; cheap compared to encoding
        self.closed = False

    def write(self, data: Any) -> int:
        self._stream.write(data)
        self.crc32 = isal_zlib.crc32(data, self.crc32)
        self._written += len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        return self._written

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Do nothing: durable on close."""

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._stream.close()


def without_outbox(files: Sequence[dict[str, Json]]) -> list[dict[str, Json]]:
    """Return staged files in the form of a commit."""
    return [{name: value for name, value in file.items() if name != KEY} for file in files]


def deliver(outbox: Storage, table: Storage, files: Sequence[dict[str, Json]]) -> None:
    """Copy files from the outbox to their final paths, complete and durable. Existing files stay.

    Files that were staged in the table itself are left alone.

    Raises:
        DamagedError: a file differs from what was staged, or is in neither location.
        OSError: the table's storage cannot be written.
    """
    for file in files:
        if KEY not in file or _is_there(table, file):
            continue
        try:
            outbox.stat(str(file[KEY]))
        except FileNotFoundError as error:
            raise DamagedError(
                f"{file['path']} is neither in {table.root} nor in the outbox of {outbox.root}",
                hint="Bring the file back, or take the sink out of the spec.",
            ) from error
        fault_point("outbox.copy.before")
        table.put_chunks(str(file["path"]), read_checked(outbox, str(file[KEY]), file))
        fault_point("outbox.copy.after")


def find_missing(storage: Storage, paths: Iterable[str]) -> list[str]:
    """Return the files that are no longer stored. Paths may be percent-encoded, as in a table's log, or not."""

    def is_missing(path: str) -> bool:
        for key in dict.fromkeys((unquote(path), path)):
            with contextlib.suppress(FileNotFoundError):
                storage.stat(key)
                return False
        return True

    ordered = sorted(paths)
    with ThreadPoolExecutor(_READERS) as readers:
        return [path for path, gone in zip(ordered, readers.map(is_missing, ordered), strict=True) if gone]


def find_missing_staged(table: Storage, files: Sequence[dict[str, Json]], outbox: Storage | None = None) -> list[str]:
    """Return the paths of staged files that are neither in the table's storage nor in the given outbox."""
    missing = find_missing(table, [str(file["path"]) for file in files])
    if not missing or outbox is None:
        return missing
    waiting = {str(file["path"]): str(file[KEY]) for file in files if KEY in file and file["path"] in missing}
    gone = find_missing(outbox, waiting.values())
    return [path for path in missing if path not in waiting or waiting[path] in gone]


def release(outbox: Storage, files: Sequence[dict[str, Json]]) -> None:
    """Delete files that a sink holds durably."""
    for file in files:
        if KEY in file:
            fault_point("outbox.release.before")
            outbox.delete(str(file[KEY]))
            fault_point("outbox.release.after")


def list_outbox(outbox: Storage, pipeline: str) -> dict[str, list[str]]:
    """Return the keys of every file in the outbox, by the attempt that wrote it."""
    folder = f"{outbox.root}/{outbox_folder(pipeline)}/"
    found: dict[str, list[str]] = {}
    for stat in outbox.list(outbox_folder(pipeline)):
        attempt = stat.name.removeprefix(folder).split("/")[0]
        found.setdefault(attempt, []).append(stat.name.removeprefix(f"{outbox.root}/"))
    return found


def waiting_for(staged: Mapping[str, Sequence[dict[str, Json]]], keys: Collection[str]) -> set[str]:
    """Return the sinks for which an epoch staged one of these keys, or one that was made again since."""
    there = {*keys}
    return {
        sink
        for sink, files in staged.items()
        if any(KEY in file and {file[KEY], rebuilt_key(str(file[KEY]))} & there for file in files)
    }


def sweep_outbox(outbox: Storage, listed: dict[str, list[str]], needed: Collection[str]) -> int:
    """Delete the listed files of unneeded attempts. Returns how many."""
    gone = [key for attempt, keys in listed.items() if attempt not in needed for key in keys]
    for key in gone:
        fault_point("outbox.release.before")
        outbox.delete(key)
        fault_point("outbox.release.after")
    return len(gone)


def _is_there(table: Storage, file: dict[str, Json]) -> bool:
    """Return whether a file is at its final path, byte for byte: a copy is complete there, or missing."""
    try:
        if table.stat(str(file["path"])).size_bytes != int(file["size_bytes"]):
            return False
        for _ in read_checked(table, str(file["path"]), file):
            pass
    except (FileNotFoundError, DamagedError):
        return False
    table.settle(str(file["path"]))  # its writer may have been killed before it was durable
    return True


def read_checked(storage: Storage, key: str, file: dict[str, Json], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises DamagedError at their end if they differ from what was staged."""
    stream = storage.open_read(key)
    try:
        crc32, size = 0, 0
        while data := stream.read(chunk_bytes):
            crc32, size = isal_zlib.crc32(data, crc32), size + len(data)
            yield data
    finally:
        stream.close()
    if (size, crc32) != (int(file["size_bytes"]), int(file["crc32"])):
        raise DamagedError(f"{storage.root}/{key} is not what was staged: {size} bytes, CRC {crc32:08x}")
