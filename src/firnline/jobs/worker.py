"""What a worker does with an order, by its kind."""

from __future__ import annotations

from collections.abc import Callable

from firnline.errors import EngineError
from firnline.jobs.fold_task import run_fold
from firnline.jobs.heartbeat import pinging
from firnline.jobs.read_task import run_task
from firnline.sinks.delta.upsert.rewrite import run_rewrite
from firnline.types import Json

KINDS: dict[str, Callable[[dict[str, Json]], dict[str, Json]]] = {
    "read": run_task,
    "fold": run_fold,
    "rewrite": run_rewrite,
}


def run_order(order: dict[str, Json]) -> dict[str, Json]:
    """Perform an order and report; plain JSON both ways."""
    try:
        perform = KINDS[order["kind"]]
    except KeyError as error:
        raise EngineError(f"a worker got an order it does not know: {error}") from error
    with pinging(order.get("ping")):
        return perform(order)
