"""The members and channels of a topology as they are now: epochs, rates, lag, and what stands against a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from firnline.errors import FirnlineError
from firnline.history.topology.graph import Channel, Topology
from firnline.history.trend import load_trend
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.types import Json

RATE_HOURS = 1  # the rate of a member is the mean over so many hours


@dataclass(frozen=True, slots=True)
class MemberView:
    """One pipeline: its newest epoch, and how fast it writes."""

    name: str
    epoch: int | None  # None: it cannot be read
    committed_at: str | None
    rows_per_second: float | None
    error: str | None = None

    def to_json(self) -> dict[str, Json]:
        return {
            "name": self.name,
            "epoch": self.epoch,
            "committed_at": self.committed_at,
            "rows_per_second": self.rows_per_second,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class ChannelView:
    """One channel: what its reader has still to read."""

    channel: Channel
    epoch: int | None  # the newest epoch that the sink of the writer holds
    files_behind: int | None  # None: unknown
    bytes_behind: int | None
    error: str | None = None

    def to_json(self) -> dict[str, Json]:
        return {
            **self.channel.to_json(),
            "epoch": self.epoch,
            "files_behind": self.files_behind,
            "bytes_behind": self.bytes_behind,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class TopologyView:
    """A topology as it is now."""

    members: list[MemberView]
    channels: list[ChannelView]


def show_topology(name: str, topology: Topology, view: TopologyView) -> dict[str, Json]:
    """Return the fields that commands and the service show; `name` is empty if no file names the members."""
    return {
        "topology": name,
        "members": [member.to_json() for member in view.members],
        "channels": [channel.to_json() for channel in view.channels],
        "cycles": [list(cycle) for cycle in topology.cycles],
        "outside": topology.outside,
        "conflicts": [
            {"place": one.place, "writers": [{"pipeline": p, "sink": s} for p, s in one.writers]}
            for one in topology.conflicts
        ],
    }


def load_view(topology: Topology, now: datetime) -> TopologyView:
    """Read every member. One that cannot be read is shown with the reason."""
    opened = {name: open_pipeline(options) for name, options in topology.members.items()}
    members = [_view_member(pipeline, now) for pipeline in opened.values()]
    return TopologyView(members, [_view_channel(channel, opened) for channel in topology.channels])


def _view_member(pipeline: OpenPipeline, now: datetime) -> MemberView:
    name = pipeline.options.name
    try:
        head = pipeline.load()
        points = load_trend(pipeline.storage, name, now, days=1).points
    except (FirnlineError, OSError) as error:
        return MemberView(name, None, None, None, str(error))
    recent = [point for point in points if (now - point.start).total_seconds() < RATE_HOURS * 3600]
    rate = round(sum(point.bucket.rows for point in recent) / (RATE_HOURS * 3600), 1) if points else None
    return MemberView(name, head.epoch, head.checkpoint.created_at if head.checkpoint else None, rate)


def _view_channel(channel: Channel, opened: dict[str, OpenPipeline]) -> ChannelView:
    reader, writer = opened[channel.reader], opened[channel.writer]
    epoch = None
    try:
        epoch = writer.sink(channel.sink).read_fence().epoch
        head = reader.load()
        positions = reader.sources.start(head.checkpoint.positions if head.checkpoint else {})
        backlog = reader.sources[channel.source].backlog(positions[channel.source])
    except (FirnlineError, OSError) as error:
        return ChannelView(channel, epoch, None, None, str(error))
    return ChannelView(channel, epoch, backlog.files_outstanding, backlog.bytes_outstanding)
