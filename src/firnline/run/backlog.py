"""How much input waits: counted by a listing now and then, kept current by what is committed in between."""

from __future__ import annotations

from dataclasses import dataclass, field

from firnline.sources.base import Backlog

RECOUNT_SECONDS = 30.0
COST_FACTOR = 20  # a listing that takes long is repeated less often


@dataclass(slots=True)
class BacklogMeter:
    """What lies after the newest committed epoch. Used from one thread; times are passed in."""

    _counted: Backlog | None = None
    _counted_on: int = 0  # the epoch after which `_counted` lay
    _next_at: float = float("-inf")
    _counting: bool = False
    _overtaken: bool = False  # the count under way is older than what is known
    _taken: list[tuple[int, int, int]] = field(default_factory=list)  # epoch, files, bytes

    def is_due(self, now: float) -> bool:
        """Whether a new count should begin; never two at once."""
        return not self._counting and now >= self._next_at

    def begin(self) -> None:
        self._counting, self._overtaken = True, False

    def end(self, epoch: int, counted: Backlog | None, *, began: float, now: float) -> None:
        """A count of what lies after `epoch` has ended; None when it failed."""
        self._counting = False
        self._next_at = now + max(RECOUNT_SECONDS, COST_FACTOR * (now - began))
        if counted is not None and not self._overtaken:
            self._counted, self._counted_on = counted, epoch
            self._taken = [t for t in self._taken if t[0] > epoch]

    def committed(self, epoch: int, files: int, size_bytes: int) -> None:
        self._taken.append((epoch, files, size_bytes))

    def emptied(self) -> None:
        """A plan found nothing to read."""
        self._counted, self._taken, self._overtaken = Backlog(0, 0), [], True

    @property
    def current(self) -> Backlog | None:
        """The newest estimate; None before the first count."""
        if self._counted is None:
            return None
        taken = [t for t in self._taken if t[0] > self._counted_on]
        files = self._counted.files_outstanding - sum(t[1] for t in taken)
        size = self._counted.bytes_outstanding - sum(t[2] for t in taken)
        return Backlog(max(0, files), max(0, size))
