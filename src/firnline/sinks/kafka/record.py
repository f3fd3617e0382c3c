"""The records of a checkpoint topic: what one lane holds, and what the lanes hold together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from firnline.checkpoint.codec import canonical, parse, seal
from firnline.errors import DamagedError
from firnline.sinks.follower import FollowerHead, unseal_head
from firnline.topology.topics import ChannelState

KEY = b"head"  # of every record: compaction keeps the newest one of each partition


@dataclass(frozen=True, slots=True)
class LaneRecord:
    """What one lane holds. Its epoch is complete when all lanes below `lanes` hold it."""

    lanes: int  # over which the rows of its epoch are spread
    head: FollowerHead
    channel: ChannelState = field(default_factory=ChannelState)  # for members of a topology that read the topics

    def to_bytes(self) -> bytes:
        """Return the value of the record."""
        channel = {"channel": self.channel.to_json()} if self.channel != ChannelState() else {}
        return canonical(seal({"lanes": self.lanes, "head": self.head.to_json(), **channel}))

    @classmethod
    def parse(cls, value: bytes, what: str) -> LaneRecord:
        """Parse the value of a record.

        Raises:
            DamagedError: it is invalid.
            NewerFormatError: a newer Firnline wrote it.
        """
        body = unseal_head(parse(value, what), what)
        try:
            channel = ChannelState.from_json(body["channel"], what) if "channel" in body else ChannelState()
            return cls(int(body["lanes"]), FollowerHead.from_json(body["head"], what), channel)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


def combine(records: Mapping[int, LaneRecord | None], what: str) -> FollowerHead | None:
    """Return the head of the whole sink: the newest epoch that every lane of that epoch holds. None: it has none.

    No lane begins an epoch before all lanes of it hold the epoch before. So the lanes that lack the newest epoch agree.

    Raises:
        DamagedError: they do not.
    """
    known = {lane: record for lane, record in records.items() if record is not None}
    if not known:
        return None
    newest_lane = max(known, key=lambda lane: (known[lane].head.epoch, -lane))
    newest = known[newest_lane]
    claim = max((record.head for record in known.values()), key=lambda head: head.generation)
    lacking = [lane for lane in range(newest.lanes) if not _is_at(known.get(lane), newest.head)]
    head = newest.head
    if lacking:
        before = known.get(lacking[0])
        if before is None or not all(_is_at(known.get(lane), before.head) for lane in lacking):
            raise DamagedError(f"the lanes of {what} hold different epochs", what=what)
        head = replace(before.head, partial=newest.head.entry, row=0)
    else:
        begun = [one.head for one in known.values() if _is_at(one, head) and one.head.partial is not None]
        if begun:
            row = begun[0].row if newest.lanes == 1 else 0  # each lane goes on from its own row
            head = replace(head, partial=begun[0].partial, row=row)
    return replace(head, generation=claim.generation, run=claim.run)


def _is_at(record: LaneRecord | None, head: FollowerHead) -> bool:
    return record is not None and (record.head.epoch, record.head.entry) == (head.epoch, head.entry)
