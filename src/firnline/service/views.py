"""What the service shows of pipelines as JSON; the field names are those of the command line."""

from __future__ import annotations

from datetime import UTC, datetime

from firnline.clock import seconds_since
from firnline.service.rates import find_rate
from firnline.service.supervise.policy import Wait
from firnline.service.supervise.supervisor import Seen
from firnline.types import Json


def summary(seen: Seen, now: datetime) -> dict[str, Json]:
    """Return one line of the overview."""
    glance, run = seen.glance, (seen.glance.run or {}) if seen.glance else {}
    control = glance.control if glance else None
    wish = glance.wish if glance else None
    waits = seen.decision if isinstance(seen.decision, Wait) else None
    return {
        "pipeline": seen.registered.name,
        "state": glance.state if glance else "unknown",
        "needs_person": seen.explained,
        "wanted": wish.wanted if wish else None,
        "wanted_by": wish.by if wish else None,
        "wanted_since": wish.at if wish else None,
        "wish": wish.number if wish else None,
        "restart_at": datetime.fromtimestamp(waits.until, UTC).isoformat() if waits else None,
        "restart_reason": waits.reason if waits else None,
        "epoch": control["epoch"] if control else run.get("epoch"),
        "generation": control["generation"] if control else run.get("generation"),
        "run": control["run"] if control else run.get("run"),
        "pid": control["pid"] if control else None,
        "host": run.get("host"),
        "rows": run.get("rows"),
        "rows_per_second": find_rate(seen.samples),
        "lag_seconds": run.get("lag_seconds"),
        "last_commit_at": run.get("last_commit_at"),
        "last_error": glance.last_error if glance else None,
        "restarts": run.get("restarts"),
        "read_at": glance.read_at if glance else None,
        "age_seconds": seconds_since(glance.read_at, now) if glance else None,
    }
