"""References to state: immutable files with their size and checksum."""

from __future__ import annotations

from dataclasses import dataclass, field

from firnline.errors import DamagedError
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """One immutable Arrow file of state.

    `path` is relative to the home of the pipeline's state, so it reads the same in every tier. The file holds keys of
    the groups `first_group` to `last_group`; a shard that owns some of them reads only those.
    """

    path: str
    size_bytes: int
    crc32: int
    rows: int
    first_group: int
    last_group: int
    epoch: int

    def to_json(self) -> dict[str, Json]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: Json) -> SegmentRef:
        """Parse the output of `to_json`. Raises DamagedError if it is invalid."""
        try:
            numbers = {name: int(value[name]) for name in cls.__dataclass_fields__ if name != "path"}
            return cls(path=str(value["path"]), **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"a reference to state lacks {error}") from error


@dataclass(frozen=True, slots=True)
class TimerRef:
    """A timer file, sorted by due time, and the event time up to which its timers have fired."""

    segment: SegmentRef
    fired_until: int | None = None

    def to_json(self) -> dict[str, Json]:
        return {"run": self.segment.to_json(), "fired_until": self.fired_until}

    @classmethod
    def from_json(cls, value: Json) -> TimerRef:
        """Parse the output of `to_json`."""
        fired = value["fired_until"]
        return cls(SegmentRef.from_json(value["run"]), None if fired is None else int(fired))


@dataclass(frozen=True, slots=True)
class ShardState:
    """The state of one operator in one shard: its files, oldest first (a newer one overrides older ones)."""

    segments: tuple[SegmentRef, ...] = ()
    timers: tuple[TimerRef, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(r.size_bytes for r in self.files)

    @property
    def files(self) -> tuple[SegmentRef, ...]:
        return (*self.segments, *(t.segment for t in self.timers))

    def to_json(self) -> dict[str, Json]:
        return {"runs": [r.to_json() for r in self.segments], "timers": [t.to_json() for t in self.timers]}

    @classmethod
    def from_json(cls, value: Json) -> ShardState:
        """Parse the output of `to_json`."""
        return cls(
            tuple(SegmentRef.from_json(r) for r in value["runs"]), tuple(TimerRef.from_json(t) for t in value["timers"])
        )


@dataclass(frozen=True, slots=True)
class OperatorState:
    """The state of one operator: per shard its key groups `[first, last)` and its files."""

    epoch: int  # the epoch of this state; 0: empty
    shards: tuple[tuple[int, int, ShardState], ...] = field(default=())

    def to_json(self) -> dict[str, Json]:
        return {"epoch": self.epoch, "shards": [[a, b, state.to_json()] for a, b, state in self.shards]}

    @classmethod
    def from_json(cls, value: Json) -> OperatorState:
        """Parse the output of `to_json`."""
        shards = tuple((int(a), int(b), ShardState.from_json(state)) for a, b, state in value["shards"])
        return cls(int(value["epoch"]), shards)
