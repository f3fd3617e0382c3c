"""Actions with a plan: a request answers with the plan and its id; confirming the id performs it, once.

Whoever confirms a plan again gets its first receipt. What would be done must still be what was shown; otherwise the
answer is 409, with what changed.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field

from firnline.service.access.tokens import Identity
from firnline.service.api.common import Admin, ApiRoute, Name, Operator, Reader, Service, TheService
from firnline.types import Json

router = APIRouter(prefix="/pipelines/{name}", tags=["actions"], route_class=ApiRoute)

PlanId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{16}$", description="The id of a plan.")]
SinkName = Annotated[str, PathParameter(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")]
SavepointId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{8,32}$", description="The id of a savepoint.")]
Text = Annotated[str, Field(max_length=4096)]
Epoch = Annotated[int, Field(ge=0, le=2**62)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RollbackRequest(_Request):
    """Where to go back to: an epoch (`to`), or the epoch at a time (`to_time`: RFC 3339, or `2h` ago)."""

    to: Epoch | None = None
    to_time: Text | None = None
    accept: list[Text] = Field(default=[], max_length=100, description="Writers whose later changes may be lost.")
    leave: list[Text] = Field(default=[], max_length=100, description="Sinks that keep their rows.")
    take_over: bool = Field(default=False, description="Do it even while a run is alive, which then ends.")


class TakeOver(_Request):
    """An edit of the history."""

    take_over: bool = Field(default=False, description="Do it even while a run is alive, which then ends.")


class ResyncRequest(TakeOver):
    """Copy all rows of a table of the pipeline into the sink."""

    copy_from: Text | None = Field(
        default=None, description="The sink to copy; by default the one with the same input."
    )


class ResumeRequest(TakeOver):
    """Let the sink go on without what it lacks."""

    accept_gap: bool = Field(default=False, description="The sink never gets the epochs that it lacks.")


class LettersRequest(TakeOver):
    """Which dead letters."""

    sink: Text | None = None
    epoch: Epoch | None = None
    reason: Text | None = Field(default=None, description="Only letters with this text in their reason.")


class RecordsRequest(_Request):
    """Which quarantined records."""

    reason: Text | None = None
    file: Text | None = Field(default=None, description="A file, or a pattern of full names.")
    epoch: Epoch | None = None
    until_epoch: Epoch | None = None


class RetryRequest(_Request):
    """A file that was set aside; `changed` accepts that it was replaced."""

    path: Text
    changed: bool = False


class PathRequest(_Request):
    """A file that was read to its end."""

    path: Text


class PathsRequest(_Request):
    """Files that were set aside, by name or pattern."""

    paths: list[Text] = Field(min_length=1, max_length=1000)


def _plan(
    service: Service, name: str, kind: str, request: BaseModel, identity: Identity, **more: Json
) -> dict[str, Json]:
    return service.plan(name, kind, {**request.model_dump(), **more}, identity).to_json()


@router.post("/rollback")
def plan_rollback(service: TheService, name: Name, identity: Admin, request: RollbackRequest) -> dict[str, Json]:
    """Plan a rollback of tables, state and checkpoint to an earlier epoch."""
    return _plan(service, name, "rollback", request, identity)


@router.post("/files/retry")
def plan_files_retry(service: TheService, name: Name, identity: Operator, request: RetryRequest) -> dict[str, Json]:
    """Plan to read a file that was set aside again."""
    return _plan(service, name, "files-retry", request, identity)


@router.post("/files/drop")
def plan_files_drop(service: TheService, name: Name, identity: Admin, request: PathsRequest) -> dict[str, Json]:
    """Plan to give up files that were set aside."""
    return _plan(service, name, "files-drop", request, identity)


@router.post("/files/reread")
def plan_files_reread(service: TheService, name: Name, identity: Operator, request: PathRequest) -> dict[str, Json]:
    """Plan to read a finished file once more, from its beginning."""
    return _plan(service, name, "files-reread", request, identity)


@router.post("/quarantine/replay")
def plan_replay(service: TheService, name: Name, identity: Operator, request: RecordsRequest) -> dict[str, Json]:
    """Plan to decode quarantined records again."""
    return _plan(service, name, "quarantine-replay", request, identity)


@router.post("/quarantine/drop")
def plan_records_drop(service: TheService, name: Name, identity: Admin, request: RecordsRequest) -> dict[str, Json]:
    """Plan to take records out of the quarantine without reading them."""
    return _plan(service, name, "quarantine-drop", request, identity)


@router.post("/dead-letters/retry")
def plan_letters_retry(service: TheService, name: Name, identity: Operator, request: LettersRequest) -> dict[str, Json]:
    """Plan to deliver dead letters once more."""
    return _plan(service, name, "dead-letters-retry", request, identity)


@router.post("/dead-letters/drop")
def plan_letters_drop(service: TheService, name: Name, identity: Admin, request: LettersRequest) -> dict[str, Json]:
    """Plan to drop dead letters."""
    return _plan(service, name, "dead-letters-drop", request, identity)


@router.post("/sinks/{sink}/resync")
def plan_resync(
    service: TheService, name: Name, sink: SinkName, identity: Admin, request: ResyncRequest
) -> dict[str, Json]:
    """Plan to copy all rows of a table into a sink."""
    return _plan(service, name, "sinks-resync", request, identity, sink=sink)


@router.post("/sinks/{sink}/resume")
def plan_resume(
    service: TheService, name: Name, sink: SinkName, identity: Admin, request: ResumeRequest
) -> dict[str, Json]:
    """Plan to let a sink go on without what it lacks."""
    return _plan(service, name, "sinks-resume", request, identity, sink=sink)


@router.post("/sinks/{sink}/forget")
def plan_forget(service: TheService, name: Name, sink: SinkName, identity: Admin, request: TakeOver) -> dict[str, Json]:
    """Plan to forget a sink that the pipeline no longer delivers to."""
    return _plan(service, name, "sinks-forget", request, identity, sink=sink)


@router.post("/savepoints/{savepoint}/dispose")
def plan_dispose(service: TheService, name: Name, savepoint: SavepointId, identity: Admin) -> dict[str, Json]:
    """Plan to delete a savepoint."""
    return _plan(service, name, "savepoint-dispose", _Request(), identity, savepoint=savepoint)


@router.get("/plans/{plan}")
def show_plan(service: TheService, name: Name, plan: PlanId, _: Reader) -> dict[str, Json]:
    """Show a plan, and its receipt once it was performed."""
    found, receipt = service.plans.find(name, plan)
    return {**found.to_json(), "receipt": receipt}


@router.post("/plans/{plan}/confirm")
def confirm(service: TheService, name: Name, plan: PlanId, identity: Operator) -> dict[str, Json]:
    """Perform a plan. Confirming it again answers with the first receipt."""
    return service.plans.confirm(name, plan, identity)


@router.post("/rollback/{plan}/confirm")
def confirm_rollback(service: TheService, name: Name, plan: PlanId, identity: Admin) -> dict[str, Json]:
    """Perform the plan of a rollback. Confirming it again answers with the first receipt."""
    return service.plans.confirm(name, plan, identity)
