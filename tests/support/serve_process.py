"""`firnline serve` as a process that a fault kills: forked from the warm server, asked over HTTP.

Its runs are those of `tests.support.local_run`: processes in sessions of their own, which outlive it.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firnline import faults
from firnline.testing.faults import follow_points
from tests.support.kills import Trace
from tests.support.processes import KILLED, free_port
from tests.support.proof import covered
from tests.support.service import NAME, bearer, write_tokens

LOCAL_RUN = (sys.executable, "-m", "tests.support.local_run")
BEGIN_SECONDS = 20.0  # instead of a minute, for a launch that was cut off before its process was there
PATIENCE_SECONDS = 180.0
BESIDE = ("firnline look", "firnline supervisor")  # threads that belong to no request


class KilledError(Exception):
    """The service ended while it answered."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The status and the JSON of an answer."""

    status: int
    body: Any


class ServeProcess:
    """One `firnline serve` over a folder with a pipeline file."""

    def __init__(self, folder: Path, fault: str = "") -> None:
        self._folder = folder
        self._trace = folder / "trace"
        self._trace.unlink(missing_ok=True)
        (folder / "state").mkdir(exist_ok=True)
        if not (folder / "state" / "tokens.json").exists():
            write_tokens(folder / "state" / "tokens.json")
        self.port = free_port()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.warm"])
        self._process = context.Process(target=_serve, args=(str(folder), self.port, fault), daemon=True)
        self._process.start()
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and self._process.is_alive():
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._send("GET", "/readyz", None, "read").status == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the service does not serve:\n{self.log}")

    @property
    def log(self) -> str:
        path = self._folder / "serve.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def get(self, path: str, role: str = "admin") -> Any:
        """Ask for something of the pipeline; the answer must be a good one."""
        answer = self._send("GET", f"/api/v1/pipelines/{NAME}{path}", None, role)
        assert answer.status == 200, (path, answer)
        return answer.body

    def post(self, path: str, body: dict[str, Any] | None = None, role: str = "admin") -> Answer:
        """Have something done. KilledError if the service ended before it answered."""
        try:
            return self._send("POST", f"/api/v1/pipelines/{NAME}{path}", body, role)
        except (OSError, http.client.HTTPException) as error:
            raise KilledError(str(error)) from error

    def _send(self, method: str, path: str, body: dict[str, Any] | None, role: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        try:
            data = None if body is None else json.dumps(body)
            headers = {**bearer(role), "Content-Type": "application/json", "Cache-Control": "no-cache"}
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return Answer(answer.status, json.loads(answer.read()))
        finally:
            connection.close()

    def kill(self) -> None:
        """Kill it with SIGKILL, and count that."""
        self._process.kill()
        assert self.wait() == KILLED

    def wait(self) -> int:
        """Wait for its end; returns the exit code, or minus the signal."""
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        assert code is not None, "the service was not killed"
        covered["kills"] += code == KILLED
        return int(code)

    def close(self) -> None:
        """End it, if it is still there."""
        if self._process.is_alive():
            self._process.kill()
        self._process.join(PATIENCE_SECONDS)

    def trace(self) -> list[tuple[str, str]]:
        """The fault points that it has reached, each with the name of the thread."""
        if not self._trace.exists():
            return []
        return [tuple(line.split("\t")) for line in self._trace.read_text().splitlines()]  # type: ignore[misc]


def numbered(trace: list[tuple[str, str]]) -> Trace:
    """A trace with numbers for threads, as `moments` takes it."""
    names = list(dict.fromkeys(thread for thread, _ in trace))
    return [(names.index(thread), point) for thread, point in trace]


def fault_of(trace: list[tuple[str, str]], point: str, nth: int) -> str:
    """The fault that kills at the n-th call of a point of a trace: counted for its thread alone."""
    calls = [at for at, (_, one) in enumerate(trace) if one == point]
    thread = trace[calls[nth - 1]][0]
    own = sum(1 for one in trace[: calls[nth - 1] + 1] if one == (thread, point))
    return f"{point}@{thread}:{own}:kill"


@contextlib.contextmanager
def ending_runs(folder: Path) -> Iterator[None]:
    """Kill the runs of a folder at the end, with their launchers: by the process ids that their records name."""
    try:
        yield
    finally:
        for path in folder.glob("**/launches/*.process.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                record = json.loads(path.read_text())
                for one in ("launcher", "run"):
                    _kill(int(record[one]["pid"]), str(folder))


def _kill(pid: int, mark: str) -> None:
    """Kill a process if it is one of this folder: ids are used again."""
    with contextlib.suppress(OSError):
        if mark.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _serve(folder: str, port: int, fault: str) -> None:
    from firnline.cli.main import run_command
    from firnline.service.supervise import policy, supervisor

    output = os.open(f"{folder}/serve.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ[faults.VARIABLE] = fault
    policy.BEGIN_SECONDS = BEGIN_SECONDS
    supervisor.Settings = functools.partial(  # type: ignore[misc,assignment]
        supervisor.Settings, run_command=LOCAL_RUN, look_seconds=0.1, stagger_seconds=0.0
    )
    trace = os.open(f"{folder}/trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(point: str) -> None:
        os.write(trace, f"{threading.current_thread().name}\t{point}\n".encode())

    arguments = ["serve", f"{folder}/firnline.yml", "--state", f"{folder}/state", "--port", str(port)]
    with follow_points(note):
        os._exit(run_command(arguments))
