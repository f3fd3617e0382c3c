"""Pages about all pipelines: the overview; and the way in and out."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Literal
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from firnline.service.access.guard import Guard
from firnline.service.access.sessions import COOKIE, SESSION_SECONDS
from firnline.service.answers import AnswerRoute, kept
from firnline.service.api.common import NAME, Reader, TheService
from firnline.service.dashboard.render import page
from firnline.service.dashboard.words import tone
from firnline.service.problems import ServiceError
from firnline.service.rates import find_rates
from firnline.service.views import summary
from firnline.types import Json

router = APIRouter(include_in_schema=False, route_class=AnswerRoute)

ROWS = 100  # of the overview on one page
Order = Literal["attention", "name", "lag", "rate", "commit"]


@router.get("/")
@kept
def overview(
    request: Request,
    service: TheService,
    _: Reader,
    q: Annotated[str, Query(max_length=128)] = "",
    state: Annotated[str, Query(max_length=40)] = "",
    order: Order = "attention",
    start: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
) -> HTMLResponse:
    """Show every pipeline; what needs a person comes first. Reads nothing but what the supervisor has seen."""
    now = service.clock.now()
    seen = {one.registered.name: one for one in service.supervisor.all()}
    every = [summary(one, now) for one in seen.values()]
    states = Counter(str(row["state"]) for row in every)
    rows = [row for row in every if q.casefold() in str(row["pipeline"]).casefold()]
    if state == "needs-person":
        rows = [row for row in rows if row["needs_person"]]
    elif state:
        rows = [row for row in rows if row["state"] == state]
    rows.sort(key=lambda row: _rank(row, order))
    shown = [{**row, "linked": re.match(NAME, str(row["pipeline"])) is not None} for row in rows[start : start + ROWS]]
    return page(
        request,
        "overview.html",
        rows=shown,
        rates={str(row["pipeline"]): find_rates(seen[str(row["pipeline"])].samples)[-30:] for row in shown},
        total=len(every),
        matching=len(rows),
        persons=sum(1 for row in every if row["needs_person"]),
        states=sorted(states.items()),
        q=q,
        state=state,
        order=order,
        start=start,
        limit=ROWS,
        link=lambda **changed: _link({"q": q, "state": state, "order": order, "start": start} | changed),
    )


def _rank(row: dict[str, Json], order: Order) -> tuple[object, ...]:
    name = str(row["pipeline"])
    if order == "lag":
        return (row["lag_seconds"] is None, -(row["lag_seconds"] or 0.0), name)
    if order == "rate":
        return (row["rows_per_second"] is None, -(row["rows_per_second"] or 0.0), name)
    if order == "commit":
        return (row["last_commit_at"] is None, str(row["last_commit_at"]), name)
    if order == "name":
        return (name,)
    urgency = 0 if row["needs_person"] else {"bad": 1, "warn": 3}.get(tone(str(row["state"])), 4)
    return (2 if urgency > 2 and row["restart_at"] else urgency, name)


def _link(values: dict[str, object]) -> str:
    kept = {key: value for key, value in values.items() if value not in ("", 0, "attention")}
    return f"/?{urlencode(kept)}" if kept else "/"


@router.get("/login")
def show_login(request: Request, there: Annotated[str, Query(alias="next", max_length=300)] = "/") -> HTMLResponse:
    """Ask for a token."""
    return page(request, "login.html", there=_inside(there), problem=None)


@router.post("/login")
async def log_in(request: Request, service: TheService) -> Response:
    """Exchange a token for a session."""
    form = parse_qs((await request.body()).decode("utf-8", "replace"))
    there = _inside(form.get("next", ["/"])[0])
    guard: Guard = request.state.guard
    try:
        identity = guard.identify_token(request, form.get("token", [""])[0].strip())
    except ServiceError as error:
        refused = page(request, "login.html", error.status, there=there, problem=error.message)
        refused.headers.update(error.headers)
        return refused
    answer = RedirectResponse(there, 303)
    answer.set_cookie(
        COOKIE,
        service.sessions.begin(identity),
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=service.secure,
    )
    return answer


@router.post("/logout")
def log_out(request: Request, service: TheService, _: Reader) -> Response:
    """End the session."""
    service.sessions.end(request.cookies.get(COOKIE, ""))
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=service.secure)
    return answer


def _inside(there: str) -> str:
    """Return a path of this service; the overview instead of anything else."""
    is_inside = there.startswith("/") and not there.startswith("//") and "\\" not in there and there.isprintable()
    return there if is_inside else "/"
