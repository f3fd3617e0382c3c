"""Values that all packages share: references, receipts, delivery guarantees, reasons of bad records, clock and ids."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, Protocol

Json = Any  # a JSON value from outside; its shape is checked where it is used

# Why a record goes to the quarantine.
BadReason = Literal[
    "not-json",
    "not-an-object",
    "invalid-utf8",
    "too-long",
    "missing-required",
    "does-not-fit",
    "wrong-field-count",
    "stray-quote",
    "not-avro",
    "unknown-schema",
    "unsupported-schema",
]


class Delivery(enum.Enum):
    """The delivery guarantee of a sink, checked before a run starts."""

    EXACTLY_ONCE = "exactly-once"  # the checkpoint lives inside the sink's own transaction
    EXACTLY_ONCE_PER_PART = "exactly-once-per-part"  # each part is committed once, but not all parts at the same moment
    AT_LEAST_ONCE = "at-least-once"  # repeats carry a deterministic idempotency key


@dataclass(frozen=True, slots=True)
class EntryRef:
    """A reference to one ledger entry; the commit of its epoch and the next entry contain it."""

    epoch: int
    name: str
    checksum: str

    def to_json(self) -> dict[str, Json]:
        return {"epoch": self.epoch, "name": self.name, "checksum": self.checksum}

    @classmethod
    def from_json(cls, value: Json) -> EntryRef:
        return cls(int(value["epoch"]), str(value["name"]), str(value["checksum"]))


@dataclass(frozen=True, slots=True)
class Receipt:
    """A sink's answer to a commit. Only a receipt with our attempt id is ours."""

    sink: str
    epoch: int
    generation: int
    run: str
    attempt: str
    checkpoint_checksum: str
    version: int
    rows: int  # that were staged: of an upsert, change rows
    size_bytes: int
    changes: Mapping[str, int] = field(
        default_factory=dict, compare=False
    )  # of an upsert: rows `inserted`, `updated`, `deleted`
    entry: str = field(default="", compare=False)  # the checksum of the ledger entry; empty: the sink does not say
    rescued: Sequence[Json] = field(default=(), compare=False)  # values that the sink itself rescued, by column


class Clock(Protocol):
    """The source of time; tests inject their own."""

    def now(self) -> datetime:
        """Return the current time in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back; for durations."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class Ids(Protocol):
    """The source of random ids; tests inject their own."""

    def new(self) -> str:
        """Return a new id of lower-case hex digits."""
        ...


class RandomIds:
    """Random ids of 16 hex digits."""

    def new(self) -> str:
        return secrets.token_hex(8)
