"""Runs tasks in this process, without Spark: the same task code, started in no time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from firnline.engine.task import run_task
from firnline.errors import EngineError, FirnlineError
from firnline.types import Json


class LocalEngine:
    """Implements `engine.engine.Engine`. With one thread, tasks run in order and a run is repeatable."""

    def __init__(self, threads: int = 2) -> None:
        self._threads = threads

    @property
    def parallelism(self) -> int:
        return self._threads

    def run(self, tag: str, orders: list[dict[str, Json]]) -> list[dict[str, Json]]:
        """Run every order; as on Spark, all end before the first failure is told."""
        texts = [json.dumps(order) for order in orders]  # what does not survive this would not reach a worker
        with ThreadPoolExecutor(self._threads, thread_name_prefix=f"task {tag}") as pool:
            futures = [pool.submit(run_task, json.loads(text)) for text in texts]
        reports = []
        for future in futures:
            try:
                reports.append(json.loads(json.dumps(future.result())))
            except FirnlineError:
                raise
            except Exception as error:  # Spark reports whatever a worker raises as a failed job
                raise EngineError(f"a task failed: {type(error).__name__}: {error}") from error
        return reports

    def cancel(self, tag: str) -> None:
        """Nothing: a task that is no longer wanted ends by itself, and nobody reads what it staged."""

    def stop(self) -> None:
        """Nothing to let go of."""
