"""Every order of two services and their launchers over one home: never two runs at once, and never none for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from firnline.names import launch_id
from firnline.process import Process
from firnline.service.supervise.launches import Launch, next_launch
from firnline.service.supervise.policy import may_run

ME = Process("ann", "here", 1, "boot 1")
MOST = 3  # launches
SERVICES = 2
Refuses = Callable[..., str | None]


@dataclass(frozen=True)
class World:
    """The files of a home, what each service has last read, and where each launcher is."""

    wish: int = 1
    launches: tuple[Launch, ...] = ()  # by id
    steps: tuple[tuple[str, str], ...] = ()  # launcher by launch: forked, recorded, running, ended
    views: tuple[tuple[int, tuple[Launch, ...]] | None, ...] = (None,) * SERVICES
    deaths: int = 1  # launchers that may still be killed

    def step(self, launch: str, word: str) -> World:
        return replace(self, steps=tuple(sorted({**dict(self.steps), launch: word}.items())))

    def with_launch(self, launch: Launch) -> World:
        found = {one.id: one for one in self.launches} | {launch.id: launch}
        return replace(self, launches=tuple(found[key] for key in sorted(found)))

    def view(self, service: int, view: tuple[int, tuple[Launch, ...]] | None) -> World:
        return replace(self, views=tuple(view if at == service else one for at, one in enumerate(self.views)))

    @property
    def running(self) -> list[str]:
        return [launch for launch, word in self.steps if word == "running"]


def moves(world: World, refuses: Refuses, gives_up: bool = True) -> Iterator[World]:
    """Yield every next world: each line is one atomic call."""
    found = {one.id: one for one in world.launches}
    steps = dict(world.steps)
    if world.wish == 1:
        yield replace(world, wish=2)  # somebody asks again
    for service, view in enumerate(world.views):
        yield world.view(service, (world.wish, world.launches))
        if view is None:
            continue
        wish, seen = view
        if all(one.is_over for one in seen):  # what it read says that nothing is alive
            launch = next_launch(wish, list(seen))
            if launch not in found and len(found) < MOST:  # exclusive
                begun = Launch(launch, "t", "ann", charged=wish)
                yield world.view(service, None).with_launch(begun).step(launch, "forked")
        for one in seen:
            newest = found[one.id]
            if newest.is_over:
                continue
            if newest.run is None and gives_up:  # it waited for long enough
                yield world.with_launch(replace(newest, given_up=True, ended_at="t"))
            elif one.run is not None and steps[one.id] in ("dead", "ended"):  # its processes are gone
                yield world.with_launch(replace(newest, ended_at="t"))
    for launch, word in world.steps:
        mine = found[launch]
        if word == "forked":
            if mine.given_up:
                yield world.step(launch, "ended")
            else:
                yield world.with_launch(replace(mine, launcher=ME, run=ME)).step(launch, "recorded")
        if word == "recorded":
            if refuses(launch, world.launches, "running") is None:
                yield world.step(launch, "running")
            else:
                yield world.with_launch(replace(mine, ended_at="t", charged=0)).step(launch, "ended")
        if word == "running":
            yield world.with_launch(replace(mine, ended_at=mine.ended_at or "t")).step(launch, "ended")
        if word in ("forked", "recorded") and world.deaths:
            yield replace(world, deaths=world.deaths - 1).step(launch, "dead")


def search(refuses: Refuses) -> tuple[int, World | None, bool]:
    """Return how many worlds there are, one with two runs, and whether a run can always follow."""
    first = World()
    seen, queue, ran = {first}, deque([first]), False
    while queue:
        world = queue.popleft()
        if len(world.running) > 1:
            return len(seen), world, ran
        ran = ran or bool(world.running)
        for after in moves(world, refuses):
            if after not in seen:
                seen.add(after)
                queue.append(after)
    return len(seen), None, ran


def test_two_services_never_have_two_runs() -> None:
    count, bad, ran = search(may_run)
    assert bad is None, bad
    assert ran
    assert count > 1_000


@pytest.mark.parametrize("mutant", ["no check", "only newer", "only older"])
def test_a_launcher_that_checks_less_is_caught(mutant: str) -> None:
    def refuses(mine: str, launches: tuple[Launch, ...], wanted: str) -> str | None:
        own = {launch.id: launch for launch in launches}[mine]
        if own.is_over:
            return "given up"
        others = [one for one in launches if not one.is_over and one.id != mine]
        newer = any(one.id > mine for one in others)
        older = any(one.id < mine and one.run is not None for one in others)
        return "there" if {"no check": False, "only newer": newer, "only older": older}[mutant] else None

    _, bad, _ = search(refuses)
    assert bad is not None


def test_a_launcher_refuses_what_does_not_count() -> None:
    first = Launch(launch_id(1, 1), "t", "ann", ME, ME)
    second = Launch(launch_id(1, 2), "t", "ann", ME, ME)
    assert may_run(first.id, [first], "running") is None
    assert may_run(first.id, [first], "paused") is None
    assert may_run(first.id, [first], "stopped") is not None
    assert may_run(first.id, [first], None) is not None
    assert may_run(first.id, [], "running") is not None
    assert may_run(first.id, [replace(first, ended_at="t")], "running") is not None
    assert may_run(second.id, [first, second], "running") is not None
    assert may_run(second.id, [replace(first, ended_at="t"), second], "running") is None
    begun = replace(second, launcher=None, run=None)
    assert may_run(first.id, [first, begun], "running") is not None
    assert may_run(first.id, [first, replace(begun, given_up=True)], "running") is None
