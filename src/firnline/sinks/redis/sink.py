"""The Redis sink: one script per range of at most 1,000 rows writes the rows and moves the head.

Several scripts are under way at once. Each requires the head that the one before it leaves, so if one fails, those
behind it write nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pyarrow as pa

from firnline.checkpoint.codec import parse
from firnline.errors import CommitConflictError, ConfigError, FencedError, SinkError
from firnline.faults import fault_point
from firnline.sinks.base import Capabilities, SinkContext
from firnline.sinks.dead_letters import DeadLetter
from firnline.sinks.encoding import encode_rows
from firnline.sinks.follower import EpochDelivery, Follower, FollowerHead
from firnline.sinks.redis.client import RedisClient, ScriptLostError
from firnline.sinks.redis.encode import Range, encode, keep_together
from firnline.sinks.redis.options import (
    RedisAddress,
    RedisShape,
    RedisSinkOptions,
    find_problem,
    head_key,
    owner_key,
)
from firnline.sinks.redis.script import NOTHING, Names, pack_call
from firnline.sinks.shaping import ShapedRows
from firnline.types import Delivery, Json

RANGE_ROWS = 1000
IN_FLIGHT = 4  # scripts that are sent before the first is answered


@dataclass(frozen=True, slots=True)
class _Sent:
    """A script that is not answered yet."""

    new: FollowerHead
    rows: ShapedRows | None = None
    first: int = 0  # the place of the script's first row in `rows`

    @property
    def next_id(self) -> str:
        """The id of the first entry in a stream."""
        entry = self.new.partial or self.new.entry
        assert self.rows is not None
        assert entry is not None
        return f"{entry.epoch}-{self.rows.numbers[self.first].as_py()}"


class _BadRowsError(Exception):
    """Rows that Redis cannot hold. `head` is where the delivery stands without them."""

    def __init__(self, head: FollowerHead, letters: list[DeadLetter]) -> None:
        super().__init__()
        self.head, self.letters = head, letters


class RedisSink(Follower):
    """A stream, or one hash or string per key. See `firnline.sinks.redis.script` for what a range does."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        Delivery.EXACTLY_ONCE_PER_PART, fed_from_outbox=True, has_columns=False
    )

    def __init__(self, options: RedisSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        self.capabilities = replace(type(self).capabilities, upserts=options.mode != "stream")  # type: ignore[misc]
        if (options.mode == "stream") != (options.write == "append"):
            raise ConfigError(
                f"sink {self.name!r}: mode: {options.mode} with write: {options.write}",
                hint="A stream is appended to; hashes and strings need `write: upsert`.",
            )
        if options.mode != "stream" and not options.key:
            raise ConfigError(f"sink {self.name!r}: nothing says what identifies a row", hint="Add `key: [...]`.")
        problem = find_problem(options.mode, options.stream, options.keys, options.key)
        if problem is not None:
            raise ConfigError(f"sink {self.name!r}: {problem[0]}: {problem[1]}")
        self._shape = RedisShape.of(options)
        self._durability = options.durability
        self._head_key = head_key(context.pipeline, self.head_name, options.stream)
        self._client = RedisClient(
            self.name,
            RedisAddress.parse(options.url),
            self._head_key,
            require_log=options.durability == "require_aof",
            timeout_secs=options.timeout_secs,
        )

    def keeps_old(self, own: Mapping[str, Json]) -> bool:
        return RedisShape.from_json(own).keeps_old

    def moves(self, own: Mapping[str, Json]) -> bool:
        return self.keeps_old(own)

    # -- what is promised -----------------------------------------------------------------------------

    def check(self) -> None:
        self._client.check_promises()
        self._check_target()
        self.read_head()

    def find_caveats(self) -> list[str]:
        if self._durability == "require_aof":
            return super().find_caveats()
        return [
            *super().find_caveats(),
            f"sink {self.name} has durability: none: a Redis server that crashes may forget rows that it has "
            "acknowledged; a run then says that the sink went back",
        ]

    def _check_target(self) -> None:
        if self._shape.mode == "stream":
            kind = self._client.call("TYPE", self._shape.target).decode()
            if kind not in ("none", "stream"):
                raise self._wrong_type(kind)
        owner = self._client.call("GET", owner_key(self._shape.target))
        if owner is not None and owner.decode() != self._names(self._shape).owned_by:
            raise self._owned(owner.decode())

    # -- the head -------------------------------------------------------------------------------------

    def read_head(self) -> FollowerHead | None:
        record = self._client.call("HGET", self._head_key, "record")
        if record is None:
            return None
        what = f"the head of sink {self.name!r} in {self._head_key}"
        head = FollowerHead.from_json(parse(record, what), what)
        assert self._client.server is not None
        if self._generation and self._client.server.waits_for_log:
            self._swap(head, head)  # its writer may have died before it was durable
        return head

    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        self._client.check_promises()
        self._swap(expected, new)

    def _swap(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        try:
            self._swap_once(expected, new)
        except ScriptLostError:
            self._swap_once(expected, new)

    def _swap_once(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        self._client.connect()
        self._client.send(pack_call(self._client.sha, self._names(self._shape), "head", expected, new))
        self._check_answer(self._client.receive(), _Sent(new))
        self._client.wait_for_log()

    def _names(self, shape: RedisShape) -> Names:
        owned_by = f"{self.context.pipeline}/{self.head_name}"
        return Names(self._head_key, owner_key(shape.target), shape.target, owned_by)

    # -- delivery -------------------------------------------------------------------------------------

    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        self._client.check_promises()
        shape = RedisShape.from_json(delivery.shape)
        while True:
            try:
                return self._deliver(delivery, shape)
            except _BadRowsError as bad:
                delivery.refuse(bad.letters)
                delivery = replace(delivery.without(bad.letters), head=bad.head)
            except ScriptLostError:
                head = self.read_head()
                if head is None or head.generation < delivery.head.generation:
                    raise self._went_back(head) from None
                if head.generation > delivery.head.generation:
                    raise FencedError(f"another run took sink {self.name!r} over") from None
                if head == delivery.final_head:
                    return head
                delivery = replace(delivery, head=head)

    def _deliver(self, delivery: EpochDelivery, shape: RedisShape) -> FollowerHead:
        """Send the rows from the head on in ranges; return the final head."""
        total, sent, held = delivery.rows.rows, deque[_Sent](), delivery.head
        head = held  # once all that is sent is done
        try:
            for shaped in keep_together(delivery.rows.read(delivery.first_row, RANGE_ROWS)):
                encoded = encode(shaped, shape, delivery.rows)
                bad = encoded.find_bad()
                if bad:
                    held = self._receive_all(sent, held)
                    raise _BadRowsError(held, _letters(shaped, bad))
                for part in encoded.ranges():
                    new = delivery.partial_head(part.end) if part.end < total else delivery.final_head
                    self._send(shape, head, new, part)
                    sent.append(_Sent(new, shaped, part.first))
                    head = new
                    if len(sent) >= IN_FLIGHT:
                        held = self._receive(sent, held)
            if head != delivery.final_head:  # no rows at all, or none after the last range
                self._send(shape, head, delivery.final_head)
                sent.append(_Sent(delivery.final_head))
            held = self._receive_all(sent, held)
            self._client.wait_for_log()
        except BaseException:
            if sent:  # answers that nobody reads would be taken for those of the next call
                self._client.close()
            raise
        return held

    def _send(self, shape: RedisShape, expected: FollowerHead, new: FollowerHead, part: Range | None = None) -> None:
        keys, rows = (part.keys, part.rows) if part is not None else (NOTHING, NOTHING)
        mode = shape.mode if part is not None else "head"
        self._client.connect()
        call = pack_call(self._client.sha, self._names(shape), mode, expected, new, keys, rows, shape.maxlen)
        fault_point("redis.range.before")
        self._client.send(call)

    def _receive(self, sent: deque[_Sent], held: FollowerHead) -> FollowerHead:
        """Read the oldest answer; return the head that it leaves."""
        oldest = sent[0]
        try:
            self._check_answer(self._client.receive(), oldest, held)
        finally:
            sent.popleft()
        fault_point("redis.range.after")
        return oldest.new

    def _receive_all(self, sent: deque[_Sent], held: FollowerHead) -> FollowerHead:
        while sent:
            held = self._receive(sent, held)
        return held

    def _check_answer(self, answer: list[bytes], sent: _Sent, held: FollowerHead | None = None) -> None:
        """Raise the error for an answer of the script other than `done`.

        Raises:
            FencedError: another generation holds the sink.
            CommitConflictError: the head is another one; nothing was written.
            SinkError: the target is not what it should be; nothing was written.
            _BadRowsError: keys of rows have another type.
        """
        status = answer[0].decode()
        if status == "done":
            return
        if status == "bad":
            assert sent.rows is not None
            assert held is not None
            places = {
                sent.first + int(place): kind.decode() for place, kind in zip(answer[1::2], answer[2::2], strict=True)
            }
            wanted = self._shape.mode
            reasons = {place: f"its key holds a {kind}, not a {wanted}" for place, kind in places.items()}
            raise _BadRowsError(held, _letters(sent.rows, reasons))
        if status == "type":
            raise self._wrong_type(answer[1].decode())
        if status == "owner":
            raise self._owned(answer[1].decode())
        if status == "ids":
            raise SinkError(
                f"sink {self.name!r}: the stream {self._shape.target!r} ends with id {answer[1].decode()}, not below "
                f"the next id, {sent.next_id}: somebody else has written to it",
                hint="Name another stream, or remove the entries that are not Firnline's (DEL, or XSETID).",
                sink=self.name,
            )
        raise self._other_head(sent.new)

    def _other_head(self, new: FollowerHead) -> SinkError | FencedError:
        """Return the error for a head that is not the expected one."""
        self._client.close()  # answers of later calls may be under way
        head = self.read_head()
        if head is not None and head.generation > new.generation:
            return FencedError(f"generation {head.generation} took sink {self.name!r} over", generation=head.generation)
        return CommitConflictError(f"sink {self.name!r} holds another head than expected; nothing was written")

    def _wrong_type(self, kind: str) -> SinkError:
        return SinkError(
            f"sink {self.name!r}: the key {self._shape.target!r} holds a {kind}, not a stream",
            hint="Name another stream.",
            sink=self.name,
        )

    def _owned(self, owner: str) -> SinkError:
        return SinkError(
            f"sink {self.name!r}: {self._shape.target!r} belongs to sink {owner}",
            hint=f"Name another target; if that sink is gone for good: redis-cli DEL '{owner_key(self._shape.target)}'",
            sink=self.name,
        )


def _letters(shaped: ShapedRows, reasons: dict[int, str]) -> list[DeadLetter]:
    """Return rows of a batch as dead letters."""
    places = pa.array(sorted(reasons), pa.int64())
    rows = encode_rows(shaped.batch.take(places)).to_pylist()
    return [
        DeadLetter(shaped.numbers[place].as_py(), reasons[place], parse(row.encode(), "a row"))
        for place, row in zip(places.to_pylist(), rows, strict=True)
    ]
