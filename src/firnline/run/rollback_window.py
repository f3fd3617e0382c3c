"""How far back one may go: the rollback window, in epochs or in time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime, timedelta

from firnline.checkpoint.model import Checkpoint


class RollbackWindow:
    """Tells the oldest epoch that must stay reachable; a part of the floor. Pure: told of every checkpoint."""

    def __init__(self, window: int | timedelta) -> None:
        self._window = window
        self._epochs: list[int] = []
        self._times: list[datetime] = []

    @property
    def needs_history(self) -> bool:
        """Whether it must be told of the checkpoints from the floor on before the first question."""
        return isinstance(self._window, timedelta)

    def begin(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Forget everything and take these, oldest first."""
        self._epochs, self._times = [], []
        for checkpoint in checkpoints:
            self.add(checkpoint)

    def add(self, checkpoint: Checkpoint) -> None:
        """Take the next checkpoint. A clock that goes back never shortens the way: times count as they rise."""
        if self.needs_history:
            made = datetime.fromisoformat(checkpoint.created_at)
            self._times.append(max(made, self._times[-1]) if self._times else made)
            self._epochs.append(checkpoint.epoch)

    def oldest(self, epoch: int, now: datetime) -> int:
        """The oldest epoch that the window keeps when `epoch` is made `now`: the state of any time in it is there."""
        if isinstance(self._window, int):
            return epoch - self._window
        at = bisect_right(self._times, now - self._window)
        if at == 0:
            return 0  # nothing known is that old
        del self._epochs[: at - 1], self._times[: at - 1]
        return self._epochs[0]
