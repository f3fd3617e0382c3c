"""Runs pipelines in processes of their own, to be killed: forked in milliseconds from a warm server.

The server (multiprocessing's forkserver) has imported everything and loaded the decoder, but has used neither
delta-rs nor obstore, whose threads would not survive a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firnline.clock import monotonic
from firnline.errors import FirnlineError
from firnline.faults import VARIABLE
from firnline.options import PipelineOptions
from firnline.testing.faults import reached_points
from tests.support.proof import covered

KILLED = -signal.SIGKILL
MOST_SEGMENTS = 10
PORTS = (10_000, 32_000)  # the system picks ports above for clients and for servers that name none
_claims: list[socket.socket] = []


@dataclass(frozen=True, slots=True)
class RunOrder:
    """One run of a pipeline, as a child performs it."""

    options: PipelineOptions
    fault: str = ""
    once: bool = True
    moved: tuple[str, str] | None = None
    accept_duplicates: bool = False
    threads: int = 1
    spark: bool = False  # on Spark, instead of in the child itself
    patches: Mapping[str, object] = field(default_factory=dict)  # "module:attribute" -> value
    log: str = ""
    result: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: its exit code, or minus the signal, and the error it stopped with."""

    exit_code: int
    error_code: str = ""
    message: str = ""
    points: Counter[str] = field(default_factory=Counter)  # how often it reached each; unknown if it was killed


