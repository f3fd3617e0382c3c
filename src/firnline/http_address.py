"""Addresses of HTTP servers, parsed from URLs: encrypted unless the server is this machine."""

from __future__ import annotations

import ipaddress
import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from firnline.errors import ConfigError

TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what an Authorization header can carry after `Bearer`


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where requests go, parsed from a URL; `shown` has no query."""

    tls: bool
    host: str
    port: int
    path: str = field(repr=False)  # with the query

    @classmethod
    def parse(cls, url: str, *, allow_http: bool, of: str = "an HTTP sink", secrets: str = "headers") -> HttpAddress:
        """Parse a URL. Never repeats it in an error, which names what the URL belongs to and the key for secrets.

        Raises:
            ConfigError: it is invalid, or would send what is confidential without encryption.
        """
        hint = f"Write https://HOST/PATH; keep secrets in `{secrets}`, as ${{env:NAME}}."
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError:
            raise ConfigError(f"the url of {of} is invalid", hint=hint) from None
        if parts.scheme not in ("https", "http") or not host:
            raise ConfigError(f"the url of {of} must be https://HOST/PATH", hint=hint)
        if parts.username is not None or parts.password is not None:
            raise ConfigError(f"the url of {of} has a user or a password", hint=hint)
        if re.search(r"[\x00-\x20\x7f-\uffff]", url.strip()):
            raise ConfigError(f"the url of {of} has characters that must be percent-encoded", hint=hint)
        tls = parts.scheme == "https"
        if not tls and not allow_http and not is_loopback(host):
            raise ConfigError(
                f"the url of {of} leads to {host} without encryption",
                hint="Write https://, or allow it: `allow_http: true`.",
            )
        path = parts.path or "/"
        return cls(tls, host, port or (443 if tls else 80), f"{path}?{parts.query}" if parts.query else path)

    @property
    def shown(self) -> str:
        """The address for messages and for the ledger."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.tls else ''}://{host}:{self.port}{self.path.partition('?')[0]}"


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    return host == "localhost" or is_loopback_address(host)


def is_loopback_address(text: str) -> bool:
    """Whether a text is an address of this machine as seen from itself, and no name."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def without_port(header: str) -> str:
    """Return a Host header without the port that it may end with."""
    host, _, port = header.rpartition(":")
    return host if port.isdigit() else header


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Return how servers prove who they are: by the certificates of a file, or by those of the system.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file {ca_file} cannot be read: {error}") from error
