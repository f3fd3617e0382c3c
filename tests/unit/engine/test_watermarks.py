from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firnline.engine.watermarks import Watermark, Watermarks


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
