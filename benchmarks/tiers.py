"""Tiers and the way back: what recording costs the epoch loop, how fast a start finds its place, a rollback."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.cases import Row, World
from benchmarks.servers import running_s3
from benchmarks.turns import p50, round_off
from firnline.clock import monotonic
from firnline.history.edits.rollback import Rollback, RollbackPlan
from firnline.options import (
    BatchOptions,
    CheckpointOptions,
    LocalTierOptions,
    PipelineOptions,
    RemoteTierOptions,
    StoreOptions,
)
from firnline.run.observer import EpochFacts, Observer
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.runner import Runner
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.testing.local import LocalEngine

ROUNDS = 6
WARM_EPOCHS = 20
STARTS = 15


def _options(source: Path, table: Path, checkpoint: CheckpointOptions, **batch: Any) -> PipelineOptions:
    return PipelineOptions(
        name="bench",
        sources=(FileSourceOptions("records", str(source)),),
        sinks=(DeltaSinkOptions("delta", str(table)),),
        batch=BatchOptions(**batch),
        checkpoint=checkpoint,
    )


class _Times(Observer):
    """When every epoch was committed."""

    def __init__(self) -> None:
        self.committed_at: list[float] = []

    def committed(self, facts: EpochFacts) -> None:
        self.committed_at.append(monotonic())


def _run(pipeline: OpenPipeline) -> list[float]:
    """Run until the input is exhausted; returns when every epoch was committed."""
    times = _Times()
    result = Runner(pipeline, LocalEngine(), times, once=True).run()
    if result.error is not None:
        raise result.error
    return times.committed_at


def _write_small_files(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        records = [{"id": number * 50 + n, "name": f"row {n}", "value": n / 3} for n in range(50)]
        (folder / f"{number:06}.ndjson").write_text("".join(json.dumps(record) + "\n" for record in records))


# -- the epoch loop ---------------------------------------------------------------------------------------


def epoch_loop(world: World) -> list[Row]:
    """Small epochs, one file each: with the default store, with both tiers on top of it, and with neither.

    Without the first epochs, in which stores and tiers are opened: what a start costs is another case. The store alone
    is measured twice, against itself too: as far as that row is from 1, the others may be off. How much of the loop's
    time goes to the tiers is also measured directly.
    """
    epochs = max(20, int(100 * world.scale))
    work = world.folder / "loop"
    _write_small_files(work / "in", WARM_EPOCHS + epochs)
    times: dict[str, list[float]] = {kind: [] for kind in ("none", "store", "again", "tiers")}
    shares: list[float] = []
    for number in range(world.rounds(ROUNDS) + 1):
        # Whoever is first pays for what the one before left to the disk: so everybody is first in turn.
        kinds = list(times)
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            # Nothing is deleted before the end: on ext4, files are created slowly for a while after a deletion.
            seconds, share = _loop(work / "in", work / f"{number}-{kind}", kind, epochs)
            if number:
                times[kind].append(epochs / seconds)
                shares += [share] if kind == "tiers" else []
    shutil.rmtree(work)

    def ratio(one: str, *others: str) -> float:
        """The median over the rounds: one kind against the mean of others in the same round."""
        rounds = zip(times[one], *(times[other] for other in others), strict=True)
        return p50([first / statistics.fmean(rest) for first, *rest in rounds])

    def row(told: str, one: str, other: str, found: float, aim: float | None = None) -> Row:
        speeds = [round_off(p50(times[kind])) for kind in (one, other)]
        bound = (f">= {aim:g}", found >= aim) if aim else ("", None)
        return Row(f"{told}, {epochs} small epochs", speeds[0], "epochs/s", speeds[1], found, *bound)

    return [
        row("epoch loop with tiers against the store alone", "tiers", "store", ratio("tiers", "store", "again"), 0.97),
        row("epoch loop, the store alone against itself", "again", "store", ratio("again", "store")),
        row("epoch loop with the file store against none", "store", "none", ratio("store", "none")),
        Row(
            "of the epoch loop's time, spent on the tiers",
            round_off(100 * p50(shares)),
            "%",
            aim="<= 3",
            met=p50(shares) <= 0.03,
        ),
    ]


def _loop(source: Path, work: Path, kind: str, epochs: int) -> tuple[float, float]:
    """Run the epochs; returns how long they took, and the share of it that went to the tiers."""
    tiered = kind == "tiers"
    checkpoint = CheckpointOptions(
        store=None if kind == "none" else StoreOptions(type="file", path=str(work / "store")),
        local=LocalTierOptions(str(work / "local")) if tiered else None,
        remote=RemoteTierOptions(str(work / "remote")) if tiered else None,
    )
    pipeline = open_pipeline(_options(source, work / "table", checkpoint, max_files=1), once=True)
    offered: list[tuple[float, float]] = []  # when a record was given to the tiers, and how long that took
    offer = pipeline.recorder._offer

    def timed(*given: Any) -> None:
        began = monotonic()
        offer(*given)
        offered.append((began, monotonic() - began))

    pipeline.recorder._offer = timed  # type: ignore[assignment, method-assign]
    seen = _run(pipeline)
    assert len(seen) == WARM_EPOCHS + epochs
    began, ended = seen[WARM_EPOCHS - 1], seen[-1]
    return ended - began, sum(took for at, took in offered if began <= at <= ended) / (ended - began)


# -- recovery ---------------------------------------------------------------------------------------------


def recovery_paths(world: World) -> list[Row]:
    """A start that finds its place in the sink, in the local tier, in the remote one; then a run with nothing to do.

    `find the place` is the read of sinks, store and tiers; the run adds the claim, one look for input, and the end.
    """
    epochs = max(10, int(50 * world.scale))
    work = world.folder / "paths"
    _write_small_files(work / "in", epochs)
    with running_s3() as bucket:
        local = LocalTierOptions(str(work / "local"))
        folder = RemoteTierOptions(str(work / "remote"))
        s3 = RemoteTierOptions(f"{bucket.uri}/tier", storage_options=bucket.options)
        filled = CheckpointOptions(local=local, remote=folder)
        _run(open_pipeline(_options(work / "in", work / "table", filled, max_files=1), once=True))
        elsewhere = _options(work / "in", work / "table", CheckpointOptions(remote=s3))
        _run(open_pipeline(elsewhere, once=True))  # reads nothing, and brings this tier level
        kinds = {
            "sink": ("sink", CheckpointOptions()),
            "local": ("local", CheckpointOptions(local=local)),
            "remote, folder": ("remote", CheckpointOptions(remote=folder)),
            "remote, S3": ("remote", CheckpointOptions(remote=s3)),
        }
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        ran: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(world.rounds(STARTS)):
            for kind, (path, checkpoint) in kinds.items():
                options = _options(work / "in", work / "table", checkpoint)
                found[kind].append(_find_place(options, path))
                began = monotonic()
                assert _run(open_pipeline(options, once=True)) == []
                ran[kind].append((monotonic() - began) * 1000)
    shutil.rmtree(work)
    rows = []
    for told, times in (("find the place", found), ("a run with nothing to do", ran)):
        sink = p50(times["sink"])
        rows.append(Row(f"{told}, from the sink", round_off(sink), "ms"))
        for kind in list(kinds)[1:]:
            took = p50(times[kind])
            rows.append(
                Row(f"{told}, from {kind}, against the sink", round_off(took), "ms", round_off(sink), took / sink)
            )
    return rows


def _find_place(options: PipelineOptions, path: str) -> float:
    pipeline = open_pipeline(options, once=True)
    runner = Runner(pipeline, LocalEngine(), once=True)
    began = monotonic()
    runner._opening.read_sinks()
    milliseconds = (monotonic() - began) * 1000
    head = runner._progress.head
    assert head.path == path, head.path
    pipeline.recorder.close(drain=False)
    return milliseconds


# -- rollback ---------------------------------------------------------------------------------------------


def rollback(world: World) -> list[Row]:
    """A table of 10,000 files that a compaction has rewritten, taken back to before it; no data file is opened.

    Before the rollback every data file is overwritten with bytes that are no Parquet, of the same size.
    """
    epochs = 10
    partitions = max(20, int(1000 * world.scale))
    work = world.folder / "rollback"
    source, table = work / "in", work / "table"
    source.mkdir(parents=True)
    for epoch in range(epochs):
        lines = [json.dumps({"day": n, "id": epoch * partitions + n, "value": n / 3}) + "\n" for n in range(partitions)]
        (source / f"{epoch:06}.ndjson").write_text("".join(lines))
    store = StoreOptions(type="file", path=str(work / "store"))
    options = _options(source, table, CheckpointOptions(store=store), max_files=1, max_output_files=10_000)
    options = replace(options, sinks=(DeltaSinkOptions("delta", str(table), partition_by=("day",)),))
    with _without_fsync():  # only while the table is built
        assert len(_run(open_pipeline(options, once=True))) == epochs
    files = epochs * partitions
    rewritten = _compact(table, files)
    assert _spoil(table) == files + rewritten
    pipeline = open_pipeline(options, once=True)
    began = monotonic()
    plan = Rollback(pipeline, epochs - 1).plan()
    planned = monotonic() - began
    plan.check()
    assert (plan.sinks[0].files_removed, plan.sinks[0].files_restored) == (rewritten, files - partitions), plan
    began = monotonic()
    done, receipt = Rollback(pipeline, epochs - 1).perform(pipeline.ids.new())
    performed = monotonic() - began
    _check_rolled_back(pipeline, done, receipt.epoch, files - partitions)
    shutil.rmtree(work)
    name = f"rollback of a table of {files} files"
    return [
        Row(f"{name}: plan ({rewritten} files removed, {files - partitions} restored)", round_off(planned), "s"),
        Row(f"{name}: perform", round_off(performed), "s"),
    ]


def _compact(table: Path, files: int) -> int:
    """Rewrite all files, as a compaction does; returns how many there are then."""
    from deltalake import DeltaTable

    delta = DeltaTable(str(table))
    assert len(delta.file_uris()) == files
    delta.optimize.compact()
    return len(delta.file_uris())


def _spoil(table: Path) -> int:
    """Overwrite every data file with as many other bytes; returns how many there are."""
    paths = [path for path in table.rglob("*.parquet") if not {"_delta_log", "_firnline"} & {*path.parts}]
    for path in paths:
        path.write_bytes(b"\xff" * path.stat().st_size)
    return len(paths)


def _check_rolled_back(pipeline: OpenPipeline, plan: RollbackPlan, epoch: int, files: int) -> None:
    from deltalake import DeltaTable

    assert len(DeltaTable(pipeline.deciding.uri).file_uris()) == files
    held = pipeline.deciding.load()
    assert held.checkpoint is not None
    assert held.epoch == epoch == plan.new_epoch
    assert held.checkpoint.positions == plan.positions_then


@contextmanager
def _without_fsync() -> Iterator[None]:
    real = os.fsync
    os.fsync = lambda fd: None  # noqa: ARG005  # the name is part of the signature
    try:
        yield
    finally:
        os.fsync = real
