"""Shared by routes: the service behind a request, who asks, and what that token may do."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from fastapi import Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection
from starlette.responses import Response, StreamingResponse

from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.service.access.disclosure import Disclosure, Folders, full_name, label_folders
from firnline.service.access.sessions import Sessions
from firnline.service.access.tokens import Identity, Role, Tokens
from firnline.service.answers import AnswerRoute, Answers
from firnline.service.events import Events
from firnline.service.jobs import Jobs
from firnline.service.plans import MOST_WAITING, Plan, Plans
from firnline.service.problems import ForbiddenError, UnauthorizedError, without_input
from firnline.service.state_log import StateLog
from firnline.service.supervise.supervisor import Seen, Supervisor
from firnline.service.turns import Turns
from firnline.service.views import summary
from firnline.types import Clock, Json, RandomIds

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$"  # of a pipeline; everything else is refused before it is looked up


@dataclass(frozen=True, slots=True)
class Service:
    """What routes work with."""

    supervisor: Supervisor
    tokens: Tokens
    sessions: Sessions
    clock: Clock
    secure: bool = False
    plans: Plans = field(init=False)
    jobs: Jobs = field(init=False)
    events: Events = field(init=False)
    answers: Answers = field(init=False)
    reads: Turns = field(default_factory=lambda: Turns(each=4, total=28))
    changes: Turns = field(default_factory=lambda: Turns(each=MOST_WAITING + 4, total=24))

    def __post_init__(self) -> None:
        plans = Plans(self.supervisor, self.supervisor.state, self.clock, RandomIds())
        object.__setattr__(self, "plans", plans)
        object.__setattr__(self, "answers", Answers(self.clock))
        object.__setattr__(self, "jobs", Jobs(self.clock, RandomIds(), lambda job: self.answers.forget(job.pipeline)))
        object.__setattr__(self, "events", Events())
        log = StateLog()

        def notify(seen: Seen) -> None:
            log.add(seen)
            self.answers.forget(seen.registered.name, lists=False)
            self.events.publish("pipeline", summary(seen, self.clock.now()))

        self.supervisor.subscribe(notify, plans.recover)

    def close(self) -> None:
        """Send listeners away and ask jobs to end: the service ends. Runs go on."""
        self.events.close()
        self.jobs.close()

    def folders(self) -> Folders:
        """Return what stands for folders of this machine in answers."""
        found = [one.registered for one in self.supervisor.all()]
        places: dict[str, list[str]] = {}
        for one in found:
            sources = [source.location for source in one.options.sources] if one.options is not None else []
            places.setdefault(str(one.path.parent), []).extend(sources)
        return label_folders(places)

    def full_names(self, name: str, request: dict[str, Json]) -> dict[str, Json]:
        """Return the request of a plan with the full names of inputs that answers show without their folders."""
        registered = self.supervisor.get(name).registered
        sources = [source.location for source in registered.usable.sources]
        found = dict(request)
        for key in ("path", "file"):
            if isinstance(found.get(key), str):
                found[key] = full_name(str(found[key]), str(registered.path.parent), sources)
        if isinstance(found.get("paths"), list):
            found["paths"] = [full_name(str(one), str(registered.path.parent), sources) for one in found["paths"]]
        return found

    def plan(self, name: str, kind: str, request: dict[str, Json], identity: Identity) -> Plan:
        """Plan an action, as somebody asks for it."""
        with without_input(request):
            return self.plans.make(name, kind, self.full_names(name, request), identity)

    def open(self, name: str) -> OpenPipeline:
        """Open a registered pipeline for reading; UnknownPipelineError if there is none."""
        return open_pipeline(self.supervisor.usable(name))


def service_of(request: Request) -> Service:
    """Return the service that a request belongs to."""
    return cast("Service", request.app.state.service)


def disclosure_of(request: HTTPConnection) -> Disclosure:
    """Return what the one who asks may see."""
    service = cast("Service", request.app.state.service)
    return Disclosure(getattr(request.state, "identity", None), service.folders)


class ShownRoute(APIRoute):
    """A route whose answers, JSON, show what the one who asks may see."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def show(request: Request) -> Response:
            answer = await handle(request)
            disclosure = disclosure_of(request)
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            if disclosure.sees_all or not is_json or isinstance(answer, StreamingResponse):
                return answer
            return await run_in_threadpool(_shown, answer, disclosure)

        return show


def _shown(answer: Response, disclosure: Disclosure) -> JSONResponse:
    kept = {name: value for name, value in answer.headers.items() if name not in ("content-length", "content-type")}
    body = disclosure.show(json.loads(bytes(answer.body)))
    return JSONResponse(body, answer.status_code, kept, background=answer.background)


class ApiRoute(AnswerRoute, ShownRoute):
    """A route of the REST interface: an answer is kept as the one who asked for it may see it."""


def identity_of(request: Request) -> Identity:
    """Return who asks."""
    identity = request.state.identity
    if identity is None:
        raise UnauthorizedError("a token is needed")
    return cast("Identity", identity)


def needs(role: Role, *, data: bool = False) -> Callable[[Request], Identity]:
    """Return a dependency that refuses tokens without this role or, with `data`, without the right to see records."""

    def check(request: Request) -> Identity:
        identity = identity_of(request)
        if not identity.may(role):
            raise ForbiddenError(f"this needs the role {role}; the token has the role {identity.role}")
        if data and not identity.data:
            raise ForbiddenError("this needs the right `data`, which the token does not have")
        return identity

    return check


TheService = Annotated[Service, Depends(service_of)]
Reader = Annotated[Identity, Depends(needs("read"))]
Operator = Annotated[Identity, Depends(needs("operate"))]
Admin = Annotated[Identity, Depends(needs("admin"))]
Name = Annotated[str, Path(pattern=NAME, description="The name of a registered pipeline.")]
