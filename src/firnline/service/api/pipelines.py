"""Pipelines: the list, one pipeline, and what operators want of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter
from fastapi import Path as PathParameter

from firnline.errors import ControlError
from firnline.history.status import load_status
from firnline.run.control import ask
from firnline.run.wanted import Wanted
from firnline.service.access.tokens import Identity
from firnline.service.answers import kept
from firnline.service.api.common import ApiRoute, Name, Operator, Reader, Service, TheService
from firnline.service.problems import ConflictError, NotRecordedError
from firnline.service.views import summary
from firnline.types import Json

router = APIRouter(prefix="/pipelines", tags=["pipelines"], route_class=ApiRoute)

Ticket = Annotated[int, PathParameter(ge=0, le=2**62)]


@router.get("")
@kept
def list_pipelines(service: TheService, _: Reader) -> dict[str, Json]:
    """List every registered pipeline; those that need a person come first."""
    now = service.clock.now()
    rows = [summary(seen, now) for seen in service.supervisor.all()]
    return {"pipelines": sorted(rows, key=lambda row: (row["needs_person"] is None, row["pipeline"]))}


@router.get("/{name}")
@kept
def show_pipeline(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """Show one line of the overview."""
    return summary(service.supervisor.get(name), service.clock.now())


@router.get("/{name}/status")
@kept
def show_status(service: TheService, name: Name, _: Reader) -> dict[str, Json]:
    """Show what `firnline status` shows."""
    glance = service.supervisor.get(name).glance
    return asdict(load_status(service.open(name), glance.control if glance else None))


@router.post("/{name}/start", status_code=202)
def start(service: TheService, name: Name, identity: Operator) -> dict[str, Json]:
    """Want the pipeline to run: the service starts it, and restarts it after failures."""
    glance = service.supervisor.get(name).glance
    if service.supervisor.only_watches and (glance is None or glance.control is None):
        raise ConflictError(
            "this service only watches: it starts nothing",
            hint="Start the pipeline with `firnline run`, or serve it without --only-watch.",
        )
    return _wish(service, name, "running", identity)


@router.post("/{name}/pause", status_code=202)
def pause(service: TheService, name: Name, identity: Operator) -> dict[str, Json]:
    """Want the pipeline paused: epochs in flight are committed, and nothing more is planned."""
    return _wish(service, name, "paused", identity)


@router.post("/{name}/resume", status_code=202)
def resume(service: TheService, name: Name, identity: Operator) -> dict[str, Json]:
    """Want the pipeline to run."""
    return _wish(service, name, "running", identity)


@router.post("/{name}/stop", status_code=202)
def stop(service: TheService, name: Name, identity: Operator) -> dict[str, Json]:
    """Want the pipeline stopped: its run ends after the epochs in flight, and is not started again."""
    try:
        return _wish(service, name, "stopped", identity)
    except OSError as error:
        try:
            service.supervisor.stop_unrecorded(name)
        except ControlError:  # no run answers
            raise error from None
        reason = error.strerror or type(error).__name__
        raise NotRecordedError(
            f"the run was asked to stop, and that could not be recorded: {reason}; the pipeline may be started again",
            hint="Free space, or make it writable and reachable; then stop it again.",
        ) from error


@router.post("/{name}/checkpoint", status_code=202)
def checkpoint(service: TheService, name: Name, _: Operator) -> dict[str, Json]:
    """Make the run take a checkpoint now. `GET .../checkpoint/{ticket}` says when it is committed."""
    return _ask(service, name, {"command": "checkpoint"})


@router.get("/{name}/checkpoint/{ticket}")
def show_ticket(service: TheService, name: Name, ticket: Ticket, _: Reader) -> dict[str, Json]:
    """Show whether a checkpoint that was asked for is committed."""
    return _ask(service, name, {"command": "checkpoint", "ticket": ticket})


def _wish(service: Service, name: str, wanted: Wanted, identity: Identity) -> dict[str, Json]:
    wish = service.supervisor.wish(name, wanted, identity.name)
    recorded = (wish.wanted, wish.by, wish.at, wish.number) if wish else (None, None, None, None)
    return {"pipeline": name, **dict(zip(("wanted", "wanted_by", "wanted_since", "wish"), recorded, strict=True))}


def _ask(service: Service, name: str, request: dict[str, Json]) -> dict[str, Json]:
    answer = ask(service.supervisor.get(name).registered.usable, request, service.supervisor.environ)
    if "ticket" not in answer:
        raise ControlError("the run did not take the request")
    return {key: value for key, value in answer.items() if key != "ok"}
