"""The spec of a pipeline, and work that takes longer than a request: dry-run, savepoints, archives of checkpoints."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.background import BackgroundTask

from firnline.errors import ControlError, FirnlineError
from firnline.history.savepoints.create import create_savepoint, describe_savepoint
from firnline.history.savepoints.state import is_behind
from firnline.history.store import export_checkpoints
from firnline.run.control import ask
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.service.access.tokens import Identity
from firnline.service.answers import kept
from firnline.service.api.common import ApiRoute, Name, Operator, Reader, Service, TheService, needs
from firnline.service.jobs import Job, holding, run_command
from firnline.service.plans import VIA
from firnline.service.registry import escape
from firnline.spec.loading import load_spec
from firnline.spec.shown import show_spec
from firnline.stores.audit import Actor
from firnline.types import Json

router = APIRouter(prefix="/pipelines/{name}", tags=["work"], route_class=ApiRoute)

Keeper = Annotated[Identity, Depends(needs("admin", data=True))]
JobId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{16}$", description="The id of a job.")]
CHECKPOINTS_ASKED = 3
CHECKPOINT_SECONDS = 60.0
POLL_SECONDS = 0.2


class SavepointRequest(BaseModel):
    """`copy`: copy data files and state, too."""

    model_config = ConfigDict(extra="forbid")

    copy_files: bool = Field(default=False, alias="copy")


@router.get("/spec")
@kept
def get_spec(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """Show the spec with its defaults. Values that might be secrets are stars."""
    registered = service.supervisor.get(name).registered
    registered.usable  # noqa: B018 - raises if the file cannot be used
    loaded = load_spec(registered.path, environ=service.supervisor.environ)
    return {"pipeline": name, "file": registered.path.name, "spec": show_spec(loaded)}


@router.post("/validate")
def validate(service: TheService, name: Name, _: Operator) -> dict[str, Json]:
    """Check the pipeline file as it is now. Opens nothing of what it names."""
    registered = service.supervisor.get(name).registered
    try:
        loaded = load_spec(registered.path, environ=service.supervisor.environ)
    except FirnlineError as error:
        return {"pipeline": name, "valid": False, "problem": escape(error.message), "warnings": []}
    problem = registered.problem
    return {"pipeline": name, "valid": problem is None, "problem": problem, "warnings": list(loaded.warnings)}


@router.post("/dry-run", status_code=202)
def dry_run(service: TheService, name: Name, identity: Operator) -> dict[str, Json]:
    """Begin a dry-run, one at a time; its result is that of `firnline dry-run --json`."""
    service.supervisor.usable(name)
    path = service.supervisor.get(name).registered.path
    command = (sys.executable, "-m", "firnline", "dry-run", "--json", "--spec", str(path))

    def work(job: Job) -> dict[str, Json]:
        with holding(Path(service.supervisor.state) / "dry-run.lock", job) as lock:
            return run_command(job, command, path.parent, service.supervisor.environ, service.clock, lock)

    return service.jobs.start("dry-run", name, identity.name, work).to_json()


@router.post("/savepoints", status_code=202)
def create(service: TheService, name: Name, identity: Operator, request: SavepointRequest) -> dict[str, Json]:
    """Begin a savepoint of the newest epoch, beside the checkpoint store."""
    options = service.supervisor.usable(name)

    def work(job: Job) -> dict[str, Json]:
        pipeline = open_pipeline(options, actor=Actor(identity.name, VIA))
        _ask_for_checkpoint(service, pipeline)
        savepoint, place = create_savepoint(
            pipeline,
            copy=request.copy_files,
            run=job.id,
            storage_options=dict(options.home.storage_options),
            stopping=job.cancelled.is_set,
        )
        return describe_savepoint(savepoint, place)

    return service.jobs.start("savepoint", name, identity.name, work).to_json()


def _ask_for_checkpoint(service: Service, pipeline: OpenPipeline) -> None:
    """Ask a run of this machine for a state checkpoint if the newest one is older than the newest epoch."""
    deadline = service.clock.monotonic() + CHECKPOINT_SECONDS
    for _ in range(CHECKPOINTS_ASKED):
        if not is_behind(pipeline):
            return
        try:
            answer = ask(pipeline.options, {"command": "checkpoint"}, service.supervisor.environ)
            request = {"command": "checkpoint", "ticket": answer["ticket"]}
            while not answer.get("done") and service.clock.monotonic() < deadline:
                service.clock.sleep(POLL_SECONDS)
                answer = ask(pipeline.options, request, service.supervisor.environ)
        except ControlError:
            return  # there is no run, or it does not answer: a restore replays the epochs since


@router.get("/jobs")
def list_jobs(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List the jobs of the pipeline since the service started, newest first."""
    service.supervisor.get(name)
    return {"pipeline": name, "jobs": [job.to_json() for job in service.jobs.all(name)]}


@router.get("/jobs/{job}")
def show_job(service: TheService, name: Name, job: JobId, _: Reader) -> dict[str, Json]:
    """Show how far a job is, and its result."""
    return service.jobs.get(name, job).to_json()


@router.post("/jobs/{job}/cancel", status_code=202)
def cancel_job(service: TheService, name: Name, job: JobId, _: Operator) -> dict[str, Json]:
    """Ask a job to end."""
    found = service.jobs.get(name, job)
    found.cancelled.set()
    return found.to_json()


@router.get("/checkpoints/export")
def export(service: TheService, name: Name, _: Keeper) -> FileResponse:
    """Download the checkpoints and the audit trail, as `firnline checkpoints export` writes them.

    It needs the right `data`, too: positions of captured tables are keys of rows, and reasons quote values.
    """
    pipeline = service.open(name)
    folder = Path(service.supervisor.state) / "exports"
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor, path = tempfile.mkstemp(suffix=".tar", dir=folder)
    os.close(descriptor)
    try:
        export_checkpoints(pipeline, path, replace=True)
    except BaseException:
        os.unlink(path)
        raise
    return FileResponse(path, filename=f"{name}.firnline", background=BackgroundTask(os.unlink, path))


@router.get("/unfinished")
@kept
def list_unfinished(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """List actions that were begun and never ended, each with the command that ends it."""
    running = {job.id for job in service.jobs.all(name) if job.ended_at is None}
    return {"pipeline": name, "unfinished": service.plans.list_unfinished(name, running)}
