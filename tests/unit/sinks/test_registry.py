"""Kinds of sinks: how they are opened, what is checked beforehand, and what a sink need not implement itself."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from firnline.checkpoint.ledger import Ledger
from firnline.clock import SystemClock
from firnline.errors import ConfigError, FencedError, RollbackRefusedError, SinkError
from firnline.run.joining import check_replaceable, plan_sink
from firnline.sinks import registry
from firnline.sinks.base import Capabilities, Effect, EpochCommit, Fence, Head, RunTasks, Sink, SinkContext, Stager
from firnline.sinks.delta import kind as delta
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sinks.delta.sink import DeltaSink, as_delta
from firnline.sinks.delta.stage import ParquetStager
from firnline.sinks.delta.upsert.sink import UpsertSink
from firnline.sinks.guard import GuardedStager
from firnline.sinks.staged.sink import StagedDeltaSink
from firnline.storage import open_storage
from firnline.types import Delivery, EntryRef, Json, Receipt


class PlainSink(Sink):
    """Only what a sink must have."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.AT_LEAST_ONCE)

    def __init__(self, options: DeltaSinkOptions, context: SinkContext) -> None:
        self.name, self.required, self.uri = options.name, options.required, options.table
        self.head = Head(exists=True, version=7, generation=3, epoch=5, entry=EntryRef(5, "five", "ab" * 32))

    def load(self) -> Head:
        return self.head

    def claim(self, run: str, *arguments: Any, **named: Any) -> Head:
        return self.head

    def stage_target(self) -> dict[str, Json]:
        return {"type": "plain", "sink": self.name}

    def commit(self, commit: EpochCommit, run_tasks: RunTasks | None = None) -> Receipt:
        raise NotImplementedError

    def find_receipt(self, epoch: int) -> Receipt | None:
        return None

    def edit(self, commit: EpochCommit, effect: Effect, onto: EntryRef | None, version: int | None = None) -> Receipt:
        raise NotImplementedError

    def find_schema(self) -> pa.Schema | None:
        return None


def context(folder: Path, **settings: Any) -> SinkContext:
    ledger = Ledger(open_storage(str(folder)), "demo")
    return SinkContext("demo", ledger, SystemClock(), lambda positions, _inputs: positions, **settings)


def options(folder: Path, **settings: Any) -> DeltaSinkOptions:
    return DeltaSinkOptions(name="out", table=str(folder), **settings)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind whose sinks can do as little as possible, in the place of `delta`."""
    kind = ModuleType("plain_kind")
    kind.__dict__["open_sink"] = PlainSink
    monkeypatch.setitem(sys.modules, "plain_kind", kind)
    monkeypatch.setitem(registry.KINDS, "delta", "plain_kind")


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({}, DeltaSink), ({"mode": "staged"}, StagedDeltaSink), ({"write": "upsert", "key": ("id",)}, UpsertSink)],
)
def test_the_spec_says_which_delta_sink_it_is(tmp_path: Path, settings: dict[str, Any], kind: type) -> None:
    [sink] = registry.open_sinks([(options(tmp_path, **settings), context(tmp_path, decides=True))])
    assert type(sink) is kind
    assert (sink.capabilities.decides, sink.capabilities.upserts) == (True, kind is UpsertSink)
    assert as_delta(sink) is sink


def test_an_upsert_without_a_key_takes_that_of_its_input(tmp_path: Path) -> None:
    opened = options(tmp_path, write="upsert")
    [sink] = registry.open_sinks([(opened, context(tmp_path, input_key=("user", "window_start")))])
    assert sink.stage_target()["shape"]["key"] == ["user", "window_start"]
    with pytest.raises(ConfigError, match="no column identifies a row"):
        registry.open_sinks([(opened, context(tmp_path))])


def test_a_target_names_the_kind_whose_stager_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[type[Stager]] = []
    real = delta.open_stager

    def open_stager(target: dict[str, Json], attempt: str) -> Stager:
        stager = real(target, attempt)
        opened.append(type(stager))
        return stager

    monkeypatch.setattr(delta, "open_stager", open_stager)
    [sink] = registry.open_sinks([(options(tmp_path), context(tmp_path))])
    guarded = registry.open_stager(sink.stage_target(), "ab" * 8)
    assert (type(guarded), opened) == (GuardedStager, [ParquetStager])
    with pytest.raises(ConfigError, match="no kind of sink 'tape'"):
        registry.open_stager({"type": "tape", "sink": "out"}, "ab" * 8)


@pytest.mark.usefixtures("plain")
def test_a_kind_that_cannot_decide_does_not_come_first(tmp_path: Path) -> None:
    further = registry.open_sinks([(options(tmp_path), context(tmp_path))])
    assert [sink.name for sink in further] == ["out"]
    with pytest.raises(ConfigError, match=r"'out' .delta. comes first, and a sink of that kind cannot decide"):
        registry.open_sinks([(options(tmp_path), context(tmp_path, decides=True))])


@pytest.mark.usefixtures("plain")
def test_a_kind_that_cannot_upsert_is_not_asked_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'out' .delta. cannot apply changes by key"):
        registry.open_sinks([(options(tmp_path, write="upsert"), context(tmp_path))])


def test_a_sink_that_cannot_go_back_is_named(tmp_path: Path) -> None:
    sink = PlainSink(options(tmp_path), context(tmp_path))
    plan, problems = plan_sink(sink, 4, left=False, accept=[])
    assert (plan.epoch, plan.version_now, plan.version_then) == (5, 7, None)
    assert [problem.message for problem in problems] == ["out cannot take rows back"]  # the rollback adds the way out
    assert plan_sink(sink, 4, left=True, accept=[])[1] == []
    assert plan_sink(sink, 5, left=False, accept=[])[1] == []
    with pytest.raises(RollbackRefusedError, match="out cannot take rows back"):
        check_replaceable([sink])


def test_a_sink_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = PlainSink(options(tmp_path), context(tmp_path))

    def away() -> Head:
        raise SinkError("it is away")

    monkeypatch.setattr(sink, "load", away)
    plan, problems = plan_sink(sink, 4, left=False, accept=[])
    assert (plan.version_now, problems[0].message) == (None, "out cannot be read: it is away")


def test_what_a_sink_does_not_implement_has_a_default(tmp_path: Path) -> None:
    sink = PlainSink(options(tmp_path), context(tmp_path))
    assert sink.read_fence() == Fence(7, 5, 0xABABABABABABABAB >> 1, 3)
    sink.check_holder(3)
    with pytest.raises(FencedError, match="generation 3 took out over"):
        sink.check_holder(2)
    sink.head = Head(exists=False, version=-1)
    assert (sink.read_fence(), sink.read_fence().exists) == (Fence(), False)
    assert list(sink.read_log()) == []
    assert (sink.commit_times(7, 8), sink.find_missing_staged([{"path": "a"}]), sink.is_full()) == ({}, [], None)
    with pytest.raises(ConfigError, match="'out' is no Delta table"):
        as_delta(sink)
