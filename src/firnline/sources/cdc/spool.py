"""Spool files: what a database sent, durable in the pipeline's home before an epoch is decided.

A file holds whole frames (see `sources.cdc.log`), the context to decode them, and the marks between which it lies. All
files of a source form a chain: each begins where another one ends. Names hold the marks, so that the chain is followed
from a listing. A rollback or a new run reads what was spooled; the server is asked only behind the end of the chain.

Two runs may spool the same part of the log, cut at other places. Both tell the same, so any file that begins at the
right mark will do. Inside of a transaction a mark also says what came before it. A file is never changed.

The checksum goes over all that a server sends, twice; so it is one that costs little: CRC32 and Adler-32 side by side.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from isal import isal_zlib

from firnline.errors import DamagedError, SourceError, SourceGapError
from firnline.faults import fault_point
from firnline.names import chunk_parts, spool_name, spool_parts
from firnline.storage import Storage
from firnline.types import Json

_MAGIC = b"FIRNSPL2"
_OLD_MAGIC = b"FIRNSPL1"  # of files whose checksum is BLAKE2
_FOOTER = struct.Struct("<QQQ8s")  # bytes of context, frames and facts; magic


@dataclass(frozen=True, slots=True)
class Mark:
    """A place between two spool files: behind a transaction, or `part` files after one that goes on."""

    place: Json  # the server's place behind the last whole transaction
    part: int = 0  # above 0: so many files hold the begin of the next transaction
    via: str = ""  # digest of that begin: two runs cut it at other places, and their files do not fit together

    @property
    def is_cut(self) -> bool:
        """Whether a slice may end here."""
        return self.part == 0

    @property
    def digest(self) -> str:
        parts = [self.place, self.part, *([self.via] if self.via else [])]
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def behind(self, frames: bytes | memoryview) -> Mark:
        """Return the mark behind more frames of the transaction that goes on here."""
        return Mark(self.place, self.part + 1, _digest((self.via.encode(), frames)))

    def to_json(self) -> dict[str, Json]:
        return {"place": self.place, "part": self.part, **({"via": self.via} if self.via else {})}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Mark:
        return cls(value["place"], int(value["part"]), str(value.get("via", "")))


# In `SpoolFile.left_out`: all changes of a table, if the log says that it has no key.
UNLESS_KEYED = "unless keyed"


@dataclass(frozen=True, slots=True)
class SpoolFile:
    """One file of the chain, as ledger entries and splits name it."""

    name: str
    number: int  # its place in the chain
    end: Mark
    rows: int  # change rows, as far as they were counted
    size_bytes: int
    checksum: str
    transactions: int = 0  # that end in the file
    committed_at: int = 0  # of the last one, microseconds since 1970; 0: none, or unknown
    gap: str = ""  # why the log did not continue where the file begins; somebody accepted it
    # By table: a snapshot of it that was read whole; changes of transactions that it sees are left out. None: all of
    # them are, since it is still to be read; or `UNLESS_KEYED`.
    left_out: Mapping[str, Json] = field(default_factory=dict)
    tables: tuple[str, ...] = ()  # patterns of the tables whose changes it has, as the file says; empty: unknown
    reads: tuple[str, ...] = ()  # of a gap: tables that are emptied and read again behind it

    def to_json(self) -> dict[str, Json]:
        return {
            "path": self.name,
            "number": self.number,
            "end": self.end.to_json(),
            "rows": self.rows,
            "size_bytes": self.size_bytes,
            "checksum": self.checksum,
            "transactions": self.transactions,
            "committed_at": self.committed_at,
            **({"gap": self.gap} if self.gap else {}),
            **({"reads": list(self.reads)} if self.reads else {}),
            **({"left_out": dict(self.left_out)} if self.left_out else {}),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> SpoolFile:
        return cls(
            str(value["path"]),
            int(value["number"]),
            Mark.from_json(value["end"]),
            int(value["rows"]),
            int(value["size_bytes"]),
            str(value["checksum"]),
            int(value["transactions"]),
            int(value["committed_at"]),
            str(value.get("gap", "")),
            dict(value.get("left_out", {})),
            reads=tuple(value.get("reads", ())),
        )


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a spool file."""

    context: bytes
    frames: bytes | memoryview


def write_file(
    storage: Storage,
    folder: str,
    number: int,
    begin: Mark,
    end: Mark,
    content: Content,
    *,
    rows: int,
    transactions: int,
    committed_at: int,
    tables: Sequence[str] = (),
    gap: str = "",
    reads: Sequence[str] = (),
) -> SpoolFile:
    """Write a file, durable on return."""
    facts = {
        "begin": begin.to_json(),
        "end": end.to_json(),
        "rows": rows,
        "transactions": transactions,
        "committed_at": committed_at,
        "tables": list(tables),
        **({"gap": gap} if gap else {}),
        **({"reads": list(reads)} if reads else {}),
    }
    data, checksum = pack(content, json.dumps(facts, sort_keys=True).encode())
    name = spool_name(number, begin.digest, end.digest, checksum)
    fault_point("spool.file.before")
    storage.put(f"{folder}/{name}", data)
    fault_point("spool.file.after")
    return SpoolFile(name, number, end, rows, len(data), checksum, transactions, committed_at, gap, reads=tuple(reads))


