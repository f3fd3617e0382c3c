"""Pages of actions whose plan depends on the pipeline: rollback, retry, discard, savepoints. The plan is shown first.

A form makes a plan, by the functions of the REST routes; the page of the plan has the button that performs it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BaseModel, ValidationError

from firnline.service.answers import AnswerRoute
from firnline.service.api import actions, work
from firnline.service.api.common import Name, Operator, Reader, TheService, needs
from firnline.service.dashboard.render import page
from firnline.service.plan_kinds import KINDS
from firnline.service.problems import ConflictError, ServiceError
from firnline.service.views import summary
from firnline.types import Json

router = APIRouter(prefix="/p/{name}", include_in_schema=False, route_class=AnswerRoute)


@dataclass(frozen=True, slots=True)
class Form:
    """A form that makes a plan.

    Attributes:
        verb: The words on the button, before the pipeline's name.
        request: What the REST route takes.
        of: Fields that the route takes from its path.
        effect: What it does, in one sentence.
        back: The page that shows what it is about.
    """

    verb: str
    request: type[BaseModel]
    effect: str
    back: str
    of: tuple[str, ...] = ()
    is_dangerous: bool = False


PlanKind = Literal[
    "rollback",
    "savepoint-dispose",
    "files-retry",
    "files-drop",
    "files-reread",
    "quarantine-replay",
    "quarantine-drop",
    "dead-letters-retry",
    "dead-letters-drop",
    "sinks-resync",
    "sinks-resume",
    "sinks-forget",
]

FORMS: Mapping[str, Form] = {
    "rollback": Form(
        "Roll back",
        actions.RollbackRequest,
        "Takes tables, operator state and positions back to an earlier epoch, together.",
        "checkpoints",
        is_dangerous=True,
    ),
    "savepoint-dispose": Form(
        "Delete the savepoint of",
        actions.PathRequest,
        "Deletes the savepoint; the pipeline itself stays as it is.",
        "savepoints",
        of=("savepoint",),
        is_dangerous=True,
    ),
    "files-retry": Form("Retry the file of", actions.RetryRequest, "Reads a file that was set aside again.", "files"),
    "files-drop": Form(
        "Give up the file of",
        actions.PathsRequest,
        "Gives up a file that was set aside: what it holds is never read.",
        "files",
        is_dangerous=True,
    ),
    "files-reread": Form(
        "Read again the file of", actions.PathRequest, "Reads a finished file once more, from its beginning.", "files"
    ),
    "quarantine-replay": Form(
        "Retry the records of",
        actions.RecordsRequest,
        "Decodes the records again, by the schema of today.",
        "quarantine",
    ),
    "quarantine-drop": Form(
        "Discard the records of",
        actions.RecordsRequest,
        "Takes the records out of the quarantine without reading them.",
        "quarantine",
        is_dangerous=True,
    ),
    "dead-letters-retry": Form(
        "Retry the dead letters of",
        actions.LettersRequest,
        "Delivers the rows to their sink once more.",
        "dead-letters",
    ),
    "dead-letters-drop": Form(
        "Discard the dead letters of",
        actions.LettersRequest,
        "Gives up the rows: their sink never gets them.",
        "dead-letters",
        is_dangerous=True,
    ),
    "sinks-resync": Form(
        "Copy anew the sink of",
        actions.ResyncRequest,
        "Copies all rows of a table of the pipeline into the sink.",
        "sinks",
        of=("sink",),
        is_dangerous=True,
    ),
    "sinks-resume": Form(
        "Let go on the sink of",
        actions.ResumeRequest,
        "Lets the sink go on without the epochs that it lacks.",
        "sinks",
        of=("sink",),
        is_dangerous=True,
    ),
    "sinks-forget": Form(
        "Forget the sink of",
        actions.TakeOver,
        "Forgets a sink that the pipeline no longer delivers to.",
        "sinks",
        of=("sink",),
        is_dangerous=True,
    ),
}
assert FORMS.keys() == KINDS.keys()
NAMES = {"sink": r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", "savepoint": r"[0-9a-f]{8,32}"}


class _FormError(ServiceError):
    status = 422
    code = "invalid_request"


async def _read_form(request: Request) -> dict[str, list[str]]:
    return parse_qs((await request.body()).decode("utf-8", "replace"))


def _go(request: Request, there: str) -> Response:
    if "hx-request" in request.headers:
        return Response(status_code=204, headers={"HX-Redirect": there})
    return RedirectResponse(there, 303)


@router.post("/plans/make/{kind}")
async def make(request: Request, service: TheService, name: Name, kind: PlanKind) -> Response:
    """Make a plan of what a form asks for."""
    form = FORMS[kind]
    identity = needs(KINDS[kind].role)(request)
    body = _parse(form, await _read_form(request))
    plan = await run_in_threadpool(service.plan, name, kind, body, identity)
    return _go(request, f"/p/{name}/plans/{plan.id}")


def _parse(form: Form, fields: Mapping[str, list[str]]) -> dict[str, Json]:
    """Return the request of a plan; lists are those that the request takes as lists."""
    taken = {name: fields.get(name, [""])[0] for name in form.of}
    if not all(re.fullmatch(NAMES[name], value) for name, value in taken.items()):
        raise _FormError(f"not valid: {', '.join(taken)}", hint="Go back and correct the form.")
    if form.of == ("savepoint",):
        return dict(taken)
    given: dict[str, Any] = {}
    for name, field in form.request.model_fields.items():
        if name in fields:
            given[name] = fields[name] if "list" in str(field.annotation) else fields[name][0]
    try:
        return {**form.request.model_validate(given).model_dump(), **taken}
    except ValidationError as error:
        wrong = sorted({".".join(str(part) for part in one["loc"]) for one in error.errors()})
        raise _FormError(f"not valid: {', '.join(wrong)}", hint="Go back and correct the form.") from error


@router.get("/plans/{plan}")
def show(request: Request, service: TheService, name: Name, plan: actions.PlanId, identity: Reader) -> HTMLResponse:
    """Show a plan with the button that performs it; afterwards, what came of it."""
    found, receipt = service.plans.find(name, plan)
    return page(
        request,
        "confirm.html",
        name=name,
        plan=found.to_json(),
        form=FORMS[found.kind],
        receipt=receipt,
        may=identity.may(KINDS[found.kind].role),
        row=summary(service.supervisor.get(name), service.clock.now()),
    )


@router.post("/plans/{plan}/confirm")
async def confirm(
    request: Request, service: TheService, name: Name, plan: actions.PlanId, identity: Operator
) -> Response:
    """Perform a plan: the form must name the pipeline."""
    if (await _read_form(request)).get("pipeline") != [name]:
        raise ConflictError("the form names another pipeline", hint="Load the page again.")
    await run_in_threadpool(service.plans.confirm, name, plan, identity)
    return _go(request, f"/p/{name}/plans/{plan}")


@router.get("/savepoints/make")
def plan_savepoint(
    request: Request, service: TheService, name: Name, _: Operator, copy: Annotated[str, Query(max_length=8)] = ""
) -> HTMLResponse:
    """Show what a savepoint is going to hold, with the button that makes it."""
    seen = service.supervisor.get(name)
    effects = [
        "It holds the newest epoch that every table has: checkpoint, ledger and quarantine. The pipeline goes on.",
        "Data files and state are copied into it: it needs nothing else to be restored."
        if copy
        else "Data files and state stay where they are, and are pinned: no sweep deletes them while it exists.",
        "Only somebody who deletes it takes it away. The audit trail gets your token's name.",
    ]
    words = ["firnline", "savepoint", "create", *(["--copy"] if copy else []), "-f", str(seen.registered.path)]
    return page(
        request,
        "savepoint.html",
        name=name,
        effects=effects,
        copies=bool(copy),
        command_line=shlex.join(words),
        row=summary(seen, service.clock.now()),
    )


@router.post("/savepoints")
async def create_savepoint(request: Request, service: TheService, name: Name, identity: Operator) -> Response:
    """Begin a savepoint; the page of savepoints shows how far it is."""
    fields = await _read_form(request)
    if fields.get("pipeline") != [name]:
        raise ConflictError("the form names another pipeline", hint="Load the page again.")
    asked = work.SavepointRequest.model_validate({"copy": "copy" in fields})
    await run_in_threadpool(work.create, service, name, identity, asked)
    return _go(request, f"/p/{name}/savepoints")
