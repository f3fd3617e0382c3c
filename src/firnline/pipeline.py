"""The Python API: a pipeline with the keys of the spec file, run in this process."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firnline.clock import SystemClock
from firnline.errors import AlreadyRunningError, ConfigError, FirnlineError, NotRunningError
from firnline.graph import stateful
from firnline.history.schemas import RecordedSchema, in_force, in_force_at, load_schema_history
from firnline.history.status import PipelineStatus, load_status
from firnline.jobs.spark import SparkEngine
from firnline.options import PipelineOptions
from firnline.run.control import serving_control
from firnline.run.events import Event, EventLog
from firnline.run.observer import Observer, Observers
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.runner import Runner, RunResult
from firnline.run.standby import editing_history, holding_lease
from firnline.run.status import RunStatus
from firnline.run.trend import TrendLog
from firnline.sources.registry import warm_up
from firnline.spec.build import build_options, load_options
from firnline.spec.loading import parse_spec
from firnline.telemetry.opening import open_telemetry
from firnline.types import Json

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from firnline.history.edits.rollback import RollbackPlan
    from firnline.history.savepoints.catalog import SavepointInfo
    from firnline.history.state import StateView

logger = logging.getLogger(__name__)

_STARTING = threading.Lock()
_STARTED: dict[tuple[str, str], object] = {}  # the runs of this process that `start` began, by pipeline and home

_ENDED_SECONDS = 0.2  # how often a wait for a checkpoint checks whether the run has ended


class Run:
    """A run on a thread of its own, as `Pipeline.start` returns it. All methods may be called from any thread."""

    def __init__(self, runner: Runner, events: EventLog, result: Future[RunResult]) -> None:
        self._runner = runner
        self._events = events
        self._result = result

    @property
    def id(self) -> str:
        """The id of the run, as the run history has it."""
        return self._runner.run_id

    @property
    def is_done(self) -> bool:
        """Whether the run has ended."""
        return self._result.done()

    def pause(self) -> bool:
        """Pause planning; epochs in flight are committed. False if it was already paused."""
        return self._runner.pause()

    def resume(self) -> bool:
        """Let the paused run continue; False if it was not paused."""
        return self._runner.resume()

    def stop(self) -> None:
        """Stop after the epochs in flight; returns at once. May be called from a signal handler."""
        self._runner.stop()

    def wait(self, timeout: float | None = None) -> RunResult:
        """Wait until the run has ended, and return its result.

        Raises:
            TimeoutError: it has not ended after `timeout` seconds, and goes on.
            FirnlineError: the run failed. Committed epochs stay; running again is safe if `error.retryable`.
        """
        return self._result.result(timeout)

    def status(self) -> RunStatus:
        """Return the state (starting, running, pausing, paused, stopping, ended), the epoch, and epochs in flight."""
        return self._runner.status()

    def events(self, timeout: float | None = None) -> Iterator[Event]:
        """Yield what happens, from the oldest event that is kept, until the run has ended.

        Args:
            timeout: End if nothing happens for so many seconds.
        """
        return self._events.read(timeout)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        try:
            self.wait()
        except FirnlineError:
            if kind is None:  # an error of the block is the one to report
                raise


@contextmanager
def _started(key: tuple[str, str], mine: object) -> Iterator[None]:
    """Let the pipeline be started again once its run has ended, before anybody who waits for the run learns that."""
    try:
        yield
    finally:
        with _STARTING:
            if _STARTED.get(key) is mine:
                del _STARTED[key]


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
        return self._run(lambda _: None, observer, once=once, strict_store=strict_store, take_over=take_over)

    def start(
        self,
        *,
        once: bool = False,
        observer: Observer | None = None,
        strict_store: bool = False,
        take_over: bool = False,
    ) -> Run:
        """Run on a thread of its own, and return a handle for it once the run can be controlled.

        The handle is a context manager that stops the run at the end of its block. The arguments are those of `run`.
        The thread does not hold up the end of the process, which is as safe as a kill at any other moment.

        Raises:
            ConfigError: the pipeline cannot be opened. All later errors come from `Run.wait`.
            AlreadyRunningError: this process runs the pipeline already, and `take_over` is false.
        """
        key = (self.options.name, self.options.home.root)
        mine = object()
        with _STARTING:
            if key in _STARTED and not take_over:
                raise AlreadyRunningError(
                    f"this process runs {self.options.name!r} already",
                    hint="Stop that run and wait for it, or start this one with take_over=True, which ends it.",
                )
            _STARTED[key] = mine
        events = EventLog(SystemClock())
        observers = events if observer is None else Observers(events, observer)
        found: Future[Runner] = Future()
        result: Future[RunResult] = Future()

        def run() -> None:
            try:
                with _started(key, mine):
                    ended = self._run(
                        found.set_result, observers, once=once, strict_store=strict_store, take_over=take_over
                    )
                result.set_result(ended)
            except BaseException as error:
                result.set_exception(error)
                if not found.done():
                    found.set_exception(error)
            finally:
                events.close()

        threading.Thread(target=run, name=f"firnline run of {self.options.name}", daemon=True).start()
        return Run(found.result(), events, result)

    def _run(
        self,
        opened: Callable[[Runner], None],
        observer: Observer | None,
        *,
        once: bool,
        strict_store: bool,
        take_over: bool,
    ) -> RunResult:
        """Run in this thread; calls `opened` once the run can be controlled."""
        options = self.options
        engine = SparkEngine(options.name, options.spark, prepare=lambda: warm_up(options.sources))
        try:
            pipeline = open_pipeline(options, once=once, strict_store=strict_store)
            trend = TrendLog(pipeline.storage, options.name, pipeline.clock)
            told = open_telemetry(options, pipeline.clock, os.environ, logger.warning)
            observers = Observers(trend, *told, *([observer] if observer else []))
            runner = Runner(pipeline, engine, observers, once=once)
            opened(runner)
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

    def schema_history(
        self, table: str = "", source: str = "", *, at: int | None = None, at_position: str = ""
    ) -> list[RecordedSchema]:
        """Read every schema that captured tables had, oldest first; starts no JVM.

        Args:
            table: Only this table, with or without its schema.
            source: Only the tables of this source.
            at: Only the schemas in force after this epoch.
            at_position: Only those in force at this place in the log, such as 0/16B3748 or binlog.000002:4711.

        Raises:
            ConfigError: `at` beside `at_position`, or no schema was in force there.
        """
        if at is not None and at_position:
            raise ConfigError("at and at_position ask for two moments", hint="Give one of them.")
        history = load_schema_history(open_pipeline(self.options), table, source)
        if at is not None:
            return in_force(history, at)
        return in_force_at(history, at_position) if at_position else history

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

    def checkpoints(self, limit: int | None = 20, before: int | None = None) -> list[dict[str, Json]]:
        """Read the newest checkpoints, at most `limit`, all before the epoch `before`; the fields are those of
        `firnline checkpoints --json`."""
        from firnline.history.checkpoints import load_checkpoints
        from firnline.history.store import read_with_store

        pipeline = open_pipeline(self.options)
        read = partial(load_checkpoints, pipeline, limit, before=before)
        return read_with_store(pipeline, lambda store: read(store), logger.warning).checkpoints

    def plan_rollback(self, to_epoch: int, *, accept: Sequence[str] = (), leave: Sequence[str] = ()) -> RollbackPlan:
        """Return what a rollback would do; changes nothing. `refusals` says why it is not possible.

        Args:
            to_epoch: The epoch to go back to.
            accept: Names of other writers whose later rows may be lost.
            leave: Sinks that keep their rows, and get them again.
        """
        from firnline.history.edits.rollback import Rollback

        return Rollback(open_pipeline(self.options), to_epoch, accept=accept, leave=leave).plan()

    def rollback(
        self, to_epoch: int, *, accept: Sequence[str] = (), leave: Sequence[str] = (), take_over: bool = False
    ) -> RollbackPlan:
        """Roll tables, columns, state and checkpoint back to an earlier epoch, together; returns the plan performed.

        The next run reads the input after that epoch again. The arguments are those of `plan_rollback`.

        Args:
            take_over: Do it even while a run is alive, which then ends as fenced.

        Raises:
            AlreadyRunningError: a run is alive.
            RollbackRefusedError: the rollback is not possible; the message gives the reason.
        """
        from firnline.history.edits.rollback import Rollback

        pipeline = open_pipeline(self.options)
        edit = Rollback(pipeline, to_epoch, accept=accept, leave=leave)
        edit.plan().check()  # a refusal must not end a run
        run = pipeline.ids.new()
        with editing_history(self.options, run, logger.info, take_over=take_over):
            return edit.perform(run)[0]

    def create_savepoint(self, path: str | None = None, *, copy: bool = False) -> str:
        """Save the newest epoch; returns the path of the savepoint.

        Args:
            path: A new folder or URI; by default below `savepoints/` beside the checkpoint store.
            copy: Copy the data files and the operators' state, too.
        """
        from firnline.history.savepoints.create import create_savepoint

        pipeline = open_pipeline(self.options)
        options = dict(self.options.home.storage_options)
        return create_savepoint(pipeline, path, copy=copy, run=pipeline.ids.new(), storage_options=options)[1]

    def savepoints(self) -> list[SavepointInfo]:
        """Read the savepoints of the pipeline."""
        from firnline.history.savepoints.catalog import list_savepoints

        return list_savepoints(open_pipeline(self.options), dict(self.options.home.storage_options))

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
