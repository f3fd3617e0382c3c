"""Serves the application: the address and its rules, TLS, the lock of the state folder, signals, a clean end."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11

from firnline.errors import AlreadyRunningError, ConfigError
from firnline.service.access.guard import HEADERS, Network, Rules
from firnline.service.connections import Connections, counted
from firnline.service.endpoints import resolve
from firnline.service.problems import MEDIA_TYPE, problem
from firnline.types import Clock

LOCK = "lock"
_M_ARENA_MAX = -8  # of malloc.h
CHECK_SECONDS = 5
GRACE_SECONDS = 5  # for requests that are being answered when the service stops


@dataclass(frozen=True, slots=True)
class Address:
    """Where to serve, and who may reach it.

    Attributes:
        tls_cert: A PEM file with the certificate and its chain.
        tls_key: A PEM file with the private key.
        proxies: Addresses or networks of proxies that end TLS: only they may connect, and they say who asks.
        hosts: Names by which clients ask for the service, besides those of loopback and `host` itself.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: str | None = None
    tls_key: str | None = None
    proxies: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert is not None else "http"

    def url(self, port: int) -> str:
        """Return the base of every address, with the port that was taken."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{port}"

    def find_rules(self) -> Rules:
        """Return what the guard lets in.

        Raises:
            ConfigError: the address is not loopback and nothing encrypts, or a value is not valid.
        """
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together", hint="Give both, or none.")
        if self.tls_cert is not None and self.tls_key is not None:
            _check_certificate(self.tls_cert, self.tls_key)
        if self.tls_cert is not None and self.proxies:
            raise ConfigError("--tls-cert and --trusted-proxy exclude each other", hint="One of them ends TLS.")
        networks = tuple(_network(text) for text in self.proxies)
        address = ipaddress.ip_address(_resolve(self.host)[1].partition("%")[0])
        is_encrypted = self.tls_cert is not None or bool(networks)
        if not address.is_loopback and not is_encrypted:
            raise ConfigError(
                f"--host {self.host} is not a loopback address, and needs TLS: tokens would be sent in the clear",
                hint="Add --tls-cert FILE --tls-key FILE, or --trusted-proxy ADDRESS of a proxy that ends TLS.",
            )
        if not address.is_loopback and address.is_unspecified and not self.hosts:
            raise ConfigError(
                f"--host {self.host} is every address of this machine: by which name do clients ask for it?",
                hint="Add --allowed-host NAME, as in the URL that clients use; repeatable.",
            )
        hosts = frozenset((*self.hosts, *(() if address.is_unspecified else (self.host,))))
        return Rules(hosts, secure=is_encrypted, proxies=networks)

    def listen(self) -> socket.socket:
        """Return a socket that listens; ConfigError if the address cannot be had."""
        try:
            family, address = _resolve(self.host)
            listening = socket.create_server((address, self.port), family=family, backlog=512)
            # Connections inherit it. asyncio sets it for sockets that name their protocol; this one does not.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return listening
        except OSError as error:
            raise ConfigError(
                f"cannot serve on {self.host}:{self.port}: {error.strerror or error}",
                hint="Choose another --port (0 takes a free one), or a --host of this machine.",
            ) from error


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        return resolve(host)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: no such address", hint="Name an address of this machine.") from error


def _check_certificate(certificate: str, key: str) -> None:
    for path in (certificate, key):
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}", hint="Name a PEM file.") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{certificate} and {key} are no certificate with its key: {getattr(error, 'reason', None) or error}",
            hint="Both are PEM files; the key must not be encrypted.",
        ) from error


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"--trusted-proxy {text}: no address or network", hint="For example 10.0.0.7, or 10.0.0.0/24."
        ) from error


class _WithoutPandas:
    """Finds no pandas, wherever it is."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("the service leaves pandas out", name=name)


def leave_out_pandas() -> None:
    """Make this process one without pandas: Arrow loads it, 40 MB, with the first list that it gets, if it is there."""
    if "pandas" not in sys.modules and _WithoutPandas not in sys.meta_path:
        sys.meta_path.insert(0, _WithoutPandas)


def keep_memory_together() -> None:
    """Have the C library give memory to all threads from two pools: each thread of a page would keep one of its own."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than that of GNU
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 2)


@contextlib.contextmanager
def locking(folder: Path) -> Iterator[None]:
    """Hold the lock of the state folder: two services that supervise with one state would start runs twice.

    Raises:
        AlreadyRunningError: another service holds it.
    """
    with open(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = file.read(20).strip()
            raise AlreadyRunningError(
                f"another service{f' (process {holder})' if holder else ''} uses the folder {folder}",
                hint="Stop it, or give this one a folder of its own: --state FOLDER",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def serve_app(
    app: Any,
    address: Address,
    listening: socket.socket,
    clock: Clock,
    closing: Sequence[Callable[[], None]] = (),
    checking: Sequence[Callable[[], object]] = (),
) -> None:
    """Answer requests until SIGTERM or SIGINT.

    Args:
        closing: Called when the service is asked to stop, before open requests are waited for.
        checking: Called every few seconds.
    """
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    connections = Connections(clock)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            for close in closing:
                close()
            super().handle_exit(sig, frame)

        async def on_tick(self, counter: int) -> bool:  # ten times a second
            if counter % 10 == 0:
                connections.sweep()
            if counter % (10 * CHECK_SECONDS) == 0:
                for check in checking:
                    check()
            return await super().on_tick(counter)

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.attach(transport.get_extra_info("socket").fileno(), self)

        def send_400_response(self, msg: str) -> None:
            answer = problem(400, "bad_request", "this is no valid HTTP request")
            lines = [*HEADERS.items(), ("content-type", MEDIA_TYPE), ("connection", "close")]
            lines.append(("content-length", str(len(answer.body))))
            with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun
                head = h11.Response(status_code=400, headers=lines, reason=b"Bad Request")
                for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    config = uvicorn.Config(
        app,
        http=Protocol,
        loop="asyncio",  # another loop accepts connections without the socket that counts them
        ws="none",
        log_config=None,
        log_level="error",  # strangers could fill the log with requests that are not valid
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ssl_certfile=address.tls_cert,
        ssl_keyfile=address.tls_key,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    # The server raises the signal once more after its own clean end; it means nothing then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    with counted(listening, connections) as sockets:
        Server(config).run(sockets=[sockets])
