"""The contract of a sink: claim, commit with the checkpoint inside, answer what it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from firnline.checkpoint.model import Checkpoint
from firnline.types import Delivery, EntryRef, Json, Receipt


@dataclass(frozen=True, slots=True)
class Head:
    """What a sink holds of one pipeline, read under one version.

    `epoch` 0 without an entry is a pipeline that has committed nothing here.
    """

    exists: bool
    version: int
    generation: int = 0
    epoch: int = 0
    entry: EntryRef | None = None
    checkpoint: Checkpoint | None = None
    committed: int | None = None  # the epoch that the log holds, where a committer commits; None: all of it
    repairs: tuple[str, ...] = ()  # damaged copies that another copy stood in for
    path: str = "fresh"  # where the checkpoint was read: local, remote (a tier), sink; fresh when there is none

    @property
    def attempt(self) -> str:
        """The attempt of the newest epoch: what the next one is planned on."""
        return self.checkpoint.attempt if self.checkpoint else ""


@dataclass(frozen=True, slots=True)
class EpochCommit:
    """Everything that one commit makes true."""

    checkpoint: Checkpoint
    entry: EntryRef
    previous: EntryRef | None
    files: list[dict[str, Json]]
    schema: pa.Schema
    previous_checkpoint: str = ""  # checksum of the checkpoint before
    source_state: Json = None  # the interchange form of the one file source
    facts: dict[str, Json] = field(default_factory=dict)  # for people who read the log
    kind: str = "epoch"  # or one of the ledger's JUMPS

    @property
    def rows(self) -> int:
        return sum(int(f["rows"]) for f in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(int(f["size_bytes"]) for f in self.files)


class Sink(ABC):
    """Where results become true. One instance serves one run of one pipeline; calls come from one thread."""

    delivery: ClassVar[Delivery]
    name: str
    required: bool

    @abstractmethod
    def load(self) -> Head:
        """Read what the sink holds; writes nothing.

        Raises:
            CheckpointLostError: it holds an epoch that no intact copy describes.
        """

    @abstractmethod
    def claim(
        self,
        run: str,
        generation: int | None = None,
        baseline: EntryRef | None = None,
        onto: int | None = None,
        *,
        again: bool = False,
    ) -> Head:
        """Claim a generation, conditionally on the version read, and return what stands under the claim.

        Without `generation` the next free one is taken (the deciding sink); with it, that one is registered
        unless the sink knows a newer one (every other sink). A sink that does not exist yet is claimed by the
        commit that creates it. `baseline` names the ledger entry of what another tool had committed, as read from
        version `onto`. With `again` the run has claimed before, and may only if nobody else has since.

        Raises:
            FencedError: the sink holds a newer generation, or, with `again`, that of another run.
            CommitConflictError: with a baseline: the table is no longer at the version `onto`.
        """

    @abstractmethod
    def commit(self, commit: EpochCommit) -> Receipt:
        """Make an epoch visible, atomically with its checkpoint.

        Called again with the same epoch after a crash; the repeat returns the first receipt and writes
        nothing. Requires, under the very version it commits onto, that the sink holds our generation and
        the entry before.

        Raises:
            FencedError: it does not; another run owns the pipeline.
            SchemaError: the table changed and the staged files no longer fit.
            CommitUnknownError: the answer was lost; ask `find_receipt`.
        """

    @abstractmethod
    def find_receipt(self, epoch: int) -> Receipt | None:
        """The receipt of an epoch, whoever committed it; None when the sink does not hold it."""

    @abstractmethod
    def find_schema(self) -> pa.Schema | None:
        """The columns that the sink has now; None before it exists."""

    @abstractmethod
    def stage_target(self) -> dict[str, Json]:
        """What a task needs to know to stage files here; plain JSON, since it travels to workers."""

    def is_full(self) -> tuple[int, int] | None:
        """Units and bytes that wait downstream when no more should be made now; None when there is room."""
        return None

    def settled_epoch(self) -> int | None:
        """The newest epoch that can no longer be set aside; None: every epoch that the sink holds."""
        return None

    def read_settled(self) -> int | None:
        """Read the log again and return what `settled_epoch` tells then.

        Raises:
            FencedError: another generation, or another chain than ours, holds the table.
        """
        return self.settled_epoch()

    @abstractmethod
    def maintain(self) -> None:
        """Housekeeping between commits; safe to skip, safe at every kill point."""
