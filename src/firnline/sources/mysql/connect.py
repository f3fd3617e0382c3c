"""Connections to MySQL and MariaDB: the address in the spec, the client library, and its errors in words."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from firnline.errors import ConfigError, FirnlineError, MissingExtraError, SourceError
from firnline.sources.cdc.log import AWAY, UNKNOWN_HOST, names_no_host

DEFAULT_PORT = 3306
CONNECT_SECONDS = 15.0
_TLS_MODES = ("disabled", "preferred", "required", "verify_ca", "verify_identity")
_TLS_FILES = {"ssl_ca": "ca", "ssl_cert": "cert", "ssl_key": "key"}
# Errors of the server that a retry does not mend.
_DENIED = frozenset({1044, 1045, 1130, 1227, 1251, 1698, 3118})

_OF_CLIENT = (0, *range(2000, 3000))  # errors of the client: the connection is lost


@dataclass(frozen=True, slots=True)
class Dsn:
    """An address: `mysql://user:password@host:port,host:port/?ssl_mode=verify_ca&ssl_ca=/path`."""

    hosts: tuple[tuple[str, int], ...]
    user: str
    password: str
    tls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Dsn:
        """Return the parts of an address.

        Raises:
            ConfigError: it is no such address; the message holds no password.
        """
        parts = urlsplit(text)
        user, _, hosts = parts.netloc.rpartition("@")
        name, _, password = user.partition(":")
        try:
            if parts.scheme not in ("mysql", "mariadb") or not hosts:
                raise ValueError("it does not begin with mysql:// and a host")
            found = tuple(_host(word) for word in hosts.split(","))
            options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
            if unknown := sorted(set(options) - {"ssl_mode", *_TLS_FILES}):
                raise ValueError(f"unknown option {', '.join(unknown)}")
            if options.get("ssl_mode", "preferred").lower() not in _TLS_MODES:
                raise ValueError(f"ssl_mode is one of {', '.join(_TLS_MODES)}")
        except ValueError as error:
            raise ConfigError(
                f"dsn of the source cannot be read: {error}",
                hint="Write it so: mysql://USER:PASSWORD@HOST:3306 (several hosts: HOST1:3306,HOST2:3306).",
            ) from None
        return cls(found, unquote(name), unquote(password), tuple(sorted(options.items())))

    def __repr__(self) -> str:
        return f"Dsn({', '.join(f'{host}:{port}' for host, port in self.hosts)})"


def _host(word: str) -> tuple[str, int]:
    host, colon, port = word.rpartition(":") if not word.endswith("]") else (word, "", "")
    if not colon:
        host, port = word, str(DEFAULT_PORT)
    host = host.strip("[]")
    if not host or not port.isdigit():
        raise ValueError(f"{word!r} is no host")
    return host, int(port)


def load_library() -> Any:
    """Return the client library.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import pymysql
    except ImportError as error:
        raise MissingExtraError(extra="mysql") from error
    return pymysql


def connect(dsn: Dsn, host: tuple[str, int], read_seconds: float = 60.0) -> Any:
    """Return a connection to one host.

    Raises:
        SourceError: the host does not answer.
        ConfigError: it refuses the user.
    """
    with errors_in_words("cannot connect", host):
        return _connection_class()(
            host=host[0], port=host[1], user=dsn.user, password=dsn.password, autocommit=True, charset="utf8mb4",
            connect_timeout=CONNECT_SECONDS, read_timeout=read_seconds, write_timeout=60.0, program_name="firnline",
            **_tls(dict(dsn.tls)),
        )  # fmt: skip


@cache
def _connection_class() -> Any:
    """Return the library's connection. Where no certificate is checked, it does not load those of the system, which
    takes longer than all else of connecting."""

    class Connection(load_library().connections.Connection):  # type: ignore[misc]
        def _create_ssl_ctx(self, options: Any) -> ssl.SSLContext:
            made: ssl.SSLContext = super()._create_ssl_ctx(options or _unchecked())
            return made

    return Connection


@cache
def _unchecked() -> ssl.SSLContext:
    """Return settings of TLS that take any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def connect_any(dsn: Dsn, hosts: Sequence[tuple[str, int]]) -> tuple[Any, tuple[str, int]]:
    """Return a connection to the first host that answers, and that host."""
    failure: SourceError | None = None
    for host in hosts:
        try:
            return connect(dsn, host), host
        except SourceError as error:
            if failure is None or UNKNOWN_HOST in failure.fields:  # another host may answer later
                failure = error
    assert failure is not None  # a dsn has a host
    raise failure


def _tls(options: dict[str, str]) -> dict[str, Any]:
    mode = options.get("ssl_mode", "preferred").lower()
    if mode == "disabled":
        return {"ssl_disabled": True}
    keys: dict[str, Any] = {name: options[name] for name in _TLS_FILES if name in options}
    if mode == "required" and not keys:
        return {"ssl": _unchecked()}
    if mode in ("verify_ca", "verify_identity"):
        keys |= {"ssl_verify_cert": True, "ssl_verify_identity": mode == "verify_identity"}
    return keys


@contextlib.contextmanager
def errors_in_words(what: str, host: tuple[str, int]) -> Iterator[None]:
    """Turn errors of the client library into ours."""
    library = load_library()
    try:
        yield
    except FirnlineError:
        raise
    except library.err.Error as error:
        code = error.args[0] if error.args else 0
        words = error.args[1] if len(error.args) > 1 else str(error)
        message = f"{what}: {words} ({code}; server {host[0]}:{host[1]})"
        if code in _DENIED:
            named = re.search("for user '([^']+)'@", str(words))
            raise ConfigError(message, hint=grant_hint(named[1] if named else "USER")) from error
        is_away = code in _OF_CLIENT
        raise SourceError(message, hint=RETRY_HINT, **_facts(message) if is_away else {}) from error
    except (OSError, RuntimeError) as error:
        message = f"{what}: {error} (server {host[0]}:{host[1]})"
        raise SourceError(message, hint=RETRY_HINT, **_facts(message)) from error


def _facts(message: str) -> dict[str, bool]:
    """Return the facts of an error of the connection."""
    return {AWAY: True, **({UNKNOWN_HOST: True} if names_no_host(message) else {})}


RETRY_HINT = "Check that the server can be reached, then run again; nothing was lost."


def grant_hint(user: str) -> str:
    """Return the statement that gives a user the rights that the stream needs."""
    return (
        f"Check user and password in dsn, and run on the server: "
        f"GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO '{user}'@'%';"
    )
