"""Kills a piece of work at every fault point that it reaches, each time in a process of its own.

Points that a thread reaches one after the other, with nothing durable between them, are names of one moment: a kill at
one of them leaves what a kill at the other leaves (`moments`). By default one of them is killed, under FIRNLINE_PROOF
all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeVar

from firnline import faults
from firnline.testing.faults import follow_points
from tests.support.processes import KILLED
from tests.support.proof import covered

World = TypeVar("World")
Trace: TypeAlias = list[tuple[int, str]]  # thread and point, in the order in which points were reached
Call: TypeAlias = tuple[str, int]  # a point, and which time it was reached
PATIENCE_SECONDS = 180
NO_POINTS: Mapping[str, int] = MappingProxyType({})
Most: TypeAlias = int | Literal["sample"] | None
PROOF = bool(os.environ.get("FIRNLINE_PROOF"))
# A kill inside one of these leaves what a kill beside it leaves, and at most a temporary file or an empty folder more.
_HELPERS = ("storage.folder.", "storage.publish.", "store.publish.")
_STORAGE = ("storage.", "store.")
_STEPS = tuple(f"{step}." for step in faults.STEPS)


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
    """Do the work once unharmed, then once per moment that its points name, killed there; check after each.

    Args:
        prepare: Makes the world anew before each time; it is handed to `work` (in the child) and to `check`.
        work: What is killed; `functools.partial` of a module's function, so that a child can be handed it.
        check: Finishes what was broken and compares; its second argument says where the work was killed.
        points: Kill at no other points; empty means at all that the work reaches.
        varying: Points whose number of calls depends on timing, with the number that is always reached.
        most: How many calls of each point are killed; see `spread`, `in_proof` and `choose`.
        helpers: Whether points inside storage helpers count, too.

    Returns:
        How often the work reached each point, unharmed.
    """
    world = prepare()
    trace = trace_points(work, world)
    check(world, "not killed")
    reached = Counter(point for _, point in trace)
    wanted = {
        (point, nth)
        for point, calls in steps(reached, helpers=helpers)
        if not points or point in points
        for nth in spread(min(calls, varying.get(point, calls)), most, point)
    }
    for point, nth in sorted(wanted) if PROOF else choose(wanted, moments(trace, helpers=helpers), most):
        world = prepare()
        kill(f"{point}:{nth}", work, world)
        check(world, f"killed at {point}, call {nth}")
    return reached


def perform(fault: str, work: Callable[..., object], *arguments: object) -> tuple[int, Trace]:
    """Do the work in a child under a fault, e.g. `delta.jump.before:2:kill`; an empty one does nothing.

    Returns the exit code, or minus the signal, and the points that were reached; nothing of a child that did not come
    to its end.
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
        return code, receiver.recv() if code == 0 else []


def trace_points(work: Callable[..., object], *arguments: object) -> Trace:
    """Do the work in a child that nobody kills; returns the fault points that it reached."""
    code, trace = perform("", work, *arguments)
    assert code == 0, f"{work} failed with {code} although nobody killed it"
    return trace


def count_points(work: Callable[..., object], *arguments: object) -> Counter[str]:
    """Do the work in a child that nobody kills; returns how often it reached each fault point."""
    return Counter(point for _, point in trace_points(work, *arguments))


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


def moments(trace: Iterable[tuple[int, str]], *, helpers: bool) -> list[list[Call]]:
    """The moments of a trace, each with its calls.

    Two calls are of one moment if the same thread reached them one after the other, no other thread a point in between,
    and nothing durable happens between them (`_are_one`). Unless asked for, points inside storage helpers part no
    moments.
    """
    found: list[list[Call]] = []
    counts: Counter[str] = Counter()
    last = (0, "")
    for thread, point in trace:
        if not helpers and point.startswith(_HELPERS):
            continue
        counts[point] += 1
        if not found or thread != last[0] or not _are_one(last[1], point):
            found.append([])
        found[-1].append((point, counts[point]))
        last = thread, point
    return found


def _are_one(point: str, following: str) -> bool:
    """Whether nothing durable happens between two points that follow each other.

    Durable calls stand between a `.before` and its `.after`. The steps of an epoch do nothing durable around the calls
    that they contain, and calls that contain those of storage do nothing durable beside them.
    """
    sides = point.rpartition(".")[2], following.rpartition(".")[2]
    if sides == ("after", "before"):
        return True
    if sides == ("before", "before"):
        return point.startswith(_STEPS) or following.startswith(_STORAGE)
    if sides == ("after", "after"):
        return point.startswith(_STORAGE) or following.startswith(_STEPS)
    return False


def choose(wanted: Collection[Call], moments: Iterable[Collection[Call]], most: Most) -> list[Call]:
    """Leave out wanted calls whose moment is killed at another one.

    Where one call stands for all calls of its point, a point is also left out if any moment of it is killed. Points
    that are reached seldom come first: their moments are the ones that nothing else stands for.
    """
    moment_of = {call: frozenset(moment) for moment in moments for call in moment}
    reached = Counter(point for point, _ in moment_of)
    chosen: list[Call] = []
    done: set[Call] = set()
    for call in sorted(wanted, key=lambda call: (reached[call[0]], call)):
        is_done = any(point == call[0] for point, _ in done) if most in ("sample", 1) else call in done
        if not is_done:
            chosen.append(call)
            done |= moment_of.get(call, frozenset({call}))
    return sorted(chosen)


def _child(fault: str, sender: Connection, work: Callable[..., object], *arguments: object) -> None:
    os.environ[faults.VARIABLE] = fault
    trace: Trace = []
    with follow_points(lambda point: trace.append((threading.get_ident(), point))):
        work(*arguments)
    sender.send(trace)
    os._exit(0)
