"""HTTP behind a Delta table: runs are killed, answers lost, zombies wake. No row is lost; repeats have the same key."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.http import sink as sink_module
from firnline.sinks.http.options import HttpSinkOptions
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import KILLED, Launcher
from tests.support.proxy import Treatment, running_proxy
from tests.support.receiver import Receiver, running_receiver
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

SIDES = ("before", "after")
POINTS = [
    *(f"http.{step}.{side}:{nth}" for step in ("progress", "send") for side in SIDES for nth in (1, 2, 3, 5)),
    *(f"follower.{step}.{side}:1" for step in ("claim", "commit") for side in SIDES),
]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running_receiver() as found:
        yield found


def to_http(make_options: MakeOptions, folder: Path, url: str, max_rows: int = 40, **settings: Any) -> PipelineOptions:
    hook = HttpSinkOptions("hook", url, max_rows=max_rows, timeout_secs=settings.pop("timeout_secs", 30.0))
    sinks = (DeltaSinkOptions("table", str(folder / "table")), hook)
    return make_options(**{"max_files": 1, "sinks": sinks, **settings})


def check(receiver: Receiver, options: PipelineOptions, sample: SampleInput) -> None:
    assert table_ids(options.sinks[0].location) == sample.ids
    assert receiver.ids == sample.ids
    receiver.check_repeats()


@pytest.mark.parametrize("point", POINTS)
def test_killed(
    launcher: Launcher,
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    receiver: Receiver,
    point: str,
) -> None:
    sample.add("a1.json", 130)
    sample.add("a2.json", 130)
    options = to_http(make_options, tmp_path, receiver.url)
    assert launcher.run(options, f"{point}:kill").exit_code == KILLED
    sample.add("a3.json", 70)
    launcher.run_until_done(to_http(make_options, tmp_path, receiver.url, max_rows=33))
    check(receiver, options, sample)


@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("treatment", ["drop", "delay", "freeze", "reset", "refuse"])
def test_a_lost_answer(
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    receiver: Receiver,
    treatment: Treatment,
    nth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink_module, "BACKOFF_SECONDS", 0.05)
    sample.add("a1.json", 90)
    sample.add("a2.json", 90)
    seen = iter(range(1, 10_000))
    with running_proxy(receiver.port) as proxy:
        url = f"http://{proxy.address}/rows"
        options = to_http(make_options, tmp_path, url, attempts=50, timeout_secs=1.0)
        proxy.treat(treatment, on=lambda data: b"Idempotency-Key" in data and next(seen) == nth, seconds=2)

        def heal() -> None:
            proxy.wait_until_hit()
            if treatment in ("delay", "freeze", "refuse"):
                threading.Event().wait(1.5)
            proxy.heal()

        healer = threading.Thread(target=heal)
        healer.start()
        assert run_once(options).exit_code == 0
        healer.join()
    check(receiver, options, sample)
    assert len(receiver.requests) > len({request.key for request in receiver.requests}), "nothing was repeated"


@pytest.mark.parametrize("point", ["http.send.before:2", "http.send.after:2", "http.progress.before:3"])
def test_a_zombie_that_wakes_is_fenced(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, receiver: Receiver, point: str
) -> None:
    """It may repeat the one batch that it had written down, with its key, and nothing more."""
    options = to_http(make_options, tmp_path, receiver.url)
    sample.add("a1.json", 130)
    sample.add("a2.json", 130)
    zombie = launcher.start(options, f"{point}:stop")
    zombie.wait_until_stopped()
    assert run_once(to_http(make_options, tmp_path, receiver.url, max_rows=17)).exit_code == 0
    before = len(receiver.requests)
    zombie.signal(signal.SIGCONT)
    ended = zombie.wait()
    assert (ended.exit_code, ended.error_code) == (5, "fenced")
    assert len(receiver.requests) - before <= 1
    check(receiver, options, sample)


def test_two_runs_at_once(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, receiver: Receiver
) -> None:
    for number in range(6):
        sample.add(f"{number}.json", 100)
    options = to_http(make_options, tmp_path, receiver.url)
    ends = [run.wait() for run in [launcher.start(options) for _ in range(3)]]
    assert all(end.exit_code in (0, 5) for end in ends), ends
    launcher.run_until_done(options)
    check(receiver, options, sample)
