"""One request at a time to one URL: no redirects, a bounded answer, and a time limit for the whole exchange."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import io
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from firnline.clock import monotonic
from firnline.http_address import HttpAddress, tls_context
from firnline.types import Clock

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ANSWER_BYTES = 64 * 1024  # of an answer that are read
SHOWN_CHARACTERS = 200  # of an answer, in a message
CONNECT_SECONDS = 10.0
SHORTEST_SECRET = 4  # shorter texts are words of any message
MASK = "***"


class NotSentError(Exception):
    """The request did not reach the server."""


class AnswerLostError(Exception):
    """The request was sent, at least in part; whether the server took it is unknown."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server says: status, the wait that it asks for, and the first part of the text, without secrets."""

    status: int
    retry_after: str
    text: str


class HttpClient:
    """Keeps one connection open. No message shows a value of `headers` or the secret that signs requests."""

    def __init__(
        self,
        address: HttpAddress,
        method: str,
        headers: Mapping[str, str],
        *,
        hmac_secret: str,
        ca_file: str,
        timeout_secs: float,
        clock: Clock,
    ) -> None:
        self._address = address
        self._method = method
        self._headers = {"User-Agent": "firnline", **headers}
        self._hmac_secret = hmac_secret
        self._timeout_secs = timeout_secs
        self._clock = clock
        self._tls = tls_context(ca_file) if address.tls else None
        self._connection: http.client.HTTPConnection | None = None
        self._secrets = _secrets(address, headers, hmac_secret)

    def connect(self) -> None:
        """Connect, with TLS if the URL says so, unless there is a connection.

        Raises:
            NotSentError: the server cannot be reached.
        """
        if self._connection is not None:
            return
        address, timeout = self._address, min(CONNECT_SECONDS, self._timeout_secs)
        connection: http.client.HTTPConnection = (
            http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=self._tls)
            if self._tls is not None
            else http.client.HTTPConnection(address.host, address.port, timeout=timeout)
        )
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise NotSentError(self.hide(f"{type(error).__name__}: {error}")) from error
        self._connection = connection

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def send(self, body: bytes, key: str, headers: Mapping[str, str]) -> Answer:
        """Send one request and return its answer, whatever its status.

        Raises:
            NotSentError: the server cannot be reached; nothing was sent.
            AnswerLostError: the connection broke, or no whole answer came in time.
        """
        self.connect()
        connection = self._connection
        assert connection is not None
        deadline = monotonic() + self._timeout_secs
        try:
            assert connection.sock is not None
            connection.sock.settimeout(self._timeout_secs)
            signed = self._sign(body, key)
            all_headers = {**self._headers, **headers, **signed, "Idempotency-Key": key}
            with contextlib.suppress(BrokenPipeError):  # a server may answer before it has read all
                connection.request(self._method, self._address.path, body=body, headers=all_headers)
            timed: Any = partial(_TimedResponse, deadline=deadline, seconds=self._timeout_secs)
            connection.response_class = timed
            response = connection.getresponse()
            text = self._read(response)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise AnswerLostError(self.hide(f"{type(error).__name__}: {error}")) from error
        except BaseException:
            self.close()
            raise
        if response.length == 0:
            response.close()
        if response.will_close or not response.isclosed():
            self.close()
        return Answer(response.status, response.getheader("Retry-After") or "", self.hide(text))

    def hide(self, text: str) -> str:
        """Return the first part of a text in one line, without secrets."""
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        shown = "".join(c if c.isprintable() else " " for c in text)
        return shown[:SHOWN_CHARACTERS]

    def _read(self, response: http.client.HTTPResponse) -> str:
        """Read the answer up to `ANSWER_BYTES`. The status decides; the rest of a longer answer is not waited for."""
        data = b""
        while len(data) < ANSWER_BYTES and not response.isclosed():
            piece = response.read1(ANSWER_BYTES - len(data))
            if not piece:
                break
            data += piece
        return data.decode("utf-8", "replace")

    def _sign(self, body: bytes, key: str) -> dict[str, str]:
        """Return the headers that prove who sent a request, and when."""
        if not self._hmac_secret:
            return {}
        stamp = str(int(self._clock.now().timestamp()))
        return {"Firnline-Timestamp": stamp, "Firnline-Signature": sign(self._hmac_secret, stamp, key, body)}


class _TimedReader(io.RawIOBase):
    """Reads a socket until a time: a server that sends byte by byte gets no more of it than one that is silent."""

    def __init__(self, inner: io.RawIOBase, sock: socket.socket, deadline: float, seconds: float) -> None:
        super().__init__()
        self._inner = inner
        self._socket = sock
        self._deadline = deadline
        self._seconds = seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        left = self._deadline - monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer within {self._seconds:g} s")
        self._socket.settimeout(left)
        return self._inner.readinto(buffer)

    def close(self) -> None:
        self._inner.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """An answer that is read, with its status and headers, until a time."""

    def __init__(self, sock: socket.socket, *args: Any, deadline: float, seconds: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock, deadline, seconds))


def sign(secret: str, timestamp: str, key: str, body: bytes) -> str:
    """Return the signature of a request: HMAC-SHA256 of timestamp, key and body, joined by dots."""
    message = b".".join((timestamp.encode(), key.encode(), body))
    return f"v1={hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()}"


def _secrets(address: HttpAddress, headers: Mapping[str, str], hmac_secret: str) -> list[str]:
    """Return the texts that no message may show, the longest first; also the words of a header, as of `Bearer`."""
    query = [value for _, value in parse_qsl(address.path.partition("?")[2])]
    texts = {hmac_secret, *query, *headers.values(), *(word for value in headers.values() for word in value.split())}
    return sorted((text for text in texts if len(text) >= SHORTEST_SECRET), key=len, reverse=True)
