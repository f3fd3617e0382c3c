"""The record of an epoch in a store or tier: the checkpoint, its ledger entry, and how the epoch went."""

from __future__ import annotations

from dataclasses import dataclass, field

from firnline.checkpoint.model import Checkpoint
from firnline.errors import DamagedError
from firnline.types import EntryRef, Json


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One epoch, as recorded after its commit.

    `entry` is the one that the deciding sink's commit names. It proves that a copy is of the sink's own epoch.
    """

    checkpoint: Checkpoint
    entry: EntryRef
    kind: str = "epoch"  # or rollback, fresh, restore
    sinks: dict[str, dict[str, Json]] = field(default_factory=dict)  # the receipt of each sink
    durations_ms: dict[str, int] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        return self.checkpoint.epoch

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": self.kind,
            "checkpoint": self.checkpoint.to_json(),
            "entry": self.entry.to_json(),
            "sinks": self.sinks,
            "durations_ms": self.durations_ms,
        }

    @classmethod
    def from_json(cls, value: Json, what: str = "checkpoint record") -> CheckpointRecord:
        """Parse the output of `to_json`.

        Raises:
            DamagedError: it is invalid, or the checkpoint in it is damaged.
            NewerFormatError: a newer Firnline wrote the checkpoint.
        """
        try:
            return cls(
                checkpoint=Checkpoint.from_json(value["checkpoint"], what),
                entry=EntryRef.from_json(value["entry"]),
                kind=str(value["kind"]),
                sinks=dict(value["sinks"]),
                durations_ms=dict(value["durations_ms"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error
