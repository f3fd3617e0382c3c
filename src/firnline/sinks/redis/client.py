"""One connection to a Redis server: what it promises, its node of a cluster, and calls of the script.

An answer that does not come leaves the outcome open: the connection is closed, and the caller reads the head. Nothing
is sent a second time here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from firnline.errors import CommitUnknownError, ConfigError, MissingExtraError, SinkError
from firnline.process import describe_failure
from firnline.sinks.redis.options import RedisAddress, hash_tag
from firnline.sinks.redis.script import SCRIPT

T = TypeVar("T")
CONNECT_SECONDS = 10.0
_REACH_HINT = "Check the url of the sink, and that the server runs, then run again; nothing was lost."
WAITAOF_SINCE = (7, 2)


class ScriptLostError(Exception):
    """The server has forgotten the script; nothing was written."""


@dataclass(frozen=True, slots=True)
class Server:
    """What a server says of itself."""

    version: tuple[int, ...]
    is_cluster: bool
    waits_for_log: bool  # whether a write is durable only once WAITAOF says so


class RedisClient:
    """Connects on demand. `require_log`: refuse a server that may forget what it has acknowledged.

    In a cluster it connects to the node that has `key`.
    """

    def __init__(self, sink: str, address: RedisAddress, key: str, *, require_log: bool, timeout_secs: float) -> None:
        try:
            import redis
        except ImportError as error:
            raise MissingExtraError(extra="redis") from error
        self._redis: Any = redis
        self._sink = sink
        self._address = address
        self._key = key
        self._require_log = require_log
        self._timeout_secs = timeout_secs
        self._connection: Any = None
        self.server: Server | None = None
        self.sha = ""

    # -- calls ----------------------------------------------------------------------------------------

    def call(self, *words: str | int) -> Any:
        """Send one command that only reads, and return its answer. Connects if need be.

        Raises:
            SinkError: the server cannot be reached, refuses the command, or does not answer.
        """
        self.connect()
        return self._guard(lambda: self._ask(*words), SinkError)

    def send(self, parts: Iterable[bytes | memoryview]) -> None:
        """Send a packed call of the script; `receive` returns its answer. Calls are answered in order.

        Raises:
            SinkError: there is no connection; nothing was sent.
            CommitUnknownError: the connection broke.
        """
        self.connect()
        self._guard(lambda: self._connection.send_packed_command(parts, check_health=False), CommitUnknownError)

    def receive(self) -> list[bytes]:
        """Return the answer to the oldest unanswered call.

        Raises:
            CommitUnknownError: it was lost.
            ScriptLostError: the server does not know the script any more; a new connection gives it the script.
            SinkError: the server refused to run it; nothing was written.
        """
        if self._connection is None:
            raise CommitUnknownError(f"sink {self._sink!r}: the connection to {self._address.shown} is gone")
        answer: list[bytes] = self._guard(self._connection.read_response, CommitUnknownError)
        return answer

    def wait_for_log(self) -> None:
        """Wait until the server has made everything durable that this connection has written.

        Raises:
            CommitUnknownError: it has not, in time.
        """
        if self.server is None or not self.server.waits_for_log:
            return
        millis = max(1, int(self._timeout_secs * 1000) - 1000)
        local = self._guard(lambda: self._ask("WAITAOF", 1, 0, millis), CommitUnknownError)[0]
        if int(local) < 1:
            self.close()
            raise CommitUnknownError(f"sink {self._sink!r}: {self._address.shown} has not written its log in time")

    def close(self) -> None:
        """Close the connection; whatever was not answered stays open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    # -- connecting -----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connect, check the server and give it the script, unless there is a connection.

        Raises:
            SinkError: the server cannot be reached, or is no place for this sink now.
            ConfigError: the server is a cluster, and the sink's keys do not fit into one slot.
        """
        if self._connection is not None:
            return
        self._connection = self._open(self._address.host, self._address.port)
        try:
            self._check()
            self.sha = self._guard(lambda: self._ask("SCRIPT", "LOAD", SCRIPT), SinkError).decode()
        except BaseException:
            self.close()
            raise

    def check_promises(self) -> None:
        """Refuse a server that may forget rows or heads; its settings may have changed since the connection began.

        Raises:
            SinkError: it names the setting.
        """
        self.connect()
        try:
            self._check_promises(self._guard(self._info, SinkError))
        except SinkError:
            self.close()  # another connection may lead to another server
            raise

    def _open(self, host: str, port: int) -> Any:
        made: Any = self._redis.SSLConnection if self._address.tls else self._redis.Connection
        connection = made(
            host=host,
            port=port,
            db=self._address.db,
            username=self._address.username,
            password=self._address.password,
            socket_timeout=self._timeout_secs,
            socket_connect_timeout=min(CONNECT_SECONDS, self._timeout_secs),
            socket_keepalive=True,
            protocol=2,
            client_name=None,
            retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            **self._address.tls_files,
        )
        self._guard(connection.connect, SinkError)
        return connection

    def _check(self) -> None:
        info = self._guard(self._info, SinkError)
        version = tuple(int(part) for part in info.get("redis_version", "0").split(".")[:2])
        is_cluster = info.get("cluster_enabled") == "1"
        if is_cluster:
            self._check_cluster()
            info = self._guard(self._info, SinkError)
        self.server = Server(version, is_cluster, waits_for_log=False)
        self._check_promises(info)

    def _check_cluster(self) -> None:
        """Move to the node that has the key."""
        if not hash_tag(self._key):
            raise ConfigError(
                f"sink {self._sink!r}: {self._address.shown} is a cluster, which takes one stream with a hash tag",
                hint="Write `mode: stream` and a stream with a tag in braces, e.g. stream: '{orders}'.",
            )
        slot = int(self._guard(lambda: self._ask("CLUSTER", "KEYSLOT", self._key), SinkError))
        for first, last, node, *_ in self._guard(lambda: self._ask("CLUSTER", "SLOTS"), SinkError):
            host, port = node[0].decode() or self._address.host, int(node[1])
            if int(first) <= slot <= int(last):
                if (host, port) != (self._address.host, self._address.port):
                    self.close()
                    self._connection = self._open(host, port)
                return
        raise SinkError(f"sink {self._sink!r}: no node of the cluster {self._address.shown} has slot {slot}")

    def _check_promises(self, info: dict[str, str]) -> None:
        assert self.server is not None
        where = f"sink {self._sink!r}: {self._address.shown}"
        if info.get("role") != "master":
            raise SinkError(f"{where} is a replica", hint="Name the primary server in url.")
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            raise SinkError(
                f"{where} has maxmemory-policy {policy}: it may evict rows, and what Firnline knows of them",
                hint="CONFIG SET maxmemory-policy noeviction, or use another server.",
            )
        if not self._require_log:
            return
        hint = "CONFIG SET appendonly yes, CONFIG SET appendfsync always; or write `durability: none` on the sink."
        if info.get("aof_enabled") != "1":
            raise SinkError(f"{where} keeps no log (appendonly no): it forgets rows when it restarts", hint=hint)
        fsync = self._fsync_policy()
        waits = fsync != "always"
        if waits and self.server.version < WAITAOF_SINCE:
            raise SinkError(f"{where} has appendfsync {fsync}: it may forget the last rows after a crash", hint=hint)
        self.server = Server(self.server.version, self.server.is_cluster, waits)

    def _fsync_policy(self) -> str:
        try:
            found = self._guard(lambda: self._ask("CONFIG", "GET", "appendfsync"), SinkError)
        except SinkError as error:
            raise SinkError(
                f"sink {self._sink!r}: {self._address.shown} does not say whether its log is durable: {error.message}",
                hint="Allow this user CONFIG GET, or write `durability: none` on the sink.",
            ) from error
        return found[1].decode() if len(found) > 1 else "unknown"

    def _info(self) -> dict[str, str]:
        lines = self._ask("INFO").decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))

    def _ask(self, *words: str | int) -> Any:
        self._connection.send_command(*words, check_health=False)
        return self._connection.read_response()

    def _guard(self, call: Callable[[], T], lost: type[SinkError]) -> T:
        """Perform a call; what goes wrong with the connection becomes an error of the class `lost`."""
        where = f"sink {self._sink!r} ({self._address.shown})"
        try:
            return call()
        except self._redis.exceptions.NoScriptError as error:
            self.close()
            raise ScriptLostError from error
        except (self._redis.exceptions.AuthenticationError, self._redis.exceptions.NoPermissionError) as error:
            self.close()
            raise SinkError(
                f"{where} refuses this user: {error}", hint="Check user and password in the url of the sink."
            ) from error
        except self._redis.exceptions.ConnectionError as error:
            self.close()
            raise lost(f"{where} cannot be reached: {error}", hint=_REACH_HINT, sink=self._sink) from error
        except self._redis.exceptions.TimeoutError as error:
            self.close()
            raise lost(f"{where} does not answer: {error}", hint=_REACH_HINT, sink=self._sink) from error
        except self._redis.exceptions.ResponseError as error:
            if isinstance(error, self._redis.exceptions.MovedError):
                self.close()
            raise SinkError(f"{where} refuses the call: {error}", sink=self._sink) from error
        except OSError as error:
            self.close()
            raise lost(describe_failure(where, "connection", error), sink=self._sink) from error
