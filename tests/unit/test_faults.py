"""Fault points: silent unless named, exact in count, and known by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from firnline import faults
from firnline.faults import POINTS, VARIABLE, InjectedFaultError, fault_point

SOURCES = Path(faults.__file__).parent


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    faults._seen.clear()
    yield
    faults._seen.clear()


def test_points_are_silent_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for point in POINTS:
        fault_point(point)
    assert not faults._seen


def test_a_point_raises_at_its_count_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "storage.put.before:2:raise")
    fault_point("storage.put.before")
    fault_point("storage.put.after")
    with pytest.raises(InjectedFaultError):
        fault_point("storage.put.before")
    fault_point("storage.put.before")


def test_every_point_in_the_code_is_listed_and_every_listed_one_is_in_the_code() -> None:
    used: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        if path.parent.name == "testing" or path.name == "faults.py":
            continue
        text = path.read_text()
        used.update(re.findall(r'fault_point\("([a-z.]+)"\)', text))
        calls = re.findall(r'(?:_write|append|transact)\("(delta\.[a-z]+)"', text)
        calls += re.findall(r'NumberedFiles\([^"]*"([a-z.]+)"\)', text)
        for call in calls:
            used.update({f"{call}.before", f"{call}.after"})
    assert used == set(POINTS)
