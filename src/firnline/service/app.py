"""Assembles the service: the routes, the guard around them, and the supervision beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from anyio.to_thread import current_default_thread_limiter
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse

from firnline import __version__
from firnline.service.access.guard import Guard, Rules
from firnline.service.api import actions, events, history, pipelines, topologies, trend, work
from firnline.service.api.common import Service
from firnline.service.dashboard import pages, pipeline_pages, plan_pages, static, topology_pages
from firnline.service.dashboard.errors import answer, show
from firnline.service.dashboard.readings import Readings
from firnline.service.dashboard.render import prepare
from firnline.service.problems import handle_errors
from firnline.service.turns import THREADS

API = "/api/v1"
PAGES: tuple[APIRouter, ...] = (
    pages.router,
    pipeline_pages.router,
    plan_pages.router,
    topology_pages.router,
    static.router,
)
ROUTERS: tuple[APIRouter, ...] = (
    pipelines.router,
    work.router,
    history.router,
    actions.router,
    trend.router,
    topologies.router,
    events.router,
)


@asynccontextmanager
async def _lifespan(_: FastAPI) -> AsyncIterator[None]:
    current_default_thread_limiter().total_tokens = THREADS
    yield


def make_app(service: Service, rules: Rules) -> FastAPI:
    """Return the ASGI application of a service."""
    app = FastAPI(
        title="Firnline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{API}/openapi.json",
        lifespan=_lifespan,
    )
    app.state.service = service
    app.state.readings = Readings(service.clock)
    prepare()
    handle_errors(app, show)
    for router in ROUTERS:
        app.include_router(router, prefix=API)
    # The short paths that people know from similar tools.
    for router in ROUTERS:
        app.include_router(router, include_in_schema=False)

    for router in PAGES:
        app.include_router(router)

    @app.get("/healthz", include_in_schema=False)
    async def healthz(_: Request) -> JSONResponse:  # waits for no thread: others may hold all of them
        return JSONResponse({"status": "ok"})

    @app.get("/readyz", include_in_schema=False)
    async def readyz(_: Request) -> JSONResponse:
        if service.tokens.problem is not None:
            return JSONResponse({"status": "the file of tokens cannot be trusted; the log says why"}, 503)
        is_ready = service.supervisor.is_ready
        return JSONResponse({"status": "ok" if is_ready else "starting"}, 200 if is_ready else 503)

    app.add_middleware(
        Guard, tokens=service.tokens, sessions=service.sessions, rules=rules, clock=service.clock, answer=answer
    )
    return app
