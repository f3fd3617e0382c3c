"""Markers in the commits of a part: what a checkpoint remembers, and which commits lie behind a record."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from firnline.names import INFO_KEY
from firnline.sources.delta.versions import Version, read_version
from firnline.topology.decide import find_part_end, is_behind
from firnline.topology.records import Marker, markers_before, markers_in, remember

MARKER = Marker("s", "lake", "home", ("a", "b"))


def test_a_checkpoint_keeps_the_marker_until_the_snapshot_has_an_outcome() -> None:
    record = remember({}, [MARKER], 5)
    assert (markers_in(record, 5), markers_before(record, 5)) == ((MARKER,), ())
    later = remember(record, [], 6)
    assert (markers_in(later, 6), markers_before(later, 6)) == ((), (MARKER,))
    assert markers_before(remember(later, [], 7, settled=["s"]), 7) == ()
    assert markers_before(remember(later, [], 7, released=["s"]), 7) == ()
    assert remember(later, [], 7, settled=["s"])["s"] == {"epoch": 5, "topology": "lake", "home": "home"}


def commit(epoch: int, remembered: dict[str, Any], **facts: Any) -> Version:
    info = {"kind": "epoch", "pipeline": "a", "epoch": epoch, "checkpoint": {"topology": remembered}, **facts}
    return read_version(3, [{"commitInfo": {"operation": "WRITE", INFO_KEY: json.dumps(info)}}])


def test_only_the_commits_of_a_part_lie_behind_a_marker_that_may_be_missing() -> None:
    record = remember({}, [MARKER], 5)
    later = remember(record, [], 6)
    assert (commit(5, record, part="eu").markers, commit(5, record, part="eu").passed) == ((MARKER,), ())
    assert (commit(6, later, part="eu").markers, commit(6, later, part="eu").passed) == ((), (MARKER,))
    assert commit(6, later).passed == (), "a table of its own has the commit of the record"
    assert commit(6, later, part="eu", kind="rollback").passed == ()
    assert commit(6, {"s": "damaged", "t": {"epoch": 2, "members": 1}}, part="eu").passed == ()


@given(st.sets(st.integers(1, 30)), st.integers(0, 30), st.integers(0, 30))
def test_the_end_of_a_record_is_the_newest_commit_that_is_not_behind_it(
    touched: set[int], record: int, held: int
) -> None:
    end = find_part_end(held, record, touched)
    if held < record:
        assert end is None, "the part may still get what it lacks"
        return
    assert end is not None
    assert end == 0 or (end in touched and not is_behind(record, end))
    assert all(is_behind(record, epoch) for epoch in touched if epoch > end)
