from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from firnline.options import PipelineOptions
    from firnline.testing.pipelines import MakeOptions
    from firnline.testing.postgres import PostgresServer
    from firnline.testing.processes import Launcher
    from firnline.testing.samples import SampleInput

# The machine is shared and noisy: how long one example takes says nothing.
settings.register_profile("firnline", deadline=None)
settings.load_profile("firnline")


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[None]:
    """Control sockets of runs lie in a folder of their own; a short one, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(autouse=True)
def note_proof(request: pytest.FixtureRequest) -> Iterator[None]:
    """Note what a test has searched and killed in pytest's report, where `scripts/run_tests.py` finds it."""
    from firnline.testing.proof import covered

    before = Counter(covered)
    yield
    added = covered - before
    if added:
        request.node.user_properties.append(("proof", json.dumps(added)))


@pytest.fixture
def sample(tmp_path: Path) -> SampleInput:
    """An input folder whose records are counted."""
    from firnline.testing.samples import SampleInput

    return SampleInput(tmp_path / "in")


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Starts pipelines in processes of their own."""
    from firnline.testing.processes import Launcher

    return Launcher(tmp_path / "children")


@pytest.fixture
def make_options(tmp_path: Path) -> MakeOptions:
    """Options of a pipeline from `in` to `out`; keyword arguments go to the part that has them."""
    from firnline.testing.pipelines import pipeline_options

    def make(**settings: Any) -> PipelineOptions:
        settings = {"path": str(tmp_path / "in"), "table": str(tmp_path / "out"), **settings}
        return pipeline_options(**settings)

    return make


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server; a test makes a bucket of its own."""
    from firnline.testing.s3 import running_s3

    with running_s3() as url:
        yield url


@pytest.fixture(scope="session")
def started_postgres() -> Iterator[PostgresServer]:
    from firnline.testing.postgres import running_postgres

    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_server(started_postgres: PostgresServer) -> PostgresServer:
    """A PostgreSQL server that runs and holds nothing of Firnline's."""
    started_postgres.clear()
    return started_postgres


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> str:
    """The DSN of a PostgreSQL server that holds nothing of Firnline's."""
    return postgres_server.dsn
