"""Errors of pages are pages: what happened, and what to do next; a browser without a session is sent to the login."""

from __future__ import annotations

import json
from urllib.parse import quote

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from firnline.errors import FirnlineError
from firnline.service.api.common import disclosure_of
from firnline.service.dashboard.render import page
from firnline.service.problems import MEDIA_TYPE, UnauthorizedError, problem_of

_REST = ("/api/", "/pipelines", "/healthz", "/readyz", "/metrics", "/static/")


def wants_page(request: HTTPConnection) -> bool:
    """Whether a request is for a page: not of the REST interface, and a browser's."""
    if request.scope["path"].startswith(_REST):
        return False
    return "hx-request" in request.headers or "text/html" in request.headers.get("accept", "")


def answer(connection: HTTPConnection, error: FirnlineError) -> Response:
    """Answer a request that the guard refuses."""
    return show(connection, problem_of(error), error)


def _shown(connection: HTTPConnection, problem: JSONResponse) -> JSONResponse:
    """Return a problem document with what the one who asks may see."""
    disclosure = disclosure_of(connection)
    if disclosure.sees_all:
        return problem
    headers = {name: value for name, value in problem.headers.items() if name not in ("content-length", "content-type")}
    body = disclosure.show(json.loads(bytes(problem.body)))
    return JSONResponse(body, problem.status_code, headers, MEDIA_TYPE)


def show(connection: HTTPConnection, problem: JSONResponse, error: Exception) -> Response:
    """Answer a request that failed: a page for a browser, the problem document for others."""
    if not wants_page(connection):
        return _shown(connection, problem)
    if isinstance(error, UnauthorizedError):
        path = connection.scope["path"]
        there = "/login" if path in ("/", "/login", "/logout") else f"/login?next={quote(path)}"
        if "hx-request" in connection.headers:
            return Response(status_code=401, headers={"HX-Redirect": there})
        return RedirectResponse(there, 303)
    found = page(Request(connection.scope), "error.html", problem.status_code, problem=json.loads(bytes(problem.body)))
    for name in ("retry-after", "allow"):
        if name in problem.headers:
            found.headers[name] = problem.headers[name]
    return found
