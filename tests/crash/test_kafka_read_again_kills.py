"""Requests to read quarantined records of a topic again, killed at the points of their epoch: each is read once."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest

from firnline.options import PipelineOptions
from tests.integration.test_kafka_read_again import ask, bad, fill, rows
from tests.support.kafka import KafkaServer
from tests.support.kills import PROOF, kill_at_every_point
from tests.support.pipelines import run_once

pytestmark = [pytest.mark.crash, pytest.mark.kafka]
POINTS = [
    f"{name}.{side}"
    for name in ("epoch.plan", "epoch.run", "epoch.stage", "delta.commit", "storage.delete")
    for side in ("before", "after")
]
MOST_KILLS = None if PROOF else 1


def work(options: PipelineOptions) -> None:
    assert run_once(options).exit_code == 0


def test_killed_while_records_are_read_again(kafka: KafkaServer, tmp_path: Path) -> None:
    numbers = itertools.count()

    def prepare() -> PipelineOptions:
        _, options = fill(kafka, tmp_path / str(next(numbers)))
        ask(options)
        return options

    def check(options: PipelineOptions, where: str) -> None:
        work(options)
        work(options)
        assert rows(Path(options.deciding.location), "id") == [(1,), (2,), (3,)], where
        assert [reason for _, _, reason in bad(options)] == ["not-json"], where

    deletes = {"storage.delete.before": 1, "storage.delete.after": 1}
    reached = kill_at_every_point(
        prepare, partial(work), check, points=POINTS, varying=deletes, most=MOST_KILLS, helpers=False
    )
    assert reached["delta.commit.after"] >= 1