class Child:
    """A pipeline in a process of its own, in a process group of its own."""

    def __init__(self, process: Any, order: RunOrder) -> None:
        self._process = process
        self._order = order
        self._counted = False

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def is_alive(self) -> bool:
        return bool(self._process.is_alive())

    def signal(self, number: int) -> bool:
        """Send a signal; False if the child has ended meanwhile."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout: float = 240) -> Ended:
        """Wait for the end; a child that hangs is killed and told of."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._ask_for_stacks()
            self._process.kill()
            self._process.join()
            raise TimeoutError(f"the child hung; its log:\n{self.log()[-12000:]}")
        code = int(self._process.exitcode)
        covered["kills"] += code == KILLED and not self._counted
        self._counted = True
        try:
            with open(self._order.result, "rb") as stream:
                return Ended(code, **pickle.load(stream))  # written by our own child
        except FileNotFoundError:
            return Ended(code)

    def _ask_for_stacks(self) -> None:
        """Let the child write the stack of each thread into its log."""
        length = len(self.log())
        self.signal(signal.SIGUSR1)
        deadline = monotonic() + 10
        while "(most recent call first)" not in self.log()[length:] and monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # for the rest of them

    def wait_for(self, text: str, timeout: float = 240) -> None:
        """Wait until the child has logged `text`."""
        deadline = monotonic() + timeout
        while text not in self.log():
            if monotonic() > deadline or not self.is_alive:
                raise TimeoutError(f"{text!r} was not logged:\n{self.log()[-4000:]}")
            time.sleep(0.01)

    def wait_until_stopped(self, timeout: float = 240) -> None:
        """Wait until the fault `stop` or SIGSTOP has stopped every thread of the child."""
        deadline = monotonic() + timeout
        while not self.is_stopped:
            if monotonic() > deadline or not self.is_alive:
                raise TimeoutError(f"the child was never stopped:\n{self.log()[-4000:]}")
            time.sleep(0.01)

    @property
    def is_stopped(self) -> bool:
        """Whether every thread of the child is stopped."""
        try:
            stats = [path.read_text() for path in Path(f"/proc/{self.pid}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):  # a thread, or the child, has ended meanwhile
            return False
        return bool(stats) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def log(self) -> str:
        path = Path(self._order.log)
        return path.read_text(errors="replace") if path.exists() else ""


class Launcher:
    """Starts children that keep their logs in `folder`. `work` is what they do: run a pipeline, if not told."""

    def __init__(self, folder: Path, work: Callable[[RunOrder], int] | None = None) -> None:
        self._folder = folder
        self._work = work or _run
        self._folder.mkdir(parents=True, exist_ok=True)
        self._count = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.warm"])

    def start(self, options: PipelineOptions, fault: str = "", **settings: Any) -> Child:
        self._count += 1
        place = self._folder / f"child-{self._count:03d}"
        order = RunOrder(options, fault, log=f"{place}.log", result=f"{place}.result", **settings)
        process = self._context.Process(target=_perform, args=(order, self._work), daemon=True)
        process.start()
        return Child(process, order)

    def run(self, options: PipelineOptions, fault: str = "", **settings: Any) -> Ended:
        return self.start(options, fault, **settings).wait()

    def run_until_done(
        self, options: PipelineOptions, *, forgiven: Mapping[int, str] | None = None, **settings: Any
    ) -> list[Ended]:
        """Recover as a supervisor would: the first run must end with 0.

        Args:
            options: The pipeline.
            forgiven: Exit codes that a run may end with before, each with the reason why it is no failed recovery.
            settings: What else each run is ordered.
        """
        ends: list[Ended] = []
        while not ends or ends[-1].exit_code in (forgiven or {}):
            assert len(ends) < MOST_SEGMENTS, f"never done: {ends}"
            ends.append(self.run(options, **settings))
        assert ends[-1].exit_code == 0, f"the recovery failed: {ends}"
        return ends


def _perform(order: RunOrder, work: Callable[[RunOrder], int]) -> None:
    """In the child: do the work and leave without looking back."""
    os.setsid()
    os.environ[VARIABLE] = order.fault
    handler = logging.FileHandler(order.log)
    handler.setFormatter(_Lines())
    logging.basicConfig(level=logging.DEBUG, handlers=[handler], force=True)
    for name in ("numba", "py4j"):
        logging.getLogger(name).setLevel(logging.WARNING)
    sys.stdout = sys.stderr = open(order.log, "a")  # noqa: SIM115  # until the process ends
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    code = 70
    try:
        for target, value in order.patches.items():
            _patch(target, value)
        code = work(order)
    except BaseException:
        logging.exception("the child failed")
    finally:
        logging.shutdown()
        os._exit(code)


def _run(order: RunOrder) -> int:
    from firnline.jobs.engine import Engine
    from firnline.jobs.spark import SparkEngine
    from firnline.run.open_pipeline import open_pipeline
    from firnline.run.runner import Runner
    from firnline.testing.local import LocalEngine
    from tests.support.pipelines import Loud

    options = order.options
    engine: Engine = SparkEngine(options.name, options.spark) if order.spark else LocalEngine(order.threads)
    with reached_points() as points:
        pipeline = open_pipeline(options, once=order.once, moved=order.moved)
        runner = Runner(pipeline, engine, Loud(), once=order.once, accept_duplicates=order.accept_duplicates)
        signal.signal(signal.SIGTERM, lambda *_: runner.stop())
        result = runner.run()
    engine.stop()
    tell_end(order, result.error, points)
    return result.exit_code


def tell_end(order: RunOrder, error: FirnlineError | None, points: Counter[str]) -> None:
    """In the child: leave word for whoever waits for it."""
    told = {"error_code": error.code if error else "", "message": error.message if error else "", "points": points}
    with open(order.result, "wb") as stream:
        pickle.dump(told, stream)


def _patch(target: str, value: object) -> None:
    module, _, name = target.partition(":")
    setattr(importlib.import_module(module), name, value)


class _Lines(logging.Formatter):
    """Log lines with the facts that messages carry as fields."""

    _known = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        facts = {k: v for k, v in record.__dict__.items() if k not in self._known}
        return f"{record.relativeCreated:9.0f} {record.threadName} {super().format(record)} {facts or ''}"


def wait_until(condition: Callable[[], bool], child: Child | None = None, seconds: float = 240) -> None:
    """Wait until a condition holds; a test that waits in vain fails with the end of the child's log."""
    deadline = monotonic() + seconds
    began = monotonic()
    while not condition():
        assert monotonic() < deadline, child.log()[-4000:] if child is not None else f"not within {seconds:.0f} s"
        rest(monotonic() - began)
        began = monotonic()


def rest(seconds: float) -> None:
    """Sleep before a condition is asked again: longer if it took long, so that whoever is waited for has the cores."""
    time.sleep(min(0.25, max(0.01, 4 * seconds)))


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses, and that no other test process is given while this one lives."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nobody uses, all different; see `free_port`."""
    return [_claim_port() for _ in range(count)]


def _claim_port() -> int:
    """Find a port outside the range from which the system picks ports, and claim it by a name that ends with us."""
    while True:
        port = random.SystemRandom().randrange(*PORTS)
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(f"\0firnline-tests-{port}")
            probe.bind(("127.0.0.1", port))
            _claims.append(claim)
            return port
        claim.close()
