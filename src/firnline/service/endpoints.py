"""Serves `/metrics`, `/healthz` and `/readyz` of one run on the loopback interface."""

from __future__ import annotations

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from firnline.errors import ConfigError
from firnline.service.health import HealthCheck, Verdict

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
REQUEST_SECONDS = 10  # the connection of a silent client is closed after this time


class Endpoints:
    """An HTTP server in threads of its own; answers GET and nothing else."""

    def __init__(self, registry: CollectorRegistry, health: HealthCheck, port: int) -> None:
        try:
            self._server = _Server((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot serve metrics on {HOST}:{port}: {error}",
                hint="Choose another --metrics-port; 0 takes a free one.",
            ) from error
        self._server.registry, self._server.health = registry, health
        self._thread = threading.Thread(target=self._server.serve_forever, name="firnline metrics", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Endpoints:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    registry: CollectorRegistry
    health: HealthCheck

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
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, content_type, encode(self.server.registry))
        elif path == "/healthz":
            self._verdict(self.server.health.healthy())
        elif path == "/readyz":
            self._verdict(self.server.health.ready())
        else:
            self._json(404, {"status": "not_found", "paths": ["/metrics", "/healthz", "/readyz"]})

    def _verdict(self, verdict: Verdict) -> None:
        body = {"status": "ok" if verdict.ok else "unavailable", "reasons": verdict.reasons, **verdict.facts}
        self._json(200 if verdict.ok else 503, body)

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._answer(status, "application/json", json.dumps(body, ensure_ascii=False).encode() + b"\n")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: there is a scrape every few seconds."""
