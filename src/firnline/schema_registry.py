"""The client of a schema registry with Confluent's HTTP interface: fetches schemas by id, and registers them.

An answer is never guessed: a registry that is away, or answers with anything unexpected, is an error that a retry may
cure. Only the registry's own words say that a schema does not exist or does not fit.
"""

from __future__ import annotations

import base64
import http.client
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from firnline.clock import monotonic
from firnline.faults import fault_point
from firnline.http_address import HttpAddress, tls_context
from firnline.types import Json

MAGIC = 0  # the first byte of a value; four bytes with the schema's id follow
PREFIX_BYTES = 5
ANSWER_BYTES = 16 * 1024 * 1024  # the largest answer
SHOWN_CHARACTERS = 300  # of the registry's words in a message
MOST_REFERENCES = 100
DEFAULT_SECONDS = 10.0
_TYPE = "application/vnd.schemaregistry.v1+json"
_NOT_FOUND = 404
_UNKNOWN = (40401, 40402, 40403)  # no such subject, version or schema
_REFUSED = (409, 422)  # not compatible, or no schema
_DENIED = (401, 403)


class RegistryError(Exception):
    """The registry is away, or does not answer as one. `is_final`: wrong credentials; a retry would not help."""

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final

    @property
    def hint(self) -> str:
        """What to do."""
        if self.is_final:
            return "Check username, password or token of the registry and the rights of this user; nothing was lost."
        return "Check that the registry can be reached; nothing was lost."


class UnknownSchemaError(Exception):
    """The registry has no schema with this id."""


class RefusedSchemaError(Exception):
    """The registry will never take a schema for a subject; the message has its reason."""


@dataclass(frozen=True, slots=True)
class FetchedSchema:
    """A schema as the registry holds it: its kind (AVRO, JSON, PROTOBUF), its text, and the texts that it refers to."""

    kind: str
    text: str
    references: tuple[str, ...] = ()


