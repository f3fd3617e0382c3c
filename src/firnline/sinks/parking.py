"""Parked rows: those of an optional sink whose stager failed, kept in the outbox in a form of our own.

If the stager of an optional sink fails in a worker, the run repeats the epoch without it: tasks write the rows for that
sink as Arrow files into the outbox. The sink's lane later hands them to the stager again, in the driver, and commits
what it stages. The epoch waits for none of this.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence

from firnline.faults import fault_point
from firnline.names import parked_name
from firnline.sinks.base import Sink
from firnline.sinks.outbox_rows import OpenFile, OutboxStager, read_outbox
from firnline.sinks.registry import PARKED, open_stager
from firnline.storage import Storage
from firnline.types import Json

SHAPE = "shape"  # of a target, and of a parked file in the ledger: see `Sink.stage_target`
MOST_DELIVERIES = 1024


class ParkingStager(OutboxStager):
    """Parks the rows of one task for an optional sink. `target` comes from `parked_target`."""

    def __init__(self, target: dict[str, Json], attempt: str) -> None:
        super().__init__(target, attempt)
        self._shape = target[SHAPE]

    def _name(self) -> str:
        return parked_name(self._attempt, uuid.uuid4().hex)

    def _describe(self, file: OpenFile) -> dict[str, Json]:
        return {**super()._describe(file), PARKED: True, SHAPE: self._shape}


def parked_target(
    sink: str, partition_by: Sequence[str], outbox: dict[str, Json], shape: dict[str, Json] | None
) -> dict[str, Json]:
    """Describe to tasks where to park the rows for a sink. `outbox` has root, storage options and folder; `shape` is
    that of the sink's own target, None if it is not known."""
    return {"type": PARKED, "sink": sink, "partition_by": list(partition_by), "outbox": outbox, SHAPE: shape}


def is_parked(files: Sequence[dict[str, Json]]) -> bool:
    """Return whether files of a ledger entry are parked rows. All files of one epoch and sink are, or none."""
    return any(PARKED in file for file in files)


def restage(sink: Sink, outbox: Storage, files: Sequence[dict[str, Json]], attempt: str) -> list[dict[str, Json]]:
    """Hand parked rows to the sink's stager, with the settings that their epoch was made with; return what it staged.

    After a crash it is called again, and stages other files: nothing names the first ones.

    Raises:
        SinkError: the stager fails again.
        DamagedError: a parked file is missing, or differs from what was written.
    """
    target, shape = sink.stage_target(), files[0].get(SHAPE)
    stager = open_stager({**target, SHAPE: shape} if shape is not None else target, attempt)
    try:
        for batch in read_outbox(outbox, files):
            stager.write(batch)
        fault_point("outbox.restage.before")
        staged = stager.close()
        fault_point("outbox.restage.after")
    except BaseException:
        stager.discard()
        raise
    return staged


class ParkedSinks:
    """The optional sinks whose rows are parked, in one run. May be used from any thread.

    A sink is parked when its stager fails in a worker. Its stager is tried again after the sink has taken parked rows:
    once at first, and twice as often after each further failure.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: dict[str, int] = {}
        self._deliveries: dict[str, int] = {}  # of parked sinks: deliveries until the stager is tried again

    def add(self, sink: str) -> None:
        """Park the rows of the next epochs for a sink."""
        with self._lock:
            self._deliveries[sink] = min(2 ** self._failures.get(sink, 0), MOST_DELIVERIES)
            self._failures[sink] = self._failures.get(sink, 0) + 1

    def delivered(self, sink: str) -> None:
        """Note that a sink has taken an epoch of parked rows."""
        with self._lock:
            left = self._deliveries.get(sink, 0) - 1
            if left > 0:
                self._deliveries[sink] = left
            else:
                self._deliveries.pop(sink, None)

    def __contains__(self, sink: str) -> bool:
        return sink in self._deliveries
