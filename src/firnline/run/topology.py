"""A run's part in a topology: which snapshots its next epoch records, where its slices must end, and whether a restore
holds it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from firnline.errors import FencedError
from firnline.run.open_pipeline import OpenPipeline
from firnline.storage import Storage
from firnline.topology import decide
from firnline.topology.records import Marker, Outcomes, find_holds, held_records, load_asked
from firnline.topology.topics import TopicChannel, load_channels
from firnline.types import Clock, Json

logger = logging.getLogger(__name__)


def has_ended(restore: str) -> FencedError:
    """Return the error for a command whose restore another command has finished or withdrawn."""
    return FencedError(
        f"restore {restore} has ended: another command finished or withdrew it",
        hint="Nothing is left to do; `firnline topology show` has the epochs of the members.",
        restore=restore,
    )


def check_hold(pipeline: OpenPipeline, restore: str = "") -> None:
    """Stop under a claim if a restore of a topology holds the pipeline; `restore` is the one that acts now.

    Raises:
        FencedError: a restore holds it; or the one that acts holds it no longer: another command has finished it.
    """
    options = pipeline.options
    holds = find_holds(pipeline.storage, options.name, options.home.storage_options)
    blocking = decide.find_blocking((hold.restore for hold in holds), restore)
    if blocking is not None:
        hold = next(one for one in holds if one.restore == blocking)
        raise FencedError(
            f"restore {hold.restore} of topology {hold.topology!r} holds pipeline {options.name!r}",
            hint=hold.find_way_out(pipeline.storage, options.home.storage_options),
            restore=hold.restore,
        )
    if restore and not holds:
        raise has_ended(restore)


LOOK_SECONDS = 5.0  # between two looks at the outcomes of snapshots whose records hold the floor


@dataclass(slots=True)
class Taking:
    """The snapshots of one plan: `asked` are those that the member was asked to record, and has not."""

    storage: Storage
    me: str
    recorded: Mapping[str, Json]
    asked: list[Marker]
    outcomes: Outcomes

    def stops_at(self, marker: Marker) -> bool:
        """Return whether the member is still to record a snapshot: a slice ends at its marker."""
        is_new = marker.snapshot not in self.recorded and self.me in marker.members
        closed = is_new and self.outcomes.find(marker) is not None
        return decide.is_barrier(marker.snapshot, marker.members, self.me, self.recorded, closed=closed)

    def channels(self, source: str) -> list[TopicChannel]:
        """Return the topics of a source that other members write, as the home says now."""
        return load_channels(self.storage, self.me, source)

    def choose(self, reached: Iterable[Marker]) -> list[Marker]:
        """Return the markers of the epoch: of the snapshots asked for, and of those that its slices reach."""
        markers = {marker.snapshot: marker for marker in (*self.asked, *reached)}
        chosen = decide.choose_records(
            (marker.snapshot for marker in self.asked), (marker.snapshot for marker in reached), self.recorded
        )
        return [markers[name] for name in chosen]


class TopologySnapshots:
    """The requests in the home of one pipeline, and what became of the snapshots that it has recorded."""

    def __init__(self, storage: Storage, pipeline: str, storage_options: Mapping[str, str], clock: Clock) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._outcomes = Outcomes(storage_options)
        self._clock = clock
        self._looked_at = float("-inf")
        self._released: set[str] = set()
        self._alarmed: set[str] = set()  # snapshots that are held for too long, and were logged

    def look(self, recorded: Mapping[str, Json]) -> Taking:
        """Read the requests. `recorded` is what the base of the plan remembers."""
        taking = Taking(self._storage, self._pipeline, recorded, [], self._outcomes)
        asked = filter(taking.stops_at, load_asked(self._storage, self._pipeline))
        return replace(taking, asked=list(asked))

    def find_released(self, recorded: Mapping[str, Json]) -> set[str]:
        """Return the snapshots that no longer hold the floor; looks at their outcomes now and then."""
        now = self._clock.monotonic()
        held = held_records(recorded)
        if held and now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            for name, reason in self._outcomes.end_unattended(recorded, self._clock.now()).items():
                logger.warning("alarm: snapshot %s of a topology was %s", name, reason, extra={"snapshot": name})
            self._released |= {name for name in held if self._outcomes.is_released(name, recorded[name])}
            for one in self._outcomes.find_overdue(recorded, self._clock.now()):
                if one.snapshot not in self._alarmed:
                    self._alarmed.add(one.snapshot)
                    logger.warning("alarm: %s", one, extra={"snapshot": one.snapshot})
        return self._released & set(recorded)

    def find_settled(self, recorded: Mapping[str, Json]) -> set[str]:
        """Return the snapshots that are known to have an outcome: no reader stops at their markers any more."""
        return {name for name in recorded if self._outcomes.is_settled(name)}
