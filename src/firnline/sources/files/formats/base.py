"""The contract of a file format: where reading starts and ends, and how records become rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from firnline.sources.decoding import P, Piece, RecordDecoder
from firnline.sources.files.growth import FileEnd, TailStream, read_tail
from firnline.storage import Readable, Storage

HEAD_BYTES = 4096  # of a file, to recognise its format


P_co = TypeVar("P_co", bound=Piece, covariant=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where to start in a file, and how far to read.

    Attributes:
        record: records before the start.
        offset: the byte where the next record starts; 0 if the format finds it by counting records.
        line: lines before that byte.
        max_records: stop exactly after this number of records.
        max_record_bytes: a longer record is bad.
    """

    record: int = 0
    offset: int = 0
    line: int = 0
    max_records: int | None = None
    max_record_bytes: int = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class QuarantinedRecord:
    """A bad record as the quarantine has it, with line and number in its file."""

    line: int
    record: int
    reason: str
    raw: bytes


class StoredFile:
    """One file in a storage; closes what was opened of it."""

    def __init__(self, storage: Storage, key: str, path: str, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self._storage = storage
        self._key = key
        self._streams: list[Readable] = []
        self._growing: TailStream | None = None

    def open(self, offset: int = 0) -> Readable:
        """Open the file from an offset on."""
        stream = self._storage.open_read(self._key, offset)
        self._streams.append(stream)
        return stream

    def open_growing(self, offset: int = 0) -> Readable:
        """Open the file from an offset on, and remember the last bytes that were read."""
        self._growing = TailStream(self.open(offset))
        return self._growing

    @property
    def tail(self) -> bytes:
        """The last bytes that were read."""
        return self._growing.tail if self._growing is not None else b""

    def read_tail(self, offset: int) -> bytes:
        """Read the last bytes before an offset."""
        return read_tail(self._storage, self._key, offset)

    def head(self) -> bytes:
        """Return the first bytes of the file."""
        with closing(self._storage.open_read(self._key)) as stream:
            return stream.read(HEAD_BYTES)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class RecordReader(Protocol[P_co]):
    """An open file: iterates over its pieces, and knows how far it has read.

    Iterating raises BrokenFileError where the file turns out broken, at its end at the latest.
    """

    @property
    def records_read(self) -> int:
        """Records up to the end of the last piece, those before the start included."""

    @property
    def lines_read(self) -> int:
        """The same in lines."""

    @property
    def end_offset(self) -> int:
        """The same in bytes of the unpacked file."""

    @property
    def finished(self) -> bool:
        """Whether no record follows; correct after every piece."""

    def __iter__(self) -> Iterator[P_co]: ...


class Format(ABC, Generic[P]):
    """A format with its options."""

    decoder_class: type[RecordDecoder[P]]  # formats that share one share its columns

    @abstractmethod
    def open(self, file: StoredFile, place: Place) -> RecordReader[P]:
        """Open a file.

        Raises:
            BrokenFileError: the file is damaged, looks like another format, or has fewer records than were read of it
                before.
            OSError: the storage failed.
        """

    @abstractmethod
    def offset_of(self, file: StoredFile, reader: RecordReader[P]) -> int:
        """Return the offset where reading can continue; 0 if records must be counted from the start."""

    def check_names(self, file: StoredFile, reader: RecordReader[P], known: Collection[str]) -> None:
        """Compare the names that a file gives to its columns with the known columns of the source.

        Raises:
            BrokenFileError: they are plainly no names.
        """

    def header_of(self, reader: RecordReader[P]) -> bytes | None:
        """Return the first record of a file, if a record alone cannot be decoded without it."""
        return None

    def warm_up(self) -> None:
        """Compile what the reader needs, or load it; later calls are cheap."""

    def incomplete_bytes(self, file: StoredFile, piece: P, bad_record: int) -> int:
        """Return the size of an incomplete record at the end of the file, which may still be completed.

        `bad_record` is the last bad record of the piece. 0: it is not at the end, or no such file grows.
        """
        return 0

    def end_of(self, file: StoredFile, reader: RecordReader[P], incomplete_bytes: int) -> FileEnd | None:
        """Return where the reading of a file ended that may grow; None if no such file grows.

        `incomplete_bytes` at the end of the file were left.
        """
        return None
