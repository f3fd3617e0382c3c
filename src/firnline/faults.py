"""Named fault points, where a test can kill, fail or freeze the process.

A point does nothing unless the environment variable `FIRNLINE_FAULT` names it as `point:count:action`. For example,
`delta.commit.before:2:kill` acts the second time that the process reaches the point. Several threads may reach a point
in any order: `point@thread:count:action` counts only the threads of that name. For example,
`delta.commit.before@firnline main:2:kill` acts at the second commit of the sink `main`.

Actions: `kill` (SIGKILL to this process), `raise` (InjectedFaultError), `hang` (sleep until killed), `stop` (SIGSTOP to
this process, which continues after SIGCONT). Only the environment sets a fault; no network interface does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable

VARIABLE = "FIRNLINE_FAULT"

# Every durable call has a point `.before` it and one `.after` it; tests kill at each of them.
DURABLE_CALLS = (
    "delta.create",
    "delta.claim",
    "delta.evolve",
    "delta.commit",
    "delta.jump",
    "delta.sync",
    "delta.checkpoint",
    "delta.checkpoint.sync",
    "delta.cleanup",
    "delta.compact",
    "delta.sweep",
    "sweep.declare",
    "sweep.end",
    "staging.put",
    "staging.delete",
    "staging.reject",
    "storage.folder",
    "storage.put",
    "storage.publish",
    "storage.delete",
    "store.put",
    "store.publish",
    "store.delete",
    "store.prune",
    "archive.write",
    "archive.publish",
    "tier.local",
    "tier.remote",
    "lease.take",
    "lease.renew",
    "lease.release",
    "stage.file",
    "outbox.copy",
    "outbox.write",
    "outbox.restage",
    "outbox.rebuild",
    "fill.list",
    "fill.release",
    "outbox.release",
    "follower.claim",
    "follower.commit",
    "follower.edit",
    "parts.head",
    "postgres.head",
    "postgres.commit",
    "postgres.edit",
    "kafka.create",
    "kafka.claim",
    "kafka.join",
    "kafka.commit",
    "registry.register",
    "letter.put",
    "letter.answers",
    "letter.settle",
    "letter.sweep",
    "redis.range",
    "http.progress",
    "http.send",
    "upsert.rewrite",
    "kafka.acknowledge",
    "spool.file",
    "spool.chunk",
    "spool.delete",
    "postgres.publication",
    "postgres.slot",
    "widen.rewrite",
    "stage.quarantine",
    "topology.channels",
    "topology.pin",
    "topology.order",
    "topology.ask",
    "topology.outcome",
    "topology.drop",
    "topology.restore",
    "topology.hold",
    "topology.decide",
    "topology.release",
    "topology.savepoint",
    "topology.range",
    "savepoint.pin",
    "savepoint.copy",
    "savepoint.put",
    "savepoint.delete",
    "restore.pin",
    "restore.copy",
    "state.run",
    "state.timers",
    "state.repair",
    "state.begin",
    "state.shard",
    "state.commit",
    "state.abort",
    "state.sweep",
    "state.pin",
    "state.replicate",
    "state.export",
    "state.export.publish",
)
# The steps of an epoch.
STEPS = ("epoch.plan", "epoch.run", "epoch.stage", "epoch.commit", "epoch.record", "epoch.acknowledge")
POINTS = tuple(f"{call}.{side}" for call in (*DURABLE_CALLS, *STEPS) for side in ("before", "after"))

followers: list[Callable[[str], None]] = []  # tests that follow the points of this process
_seen: Counter[str] = Counter()
_counting = threading.Lock()


class InjectedFaultError(OSError):
    """Raised at a fault point that a test names; an I/O error for the code around it."""


def fault_point(name: str) -> None:
    """Perform the action of `FIRNLINE_FAULT` if it names this point and the count is reached."""
    for follow in tuple(followers):
        follow(name)
    wanted = os.environ.get(VARIABLE)
    if not wanted or not wanted.startswith((f"{name}:", f"{name}@")):
        return
    where, count, action = wanted.rsplit(":", 2)
    _, _, thread = where.partition("@")
    if thread and thread != threading.current_thread().name:
        return
    with _counting:  # so that only one thread is the second
        _seen[name] += 1
        is_due = _seen[name] == int(count)
    if not is_due:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        # Sent to this thread: a signal to the process may go to another thread, and this one would run on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    elif action == "hang":
        while True:
            time.sleep(3600)
    raise InjectedFaultError(f"injected fault at {name}")
