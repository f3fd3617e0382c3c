"""Records a snapshot for a member that has no run: starts a paused run, which records it and nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pyarrow as pa

from firnline.errors import AlreadyRunningError
from firnline.jobs.engine import Engine, SqlJob
from firnline.maintenance.references import is_live
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.run.standby import editing_history
from firnline.types import Json


class OnDemandEngine:
    """An engine that is started by its first job: an epoch without input and without state has none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def parallelism(self) -> int:
        return self._engine.parallelism

    @property
    def workers(self) -> int:
        return self._engine.workers

    def start(self) -> None:
        """Wait for the first job."""

    def run(
        self, tag: str, tasks: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        if not tasks:
            return []
        self._engine.start()
        return self._engine.run(tag, tasks, timeout_seconds)

    def run_sql(
        self, tag: str, job: SqlJob, timeout_seconds: float | None = None
    ) -> tuple[pa.Schema, list[dict[str, Json]]]:
        self._engine.start()
        return self._engine.run_sql(tag, job, timeout_seconds)

    def cancel(self, tag: str) -> None:
        self._engine.cancel(tag)

    def stop(self) -> None:
        self._engine.stop()


@contextlib.contextmanager
def paused_run(options: PipelineOptions, engine: Engine, say: Callable[[str], None]) -> Iterator[bool]:
    """Run a stopped member, paused, in a thread, until the block ends. Yields False if a run of it is alive."""
    pipeline = open_pipeline(options, once=True)
    generation = pipeline.deciding.read_fence().generation
    if is_live(pipeline.storage, options.name, generation):
        yield False
        return
    runner = Runner(pipeline, OnDemandEngine(engine), once=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(editing_history(options, runner.run_id, say, take_over=False))
        except AlreadyRunningError:
            yield False
            return
        runner.pause()
        thread = threading.Thread(target=runner.run, name=f"firnline {options.name}", daemon=True)
        thread.start()
        try:
            yield True
        finally:
            runner.stop()
            thread.join()
