"""Reads offset ranges in a worker: committed records to Arrow batches, in bounded memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.errors import BadRecordsError, InputChangedError, SchemaError
from firnline.kafka_client import load_library
from firnline.ndjson import BadRecord, Decoded, MismatchError, UnexpectedFieldError
from firnline.ndjson.values import join_values
from firnline.sources.base import MAIN_PORT, Budget, ReadColumns, Rows, Split, SplitEnd, SplitReader
from firnline.sources.columns import Columns
from firnline.sources.decoding import LineDecoder
from firnline.sources.files.replayed import load_quarantined
from firnline.sources.kafka.clients import describe_topics, lend_consumer, open_admin
from firnline.sources.kafka.fetching import Wave, waves
from firnline.sources.kafka.messages import KafkaReaderSettings, RangeInput, RangeOutcome
from firnline.sources.kafka.position import PartitionId
from firnline.types import Json

if TYPE_CHECKING:
    from confluent_kafka import Message

    Numbers = np.ndarray[Any, Any]

VALUE_COLUMN = "value"  # of raw values
_KEPT = ("topic", "partition", "offset")  # facts that are known of a record in quarantine, too
HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
TYPES = {
    "key": pa.string(),
    "headers": HEADERS,
    "timestamp": pa.timestamp("us", "UTC"),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
}


class Checksum:
    """A checksum of records: their offsets, the lengths of their values and the values. How they come in batches does
    not matter."""

    def __init__(self) -> None:
        self._offsets = self._lengths = self._values = 0

    def add(self, offsets: Numbers, lengths: Numbers, joined: bytes) -> None:
        """Add records. `joined` has the values with a line feed between two."""
        self._offsets = zlib.crc32(offsets.tobytes(), self._offsets)
        self._lengths = zlib.crc32(lengths.tobytes(), self._lengths)
        self._values = zlib.crc32(b"\n", zlib.crc32(joined, self._values))

    def __str__(self) -> str:
        return f"{self._offsets:08x}{self._lengths:08x}{self._values:08x}"


class KafkaReader(SplitReader):
    """Reads the ranges of one split, one after the other."""

    def __init__(self, settings: dict[str, Json], split: Split, ports: Mapping[str, Columns]) -> None:
        self._settings = KafkaReaderSettings.from_json(settings)
        self._ranges = [RangeInput.from_json(item) for item in split.inputs if "quarantine" not in item]
        self._quarantined = [item for item in split.inputs if "quarantine" in item]
        self._columns = ports[MAIN_PORT]
        self._facts = pa.schema([(f"_{name}", self._type_of(name)) for name in self._settings.include])

    def _type_of(self, name: str) -> pa.DataType:
        return pa.binary() if name == "key" and self._settings.key == "raw" else TYPES[name]

    def read(self, schemas: Mapping[str, pa.Schema], budget: Budget) -> Iterator[Sequence[Rows]]:
        self._outcomes: list[RangeOutcome] = []
        self._replayed: list[dict[str, Json]] = []
        self._decoder = self._open_decoder(schemas[MAIN_PORT])
        for item in self._quarantined:
            yield from self._read_quarantined(item, budget)
        if self._ranges:
            yield from self._read_ranges(budget)
            self._check_topics()

    def _read_ranges(self, budget: Budget) -> Iterator[Sequence[Rows]]:
        with lend_consumer(self._settings.client) as consumer:
            for wave in waves(self._ranges):
                if budget.is_full:
                    break
                fetched = Wave(consumer, wave, self._settings.brokers, self._settings.gap_error)
                for one in wave:
                    if budget.is_full:
                        break
                    yield from self._read_range(fetched, one, budget)
                fetched.close()

    def _read_quarantined(self, item: dict[str, Json], budget: Budget) -> Iterator[Sequence[Rows]]:
        """Read quarantined records again, by their stored bytes. A failure is reported: they stay where they are."""
        name = str(item["quarantine"])
        lost = [fact for fact in self._settings.include if fact not in _KEPT]
        if lost:
            self._replayed.append({"quarantine": name, "failed": f"the {lost[0]} of its records is not kept there"})
            return
        try:
            kept = load_quarantined(item, "")
        except (OSError, pa.ArrowException, KeyError) as error:
            self._replayed.append({"quarantine": name, "failed": f"cannot be read: {error}"})
            return
        for records in kept:
            offsets = np.array([one.record for one in records.records], np.int64)
            values: list[bytes | None] = [one.raw for one in records.records]
            place = PartitionId.parse(records.file)
            facts = _Facts(place.topic, place.number, offsets)
            rows, counted, size_bytes = self._decode(records.file, values, facts, Checksum())
            budget.records += counted
            budget.bytes_read += size_bytes
            budget.raw_bytes += size_bytes
            yield [rows]
        self._replayed.append({"quarantine": name, "failed": None})

    def end(self) -> SplitEnd:
        schema = self._decoder.schema
        for field in self._facts:
            schema = schema.append(field)
        columns = ReadColumns(schema, dict(self._decoder.kinds()))
        outcomes = [*(outcome.to_json() for outcome in self._outcomes), *self._replayed]
        return SplitEnd(outcomes, {MAIN_PORT: columns})

    def _open_decoder(self, schema: pa.Schema) -> _JsonValues | _AvroValues | _RawValues:
        """Return the decoder of values. Columns of facts never come from values."""
        names = set(self._facts.names)
        own = pa.schema([field for field in schema if field.name not in names])
        if self._settings.value == "raw":
            return _RawValues(own)
        columns = replace(self._columns, frozen=self._columns.frozen - names, reserved=self._columns.reserved | names)
        keep_tombstones = self._settings.tombstones == "row"
        if self._settings.value == "avro":
            return _AvroValues(self._settings, own, columns, keep_tombstones=keep_tombstones)
        return _JsonValues(own, columns, keep_tombstones=keep_tombstones)

    def _read_range(self, wave: Wave, one: RangeInput, budget: Budget) -> Iterator[Sequence[Rows]]:
        checksum, at, epoch, records, size_bytes = Checksum(), one.start, one.epoch, 0, 0
        while at < one.end and not budget.is_full:
            messages, at = wave.take(one, at, budget.records_left)
            if not messages:
                continue
            library = load_library()
            offsets = np.fromiter(map(library.Message.offset, messages), np.int64, len(messages))
            place, values = PartitionId.parse(one.path), list(map(library.Message.value, messages))
            facts = _Facts(place.topic, place.number, offsets, messages)
            rows, counted, some_bytes = self._decode(one.path, values, facts, checksum)
            wave.learn_size(len(messages), some_bytes)
            last_epoch = messages[-1].leader_epoch()
            epoch = last_epoch if last_epoch is not None else epoch
            records += len(messages)
            size_bytes += some_bytes
            budget.records += counted
            budget.bytes_read += some_bytes
            budget.raw_bytes += some_bytes
            yield [rows]
        outcome = RangeOutcome(one.path, one.start, at, epoch, records, size_bytes, str(checksum))
        self._check_replay(one, outcome)
        self._outcomes.append(outcome)

    def _decode(
        self, path: str, values: list[bytes | None], facts: _Facts, checksum: Checksum
    ) -> tuple[Rows, int, int]:
        """Return the rows of values, how many records they count as, and their size."""
        offsets = facts.offsets
        try:
            decoded, size_bytes = self._decoder.decode(values, offsets, checksum)
        except (UnexpectedFieldError, MismatchError) as error:
            raise SchemaError(f"{path} offset {offsets[error.record]}: {error}", file=path) from error
        batch, indices, bad = decoded.batch, decoded.record_numbers, list(decoded.bad)
        if self._facts.names:
            batch, indices, wrong = self._add_facts(batch, indices, facts, values)
            bad = sorted([*bad, *wrong], key=lambda item: item.record)
        bad = [replace(item, record=int(offsets[item.record]), line=int(offsets[item.record])) for item in bad]
        if bad and self._settings.on_bad_record == "fail":
            raise BadRecordsError(f"{path} offset {bad[0].record}: {bad[0].reason}", file=path)
        rescued = [replace(item, file=path) for item in decoded.rescued]
        numbers = pa.array(offsets[indices.to_numpy()])
        rows = Rows(path, batch, numbers, bad, rescued=rescued)
        return rows, batch.num_rows + len(bad), size_bytes

    def _add_facts(
        self, batch: pa.RecordBatch, indices: pa.Array, facts: _Facts, values: Sequence[bytes | None]
    ) -> tuple[pa.RecordBatch, pa.Array, list[BadRecord]]:
        """Add the columns of facts. A record whose key is no text is bad."""
        columns, bad = {}, list[BadRecord]()
        for field, name in zip(self._facts, self._settings.include, strict=True):
            columns[field.name] = facts.column(name, field.type)
        for name, column in columns.items():
            if name == "_key" and pa.types.is_string(self._facts.field("_key").type):
                columns[name], wrong = _as_text(column)
                rows = pc.is_in(indices, pa.array(wrong, pa.int64())) if wrong else None
                if rows is not None:
                    known = set(indices.to_pylist())
                    bad = [BadRecord(n, n, values[n] or b"", "invalid-utf8") for n in wrong if n in known]
                    keep = pc.invert(rows)
                    batch, indices = batch.filter(keep), indices.filter(keep)
        taken = [columns[field.name].take(indices) for field in self._facts]
        fields = [*batch.schema, *self._facts]
        return pa.RecordBatch.from_arrays([*batch.columns, *taken], schema=pa.schema(fields)), indices, bad

    def _check_replay(self, one: RangeInput, outcome: RangeOutcome) -> None:
        """Compare a range that is read again with its first reading."""
        if one.records is None or outcome.end < one.end:
            return
        if (one.records, one.checksum) != (outcome.records, outcome.checksum):
            raise InputChangedError(
                f"{one.path}, offsets {one.start} to {one.end - 1}: an epoch read {one.records} records there, and now "
                f"there are {outcome.records}{'' if one.records != outcome.records else ' others'}",
                file=one.path,
            )

    def _check_topics(self) -> None:
        """Check that the topics that were read are those that were planned, and not others of the same name."""
        planned = {PartitionId.parse(one.path).topic: one.topic_id for one in self._ranges}
        found = describe_topics(open_admin(self._settings.client), list(planned), self._settings.brokers)
        for topic, topic_id in planned.items():
            if topic not in found or found[topic].id != topic_id:
                how = " and created again" if topic in found else ""
                raise self._settings.gap_error(f"topic {topic} was deleted{how} while it was read")


class _JsonValues:
    """Values that are JSON objects, decoded like the lines of files."""

    def __init__(self, schema: pa.Schema, columns: Columns, *, keep_tombstones: bool) -> None:
        self._decoder = LineDecoder(schema, columns)
        self._keep_tombstones = keep_tombstones

    @property
    def schema(self) -> pa.Schema:
        return self._decoder.schema

    def kinds(self) -> dict[str, dict[str, int]]:
        return self._decoder.kinds()

    def decode(self, values: Sequence[bytes | None], offsets: Numbers, checksum: Checksum) -> tuple[Decoded, int]:
        """Return the rows, numbered by the place of their values, and the size of the values."""
        if None not in values:
            return self._decode(values, offsets, checksum)  # type: ignore[arg-type]
        lengths, joined = _join(values)
        checksum.add(offsets, lengths, joined)
        if self._keep_tombstones:
            return self._decode([b"{}" if value is None else value for value in values], offsets, None)
        kept = np.flatnonzero(lengths >= 0)
        decoded, size_bytes = self._decode([v for v in values if v is not None], offsets[kept], None)
        bad = [replace(item, record=int(kept[item.record])) for item in decoded.bad]
        return replace(decoded, record_numbers=pa.array(kept[decoded.record_numbers.to_numpy()]), bad=bad), size_bytes

    def _decode(self, values: Sequence[bytes], offsets: Numbers, checksum: Checksum | None) -> tuple[Decoded, int]:
        block = join_values(values, offsets)
        origins = block.origins
        assert origins is not None
        if checksum is not None:
            lengths = np.fromiter(map(len, values), np.int64, len(values))
            checksum.add(offsets, lengths, bytes(origins.source))
        decoded = self._decoder.decode(block)
        if decoded.batch.num_rows:
            self._decoder.count(decoded.batch)
        return decoded, block.consumed_bytes


class _AvroValues:
    """Values that are Avro records."""

    def __init__(
        self, settings: KafkaReaderSettings, schema: pa.Schema, columns: Columns, *, keep_tombstones: bool
    ) -> None:
        from firnline.sources.kafka.avro_values import AvroDecoder  # loads the decoder

        registry = settings.registry or {}
        self._decoder = AvroDecoder(settings.source, registry, schema, columns, keep_tombstones=keep_tombstones)

    @property
    def schema(self) -> pa.Schema:
        return self._decoder.schema

    def kinds(self) -> dict[str, dict[str, int]]:
        return {}  # the types are those of the schemas

    def decode(self, values: Sequence[bytes | None], offsets: Numbers, checksum: Checksum) -> tuple[Decoded, int]:
        """Return the rows, numbered by the place of their values, and the size of the values."""
        lengths, joined = _join(values)
        checksum.add(offsets, lengths, joined)
        return self._decoder.decode(values, joined, lengths, offsets), len(joined)


class _RawValues:
    """Values as they are, in one column."""

    def __init__(self, schema: pa.Schema) -> None:
        known = schema.names == [VALUE_COLUMN]
        self.schema = schema if known else pa.schema([(VALUE_COLUMN, pa.binary())])

    def kinds(self) -> dict[str, dict[str, int]]:
        return {}

    def decode(self, values: Sequence[bytes | None], offsets: Numbers, checksum: Checksum) -> tuple[Decoded, int]:
        """Return the rows, numbered by their place, and the size of the values."""
        lengths, joined = _join(values)
        checksum.add(offsets, lengths, joined)
        batch = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], schema=self.schema)
        return Decoded(batch, pa.array(np.arange(len(values))), []), len(joined)


def _join(values: Sequence[bytes | None]) -> tuple[Numbers, bytes]:
    """Return the lengths of values, -1 for none, and the values with a line feed between two."""
    lengths = np.fromiter((-1 if value is None else len(value) for value in values), np.int64, len(values))
    return lengths, b"\n".join([value or b"" for value in values])


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known about records beside their values. Without messages (in quarantine) only where they stand."""

    topic: str
    partition: int
    offsets: Numbers
    messages: list[Message] | None = None

    def column(self, name: str, kind: pa.DataType) -> pa.Array:
        """Return a fact about each record."""
        if name == "offset":
            return pa.array(self.offsets)
        if name in ("topic", "partition"):
            one = self.topic if name == "topic" else self.partition
            return pa.repeat(pa.scalar(one, kind), len(self.offsets))
        messages = self.messages
        assert messages is not None
        if name == "key":
            return pa.array(map(load_library().Message.key, messages), pa.binary())
        if name == "timestamp":
            times = np.fromiter((message.timestamp()[1] for message in messages), np.int64, len(messages))
            return pa.array(times * 1000, pa.int64(), mask=times < 0).cast(kind)
        found: Any = (message.headers() for message in messages)
        return pa.array([None if h is None else [{"name": n, "value": v} for n, v in h] for h in found], kind)


def _as_text(keys: pa.Array) -> tuple[pa.Array, list[int]]:
    """Return keys as text, and which of them are none."""
    try:
        return keys.cast(pa.string()), []
    except pa.ArrowInvalid:
        wrong = []
        texts: list[str | None] = []
        for index, key in enumerate(keys.to_pylist()):
            try:
                texts.append(None if key is None else key.decode())
            except UnicodeDecodeError:
                wrong.append(index)
                texts.append(None)
        return pa.array(texts, pa.string()), wrong
