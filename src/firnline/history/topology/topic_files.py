"""The records of a topic in a savepoint: Parquet files, each with records of one partition in their order.

    data/<sink>/<partition>-<first offset>.parquet    partition, offset, timestamp, key, value, headers

`timestamp` has milliseconds, null if the record has none; `key` and `value` are the bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.history.savepoints.format import SavedBytes, read_saved
from firnline.kafka_client import load_library
from firnline.names import saved_data_key, saved_range_name
from firnline.storage import Storage
from firnline.types import Json

if TYPE_CHECKING:
    from confluent_kafka import Message

FILE_BYTES = 32 * 1024 * 1024  # about so much of keys, values and headers is in one file, and in memory
_NAME = re.compile(r"[0-9]{5,}-[0-9]{20}\.parquet")
_HEADER = pa.struct([("name", pa.string()), ("value", pa.large_binary())])
SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.int64()),
        ("key", pa.large_binary()),
        ("value", pa.large_binary()),
        ("headers", pa.large_list(_HEADER)),
    ]
)
CONTENT = ("key", "value", "headers")  # what a copy has in common with the record, beside its place


@dataclass(frozen=True, slots=True)
class TopicFile:
    """One file of records. Its records are those of one partition, of the offsets from `first` to `last`."""

    name: str
    size_bytes: int
    sha256: str
    partition: int
    rows: int
    first: int
    last: int

    def read(self, storage: Storage, sink: str) -> pa.Table:
        """Read the records, verified. `storage` is the member's folder in the savepoint.

        Raises:
            DamagedError: the file is missing, or is not what was saved.
        """
        key = saved_data_key(sink, self.name)
        data = read_saved(storage, key, SavedBytes(self.name, self.size_bytes, self.sha256))
        try:
            table = pq.read_table(pa.BufferReader(data), schema=SCHEMA)
        except (pa.ArrowException, OSError) as error:
            raise DamagedError(f"{key} of the savepoint cannot be read: {error}") from error
        if table.num_rows != self.rows:
            raise DamagedError(f"{key} of the savepoint has {table.num_rows} records; {self.rows} were saved")
        return table


@dataclass(frozen=True, slots=True)
class SavedTopic:
    """The range of a topic that a savepoint has, and who reads it."""

    topic: str
    topic_id: str
    firsts: dict[int, int]  # the first offset of each partition, when it was copied
    ends: dict[int, int]  # the cut, by partition
    readers: list[tuple[str, str]]  # member and source
    oldest: int | None  # the smallest timestamp; None: no record has one
    files: list[TopicFile] = field(default_factory=list)  # by partition and offset

    @property
    def records(self) -> int:
        return sum(file.rows for file in self.files)

    def of_partition(self, number: int) -> list[TopicFile]:
        return [file for file in self.files if file.partition == number]

    def to_json(self) -> dict[str, Json]:
        return {
            "topic": self.topic,
            "topic_id": self.topic_id,
            "firsts": {str(number): first for number, first in sorted(self.firsts.items())},
            "ends": {str(number): end for number, end in sorted(self.ends.items())},
            "readers": [list(one) for one in self.readers],
            "oldest": self.oldest,
            "files": [asdict(file) for file in self.files],
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> SavedTopic:
        """Parse the output of `to_json`. Raises DamagedError."""
        found = cls(
            topic=str(value["topic"]),
            topic_id=str(value["topic_id"]),
            firsts={int(number): int(first) for number, first in value["firsts"].items()},
            ends={int(number): int(end) for number, end in value["ends"].items()},
            readers=[(str(reader), str(source)) for reader, source in value["readers"]],
            oldest=None if value["oldest"] is None else int(value["oldest"]),
            files=[TopicFile(**file) for file in value["files"]],
        )
        for file in found.files:
            if not _NAME.fullmatch(file.name) or file.partition not in found.firsts:
                raise DamagedError(f"{what} names {file.name!r}, which is no file of a topic", what=what)
        return found


class TopicFileWriter:
    """Writes the records of one partition to files, as they come. Not more than one file is in memory."""

    def __init__(self, storage: Storage, sink: str, partition: int) -> None:
        self._storage = storage
        self._sink = sink
        self._partition = partition
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0
        self.files: list[TopicFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add records, in order."""
        if batch.num_rows:
            self._waiting.append(batch)
            self._bytes += batch.nbytes
        if self._bytes >= FILE_BYTES:
            self.finish()

    def finish(self) -> None:
        """Write what waits."""
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting, schema=SCHEMA)
        self._waiting, self._bytes = [], 0
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression="zstd")
        data = buffer.getvalue().to_pybytes()
        first, last = (int(table.column("offset")[at].as_py()) for at in (0, table.num_rows - 1))
        name = saved_range_name(self._partition, first)
        fault_point("topology.range.before")
        self._storage.put(saved_data_key(self._sink, name), data)
        fault_point("topology.range.after")
        digest = hashlib.sha256(data).hexdigest()
        self.files.append(TopicFile(name, len(data), digest, self._partition, table.num_rows, first, last))


def as_batch(messages: Sequence[Message], partition: int) -> pa.RecordBatch:
    """Return messages of one partition as columns, byte for byte."""
    library = load_library()
    count = len(messages)
    times = np.fromiter((message.timestamp()[1] for message in messages), np.int64, count)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(partition, pa.int32()), count),
            pa.array(np.fromiter(map(library.Message.offset, messages), np.int64, count)),
            pa.array(times, pa.int64(), mask=times < 0),
            pa.array(map(library.Message.key, messages), pa.large_binary()),
            pa.array(map(library.Message.value, messages), pa.large_binary()),
            _headers(list(map(library.Message.headers, messages))),
        ],
        schema=SCHEMA,
    )


def _headers(found: Sequence[list[tuple[str, Any]] | None]) -> pa.Array:
    counts = np.fromiter((len(one) if one else 0 for one in found), np.int64, len(found))
    pairs = [pair for one in found if one for pair in one]
    names = pa.array([name for name, _ in pairs], pa.string())
    values = pa.array([value for _, value in pairs], pa.large_binary())
    structs = pa.StructArray.from_arrays([names, values], fields=list(_HEADER))
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, structs)


def headers_of(batch: pa.RecordBatch) -> Iterator[list[tuple[str, bytes | None]] | None]:
    """Yield the headers of each record, as a producer takes them."""
    column = batch.column("headers")
    flat = column.flatten()
    names, values = flat.field("name").to_pylist(), flat.field("value").to_pylist()
    counts, at = column.value_lengths().to_pylist(), 0
    for count in counts:
        yield list(zip(names[at : at + count], values[at : at + count], strict=True)) if count else None
        at += count
