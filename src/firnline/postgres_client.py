"""What the store, the sink and the source of PostgreSQL have in common: connection strings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote, urlsplit

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


def place_of(dsn: str) -> str:
    """Return `postgresql://host:port/database` of a dsn, without credentials."""
    if "://" in dsn:
        parts = urlsplit(dsn)
        given = dict(parse_qsl(parts.query))
        hosts = parts.netloc.rpartition("@")[2]
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
