"""Errors of the service as RFC 9457 problems: our code, a sentence, what to type next. Never the input or a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from firnline.errors import (
    AlreadyRunningError,
    ConfigError,
    ControlError,
    FencedError,
    FirnlineError,
    NotRunningError,
    PlanChangedError,
    RollbackRefusedError,
    SinkError,
    SourceError,
    VersionConflictError,
)
from firnline.service.registry import UnknownPipelineError

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
IN_REQUEST = "(as in the request)"  # stands for what the request named

# The first class that matches counts.
_STATUS: tuple[tuple[type[FirnlineError], int], ...] = (
    (UnknownPipelineError, 404),
    (NotRunningError, 409),
    (AlreadyRunningError, 409),
    (RollbackRefusedError, 409),
    (PlanChangedError, 409),
    (VersionConflictError, 409),
    (FencedError, 409),
    (ConfigError, 422),
    (ControlError, 504),
    (SourceError, 502),
    (SinkError, 502),
)


class ServiceError(FirnlineError):
    """A request that the service refuses, with its HTTP status."""

    status = 400
    code = "bad_request"
    default_hint = ""  # the hint of the command line, --debug, helps no client

    def __init__(self, message: str, *, hint: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.headers = dict(headers or {})


class UnauthorizedError(ServiceError):
    """No valid token or session."""

    status = 401
    code = "unauthorized"


class ForbiddenError(ServiceError):
    """The token does not grant this."""

    status = 403
    code = "forbidden"


class NotFoundError(ServiceError):
    """There is no such thing."""

    status = 404
    code = "not_found"


class ConflictError(ServiceError):
    """It is not as the request assumes."""

    status = 409
    code = "conflict"


class TooManyError(ServiceError):
    """Too many requests of this kind."""

    status = 429
    code = "too_many_requests"


class StorageFailedError(ServiceError):
    """A disk or a storage service refused what the request needs."""

    status = 503
    code = "storage"


class NotRecordedError(ServiceError):
    """It is done, and could not be recorded: it may not last."""

    status = 503
    code = "not_recorded"


class InternalError(ServiceError):
    """The service failed."""

    status = 500
    code = "internal"


def problem(
    status: int, code: str, detail: str, hint: str = "", headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return a problem document."""
    body = {"type": f"urn:firnline-error:{code}", "title": code.replace("_", " "), "status": status, "code": code}
    body |= {"detail": detail, "hint": hint or None}
    return JSONResponse(body, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


Show = Callable[[Request, JSONResponse, Exception], Response]


def handle_errors(app: FastAPI, show: Show = lambda _, document, __: document) -> None:
    """Turn every error of a route into a problem document. `show` makes the answer of it: a page for a browser."""

    @app.exception_handler(FirnlineError)
    async def of_ours(request: Request, error: FirnlineError) -> Response:
        return show(request, problem_of(error), error)

    @app.exception_handler(RequestValidationError)
    async def of_input(request: Request, error: RequestValidationError) -> Response:
        found = problem(
            422, "invalid_request", f"not valid: {wrong_fields(error.errors())}", "See the API's description."
        )
        return show(request, found, error)

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return show(request, problem(error.status_code, code, str(error.detail), headers=error.headers), error)


_WHY = {
    "missing": "is missing",
    "extra_forbidden": "has a field that this request does not have",
    "json_invalid": "is no valid JSON",
    "string_pattern_mismatch": "has characters that it may not have",
}


_LIMITS = ("int_", "bool_", "float_", "string_t", "list_", "dict_", "less_", "greater_", "too_", "literal_", "enum")


def wrong_fields(errors: Sequence[Mapping[str, Any]]) -> str:
    """Say which fields of a request are not valid, and why, without their values."""
    found = []
    for one in errors:
        of_ours = one["loc"][:-1] if one["type"] in ("extra_forbidden", "json_invalid") else one["loc"]
        name = ".".join(str(part) for part in of_ours)
        if one["type"] == "model_attributes_type":
            is_parsed = not isinstance(one.get("input"), bytes)
            found.append(f"{name} ({'is no JSON object' if is_parsed else 'needs Content-Type: application/json'})")
            continue
        # The words of the checks hold the limits of a field, which are ours, and never its value.
        why = _WHY.get(one["type"]) or str(one["msg"])[:1].lower() + str(one["msg"])[1:]
        known = one["type"] in _WHY or one["type"].startswith(_LIMITS)
        found.append(f"{name} ({why if known else 'is not valid'})")
    return ", ".join(sorted(set(found)))


def failure(error: Exception) -> ServiceError:
    """Return the answer to a request that failed because of us or of storage: the id of the entry in the log, and no
    trace."""
    number = uuid.uuid4().hex[:16]
    logger.error("request failed", extra={"error_id": number}, exc_info=error)
    if isinstance(error, OSError):  # its text may name a path; that of its number does not
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        return StorageFailedError(
            f"storage failed: {reason}; the log of the service has the cause as {number}",
            hint="Free space, or make it writable and reachable; then ask again.",
        )
    return InternalError(f"the service failed; its log has the cause as {number}")


def problem_of(error: FirnlineError) -> JSONResponse:
    """Return the problem document of an error of ours. `unknown` in its fields names a thing that there is not."""
    if isinstance(error, ServiceError):
        return problem(error.status, error.code, error.message, error.hint, error.headers)
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    if error.fields.get("unknown") is not None:
        return problem(404, NotFoundError.code, error.message, error.hint)
    return problem(status, error.code, error.message, error.hint)


@contextlib.contextmanager
def without_input(request: Mapping[str, Any]) -> Iterator[None]:
    """Take the texts of a request out of the errors that it causes: an answer never repeats its input."""
    try:
        yield
    except FirnlineError as error:
        texts = [text for value in request.values() for text in (value if isinstance(value, list) else [value])]
        for text in sorted((one for one in texts if isinstance(one, str) and len(one) > 2), key=len, reverse=True):
            for spelled in (text, repr(text)[1:-1]):
                error.message = error.message.replace(spelled, IN_REQUEST)
                error.hint = error.hint.replace(spelled, IN_REQUEST)
        raise
