"""`firnline run` as a whole, in a child process and without Spark: with its lease, its control channel, its signals."""

from __future__ import annotations

import importlib
import random
import sys
from datetime import datetime, timedelta

from firnline.clock import SystemClock
from firnline.engine import spark
from firnline.testing.local import LocalEngine
from firnline.testing.processes import RunOrder


def run_plainly(order: RunOrder) -> int:
    """In the child: `firnline run`."""
    return _run_command(order)


def run_standby(order: RunOrder) -> int:
    """In the child: `firnline run --standby`."""
    return _run_command(order, "--standby")


def _run_command(order: RunOrder, *flags: str) -> int:
    # By name, as a shell would: this package stands beside the command line, not on it.
    run = importlib.import_module("firnline.cli.run")
    main = importlib.import_module("firnline.cli.main")
    setattr(run, "load_options", lambda _: order.options)  # noqa: B010  # the child's own copy of the module
    setattr(spark, "SparkEngine", lambda *_, **__: LocalEngine(order.threads))  # noqa: B010  # as above
    once = ["--once"] if order.once else []
    code = int(main.run_command(["run", *once, *flags, "--debug"]))
    sys.stdout.flush()
    return code


class JumpingClock(SystemClock):
    """A wall clock that jumps by years with every look at it; its monotonic side is the system's."""

    def now(self) -> datetime:
        return super().now() + timedelta(days=random.randint(-4000, 4000))
