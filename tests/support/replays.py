"""Random lives of a pipeline with operators: killed, rescaled, robbed of snapshots; beside it, one without trouble.

Both are given the same input at the same times of day and cut it into the same epochs, so that their tables must agree.
"""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from firnline.clock import SystemClock
from firnline.history.edits.operator_state import Rescale
from firnline.options import (
    FieldOptions,
    OperatorOptions,
    PipelineOptions,
    SchemaOptions,
    StateOptions,
    TriggerOptions,
)
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner, RunResult
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.testing.faults import reached_points
from firnline.testing.local import LocalEngine
from firnline.types import RandomIds
from tests.support.keyed import COUNTS, SECOND, answers
from tests.support.pipelines import Loud, pipeline_options
from tests.support.processes import KILLED, Launcher, RunOrder, tell_end

SCHEMA = SchemaOptions((FieldOptions("k", "string"), FieldOptions("v", "int64"), FieldOptions("at", "timestamp")))
KILLED_AT = (
    "epoch.run.before",
    "epoch.run.after",
    "epoch.stage.after",
    "epoch.acknowledge.before",
    "delta.commit.before",
    "delta.commit.after",
    "state.run.after",
    "state.shard.after",
    "state.commit.before",
    "state.commit.after",
)


class SetClock(SystemClock):
    """A clock whose time of day is set by hand; durations are real."""

    def __init__(self) -> None:
        self.minute = 0

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=self.minute)


def run_at(options: PipelineOptions, minute: int) -> RunResult:
    """Run until the input is exhausted, in this process: a run that began at midnight, and now it is `minute`."""
    clock = SetClock()
    pipeline = open_pipeline(options, once=True, clock=clock)
    pipeline.sources.align_seconds = 3600.0  # how fast a source answers must not decide what an epoch reads
    runner = Runner(pipeline, LocalEngine(1), Loud(), once=True)
    clock.minute = minute
    return runner.run()


def _run_in_child(minute: int, order: RunOrder) -> int:
    with reached_points() as points:
        result = run_at(order.options, minute)
    tell_end(order, result.error, points)
    return result.exit_code


def _windows(rnd: random.Random) -> OperatorOptions:
    settings = {"keys": ["k"], "aggregates": COUNTS, "time": "at", "window": {"size_us": 60 * SECOND}}
    settings |= {"delay_us": rnd.choice([0, 20]) * SECOND, "emit": "changes", "before": False}
    idle = rnd.choice([None, timedelta(minutes=15)])
    return OperatorOptions("windows", "aggregate", ("a", "b"), settings, idle_after=idle)


def _totals(name: str, port: str) -> OperatorOptions:
    return OperatorOptions(name, "aggregate", (port,), {"keys": ["k"], "aggregates": COUNTS[:1]})


def _graph(rnd: random.Random) -> tuple[OperatorOptions, ...]:
    """Operators that feed each other, or stand beside each other."""
    first = OperatorOptions("firsts", "deduplicate", ("a",), {"keys": ["k", "v"]})
    return rnd.choice(
        [
            (_windows(rnd), _totals("totals", "windows")),
            (first, _totals("totals", "firsts"), _totals("others", "b")),
            (_windows(rnd), _totals("totals", "a")),
        ]
    )


