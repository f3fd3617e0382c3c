"""Redis behind a Delta table: runs and servers are killed, answers lost, zombies wake. No row is lost or doubled."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.sinks.redis import script
from firnline.sinks.redis import sink as sink_module
from tests.support.pipelines import MakeOptions, run_once
from tests.support.processes import KILLED, Launcher
from tests.support.proxy import Proxy, Treatment, running_proxy
from tests.support.redis import RedisServer, running_redis
from tests.support.redis_sink import HASH, SMALL_RANGES, STREAM, check_order, redis_ids, to_redis
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash

MODES = {"stream": STREAM, "hash": HASH}
SIDES = ("before", "after")
POINTS = [
    *(f"redis.range.{side}:{nth}" for side in SIDES for nth in (1, 2, 4, 5)),
    *(f"follower.{step}.{side}:1" for step in ("claim", "commit") for side in SIDES),
    *(f"outbox.write.{side}:1" for side in SIDES),
    "epoch.record.before:1",
]


def check(server: RedisServer, options: PipelineOptions, sample: SampleInput, mode: str = "stream") -> None:
    """Table and sink hold every row once."""
    assert table_ids(options.sinks[0].location) == sample.ids
    assert redis_ids(server, mode) == sample.ids
    if mode == "stream":
        check_order(server)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", POINTS)
def test_killed(
    launcher: Launcher,
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    redis_server: RedisServer,
    point: str,
    mode: str,
) -> None:
    options = to_redis(make_options, tmp_path, redis_server.url, MODES[mode])
    sample.add("a1.json", 130)
    sample.add("a2.json", 130)
    assert launcher.run(options, f"{point}:kill", patches=SMALL_RANGES).exit_code == KILLED
    sample.add("a3.json", 70)
    launcher.run_until_done(options)  # with ranges of another size
    check(redis_server, options, sample, mode)


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(
    launcher: Launcher,
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    redis_server: RedisServer,
    seed: int,
) -> None:
    """Runs with ranges of any size, killed anywhere, also in the recovery of a kill."""
    rng, kills = random.Random(seed), 0
    options = to_redis(make_options, tmp_path, redis_server.url)
    for number in range(6):
        sample.add(f"{number}.json", rng.randint(1, 200))
        point = rng.choice(("redis.range", "follower.claim", "follower.commit", "epoch.commit"))
        fault = f"{point}.{rng.choice(SIDES)}:{rng.randint(1, 4)}:kill"
        patches = {"firnline.sinks.redis.sink:RANGE_ROWS": rng.randint(1, 120)}
        ended = launcher.run(options, fault, patches=patches)
        assert ended.exit_code in (KILLED, 0), ended
        kills += ended.exit_code == KILLED
    launcher.run_until_done(options)
    check(redis_server, options, sample)
    assert kills, "nothing was killed"


# -- lost answers -------------------------------------------------------------------------------------


def is_script(data: bytes) -> bool:
    return b"EVALSHA" in data


def nth_script(nth: int) -> Any:
    """A condition that is true for the nth call of the script."""
    seen = iter(range(1, 10_000))
    return lambda data: is_script(data) and next(seen) == nth


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nth", [1, 2, 3, 5])
@pytest.mark.parametrize("treatment", ["drop", "delay", "freeze", "reset", "refuse"])
def test_a_lost_answer(
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    redis_server: RedisServer,
    treatment: Treatment,
    nth: int,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nth script is carried out, and nobody hears of it: the claim, a range, the last range of an epoch."""
    monkeypatch.setattr(sink_module, "RANGE_ROWS", 40)
    monkeypatch.setattr(sink_module, "IN_FLIGHT", 2)
    sample.add("a1.json", 90)
    sample.add("a2.json", 90)
    with running_proxy(redis_server.port) as proxy:
        url = f"redis://{proxy.address}/0"
        options = to_redis(make_options, tmp_path, url, {**MODES[mode], "timeout_secs": 1.0}, attempts=50)
        proxy.treat(treatment, on=nth_script(nth), seconds=2)
        healer = threading.Thread(target=heal_later, args=(proxy, treatment))
        healer.start()
        assert run_once(options).exit_code == 0
        healer.join()
        assert proxy.was_hit
    check(redis_server, options, sample, mode)


def heal_later(proxy: Proxy, treatment: Treatment) -> None:
    """Let answers pass again; what was frozen comes after the run has asked the head."""
    proxy.wait_until_hit()
    if treatment in ("delay", "freeze", "refuse"):
        threading.Event().wait(1.5)
    proxy.heal()


