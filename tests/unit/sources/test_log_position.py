"""Positions of captured sources: what an epoch makes of them."""

from __future__ import annotations

from firnline.sources.cdc.chunks import ChunkFile
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


def test_a_chunk_behind_one_that_is_read_again_does_not_count() -> None:
    """The later one may see what the earlier one does not; rows between them would be lost."""
    running = TableSnapshot("00000001-aaaaaaaa", after=["100"], order=["id"], identity="7", chunks=1, rows=100)
    known = LogPosition("postgres", "x", {"lsn": "0/2"}, 3, {}, {"public.t": running}, ("w",))
    chunks = [
        ChunkFile(
            f"c{number}", "public.t", running.id, number, 0, ("id",), [f"{number}00"], False, "9:9:", {}, 100, 0, ""
        )
        for number in (2, 3)
    ]
    records = [
        {**chunk.to_json(), "schemas": [], "seen": 0, "again": again}
        for chunk, again in zip(chunks, ("the table was changed meanwhile", ""), strict=True)
    ]
    after = _after(known, records, {}).snapshots["public.t"]
    assert (after.after, after.chunks, after.again, after.done) == (["100"], 1, 1, False)
    assert TableSnapshot.from_json(after.to_json()) == after
