"""Whether a process is alive, as far as this host can know, and flags that a signal handler sets."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from firnline.clock import SystemClock
from firnline.committer.service import CommitterService
from firnline.process import StopFlag, has_exited, is_this_host, this_process
from firnline.run.backpressure import Backpressure


def test_a_process_on_this_host() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    host = this_process().host
    assert has_exited(host, child.pid)
    assert not has_exited(host, os.getpid())
    assert not has_exited(host, 1)  # it may belong to another user


def test_another_host_is_never_taken_for_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not has_exited("elsewhere", child.pid)
    assert not is_this_host("elsewhere")
    assert not is_this_host(None)


def test_the_address_of_a_process() -> None:
    me = this_process()
    assert me.address == {"host": me.host, "pid": os.getpid()}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a process started")
def test_the_start_of_a_process_tells_it_from_a_later_one() -> None:
    me = this_process()
    assert me.start
    assert not has_exited(me.host, me.pid, me.start)
    system, _, ticks = me.start.rpartition(" ")
    assert has_exited(me.host, me.pid, f"{system} {int(ticks) + 1}")  # the number was given out again
    assert not has_exited(me.host, me.pid, f"another-boot pid:[1] {int(ticks) + 1}")  # perhaps another container
    assert not has_exited("elsewhere", me.pid, f"{system} {int(ticks) + 1}")
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_exited(me.host, child.pid, f"{system} {ticks}")  # a zombie has ended
    child.wait()
    assert has_exited(me.host, child.pid, f"{system} {ticks}")


# -- flags that a signal handler sets -------------------------------------------------------------------


def interrupt(line: int, work: Callable[[], None], handler: Callable[[], None]) -> bool:
    """Call the handler before the given line that the work executes, in the same thread, as a signal would.

    Returns whether the work executed so many lines.
    """
    left = line

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal left
        if event == "line":
            left -= 1
            if left == 0:
                handler()
        return count

    def trace() -> None:
        sys.settrace(count)
        work()

    thread = threading.Thread(target=trace, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), f"the handler waits for ever before line {line}"
    return left <= 0


def test_a_stop_flag_wakes_whoever_waits() -> None:
    flag = StopFlag()
    assert not flag.wait(0.0)
    assert not flag.is_set()
    flag.set()
    assert flag.wait(60)
    assert flag.wait(60)
    assert flag.is_set()


def test_a_signal_may_stop_a_committer_at_any_line() -> None:
    for line in range(1, 60):  # several polls
        service = CommitterService([], "run", SystemClock(), poll_interval_secs=0.001)
        assert interrupt(line, service.run, service.stop)


def test_a_signal_may_stop_a_run_at_any_line_of_its_end() -> None:
    line = 1
    while interrupt(line, (backpressure := Backpressure([])).stop, backpressure.stop):
        line += 1
    assert line > 3
