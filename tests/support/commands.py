"""`firnline run` as a whole, in a child process and without Spark: with its lease, its control channel, its signals."""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from firnline.clock import SystemClock
from firnline.jobs import spark
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.processes import RunOrder


def run_plainly(order: RunOrder) -> int:
    """In the child: `firnline run`."""
    return _run_command(order)


def run_taking_over(order: RunOrder) -> int:
    """In the child: `firnline run --take-over`."""
    return _run_command(order, "--take-over")


def run_standby(order: RunOrder) -> int:
    """In the child: `firnline run --standby`."""
    return _run_command(order, "--standby")


def _run_command(order: RunOrder, *flags: str) -> int:
    # By name, as a shell would: this package stands beside the command line, not on it.
    run = importlib.import_module("firnline.cli.run")
    main = importlib.import_module("firnline.cli.main")
    setattr(run, "load_options", lambda _, **__: order.options)  # noqa: B010  # the child's own copy of the module
    setattr(spark, "SparkEngine", lambda *_, **__: LocalEngine(order.threads))  # noqa: B010  # as above
    once = ["--once"] if order.once else []
    code = int(main.run_command(["run", *once, *flags, "--debug"]))
    sys.stdout.flush()
    return code


class JumpingClock(SystemClock):
    """A wall clock that jumps by years with every look at it; its monotonic side is the system's."""

    def now(self) -> datetime:
        return super().now() + timedelta(days=random.randint(-4000, 4000))


def drill_child() -> None:
    """Run the process that a drill kills, without Spark. The first one hangs in mid-run, so that a kill hits it."""
    drilling = importlib.import_module("firnline.cli.drill")
    marker = Path(sys.argv[2]).with_name("hung")
    setattr(spark, "SparkEngine", lambda *_, **__: _HangingEngine(marker))  # noqa: B010  # the child's own copy
    drilling.run_child()


class _HangingEngine(LocalEngine):
    """Hangs in its fifth job; only that of the first process, which leaves a marker, does so."""

    def __init__(self, marker: Path) -> None:
        super().__init__(1)
        self._hangs = not marker.exists()
        self._jobs = 0
        marker.touch()

    def run(
        self, tag: str, orders: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        self._jobs += 1
        if self._jobs == 5 and self._hangs:
            threading.Event().wait()
        return super().run(tag, orders, timeout_seconds)


def keys_of(value: Any) -> Iterator[str]:
    """Every key in a JSON value, at any depth."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)
