"""Topologies: chained pipelines, their channels and their snapshots."""

from __future__ import annotations

from datetime import timedelta

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from firnline.history.topology.show import load_view, show_topology
from firnline.service.answers import kept
from firnline.service.api.common import NAME, ApiRoute, Name, Operator, Reader, Service, TheService
from firnline.service.api.work import JobId
from firnline.service.jobs import CancelledError, Job
from firnline.service.topologies import KnownTopology, find_topologies, get_topology
from firnline.topology.decide import Outcome
from firnline.types import Json

router = APIRouter(prefix="/topologies", tags=["topologies"], route_class=ApiRoute)

POLL_SECONDS = 0.2
LONGEST_SECONDS = 24 * 3600
KEPT = 3


class SnapshotRequest(BaseModel):
    """`timeout_seconds`: abort the snapshot after this time; `keep`: drop older ones than so many."""

    model_config = ConfigDict(extra="forbid")

    timeout_seconds: float = Field(default=600.0, gt=0, le=LONGEST_SECONDS)
    keep: int = Field(default=KEPT, ge=1, le=1000)


def find_known(service: Service) -> list[KnownTopology]:
    """Return the topologies that the service knows, as the files are now."""
    seen = (one.registered.options for one in service.supervisor.all())
    pipelines = [options for options in seen if options is not None]
    return find_topologies(service.supervisor.topology_files(), pipelines, service.supervisor.environ, NAME)


@router.get("")
@kept
def list_topologies(service: TheService, _: Reader) -> dict[str, Json]:
    """List every topology file, and the topology that the other pipelines form."""
    rows: list[dict[str, Json]] = []
    for one in find_known(service):
        topology = one.topology
        rows.append(
            {
                "topology": one.name,
                "file": one.file,
                "members": list(topology.members) if topology is not None else [],
                "channels": len(topology.channels) if topology is not None else 0,
                "conflicts": list(map(str, topology.conflicts)) if topology is not None else [],
                "problem": one.problem,
            }
        )
    return {"topologies": rows}


@router.get("/{name}")
@kept
def show(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """Show what `firnline topology show` shows."""
    topology = get_topology(find_known(service), name).usable
    return show_topology(name, topology, load_view(topology, service.clock.now()))


@router.get("/{name}/snapshots")
@kept
def list_snapshots(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List the snapshots, newest first, as `firnline topology list` does."""
    known = get_topology(find_known(service), name)
    if known.file is None:
        return {"snapshots": []}
    return {"snapshots": [one.to_json() for one in known.open(service.clock).list()]}


@router.post("/{name}/snapshots", status_code=202)
def take_snapshot(service: TheService, name: Name, identity: Operator, request: SnapshotRequest) -> dict[str, Json]:
    """Begin a snapshot of all members while they run. Members without a run are waited for."""
    snapshots = get_topology(find_known(service), name).open(service.clock)

    def work(job: Job) -> dict[str, Json]:
        for order in snapshots.find_open():
            snapshots.settle(order)
        order = snapshots.order(timedelta(seconds=request.timeout_seconds))
        job.say(f"ordered {order.snapshot}")
        outcome = Outcome.WAIT
        while outcome is Outcome.WAIT:
            if job.cancelled.is_set():
                raise CancelledError  # it stays open: the next snapshot completes it
            outcome, reason = snapshots.settle(order)
            if outcome is Outcome.WAIT:
                job.say(f"waiting for {reason}")
                service.clock.sleep(POLL_SECONDS)
        if outcome is Outcome.COMMIT:
            snapshots.keep(request.keep)
        return next(one.to_json() for one in snapshots.list() if one.id == order.snapshot)

    return service.jobs.start("topology-snapshot", _job_key(name), identity.name, work).to_json()


@router.get("/{name}/jobs/{job}")
def show_job(service: TheService, name: Name, job: JobId, _: Reader) -> dict[str, Json]:
    """Show how far a snapshot that was begun here is."""
    return service.jobs.get(_job_key(name), job).to_json()


def _job_key(name: str) -> str:
    """Return the name under which jobs of a topology are kept; no pipeline has it."""
    return f"topology {name}"
