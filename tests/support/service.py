"""A service over one pipeline in a folder, without a network: for tests of its routes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from starlette.testclient import TestClient

from firnline.clock import SystemClock
from firnline.options import PipelineOptions
from firnline.pipeline import Pipeline
from firnline.service.access.guard import Rules
from firnline.service.access.sessions import Sessions
from firnline.service.access.tokens import Role, Tokens, hash_token
from firnline.service.api.common import Service
from firnline.service.app import make_app
from firnline.service.registry import Registry
from firnline.service.supervise.supervisor import Settings, Supervisor
from firnline.testing.local import run_locally
from firnline.types import RandomIds

ROLES: tuple[Role, ...] = ("read", "operate", "admin")
BASE = "http://127.0.0.1:8080"
NAME = "flights"
SPEC = """\
name: flights
sources:
  in: {type: files, path: in}
sinks:
  - {type: delta, table: out}
"""


def bearer(role: str) -> dict[str, str]:
    """The header of the token with this role, which `write_tokens` makes; only that of `admin` may see records."""
    return {"Authorization": f"Bearer token-of-{role}"}


def write_tokens(path: Path) -> None:
    """Write a file with one token per role."""
    tokens = [{"name": r, "role": r, "hash": hash_token(f"token-of-{r}"), "data": r == "admin"} for r in ROLES]
    path.write_text(json.dumps({"tokens": tokens}))
    path.chmod(0o600)


def write_pipeline(folder: Path, spec: str = SPEC) -> PipelineOptions:
    """Write a pipeline that reads the folder `in`."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    (folder / "firnline.yml").write_text(spec)
    return Pipeline.load(folder / "firnline.yml").options


def run_epochs(folder: Path, count: int, start: int = 1) -> None:
    """Commit epochs with one row each: numbers from `start` on."""
    options = Pipeline.load(folder / "firnline.yml").options
    for number in range(start, start + count):
        (folder / "in" / f"f{number:04}.ndjson").write_text(f'{{"a": {number}}}\n')
        run_locally(options)


@contextlib.contextmanager
def serving(folder: Path, settings: Settings | None = None) -> Iterator[tuple[TestClient, Service]]:
    """Serve the pipeline of a folder; yields a client without a token, and the service."""
    state = folder / "state"
    state.mkdir(exist_ok=True)
    if not (state / "tokens.json").exists():
        write_tokens(state / "tokens.json")
    clock = SystemClock()
    tokens = Tokens(state / "tokens.json", clock)
    settings = settings or Settings(str(state), only_watches=True, look_seconds=0.05)
    registry = Registry([folder / "firnline.yml"], os.environ)
    with Supervisor(registry, settings, clock, RandomIds(), dict(os.environ)) as supervisor:
        service = Service(supervisor, tokens, Sessions(b"k" * 32, tokens, clock), clock)
        yield TestClient(make_app(service, Rules()), base_url=BASE, raise_server_exceptions=False), service


def rows(folder: Path) -> list[int]:
    """The rows of the table, read by DuckDB."""
    import duckdb
    from deltalake import DeltaTable

    files = DeltaTable(str(folder / "out")).file_uris()
    if not files:
        return []
    found = duckdb.sql(f"select a from read_parquet({files}, hive_partitioning=false) order by a").fetchall()
    return [int(row[0]) for row in found]
