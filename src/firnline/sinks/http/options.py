"""The options of an HTTP sink, and which headers it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from firnline.http_address import HttpAddress
from firnline.options import FollowerOptions
from firnline.types import Json

DEFAULT_BATCH_BYTES = 1024 * 1024
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Set by the sink or by the protocol.
RESERVED = ("connection", "content-length", "content-type", "host", "idempotency-key", "te", "transfer-encoding")
RESERVED_PREFIX = "firnline-"


@dataclass(frozen=True, slots=True)
class HttpSinkOptions(FollowerOptions):
    """A URL that takes batches of rows by POST or PUT."""

    type: ClassVar[str] = "http"

    url: str = field(repr=False)  # https://, or http:// on this machine; its query may hold a secret
    method: Literal["POST", "PUT"] = field(default="POST", kw_only=True)
    format: Literal["ndjson", "json"] = field(default="ndjson", kw_only=True)
    max_rows: int = field(default=500, kw_only=True)  # of one request
    max_bytes: int = field(default=DEFAULT_BATCH_BYTES, kw_only=True)  # of one request; a larger row goes alone
    headers: Mapping[str, str] = field(default_factory=dict, kw_only=True, repr=False)
    hmac: str = field(default="", kw_only=True, repr=False)  # the secret that signs requests; empty: not signed
    event_id: bool = field(default=False, kw_only=True)  # add `_firnline_id` to each row
    allow_http: bool = field(default=False, kw_only=True)  # also to other machines
    ca_file: str = field(default="", kw_only=True)  # certificates to trust; empty: those of the system
    timeout_secs: float = field(default=30.0, kw_only=True)

    @property
    def location(self) -> str:
        return HttpAddress.parse(self.url, allow_http=True).shown

    def own_shape(self) -> dict[str, Json]:
        return {"format": self.format, "event_id": self.event_id}


def find_bad_header(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the first header that cannot be sent, with the reason; never its value."""
    for name, value in headers.items():
        if not _HEADER.fullmatch(name):
            return name, "is no name of a header"
        if name.lower() in RESERVED or name.lower().startswith(RESERVED_PREFIX):
            return name, "is set by Firnline"
        if re.search(r"[\x00-\x08\x0a-\x1f\x7f]", value) or not value.isascii():
            return name, "has a value with line ends, control characters or other than ASCII"
    return None
