"""Times two things in turns, since the machine is shared: a batch of one, a batch of the other, and again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Cost:
    """The least of several calls: what others do on the machine only adds to it."""

    wall_ms: float
    cpu_ms: float  # of all threads of this process


def costs_in_turns(works: Sequence[Work], *, rounds: int) -> list[Cost]:
    """Return what each work costs. Each has one round that is not counted."""
    found: list[list[Cost]] = [[] for _ in works]
    for number in range(rounds + 1):
        for work, costs in zip(works, found, strict=True):
            began, cpu = monotonic(), time.process_time()
            work()
            if number:
                costs.append(Cost((monotonic() - began) * 1000, (time.process_time() - cpu) * 1000))
    return [Cost(min(c.wall_ms for c in costs), min(c.cpu_ms for c in costs)) for costs in found]


def p50(times: Sequence[float]) -> float:
    return statistics.median(times)


def p99(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]


def round_off(value: float) -> float:
    """Three digits that count."""
    return float(f"{value:.3g}")
