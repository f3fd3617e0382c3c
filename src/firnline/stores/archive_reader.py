"""Reads an archive of checkpoints and trusts nothing in it.

It goes header by header, through bounds of its own; extended headers are refused, not followed, and nothing is ever
unpacked to disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO

import zstandard

from firnline.checkpoint.codec import checksum
from firnline.errors import ConfigError
from firnline.stores.archive import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_MEMBER_BYTES,
    MAX_TOTAL_BYTES,
    Manifest,
    Member,
    refused,
)
from firnline.stores.payload import is_compressed

MAX_UNPACKED_BYTES = 1024 * 1024 * 1024  # of one payload: a small frame must not fill the memory

_BLOCK = 512
_CHUNK = 1024 * 1024
_TYPES = {
    tarfile.LNKTYPE: "a link",
    tarfile.SYMTYPE: "a link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.DIRTYPE: "a folder",
}


class Archive:
    """An archive that was opened for reading. Every walk goes over the same open file and checks it again."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        name, data = next(self._walk(None), (None, b""))
        if name != MANIFEST:
            raise refused(f"it does not begin with {MANIFEST}")
        self.manifest = Manifest.from_bytes(data)

    def members(self) -> Iterator[tuple[Member, bytes]]:
        """Every version with its bytes, in the order of the archive, one at a time.

        Raises:
            DamagedError: anything in it is not what the manifest says, or nothing that belongs here.
        """
        listed = {member.name: member for member in self.manifest.members}
        walk = self._walk(listed)
        next(walk, None)
        seen: set[str] = set()
        for name, data in walk:
            if name in seen or name == MANIFEST:
                raise refused(f"{name} is in it twice")
            seen.add(name)
            member = listed[name]
            if checksum(data) != member.sha256:
                raise refused(f"{name} does not match its checksum")
            _check_unpacked(name, data)
            yield member, data
        missing = [name for name in listed if name not in seen]
        if missing:
            raise refused(f"{missing[0]} is missing")

    def _walk(self, listed: dict[str, Member] | None) -> Iterator[tuple[str, bytes]]:
        """Names and bytes, checked before they are read; only the manifest while nothing is listed yet."""
        self._stream.seek(0)
        total = 0
        while True:
            name, size = _next_header(self._stream)
            if name is None:
                return
            if name == MANIFEST:
                bound = MAX_MANIFEST_BYTES
            elif listed is None:
                raise refused(f"it does not begin with {MANIFEST}")
            elif name not in listed:
                raise refused(f"its manifest does not list {name!r}")
            elif size != listed[name].size_bytes:
                raise refused(f"{name} has {size:,} bytes, its manifest says {listed[name].size_bytes:,}")
            else:
                bound = MAX_MEMBER_BYTES
            total += size
            if size > bound or total > MAX_TOTAL_BYTES + MAX_MANIFEST_BYTES:
                raise refused(f"{name} has {size:,} bytes, more than is allowed")
            yield name, _read_member(self._stream, name, size)


@contextlib.contextmanager
def open_archive(path: str) -> Iterator[Archive]:
    """An archive for reading.

    Raises:
        ConfigError: it is no regular file, or is not there.
        DamagedError: it is no archive of checkpoints.
        NewerFormatError: a newer Firnline wrote it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ConfigError(f"{path} is not a regular file", hint="Name a file that `checkpoints export` wrote.")
        stream = open(path, "rb")  # noqa: SIM115  # closed below
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is not there", hint="Name a file that `checkpoints export` wrote.") from error
    with stream:
        yield Archive(stream)


def _next_header(stream: IO[bytes]) -> tuple[str | None, int]:
    """Name and size of the next member; no name at the end. Extended headers are not followed but refused."""
    block = stream.read(_BLOCK)
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
        _check_end(stream)
        return None, 0
    except (tarfile.HeaderError, UnicodeDecodeError) as error:
        raise refused(f"it is cut off or no tar file: {error}") from error
    _check_name(info.name)
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        what = _TYPES.get(info.type, f"a special member (type {info.type!r})")
        raise refused(f"{info.name!r} is {what}")
    if info.size < 0:
        raise refused(f"{info.name!r} has a negative size")
    return info.name, info.size


def _check_name(name: str) -> None:
    if name.startswith("/") or "\\" in name:
        raise refused(f"{name!r} is an absolute name")
    if ".." in name.split("/"):
        raise refused(f"{name!r} leads out of the archive")


def _check_end(stream: IO[bytes]) -> None:
    while rest := stream.read(_CHUNK):
        if rest.strip(b"\0"):
            raise refused("something follows its end")


def _read_member(stream: IO[bytes], name: str, size: int) -> bytes:
    """The bytes of a member, and past its padding."""
    buffer = io.BytesIO()
    left = size
    while left:
        chunk = stream.read(min(left, _CHUNK))
        if not chunk:
            raise refused(f"it is cut off in {name}")
        buffer.write(chunk)
        left -= len(chunk)
    padding = -size % _BLOCK
    if len(stream.read(padding)) != padding:
        raise refused(f"it is cut off after {name}")
    return buffer.getvalue()


def _check_unpacked(name: str, data: bytes) -> None:
    """Refuse a frame that unpacks to more than is allowed, before anybody unpacks it whole."""
    if not is_compressed(data):
        return
    size = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            while chunk := reader.read(_CHUNK):
                size += len(chunk)
                if size > MAX_UNPACKED_BYTES:
                    raise refused(f"{name} unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")
    except zstandard.ZstdError as error:
        raise refused(f"{name} cannot be unpacked: {error}") from error
