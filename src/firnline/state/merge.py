"""When runs of state are merged, which ones, and the merge itself.

Sizes are kept geometric. The newest runs are merged when there are four of them and none is larger than the others
together, so that a merge at least doubles the run that every row lies in: a row is rewritten O(log n) times, and a
large old run only when as much lies above it. Where sizes are such that too many runs would stay, the newest are
merged all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from firnline.state.columns import Layout
from firnline.state.home import StateHome
from firnline.state.lookup import SCAN_ROWS, combined
from firnline.state.refs import RunRef
from firnline.state.segments import RunWriter, open_runs

FAN_IN = 4
MOST_RUNS = 12


def plan_merge(sizes: Sequence[int], most: int = MOST_RUNS) -> slice | None:
    """Which runs to merge into one, given their rows, oldest first: a suffix of at least two, or None.

    Args:
        sizes: Rows of every run, oldest first.
        most: How many runs may stay.
    """
    total = sum(sizes)
    for start in range(len(sizes) - FAN_IN + 1):  # the longest suffix that is worth it
        if 2 * max(sizes[start:]) <= total:
            return slice(start, len(sizes))
        total -= sizes[start]
    if len(sizes) <= most:
        return None
    start = len(sizes) - 2
    total = sizes[start] + sizes[start + 1]
    while start and sizes[start - 1] <= total:
        start -= 1
        total += sizes[start]
    return slice(start, len(sizes))


def merge_runs(
    home: StateHome,
    refs: Sequence[RunRef],
    groups: tuple[int, int],
    prefix: str,
    *,
    operator: str,
    epoch: int,
    with_oldest: bool,
    layout: Layout | None = None,
    rows: int = SCAN_ROWS,
) -> RunRef | None:
    """Write one run that says of the key groups `[first, last)` what these runs say together.

    Memory is bounded by `rows`, however large the runs are. Rows of other key groups are left out: after a rescale
    several shards read parts of the same file.

    Args:
        home: Where the runs lie, and the new one.
        refs: Neighbouring runs of one shard, oldest first.
        groups: The key groups of the shard.
        prefix: The beginning of the new file's name.
        operator: Whose state it is.
        epoch: The epoch that merges.
        with_oldest: Whether the shard's oldest run is among them: then nothing older can be hidden, and removed keys
            are forgotten.
        layout: The columns of the new run; by default those of the newest one.
        rows: How many rows are read at a time.

    Returns:
        The new run, or None when nothing is left.
    """
    runs = open_runs(home, refs)
    layout = layout or runs[-1].layout
    writer = RunWriter(home.storage, prefix, layout, operator=operator, epoch=epoch)
    try:
        for table in combined(runs, groups, layout, keep_removed=not with_oldest, rows=rows):
            writer.write(table)
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def merge_due(
    home: StateHome,
    refs: Sequence[RunRef],
    groups: tuple[int, int],
    prefix: str,
    *,
    operator: str,
    epoch: int,
    layout: Layout | None = None,
) -> tuple[RunRef, ...]:
    """The runs of a shard after the merge that is due, if one is."""
    chosen = plan_merge([ref.rows for ref in refs])
    if chosen is None:
        return tuple(refs)
    merged = merge_runs(
        home,
        refs[chosen],
        groups,
        prefix,
        operator=operator,
        epoch=epoch,
        with_oldest=chosen.start == 0,
        layout=layout,
    )
    return (*refs[: chosen.start], *([merged] if merged is not None else []))
