"""Positions and plans of the Kafka source, without a broker."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firnline.errors import DamagedError
from firnline.ndjson.values import join_values
from firnline.sources.kafka.config import KafkaSourceConfig
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.sources.kafka.planning import Bounds, find_gaps, share_tasks, skip_gaps, take
from firnline.sources.kafka.position import PartitionId, PartitionState, Position, Range, TopicState
from firnline.sources.kafka.reader import Checksum

A0, A1 = PartitionId("a", 0), PartitionId("a", 1)


def at(*nexts: int, topic_id: str = "id") -> Position:
    return Position("a", {"a": TopicState(topic_id, {n: PartitionState(at) for n, at in enumerate(nexts)})})


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=12), st.integers(0, 36))
def test_what_was_covered_is_never_unread_and_the_rest_is(pieces: list[tuple[int, int]], end: int) -> None:
    state = PartitionState(0)
    done: set[int] = set()
    for start, size in pieces:
        fresh = [n for n in range(start, start + size) if n not in done]
        state = state.cover(Range(n, n + 1, 1) for n in fresh)
        done.update(fresh)
    unread = {n for start, stop, _ in state.unread(end) for n in range(start, stop)}
    assert unread == set(range(end)) - done
    assert PartitionState.from_json(json.loads(json.dumps(state.to_json()))) == state


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 120), st.integers(1, 5), st.integers(1, 20))
def test_a_slice_is_within_its_limit_and_tasks_share_all_of_it(
    ends: list[int], most: int, parallelism: int, task_records: int
) -> None:
    position = at(*[0] * len(ends))
    slices = take(position, {PartitionId("a", n): Bounds(0, end) for n, end in enumerate(ends)}, most)
    total = sum(one.records for one in slices)
    assert total == min(most, sum(ends))
    parts = share_tasks(slices, parallelism, task_records)
    assert len(parts) <= parallelism
    taken = [(one.partition, n) for part in parts for one, r in part for n in range(r.start, r.end)]
    assert taken == [(one.partition, n) for one in slices for r in one.ranges for n in range(r.start, r.end)]
    if total:
        sizes = [sum(r.end - r.start for _, r in part) for part in parts]
        assert max(sizes) <= -(-total // len(parts)) + parallelism


def test_partitions_share_a_slice_evenly() -> None:
    slices = take(at(0, 0), {A0: Bounds(0, 3), A1: Bounds(0, 100)}, 20)
    assert [(one.partition, one.records) for one in slices] == [(A0, 3), (A1, 17)]


def test_gaps_are_named_and_passed() -> None:
    position, ids = at(5, 5), {"a": "id"}
    assert find_gaps(position, ids, {A0: Bounds(5, 9), A1: Bounds(0, 5)}) == []
    overtaken, short = find_gaps(position, ids, {A0: Bounds(7, 9), A1: Bounds(0, 3)})
    assert "offsets 5 to 6 were deleted" in str(overtaken)
    assert "read up to offset 5, and now ends at 3" in str(short)
    passed = skip_gaps(position, ids, [overtaken, short])
    assert [state.next for _, state in passed.partitions()] == [7, 3]
    again = find_gaps(position, {"a": "other"}, {A0: Bounds(0, 9), A1: Bounds(2, 9)})
    assert ["created again" in str(gap) for gap in again] == [True, True]
    passed = skip_gaps(position, {"a": "other"}, again)
    assert passed.topics["a"].id == "other"
    assert [state.next for _, state in passed.partitions()] == [0, 2]
    moved = position.moved("b", ["b"])
    (gone,) = find_gaps(moved, {"b": "id"}, {PartitionId("b", 0): Bounds(0, 9)})
    assert "no longer exists" in str(gone)


def test_a_partition_that_a_broker_does_not_know_for_a_moment_is_no_gap() -> None:
    """It would begin anew at its first record, under `on_gap: continue`."""
    position, ids = at(5, 5), {"a": "id"}
    assert find_gaps(position, ids, {A0: Bounds(0, 9)}) == []
    assert [one.partition for one in take(position, {A0: Bounds(0, 9)}, 100)] == [A0]


def test_retention_behind_what_was_read_ahead_is_no_loss_of_it() -> None:
    state = PartitionState(2, 1, (Range(4, 8, 1),))
    position = Position("a", {"a": TopicState("id", {0: state})})
    (gap,) = find_gaps(position, {"a": "id"}, {A0: Bounds(6, 12)})
    passed = skip_gaps(position, {"a": "id"}, [gap]).of(A0)
    assert passed is not None
    assert passed.unread(12) == [Range(8, 12, 1)]


@pytest.mark.parametrize("value", [{}, {"kafka": 2, "location": "a", "topics": {}}, {"kafka": 1}, None, [1]])
def test_a_damaged_position_is_named(value: object) -> None:
    with pytest.raises(DamagedError):
        Position.from_json(value)


@given(st.lists(st.binary(max_size=4), max_size=12), st.integers(1, 12))
def test_a_checksum_does_not_depend_on_batches(values: list[bytes], size: int) -> None:
    def checksum(step: int) -> str:
        total = Checksum()
        for start in range(0, len(values), step):
            part = values[start : start + step]
            lengths = np.array([len(value) for value in part], np.int64)
            total.add(np.arange(start, start + len(part)), lengths, b"\n".join(part))
        return str(total)

    assert checksum(size) == checksum(1)


@given(st.lists(st.sampled_from([b'{"a": 1}', b"", b" \n", b'{\n"a": 2}', b"x\ny", b"[1]"]), max_size=9))
def test_every_value_is_one_line_or_refused(values: list[bytes]) -> None:
    block = join_values(values, np.arange(10, 10 + len(values)))
    lines = bytes(block.data).split(b"\n") if block.data else []
    assert len(lines) + len(block.refused) == block.records == len(values)
    assert block.origins is not None
    raw = [block.origins.raw(index) for index in range(len(lines))]
    assert raw == [value for value in values if value.strip()]
    assert [one.raw for one in block.refused] == [value for value in values if not value.strip()]


def test_the_keys_of_a_spec() -> None:
    keys = {
        "brokers": ["a:1", "b:2"],
        "topics": ["t"],
        "tls": True,
        "client": {"fetch.max.bytes": 5},
        "sasl": {"username": "u", "password": "hidden"},
    }
    config = KafkaSourceConfig.model_validate(keys)
    options = config.build("s", lambda text, _: text)
    assert isinstance(options, KafkaSourceOptions)
    assert options.brokers == "a:1,b:2"
    assert options.security["security.protocol"] == "SASL_SSL"
    assert "hidden" not in repr(options)
    assert options.client == {"fetch.max.bytes": "5"}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"brokers": "nowhere"}, "is no broker"),
        ({"pattern": "x"}, "either topics or pattern"),
        ({"topics": ("a b",)}, "cannot be a topic name"),
        ({"start": "2024-05-01T12:00:00"}, "has no zone"),
        ({"start": "soon"}, "neither earliest"),
        ({"client": {"plugin.library.paths": "x.so"}}, "may not be set"),
        ({"client": {"ssl.key.password": "x"}}, "may not be set"),
        ({"sasl": {"mechanism": "OAUTHBEARER", "username": "u", "password": "p"}}, "token_url"),
        ({"pattern": "(", "topics": ()}, "no regular expression"),
    ],
)
def test_wrong_keys_are_named(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KafkaSourceConfig(**{"brokers": "a:1", "topics": ("t",), **keys})  # type: ignore[arg-type]
