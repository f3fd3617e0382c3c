"""Kills a piece of work at every fault point that it reaches, each time in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

from firnline import faults
from firnline.testing.faults import reached_points
from tests.support.processes import KILLED
from tests.support.proof import covered

World = TypeVar("World")
PATIENCE_SECONDS = 180
NO_POINTS: Mapping[str, int] = MappingProxyType({})
Most: TypeAlias = int | Literal["sample"] | None
PROOF = bool(os.environ.get("FIRNLINE_PROOF"))
# A kill inside one of these leaves what a kill beside it leaves, and at most a temporary file or an empty folder more.
_HELPERS = ("storage.folder.", "storage.publish.", "store.publish.")


def in_proof(most: int | None) -> Most:
    """How many calls of each point are killed: so many under FIRNLINE_PROOF (None means all), by default a sample."""
    return most if PROOF else "sample"


ALL_IN_PROOF = in_proof(None)


def kill_at_every_point(
    prepare: Callable[[], World],
    work: Callable[[World], object],
    check: Callable[[World, str], None],
    *,
    points: Collection[str] = (),
    varying: Mapping[str, int] = NO_POINTS,
    most: Most = ALL_IN_PROOF,
    helpers: bool = True,
) -> Counter[str]:
    """Do the work once unharmed, then once per point and call that it reaches, killed there; check after each.

    Args:
        prepare: Makes the world anew before each time; it is handed to `work` (in the child) and to `check`.
        work: What is killed; `functools.partial` of a module's function, so that a child can be handed it.
        check: Finishes what was broken and compares; its second argument says where the work was killed.
        points: Kill at no other points; empty means at all that the work reaches.
        varying: Points whose number of calls depends on timing, with the number that is always reached.
        most: How many calls of each point are killed; see `spread` and `in_proof`.
        helpers: Whether points inside storage helpers count, too.

    Returns:
        How often the work reached each point, unharmed.
    """
    world = prepare()
    reached = count_points(work, world)
    check(world, "not killed")
    for point, calls in steps(reached, helpers=helpers):
        certain = min(calls, varying.get(point, calls))
        for nth in spread(certain, most, point) if not points or point in points else ():
            world = prepare()
            kill(f"{point}:{nth}", work, world)
            check(world, f"killed at {point}, call {nth}")
    return reached


def perform(fault: str, work: Callable[..., object], *arguments: object) -> tuple[int, Counter[str]]:
    """Do the work in a child under a fault, e.g. `delta.jump.before:2:kill`; an empty one does nothing.

    Returns the exit code, or minus the signal, and how often each point was reached; nothing of a child that did not
    come to its end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(fault, sender, work, *arguments), daemon=True)
    with receiver, sender:
        process.start()
        process.join(PATIENCE_SECONDS)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        assert code is not None, f"the child hung under {fault!r}"
        covered["kills"] += code == KILLED
        return code, receiver.recv() if code == 0 else Counter()


def count_points(work: Callable[..., object], *arguments: object) -> Counter[str]:
    """Do the work in a child that nobody kills; returns how often it reached each fault point."""
    code, reached = perform("", work, *arguments)
    assert code == 0, f"{work} failed with {code} although nobody killed it"
    return reached


def kill(fault: str, work: Callable[..., object], *arguments: object) -> None:
    """Do the work in a child that the fault kills; a point that is never reached is a failed test."""
    code, _ = perform(f"{fault}:kill", work, *arguments)
    assert code == KILLED, f"{work} was not killed at {fault}, but ended with {code}"


def steps(reached: Counter[str], *, helpers: bool) -> list[tuple[str, int]]:
    """The points to kill at, with how often each is reached; those inside storage helpers only if asked for."""
    return sorted((point, calls) for point, calls in reached.items() if helpers or not point.startswith(_HELPERS))


def spread(calls: int, most: Most, point: str) -> list[int]:
    """Which calls of a point are killed: the first, the last and some in between; all of them if `most` is None.

    A sample is one call that the name of the point decides: the first of some points, a later one of others.
    """
    if most == "sample":
        return [1 + zlib.crc32(point.encode()) % calls] if calls else []
    wanted = calls if most is None else min(calls, most)
    return sorted({1 + step * (calls - 1) // max(1, wanted - 1) for step in range(wanted)})


def _child(fault: str, sender: Connection, work: Callable[..., object], *arguments: object) -> None:
    os.environ[faults.VARIABLE] = fault
    with reached_points() as reached:
        work(*arguments)
    sender.send(reached)
    os._exit(0)
