from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firnline.jobs.watermarks import Watermark, Watermarks


def test_the_slowest_input_that_gave_rows_holds_it_back() -> None:
    mark = Watermark().advance({"a": 100}, 10)
    assert mark.at == 90
    mark = mark.advance({"a": 500, "b": 200}, 10)
    assert mark.at == 190


def test_without_rows_there_is_none() -> None:
    assert Watermark().advance({}, 10).at is None


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**15)), max_size=20), st.integers(0, 10**6))
def test_it_never_goes_back_and_survives_a_checkpoint(steps: list[dict[str, int]], delay: int) -> None:
    mark, reached = Watermark(), None
    for latest in steps:
        mark = mark.advance(latest, delay)
        assert reached is None or (mark.at is not None and mark.at >= reached)
        reached = mark.at
        stored = Watermarks().set("x", mark)
        assert Watermarks.from_json(stored.to_json()) == stored


def test_an_input_that_is_silent_for_long_enough_no_longer_holds_it_back() -> None:
    mark = Watermark().advance({"a": 100, "b": 50}, 0)
    for now, a, reached in ((1000, 200, 50), (1009, 300, 50), (1010, 400, 400)):
        mark = mark.note_silence({"b"}, (), now, run_began_us=0, idle_after_us=10).advance({"a": a}, 0)
        assert mark.at == reached
    assert mark.idle == {"b"}
    mark = mark.note_silence({"b"}, {"b"}, 1020, run_began_us=1015, idle_after_us=10)
    assert mark.idle == {"b"}, "idle until it speaks, also for another run and while its source does not answer"
    mark = mark.note_silence(set(), (), 1021, 0, 10).advance({"a": 500, "b": 60}, 0)
    assert (mark.at, mark.idle, mark.silent) == (400, frozenset(), {})
    assert mark.advance({"b": 450}, 0).at == 450


def test_only_silence_that_a_run_heard_counts() -> None:
    mark = Watermark({"a": 1, "b": 1}, 1).note_silence({"b"}, (), 100, run_began_us=0, idle_after_us=10)
    assert not mark.note_silence({"b"}, (), 1000, run_began_us=995, idle_after_us=10).idle
    assert not mark.note_silence({"b"}, {"b"}, 1000, run_began_us=0, idle_after_us=10).idle
    assert mark.note_silence({"b"}, (), 1005, run_began_us=995, idle_after_us=10).idle


def test_silence_survives_a_checkpoint_and_new_names() -> None:
    mark = Watermark({"a": 1, "b": 1}, 1).note_silence({"b"}, (), 100, 0, 0)
    stored = Watermarks().set("x", mark)
    assert Watermarks.from_json(stored.to_json()) == stored
    renamed = stored.renamed({"y": "x"}, {"y": {"a": "a", "c": "b"}}).of("y")
    assert renamed == Watermark({"a": 1, "c": 1}, 1, {"c": 100}, frozenset("c"))
