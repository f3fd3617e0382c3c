from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import SourceError
from firnline.sources import group
from firnline.sources.base import Limits
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.files.source import FileSource
from firnline.sources.group import Sources

LIMITS = Limits(max_files=6, max_bytes=1 << 30, max_events=1000, max_ms=60_000, max_output_files=10, parallelism=2)


def make(folder: Path, files: int, name: str) -> FileSourceOptions:
    place = folder / name
    place.mkdir(exist_ok=True)
    for number in range(files):
        (place / f"f{number:02d}.json").write_text("{}\n")
    return FileSourceOptions(name, str(place))


class Slow(FileSource):
    """Lists only when it is let."""

    def __init__(self, options: FileSourceOptions) -> None:
        super().__init__(options)
        self.may_answer = threading.Event()
        self.asked = 0

    def plan(self, *args: Any) -> Any:
        self.asked += 1
        assert self.may_answer.wait(120)
        return super().plan(*args)


def test_every_source_gives_its_share_in_the_order_of_the_spec(tmp_path: Path) -> None:
    sources = Sources([FileSource(make(tmp_path, 9, "b")), FileSource(make(tmp_path, 1, "a"))])
    plan = sources.plan(sources.start({}), LIMITS)
    assert plan is not None
    assert {name: part.files for name, part in plan.plans.items()} == {"b": 3, "a": 1}
    assert list(plan.plans) == ["b", "a"]
    assert plan.files == 4
    assert [name for name, _ in plan.splits][-1] == "a"


def test_nothing_to_read_anywhere_is_no_plan(tmp_path: Path) -> None:
    sources = Sources([FileSource(make(tmp_path, 0, "a")), FileSource(make(tmp_path, 0, "b"))], once=True)
    assert sources.plan(sources.start({}), LIMITS) is None


def test_a_source_that_is_still_listing_is_left_out_and_its_answer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "ALIGN_SECONDS", 0.05)
    slow = Slow(make(tmp_path, 2, "slow"))
    sources = Sources([slow, FileSource(make(tmp_path, 1, "quick"))])
    positions = sources.start({})
    first = sources.plan(positions, LIMITS)
    assert first is not None
    assert (list(first.plans), first.left_out) == (["quick"], ("slow",))
    assert sources.is_asked("slow")
    (tmp_path / "quick" / "f00.json").unlink()
    slow.may_answer.set()
    monkeypatch.setattr(group, "ALIGN_SECONDS", 120)
    second = sources.plan(positions, LIMITS)
    assert second is not None
    assert list(second.plans) == ["slow"]
    assert slow.asked == 1


def test_a_silent_source_does_not_keep_the_others_from_looking_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "ALIGN_SECONDS", 0.05)
    slow = Slow(make(tmp_path, 1, "slow"))
    sources = Sources([slow, FileSource(make(tmp_path, 0, "quick"))])
    positions = sources.start({})
    assert sources.plan(positions, LIMITS) is None
    make(tmp_path, 1, "quick")
    found = sources.plan(positions, LIMITS)
    assert found is not None
    assert list(found.plans) == ["quick"]
    slow.may_answer.set()


def test_what_one_source_cannot_list_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources([FileSource(make(tmp_path, 1, "a")), FileSource(make(tmp_path, 1, "b"))])
    positions = sources.start({})
    planned = FileSource.plan

    def plan(self: FileSource, *args: Any) -> Any:
        if self.name == "b":
            raise SourceError("cannot list b")
        return planned(self, *args)

    monkeypatch.setattr(FileSource, "plan", plan)
    with pytest.raises(SourceError, match="cannot list b"):
        sources.plan(positions, LIMITS)
    monkeypatch.setattr(FileSource, "plan", planned)
    again = sources.plan(positions, LIMITS)
    assert again is not None
    assert set(again.plans) == {"a", "b"}


def test_a_source_whose_answer_waits_is_asked_until_the_answer_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "ALIGN_SECONDS", 0.05)
    slow = Slow(make(tmp_path, 2, "slow"))
    sources = Sources([slow, FileSource(make(tmp_path, 1, "quick"))])
    positions = sources.start({})
    assert sources.plan(positions, LIMITS) is not None
    slow.may_answer.set()
    assert sources._asked["slow"].answered.wait(120)
    assert sources.is_asked("slow")
    monkeypatch.setattr(group, "ALIGN_SECONDS", 120)
    assert sources.plan(positions, LIMITS) is not None
    assert not sources.is_asked("slow")
