"""Lanes keep order, survive failures, and never keep a process from ending."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial

from firnline.run.lanes import Lanes


def test_a_lane_keeps_order_and_survives_a_failure() -> None:
    lanes = Lanes()
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("planted")

    for number in range(5):
        lanes.submit("stage", partial(done.append, number))
        lanes.submit("stage", fail)
    lanes.close(wait=True)
    assert done == [0, 1, 2, 3, 4]


def test_a_slow_lane_holds_up_no_other_and_a_stop_waits_for_no_side_work() -> None:
    lanes, gate, reached = Lanes(), threading.Event(), threading.Event()

    def listing() -> None:
        gate.wait()

    lanes.submit("backlog", listing)
    lanes.submit("stage", reached.set)
    assert reached.wait(120)
    lanes.close(wait=True)  # returns although the listing is still under way
    gate.set()


def test_what_was_not_begun_is_dropped_without_wait() -> None:
    lanes, begun, gate = Lanes(), threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        gate.wait()

    lanes.submit("sink a", first)
    lanes.submit("sink a", lambda: done.append(1))
    assert begun.wait(120)
    lanes.close(wait=False)
    gate.set()
    lanes._lanes["sink a"]._thread.join(120)
    assert done == []


def test_a_lane_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import threading; from firnline.run.lanes import Lanes; lanes = Lanes(); "
        "lanes.submit('sink a', threading.Event().wait); lanes.close(wait=False)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_process_that_exits_waits_for_a_lane_that_nobody_waited_for() -> None:
    program = (
        "import time\n"
        "from firnline.run.lanes import Lane\n"
        "lane = Lane('upkeep')\n"
        "lane.submit(lambda: (time.sleep(0.3), print('done', flush=True)))\n"
        "time.sleep(0.1)\n"
        "lane.close(wait=False)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "done\n"