class SchemaRegistry:
    """One registry. Serves many threads; keeps what never changes. No message shows a secret.

    Args:
        settings: The keys of `registry` in a spec, as plain values.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._address = HttpAddress.parse(
            str(settings["url"]), allow_http=bool(settings.get("allow_http")), of="a registry", secrets="password"
        )
        self._tls = tls_context(str(settings.get("ca_file") or "")) if self._address.tls else None
        self._seconds = float(settings.get("timeout_secs") or DEFAULT_SECONDS)
        self._headers = {"User-Agent": "firnline", "Accept": _TYPE, "Content-Type": _TYPE}
        if settings.get("token"):
            self._headers["Authorization"] = f"Bearer {settings['token']}"
        elif settings.get("username"):
            pair = f"{settings['username']}:{settings.get('password') or ''}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        self._schemas: dict[int, FetchedSchema] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    @property
    def address(self) -> str:
        return self._address.shown

    def check(self) -> None:
        """Ask for any answer.

        Raises:
            RegistryError: there is none.
        """
        self._ask("GET", "/schemas/types", may_be_missing=True)

    def fetch(self, number: int) -> FetchedSchema:
        """Return a schema by its id, which never changes.

        Raises:
            UnknownSchemaError: there is none.
            RegistryError: the registry is away.
        """
        with self._lock:
            known = self._schemas.get(number)
        if known is None:
            answer = self._ask("GET", f"/schemas/ids/{number}")
            references: list[str] = []
            self._follow(answer, references, set())
            known = FetchedSchema(_kind(answer), _text(answer, "schema"), tuple(references))
            with self._lock:
                self._schemas[number] = known
        return known

    def _follow(self, answer: Mapping[str, Json], found: list[str], seen: set[tuple[str, int]]) -> None:
        """Add the texts that a schema refers to, each after those that it refers to itself."""
        for reference in answer.get("references") or ():
            subject, version = str(reference["subject"]), int(reference["version"])
            if (subject, version) in seen:
                continue
            seen.add((subject, version))
            if len(seen) > MOST_REFERENCES:
                raise RegistryError(f"the registry {self.address} has a schema with more than {MOST_REFERENCES} others")
            other = self._ask("GET", f"/subjects/{quote(subject, safe='')}/versions/{version}")
            self._follow(other, found, seen)
            found.append(_text(other, "schema"))

    def register(self, subject: str, schema: str) -> int:
        """Register a schema for a subject, unless it is there. Returns its id.

        Raises:
            RefusedSchemaError: it is not compatible with the subject's schemas, or no schema.
            RegistryError: the registry is away; whether it took the schema is unknown. The same call asks again.
        """
        with self._lock:
            known = self._ids.get((subject, schema))
        if known is not None:
            return known
        body = json.dumps({"schema": schema, "schemaType": "AVRO"}).encode()
        fault_point("registry.register.before")
        answer = self._ask("POST", f"/subjects/{quote(subject, safe='')}/versions", body)
        fault_point("registry.register.after")
        number = answer.get("id")
        if not isinstance(number, int) or not 0 <= number < 1 << 32:
            raise RegistryError(f"the registry {self.address} gave no id for a schema of {subject}")
        with self._lock:
            self._ids[subject, schema] = number
        return number

    # -- requests -------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: bytes | None = None, *, may_be_missing: bool = False) -> Any:
        """Send one request, follow no redirect, and return the answer."""
        what = f"the registry {self.address}"
        try:
            status, data = self._exchange(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            raise RegistryError(f"{what} does not answer: {type(error).__name__}: {error}") from error
        answer = _parse(data)
        code, words = _problem(answer)
        if status in _DENIED:
            raise RegistryError(f"{what} refuses this user (status {status})", is_final=True)
        if status in _REFUSED and method == "POST":
            raise RefusedSchemaError(f"{what} refuses the schema (status {status}): {words}")
        if status == _NOT_FOUND and (code in _UNKNOWN or may_be_missing):
            if may_be_missing:
                return {}
            raise UnknownSchemaError(f"{what}: {words or 'no such schema'}")
        if not 200 <= status < 300 or answer is None:
            raise RegistryError(f"{what} answered {method} {path} with status {status}: {words or 'no JSON'}")
        return answer

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        address, deadline = self._address, monotonic() + self._seconds
        connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(address.host, address.port, timeout=self._seconds, context=self._tls)
            if self._tls is not None
            else http.client.HTTPConnection(address.host, address.port, timeout=self._seconds)
        )
        try:
            connection.request(method, address.path.partition("?")[0].rstrip("/") + path, body, self._headers)
            response = connection.getresponse()
            data = b""
            while piece := response.read1(1 << 16):
                data += piece
                if monotonic() > deadline or len(data) > ANSWER_BYTES:
                    raise TimeoutError(f"no whole answer within {self._seconds:g} s and {ANSWER_BYTES:,} bytes")
            return response.status, data
        finally:
            connection.close()


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _problem(answer: Any) -> tuple[int, str]:
    """Return code and words of an answer that reports an error; in one line."""
    if not isinstance(answer, dict):
        return 0, ""
    code, words = answer.get("error_code"), str(answer.get("message") or "")
    shown = "".join(c if c.isprintable() else " " for c in words)[:SHOWN_CHARACTERS]
    return (code if isinstance(code, int) else 0), shown


def _kind(answer: Any) -> str:
    return str(answer.get("schemaType") or "AVRO")


def _text(answer: Any, key: str) -> str:
    if not isinstance(answer, dict) or not isinstance(answer.get(key), str):
        raise RegistryError(f"the registry's answer has no {key}")
    return str(answer[key])


_registries: dict[str, SchemaRegistry] = {}
_lock = threading.Lock()


def open_registry(settings: Mapping[str, Any]) -> SchemaRegistry:
    """Return the registry with these settings; one for the process, so that no schema is fetched twice."""
    key = json.dumps(dict(settings), sort_keys=True, default=str)
    with _lock:
        if key not in _registries:
            _registries[key] = SchemaRegistry(settings)
        return _registries[key]
