"""Whether a process is alive, as far as this host can know."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from firnline.process import has_exited, is_this_host, this_process


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
