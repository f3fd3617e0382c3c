"""Copies operator state to the remote tier, and pins the state that a run resumed from."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from firnline.checkpoint.codec import canonical, seal
from firnline.checkpoint.model import Checkpoint
from firnline.faults import fault_point
from firnline.maintenance.state import STANDS_ON
from firnline.names import PINS, committed_key, state_pin, state_pins
from firnline.options import RemoteTierOptions
from firnline.process import this_process
from firnline.state.home import StateHome
from firnline.state.manifest import SnapshotRef
from firnline.state.remote import CheckpointCopy, Replica, StateReplicator
from firnline.state.snapshot import exists
from firnline.storage import Storage
from firnline.types import Clock


class RemoteState:
    """Copies the snapshots that sinks name. The main thread calls it; a separate thread copies.

    Operators may have snapshots of different epochs. The oldest snapshot that the remote tier lacks goes first, so that
    frequent snapshots do not starve rare ones. A finished copy counts even if newer snapshots exist by then; otherwise
    the floor would never rise if a copy takes longer than an epoch.
    """

    def __init__(self, home: StateHome, remote: RemoteTierOptions, operators: Sequence[str], clock: Clock) -> None:
        assert home.fallback is not None
        self.replica = Replica(home.storage, home.fallback.storage)
        self._replicator = StateReplicator(
            self.replica, remote.interval_ms, clock.monotonic, lambda _: self._offer_more(), self._copied
        )
        self._lock = threading.Lock()
        self._waiting: dict[str, SnapshotRef] = {}  # by operator: what the remote tier lacks
        self._named: dict[str, dict[str, int]] = {}  # by checkpoint of state: the operators, with epochs, that name it
        self._held: dict[str, list[int]] = {name: [] for name in operators}  # epochs in the remote tier, ascending

    def begin(self, checkpoint: Checkpoint) -> None:
        """Record which snapshots of the resumed checkpoint are already in the remote tier."""
        for name, value in checkpoint.state.items():
            ref = SnapshotRef.from_json(value)
            if name in self._held and exists(self.replica.remote, committed_key(ref.checkpoint)):
                self._hold(name, ref.epoch)

    def settled(self, checkpoint: Checkpoint) -> None:
        """Queue the snapshots that the checkpoint of a decided epoch names."""
        self._replicator.start()
        with self._lock:
            for name, value in checkpoint.state.items():
                ref = SnapshotRef.from_json(value)
                if ref.epoch > max(self._held.get(name, []), default=0):
                    self._waiting[name] = ref
                    self._named.setdefault(ref.checkpoint, {})[name] = ref.epoch
            self._offer()
            # From here on the replicator takes only what waits; what it has already taken may be older.
            wanted = {ref.checkpoint for ref in self._waiting.values()} | {self._replicator.taken}
            self._named = {checkpoint: names for checkpoint, names in self._named.items() if checkpoint in wanted}

    def _copied(self, checkpoint: str) -> None:
        """Record a finished copy. Called by the replicator."""
        with self._lock:
            for name, epoch in self._named.pop(checkpoint, {}).items():
                self._hold(name, epoch)
                if name in self._waiting and self._waiting[name].epoch <= epoch:
                    del self._waiting[name]

    def _offer_more(self) -> None:
        """Offer the next snapshot. Called by the replicator after every attempt."""
        with self._lock:
            self._offer()

    def _offer(self) -> None:
        oldest = min(self._waiting.values(), key=lambda ref: ref.epoch, default=None)
        if oldest is not None:
            self._replicator.offer(CheckpointCopy(oldest.checkpoint, oldest.digest))

    def _hold(self, name: str, epoch: int) -> None:
        held = self._held.setdefault(name, [])
        if epoch > max(held, default=0):
            held.append(epoch)

    @property
    def epoch(self) -> int:
        """The oldest of the operators' newest snapshots in the remote tier."""
        with self._lock:
            return min((max(held, default=0) for held in self._held.values()), default=0)

    def below(self, limit: int) -> int:
        """Return the newest epoch up to `limit` that can be restored from the remote tier. `limit` never decreases.

        A floor between two copies is not safe: a rollback could reach an epoch whose state only this host has, after
        the source has forgotten the input before it.
        """
        with self._lock:
            for name, held in self._held.items():
                older = [epoch for epoch in held if epoch <= limit]
                self._held[name] = held[max(0, len(older) - 1) :]
            return min((held[0] if held and held[0] <= limit else 0 for held in self._held.values()), default=0)

    def flush(self, seconds: float) -> bool:
        """Bring the remote tier in sync. Returns whether it is."""
        while self._replicator.flush(seconds):
            with self._lock:
                if not self._waiting:
                    return True
        return False

    def close(self, *, drain_seconds: float) -> None:
        """Stop. With `drain_seconds`, copy what waits first, for at most that long."""
        if drain_seconds > 0:
            self.flush(drain_seconds)
        self._replicator.close()


class StandingState:
    """Pins the state that an active run depends on. Set before the run uses it, removed once the sinks name newer
    state."""

    def __init__(self, storage: Storage, pipeline: str) -> None:
        self._storage = storage
        self._pipeline = pipeline
        self._prefix = state_pins(pipeline)
        self._key: str | None = None
        self._epoch = 0

    def begin(self, generation: int, epoch: int, used: Mapping[str, SnapshotRef] | None) -> None:
        """Pin the snapshots that a run of this generation resumes from; without snapshots, no pin is needed.

        An operator without a snapshot starts empty. Pins of earlier generations are removed: their runs can no longer
        commit. `epoch` is the newest one.
        """
        key = state_pin(self._pipeline, generation)
        if used is not None:
            state = {name: ref.to_json() for name, ref in used.items()}
            pin = {"kind": STANDS_ON, "pipeline": self._pipeline, "files": [], "state": state, **this_process().address}
            fault_point("state.pin.before")
            self._storage.put(key, canonical(seal(pin)))
            fault_point("state.pin.after")
            self._key, self._epoch = key, epoch
        for stat in self._storage.list(PINS):
            found = f"{PINS}/{stat.name.rsplit('/', 1)[-1]}"
            if found.startswith(self._prefix) and found[len(self._prefix) :][:20].isdigit() and found < key:
                self._storage.delete(found)

    def settled(self, checkpoint: Checkpoint) -> None:
        """Remove the pin once every snapshot that a decided epoch names is newer than the restore."""
        if self._key is None:
            return
        made = [SnapshotRef.from_json(ref).epoch for ref in checkpoint.state.values()]
        if made and min(made) > self._epoch:
            self._storage.delete(self._key)
            self._key = None
