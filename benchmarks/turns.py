"""Times two things in turns, since the machine is shared: a batch of one, a batch of the other, and again."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from firnline.clock import monotonic

Work = Callable[[], object]


def in_turns(works: Sequence[Work], *, rounds: int, each: int) -> list[list[float]]:
    """Milliseconds of every call of every work. Each has one round that is not counted."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, found in zip(works, times, strict=True):
            for _ in range(each):
                began = monotonic()
                work()
                if number:
                    found.append((monotonic() - began) * 1000)
    return times


def p50(times: Sequence[float]) -> float:
    return statistics.median(times)


def p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]


def round_off(value: float) -> float:
    """Three digits that count."""
    return float(f"{value:.3g}")
