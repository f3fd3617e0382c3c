"""With real Spark: the driver, the JVM, a Python worker, an executor or everything is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from firnline.options import PipelineOptions
from tests.support.kills import PROOF
from tests.support.pipelines import MakeOptions, check_arrived
from tests.support.processes import KILLED, Child, Launcher
from tests.support.samples import SampleInput

pytestmark = [pytest.mark.spark, pytest.mark.crash, pytest.mark.timeout(1200)]

WAIT = 300


@pytest.fixture
def options(sample: SampleInput, make_options: MakeOptions) -> PipelineOptions:
    for number in range(8):
        sample.add(f"f{number}.json.gz", 3000, bad=1, **({"extra": "x"} if number > 3 else {}))
    found: PipelineOptions = make_options(max_files=2, partition_by=("month",), attempts=5)
    return found


def below(child: Child, wanted: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(child.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if wanted(process):
                    found.append(process)
    return found


def is_jvm(process: psutil.Process) -> bool:
    return process.name() == "java" and "SparkSubmit" in " ".join(process.cmdline())


def is_executor(process: psutil.Process) -> bool:
    return process.name() == "java" and "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())


def is_worker(process: psutil.Process) -> bool:
    parent = process.parent()
    daemon = "pyspark.daemon"
    return daemon in " ".join(process.cmdline()) and parent is not None and daemon in " ".join(parent.cmdline())


def kill_one(child: Child, wanted: Callable[[psutil.Process], bool]) -> None:
    deadline = time.monotonic() + 120
    while not (found := below(child, wanted)):
        assert time.monotonic() < deadline, child.log()[-3000:]
        time.sleep(0.02)
    found[0].kill()


def test_driver_and_then_everything_killed(launcher: Launcher, options: PipelineOptions, sample: SampleInput) -> None:
    for point in ("epoch.run.after:2", "delta.commit.after:1") if PROOF else ("delta.commit.after:2",):
        child = launcher.start(options, f"{point}:kill", spark=True)
        assert child.wait(WAIT).exit_code == KILLED
    child = launcher.start(options, spark=True)
    child.wait_for("committed epoch 3", WAIT)
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait(WAIT).exit_code == KILLED
    assert launcher.start(options, spark=True).wait(WAIT).exit_code == 0
    check_arrived(sample, options)


def test_a_worker_and_then_the_jvm_killed_alone(
    launcher: Launcher, options: PipelineOptions, sample: SampleInput
) -> None:
    """Spark replaces the worker; the run starts Spark again by itself."""
    child = launcher.start(options, spark=True)
    child.wait_for("running epoch 2", WAIT)
    kill_one(child, is_worker)
    child.wait_for("running epoch 3", WAIT)
    kill_one(child, is_jvm)
    ended = child.wait(WAIT)
    assert ended.exit_code == 0, child.log()[-6000:]
    check_arrived(sample, options)


def test_executor_killed(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, options: PipelineOptions
) -> None:
    cluster = {"spark.master": "local-cluster[2,1,1024]", "spark.executor.memory": "512m"}
    found: PipelineOptions = make_options(max_files=2, partition_by=("month",), attempts=5, spark=cluster)
    child = launcher.start(found, spark=True)
    child.wait_for("running epoch 2", WAIT)
    kill_one(child, is_executor)
    ended = child.wait(WAIT)
    assert ended.exit_code == 0, child.log()[-6000:]
    check_arrived(sample, found)