def pack(content: Content, facts: bytes) -> tuple[bytes, str]:
    """Return the bytes of a file, and its checksum."""
    parts = (content.context, content.frames, facts)
    footer = _FOOTER.pack(*(len(part) for part in parts), _MAGIC)
    return b"".join((*parts, footer)), _checksum(parts)


def read_file(storage: Storage, folder: str, name: str) -> Content:
    """Read a file, of the log or a chunk, that a ledger entry or a plan names.

    Raises:
        SourceGapError: it is gone.
        DamagedError: it is not what was written.
        SourceError: it cannot be read now.
    """
    try:
        data = storage.get(f"{folder}/{name}")
    except FileNotFoundError:
        raise SourceGapError(
            f"the spool file {name} is gone",
            hint="Restore it from a backup, or capture the tables anew in a pipeline of another name.",
        ) from None
    except OSError as error:
        raise SourceError(f"cannot read the spool file {name}: {error}") from error
    checksum = (spool_parts(name) or chunk_parts(name) or ("",))[-1]
    context, frames, _ = _split(data, name, str(checksum))
    return Content(context, frames)


def _checksum(parts: Iterable[bytes | memoryview]) -> str:
    crc, sums = 0, 1
    for part in parts:
        crc, sums = isal_zlib.crc32(part, crc), isal_zlib.adler32(part, sums)
    return f"{crc:08x}{sums:08x}"


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _split(data: bytes, name: str, checksum: str) -> tuple[bytes, memoryview, bytes]:
    """Return context, frames and facts of a file that has this checksum."""
    if len(data) < _FOOTER.size:
        raise DamagedError(f"the spool file {name} is cut off")
    context, frames, told, magic = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
    if magic not in (_MAGIC, _OLD_MAGIC) or context + frames + told + _FOOTER.size != len(data):
        raise DamagedError(f"the spool file {name} is no spool file, or cut off")
    view = memoryview(data)
    parts = data[:context], view[context : context + frames], data[context + frames : -_FOOTER.size]
    if (_checksum if magic == _MAGIC else _digest)(parts) != checksum:
        raise DamagedError(f"the spool file {name} has another checksum than the one that was written")
    return parts


def read_facts(storage: Storage, folder: str, name: str) -> SpoolFile:
    """Return what a file of the listing says of itself; its content is checked.

    Raises:
        DamagedError: it is damaged.
    """
    number, _, _, checksum = spool_parts(name) or (0, "", "", "")
    data = storage.get(f"{folder}/{name}")
    *_, told = _split(data, name, checksum)
    facts = json.loads(told)
    return SpoolFile(
        name,
        number,
        Mark.from_json(facts["end"]),
        int(facts["rows"]),
        len(data),
        checksum,
        int(facts["transactions"]),
        int(facts["committed_at"]),
        str(facts.get("gap", "")),
        tables=tuple(facts.get("tables", ())),
        reads=tuple(facts.get("reads", ())),
    )


def list_names(storage: Storage, folder: str) -> list[str]:
    """Return the names of all spool files of the log, in the order of their numbers."""
    return sorted(name for name in list_all(storage, folder) if spool_parts(name) is not None)


def list_all(storage: Storage, folder: str) -> list[str]:
    """Return the names of all files, of the log and of chunks."""
    return [stat.name.rpartition("/")[2] for stat in storage.list(folder)]


def follow(names: Sequence[str], number: int, begin: Mark) -> Iterator[str]:
    """Yield the files that continue a chain behind file `number`, which ends at `begin`, one after the other.

    Of several that begin at a mark, the one counts from which the chain goes furthest; the caller checks their content.
    """
    by_begin: dict[tuple[int, str], list[str]] = {}
    for name in names:
        parts = spool_parts(name)
        if parts is not None:
            by_begin.setdefault((parts[0], parts[1]), []).append(name)
    reach: dict[tuple[int, str], int] = {}
    for key in sorted(by_begin, reverse=True):
        reach[key] = max(1 + reach.get((key[0] + 1, _end_of(name)), 0) for name in by_begin[key])
    key = (number + 1, begin.digest)
    while key in by_begin:
        name = max(by_begin[key], key=lambda one: (reach.get((key[0] + 1, _end_of(one)), 0), one))
        yield name
        key = (key[0] + 1, _end_of(name))


def _end_of(name: str) -> str:
    parts = spool_parts(name)
    assert parts is not None
    return parts[2]


def delete_files(storage: Storage, folder: str, names: Iterable[str]) -> None:
    """Delete files that nothing needs any more."""
    for name in names:
        fault_point("spool.delete.before")
        storage.delete(f"{folder}/{name}")
        fault_point("spool.delete.after")
