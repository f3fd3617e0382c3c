"""The Python API: a pipeline with the keys of the spec file, run in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firnline.errors import ConfigError, NotRunningError
from firnline.graph import stateful
from firnline.history.schemas import RecordedSchema, load_schema_history
from firnline.history.status import PipelineStatus, load_status
from firnline.jobs.spark import SparkEngine
from firnline.options import PipelineOptions
from firnline.run.control import serving_control
from firnline.run.observer import Observer
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.runner import Runner, RunResult
from firnline.run.standby import holding_lease
from firnline.sources.registry import warm_up
from firnline.spec.build import build_options, load_options
from firnline.spec.loading import parse_spec
from firnline.types import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from firnline.history.state import StateView

logger = logging.getLogger(__name__)

_ENDED_SECONDS = 0.2  # how often a wait for a checkpoint checks whether the run has ended


class Pipeline:
    """One pipeline.

    Takes the keys of a spec file as keyword arguments; relative paths are resolved against the current folder::

        pipeline = firnline.Pipeline(
            name="flights",
            sources={"flights": {"type": "files", "path": "in"}},
            sinks=[{"type": "delta", "table": "out"}],
        )
        result = pipeline.run(once=True)
    """

    def __init__(self, **spec: Any) -> None:
        """Check the spec; starts nothing.

        Raises:
            SpecError: names the key path of every problem.
        """
        loaded = parse_spec(spec, folder=Path.cwd())
        self._set_options(build_options(loaded, environ=os.environ))

    @classmethod
    def load(cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Pipeline:
        """Load a pipeline from a spec file; by default `firnline.yml` in this folder or the nearest one above it.

        Args:
            path: The file, or its folder.
            environ: Where variables and overrides are looked up; by default `os.environ`.

        Raises:
            SpecError: there is no such file, or it has problems; names file, line and key path of each.
        """
        pipeline = cls.__new__(cls)
        pipeline._set_options(load_options(path, environ=os.environ if environ is None else environ))
        return pipeline

    def _set_options(self, options: PipelineOptions) -> None:
        self.options = options
        self._runner: Runner | None = None
        self._lock = threading.Lock()

    def run(
        self,
        *,
        once: bool = False,
        observer: Observer | None = None,
        strict_store: bool = False,
        take_over: bool = False,
    ) -> RunResult:
        """Run in the calling thread until stopped or, with `once`, until the input is exhausted.

        Like `firnline run`, the run takes the lease of the pipeline, and serves the control socket: `firnline status`,
        `pause`, `resume`, `stop` and `checkpoint` reach it. It installs no signal handler; call `stop` in a handler of
        your own.

        Args:
            once: End when the input is exhausted.
            observer: Receives the events of the run.
            strict_store: Fail, after retries, when the checkpoint store cannot be written.
            take_over: Take the lease even from a live run, which then ends as fenced.

        Raises:
            AlreadyRunningError: another run is alive; with `once`, only if there is something to do.
            FirnlineError: the run failed. Committed epochs stay; running again is safe if `error.retryable`.
        """
        options = self.options
        engine = SparkEngine(options.name, options.spark, prepare=lambda: warm_up(options.sources))
        try:
            runner = Runner(open_pipeline(options, once=once, strict_store=strict_store), engine, observer, once=once)
            with ExitStack() as stack:
                stack.enter_context(self._running(runner))
                take_lease = stack.enter_context(
                    holding_lease(
                        options,
                        runner,
                        logger.info,
                        standby=False,
                        stop=threading.Event(),
                        take_over=take_over,
                        at_claim=once,
                    )
                )
                assert take_lease is not None  # only a standby is stopped while it waits
                stack.enter_context(serving_control(options, runner, os.environ, logger.info, once=once))
                result = runner.run(take_lease)
        finally:
            engine.stop()
        if result.error is not None:
            raise result.error
        return result

    @contextmanager
    def _running(self, runner: Runner) -> Iterator[None]:
        """Make a run reachable for other threads while it lasts."""
        with self._lock:
            before, self._runner = self._runner, runner
        try:
            yield
        finally:
            with self._lock:
                self._runner = before

    def stop(self) -> None:
        """Stop the run of this object after the epochs in flight; returns at once, `run` returns when they are done.

        May be called from any thread, and from a signal handler.

        Raises:
            NotRunningError: `run` is not running in this process.
        """
        self._active().stop()

    def pause(self) -> bool:
        """Pause planning in the run of this object; epochs in flight are committed. False if it was already paused.

        Raises:
            NotRunningError: `run` is not running in this process.
        """
        return self._active().pause()

    def resume(self) -> bool:
        """Let a paused run continue; False if it was not paused.

        Raises:
            NotRunningError: `run` is not running in this process.
        """
        return self._active().resume()

    def _active(self) -> Runner:
        runner = self._runner  # no lock: a signal handler may have interrupted the thread that holds it
        if runner is None:
            raise NotRunningError(f"pipeline {self.options.name!r} is not running in this process")
        return runner

    def status(self) -> PipelineStatus:
        """Read epoch, backlog, runs and copies of the pipeline; starts no JVM."""
        return load_status(open_pipeline(self.options))

    def schema_history(self, table: str = "", source: str = "") -> list[RecordedSchema]:
        """Read every schema that captured tables had, oldest first; starts no JVM.

        Args:
            table: Only this table, with or without its schema.
            source: Only the tables of this source.
        """
        return load_schema_history(open_pipeline(self.options), table, source)

    # -- checkpoints ------------------------------------------------------------------------------------

    def trigger_checkpoint(self) -> str:
        """Make the run of this object take a checkpoint now; returns its id once it is committed.

        Call it from another thread than `run`. The run lists its input at once; if there is none, the id is that of
        the newest checkpoint.

        Raises:
            ConfigError: the pipeline has no stateful operator or no source.
            NotRunningError: `run` is not running in this process, or ended before the checkpoint was taken.
        """
        if not self.options.sources:
            raise ConfigError(f"pipeline {self.options.name!r} has no source, so there is nothing to checkpoint")
        self._check_stateful()
        runner = self._active()
        watch = runner.checkpoint()
        while not watch.done.wait(_ENDED_SECONDS):
            if self._runner is not runner and not watch.done.is_set():
                raise NotRunningError(f"the run of {self.options.name!r} ended before it took the checkpoint")
        return str(watch.answer["id"])

    def restore_from_checkpoint(self, checkpoint_id: str) -> int:
        """Roll tables, positions and state back to a checkpoint, together; returns the newest epoch afterwards.

        `firnline checkpoints` lists the ids. The next run reads the input after the checkpoint again. An active run
        is fenced. Rolling back to the newest checkpoint changes nothing.

        Raises:
            ConfigError: no checkpoint of the pipeline's history has this id.
            RollbackRefusedError: the rollback is not possible; the message gives the reason.
        """
        from firnline.history.edits.rollback import Rollback

        pipeline = open_pipeline(self.options)
        head = pipeline.load()
        epoch = next((e.epoch for e in pipeline.entries(head.entry) if e.checkpoint.attempt == checkpoint_id), None)
        if epoch is None:
            raise ConfigError(
                f"pipeline {self.options.name!r} has no checkpoint {checkpoint_id!r}",
                hint="`firnline checkpoints` lists the ids.",
            )
        if epoch == head.epoch:
            return epoch
        plan, _ = Rollback(pipeline, epoch).perform(pipeline.ids.new())
        return plan.new_epoch

    def restored_position(self) -> dict[str, Json] | None:
        """Read the positions of the sources, by name, from which the next run resumes; None before the first epoch."""
        checkpoint = open_pipeline(self.options).load().checkpoint
        return None if checkpoint is None else dict(checkpoint.positions)

    # -- the state of operators -------------------------------------------------------------------------

    def export_state_for_keys(
        self, operator: str, keys: pa.Table | Sequence[Mapping[str, Any]] | None = None
    ) -> pa.Table:
        """Read the state of an operator at the newest checkpoint.

        Args:
            operator: Its name.
            keys: The keys to read, with all columns of the key or only those that decide the shard (then all keys
                that begin with them); by default every key. Keys without state are absent from the result.

        Returns:
            The columns of the key, `_timer`, and the columns of the state.

        Raises:
            ConfigError: there is no such operator, or the key has other columns.
        """
        import pyarrow as pa

        reader = self._state(open_pipeline(self.options), operator).reader
        if keys is None:
            return pa.concat_tables([reader.schema.empty_table(), *reader.scan()])
        return reader.find(keys if isinstance(keys, pa.Table) else _as_table(keys, reader.layout.key))

    def import_state_for_keys(self, operator: str, table: pa.Table) -> int:
        """Set the state of some keys of an operator; returns the newest epoch afterwards.

        `table` has the columns of an export, every key once; `_timer` may be missing. Other keys keep their state. The
        import is a history edit: an epoch that reads nothing and changes only the state. An active run is fenced.

        Raises:
            ConfigError: there is no such operator, or the rows have other columns.
            CheckpointError: the newest snapshot of the state is older than the newest epoch.
        """
        return self._import(operator, table, replace_all=False)

    def snapshot(self, operator: str, path: str | Path) -> int:
        """Write the whole state of an operator to a new Parquet file; returns the number of keys.

        Raises:
            ConfigError: there is no such operator, or the file already exists.
        """
        from firnline.state.export import write_export

        view = self._state(open_pipeline(self.options), operator)
        about = {"pipeline": view.pipeline, "operator": operator, "epoch": view.ref.epoch}
        facts = {**about, "keys": len(view.reader.layout.key)}
        return write_export(str(path), view.reader.schema, view.reader.scan(), facts)

    def restore(self, operator: str, path: str | Path) -> int:
        """Replace the whole state of an operator by what `snapshot` wrote; returns the newest epoch afterwards.

        Raises:
            ConfigError: there is no such operator or file, or the rows have other columns.
            CheckpointError: the newest snapshot of the state is older than the newest epoch.
        """
        from firnline.state.load import read_export

        return self._import(operator, read_export(str(path)), replace_all=True)

    def _state(self, pipeline: OpenPipeline, operator: str) -> StateView:
        from firnline.history.state import load_state_view

        return load_state_view(pipeline, operator)

    def _import(self, operator: str, table: pa.Table, *, replace_all: bool) -> int:
        from firnline.history.edits.operator_state import import_state

        pipeline = open_pipeline(self.options)
        receipt = import_state(pipeline, operator, table, pipeline.ids.new(), replace_all=replace_all)
        return receipt.epoch if receipt is not None else pipeline.load().epoch

    def _check_stateful(self) -> None:
        if not stateful(self.options):
            raise ConfigError(
                f"pipeline {self.options.name!r} has no stateful operator, so there is no state to checkpoint",
                hint="Every epoch checkpoints the positions of sources by itself.",
            )


def _as_table(keys: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Convert rows of Python values to a table; its columns take the types of the key."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in keys for name in row))
    known = pa.schema([field for field in schema if field.name in names])
    unknown = [name for name in names if name not in known.names]
    if unknown or any(len(row) < len(names) for row in keys):
        raise ConfigError(
            f"the key has the columns {', '.join(schema.names)}; a row has others or lacks some: {', '.join(names)}",
            hint="Give every row a value for each column of the key.",
        )
    try:
        return pa.Table.from_pylist([dict(row) for row in keys], schema=known if names else schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ConfigError(f"a value of the keys does not fit its column: {error}") from error
