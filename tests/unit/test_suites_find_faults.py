"""The conformance suites are worth passing: every broken sink and every broken source fails at least one test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"

# Each breaks one promise of the kinds that docs/extending.md shows.
BROKEN = """
from dataclasses import replace

import memory_sink
import memory_source
import pytest
import shop_source
from firnline.sinks import Capabilities, Delivery, GoesBack
from firnline.sources import Budget, Split
from memory_sink import MemorySink, MemorySinkOptions
from memory_source import MemoryReader, MemorySource
from test_memory_sink import TestMemorySink as SinkSuite
from shop_source import ShopReader, ShopSource
from test_memory_source import TestMemorySource as SourceSuite
from test_shop_source import TestShopSource as ShopSuite

EXACTLY = Delivery.EXACTLY_ONCE


class Unfenced(MemorySink):
    def commit(self, commit, run_tasks=None):
        self._generation = self._table.generation
        return super().commit(commit)


class Doubling(MemorySink):
    def commit(self, commit, run_tasks=None):
        if self.find_receipt(commit.checkpoint.epoch):
            self._table.rows += self._table.rows
        return super().commit(commit)


class Anywhere(MemorySink):
    def commit(self, commit, run_tasks=None):
        return super().commit(replace(commit, previous=self.load().entry))


class Forgetful(MemorySink):
    def find_receipt(self, epoch):
        found = super().find_receipt(epoch)
        return found if found and found.epoch == self.load().epoch else None


class Claimable(MemorySink):
    def claim(self, run, generation=None, *arguments, **named):
        return super().claim(run, max(generation, self._table.generation + 1))


class Reclaimable(MemorySink):
    def claim(self, run, generation=None, baseline=None, onto=None, *, again=False, decided=None):
        return super().claim(run, max(generation, self._table.generation) if again else generation)


class Restless(MemorySink):
    def load(self):
        self._table.version += 1
        return super().load()


class Boasting(MemorySink):
    capabilities = Capabilities(EXACTLY, goes_back=GoesBack.EXACTLY)


class Upserting(MemorySink):
    capabilities = Capabilities(EXACTLY, upserts=True)


class Rewinding(MemorySource):
    def acknowledge(self, position):
        self._held.records, self._held.first = [], self._held.end


class Trusting(MemorySource):
    def start(self, position):
        return {"topic": self._topic, "offset": position["offset"] if position else 0}


class Hasty(MemorySource):
    def advance(self, plan, outcomes, epoch):
        return super().advance(plan, [{"to": plan.splits[0].inputs[0]["to"]}], epoch)


class Impure(MemorySource):
    def advance(self, plan, outcomes, epoch):
        return super().advance(plan, [{"to": self._held.end}], epoch)


class Repeating(MemorySource):
    def replay(self, position, records):
        return position


class Greedy(MemorySource):
    def replan(self, position, records, parallelism):
        return self._slice(position, self._held.first, self._held.end, 1000)


class Limitless(MemorySource):
    def plan(self, position, limits):
        return super().plan(position, replace(limits, max_events=1_000_000))


