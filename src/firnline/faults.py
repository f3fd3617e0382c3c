"""Named fault points, at which a test can kill, break or hold the process.

A point is a no-op unless the environment variable `FIRNLINE_FAULT` names it, as
`point:count:action`, e.g. `delta.commit.before:2:kill` (the second time that point is reached).
Threads reach a point in any order; `point@thread:count:action` counts what threads of that name reach, e.g.
`delta.commit.before@firnline main:2:kill` (the second commit of the sink `main`, whatever other sinks do).
Actions: `kill` (SIGKILL to this process), `raise` (InjectedFaultError), `hang` (sleep until killed),
`stop` (SIGSTOP to this process, which goes on after SIGCONT).
The variable is read by the process that starts; it can never be set over a network interface.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

VARIABLE = "FIRNLINE_FAULT"

# Every durable call stands between its `.before` and `.after` point; tests try each of them.
DURABLE_CALLS = (
    "delta.create",
    "delta.claim",
    "delta.evolve",
    "delta.commit",
    "delta.jump",
    "delta.sync",
    "delta.checkpoint",
    "delta.checkpoint.sync",
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
    "outbox.release",
    "upsert.rewrite",
    "stage.quarantine",
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
# Steps of the epoch (DESIGN: plan -> run -> stage -> commit -> record -> acknowledge).
STEPS = ("epoch.plan", "epoch.run", "epoch.stage", "epoch.commit", "epoch.record", "epoch.acknowledge")
POINTS = tuple(f"{call}.{side}" for call in (*DURABLE_CALLS, *STEPS) for side in ("before", "after"))

_seen: Counter[str] = Counter()
_counting = threading.Lock()


class InjectedFaultError(OSError):
    """Raised at a fault point by a test; looks like an I/O error to everyone else."""


def fault_point(name: str) -> None:
    """Do what `FIRNLINE_FAULT` asks for at this point; nothing when it names another one."""
    wanted = os.environ.get(VARIABLE)
    if not wanted or not wanted.startswith((f"{name}:", f"{name}@")):
        return
    where, count, action = wanted.rsplit(":", 2)
    _, _, thread = where.partition("@")
    if thread and thread != threading.current_thread().name:
        return
    with _counting:  # two threads are never both the second one
        _seen[name] += 1
        is_due = _seen[name] == int(count)
    if not is_due:
        return
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        # To this very thread: sent to the process, another thread may take it while this one runs on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return
    elif action == "hang":
        while True:
            time.sleep(3600)
    raise InjectedFaultError(f"injected fault at {name}")
