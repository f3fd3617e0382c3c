"""Pipelines for tests: options in one call, and runs in this process without Spark."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from firnline.checkpoint.model import Checkpoint
from firnline.errors import FirnlineError
from firnline.options import BatchOptions, CheckpointOptions, Home, PipelineOptions, RestartOptions, StateOptions
from firnline.run.observer import Comparison, EpochFacts, Observer, SinkLag
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.runner import Runner, RunResult
from firnline.sinks.base import Head
from firnline.sinks.delta.options import DeltaSinkOptions, journal_in
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.known import KnownFiles
from firnline.stores.replicator import Replication
from firnline.testing.local import LocalEngine
from firnline.types import EntryRef
from tests.support.samples import SampleInput, quarantined, table_ids

logger = logging.getLogger(__name__)

MakeOptions: TypeAlias = Callable[..., PipelineOptions]

_QUICK = {"backoff_secs": 0.01, "max_backoff_secs": 0.05, "attempts": 3, "poll_interval_secs": 0.05}


def pipeline_options(path: str, table: str, name: str = "demo", **settings: Any) -> PipelineOptions:
    """Options with short waits; every setting goes to the part that has a field of that name.

    With `home`, the pipeline decides in a journal there.
    """
    settings = {**_QUICK, **settings}
    home = settings.pop("home", "")
    sinks = settings.pop("sinks", None)
    taken: set[str] = set()

    def fill(cls: type[Any], **fixed: Any) -> Any:
        names = {f.name for f in dataclasses.fields(cls)} - set(fixed)
        taken.update(names & set(settings))
        return cls(**fixed, **{k: v for k, v in settings.items() if k in names})

    sources = settings.pop("sources", None)
    source = fill(FileSourceOptions, name="files", path=path)
    made = fill(DeltaSinkOptions, name="delta", table=table)
    options = PipelineOptions(
        name=name,
        sources=tuple(sources) if sources else (source,),
        operators=tuple(settings.pop("operators", ())),
        state=fill(StateOptions),
        sinks=tuple(sinks) if sinks else (made,),
        batch=fill(BatchOptions),
        restart=fill(RestartOptions),
        checkpoint=fill(CheckpointOptions),
        spark=settings.get("spark", {}),
        journal=journal_in(Home(str(home))) if home else None,
    )
    unknown = set(settings) - taken - {"spark"}
    if unknown:
        raise TypeError(f"no part has {sorted(unknown)}")
    return options


def delta_table(options: PipelineOptions, index: int = 0) -> DeltaSinkOptions:
    """The options of a sink that is a Delta table."""
    sink = options.sinks[index]
    assert isinstance(sink, DeltaSinkOptions)
    return sink


def file_source(options: PipelineOptions) -> FileSourceOptions:
    """The options of the first source, which reads files."""
    source = options.sources[0]
    assert isinstance(source, FileSourceOptions)
    return source


class Recorder(Observer):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.epochs: list[EpochFacts] = []
        self.troubles: list[FirnlineError] = []
        self.late = 0
        self.changed: list[str] = []
        self.grown: list[str] = []
        self.starts: list[Head] = []
        self.lags: list[Replication] = []
        self.sink_lags: list[SinkLag] = []

    def started(self, run: str, held: Head) -> None:
        self.starts.append(held)

    def sinks(self, lags: Sequence[SinkLag]) -> None:
        self.sink_lags += lags

    def replication(self, lag: Replication) -> None:
        self.lags.append(lag)

    def committed(self, facts: EpochFacts) -> None:
        self.epochs.append(facts)

    def trouble(self, error: FirnlineError, failures: int, optional: str = "") -> None:
        self.troubles.append(error)

    def reconciled(self, found: Comparison) -> None:
        self.late += found.late
        self.changed += found.changed
        self.grown += found.grown


class Loud(Observer):
    """Logs what tests wait for."""

    def running(self, epoch: int) -> None:
        logger.info("running epoch %d", epoch)

    def ran(self, epoch: int, seconds: float) -> None:
        logger.info("ran epoch %d", epoch)

    def committed(self, facts: EpochFacts) -> None:
        logger.info("committed epoch %d", facts.epoch)


@dataclasses.dataclass(frozen=True, slots=True)
class LocalRun:
    """A run that has ended, with what it told."""

    result: RunResult
    told: Recorder
    pipeline: OpenPipeline

    @property
    def exit_code(self) -> int:
        return self.result.exit_code

    @property
    def error_code(self) -> str:
        return self.result.error.code if self.result.error else ""


def run_once(
    options: PipelineOptions,
    *,
    threads: int = 1,
    moved: tuple[str, str] | None = None,
    accept_duplicates: bool = False,
) -> LocalRun:
    """Run in this process, without Spark, until the input is exhausted."""
    pipeline = open_pipeline(options, once=True, moved=moved)
    told = Recorder()
    runner = Runner(pipeline, LocalEngine(threads), told, once=True, accept_duplicates=accept_duplicates)
    return LocalRun(runner.run(), told, pipeline)


def run_to_end(options: PipelineOptions) -> None:
    """Run until the input is exhausted; a run that fails is an error of the test."""
    run = run_once(options)
    assert run.exit_code == 0, run.result


def run_until_epoch(options: PipelineOptions, epoch: int) -> None:
    """Run, and stop hard right after an epoch was committed."""

    class Stopper(Recorder):
        def committed(self, facts: EpochFacts) -> None:
            if facts.epoch >= epoch:
                raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        Runner(open_pipeline(options, once=True), LocalEngine(1), Stopper(), once=True).run()
        raise AssertionError(f"the run ended before epoch {epoch}")


def make_epochs(sample: SampleInput, options: PipelineOptions, count: int, first: int = 1) -> None:
    """One file of three records and one run for each epoch, named by the number."""
    for number in range(first, first + count):
        sample.add(f"f{number:03d}.json", 3)
        run_to_end(options)


def known_files(pipeline: OpenPipeline, tip: EntryRef | None) -> dict[str, str]:
    """Every file that the ledger knows, with its etag. LedgerHoleError when the chain is broken."""
    known = {name: KnownFiles() for name in pipeline.sources.names}
    pipeline.add_known(known, tip)
    return {path: etag for of_source in known.values() for path, etag in of_source}


def two_sinks(folder: Path) -> tuple[DeltaSinkOptions, DeltaSinkOptions]:
    """A table and a copy of it that is partitioned."""
    return (
        DeltaSinkOptions("main", str(folder / "one")),
        DeltaSinkOptions("copy", str(folder / "two"), partition_by=("month",)),
    )


def checkpoint_of(options: PipelineOptions) -> Checkpoint:
    """The newest checkpoint, which must exist."""
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    return checkpoint


def state_folder(options: PipelineOptions) -> Path:
    """The local folder of the operators' state."""
    return Path(open_pipeline(options).state_home.root)


def check_arrived(sample: SampleInput, options: PipelineOptions) -> None:
    """Every record arrived once, in the table or in quarantine."""
    table = options.sinks[0].location
    assert table_ids(table) == sample.ids
    assert quarantined(table, options.name) == sample.bad
