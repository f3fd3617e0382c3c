"""Reads where the log stands for a pipeline, under the version that a table handle is at."""

from __future__ import annotations

from firnline.sinks.delta.table import Table
from firnline.sinks.staged.chain import Standing


def read_standing(table: Table, pipeline: str) -> Standing:
    """Epoch, entry, generation and adopted tip, all from one snapshot."""
    tip_epoch = table.txn(f"firnline-tip-epoch:{pipeline}") or 0
    return Standing(
        epoch=table.txn(f"firnline:{pipeline}") or 0,
        entry=table.txn(f"firnline-entry:{pipeline}"),
        generation=table.txn(f"firnline-gen:{pipeline}") or 0,
        tip_epoch=tip_epoch,
        tip=table.txn(f"firnline-tip:{pipeline}") if tip_epoch else None,
    )
