"""Rollbacks, fresh starts and repairs of the ledger in processes of their own, to be killed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from firnline.errors import FirnlineError
from firnline.history.edits.fresh_start import start_over
from firnline.history.edits.ledger_repair import LedgerRepair
from firnline.history.edits.rollback import Rollback
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.testing.faults import reached_points
from firnline.types import RandomIds
from tests.support.processes import Launcher, RunOrder, tell_end


def rollback_launcher(folder: Path, to_epoch: int) -> Launcher:
    """Starts rollbacks of a pipeline."""
    return Launcher(folder, partial(_in_child, partial(_roll_back, to_epoch=to_epoch)))


def fresh_launcher(folder: Path, after_epoch: int, *, truncate: bool) -> Launcher:
    """Starts fresh starts of a pipeline."""
    return Launcher(folder, partial(_in_child, partial(_start_over, after_epoch=after_epoch, truncate=truncate)))


def repair_launcher(folder: Path, **decided: list[str]) -> Launcher:
    """Starts repairs of a pipeline's ledger."""
    return Launcher(folder, partial(_in_child, partial(_repair, decided=decided)))


def _repair(pipeline: OpenPipeline, run: str, decided: dict[str, list[str]]) -> None:
    LedgerRepair(pipeline, **decided).perform(run)


def _roll_back(pipeline: OpenPipeline, run: str, to_epoch: int) -> None:
    Rollback(pipeline, to_epoch).perform(run)


def _start_over(pipeline: OpenPipeline, run: str, after_epoch: int, truncate: bool) -> None:
    start_over(pipeline, after_epoch, run, truncate=truncate)


def _in_child(work: Callable[[OpenPipeline, str], None], order: RunOrder) -> int:
    error: FirnlineError | None = None
    with reached_points() as points:
        try:
            work(open_pipeline(order.options), RandomIds().new())
        except FirnlineError as found:
            error = found
    tell_end(order, error, points)
    return error.exit_code if error else 0
