from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from firnline.options import PipelineOptions
    from tests.support.browser import Browser
    from tests.support.kafka import KafkaServer
    from tests.support.keyed import KeyedInput
    from tests.support.mariadb import MariaDbServer
    from tests.support.mysql import BinlogServer, MySqlServer
    from tests.support.pipelines import MakeOptions
    from tests.support.postgres import PostgresServer
    from tests.support.processes import Launcher
    from tests.support.redis import RedisServer
    from tests.support.samples import SampleInput

# The machine is shared and noisy: how long one example takes says nothing.
settings.register_profile("firnline", deadline=None)
settings.load_profile("firnline")


def pytest_collection_finish() -> None:
    """Modules and collected tests live until the end: no collection of garbage looks at them, and few run at all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Control sockets lie in a short folder, as sockets need; children find `tests.support`; output fits no screen."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.delenv("COLUMNS", raising=False)  # of a test's terminal or runner: output is then as wide as it is
        patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)  # children use tests.support
        yield


@pytest.fixture(autouse=True)
def note_proof(request: pytest.FixtureRequest) -> Iterator[None]:
    """Note what a test has searched and killed in pytest's report, where `scripts/run_tests.py` finds it."""
    from tests.support.proof import covered

    before = Counter(covered)
    yield
    added = covered - before
    if added:
        request.node.user_properties.append(("proof", json.dumps(added)))


@pytest.fixture
def sample(tmp_path: Path) -> SampleInput:
    """An input folder whose records are counted."""
    from tests.support.samples import SampleInput

    return SampleInput(tmp_path / "in")


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    """Starts pipelines in processes of their own."""
    from tests.support.processes import Launcher

    return Launcher(tmp_path / "children")


@pytest.fixture
def make_options(tmp_path: Path) -> MakeOptions:
    """Options of a pipeline from `in` to `out`; keyword arguments go to the part that has them."""
    from tests.support.pipelines import pipeline_options

    def make(**settings: Any) -> PipelineOptions:
        settings = {"path": str(tmp_path / "in"), "table": str(tmp_path / "out"), **settings}
        return pipeline_options(**settings)

    return make


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs use an engine in this process instead of Spark."""
    from firnline.testing.local import LocalEngine

    monkeypatch.setattr("firnline.jobs.spark.SparkEngine", lambda *_, **__: LocalEngine())


@pytest.fixture
def whole_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process wait for their sweeps, which they otherwise leave undone when the input ends."""
    from firnline.run import lanes

    monkeypatch.setattr(lanes, "ASIDE", tuple(name for name in lanes.ASIDE if name != "upkeep"))


@pytest.fixture
def keyed(tmp_path: Path) -> KeyedInput:
    """An input folder with keyed records."""
    from tests.support.keyed import KeyedInput

    return KeyedInput(tmp_path / "in")


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The address of an S3 server; a test makes a bucket of its own."""
    from tests.support.s3 import running_s3

    with running_s3() as url:
        yield url


@pytest.fixture(scope="session")
def started_postgres() -> Iterator[PostgresServer]:
    from tests.support.postgres import running_postgres

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


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A Kafka broker that all workers share: a test makes topics of its own, and neither stops nor kills the broker."""
    from tests.support.kafka import shared_kafka

    root = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent
    with shared_kafka(root / "kafka") as server:
        yield server


@pytest.fixture(scope="session")
def started_redis() -> Iterator[RedisServer]:
    from tests.support.redis import running_redis

    with running_redis() as server:
        yield server


@pytest.fixture
def redis_server(started_redis: RedisServer) -> RedisServer:
    """A Redis server that runs, writes every command to its log before it answers, and holds nothing."""
    started_redis.clear()
    return started_redis


@pytest.fixture(scope="session")
def started_mysql() -> Iterator[MySqlServer]:
    from tests.support.mysql import find_mysqld, running_mysql

    if find_mysqld() is None:
        pytest.skip("there is no MySQL server: bash scripts/fetch_mysql.sh")
    with running_mysql() as server:
        yield server


@pytest.fixture(scope="session")
def started_mariadb() -> Iterator[MariaDbServer]:
    from tests.support.mariadb import find_program, running_mariadb

    if find_program("mariadbd") is None:
        pytest.skip("MariaDB is not installed: bash scripts/ensure_servers.sh")
    with running_mariadb() as server:
        yield server


@pytest.fixture
def mysql(started_mysql: MySqlServer) -> MySqlServer:
    """A MySQL server that runs and holds no database of a test."""
    started_mysql.clear()
    return started_mysql


@pytest.fixture
def mariadb(started_mariadb: MariaDbServer) -> MariaDbServer:
    """A MariaDB server that runs and holds no database of a test."""
    started_mariadb.clear()
    return started_mariadb


BINLOG_SERVERS = [
    pytest.param("mysql", marks=pytest.mark.mysql),
    pytest.param("mariadb", marks=pytest.mark.mariadb),
]


@pytest.fixture(params=["postgres", *BINLOG_SERVERS])
def captured_server(request: pytest.FixtureRequest) -> Any:
    """The DSN of PostgreSQL, then MySQL and MariaDB: every kind of server whose changes are captured."""
    return request.getfixturevalue(request.param)


@pytest.fixture(params=BINLOG_SERVERS)
def binlog_server(request: pytest.FixtureRequest) -> BinlogServer:
    """MySQL, then MariaDB: a server that runs and holds no database of a test."""
    server: BinlogServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; the test is skipped where there is none."""
    from tests.support.browser import Browser, find_browser

    program = find_browser()
    if program is None:
        pytest.skip("the dashboard's tests need chromium: bash scripts/ensure_servers.sh")
    with Browser(program, tmp_path_factory.mktemp("browser")) as found:
        yield found
