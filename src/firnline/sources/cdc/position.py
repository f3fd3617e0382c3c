"""The position of a source that captures changes: a place in the server's log, and the spool file that ends there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from firnline.errors import DamagedError
from firnline.sources.base import PositionView
from firnline.sources.cdc.spool import Mark
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Behind the last transaction of an epoch."""

    kind: str  # of the source
    location: str  # of the database, without credentials
    place: Json = None  # the server's place; None before the first transaction
    spool: int = 0  # the number of the last spool file that was read
    schemas: Mapping[str, str] = field(default_factory=dict)  # by table: fingerprint of the schema in force

    @property
    def mark(self) -> Mark:
        return Mark(self.place)

    def to_json(self) -> dict[str, Json]:
        return {
            "kind": self.kind,
            "location": self.location,
            "place": self.place,
            "spool": self.spool,
            "schemas": dict(self.schemas),
        }

    @classmethod
    def from_json(cls, value: Json, kind: str) -> LogPosition:
        """Read a position.

        Raises:
            DamagedError: it is not one of this kind of source.
        """
        if not isinstance(value, Mapping) or value.get("kind") != kind:
            raise DamagedError(f"the position is not one of a {kind} source")
        try:
            return cls(kind, str(value["location"]), value["place"], int(value["spool"]), dict(value["schemas"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"the position of a {kind} source cannot be read: {error}") from error

    def describe(self, facts: Mapping[str, Json]) -> PositionView:
        """Return the position for people; `facts` are those of the server's place."""
        return PositionView(facts={**facts, "tables": len(self.schemas)}, location=self.location)
