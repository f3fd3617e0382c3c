"""Positions of captured sources: what an epoch makes of them."""

from __future__ import annotations

from firnline.sources.cdc.position import LogPosition, TableSnapshot
from firnline.sources.cdc.source import _after
from firnline.sources.cdc.spool import Mark, SpoolFile


def test_behind_a_gap_nothing_counts_that_a_snapshot_saw_before_it() -> None:
    whole = TableSnapshot("00000001-aaaaaaaa", chunks=1, done=True, sees="900:900:", high={"lsn": "F/0"})
    running = TableSnapshot("00000002-aaaaaaaa", after=["7"], chunks=3, rows=300)
    known = LogPosition("postgres", "x", {"lsn": "0/2"}, 3, {}, {"public.e": whole, "public.t": running}, ("w",))
    gap = SpoolFile("f", 4, Mark({"lsn": "0/1"}), 0, 0, "c", gap="restored from an older copy")
    after = _after(known, [{**gap.to_json(), "schemas": []}], {})
    assert after.left_out == {}
    again = after.snapshots["public.t"]
    assert (again.after, again.rows, again.again, again.chunks) == (None, 0, 1, 3)
    assert LogPosition.from_json(after.to_json(), "postgres") == after
