"""Does one piece of work in a process of its own, to be killed at a fault point, and tells what points it reached."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection

from firnline import faults
from tests.support.processes import KILLED, reached_points
from tests.support.proof import covered

PATIENCE_SECONDS = 60
# A kill inside one of these leaves what a kill beside it leaves, and at most a temporary file or an empty folder more.
_HELPERS = ("storage.folder.", "storage.publish.", "store.publish.")


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
    assert code == 0, f"{work.__name__} failed with {code} although nobody killed it"
    return reached


def kill(fault: str, work: Callable[..., object], *arguments: object) -> None:
    """Do the work in a child that the fault kills; a point that is never reached is a failed test."""
    code, _ = perform(f"{fault}:kill", work, *arguments)
    assert code == KILLED, f"{work.__name__} was not killed at {fault}, but ended with {code}"


def steps(reached: Counter[str], *, helpers: bool) -> list[tuple[str, int]]:
    """The points to kill at, with how often each is reached; those inside storage helpers only if asked for."""
    return sorted((point, calls) for point, calls in reached.items() if helpers or not point.startswith(_HELPERS))


def spread(calls: int, most: int | None) -> list[int]:
    """Which calls of a point are killed: the first, the last and some in between; all of them if there is no `most`."""
    wanted = calls if most is None else min(calls, most)
    return sorted({1 + step * (calls - 1) // max(1, wanted - 1) for step in range(wanted)})


def _child(fault: str, sender: Connection, work: Callable[..., object], *arguments: object) -> None:
    os.environ[faults.VARIABLE] = fault
    with reached_points() as reached:
        work(*arguments)
    sender.send(reached)
    os._exit(0)
