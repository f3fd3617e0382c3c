"""Which points of a trace are names of one moment, and which of them are killed."""

from __future__ import annotations

from tests.support.kills import choose, moments

COMMIT = ["epoch.commit.before", "storage.put.before", "storage.put.after", "delta.commit.before", "delta.commit.after"]


def found(*points: str, helpers: bool = True) -> list[list[str]]:
    return [
        [f"{point}:{nth}" for point, nth in moment] for moment in moments([(1, p) for p in points], helpers=helpers)
    ]


def test_a_durable_call_parts_moments() -> None:
    assert found(*COMMIT, "epoch.commit.after") == [
        ["epoch.commit.before:1", "storage.put.before:1"],
        ["storage.put.after:1", "delta.commit.before:1"],
        ["delta.commit.after:1", "epoch.commit.after:1"],
    ]


def test_calls_are_counted() -> None:
    twice = ["stage.file.before", "stage.file.after"] * 2
    assert found(*twice) == [
        ["stage.file.before:1"],
        ["stage.file.after:1", "stage.file.before:2"],
        ["stage.file.after:2"],
    ]


def test_what_a_call_does_around_another_one_parts_moments() -> None:
    nested = ["follower.commit.before", "redis.range.before", "redis.range.after", "follower.commit.after"]
    assert found(*nested) == [[f"{point}:1"] for point in nested]


def test_a_call_of_storage_is_all_that_the_call_around_it_does() -> None:
    nested = ["spool.file.before", "storage.put.before", "storage.put.after", "spool.file.after"]
    assert found(*nested) == [[f"{point}:1" for point in nested[:2]], [f"{point}:1" for point in nested[2:]]]


def test_points_of_other_threads_part_moments() -> None:
    trace = [(1, "delta.sync.after"), (2, "spool.file.before"), (1, "delta.commit.before")]
    assert moments(trace, helpers=True) == [[(point, 1)] for _, point in trace]


def test_points_of_helpers_part_moments_only_if_asked_for() -> None:
    trace = ["delta.sync.after", "storage.folder.before", "storage.folder.after", "delta.commit.before"]
    assert found(*trace, helpers=False) == [["delta.sync.after:1", "delta.commit.before:1"]]
    assert len(found(*trace)) == 2


def test_every_wanted_moment_is_killed_once() -> None:
    trace = [(1, point) for point in COMMIT]
    wanted = {(point, 1) for point in COMMIT}
    chosen = choose(wanted, moments(trace, helpers=True), "sample")
    killed = [moment for moment in moments(trace, helpers=True) if set(moment) & set(chosen)]
    assert len(killed) == len(chosen) == 3


def test_a_sample_of_a_point_is_any_call_of_it() -> None:
    trace = [(1, point) for point in ["store.put.before", "store.put.after", "delta.jump.before", "store.put.before"]]
    all_moments = moments(trace, helpers=True)
    wanted = {("store.put.before", 1), ("delta.jump.before", 1)}
    assert choose(wanted, all_moments, "sample") == [("delta.jump.before", 1)]
    assert choose(wanted, all_moments, 2) == sorted(wanted)


def test_a_call_that_the_trace_lacks_is_killed() -> None:
    assert choose({("delta.sync.before", 7)}, [], "sample") == [("delta.sync.before", 7)]