class Life:
    """One random life of a pipeline. `trace` says what happened, for whoever has to find out what went wrong."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.trace: list[Any] = [("seed", seed)]
        self.kills = 0
        self._folder = folder
        self._step = 0
        self._second = dict.fromkeys("ab", 0)
        operators = _graph(self.random)
        limits = {"max_files": self.random.choice([2, 4, 1000]), "max_events": self.random.choice([4, 8, 1000])}
        self.plain = self._options(folder / "plain", operators, **limits)
        mode = self.random.choice(["aligned", "per_operator"])
        if mode == "per_operator":
            often = self.random.sample([1, *[3_600_000] * (len(operators) - 1)], len(operators))
            operators = tuple(replace(o, interval_ms=ms) for o, ms in zip(operators, often, strict=True))
        every = self.random.choice([1, 2, 3, 100])
        self.troubled = self._options(
            folder / "troubled", operators, mode=mode, trigger=TriggerOptions(every_epochs=every), **limits
        )
        self.trace.append((mode, every, limits, [(o.name, o.interval_ms) for o in operators]))

    def _options(self, folder: Path, operators: tuple[OperatorOptions, ...], **settings: Any) -> PipelineOptions:
        sources = []
        for name in "ab":
            (folder / name).mkdir(parents=True)
            sources.append(FileSourceOptions(name, str(folder / name), poll_interval_secs=0.05, schema=SCHEMA))
        sinks = [DeltaSinkOptions(o.name, str(folder / f"t-{o.name}"), input=o.name, write="upsert") for o in operators]
        if operators[0].name == "windows":
            sinks.append(DeltaSinkOptions("late", str(folder / "t-late"), input="windows.late"))
        if operators[0].name == "firsts":
            sinks[0] = replace(sinks[0], write="append")
        return pipeline_options("", "", sources=sources, operators=operators, sinks=sinks, **settings)

    def live(self, steps: int) -> None:
        """Let time go by; each step brings input, and trouble to one of the two."""
        for _ in range(steps):
            self._add_input(last=self._step == steps - 1)
            self._trouble()
            for options in (self.plain, self.troubled):
                result = run_at(options, 10 * self._step)
                assert result.exit_code == 0, (self.trace, result)

    def _add_input(self, *, last: bool) -> None:
        """Some files for one source or both; a source may be silent for some steps. In the end every key comes."""
        self._step += 1
        for source in "ab" if last else self.random.choice(["a", "ab", "ab", "b"]):
            for number in range(self.random.choice([1, 1, 2])):
                self._second[source] += self.random.choice([5, 30, 90])
                rows = [self._row(source, self.random.randrange(5)) for _ in range(self.random.choice([1, 3, 7]))]
                rows += [self._row(source, key) for key in range(5)] if last else []
                for options in (self.plain, self.troubled):
                    folder = Path(next(one.location for one in options.sources if one.name == source))
                    (folder / f"f{self._step:03d}-{number}.json").write_text("\n".join(rows) + "\n")
                self.trace.append(("file", source, len(rows)))

    def _row(self, source: str, key: int) -> str:
        second = max(0, self._second[source] - self.random.choice([0, 0, 3, 100]))
        at = f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"
        return json.dumps({"k": f"k{key}", "v": self.random.randrange(20), "at": at})

    def _trouble(self) -> None:
        self.random.choice([self._kill, self._kill, self._kill_twice, self._deal_anew, self._rescale, self._lose])()

    def _kill(self) -> None:
        """Killed at a point, if the run gets there."""
        fault = f"{self.random.choice(KILLED_AT)}:{self.random.choice([1, 1, 2, 3])}:kill"
        launcher = Launcher(self._folder / f"log-{len(self.trace)}", partial(_run_in_child, 10 * self._step))
        ended = launcher.run(self.troubled, fault)
        assert ended.exit_code in (KILLED, 0), (self.trace, ended)
        self.kills += ended.exit_code == KILLED
        self.trace.append(("kill", fault, ended.exit_code))

    def _kill_twice(self) -> None:
        self._kill()
        self._kill()

    def _deal_anew(self) -> None:
        """Another number of shards in the spec: the next run deals the key groups out anew."""
        self.troubled = replace(self.troubled, state=StateOptions(shards=self.random.choice([1, 2, 3, 5])))
        self.trace.append(("shards", self.troubled.state.shards))

    def _rescale(self) -> None:
        """Another number of shards by an epoch of its own, where there is state by now."""
        pipeline = open_pipeline(replace(self.troubled, state=StateOptions()))
        held = pipeline.load().checkpoint
        if held is not None and held.state:
            shards = self.random.choice([1, 2, 4])
            Rescale(pipeline, shards).perform(RandomIds().new())
            self.troubled = replace(self.troubled, state=StateOptions())
            self.trace.append(("rescale", shards))

    def _lose(self) -> None:
        """The newest snapshot is lost, or all of them: what they held is folded again."""
        home = Path(self.troubled.sinks[0].location) / "_firnline" / self.troubled.name / "state"
        snapshots = sorted(home.iterdir()) if home.exists() else []
        for snapshot in snapshots[-1:] if self.random.random() < 0.5 else snapshots:
            shutil.rmtree(snapshot)
        self.trace.append(("lost", len(snapshots)))

    def differences(self) -> dict[str, tuple[list[Any], list[Any]]]:
        """The tables that differ between the two, with what each holds."""
        found = {}
        for plain, troubled in zip(self.plain.sinks, self.troubled.sinks, strict=True):
            rows = answers(plain.location), answers(troubled.location)
            if rows[0] != rows[1]:
                found[plain.name] = rows
        return found
