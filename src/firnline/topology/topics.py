"""Channels that are Kafka topics: what the checkpoint topic of a sink says of snapshots and restores of a topology.

A topic carries no marker. The checkpoint record of a marker epoch m, written in the same transaction as the rows of m,
names the end of m in every partition: its cut. After a restore, the record names the offsets of the undone epochs,
which are void: members skip them. The record of every later epoch carries both on, until the snapshot is released.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import topic_channels, topic_channels_key
from firnline.options import template_columns
from firnline.storage import Storage
from firnline.topology import decide
from firnline.topology.records import Marker, held_records, markers_in
from firnline.types import Json

Partition = tuple[str, int]  # topic and number
Ranges = tuple[tuple[int, int], ...]  # of offsets, from the first up to, and without, the second; in order


def may_write(topic: str, allowed: str, name: str) -> bool:
    """Return whether a sink may write a topic of this name: it is the sink's, or its template renders such a name and
    `topics_allowed` does not forbid it."""
    if not template_columns(topic):
        return name == topic
    parts = re.split(r"\{[^{}]+\}", topic)
    is_rendered = re.fullmatch(".+".join(map(re.escape, parts)), name) is not None
    return is_rendered and (not allowed or re.fullmatch(allowed, name) is not None)


@dataclass(frozen=True, slots=True)
class TopicChannel:
    """A channel as its reader needs to know it: the topics of one sink, and where that sink keeps its checkpoints."""

    topic: str  # a name, or a template with {column}
    checkpoint_topic: str
    writer: str
    sink: str
    allowed: str = ""  # a pattern for rendered names; empty: any
    checkpoint_id: str = ""  # of the checkpoint topic when a command first saw it; empty: it was not there yet

    def covers(self, topic: str) -> bool:
        """Return whether the sink may write a topic."""
        return may_write(self.topic, self.allowed, topic)

    def to_json(self) -> dict[str, Json]:
        return {
            "topic": self.topic,
            "allowed": self.allowed,
            "checkpoint_topic": self.checkpoint_topic,
            "checkpoint_id": self.checkpoint_id,
            "writer": self.writer,
            "sink": self.sink,
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> TopicChannel:
        """Parse the output of `to_json`. Raises DamagedError."""
        try:
            names = ("topic", "checkpoint_topic", "writer", "sink")
            more = {name: str(value.get(name, "")) for name in ("allowed", "checkpoint_id")}
            return cls(*(str(value[name]) for name in names), **more)
        except (KeyError, TypeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a marker epoch, as one lane saw it or as all of them did. A partition without an end was empty."""

    marker: Marker
    epoch: int
    lanes: int  # over which the rows of the epoch were spread
    ends: Mapping[Partition, int]
    ids: Mapping[str, str] = field(default_factory=dict)  # of the topics; one that is left out is not known

    def ends_in(self, ids: Mapping[str, str]) -> dict[Partition, int]:
        """Return the ends in the topics that exist now, by their ids. One that was created again is left out: what it
        holds came after the epoch."""
        return {one: end for one, end in self.ends.items() if is_same_topic(self.ids, ids, one[0])}

    def to_json(self) -> dict[str, Json]:
        ids = {"ids": dict(sorted(self.ids.items()))} if self.ids else {}
        ends = _nested(self.ends)
        return {"marker": self.marker.to_json(), "epoch": self.epoch, "lanes": self.lanes, "ends": ends, **ids}

    @classmethod
    def from_json(cls, value: Json, what: str) -> Cut:
        return cls(
            Marker.from_json(value["marker"], what),
            int(value["epoch"]),
            int(value["lanes"]),
            {one: int(end) for one, end in _flat(value["ends"]).items()},
            _texts(value.get("ids", {})),
        )


