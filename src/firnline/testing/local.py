"""Runs tasks in this process, without Spark: the same task code, started in no time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor, wait

import pyarrow as pa

from firnline.errors import EngineError, FirnlineError, WorkerLostError
from firnline.jobs.engine import SqlJob
from firnline.jobs.worker import perform
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner, RunResult
from firnline.types import Json

__all__ = ["LocalEngine", "run_locally"]


def run_locally(options: PipelineOptions, *, threads: int = 2) -> RunResult:
    """Run a pipeline in this process until its input is exhausted. Takes no lease; `Pipeline.run` is the real thing.

    Raises:
        FirnlineError: the run failed. Committed epochs stay.
    """
    result = Runner(open_pipeline(options, once=True), LocalEngine(threads), once=True).run()
    if result.error is not None:
        raise result.error
    return result


class LocalEngine:
    """Implements `firnline.jobs.engine.Engine`. With one thread, tasks run in order and a run is repeatable."""

    def __init__(self, threads: int = 2) -> None:
        self._threads = threads

    @property
    def parallelism(self) -> int:
        return self._threads

    @property
    def workers(self) -> int:
        return self._threads

    def start(self) -> None:
        """Nothing needs a start."""

    def run(
        self, tag: str, tasks: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        """Run every task; as on Spark, all end before the first failure is raised.

        A task that takes too long is left to itself: what it does later is done by a zombie.
        """
        texts = [json.dumps(task) for task in tasks]  # what does not survive this would not reach a worker
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix=f"task {tag}")
        futures = [pool.submit(perform, json.loads(text)) for text in texts]
        _, late = wait(futures, timeout_seconds)
        pool.shutdown(wait=not late, cancel_futures=True)
        if late:
            raise WorkerLostError(f"a job took longer than {timeout_seconds} s and was stopped", timed_out=True)
        reports = []
        for future in futures:
            try:
                reports.append(json.loads(json.dumps(future.result())))
            except FirnlineError:
                raise
            except Exception as error:  # Spark reports whatever a worker raises as a failed job
                raise EngineError(f"a task failed: {type(error).__name__}: {error}") from error
        return reports

    def run_sql(
        self, tag: str, job: SqlJob, timeout_seconds: float | None = None
    ) -> tuple[pa.Schema, list[dict[str, Json]]]:
        """Refuse: queries need Catalyst."""
        raise EngineError("queries need Spark; this engine has none")

    def cancel(self, tag: str) -> None:
        """Nothing: a task that is no longer wanted ends by itself, and nobody reads what it staged."""

    def stop(self) -> None:
        """Nothing to let go of."""
