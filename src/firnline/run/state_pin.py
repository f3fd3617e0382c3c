"""The pin of what a run stands on, where a damaged snapshot was passed over for it: it keeps sweeps from it.

What a run goes on from otherwise is named by an epoch from the floor on, so sweeps know it.
"""

from __future__ import annotations

from collections.abc import Mapping

from firnline.checkpoint.codec import canonical, seal
from firnline.checkpoint.model import Checkpoint
from firnline.faults import fault_point
from firnline.maintenance.references import PINS
from firnline.maintenance.state import STANDS_ON
from firnline.process import this_process
from firnline.state.manifest import SnapshotRef
from firnline.storage import Storage


class StandingState:
    """What the active run of a pipeline stands on. Put before it builds on it, taken back once the sinks name newer."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._prefix = f"{PINS}/stands-on-{pipeline}-"
        self._key: str | None = None
        self._epoch = 0

    def begin(self, generation: int, epoch: int, used: Mapping[str, SnapshotRef] | None) -> None:
        """Pin the snapshots that a run of this generation goes on from; none: what sweeps know of is enough.

        An operator that is not among them begins anew. Pins of earlier generations go: their runs can commit no more.
        `epoch` is the newest one.
        """
        key = f"{self._prefix}{generation:020d}.json"
        if used is not None:
            state = {name: ref.to_json() for name, ref in used.items()}
            pin = {"kind": STANDS_ON, "pipeline": self._pipeline, "files": [], "state": state, **this_process()}
            fault_point("state.pin.before")
            self._storage.put(key, canonical(seal(pin)))
            fault_point("state.pin.after")
            self._key, self._epoch = key, epoch
        for stat in self._storage.list(PINS):
            found = f"{PINS}/{stat.name.rsplit('/', 1)[-1]}"
            if found.startswith(self._prefix) and found[len(self._prefix) :][:20].isdigit() and found < key:
                self._storage.delete(found)

    def settled(self, checkpoint: Checkpoint) -> None:
        """The deciding sink holds an epoch: take the pin back when all that it names is newer than the restore."""
        if self._key is None:
            return
        made = [SnapshotRef.from_json(ref).epoch for ref in checkpoint.state.values()]
        if made and min(made) > self._epoch:
            self._storage.delete(self._key)
            self._key = None
