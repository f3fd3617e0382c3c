"""The system's time."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class SystemClock:
    """Real time; implements `types.Clock`."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
