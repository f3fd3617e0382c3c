"""Committers for tests: in this process, or in processes of their own, to be killed; and what they work on."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from firnline.clock import SystemClock
from firnline.committer.committer import CycleReport
from firnline.committer.service import CommitterObserver, CommitterService, TableRef
from firnline.errors import FirnlineError
from firnline.options import PipelineOptions
from firnline.sinks.delta.options import delta_tables
from firnline.storage import open_storage
from firnline.testing.faults import reached_points
from firnline.types import Json, RandomIds
from tests.support.processes import Launcher, RunOrder, tell_end

logger = logging.getLogger(__name__)

PENDING = "_staging/pending"
REJECTED = "_staging/rejected"
SUFFIX = ".meta.json"


def committer_launcher(folder: Path) -> Launcher:
    """Starts committers of a pipeline's staged tables."""
    return Launcher(folder, run_committer)


def run_committer(order: RunOrder) -> int:
    """In a child: commit once, or until SIGTERM."""
    error: FirnlineError | None = None
    with reached_points() as points:
        service = make_service(order.options, _Log())
        signal.signal(signal.SIGTERM, lambda *_: service.stop())
        try:
            if order.once:
                service.run_once()
            else:
                service.run()
        except FirnlineError as found:
            error = found
    tell_end(order, error, points)
    return error.exit_code if error else 0


def make_service(
    options: PipelineOptions, observer: CommitterObserver | None = None, **settings: Any
) -> CommitterService:
    """A service for the staged tables of a pipeline."""
    refs = [TableRef(s.location, s.storage_options) for s in delta_tables(options.sinks) if s.mode == "staged"]
    settings = {"poll_interval_secs": 0.05, **settings}
    return CommitterService(refs, RandomIds().new(), SystemClock(), observer, **settings)


def commit_table(table: str | Path, **settings: Any) -> CycleReport:
    """Commit once in this process, as `firnline commit --once` does."""
    service = CommitterService([TableRef(str(table))], RandomIds().new(), SystemClock(), **settings)
    return service.run_once()[0]


def pending_units(table: str | Path) -> list[str]:
    """The names of what lies in the pending folder, half-written files included."""
    folder = Path(table) / PENDING
    return sorted(p.name.removesuffix(SUFFIX) for p in folder.iterdir()) if folder.exists() else []


def rejected_reasons(table: str | Path) -> dict[str, str]:
    """Unit -> why it was set aside; read as plain JSON."""
    folder = Path(table) / REJECTED
    files = sorted(folder.iterdir()) if folder.exists() else []
    return {
        p.name.removesuffix(SUFFIX): str(json.loads(p.read_bytes())["rejected"]["reason"])
        for p in files
        if p.name.endswith(SUFFIX)
    }


def put_unit(table: str | Path, name: str, body: Json | bytes) -> Path:
    """Put a unit as another program would: a temporary name, then a rename."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    open_storage(str(table)).put(f"{PENDING}/{name}{SUFFIX}", data)
    return Path(table) / PENDING / f"{name}{SUFFIX}"


def bring_file(
    table: str | Path, name: str, rows: Mapping[str, Any], at: str = "", says: Mapping[str, Json] | None = None
) -> dict[str, Json]:
    """Write a Parquet file into a table's folder and put its unit; `says` changes what the unit tells, nothing else."""
    at = at or f"{name}.parquet"
    file = Path(table) / at
    if not file.resolve().is_relative_to(Path(table).resolve()):
        raise ValueError(f"{at!r} lies outside the table")
    file.parent.mkdir(parents=True, exist_ok=True)
    made = pa.table(dict(rows))
    pq.write_table(made, file)
    body: dict[str, Json] = {"path": at, "size": file.stat().st_size, "record_count": made.num_rows, **(says or {})}
    put_unit(table, name, body)
    return body


class _Log(CommitterObserver):
    """Writes down what a committer tells."""

    def cycled(self, table: str, report: CycleReport) -> None:
        if report.units or report.rejected or report.alarms:
            logger.info("cycled %s", report)

    def standing_by(self, table: str, holder: str) -> None:
        logger.info("standing by: %s", holder)

    def trouble(self, table: str, error: FirnlineError) -> None:
        logger.info("trouble: %s %s", error.code, error.message)
