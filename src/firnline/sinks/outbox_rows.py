"""Rows in the outbox: tasks write them as Arrow files, a sink's lane reads them in the order of the ledger entry."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from isal import isal_zlib

from firnline.errors import DamagedError, OutboxDamagedError
from firnline.faults import fault_point
from firnline.names import outbox_name, rebuilt_key
from firnline.sinks.base import Stager
from firnline.sinks.origins import ORIGINS, Origins
from firnline.sinks.outbox import KEY, CountedStream, read_checked
from firnline.sinks.row_checksum import ROWS_CHECKSUM, RowChecksum
from firnline.sinks.table_rows import same_columns, table_of
from firnline.storage import Storage, is_remote, open_storage
from firnline.types import Json

OUTBOX = "outbox"  # the type of a target whose rows are delivered from the outbox
FILE_BYTES = 64 * 1024 * 1024  # Arrow bytes in one file; a reader holds one file at a time
COMPRESSION = "lz4"  # on object stores: half the time of zstd to write, a quarter to read; on local disk none is best


@dataclass(slots=True)
class OpenFile:
    """A file of the outbox that is being written."""

    name: str
    key: str
    schema: pa.Schema
    stream: CountedStream
    writer: pa.ipc.RecordBatchStreamWriter
    rows: int = 0
    arrow_bytes: int = 0
    checksum: RowChecksum = field(default_factory=RowChecksum)
    origins: Origins | None = None  # of its rows, if they come from a source


class OutboxStager(Stager):
    """Writes the rows of one task for one sink into the outbox. `target` comes from `outbox_target`.

    Rows are written as they come: to gather them first takes more time, because they leave the processor's cache.
    """

    def __init__(self, target: dict[str, Json], attempt: str) -> None:
        outbox = target["outbox"]
        self._storage = open_storage(outbox["root"], outbox["storage_options"])
        compression = COMPRESSION if is_remote(outbox["root"]) else None
        self._options = pa.ipc.IpcWriteOptions(compression=compression)
        self._folder = f"{outbox['folder']}/{attempt}"
        self._attempt = attempt
        self._open_file: OpenFile | None = None
        self._files: list[dict[str, Json]] = []
        self._next_origin: tuple[str, pa.Array] | None = None

    def note_origin(self, origin: str, record_numbers: pa.Array) -> None:
        self._next_origin = (origin, record_numbers)

    @property
    def files_done(self) -> int:
        return len(self._files)

    @property
    def files(self) -> int:
        return len(self._files) + (self._open_file is not None)

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._open_file is not None and not self._open_file.schema.equals(batch.schema, check_metadata=True):
            self._change_columns(batch.schema)
        file = self._open_file = self._open_file or self._open(batch.schema)
        file.writer.write_batch(batch)
        file.rows += batch.num_rows
        file.arrow_bytes += batch.nbytes
        file.checksum.add(batch)
        if self._next_origin is not None:
            file.origins = file.origins or Origins()
            file.origins.add(*self._next_origin)
        if file.arrow_bytes >= FILE_BYTES:
            self._finish()

    def close(self) -> list[dict[str, Json]]:
        self._finish()
        return self._files

    def discard(self) -> None:
        if self._open_file is not None:
            with contextlib.suppress(OSError):  # the disk may be full
                self._open_file.stream.close()
            self._storage.delete(self._open_file.key)
        for file in self._files:
            self._storage.delete(str(file[KEY]))
        self._open_file, self._files = None, []

    def _change_columns(self, schema: pa.Schema) -> None:
        """Begin another file; rows of many tables go on in the same one, as another stream."""
        file = self._open_file
        assert file is not None
        if table_of(schema) is None:
            if not file.schema.equals(schema):
                self._finish()
            return
        file.writer.close()
        file.writer, file.schema = pa.ipc.new_stream(file.stream, schema, options=self._options), schema

    def _name(self) -> str:
        return outbox_name(self._attempt, uuid.uuid4().hex)

    def _describe(self, file: OpenFile) -> dict[str, Json]:
        return {
            "path": file.name,
            "rows": file.rows,
            "size_bytes": file.stream.tell(),
            "crc32": file.stream.crc32,
            ROWS_CHECKSUM: file.checksum.hex(),
            KEY: file.key,
            **({ORIGINS: file.origins.to_json()} if file.origins is not None else {}),
        }

    def _open(self, schema: pa.Schema) -> OpenFile:
        name = self._name()
        key = f"{self._folder}/{name}"
        fault_point("outbox.write.before")
        stream = CountedStream(self._storage.create(key))
        return OpenFile(name, key, schema, stream, pa.ipc.new_stream(stream, schema, options=self._options))

    def _finish(self) -> None:
        """Close the file; from here on it is durable."""
        file = self._open_file
        if file is None:
            return
        file.writer.close()
        file.stream.close()
        fault_point("outbox.write.after")
        self._files.append(self._describe(file))
        self._open_file = None


class SharedStager(Stager):
    """Stands for a sink whose rows another sink of the same task stages: both get the same files."""

    def __init__(self, shared: Stager) -> None:
        self._shared = shared

    @property
    def files_done(self) -> int:
        return 0

    @property
    def files(self) -> int:
        return 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Leave the rows to the stager that is shared."""

    def close(self) -> list[dict[str, Json]]:
        return list(self._shared.close())

    def discard(self) -> None:
        """Leave the files to the stager that is shared."""


