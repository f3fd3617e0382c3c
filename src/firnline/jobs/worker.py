"""Performs a task in a worker, by its kind."""

from __future__ import annotations

from collections.abc import Callable

from firnline.errors import EngineError
from firnline.jobs.engine import Ping
from firnline.jobs.fold_task import run_fold
from firnline.jobs.heartbeat import pinging
from firnline.jobs.read_task import run_task
from firnline.sinks import registry
from firnline.types import Json

KINDS: dict[str, Callable[[dict[str, Json]], dict[str, Json]]] = {
    "read": run_task,
    "fold": run_fold,
    "commit": registry.run_task,
}


def perform(task: dict[str, Json]) -> dict[str, Json]:
    """Perform a task and return its report; plain JSON both ways. The content depends on the task's kind."""
    try:
        run = KINDS[task["kind"]]
    except KeyError as error:
        raise EngineError(f"a worker got a task it does not know: {error}") from error
    with pinging(Ping.from_json(task["ping"]) if "ping" in task else None):
        return run(task)
