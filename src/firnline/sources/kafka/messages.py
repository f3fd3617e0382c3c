"""The messages between the driver and a reader of topics, in plain JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from firnline.errors import SourceError, SourceGapError
from firnline.types import Json

GAP_HINT = (
    "The named records cannot be read any more. If the result may lack them, set on_gap: continue on the source: the "
    "run logs them and reads on. Or choose where to read on: firnline position set SOURCE TOPIC:PARTITION=OFFSET"
)


@dataclass(frozen=True, slots=True)
class KafkaReaderSettings:
    """The settings that a reader of topics needs beside its split."""

    source: str
    client: dict[str, str]  # of the library; hold secrets
    value: str
    include: list[str] = field(default_factory=list)
    key: str = "text"
    tombstones: str = "row"
    on_bad_record: str = "quarantine"
    on_gap: str = "fail"
    registry: dict[str, Json] | None = None  # of Avro values; may hold secrets

    def gap_error(self, message: str) -> SourceError:
        """Return the error for records that are missing. If reading may go on without them, the next plan passes
        them."""
        return SourceGapError(message, hint=GAP_HINT) if self.on_gap == "fail" else SourceError(message)

    @property
    def brokers(self) -> str:
        return self.client["bootstrap.servers"]

    def to_json(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: dict[str, Json]) -> KafkaReaderSettings:
        return cls(**value)


@dataclass(frozen=True, slots=True)
class RangeInput:
    """A range of offsets that a task reads. With `records`, an epoch has read it before, with this result."""

    path: str  # topic/partition
    topic_id: str
    start: int
    end: int
    epoch: int = -1  # leader epoch of the record before; -1: unknown
    records: int | None = None
    checksum: str = ""

    def to_json(self) -> dict[str, Json]:
        known = {"records": self.records, "checksum": self.checksum} if self.records is not None else {}
        return {
            "path": self.path,
            "topic_id": self.topic_id,
            "from": self.start,
            "to": self.end,
            "epoch": self.epoch,
            **known,
        }

    @classmethod
    def from_json(cls, value: dict[str, Json]) -> RangeInput:
        named: dict[str, Any] = {("start" if k == "from" else "end" if k == "to" else k): v for k, v in value.items()}
        return cls(**named)


@dataclass(frozen=True, slots=True)
class RangeOutcome:
    """How far a range was read, and what was there: the number of records and a checksum of offsets and values."""

    path: str
    start: int
    end: int
    epoch: int
    records: int
    size_bytes: int
    checksum: str

    def to_json(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, value: Json) -> RangeOutcome:
        return cls(**value)
