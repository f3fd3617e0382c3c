"""Topologies: chained pipelines, their channels and their snapshots."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from firnline.history.topology.show import load_view, show_topology
from firnline.service.answers import kept
from firnline.service.api.common import NAME, ApiRoute, Name, Operator, Reader, Service, TheService
from firnline.service.api.work import JobId
from firnline.service.topologies import KnownTopology, find_topologies, get_topology
from firnline.service.topology_snapshots import begin_snapshot, job_key
from firnline.types import Json

router = APIRouter(prefix="/topologies", tags=["topologies"], route_class=ApiRoute)

LONGEST_SECONDS = 24 * 3600
LISTED = 100


class SnapshotRequest(BaseModel):
    """`timeout_seconds`: abort the snapshot after this time; `keep`: drop older ones than so many; `include_stopped`:
    record members that have no run, too. What is left out is as the topology file says."""

    model_config = ConfigDict(extra="forbid")

    timeout_seconds: float | None = Field(default=None, gt=0, le=LONGEST_SECONDS)
    keep: int | None = Field(default=None, ge=1, le=1000)
    include_stopped: bool = False

    def flags(self) -> list[str]:
        """Return the flags of the command that takes the snapshot."""
        found = [f"--timeout={self.timeout_seconds:g}s"] if self.timeout_seconds is not None else []
        found += [f"--keep={self.keep}"] if self.keep is not None else []
        return [*found, "--include-stopped"] if self.include_stopped else found


def find_known(service: Service) -> list[KnownTopology]:
    """Return the topologies that the service knows, as the files are now."""
    return find_topologies(service.supervisor, NAME)


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
    """List the newest snapshots, newest first, as `firnline topology list` does."""
    known = get_topology(find_known(service), name)
    if known.file is None:
        return {"snapshots": []}
    return {"snapshots": [one.to_json() for one in known.open(service.clock).list(LISTED)]}


@router.post("/{name}/snapshots", status_code=202)
def take_snapshot(service: TheService, name: Name, identity: Operator, request: SnapshotRequest) -> dict[str, Json]:
    """Begin a snapshot of all members while they run, as the topology file says. Members without a run are waited
    for, or recorded, too (`include_stopped`)."""
    known = get_topology(find_known(service), name)
    job = begin_snapshot(service.jobs, service.supervisor, service.clock, known, identity.name, request.flags())
    return job.to_json()


@router.get("/{name}/jobs/{job}")
def show_job(service: TheService, name: Name, job: JobId, _: Reader) -> dict[str, Json]:
    """Show how far a snapshot that was begun here is."""
    return service.jobs.get(job_key(name), job).to_json()
