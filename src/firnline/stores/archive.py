"""Checkpoints as one file: writes an archive, and reads one without trusting its content."""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import tarfile
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Literal

import zstandard

from firnline.checkpoint.codec import canonical, checksum, parse, seal, unseal
from firnline.errors import ConfigError, DamagedError, NewerFormatError
from firnline.faults import fault_point
from firnline.names import temporary_name
from firnline.storage import fsync_path
from firnline.stores.base import MAX_VALUE_BYTES, is_compressed
from firnline.types import Json

KIND = "firnline-checkpoints"
MANIFEST = "manifest.json"
MAX_MEMBERS = 200_000
MAX_MANIFEST_BYTES = 128 * 1024 * 1024
MAX_MEMBER_BYTES = MAX_VALUE_BYTES
MAX_TOTAL_BYTES = 8 * 1024 * 1024 * 1024

_NAME = re.compile(r"(checkpoints|audit)/[0-9]{20}\.json(\.zst)?")

Part = Literal["checkpoints", "audit"]


@dataclass(frozen=True, slots=True)
class Stored:
    """One version of a store, to be put into an archive."""

    part: Part
    version: int
    created_at: str
    note: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Member:
    """One version in the manifest's list."""

    name: str
    size_bytes: int
    sha256: str
    version: int
    created_at: str
    note: str

    @property
    def part(self) -> Part:
        return "audit" if self.name.startswith("audit/") else "checkpoints"

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "version": self.version,
            "created_at": self.created_at,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of an archive. `left_out` names versions that were damaged in the store."""

    pipeline: str
    created_at: str
    origin: str  # the kind of store, or `ledger`
    members: tuple[Member, ...]
    left_out: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        body = {
            "kind": KIND,
            "pipeline": self.pipeline,
            "created_at": self.created_at,
            "origin": self.origin,
            "members": [member.to_json() for member in self.members],
            "left_out": list(self.left_out),
        }
        return canonical(seal(body)) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse and check a manifest. Raises DamagedError or NewerFormatError if it is not usable."""
        try:
            body = unseal(parse(data, MANIFEST), MANIFEST)
        except NewerFormatError:
            raise
        except DamagedError as error:
            raise refused(error.message) from error
        if body.get("kind") != KIND:
            raise refused(f"{MANIFEST} is of kind {body.get('kind')!r}, not {KIND!r}")
        try:
            members = tuple(_member(item) for item in body["members"])
            found = cls(
                str(body["pipeline"]), str(body["created_at"]), str(body["origin"]), members, tuple(body["left_out"])
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise refused(f"{MANIFEST} lacks {error}") from error
        _check_members(members)
        return found


def _member(item: Json) -> Member:
    return Member(
        name=str(item["name"]),
        size_bytes=int(item["size_bytes"]),
        sha256=str(item["sha256"]),
        version=int(item["version"]),
        created_at=str(item["created_at"]),
        note=str(item["note"]),
    )


def _check_members(members: tuple[Member, ...]) -> None:
    names = [member.name for member in members]
    if len(names) > MAX_MEMBERS:
        raise refused(f"it lists {len(names):,} members, more than {MAX_MEMBERS:,}")
    if len(set(names)) != len(names):
        raise refused("its manifest lists a member twice")
    for member in members:
        if not _NAME.fullmatch(member.name):
            raise refused(f"its manifest lists {member.name!r}, which is no name of a version")
        if not 0 <= member.size_bytes <= MAX_MEMBER_BYTES:
            raise refused(f"{member.name} is listed with {member.size_bytes:,} bytes, more than {MAX_MEMBER_BYTES:,}")
    total = sum(member.size_bytes for member in members)
    if total > MAX_TOTAL_BYTES:
        raise refused(f"it lists {total:,} bytes, more than {MAX_TOTAL_BYTES:,}")


def refused(why: str) -> DamagedError:
    """Return the error for an archive that is refused."""
    return DamagedError(
        f"the archive is refused: {why}",
        hint="Nothing was put. Take another copy of the file, or export again with `firnline checkpoints export`.",
    )


# -- writing --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ArchiveWriter:
    """Collects versions in an unnamed file, then writes the archive in one pass."""

    pipeline: str
    created_at: str
    origin: str
    _spool: IO[bytes]
    _members: list[tuple[Member, int]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def add(self, item: Stored) -> None:
        suffix = ".json.zst" if is_compressed(item.data) else ".json"
        member = Member(
            name=f"{item.part}/{item.version:020d}{suffix}",
            size_bytes=len(item.data),
            sha256=checksum(item.data),
            version=item.version,
            created_at=item.created_at,
            note=item.note,
        )
        self._members.append((member, self._spool.tell()))
        self._spool.write(item.data)

    def manifest(self) -> Manifest:
        members = tuple(sorted((m for m, _ in self._members), key=lambda m: m.name))
        return Manifest(self.pipeline, self.created_at, self.origin, members, tuple(self.left_out))

    def write(self, stream: IO[bytes]) -> Manifest:
        """Write the archive. The same versions and time give the same bytes."""
        found = self.manifest()
        offsets = {member.name: offset for member, offset in self._members}
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            text = found.to_bytes()
            tar.addfile(_header(MANIFEST, len(text)), io.BytesIO(text))
            for member in found.members:
                self._spool.seek(offsets[member.name])
                tar.addfile(_header(member.name, member.size_bytes), self._spool)
        return found


def _header(name: str, size_bytes: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)  # time 0, user and group 0
    info.size = size_bytes
    info.mode = 0o600
    return info


def write_archive(
    path: str,
    versions: Iterable[Stored],
    *,
    pipeline: str,
    created_at: str,
    origin: str,
    left_out: Iterable[str] = (),
    replace: bool = False,
) -> Manifest:
    """Write an archive to `path`, atomically; durable on return.

    `left_out` is read after `versions`, so it may name versions that turned out damaged.

    Raises:
        ConfigError: the file exists and must not be replaced, or its folder is missing.
    """
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise ConfigError(f"there is no folder {folder}", hint="Make it, or name another file.")
    if os.path.isdir(path):
        hint = f"Name a file in it, e.g. {os.path.join(path, pipeline + '.tar')}"
        raise ConfigError(f"{path} is a folder", hint=hint)
    if os.path.lexists(path) and not replace:
        raise _exists(path)
    temporary = os.path.join(folder, temporary_name(uuid.uuid4().hex))
    with tempfile.TemporaryFile(dir=folder) as spool:
        writer = ArchiveWriter(pipeline, created_at, origin, spool)
        for item in versions:
            writer.add(item)
        writer.left_out.extend(left_out)
        fault_point("archive.write.before")
        try:
            with open(temporary, "xb") as stream:
                found = writer.write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            fault_point("archive.publish.before")
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # unlike rename, this refuses to replace
                os.unlink(temporary)
        except FileExistsError as error:
            raise _exists(path) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        fault_point("archive.publish.after")
        fsync_path(folder)
        fault_point("archive.write.after")
    return found


def _exists(path: str) -> ConfigError:
    return ConfigError(f"{path} is there already", hint="Name another file, or use --yes to replace this one.")


MAX_UNPACKED_BYTES = 1024 * 1024 * 1024  # limit of one payload: a small frame must not fill the memory

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
    """An archive opened for reading. Every walk reads the same open file and checks it again."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        name, data = next(self._walk(None), (None, b""))
        if name != MANIFEST:
            raise refused(f"it does not begin with {MANIFEST}")
        self.manifest = Manifest.from_bytes(data)

    def members(self) -> Iterator[tuple[Member, bytes]]:
        """Yield every version with its bytes, in the order of the archive, one at a time.

        Raises:
            DamagedError: something differs from the manifest or does not belong there.
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
        """Yield names and bytes, checked before they are read; only the manifest until it is parsed."""
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
    """Open an archive for reading.

    Raises:
        ConfigError: it is missing or no regular file.
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
    """Return name and size of the next member; no name at the end. Extended headers are refused."""
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
    """Read the bytes of a member, and skip its padding."""
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
    """Refuse a frame that unpacks to more than the limit, before it is unpacked."""
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