class Skipping(MemorySource):
    def _slice(self, base, start, end, max_output_files):
        bounds = sorted({start, (start + end) // 2, end})
        parts = [super(Skipping, self)._slice(base, a, b, max_output_files) for a, b in zip(bounds, bounds[1:])]
        splits = [split for part in parts for split in part.splits]
        return replace(parts[0], splits=splits, files=len(splits), size_bytes=sum(part.size_bytes for part in parts))

    def advance(self, plan, outcomes, epoch):
        return super().advance(plan, [{"to": max(o["to"] for o in outcomes)}] if outcomes else [], epoch)


class Halting(Skipping):
    def advance(self, plan, outcomes, epoch):
        ends = [split.inputs[0]["to"] for split in plan.splits]
        early = [o for o, end in zip(outcomes, ends) if o["to"] < end]
        return super().advance(plan, early[:1] or outcomes, epoch)


class Overrunning(MemorySource):
    class Reader(MemoryReader):
        def read(self, schemas, budget):
            unlimited = Budget(Split([], 1 << 60, 1 << 60, 1 << 60))
            for rows in super().read(schemas, unlimited):
                budget.records = unlimited.records
                yield rows


class Swapping(ShopSource):  # a slice that is read again comes out on other ports
    def replan(self, position, records, parallelism):
        plan = super().replan(position, records, parallelism)
        plan.splits[0].inputs[0]["again"] = True
        return plan

    class Reader(ShopReader):
        def by_port(self, numbered):
            swapped = {"orders": "users", "users": "orders"} if "again" in self._item else {}
            return {swapped.get(port, port): found for port, found in super().by_port(numbered).items()}


class Undeclared(ShopSource):
    def has_port(self, port):
        return port == ""


class Merging(ShopSource):  # what nobody wants comes out on the main port
    class Reader(ShopReader):
        def by_port(self, numbered):
            return super().by_port([(n, r if r["table"] in self._wanted else {**r, "table": ""}) for n, r in numbered])


class Selective(ShopSource):  # the position depends on what is wanted
    class Reader(ShopReader):
        def end(self):
            ended = super().end()
            if len(self._wanted) == 1:
                ended.outcomes[0]["to"] = self._item["from"]
            return ended


class Silent(ShopSource):
    class Reader(ShopReader):
        def end(self):
            return replace(super().end(), columns={})


def sink_suite(kind):
    class Suite(SinkSuite):
        @pytest.fixture
        def open_sink(self):
            memory_sink.TABLES.clear()
            return lambda context: kind(MemorySinkOptions("copy"), context)

    return Suite


def source_suite(kind):
    class Suite(SourceSuite):
        @pytest.fixture(autouse=True)
        def broken(self, monkeypatch):
            monkeypatch.setattr(memory_source, "MemorySource", kind)
            monkeypatch.setattr(memory_source, "MemoryReader", getattr(kind, "Reader", MemoryReader))

    return Suite


def shop_suite(kind):
    class Suite(ShopSuite):
        @pytest.fixture(autouse=True)
        def broken(self, monkeypatch):
            monkeypatch.setattr(shop_source, "ShopSource", kind)
            monkeypatch.setattr(shop_source, "ShopReader", getattr(kind, "Reader", ShopReader))

    return Suite


SINKS = [MemorySink, *MemorySink.__subclasses__()]
SHOPS = [ShopSource, *ShopSource.__subclasses__()]
SOURCES = [MemorySource, *(kind for kind in MemorySource.__subclasses__() if kind is not ShopSource), Halting]
for kind in SINKS:
    globals()[f"Test{kind.__name__}"] = sink_suite(kind)
for kind in SOURCES:
    globals()[f"Test{kind.__name__}"] = source_suite(kind)
for kind in SHOPS:
    globals()[f"Test{kind.__name__}"] = shop_suite(kind)


class TestCutting(SourceSuite):
    is_atomic = True  # and the source cuts anywhere


del SinkSuite, SourceSuite, ShopSuite
"""


def test_every_broken_kind_fails_and_the_whole_ones_pass(tmp_path: Path) -> None:
    for name, text in re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "test_broken.py").write_text(BROKEN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-rA", "--tb=no"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path / "test_broken.py")],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    ran = re.findall(r"^(PASSED|FAILED|ERROR) \S*test_broken\.py::Test(\w+)::", done.stdout, re.MULTILINE)
    outcomes = {kind: {outcome for outcome, other in ran if other == kind} for _, kind in ran}
    assert outcomes.pop("MemorySink") == {"PASSED"}, done.stdout[-3000:]
    assert outcomes.pop("MemorySource") == {"PASSED"}, done.stdout[-3000:]
    assert outcomes.pop("ShopSource") == {"PASSED"}, done.stdout[-3000:]
    kinds = re.findall(r"^class \w+\((?:Memory\w+|ShopSource|Skipping)\):", BROKEN, re.MULTILINE)
    assert len(outcomes) == len(kinds) + 1
    assert all("PASSED" in found and "ERROR" not in found for found in outcomes.values()), outcomes
    assert [kind for kind, found in outcomes.items() if "FAILED" not in found] == []
