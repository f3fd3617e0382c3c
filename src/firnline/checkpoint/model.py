"""The checkpoint: State + Position after an epoch, and its durable form."""

from __future__ import annotations

from dataclasses import dataclass, field

from firnline.checkpoint.codec import seal, unseal
from firnline.errors import DamagedError
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a pipeline after an epoch. A checkpoint with only positions or only state is refused.

    `floor` is the oldest epoch that a rollback may still reach, no newer than any sink's head. `shards` is the number
    of shards for the next run, if a rescale continued from snapshots that lack epochs; 0: as in the snapshots.
    `deciding` names the deciding sink (`sink`) and the id of its Delta table (`table`, omitted before it exists).
    """

    pipeline: str
    epoch: int
    generation: int
    run: str
    attempt: str
    created_at: str
    positions: dict[str, Json]
    state: dict[str, Json] = field(default_factory=dict)  # operator -> snapshot references
    watermarks: dict[str, Json] = field(default_factory=dict)
    columns: dict[str, Json] = field(default_factory=dict)  # of source ports whose columns the deciding table lacks
    schema_fingerprint: str = ""
    schema_version: int = 0
    floor: int = 0
    shards: int = 0
    deciding: dict[str, Json] = field(default_factory=dict)
    sinks: dict[str, Json] = field(default_factory=dict)  # what it remembers of followers, see `sinks.known`
    topology: dict[str, Json] = field(default_factory=dict)  # snapshots that it has recorded, see `topology.records`

    def to_json(self) -> dict[str, Json]:
        """Return the sealed form, with format number and checksum."""
        return seal(
            {
                "pipeline": self.pipeline,
                "epoch": self.epoch,
                "generation": self.generation,
                "run": self.run,
                "attempt": self.attempt,
                "created_at": self.created_at,
                "positions": self.positions,
                "state": self.state,
                "watermarks": self.watermarks,
                "schema": {"fingerprint": self.schema_fingerprint, "version": self.schema_version},
                "floor": self.floor,
                **({"columns": self.columns} if self.columns else {}),
                **({"shards": self.shards} if self.shards else {}),
                **({"deciding": self.deciding} if self.deciding else {}),
                **({"sinks": self.sinks} if self.sinks else {}),
                **({"topology": self.topology} if self.topology else {}),
            }
        )

    @property
    def checksum(self) -> str:
        """The checksum of the sealed form."""
        return str(self.to_json()["checksum"])

    @classmethod
    def from_json(cls, value: Json, what: str = "checkpoint") -> Checkpoint:
        """Parse the sealed form.

        Raises:
            DamagedError: the checksum is wrong, or a half is missing.
            NewerFormatError: a newer Firnline wrote it.
        """
        body = unseal(value, what)
        for half in ("positions", "state"):
            if not isinstance(body.get(half), dict):
                raise DamagedError(f"{what} has no {half}: half a checkpoint is none", what=what)
        try:
            return cls(
                pipeline=str(body["pipeline"]),
                epoch=int(body["epoch"]),
                generation=int(body["generation"]),
                run=str(body["run"]),
                attempt=str(body["attempt"]),
                created_at=str(body["created_at"]),
                positions=body["positions"],
                state=body["state"],
                watermarks=body.get("watermarks", {}),
                columns=body.get("columns", {}),
                schema_fingerprint=str(body["schema"]["fingerprint"]),
                schema_version=int(body["schema"]["version"]),
                floor=int(body["floor"]),
                shards=int(body.get("shards", 0)),
                deciding=body.get("deciding", {}),
                sinks=body.get("sinks", {}),
                topology=body.get("topology", {}),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error
