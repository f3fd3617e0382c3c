"""The service: its overview of 1,000 pipelines, its memory, its requests per second, and what a look costs a run.

The machine is shared: each figure has the load of the machine beside it, and requests also the CPU time of the service,
which others do not change much.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.cases import Row, World
from benchmarks.load import Client, put_load
from benchmarks.records import write_files
from benchmarks.turns import p50, p99, round_off

FIRST_BYTE_MS, PAGE_BYTES = 150, 200_000
MEMORY_MB = 200
PER_SECOND = 500
VIEWED = 0.99
ROUTES = (
    "",
    "/status",
    "/checkpoints",
    "/epochs",
    "/sinks",
    "/sources",
    "/files",
    "/runs",
    "/audit",
    "/spec",
    "/trend",
)
PAGES = ("", "/epochs", "/checkpoints", "/sources", "/sinks", "/files", "/quarantine", "/state", "/runs", "/audit")
CONNECTIONS = 8
ASKED_ABOUT = 20  # pipelines
SPEC = """\
name: {name}
sources:
  in: {{type: files, path: in}}
sinks:
  - {{type: delta, table: out}}
batch: {{max_files: 1}}
"""


@dataclass(frozen=True, slots=True)
class Served:
    """A service in a process of its own."""

    process: psutil.Process
    port: int
    token: str

    def get(self, path: str) -> bytes:
        return self._ask(path, None)

    def post(self, path: str, body: object) -> bytes:
        return self._ask(path, json.dumps(body).encode())

    def _ask(self, path: str, body: bytes | None) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        with urllib.request.urlopen(request) as answer:
            found: bytes = answer.read()
        return found

    def memory_mb(self, which: str = "VmRSS") -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(which)).split()[1]) / 1024

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[Served]:
    """Serve the pipelines of a folder, and wait until each was looked at once."""
    state = folder / "state"
    command = [sys.executable, "-m", "firnline", "serve", "--pipelines", str(folder / "pipelines"), "--only-watch"]
    process = subprocess.Popen(
        [*command, "--state", str(state), "--port", "0"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            if found := re.search(r"serving [0-9]+ pipelines on http://127\.0\.0\.1:([0-9]+)", line):
                port = int(found.group(1))
                break
        threading.Thread(target=process.stderr.read, daemon=True).start()
        served = Served(psutil.Process(process.pid), port, (state / "admin.token").read_text().strip())
        while True:
            with contextlib.suppress(OSError):
                served.get("/readyz")
                break
            time.sleep(0.1)
        yield served
    finally:
        process.terminate()
        process.wait()


def _write_pipelines(folder: Path, count: int, with_history: int) -> list[str]:
    """Write pipeline files; the first ones have two epochs. Returns the names of those."""
    from firnline.pipeline import Pipeline
    from firnline.testing.local import run_locally

    names = [f"flights-{number:04d}" for number in range(count)]
    for number, name in enumerate(names):
        home = folder / "pipelines" / name
        (home / "in").mkdir(parents=True)
        (home / "firnline.yml").write_text(SPEC.format(name=name))
        if number < with_history:
            for epoch in range(2):
                (home / "in" / f"{epoch}.ndjson").write_text('{"a": 1, "b": "x"}\n')
            run_locally(Pipeline.load(home / "firnline.yml").options)
    return names[:with_history]


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def overview(world: World) -> list[Row]:
    """The overview of 1,000 pipelines, made anew for each request."""
    folder = world.folder / "service-overview"
    count = max(20, int(1000 * world.scale))
    _write_pipelines(folder, count, max(2, int(100 * world.scale)))
    with _serving(folder) as served:
        served.get("/")  # the first answer waits for code that is loaded once
        found = []
        for _ in range(world.rounds(60)):
            client = Client(served.port, served.token, fresh=True)
            found.append(client.get("/"))
            client.close()
        assert {answer.status for answer in found} == {200}
    times, size = [answer.first_byte_ms for answer in found], max(answer.size_bytes for answer in found)
    first, name = p50(times), f"overview of {count} pipelines, first byte, p50, {_load()}"
    return [
        Row(name, round_off(first), "ms", aim=f"< {FIRST_BYTE_MS}", met=first < FIRST_BYTE_MS),
        Row("overview, first byte, p99", round_off(p99(times)), "ms"),
        Row("overview, page", round(size / 1000), "KB", aim=f"< {PAGE_BYTES // 1000}", met=size < PAGE_BYTES),
    ]


def memory(world: World) -> list[Row]:
    """100 pipelines: the service's memory at its start, after every page, and at its peak with load and a rollback."""
    folder = world.folder / "service-memory"
    count = max(5, int(100 * world.scale))
    names = _write_pipelines(folder, count, count)
    with _serving(folder) as served:
        at_start = served.memory_mb()
        for name in names:
            for page in PAGES:
                served.get(f"/p/{name}{page}")
            for route in ROUTES:
                served.get(f"/api/v1/pipelines/{name}{route}")
        after_pages = served.memory_mb()
        paths = [f"/api/v1/pipelines/{name}{route}" for route in ROUTES for name in names]
        seconds = 1.0 if world.is_trial else 10.0
        put_load(served.port, served.token, paths, connections=CONNECTIONS, seconds=seconds, fresh=True)
        for name in names[:5]:
            plan = json.loads(served.post(f"/api/v1/pipelines/{name}/rollback", {"to": 1}))
            receipt = json.loads(served.post(f"/api/v1/pipelines/{name}/plans/{plan['id']}/confirm", {}))
            assert receipt["result"]["new_epoch"] == 3, receipt
        peak = served.memory_mb("VmHWM")
    return [
        Row(f"memory of the service, {count} pipelines, at its start", round(at_start), "MB"),
        Row("after every page of every pipeline", round(after_pages), "MB"),
        Row("at its peak, with load and 5 rollbacks", round(peak), "MB", aim=f"< {MEMORY_MB}", met=peak < MEMORY_MB),
    ]


