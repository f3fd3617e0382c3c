"""A fresh start of a captured source: it begins behind all that was spooled before, which an older run may delete."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from firnline.history.edits.fresh_start import start_over
from firnline.options import BatchOptions
from firnline.run.open_pipeline import open_pipeline
from tests.support.captured import ORDERS, captured, check_current, execute, position
from tests.support.pipelines import run_to_end, run_until_epoch


def test_spool_files_from_before_are_not_read_again(postgres: str, tmp_path: Path) -> None:
    """A run that slept, about to delete what no rollback needs, wakes up after the first epoch of the fresh start."""
    options = replace(captured(postgres, tmp_path), batch=BatchOptions(max_events=1))
    execute(postgres, ORDERS, "INSERT INTO orders VALUES (0, 0, 'first')")
    for number in (1, 2):
        run_to_end(options)
        execute(postgres, f"INSERT INTO orders VALUES ({number}, 1, 'before')")
    run_to_end(options)
    old, spooled = position(options), list(tmp_path.rglob("*.spool"))
    execute(postgres, "UPDATE orders SET note = 'meanwhile' WHERE id = 1")
    begun = start_over(open_pipeline(options), open_pipeline(options).load().epoch, "test", truncate=True)
    run_until_epoch(options, begun.epoch + 1)
    assert position(options).spool > old.spool, "numbers go on: the older run deletes by number"
    for path in spooled:
        path.unlink()
    execute(postgres, "INSERT INTO orders VALUES (3, 1, 'behind')")
    run_to_end(options)
    check_current(postgres, tmp_path)
    assert position(options).serial > old.serial
