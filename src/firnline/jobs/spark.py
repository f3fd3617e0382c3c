"""Spark: one session that is ready at once, and jobs whose tasks run in Python workers."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import shlex
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from importlib.metadata import PackageNotFoundError, requires
from typing import TYPE_CHECKING, Any, Literal

from firnline.errors import (
    ConfigError,
    EngineError,
    FirnlineError,
    WorkerLostError,
    error_report,
    rebuild_error,
)
from firnline.jobs.class_archive import find_archive
from firnline.jobs.engine import SqlJob
from firnline.process import HungError, TimedCalls
from firnline.types import Json

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

DEFAULTS = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
    "spark.driver.memory": "1g",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.shuffle.partitions": "8",  # a cluster with large sorts sets more
    "spark.sql.session.timeZone": "UTC",
    "spark.python.worker.reuse": "true",
}
OPTIONS_KEY = "spark.driver.extraJavaOptions"
LISTEN_KEY = "SPARK_LOCAL_IP"
LOCAL_DEFAULTS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # The JVM only schedules here: without the second compiler and with the plain collector it starts in 0.6 of
    # the time.
    OPTIONS_KEY: "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


Start = Literal["starting", "started", "failed"]  # of a session

START_HINT = (
    "Check `java -version` (17 or newer), JAVA_HOME and the keys below `spark` in the spec; "
    "--debug shows everything that the JVM printed."
)
KEPT_LINES, MAX_LINE = 200, 8192  # of the JVM's output
WORDS, MAX_REASON = 3, 400  # lines and characters of it in a message
DRAIN_SECONDS = 5.0
STOP_SECONDS = 30.0  # for Spark to stop; a JVM ends with its parent in any case
# Lines that explain no failure: frames of a stack trace, and what Spark and the JVM say at any start.
_NOISE = re.compile(
    r"\s+at |\s*\.\.\. \d+ more|WARNING: |Using Spark's default|Setting default log level|To adjust log"
    r"|\S+/spark-class: line \d+|\[[\d.]+s\]\[warning\]\[cds"
)


# How Spark reports a dead worker or executor; any other error is a failure of the task itself.
_LOSS = re.compile(
    r"exited unexpectedly|worker crashed|ExecutorLost|[Ee]xecutor (?:\S+ )?(?:lost|exited|heartbeat)|Lost executor"
    r"|Connection reset|Broken pipe|EOFException|SIGKILL|exit code 137"
)


def open_session(name: str, settings: Mapping[str, str]) -> SparkSession:
    """Start Spark, or join the caller's existing session.

    Raises:
        ConfigError: there is no Java, or the environment requests Spark Connect.
        EngineError: Spark does not start.
    """
    if os.environ.get("SPARK_REMOTE") or os.environ.get("SPARK_CONNECT_MODE_ENABLED"):
        raise ConfigError(
            "Spark Connect is not supported, and SPARK_REMOTE asks for it",
            hint="Unset SPARK_REMOTE (and SPARK_CONNECT_MODE_ENABLED), and name the cluster with spark.master.",
        )
    java = find_java()
    if java is None:
        home = os.environ.get("JAVA_HOME")
        raise ConfigError(
            f"JAVA_HOME is {home}, but {os.path.join(home, 'bin', 'java')} cannot be run; Spark needs Java 17 or newer"
            if home
            else "no Java found, and Spark needs Java 17 or newer",
            hint="Install one (Debian: apt-get install openjdk-17-jre-headless; macOS: brew install openjdk@17) or set "
            "JAVA_HOME.",
        )
    # Workers must see the driver's packages; the variable also reaches executors on other hosts.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise _no_pyspark(f"cannot be imported ({error})") from error

    config = {**DEFAULTS, **settings}
    if config["spark.master"].startswith("local"):
        config = {**LOCAL_DEFAULTS, **config}
        if OPTIONS_KEY not in settings and (archive := find_archive(java)) is not None:
            config[OPTIONS_KEY] += f" -XX:SharedArchiveFile={archive}"
        # Of the small JVM that puts together the command of the large one.
        os.environ.setdefault("SPARK_LAUNCHER_OPTS", LOCAL_DEFAULTS[OPTIONS_KEY])
        # Spark's own pages, if the spec turns them on, know no password; no setting but this says where they listen.
        os.environ.setdefault(LISTEN_KEY, LOCAL_DEFAULTS["spark.driver.bindAddress"])
    elif config["spark.ui.enabled"].lower() == "true" and not os.environ.get(LISTEN_KEY):
        logger.warning(
            "Spark's own pages (spark.ui.enabled) listen on every address of this machine, without a password: "
            "set %s to the address that executors reach the driver by, or close their port to others",
            LISTEN_KEY,
        )
    builder = SparkSession.builder.appName(f"firnline {name}")
    for key, value in config.items():
        builder = builder.config(key, value)
    try:
        _start_jvm({"spark.app.name": f"firnline {name}", **config})
        return builder.getOrCreate()
    except EngineError:
        raise
    except SystemExit as error:  # PySpark ends the process if it has no Spark
        raise _no_pyspark("has no Spark beside it (bin/spark-submit and jars)") from error
    except Exception as error:  # py4j and pyspark raise many classes here
        raise EngineError(f"Spark does not start: {java_reason(error)}", hint=START_HINT) from error


def _no_pyspark(problem: str) -> ConfigError:
    """Return the error of an installation that lacks Spark."""
    wanted = "pyspark"
    with contextlib.suppress(PackageNotFoundError):  # Firnline runs from a folder
        wanted = next((one for one in requires("firnline") or () if re.match(r"pyspark\b", one)), wanted)
    command = shlex.join([sys.executable, "-m", "pip", "install", "--force-reinstall", wanted])
    return ConfigError(
        f"PySpark of {sys.executable} {problem}, so that no Spark can start",
        hint=f"Install it again: {command}. Or set SPARK_HOME to a Spark of the same version.",
    )


def _start_jvm(config: Mapping[str, str]) -> None:
    """Start the JVM of Spark, unless this process has one. What the JVM prints is kept off the terminal.

    Only the output of the JVM is redirected: stderr of this process stays as it is, so that no message, warning or
    traceback is lost meanwhile.

    Raises:
        EngineError: the JVM exited; the message ends with its last words.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    with SparkContext._lock:
        if SparkContext._gateway is not None:
            return
        settings = SparkConf(loadDefaults=False).setAll(list(config.items()))
        with JvmOutput() as output:
            try:
                gateway = launch_gateway(settings, {"stdout": output.pipe, "stderr": output.pipe})  # type: ignore[no-untyped-call]
            except PySparkRuntimeError as error:
                raise EngineError(f"Spark does not start: {output.last_words() or error}", hint=START_HINT) from error
        SparkContext._ensure_initialized(gateway=gateway)


