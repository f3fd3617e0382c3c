"""The pipeline that a drill runs: the user's own, under another name, with everything that it writes in one folder.

Run as a module, it is the process that the drill kills. It takes no lease and opens no control socket.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from firnline.clock import SystemClock

if TYPE_CHECKING:
    from firnline.options import DeltaSinkOptions, PipelineOptions, SourceOptions
    from firnline.run.open_pipeline import OpenPipeline

ONE_DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class DrillPlan:
    """What every run of one drill reads, and in which portions: only then can two of them be compared."""

    files: Mapping[str, Sequence[str]]  # by source
    max_files: int
    lineage: bool
    time: str  # what the clock shows for `epoch_time()`

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> DrillPlan:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class _StoppedClock(SystemClock):
    """A wall clock that stands still, so that `epoch_time()` is the same in every run of the drill."""

    def __init__(self, moment: datetime) -> None:
        self._moment = moment

    def now(self) -> datetime:
        return self._moment


def drill_options(options: PipelineOptions, plan: DrillPlan, folder: Path) -> PipelineOptions:
    """The pipeline with another name, and with tables, store and tiers in `folder`."""
    from firnline.options import StoreOptions

    def source(one: SourceOptions) -> SourceOptions:
        return replace(one, lineage=one.lineage or plan.lineage)

    def sink(index: int, one: DeltaSinkOptions) -> DeltaSinkOptions:
        return replace(one, table=str(folder / f"table-{index}"), storage_options={})

    checkpoint = options.checkpoint
    local = replace(checkpoint.local, path=str(folder / "local")) if checkpoint.local else None
    remote = replace(checkpoint.remote, uri=str(folder / "remote"), storage_options={}) if checkpoint.remote else None
    return replace(
        options,
        name=f"{options.name}-drill",
        sources=tuple(source(one) for one in options.sources),
        sinks=tuple(sink(index, one) for index, one in enumerate(options.sinks)),
        batch=replace(options.batch, max_files=plan.max_files, max_ms=ONE_DAY_MS),
        checkpoint=replace(
            checkpoint, store=StoreOptions(type="file", path=str(folder / "store")), local=local, remote=remote
        ),
    )


def drill_pipeline(options: PipelineOptions, plan: DrillPlan, folder: Path) -> OpenPipeline:
    """Open the pipeline of a drill; its sources show the planned files alone, and wait for each other."""
    from firnline.run.open_pipeline import open_pipeline

    clock = _StoppedClock(datetime.fromisoformat(plan.time))
    pipeline = open_pipeline(drill_options(options, plan, folder), once=True, clock=clock)
    for source in pipeline.sources:
        source.restrict(plan.files[source.name])
    pipeline.sources.align_seconds = ONE_DAY_MS / 1000
    return pipeline


def run_drill(spec: str, plan: Path, folder: Path) -> int:
    """Run the pipeline until the planned input is exhausted; the process that the drill kills does this."""
    from firnline.cli.output import print_failure
    from firnline.errors import FirnlineError
    from firnline.jobs import spark
    from firnline.run.runner import Runner
    from firnline.spec.build import load_options

    try:
        pipeline = drill_pipeline(load_options(spec, environ=os.environ), DrillPlan.load(plan), folder)
        engine = spark.SparkEngine(pipeline.options.name, pipeline.options.spark)
        try:
            result = Runner(pipeline, engine, once=True).run()
        finally:
            engine.stop()
    except FirnlineError as error:
        print_failure(error, debug=True)
        return error.exit_code
    if result.error is not None:
        print_failure(result.error, debug=True)
    return result.exit_code


def main() -> None:
    """Run as the arguments say: spec, plan, folder."""
    spec, plan, folder = sys.argv[1:]
    code = run_drill(spec, Path(plan), Path(folder))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
