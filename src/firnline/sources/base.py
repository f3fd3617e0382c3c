"""The contract of a source: plan a bounded slice, say where it ends, forget when told."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one plan may take. The first limit that is reached ends the slice."""

    max_files: int
    max_bytes: int
    max_events: int
    max_ms: int
    max_output_files: int
    parallelism: int  # tasks that can run at once
    files_per_task: int = 1  # Parquet files that a task stages for one table, as far as is known


@dataclass(frozen=True, slots=True)
class Split:
    """What one Spark task reads: a contiguous range of the slice. Plain JSON, since it travels to workers."""

    inputs: list[dict[str, Json]]
    max_records: int
    max_bytes: int
    max_output_files: int


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """A slice of input, fixed before the epoch runs. `base` is the position that it stands on."""

    source: str
    base: Json
    splits: list[Split]
    files: int
    size_bytes: int
    notes: dict[str, Any] = field(default_factory=dict)  # late files, files set aside: for people


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits to be read."""

    files_outstanding: int
    bytes_outstanding: int


class Source(ABC):
    """Where records come from. Positions are made, compared and read by their source alone."""

    name: str

    @abstractmethod
    def start(self, position: Json | None) -> Json:
        """Check a restored position against the settings and return the one to plan after; None is a first start.

        Raises:
            SourceMovedError: the position was made on another root.
        """

    @abstractmethod
    def plan(self, position: Json, limits: Limits) -> SourcePlan | None:
        """Propose the next slice after `position`, or None when there is nothing to read now.

        Reads listings only. Called again with the same position after a failure; the slice may then differ,
        since only a committed ledger entry fixes it.
        """

    @abstractmethod
    def advance(self, plan: SourcePlan, outcomes: Sequence[Json], epoch: int) -> tuple[Json, list[dict[str, Json]]]:
        """Pure: the position after the tasks of `plan` ended as they report, and the ledger's input records."""

    @abstractmethod
    def backlog(self, position: Json) -> Backlog:
        """Count what lies after `position`."""