class JvmOutput:
    """What the JVM and its children print, for as long as they live: logged as debug lines, the last ones kept.

    The JVM writes to `pipe`, which this process closes at the end of `with`.
    """

    def __init__(self) -> None:
        read, self.pipe = os.pipe()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._thread = threading.Thread(target=self._drain, args=(read,), name="firnline spark output", daemon=True)
        self._thread.start()

    def __enter__(self) -> JvmOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def _drain(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8", errors="replace") as stream:
            while line := stream.readline(MAX_LINE):
                if line.strip():
                    self._lines.append(line.rstrip())
                    logger.debug("spark: %s", line.rstrip())

    def last_words(self) -> str:
        """Return the last lines of a JVM that has exited, without stack traces, as one line."""
        self._close()
        self._thread.join(DRAIN_SECONDS)  # a child of the JVM may still hold the pipe
        words = [line.strip() for line in list(self._lines) if not _NOISE.match(line)]
        return "; ".join(words[-WORDS:])[:MAX_REASON]


def java_reason(error: BaseException) -> str:
    """Return the reason in an error of py4j, without Java's stack trace."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    causes = [line[2:] for line in lines if line.startswith(": ")]
    return (causes or lines or [type(error).__name__])[0][:MAX_REASON]


def find_java() -> str | None:
    """Return the Java that Spark would start, or None."""
    home = os.environ.get("JAVA_HOME")
    if home:
        java = os.path.join(home, "bin", "java")
        return java if os.access(java, os.X_OK) else None
    return shutil.which("java")


class SparkEngine:
    """Runs tasks on Spark. The session starts with `start` or with the first job, and serves every later job.

    `prepare` runs once during the start of the session, and ends before the first job. `on_start` is called when a
    session begins to start and when it has started or failed, from the thread that starts it.
    """

    def __init__(
        self,
        name: str,
        settings: Mapping[str, str],
        prepare: Callable[[], None] | None = None,
        on_start: Callable[[Start], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._prepare = prepare
        self._on_start = on_start
        self._lock = threading.Lock()
        self._session: SparkSession | None = None
        self._starting: Future[SparkSession] | None = None

    def start(self) -> None:
        """Start Spark in the background, unless it has started. The first job waits for it, and raises its failure."""
        if self._session is None:
            self._begin()

    def _begin(self) -> Future[SparkSession]:
        with self._lock:
            if self._starting is None:
                self._starting = Future()
                # A daemon: a process that has nothing to do ends without waiting for the JVM.
                threading.Thread(
                    target=self._open, args=(self._starting,), name="firnline spark start", daemon=True
                ).start()
            return self._starting

    def _open(self, starting: Future[SparkSession]) -> None:
        self._on_start("starting")
        try:
            with self._preparing():
                session = open_session(self._name, self._settings)
        except BaseException as error:  # for whoever waits
            self._on_start("failed")
            starting.set_exception(error)
        else:
            self._on_start("started")
            starting.set_result(session)

    @property
    def session(self) -> SparkSession:
        """The Spark session; the first call starts it unless `start` did."""
        if self._session is None:
            starting = self._begin()
            try:
                self._session = starting.result()
            finally:
                with self._lock:
                    if self._starting is starting:
                        self._starting = None
        return self._session

    @contextlib.contextmanager
    def _preparing(self) -> Iterator[None]:
        prepare, self._prepare = self._prepare, None
        thread = threading.Thread(target=prepare, name="firnline prepare") if prepare is not None else None
        if thread is not None:
            thread.start()
        try:
            yield
        finally:
            if thread is not None:
                thread.join()

    @property
    def parallelism(self) -> int:
        """The number of tasks that run at once, without starting Spark."""
        master = self._settings.get("spark.master", DEFAULTS["spark.master"])
        if master.startswith("local["):
            cores = master[6:].split(",")[0].rstrip("]")
            return os.cpu_count() or 1 if cores == "*" else int(cores)
        if master == "local":
            return 1
        if master.startswith("local-cluster["):
            return self._executors * int(master[14:].rstrip("]").split(",")[1])
        return self._executors * int(self._settings.get("spark.executor.cores", "2"))

    @property
    def _executors(self) -> int:
        """Return the expected number of executors."""
        master = self._settings.get("spark.master", DEFAULTS["spark.master"])
        if master.startswith("local-cluster["):
            return int(master[14:].split(",")[0])
        return int(self._settings.get("spark.executor.instances", "2"))

    @property
    def workers(self) -> int:
        """Return how many tasks could run at once now: fewer than `parallelism` while executors are lost."""
        context = self._session.sparkContext if self._session is not None else None
        if context is None or re.fullmatch(r"local(\[.*\])?", context.master or ""):
            return self.parallelism
        cores = self.parallelism // max(1, self._executors)
        executors = int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the driver is one of them
        return min(self.parallelism, executors * cores)

    def run(
        self, tag: str, tasks: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        """Run every task and return their reports, in the order of the tasks.

        Raises:
            EngineError: Spark failed, or a task did not end in time; repeating is safe.
            FirnlineError: an error that a task raised.
        """
        if not tasks:
            return []
        with self._job(tag, timeout_seconds) as session:
            frame = session.range(0, len(tasks), 1, len(tasks)).mapInArrow(_runner_of(tasks), "report string")
            reports = [json.loads(row.report) for row in frame.collect()]
        for report in reports:
            if "error" in report:
                raise rebuild_error(report["error"])
        return sorted(reports, key=lambda r: int(r["task"]))

    def run_sql(
        self, tag: str, job: SqlJob, timeout_seconds: float | None = None
    ) -> tuple[pa.Schema, list[dict[str, Json]]]:
        """Run a query, write its rows to their destinations, and return their columns and the tasks' reports."""
        from firnline.jobs.spark_sql import run_sql

        with self._job(tag, timeout_seconds) as session:
            return run_sql(session, job)

    @contextlib.contextmanager
    def _job(self, tag: str, timeout_seconds: float | None) -> Iterator[SparkSession]:
        """Run a job that is cancelled by its tag if it takes too long. Its failure becomes an EngineError."""
        session = self.session
        late = threading.Event()

        def stop() -> None:
            late.set()
            self.cancel(tag)

        watch = threading.Timer(timeout_seconds, stop) if timeout_seconds is not None else None
        try:
            session.sparkContext.addJobTag(tag)  # a session's own tags do not reach the jobs (measured)
            if watch is not None:
                watch.daemon = True
                watch.start()
            yield session
        except FirnlineError:
            raise
        except Exception as error:  # py4j, pyspark and socket errors alike
            if late.is_set():
                raise WorkerLostError(
                    f"a Spark job took longer than {timeout_seconds:g} s and was stopped", timed_out=True
                ) from error
            if not self._is_alive():
                self.abandon()
                raise WorkerLostError(f"Spark is gone: {first_line(error)}") from error
            if _LOSS.search(str(error)):
                raise WorkerLostError(f"a Spark job lost a worker: {first_line(error)}") from error
            raise EngineError(f"a Spark job failed: {first_line(error)}") from error
        finally:
            if watch is not None:
                watch.cancel()
            with contextlib.suppress(Exception):
                session.sparkContext.removeJobTag(tag)

    def cancel(self, tag: str) -> None:
        """Cancel a job."""
        session = self._session
        if session is not None:
            with contextlib.suppress(Exception):
                session.sparkContext.cancelJobsWithTag(tag)

    def _is_alive(self) -> bool:
        try:
            assert self._session is not None
            return bool(self._session._jsparkSession.version())  # `session.version` keeps its first answer
        except Exception:  # any answer except a version means that the JVM is dead
            return False

    def abandon(self) -> None:
        """Drop a session whose JVM has died, so that the next job starts a new one."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        logger.warning("spark is gone; a new session starts with the next job")
        self._session = None
        SparkSession._instantiatedSession = None
        SparkContext._active_spark_context = None
        SparkContext._gateway = None
        SparkContext._jvm = None

    def stop(self) -> None:
        """Stop Spark, if it was started. Waits for no start that is under way; a dead or hanging JVM is no error."""
        with self._lock:
            starting, self._starting = self._starting, None
        if self._session is not None:
            try:
                TimedCalls(STOP_SECONDS, "firnline spark stop").call(self._session.stop)
            except HungError as error:
                logger.warning("spark does not stop", extra={"reason": str(error)})
            except Exception as error:
                logger.debug("spark did not stop cleanly", extra={"reason": first_line(error)})
            self._session = None
        elif starting is not None:
            starting.add_done_callback(_stop_started)


def _stop_started(starting: Future[SparkSession]) -> None:
    """Stop a session that nobody waits for any more."""
    if starting.exception() is None:
        with contextlib.suppress(Exception):
            starting.result().stop()


def freeze_imports() -> None:
    """Exclude loaded modules, in a worker, from the garbage collection that PySpark runs after every task.

    Measured: the overhead of a task is 65 ms without this, 12 ms with it.
    """
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()


def _runner_of(tasks: list[dict[str, Json]]) -> Any:
    """Return the worker's function, which picks its task by the number of its partition."""
    texts = [json.dumps(task) for task in tasks]

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow

        from firnline.jobs.worker import perform

        freeze_imports()

        for batch in batches:
            for number in batch.column(0).to_pylist():
                try:
                    report = perform(json.loads(texts[number]))
                except FirnlineError as error:
                    report = {"error": error_report(error)}
                report["task"] = number
                yield pyarrow.RecordBatch.from_pydict({"report": [json.dumps(report)]})

    return run


def first_line(error: Exception) -> str:
    """Return an error as one line; for an error of a Python worker, the worker's message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    traces = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    for line in lines[traces[-1] + 1 :] if traces else []:
        if not line[0].isspace():
            return line[:400]
    return lines[0][:400] if lines else type(error).__name__
