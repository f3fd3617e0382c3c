"""What the store, the sink and the source of PostgreSQL have in common: connection strings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from firnline.errors import ConfigError

# Timeouts of a dead network; a dsn may override them.
NETWORK_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "connect_timeout": "10",
        "tcp_user_timeout": "30000",
        "keepalives_idle": "15",
        "keepalives_interval": "5",
        "keepalives_count": "3",
    }
)
DSN_HINT = "Write postgresql://user:password@host:5432/database, special signs in the password as %XX."


def parse_dsn(dsn: str, owner: str) -> dict[str, Any]:
    """Return the settings of a dsn. `owner` says whose it is: the source, say.

    Raises:
        ConfigError: it is empty, cannot be read, or has signs in user or password that must be written as %XX. The
            message does not quote it.
    """
    from psycopg import Error, conninfo

    if not dsn.strip():
        raise ConfigError(f"the dsn of the {owner} is empty", hint=DSN_HINT)
    if "://" in dsn and "@" in _after_credentials(dsn).partition("?")[0]:
        raise ConfigError(f"the dsn of the {owner} has an @ behind that of user and password", hint=DSN_HINT)
    try:
        return dict(conninfo.conninfo_to_dict(dsn))
    except Error:  # its message quotes the dsn
        raise ConfigError(f"the dsn of the {owner} cannot be read", hint=DSN_HINT) from None


def place_of(dsn: str) -> str:
    """Return `postgresql://host:port/database` of a dsn, without credentials."""
    if "://" in dsn:
        head, mark, query = _after_credentials(dsn).partition("?")
        # Of a dsn that `parse_dsn` refuses, no part of the password is shown either.
        parts = urlsplit(f"postgresql://{head.rpartition('@')[2]}{mark}{query}".replace("#", "%23"))
        given = dict(parse_qsl(parts.query))
        hosts = parts.netloc
        host, _, port = hosts.rpartition(":") if ":" in hosts.rpartition("]")[2] else (hosts, "", "")
        values = {"host": unquote(host), "port": port, "dbname": unquote(parts.path.strip("/")), **given}
    else:
        try:
            pairs = shlex.split(dsn.replace(" = ", "="))
        except ValueError:
            pairs = []
        values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    host, port = values.get("host") or values.get("hostaddr") or "localhost", values.get("port") or "5432"
    return f"postgresql://{host}:{port}/{values.get('dbname') or ''}".rstrip("/")


def _after_credentials(dsn: str) -> str:
    """Return what follows user and password of a URI, found as the client library finds them."""
    rest = dsn.partition("://")[2]
    found = re.match("[^@/]*@", rest)
    return rest[found.end() :] if found else rest
