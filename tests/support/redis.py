"""A real Redis server for tests: in a folder of its own, on 127.0.0.1, stopped by its process id."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from firnline.clock import monotonic
from tests.support.processes import free_port, wait_until

if TYPE_CHECKING:
    import redis

START_SECONDS = 180.0


class RedisServer:
    """One server. It keeps its address over `stop`, `kill` and `start`, and as much data as its options say."""

    def __init__(self, folder: Path, **options: str) -> None:
        self._folder = folder
        self._options = {"save": "", "appendonly": "yes", "appendfsync": "always", **options}
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        import redis

        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=60)

    def start(self, **options: str) -> None:
        """Start with the options that it had and these, and wait until it answers."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("redis-server is not installed: bash scripts/ensure_servers.sh")
        self._options |= options
        words = [word for name, value in self._options.items() for word in (f"--{name.replace('_', '-')}", value)]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder),
                 "--daemonize", "no", *words],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = monotonic() + START_SECONDS
        process = self._process
        wait_until(lambda: self._answers() or process.poll() is not None or monotonic() > deadline)
        if not self._answers():
            raise RuntimeError(f"Redis did not start:\n{(self._folder / 'log').read_text()[-2000:]}")

    def clear(self) -> None:
        """Remove everything; start the server if a test has left it stopped."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        with contextlib.closing(self.client()) as client:
            client.flushall()
            client.script_flush()

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(120)
        self._process = None

    def _answers(self) -> bool:
        import redis

        with contextlib.closing(self.client()) as client:
            try:
                return bool(client.ping())
            except redis.RedisError:  # refused, or still loading
                return False


@contextlib.contextmanager
def running_redis(**options: str) -> Iterator[RedisServer]:
    """A server, from nothing to gone; `options` are those of its configuration, with `_` for `-`."""
    with tempfile.TemporaryDirectory(prefix="firnline-redis-") as folder:
        server = RedisServer(Path(folder), **options)
        try:
            server.start()
            yield server
        finally:
            server.stop()
