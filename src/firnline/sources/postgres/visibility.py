"""Which transactions a snapshot of a PostgreSQL database sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from firnline.errors import DamagedError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions a snapshot of the database sees, as `pg_current_snapshot` says it. Numbers have 64 bits."""

    xmin: int  # all below have ended
    xmax: int  # none from here on has begun
    running: tuple[int, ...]  # between them: those that have not ended

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read PostgreSQL's text for it, e.g. 100:104:100,102.

        Raises:
            DamagedError: it is none.
        """
        try:
            xmin, xmax, running = text.split(":")
            return cls(int(xmin), int(xmax), tuple(int(one) for one in running.split(",") if one))
        except ValueError:
            raise DamagedError(f"{text!r} is no snapshot of PostgreSQL") from None

    def sees(self, xids: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return which transactions are seen; the log has the lower 32 bits of their numbers."""
        low = np.asarray(xids, np.int64)
        ahead = (low - self.xmax) & 0xFFFFFFFF
        number = self.xmax + np.where(ahead >= 1 << 31, ahead - (1 << 32), ahead)  # the nearest one
        seen: npt.NDArray[np.bool_] = (number < self.xmax) & ~np.isin(number, np.asarray(self.running, np.int64))
        return seen