def test_every_answer_is_lost_once(
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reset after the nth answer, whatever it answers, for n = 1 and on, until a run is through without a reset."""
    monkeypatch.setattr(sink_module, "RANGE_ROWS", 40)
    with running_proxy(redis_server.port) as proxy:
        options = to_redis(make_options, tmp_path, f"redis://{proxy.address}/0", attempts=50)
        for nth in range(60):
            sample.add(f"{nth:03d}.json", 90)
            proxy.treat("reset", after=nth)
            healer = threading.Thread(target=_heal_when_hit, args=(proxy, stop := threading.Event()))
            healer.start()
            assert run_once(options).exit_code == 0, nth
            hit = proxy.was_hit
            stop.set()
            healer.join()
            proxy.heal()
            check(redis_server, options, sample)
            if not hit:
                break
        else:
            raise AssertionError("every run was reset")
        assert nth > 10


def _heal_when_hit(proxy: Proxy, stop: threading.Event) -> None:
    while not proxy.was_hit and not stop.wait(0.005):
        pass
    proxy.heal()


# -- servers that die ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_server_restarts_in_the_middle_of_an_epoch(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, how: str
) -> None:
    with running_redis() as server:
        options = to_redis(make_options, tmp_path, server.url, attempts=1000, backoff_secs=0.05)
        sample.add("a1.json", 400)
        sample.add("a2.json", 400)
        run = launcher.start(options, "redis.range.after:6:stop", patches=SMALL_RANGES)
        run.wait_until_stopped()
        server.kill() if how == "kill" else server.stop()
        run.signal(signal.SIGCONT)
        run.wait_for("cannot be reached")
        server.start()
        assert run.wait().exit_code == 0
        check(server, options, sample)


# -- zombies and rivals -------------------------------------------------------------------------------


def wake_a_zombie(
    launcher: Launcher, sample: SampleInput, options: PipelineOptions, point: str, patches: dict[str, object]
) -> Any:
    """A run sleeps in a delivery, its successor does everything, the first wakes up."""
    sample.add("a1.json", 130)
    assert run_once(options).exit_code == 0
    sample.add("a2.json", 130)
    sample.add("a3.json", 130)
    zombie = launcher.start(options, f"{point}:stop", patches={**SMALL_RANGES, **patches})
    zombie.wait_until_stopped()
    assert run_once(options).exit_code == 0
    zombie.signal(signal.SIGCONT)
    return zombie.wait()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "point", ["redis.range.before:1", "redis.range.before:3", "redis.range.after:2", "follower.commit.before:1"]
)
def test_a_zombie_that_wakes_is_fenced(
    launcher: Launcher,
    sample: SampleInput,
    make_options: MakeOptions,
    tmp_path: Path,
    redis_server: RedisServer,
    mode: str,
    point: str,
) -> None:
    options = to_redis(make_options, tmp_path, redis_server.url, MODES[mode])
    ended = wake_a_zombie(launcher, sample, options, point, {})
    assert (ended.exit_code, ended.error_code) == (5, "fenced")
    check(redis_server, options, sample, mode)
    sample.add("b1.json", 20)
    assert run_once(options).exit_code == 0
    check(redis_server, options, sample, mode)


def test_two_runs_at_once(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Runs that keep taking the pipeline over from each other."""
    options = to_redis(make_options, tmp_path, redis_server.url)
    for number in range(8):
        sample.add(f"{number}.json", 120)
    runs = [launcher.start(options, patches=SMALL_RANGES) for _ in range(3)]
    ends = [run.wait() for run in runs]
    assert all(end.exit_code in (0, 5) for end in ends), ends
    launcher.run_until_done(options)
    check(redis_server, options, sample)


# -- planted bugs -------------------------------------------------------------------------------------

NO_HOLDER = script.SCRIPT.replace("if (held[1] or '') ~= ARGV[2] then return {'held'} end\n", "")


def test_a_script_that_compares_no_generation_is_caught(
    launcher: Launcher, sample: SampleInput, make_options: MakeOptions, tmp_path: Path, redis_server: RedisServer
) -> None:
    """The zombie sleeps before a range; its successor has claimed, but written nothing yet when the zombie wakes."""
    assert NO_HOLDER != script.SCRIPT
    for text, fenced in ((script.SCRIPT, True), (NO_HOLDER, False)):
        redis_server.clear()
        folder = tmp_path / str(fenced)
        patches = {**SMALL_RANGES, "firnline.sinks.redis.client:SCRIPT": text}
        options = to_redis(make_options, folder, redis_server.url)
        sample.add(f"{fenced}.json", 130)
        zombie = launcher.start(options, "redis.range.before:3:stop", patches=patches)
        zombie.wait_until_stopped()
        heir = launcher.start(options, "follower.claim.after:1:stop", patches=patches)
        heir.wait_until_stopped()
        before = redis_ids(redis_server, "stream")
        zombie.signal(signal.SIGCONT)
        zombie.wait()
        assert (redis_ids(redis_server, "stream") == before) == fenced, "only a script that compares stops the zombie"
        heir.signal(signal.SIGCONT)
        heir.wait()