def outbox_target(sink: str, outbox: dict[str, Json], port: str) -> dict[str, Json]:
    """Describe to tasks where to stage the rows for a sink that is delivered from the outbox.

    `outbox` has root, storage options and folder. Sinks with the same `port` share files.
    """
    return {"type": OUTBOX, "sink": sink, "partition_by": [], "outbox": outbox, "port": port}


def read_outbox(outbox: Storage, files: Sequence[dict[str, Json]], skip: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield the rows of these files in order, without the first `skip`.

    Raises:
        OutboxDamagedError: a file is missing, or differs from what was written.
    """
    for file in files:
        rows = int(file["rows"])
        if skip >= rows:
            skip -= rows
            continue
        for batch in read_file(outbox, file):
            if skip >= batch.num_rows:
                skip -= batch.num_rows
                continue
            yield batch.slice(skip) if skip else batch
            skip = 0


def read_file(outbox: Storage, file: dict[str, Json]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one file, or of the one that was made again in its place.

    Raises:
        OutboxDamagedError: it is missing or differs from what was written, and was not made again.
    """
    try:
        data = b"".join(read_checked(outbox, str(file[KEY]), file, int(file["size_bytes"])))
    except (FileNotFoundError, DamagedError) as error:
        rebuilt = find_rebuilt(outbox, file)
        if rebuilt is None:
            gone = f"{file[KEY]} is no longer in the outbox of {outbox.root}"
            raise OutboxDamagedError(gone if isinstance(error, FileNotFoundError) else error.message) from error
        data = rebuilt
    yield from _read_streams(data)


def _read_streams(data: bytes) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file: one stream, or of many tables one after the other."""
    buffer = pa.BufferReader(data)
    while buffer.tell() < len(data):
        with pa.ipc.open_stream(buffer) as reader:
            yield from reader


# -- rows that were made again ------------------------------------------------------------------------

_MAGIC = b"FIRNROW1"  # then the checksum of the rest, then the rows as in any other file of the outbox


def rows_checksum(batches: Iterable[pa.RecordBatch]) -> str:
    """Return the checksum of rows, in order."""
    found = RowChecksum()
    for batch in batches:
        found.add(batch)
    return found.hex()


def write_rows(batches: Sequence[pa.RecordBatch]) -> bytes:
    """Return rows in the form of a file of the outbox."""
    written = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=COMPRESSION)
    for group in same_columns(batches):
        with pa.ipc.new_stream(written, group[0].schema, options=options) as writer:
            for batch in group:
                writer.write_batch(batch)
    data: bytes = written.getvalue().to_pybytes()
    return data


def is_whole(outbox: Storage, file: dict[str, Json]) -> bool:
    """Return whether the rows of a file can be read."""
    try:
        for _ in read_checked(outbox, str(file[KEY]), file):
            pass
    except (FileNotFoundError, DamagedError):
        return find_rebuilt(outbox, file) is not None
    return True


def find_rebuilt(outbox: Storage, file: dict[str, Json]) -> bytes | None:
    """Return the rows that were made again for a file; None unless they are whole, and those that were decided."""
    try:
        data = outbox.get(rebuilt_key(str(file[KEY])))
    except FileNotFoundError:
        return None
    head, rest = data[: len(_MAGIC) + 4], data[len(_MAGIC) + 4 :]
    if head != _MAGIC + isal_zlib.crc32(rest).to_bytes(4, "little"):
        return None
    batches = list(_read_streams(rest))
    rows = sum(batch.num_rows for batch in batches)
    return rest if rows == int(file["rows"]) and rows_checksum(batches) == file.get(ROWS_CHECKSUM) else None


def rebuild(outbox: Storage, file: dict[str, Json], batches: Sequence[pa.RecordBatch]) -> bool:
    """Put these rows in the place of a damaged file, durable on return. Returns False if they are not those that were
    decided: then nothing is written.

    Two processes may do it at once: both write the same rows, each as a whole.
    """
    fitting = list(batches)
    if table_of(batches[0].schema) is None:  # else each table keeps its columns
        table = pa.concat_tables((pa.Table.from_batches([batch]) for batch in batches), promote_options="default")
        fitting = table.combine_chunks().to_batches()
    rows = sum(batch.num_rows for batch in fitting)
    if rows != int(file["rows"]) or rows_checksum(fitting) != file.get(ROWS_CHECKSUM):
        return False
    data = write_rows(fitting)
    fault_point("outbox.rebuild.before")
    outbox.put(rebuilt_key(str(file[KEY])), _MAGIC + isal_zlib.crc32(data).to_bytes(4, "little") + data)
    fault_point("outbox.rebuild.after")
    return True