@dataclass(frozen=True, slots=True)
class ChannelState:
    """The cuts of snapshots by their ids, and the void offsets of each partition."""

    cuts: Mapping[str, Cut] = field(default_factory=dict)
    void: Mapping[Partition, Ranges] = field(default_factory=dict)
    void_ids: Mapping[str, str] = field(default_factory=dict)  # of the topics that `void` names

    def after_epoch(
        self,
        remembered: Mapping[str, Json],
        epoch: int,
        lanes: int,
        ends: Mapping[Partition, int],
        ids: Mapping[str, str] | None = None,
    ) -> ChannelState:
        """Return the state once an epoch is written. `remembered` is what its checkpoint remembers of snapshots;
        `ends` is where it ends, if it is a marker epoch, in the topics with these `ids`."""
        kept = held_records(remembered)
        cuts = {name: cut for name, cut in self.cuts.items() if name in kept}
        for marker in markers_in(remembered, epoch):
            cuts[marker.snapshot] = Cut(marker, epoch, lanes, dict(ends), dict(ids or {}))
        return replace(self, cuts=cuts)

    def after_restore(
        self,
        to_epoch: int,
        since: Mapping[Partition, int],
        ends: Mapping[Partition, int],
        ids: Mapping[str, str] | None = None,
    ) -> ChannelState:
        """Return the state after a restore to an epoch that ends at `since`: what lies behind that is void.

        The cuts of undone epochs are gone with them. So is what was void in a topic that was created again.
        """
        cuts = {name: cut for name, cut in self.cuts.items() if cut.epoch <= to_epoch}
        void = self.void_in(ids or {})
        for partition, end in ends.items():
            start = since.get(partition, 0)
            if start < end:
                void[partition] = decide.merge_ranges([*void.get(partition, ()), (start, end)])
        known = {**self.void_ids, **(ids or {})}
        return ChannelState(cuts, void, {topic: known[topic] for topic, _ in void if topic in known})

    def void_in(self, ids: Mapping[str, str]) -> dict[Partition, Ranges]:
        """Return what is void in the topics that exist now, by their ids: offsets say nothing of a topic that was
        created again."""
        return {one: ranges for one, ranges in self.void.items() if is_same_topic(self.void_ids, ids, one[0])}

    def to_json(self) -> dict[str, Json]:
        ids = dict(sorted(self.void_ids.items()))
        return {
            "cuts": {name: cut.to_json() for name, cut in sorted(self.cuts.items())},
            "void": _nested({one: [list(pair) for pair in ranges] for one, ranges in self.void.items()}),
            **({"void_ids": ids} if ids else {}),
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> ChannelState:
        """Parse the output of `to_json`. Raises DamagedError."""
        try:
            return cls(
                {str(name): Cut.from_json(cut, what) for name, cut in value["cuts"].items()},
                {one: tuple((int(s), int(e)) for s, e in pairs) for one, pairs in _flat(value["void"]).items()},
                _texts(value.get("void_ids", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


def has_marker(remembered: Mapping[str, Json], epoch: int) -> bool:
    """Return whether an epoch records a snapshot, from what its checkpoint remembers."""
    return bool(markers_in(remembered, epoch))


def combine_lanes(lanes: Mapping[int, ChannelState]) -> ChannelState:
    """Return what the lanes of a sink say together: the cuts that every lane of the epoch holds, and what is void."""
    cuts: dict[str, Cut] = {}
    for name in {name for state in lanes.values() for name in state.cuts}:
        newest = max((state.cuts[name] for state in lanes.values() if name in state.cuts), key=lambda cut: cut.epoch)
        held = [lanes[number].cuts.get(name) if number in lanes else None for number in range(newest.lanes)]
        ends = decide.combine_ends(
            [cut.ends if cut is not None and cut.epoch == newest.epoch else None for cut in held]
        )
        if ends is not None:
            cuts[name] = replace(newest, ends=ends)
    void: dict[Partition, Ranges] = {}
    ids: dict[str, str] = {}
    for _, state in sorted(lanes.items()):  # a restore writes to lane 0: it knows best which topic of a name is meant
        ids = {**state.void_ids, **ids}
        for partition, ranges in state.void_in(ids).items():
            void[partition] = decide.merge_ranges([*void.get(partition, ()), *ranges])
    return ChannelState(cuts, void, ids)


def is_same_topic(then: Mapping[str, str], now: Mapping[str, str], topic: str) -> bool:
    """Return whether a topic is the one that it was: Kafka gives one that is created again another id. An id that is
    not known is no difference."""
    return not then.get(topic) or not now.get(topic) or then[topic] == now[topic]


def find_ends(cuts: Iterable[Cut], epoch: int, ids: Mapping[str, str]) -> dict[Partition, int] | None:
    """Return where an epoch ends in the topics that exist now, if it is a marker epoch whose cut is known."""
    return next((cut.ends_in(ids) for cut in cuts if cut.epoch == epoch), None)


def _nested(flat: Mapping[Partition, Json]) -> dict[str, dict[str, Json]]:
    found: dict[str, dict[str, Json]] = {}
    for (topic, number), value in sorted(flat.items()):
        found.setdefault(topic, {})[str(number)] = value
    return found


def _texts(value: Mapping[str, Json]) -> dict[str, str]:
    return {str(name): str(text) for name, text in value.items()}


def _flat(nested: Mapping[str, Mapping[str, Json]]) -> dict[Partition, Json]:
    return {(str(topic), int(number)): value for topic, of in nested.items() for number, value in of.items()}


# -- the channels in a reader's home --------------------------------------------------------------------


def put_channels(
    storage: Storage, pipeline: str, topology: str, home: str, channels: Mapping[str, Sequence[TopicChannel]]
) -> None:
    """Tell a member which topics that it reads are channels, by source: before any marker can be in them.

    A run reads this after it has asked for the ends of its topics: what it finds missing then is not below these ends.

    The id of a checkpoint topic stays as it was first seen: one that was created again knows nothing of what is void.
    """
    key = topic_channels_key(pipeline, topology, home)
    try:
        written: bytes | None = storage.get(key)
    except FileNotFoundError:
        written = None
    if written is None and not channels:
        return
    seen: dict[str, str] = {}
    with contextlib.suppress(DamagedError):  # it is written anew
        seen = {one.checkpoint_topic: one.checkpoint_id for one in _parse_channels(written, key)} if written else {}
    sources = {
        source: [
            replace(one, checkpoint_id=seen.get(one.checkpoint_topic) or one.checkpoint_id).to_json() for one in of
        ]
        for source, of in sorted(channels.items())
    }
    body = canonical(seal({"topology": topology, "home": home, "sources": sources}))
    if body == written:
        return
    fault_point("topology.channels.before")
    storage.put(key, body)
    fault_point("topology.channels.after")


def load_channels(storage: Storage, pipeline: str, source: str) -> list[TopicChannel]:
    """Return the channels that one source of a member reads, in any topology.

    Raises:
        DamagedError: a file cannot be read. It may name a channel.
    """
    found: dict[str, TopicChannel] = {}
    for stat in storage.list(topic_channels(pipeline)):
        name = stat.name.rsplit("/", 1)[-1]
        if name.startswith("."):
            continue
        key = f"{topic_channels(pipeline)}/{name}"
        try:
            channels = _parse_channels(storage.get(key), key, source)
        except FileNotFoundError:
            continue
        except DamagedError as error:
            error.hint = (
                f"It says which topics other members write. Write it again: firnline topology snapshot. Or delete "
                f"{storage.root}/{key}, if the pipeline is no longer a member of a topology."
            )
            raise
        for one in channels:
            known = found.get(one.checkpoint_topic)
            found[one.checkpoint_topic] = (
                replace(one, checkpoint_id=known.checkpoint_id) if known is not None and (known.checkpoint_id) else one
            )
    return list(found.values())


def _parse_channels(value: bytes, key: str, source: str | None = None) -> list[TopicChannel]:
    """Return the channels in a file: of one source, or of all. Raises DamagedError."""
    body = unseal(parse(value, key), key)
    try:
        found = [one for name, of in body["sources"].items() if source in (None, name) for one in of]
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{key} lacks {error}", what=key) from error
    return [TopicChannel.from_json(one, key) for one in found]
