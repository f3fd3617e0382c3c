"""Serves `/metrics`, `/healthz` and `/readyz` of one run: on loopback, or elsewhere with a token for everything but
the state."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from firnline.errors import ConfigError
from firnline.http_address import is_loopback_address, without_port
from firnline.service.health import HealthCheck, Verdict

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REQUEST_SECONDS = 10  # the connection of a silent client is closed after this time


@dataclass(frozen=True, slots=True)
class ServeAt:
    """Where to serve, and the token that readers must show.

    Attributes:
        port: 0 means a free port.
        host: An address of this machine, or a name of one; `0.0.0.0` or `::` means all of them.
        token: Needed for every host but loopback. Where it is set, loopback needs it, too.
    """

    port: int
    host: str = LOOPBACK
    token: str | None = field(default=None, repr=False)


class Endpoints:
    """An HTTP server in threads of its own; answers GET and nothing else.

    With a token, `/metrics` and the reasons in the other answers need `Authorization: Bearer TOKEN`; a probe without
    it learns the state alone.
    """

    def __init__(self, registry: CollectorRegistry, health: HealthCheck, at: ServeAt) -> None:
        try:
            family, address = resolve(at.host)
            if at.token is None and not ipaddress.ip_address(address).is_loopback:
                raise ConfigError(
                    f"--metrics-host {at.host} is not a loopback address, and needs a token",
                    hint="Add --metrics-token-file FILE; Firnline makes the file if it is missing.",
                )
            self._server = _Server((address, at.port), family)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"cannot serve metrics on {at.host}:{at.port}: {getattr(error, 'strerror', None) or error}",
                hint="Choose another --metrics-port (0 takes a free one), or a --metrics-host of this machine.",
            ) from error
        self._server.registry, self._server.health = registry, health
        self._server.token = at.token.encode() if at.token is not None else None
        self._thread = threading.Thread(target=self._server.serve_forever, name="firnline metrics", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """The base of every address that is served."""
        host = str(self._server.server_address[0])
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def __enter__(self) -> Endpoints:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def resolve(host: str) -> tuple[socket.AddressFamily, str]:
    """Find the address to listen on; the token rule is about this address, not about the name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # of `localhost`, 127.0.0.1
    return family, str(address[0])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    registry: CollectorRegistry
    health: HealthCheck
    token: bytes | None

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking the name service for a name of the address, which may take seconds."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # `::` means IPv4, too
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_SECONDS
    server_version = "firnline"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.split("?", 1)[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/healthz":
            self._verdict(self.server.health.healthy())
        elif path == "/readyz":
            self._verdict(self.server.health.ready())
        else:
            self._json(404, {"status": "not_found", "paths": ["/metrics", "/healthz", "/readyz"]})

    def _metrics(self) -> None:
        if self._is_trusted():
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.server.registry))
        elif self.server.token is not None:
            self._json(401, {"status": "unauthorized"}, {"WWW-Authenticate": "Bearer"})
        else:
            self._json(403, {"status": "forbidden"})

    def _is_trusted(self) -> bool:
        """Whether the client shows the token; without a token, whether it asks for this machine by a loopback name.

        A web page whose name was made to resolve to loopback still sends its own name.
        """
        if self.server.token is None:
            return _is_loopback_name(self.headers.get("Host", ""))
        scheme, _, shown = self.headers.get("Authorization", "").partition(" ")
        is_same = hmac.compare_digest(shown.strip().encode(), self.server.token)
        return is_same and scheme.lower() == "bearer"

    def _verdict(self, verdict: Verdict) -> None:
        body: dict[str, Any] = {"status": "ok" if verdict.ok else "unavailable"}
        if self._is_trusted():
            body |= {"reasons": verdict.reasons, **verdict.facts}
        self._json(200 if verdict.ok else 503, body)

    def _json(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._answer(status, "application/json", json.dumps(body, ensure_ascii=False).encode() + b"\n", headers)

    def _answer(self, status: int, content_type: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there is a scrape every few seconds."""


def _is_loopback_name(header: str) -> bool:
    """Whether a Host header, which may end with a port, names this machine as seen from itself."""
    host = without_port(header)
    return host in ("", "localhost") or is_loopback_address(host.removeprefix("[").removesuffix("]"))
