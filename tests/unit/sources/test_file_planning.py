"""Planning and advancing under random listings, cuts, failures and late files: every file finished exactly once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firnline.sources.base import Limits, Split
from firnline.sources.files import planning
from firnline.sources.files.position import FileState, Progress, SetAside
from firnline.storage import FileStat
from firnline.types import Json

MOMENT = datetime(2026, 1, 1, tzinfo=UTC)
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=6
)


@dataclass
class World:
    """Files as they are stored, and what was read of them."""

    records: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    read: dict[str, list[int]] = field(default_factory=dict)  # path -> record numbers in the order they were read
    known: set[str] = field(default_factory=set)  # what a ledger would know as finished or begun
    versions: dict[str, int] = field(default_factory=dict)

    def stat(self, name: str) -> FileStat:
        return FileStat(name, 10 + self.records[name], f"e{self.versions.get(name, 0)}", MOMENT)

    def listed(self) -> list[FileStat]:
        return [self.stat(name) for name in sorted(self.records, key=str.encode)]


def perform(world: World, splits: list[Split], draw: st.DataObject) -> list[Json]:
    """What splits do: read in order until their share, or the room for what they write, is used up; broken files fail.

    Every task reaches one file at least; what it does not reach it does not report.
    """
    outcomes = []
    for split in splits:
        left = split.max_records
        reached = draw.draw(st.integers(1, len(split.inputs)), "files reached")
        for item in split.inputs[:reached]:
            if left <= 0:
                break
            path = item["path"]
            if path in world.broken:
                outcomes.append({"path": path, "failed": "broken"})
                continue
            total = world.records[path]
            to = min(total, item["from"] + left)
            world.read.setdefault(path, []).extend(range(item["from"], to))
            left -= to - item["from"]
            outcomes.append({"path": path, "to": to, "offset": 0, "line": to, "finished": to == total})
    return outcomes


def check(world: World, state: FileState) -> None:
    """The mark passes no file that is unfinished, but late ones in progress and set-aside ones, which are named."""
    for name, total in world.records.items():
        numbers = world.read.get(name, [])
        assert numbers == list(range(len(numbers))), name  # each record once, in order
        if not state.is_after_mark(name) and name in world.known:
            assert len(numbers) == total or name in state.files or name in state.set_aside, name
    assert FileState.from_json(json.loads(json.dumps(state.to_json()))) == state


def reconcile(world: World, state: FileState) -> list[FileStat]:
    return [
        s
        for s in world.listed()
        if not state.is_after_mark(s.name)
        and s.name not in world.known
        and s.name not in state.files
        and s.name not in state.set_aside
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_file_is_finished_exactly_once(draw: st.DataObject) -> None:
    world = World()
    state = FileState("/in")
    for turn in range(draw.draw(st.integers(1, 8), "turns")):
        for name in draw.draw(st.lists(NAMES, max_size=4), "new files"):
            path = f"/in/{name}"
            if path not in world.records:
                world.records[path] = draw.draw(st.integers(0, 12))
                if draw.draw(st.integers(0, 5)) == 0:
                    world.broken.add(path)
        world.broken -= {b for b in sorted(world.broken) if draw.draw(st.booleans())}
        limits = Limits(
            max_files=draw.draw(st.integers(1, 4)),
            max_bytes=draw.draw(st.integers(1, 60)),
            max_events=draw.draw(st.integers(1, 15)),
            max_ms=1000,
            max_output_files=10,
            parallelism=draw.draw(st.integers(1, 3)),
        )
        state = step(world, state, limits, turn, draw)
        check(world, state)
    drain(world, state, draw)


def step(world: World, state: FileState, limits: Limits, epoch: int, draw: st.DataObject) -> FileState:
    begun = [world.stat(p) for p, progress in state.files.items() if not progress.finished]
    late = reconcile(world, state) if draw.draw(st.booleans(), "reconcile") else []
    listed = [s for s in world.listed() if state.is_after_mark(s.name)]
    chosen = planning.choose(state, [*begun, *late], listed, limits)
    assert len(chosen.files) <= max(1, limits.max_files)
    splits = planning.deal(chosen, limits, "now")
    assert [i["path"] for t in splits for i in t.inputs] == [f.name for f in chosen.files]
    assert chosen.files == sorted(chosen.files, key=lambda f: f.name.encode())
    if draw.draw(st.integers(0, 4), "lost") == 0:
        return state  # the epoch is lost: nothing of it counts, and it is planned again
    after, records = planning.advance(chosen.base, splits, perform(world, splits, draw), 3, epoch)
    world.known |= {r["path"] for r in records if r["status"] != "pending"}
    rebuilt = planning.replay(chosen.base, records)
    assert rebuilt.mark == after.mark
    assert rebuilt.interchange() == after.interchange()
    assert set(rebuilt.set_aside) == set(after.set_aside)
    return after


def drain(world: World, state: FileState, draw: st.DataObject) -> None:
    """With everything mended and asked for again, all of it is read."""
    world.broken.clear()
    limits = Limits(5, 10_000, 50, 1000, 10, 2)
    for epoch in range(200):
        aside = {p: Progress(records=a.records) for p, a in state.set_aside.items()}
        state = FileState(state.root, state.mark, {**state.files, **aside}, {}, state.start_after)
        begun = [world.stat(p) for p, progress in state.files.items() if not progress.finished]
        listed = [s for s in world.listed() if state.is_after_mark(s.name)]
        chosen = planning.choose(state, [*begun, *reconcile(world, state)], listed, limits)
        if not chosen.files:
            break
        splits = planning.deal(chosen, limits, "now")
        state, records = planning.advance(chosen.base, splits, perform(world, splits, draw), 3, epoch)
        world.known |= {r["path"] for r in records if r["status"] != "pending"}
        check(world, state)
    assert {p: len(n) for p, n in world.read.items() if n} == {p: n for p, n in world.records.items() if n}
    assert state.files == {}


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_a_broken_file_is_tried_so_often_and_no_more(attempts: int, others: int) -> None:
    """Tries count in a row: one that reads a record begins the count anew."""
    file = FileStat("/in/a", 10, "e", MOMENT)
    limits = Limits(5, 1000, 50, 1000, 10, 1)
    failed = [{"path": "/in/a", "failed": "broken"}]
    went_on = [{"path": "/in/a", "to": 1, "offset": 5, "line": 1, "finished": False}]
    state = FileState("/in")
    tried = 0
    for outcomes in ([failed] * (attempts - 1) + [went_on]) * others + [failed] * (attempts + 1):
        chosen = planning.choose(state, [file] if state.files else [], [] if state.files else [file], limits)
        if not chosen.files:
            break
        state, records = planning.advance(chosen.base, planning.deal(chosen, limits, "now"), outcomes, attempts, 7)
        tried = tried + 1 if outcomes is failed else 0
        assert records[0]["status"] == ("set_aside" if tried == attempts else "in_progress")
    assert tried == attempts
    assert (state.set_aside["/in/a"].reason, state.set_aside["/in/a"].epoch) == ("broken", 7)
    assert state.set_aside["/in/a"].records == others


PROGRESS = st.builds(
    Progress,
    records=st.integers(0, 1 << 40),
    offset=st.integers(0, 1 << 40),
    line=st.integers(0, 1 << 40),
    size_bytes=st.integers(0, 1 << 40),
    etag=st.text(max_size=5),
    attempts=st.integers(0, 5),
    reason=st.text(max_size=5),
)
ASIDE = st.builds(SetAside, reason=st.text(max_size=5), records=st.integers(0, 99), etag=st.text(max_size=4))
STATES = st.builds(
    FileState,
    root=st.just("/in"),
    mark=st.none() | NAMES.map("/in/".__add__),
    files=st.dictionaries(NAMES.map("/in/".__add__), PROGRESS | st.just(Progress(finished=True)), max_size=5),
    set_aside=st.dictionaries(NAMES.map("/in/".__add__), ASIDE, max_size=3),
    start_after=st.none() | NAMES,
)


@given(STATES)
def test_position_round_trips(state: FileState) -> None:
    assert FileState.from_json(json.loads(json.dumps(state.to_json()))) == state


@given(STATES)
def test_pruning_passes_only_what_is_finished(state: FileState) -> None:
    pruned = state.prune_finished()
    assert pruned.prune_finished() == pruned
    for path, progress in state.files.items():
        if not progress.finished:
            assert pruned.files[path] == progress
        elif path not in pruned.files:
            assert not pruned.is_after_mark(path)
    if state.mark is not None:
        assert pruned.mark is not None
        assert pruned.mark.encode() >= state.mark.encode()
    unfinished = [p for p, progress in state.files.items() if not progress.finished and state.is_after_mark(p)]
    if unfinished:
        assert pruned.mark is None or pruned.mark.encode() < min(p.encode() for p in unfinished)


@given(STATES)
def test_interchange_keeps_what_it_can(state: FileState) -> None:
    again = FileState.from_interchange(json.loads(json.dumps(state.interchange())), "/in")
    pruned = state.prune_finished()
    assert again.mark == pruned.mark
    assert {p: (v.records, v.finished) for p, v in again.files.items()} == {
        p: (v.records if not v.finished else 0, v.finished) for p, v in pruned.files.items()
    }


@given(STATES)
def test_moving_there_and_back(state: FileState) -> None:
    there = state.moved("/in", "/elsewhere")
    assert there.root == "/elsewhere"
    back = there.moved("/elsewhere", "/in")
    assert (back.mark, back.files, back.set_aside) == (state.mark, state.files, state.set_aside)
