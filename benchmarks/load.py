"""A bounded load on loopback, `python -m benchmarks.load`: so many connections, each asks for the next path when it
has its answer, for so many seconds. In a process of its own, so that it shares no interpreter with what it measures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.turns import p50, p99
from firnline.clock import monotonic

TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `first_byte_ms` counts from before the request is sent."""

    status: int
    size_bytes: int
    first_byte_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a load. A refused or failed request counts as failed, and not as answered."""

    answered: int
    failed: int
    seconds: float
    p50_ms: float
    p99_ms: float

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds


class Client:
    """One connection that is kept open. With `fresh` it wants no answer that was kept."""

    def __init__(self, port: int, token: str, *, fresh: bool = False) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kept = "Cache-Control: no-cache\r\n" if fresh else ""
        self._head = f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n{kept}\r\n"

    def get(self, path: str) -> Answer:
        """Ask for a path, and read the answer to its end."""
        began = monotonic()
        self._socket.sendall(f"GET {path} HTTP/1.1\r\n{self._head}".encode())
        data = self._receive()
        first_byte_ms = (monotonic() - began) * 1000
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, body = data.partition(b"\r\n\r\n")
        status = int(head[9:12])
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        size = len(body)
        while size < length:
            size += len(self._receive())
        return Answer(status, size, first_byte_ms)

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the service closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()


def put_load(
    port: int, token: str, paths: Sequence[str], *, connections: int, seconds: float, fresh: bool = False
) -> Load:
    """Put a load on a service of this machine from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load", str(connections), str(seconds)]
    work = json.dumps({"client": {"port": port, "token": token, "fresh": fresh}, "paths": list(paths)})
    done = subprocess.run(command, input=work, capture_output=True, text=True, check=True)
    return Load(**json.loads(done.stdout))


def _work(client: Client, paths: Iterator[str], until: float, times: list[float], failures: list[str]) -> None:
    try:
        while (began := monotonic()) < until:
            path = next(paths)
            answer = client.get(path)
            if answer.status == 200:
                times.append((monotonic() - began) * 1000)
            else:
                failures.append(f"{answer.status} {path}")
    except OSError as error:
        failures.append(str(error))
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("connections", type=int)
    parser.add_argument("seconds", type=float)
    args = parser.parse_args()
    work = json.load(sys.stdin)
    times: list[float] = []
    failures: list[str] = []
    began = monotonic()
    threads = []
    for number in range(args.connections):
        start = len(work["paths"]) * number // args.connections  # connections ask for different paths
        paths = itertools.islice(itertools.cycle(work["paths"]), start, None)
        arguments = (Client(**work["client"]), paths, began + args.seconds, times, failures)
        threads.append(threading.Thread(target=_work, args=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = monotonic() - began
    if failures:
        print(f"{len(failures)} requests failed, the first: {failures[0]}", file=sys.stderr)
    load = Load(len(times), len(failures), seconds, p50(times or [0.0]), p99(times or [0.0]))
    print(json.dumps(asdict(load)))


if __name__ == "__main__":
    main()
