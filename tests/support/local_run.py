"""A supervised run without Spark, `python -m tests.support.local_run FILE`: obeys wishes, has a control socket."""

from __future__ import annotations

import os
import signal
import sys

from firnline.run.control import serving_control
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.run.trend import TrendLog
from firnline.run.wanted import Wishes, WishFollower
from firnline.spec.build import build_options
from firnline.spec.loading import load_spec
from firnline.testing.local import LocalEngine


def main(path: str) -> int:
    options = build_options(load_spec(path, environ=os.environ), environ=os.environ)
    pipeline = open_pipeline(options)
    trend = TrendLog(pipeline.storage, options.name, pipeline.clock)
    runner = Runner(pipeline, LocalEngine(), trend, supervised=True)
    signal.signal(signal.SIGTERM, lambda *_: runner.stop())

    def say(text: str) -> None:
        print(text, flush=True)

    wishes = Wishes(pipeline.storage, options.name, pipeline.clock)
    with (
        WishFollower(wishes, runner, say, seconds=0.2) as follower,
        serving_control(options, runner, os.environ, say, once=False, follower=follower),
    ):
        say(f"run {runner.run_id} of {options.name}")
        result = runner.run()
    say(f"ended with exit code {result.exit_code}: {result.error or 'asked to'}")
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