def rate(world: World) -> list[Row]:
    """Requests per second on the read routes, in turns: answers that may be kept for two seconds, and none that was."""
    folder = world.folder / "service-rate"
    names = _write_pipelines(folder, max(5, int(100 * world.scale)), max(2, int(ASKED_ABOUT * world.scale)))
    paths = [f"/api/v1/pipelines/{name}{route}" for route in ROUTES for name in names]
    paths += ["/api/v1/pipelines", "/", *(f"/p/{name}" for name in names)]
    found: dict[bool, list[tuple[float, float, str]]] = {False: [], True: []}
    with _serving(folder) as served:
        for path in paths:
            served.get(path)
        for _ in range(world.rounds(3)):
            for fresh in found:
                cpu = served.cpu_seconds()
                seconds = 1.0 if world.is_trial else 8.0
                load = put_load(served.port, served.token, paths, connections=CONNECTIONS, seconds=seconds, fresh=fresh)
                assert not load.failed, load
                cost = (served.cpu_seconds() - cpu) / load.answered * 1000
                found[fresh].append((load.per_second, cost, _load()))
    rows = []
    for fresh, told in ((False, "read routes"), (True, "read routes, every answer made anew")):
        best, _, at = max(found[fresh])
        cost = min(one[1] for one in found[fresh])
        aim, met = (f">= {PER_SECOND}", best >= PER_SECOND) if not fresh else ("", None)
        rows.append(Row(f"{told}, best of {len(found[fresh])}, {at}", round(best), "requests/s", aim=aim, met=met))
        rows.append(Row(f"{told}, CPU time of the service", round_off(cost), "ms/request"))
    return rows


_RUN = """
import sys, time
from firnline.pipeline import Pipeline
from firnline.testing.local import run_locally
options = Pipeline.load(sys.argv[1]).options
run_locally(Pipeline.load(sys.argv[2]).options)
began, cpu = time.monotonic(), time.process_time()
run_locally(options)
print(time.monotonic() - began, time.process_time() - cpu)
"""


def viewers(world: World) -> list[Row]:
    """A run while a browser loads its page every second, in turns with one that nobody looks at; both are watched."""
    folder = world.folder / "service-viewers"
    records, files = max(200, int(20_000 * world.scale)), max(3, int(40 * world.scale))
    for name in ("viewed", "warm"):
        home = folder / "pipelines" / name
        write_files(home / "in", files if name == "viewed" else 1, records)
        (home / "firnline.yml").write_text(SPEC.format(name=name))
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    with _serving(folder) as served:
        for number in range(world.rounds(7) + 1):
            for is_viewed in (False, True) if number % 2 else (True, False):  # neither is always the first
                seconds = _run_viewed(folder / "pipelines", served, is_viewed=is_viewed)
                if number:
                    found[is_viewed].append(seconds)
    rows = []
    for at, unit in ((0, "rows/s"), (1, "rows/s of its CPU time")):
        alone, viewed = (statistics.median(one[at] for one in found[is_viewed]) for is_viewed in (False, True))
        ratio = alone / viewed
        name = f"a run whose page is loaded every second, beside one that nobody looks at, {_load()}"
        figures = (round(records * files / viewed), unit, round(records * files / alone), round_off(ratio))
        rows.append(Row(name, *figures, f">= {VIEWED}", ratio >= VIEWED))
    return rows


def _run_viewed(folder: Path, served: Served, *, is_viewed: bool) -> tuple[float, float]:
    """Run the pipeline from its beginning; returns its seconds and its CPU time."""
    for name in ("viewed", "warm"):
        for left in [path for path in (folder / name).iterdir() if path.name not in ("in", "firnline.yml")]:
            shutil.rmtree(left)
    ended = threading.Event()

    def look() -> None:
        while is_viewed and not ended.wait(1.0):
            served.get("/p/viewed")

    viewer = threading.Thread(target=look)
    viewer.start()
    try:
        specs = [str(folder / name / "firnline.yml") for name in ("viewed", "warm")]
        done = subprocess.run([sys.executable, "-c", _RUN, *specs], capture_output=True, text=True, check=True)
    finally:
        ended.set()
        viewer.join()
    wall, cpu = done.stdout.split()[-2:]
    return float(wall), float(cpu)
