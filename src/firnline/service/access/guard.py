"""The guard: every request passes it before any route. Checks Host, token or session, Origin and size; adds headers."""

from __future__ import annotations

import ipaddress
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firnline.http_address import is_loopback, without_port
from firnline.service.access.sessions import COOKIE, Sessions
from firnline.service.access.tokens import Identity, Tokens
from firnline.service.problems import (
    ForbiddenError,
    ServiceError,
    TooManyError,
    UnauthorizedError,
    failure,
    problem_of,
)
from firnline.types import Clock

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

HEALTH_PATHS = frozenset(("/healthz", "/readyz"))  # whoever reaches the service may ask; they tell nothing else
OPEN_PATHS = HEALTH_PATHS | {"/login"}
OPEN_FOLDERS = ("/static/",)
SAFE_METHODS = frozenset(("GET", "HEAD"))
MAX_BODY_BYTES = 64 * 1024
TOO_LARGE = f"a request has at most {MAX_BODY_BYTES:,} bytes"
FAILURES, FAILURES_SECONDS = 10, 60.0  # wrong tokens per address
MAX_ADDRESSES = 10_000

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What the guard lets in.

    Attributes:
        hosts: Names, without port, by which clients may ask for the service, besides those of loopback.
        secure: Whether clients come over TLS.
        proxies: If there are any, clients come through them alone; they name the client, and say that it used TLS.
    """

    hosts: frozenset[str] = frozenset()
    secure: bool = False
    proxies: tuple[Network, ...] = ()


@dataclass(slots=True)
class _Failures:
    """When clients of an address showed wrong tokens."""

    clock: Clock
    at: dict[str, deque[float]] = field(default_factory=dict)
    known: set[tuple[str, str]] = field(default_factory=set)  # addresses, and hashes of tokens that they showed

    def is_known(self, address: str, identity: Identity) -> bool:
        return (address, identity.token) in self.known

    def know(self, address: str, identity: Identity) -> None:
        if len(self.known) >= MAX_ADDRESSES:
            self.known.clear()
        self.known.add((address, identity.token))

    def check(self, address: str) -> None:
        recent = self._recent(address)
        if len(recent) >= FAILURES:
            wait = max(1, round(recent[0] + FAILURES_SECONDS - self.clock.monotonic()))
            raise TooManyError(
                f"too many wrong tokens from this address; try again in {wait} s",
                hint="Sessions, and tokens that were used from this address before, are let in meanwhile.",
                headers={"Retry-After": str(wait)},
            )

    def add(self, address: str) -> None:
        if len(self.at) >= MAX_ADDRESSES:
            self.at.clear()
        self.at.setdefault(address, deque(maxlen=FAILURES)).append(self.clock.monotonic())

    def _recent(self, address: str) -> deque[float]:
        recent = self.at.get(address, deque())
        while recent and recent[0] <= self.clock.monotonic() - FAILURES_SECONDS:
            recent.popleft()
        return recent


class Guard:
    """ASGI middleware. Sets `identity`, and itself as `guard`, in `scope["state"]`.

    `is_valid` there says whether the token or session of a request is still valid, for answers that take long. A
    request that the guard refuses, or that fails, is answered by `answer`.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens,
        sessions: Sessions,
        rules: Rules,
        clock: Clock,
        answer: Callable[[HTTPConnection, ServiceError], ASGIApp] = lambda _, error: problem_of(error),
    ) -> None:
        self._app = app
        self._answer = answer
        self._tokens = tokens
        self._sessions = sessions
        self._rules = rules
        self._failures = _Failures(clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if self._rules.secure:
                    headers.setdefault("Strict-Transport-Security", "max-age=31536000")
            await send(message)

        state = scope.setdefault("state", {})
        state |= {"guard": self, "identity": None, "is_valid": lambda: True}
        request = HTTPConnection(scope)
        try:
            state["identity"] = self._admit(request)
        except ServiceError as error:
            await self._answer(request, error)(scope, receive, send_with_headers)
            return
        limited = _Limited(receive)
        answered = _Answered(send_with_headers, limited)
        try:
            await self._app(scope, limited, answered)
        except Exception as error:
            if answered.has_begun:
                raise
            if not limited.is_too_large:
                await self._answer(request, failure(error))(scope, receive, send_with_headers)
                return
        if limited.is_too_large and not answered.has_begun:
            await self._answer(request, _TooLargeError(TOO_LARGE))(scope, receive, send_with_headers)

    def _admit(self, request: HTTPConnection) -> Identity | None:
        """Return who asks; None for a path that is open to everybody. Raises ServiceError to refuse."""
        headers = request.headers
        path = request.scope["path"]
        if path in HEALTH_PATHS:
            return None
        if self._rules.proxies:
            self._pass_proxy(request)
        if not is_known_host(headers.get("host", ""), self._rules.hosts):
            raise ForbiddenError("the Host header names another server", hint="Ask for the service by its own name.")
        length = headers.get("content-length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise _TooLargeError(TOO_LARGE)
        is_safe = request.scope["method"] in SAFE_METHODS
        bearer = _bearer(headers)
        if bearer is None and not is_safe and not _is_same_origin(headers, secure=self._rules.secure):
            raise ForbiddenError("the request comes from another origin", hint="Send a token in Authorization.")
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDERS):
            return None
        return self.identify(request, bearer)

    def _pass_proxy(self, request: HTTPConnection) -> None:
        """Take the client's address from the proxy; ForbiddenError for who comes without one, or without TLS."""
        peer = request.client.host if request.client else ""
        if not _is_in(peer, self._rules.proxies):
            raise ForbiddenError("the service is reached through its proxy only", hint="Ask the proxy.")
        lines = ",".join(request.headers.getlist("x-forwarded-for"))  # the client's own line comes first
        forwarded = [_without_port(one.strip()) for one in lines.split(",") if one.strip()]
        client = next((one for one in reversed(forwarded) if not _is_in(one, self._rules.proxies)), "")
        if not client:
            raise ForbiddenError("the proxy does not say who asks", hint="Have it set X-Forwarded-For.")
        schemes = ",".join(request.headers.getlist("x-forwarded-proto"))
        if schemes.rpartition(",")[2].strip().lower() != "https":
            raise ForbiddenError("the client did not use TLS", hint="Have the proxy set X-Forwarded-Proto: https.")
        request.scope["client"] = (client, 0)
        request.scope["scheme"] = "https"

    def identify(self, request: HTTPConnection, bearer: str | None) -> Identity:
        """Return whose token or session a request shows; UnauthorizedError or TooManyError otherwise."""
        state = request.scope["state"]
        if bearer is not None:
            identity = self.identify_token(request, bearer)
            state["is_valid"] = lambda: self._tokens.find(bearer) == identity
            return identity
        cookie = request.cookies.get(COOKIE)
        found = self._sessions.find(cookie) if cookie else None
        if cookie is None or found is None:
            self._check_file()
            raise UnauthorizedError(
                "a token is needed",
                hint="Send the header Authorization: Bearer TOKEN.",
                headers={"WWW-Authenticate": "Bearer"},
            )
        state["is_valid"] = lambda: self._sessions.find(cookie) == found
        return found

    def identify_token(self, request: HTTPConnection, token: str) -> Identity:
        """Return whose token this is, and count wrong ones per address.

        Too many wrong ones lock an address for tokens that it did not show before. Those that it did are let in:
        whoever shares the address with somebody who guesses can go on.
        """
        address = request.client.host if request.client else ""
        found = self._tokens.find(token)
        if found is None or not self._failures.is_known(address, found):
            self._failures.check(address)
        if found is not None:
            self._failures.know(address, found)
            return found
        self._check_file()
        self._failures.add(address)
        raise UnauthorizedError(
            "the token is not valid",
            hint="Ask an administrator of the service for a token.",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_file(self) -> None:
        """Say that the file of tokens is the trouble, rather than the token; the log has the reason."""
        if self._tokens.problem is not None:
            raise TokensUnusableError(
                "the service cannot trust its file of tokens", hint="Its log says why; correct the file."
            )


class _TooLargeError(ServiceError):
    status = 413
    code = "too_large"
    default_hint = "Send less."


class TokensUnusableError(ServiceError):
    """The file of tokens is not valid, or open to others."""

    status = 503
    code = "tokens_unusable"


def _bearer(headers: Headers) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _is_same_origin(headers: Headers, *, secure: bool) -> bool:
    origin = urlsplit(headers.get("origin", ""))
    return origin.scheme == ("https" if secure else "http") and origin.netloc == headers.get("host", "")


def is_known_host(header: str, hosts: Iterable[str]) -> bool:
    """Whether a Host header, which may end with a port, names one of `hosts`, or this machine as seen from itself."""
    host = without_port(header).removeprefix("[").removesuffix("]").lower()
    return host in {one.lower() for one in hosts} or is_loopback(host)


def _without_port(forwarded: str) -> str:
    """Return the address of a client that a proxy names, one text for each: without port, in its usual form."""
    for text in (forwarded, without_port(forwarded)):  # `::1:567` is an address, and `[::1]:567` has a port
        try:
            address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
        except ValueError:
            continue
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return str(mapped or address)
    return without_port(forwarded)  # a name, or `unknown`


def _is_in(address: str, networks: Iterable[Network]) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(found in network for network in networks)


class _Limited:
    """A `receive` that ends a body once it is too large, with or without a length."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._size = 0
        self.is_too_large = False

    async def __call__(self) -> Message:
        message: dict[str, Any] = dict(await self._receive())
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > MAX_BODY_BYTES:
                self.is_too_large = True
                raise _TooLargeError(TOO_LARGE)
        return message


class _Answered:
    """A `send` that knows whether the answer has begun. What a route makes of a body that was cut off is not sent."""

    def __init__(self, send: Send, limited: _Limited) -> None:
        self._send = send
        self._limited = limited
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if self._limited.is_too_large and not self.has_begun:
            return
        self.has_begun = True
        await self._send(message)
