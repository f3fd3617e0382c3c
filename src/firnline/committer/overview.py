"""Shows what waits in a table's staging folder: pending units and those set aside, per pipeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from firnline.committer.service import find_holder
from firnline.errors import DamagedError, NewerFormatError
from firnline.names import PENDING, pending_unit
from firnline.process import has_exited
from firnline.sinks.delta.table import Table
from firnline.sinks.staged.chain import arrange, read_log_head
from firnline.sinks.staged.unit import ForeignUnit, Unit, list_units, load_rejected, parse_unit
from firnline.storage import Storage
from firnline.types import Json


@dataclass(slots=True)
class StagingOverview:
    """What `firnline staging` shows; the field names are the same in JSON."""

    table: str
    units_pending: int = 0
    bytes_pending: int = 0
    oldest_pending_seconds: float = 0.0
    unreadable: list[str] = field(default_factory=list)
    pipelines: list[dict[str, Json]] = field(default_factory=list)
    rejected: list[dict[str, Json]] = field(default_factory=list)
    committer: dict[str, Json] | None = None


def load_overview(table: Table, storage: Storage, now: datetime) -> StagingOverview:
    """Read everything that `staging` shows. Read-only."""
    out = StagingOverview(table=storage.root)
    units: list[Unit] = []
    foreign: list[ForeignUnit] = []
    ages: list[float] = []
    for name, stat in list_units(storage, PENDING):
        ages.append((now - stat.modified_at).total_seconds())
        try:
            unit = parse_unit(name, storage.get(pending_unit(name)))
        except FileNotFoundError:
            continue
        except (DamagedError, NewerFormatError) as error:
            out.unreadable.append(error.message)
            continue
        if isinstance(unit, Unit):
            units.append(unit)
        else:
            foreign.append(unit)
    out.units_pending = len(units) + len(foreign) + len(out.unreadable)
    out.bytes_pending = sum(int(f["size_bytes"]) for u in units for f in u.files) + sum(u.size_bytes for u in foreign)
    out.oldest_pending_seconds = max(ages, default=0.0)
    exists = table.refresh()
    for pipeline in sorted({u.pipeline for u in units}):
        own = [u for u in units if u.pipeline == pipeline]
        out.pipelines.append(_pipeline_row(table if exists else None, pipeline, own))
    if foreign:
        out.pipelines.append({"pipeline": None, "units": len(foreign), "bytes": sum(u.size_bytes for u in foreign)})
    for unit_aside in load_rejected(storage):
        out.rejected.append(
            {
                "unit": unit_aside.name,
                "pipeline": unit_aside.pipeline,
                "epoch": unit_aside.epoch,
                "reason": unit_aside.reason,
                "rejected_at": unit_aside.rejected_at,
            }
        )
    holder = find_holder(storage)
    out.committer = holder if holder is not None and not has_exited(str(holder["host"]), int(holder["pid"])) else None
    return out


def _pipeline_row(table: Table | None, pipeline: str, units: list[Unit]) -> dict[str, Json]:
    row: dict[str, Json] = {
        "pipeline": pipeline,
        "units": len(units),
        "bytes": sum(int(f["size_bytes"]) for u in units for f in u.files),
        "first_epoch": min(u.epoch for u in units),
        "last_epoch": max(u.epoch for u in units),
    }
    if table is not None:
        arranged = arrange(read_log_head(table, pipeline), units)
        row |= {"ready": len(arranged.ready), "waiting": len(arranged.waiting), "forks": len(arranged.forks)}
        row["waits_for_epochs"] = list(arranged.gap) if arranged.gap else None
    return row
