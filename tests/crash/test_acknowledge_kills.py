"""An acknowledgement that a source missed, or that a run died before, is made up for without another epoch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.run.recorder import Recorder
from firnline.run.runner import Runner
from firnline.sources.files.source import FileSource
from firnline.testing.local import LocalEngine
from firnline.types import Json
from tests.support.kills import perform
from tests.support.pipelines import MakeOptions, make_epochs, run_once
from tests.support.processes import KILLED, wait_until
from tests.support.samples import SampleInput, table_ids

pytestmark = pytest.mark.crash


def run_telling(log: Path, options: PipelineOptions, patch: Callable[[], None] = lambda: None) -> None:
    """Run to the end, in a child; every position that the source gets is a line of `log`."""

    def acknowledge(_: FileSource, position: Json) -> None:
        with log.open("a") as stream:
            stream.write(json.dumps(position) + "\n")

    FileSource.acknowledge = acknowledge  # type: ignore[method-assign, assignment]
    patch()
    assert run_once(options).exit_code == 0


def told(log: Path) -> list[Json]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def of_epochs(options: PipelineOptions) -> tuple[dict[int, Json], int]:
    """The position of every epoch, and the floor of the newest."""
    pipeline = open_pipeline(options)
    head = pipeline.load()
    assert head.checkpoint is not None
    return {e.epoch: e.checkpoint.positions["files"] for e in pipeline.entries(head.entry)}, head.checkpoint.floor


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_run_that_finds_nothing_to_do_makes_up_for_it(
    side: str, count: int, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(max_files=1, rollback_window=1)
    for number in range(5):
        sample.add(f"{number}.json", 2)
    log = tmp_path / "told"
    code, _ = perform(f"epoch.acknowledge.{side}:{count}:kill", run_telling, log, options)
    assert code == KILLED
    run_once(options)  # its source takes no acknowledgements: the last epochs are never acknowledged
    positions, floor = of_epochs(options)
    generation = open_pipeline(options).load().generation
    assert told(log)[-1:] != [positions[floor]]
    assert perform("", run_telling, log, options)[0] == 0
    assert told(log)[-1] == positions[floor]
    assert all(position in positions.values() for position in told(log))
    assert open_pipeline(options).load().generation == generation, "nothing to do: not even a claim"
    assert table_ids(Path(options.sinks[0].location)) == sample.ids


def test_a_run_killed_while_it_makes_up_does_so_again(
    sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(rollback_window=1)
    make_epochs(sample, options, 4)
    positions, floor = of_epochs(options)
    log = tmp_path / "told"
    for side in ("before", "after"):
        assert perform(f"epoch.acknowledge.{side}:1:kill", run_telling, log, options)[0] == KILLED
    assert told(log) == [positions[floor]], "killed before, then after"
    assert perform("", run_telling, log, options)[0] == 0
    assert told(log) == [positions[floor]] * 2


def _lagging_remote(epoch: int) -> None:
    Recorder.remote_epoch = property(lambda _: epoch)  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("remote", [0, 2])
def test_nothing_above_the_remote_tier_is_acknowledged(
    remote: int, sample: SampleInput, make_options: MakeOptions, tmp_path: Path
) -> None:
    options = make_options(rollback_window=1)
    make_epochs(sample, options, 5)
    positions, floor = of_epochs(options)
    assert floor > remote
    log = tmp_path / "told"
    assert perform("", run_telling, log, options, partial(_lagging_remote, remote))[0] == 0
    # The ledger is read from the floor on; an older position is not known, and then nothing is acknowledged.
    assert set(map(json.dumps, told(log))) <= {json.dumps(positions[epoch]) for epoch in positions if epoch <= remote}


class Idle:
    """A run that polls, in a thread; it ends with the block."""

    def __init__(self, options: PipelineOptions) -> None:
        self.runner = Runner(open_pipeline(options), LocalEngine(1))
        self.thread = threading.Thread(target=self.runner.run)

    def __enter__(self) -> Idle:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("error", [OSError("away"), ValueError("odd")])
def test_an_idle_run_repeats_what_a_source_did_not_take(
    error: Exception, sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(max_files=1, rollback_window=1)
    for number in range(4):
        sample.add(f"{number}.json", 2)
    taken: list[Json] = []
    refused: list[Json] = []
    reachable = threading.Event()

    def acknowledge(_: FileSource, position: Any) -> None:
        if not reachable.is_set():
            refused.append(position)
            raise error
        taken.append(position)

    monkeypatch.setattr(FileSource, "acknowledge", acknowledge)
    with Idle(options) as run:
        wait_until(lambda: run.runner.status().epoch == 4 and len(refused) > 5)
        epoch = open_pipeline(options).load().epoch
        reachable.set()
        wait_until(lambda: bool(taken))
        time.sleep(0.3)
        positions, floor = of_epochs(options)
        assert open_pipeline(options).load().epoch == epoch == 4
    assert taken == [positions[floor]], "once: what was taken is not repeated while idle"


def test_an_idle_run_acknowledges_more_when_the_remote_tier_catches_up(
    sample: SampleInput, make_options: MakeOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options(rollback_window=1)
    make_epochs(sample, options, 4)
    positions, floor = of_epochs(options)
    taken: list[Json] = []
    remote = [0]
    monkeypatch.setattr(FileSource, "acknowledge", lambda _, position: taken.append(position))
    monkeypatch.setattr(Recorder, "remote_epoch", property(lambda _: remote[0]))
    with Idle(options):
        time.sleep(0.5)
        assert taken == []
        remote[0] = 4
        wait_until(lambda: bool(taken))
    assert taken == [positions[floor]]
