"""A `firnline serve` that commands ask: the requests, its errors as those of the command line, plans and questions."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from firnline.cli.common import Common
from firnline.cli.consent import Consent
from firnline.errors import (
    AlreadyRunningError,
    CommitUnknownError,
    ConfigError,
    FencedError,
    FirnlineError,
    NotRunningError,
)
from firnline.http_address import TOKEN, HttpAddress
from firnline.types import Json

API = "/api/v1"
TIMEOUT_SECONDS = 660.0  # a confirmation may wait for another one
MAX_ANSWER_BYTES = 256 * 1024 * 1024
PAGE = 500
MAX_TOKEN_BYTES = 4096
_ONE_LINE = "Name a file that holds a token, and nothing else, in one line."
# What the REST interface calls what the command line has under another name.
_WORDS = (
    ("GET /api/v1/pipelines lists them", "`firnline --server URL --token-file FILE status` names them"),
    ("POST .../stop", "`firnline --server URL --token-file FILE stop NAME`"),
    ("plan the action with take_over: true", "repeat the command with --take-over"),
    ("take_over: true", "--take-over"),
    ("accept_gap: true", "--accept-gap"),
    ("GET .../jobs lists it", "the page of the pipeline shows it"),
)
_ERRORS: dict[str, type[FirnlineError]] = {
    one.code: one for one in (AlreadyRunningError, CommitUnknownError, FencedError, NotRunningError)
}


class ServerError(FirnlineError):
    """The service refused the request, or does not answer."""

    code = "server"
    exit_code = 1
    default_hint = "The log of the service says more."


class _UnreachableError(ServerError):
    code = "server-unreachable"
    exit_code = 3


class Server:
    """A service, asked with a token. Follows no redirects: the token goes to this server alone."""

    def __init__(self, url: str, token_file: str) -> None:
        try:
            self._address = HttpAddress.parse(url, allow_http=False, of="the server", secrets="--token-file")
        except ConfigError as error:
            if "allow_http" not in error.hint:
                raise
            hint = "Give the service a certificate (--tls-cert, --tls-key), or ask it on its own machine."
            raise ConfigError(error.message, hint=hint) from error
        path = Path(token_file).expanduser()
        try:
            with path.open("rb") as file:
                content = file.read(MAX_TOKEN_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", hint=_ONE_LINE) from error
        token = content.decode("ascii", "replace").strip()
        if len(content) > MAX_TOKEN_BYTES or not TOKEN.fullmatch(token):
            raise ConfigError(f"{path} holds no token", hint=_ONE_LINE)
        self._headers = {
            "Authorization": f"Bearer {token}",
            "Accept": "application/json",
            "Cache-Control": "no-cache",  # a command shows what is, not what was a second ago
        }

    @property
    def shown(self) -> str:
        """Its address, for messages."""
        return self._address.shown

    def get(self, path: str, **query: Json) -> dict[str, Any]:
        """Ask for something."""
        given = {key: value for key, value in query.items() if value is not None}
        return self._ask("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def post(self, path: str, body: Mapping[str, Json] | None = None) -> dict[str, Any]:
        """Have something done."""
        return self._ask("POST", path, body)

    def rows(self, path: str, key: str, limit: int, **query: Json) -> Iterator[dict[str, Any]]:
        """Yield the rows of a list, page by page, at least `limit` of them if there are so many; 0 means all."""
        after, count = None, 0
        while True:
            wanted = PAGE if not limit else min(PAGE, limit + 1 - count)
            found = self.get(path, limit=max(1, wanted), next=after, **query)
            if found[key] is None:
                raise ServerError("the token may not see records", hint="Use a token with the right `data`.")
            for row in found[key]:
                count += 1
                yield row
            after = found["next"]
            if after is None or (limit and count > limit):
                return

    def download(self, path: str, file: str, *, replace: bool) -> None:
        """Write what the server sends to a file, whole or not at all.

        Raises:
            ConfigError: the file exists and must not be replaced, or cannot be written.
        """
        if os.path.lexists(file) and not replace:
            raise ConfigError(f"{file} already exists", hint="Add --yes to replace it, or name another file.")
        status, text = self._send("GET", path, None)
        if status != 200:
            _parse(status, text, self._address.shown)
        target = Path(file)
        try:
            descriptor, hidden = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
            try:
                with open(descriptor, "wb") as stream:
                    stream.write(text)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(hidden, target)
            except BaseException:
                os.unlink(hidden)
                raise
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}", hint="Name another file.") from error

    def _ask(self, method: str, path: str, body: Mapping[str, Json] | None) -> dict[str, Any]:
        return _parse(*self._send(method, path, body), self._address.shown)

    def _send(self, method: str, path: str, body: Mapping[str, Json] | None) -> tuple[int, bytes]:
        address = self._address
        where = address.path.partition("?")[0].rstrip("/")
        headers = dict(self._headers)
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        connection: http.client.HTTPConnection
        if address.tls:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(
                address.host, address.port, timeout=TIMEOUT_SECONDS, context=context
            )
        else:
            connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, f"{where}{API}{path}", data, headers)
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _UnreachableError(
                f"{address.shown} does not answer: {getattr(error, 'strerror', None) or error}",
                hint="Check the address, and that `firnline serve` runs there. An action that was sent may be under "
                "way: GET .../audit of the service says so.",
            ) from error
        finally:
            connection.close()
        return answer.status, text


def _parse(code: int, text: bytes, shown: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict) or not 200 <= code < 300:
        problem = body if isinstance(body, dict) else {}
        message = str(problem.get("detail") or f"{shown} answered with status {code}, and is no Firnline service")
        kind = _ERRORS.get(str(problem.get("code", "")), ConfigError if code == 422 else ServerError)
        raise kind(_in_words(message), hint=_in_words(str(problem.get("hint") or "")) or None)
    return body


def _in_words(text: str) -> str:
    """Return a text of the service with the words of the command line."""
    for theirs, ours in _WORDS:
        text = text.replace(theirs, ours)
    return text


@dataclass(frozen=True, slots=True)
class Call:
    """One command against a server: the server, and the arguments of the local command."""

    server: Server
    arguments: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The pipeline; ConfigError if the command line names none."""
        name = self.arguments.get("spec")
        if name is None:
            names = sorted(str(row["pipeline"]) for row in self.server.get("/pipelines")["pipelines"])
            if len(names) == 1:
                return names[0]
            raise ConfigError(
                "name the pipeline, in the place of the spec", hint=f"Registered: {', '.join(names[:20]) or 'none'}"
            )
        return str(name)

    @property
    def path(self) -> str:
        return f"/pipelines/{quote(self.name, safe='')}"

    @property
    def common(self) -> Common:
        return self.arguments.get("common") or Common()

    @property
    def consent(self) -> Consent:
        return self.arguments.get("consent") or Consent()

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def act(
        self,
        path: str,
        body: Mapping[str, Json],
        show: Callable[[dict[str, Any]], None],
        question: Callable[[dict[str, Any]], str],
        finish: Callable[[dict[str, Any], dict[str, Any]], tuple[str, dict[str, Any]]],
    ) -> int:
        """Plan an action, show the plan, and confirm it if that is wanted: as the local command does."""
        common, consent = self.common, self.consent
        planned = self.server.post(f"{self.path}/{path}", body)
        plan = {key: value for key, value in planned["plan"].items() if key not in ("position_texts", "epochs_skipped")}
        if not common.json:
            show(planned["plan"])
            for step in planned["steps"]:
                common.out.sentence(step)
            common.out.line()
        elif not consent.decided:
            common.out.json({**plan, "done": False})
        if planned["refusals"]:
            raise ServerError(f"it cannot be done: {'; '.join(planned['refusals'])}", hint="Change the request.")
        if not consent.is_given(question(plan), common.out):
            return 0
        receipt = self.server.post(f"{self.path}/plans/{planned['id']}/confirm")
        text, facts = finish(plan, receipt)
        if common.json:
            common.out.json({**plan, **facts, "done": True})
        else:
            common.out.line(text)
        return 0
