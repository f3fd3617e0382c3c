"""The status of inputs of a source that has no tracker of its own."""

from __future__ import annotations

from firnline.sources.base import InputTracker


def test_an_input_that_many_epochs_read_has_one_status() -> None:
    """The ledger's records come newest first: the first one of an input counts."""
    tracker = InputTracker()
    records = [{"path": "app.log", "from": n * 10, "to": n * 10 + 10, "status": "committed"} for n in (3, 2, 1)]
    records.insert(2, {"path": "other.log", "from": 0, "to": 5, "status": "committed"})
    records.insert(0, {"path": "app.log", "from": 40, "to": 40, "status": "pending"})
    found = [status for record in records if (status := tracker.add(record)) is not None]
    assert [(status.record["path"], status.record["to"]) for status in found] == [("app.log", 40), ("other.log", 5)]
