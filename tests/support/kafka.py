"""A real Kafka broker for tests: KRaft, one node, in a folder of its own, on 127.0.0.1.

`running_kafka` starts a broker that belongs to one test, which may stop and kill it. `shared_kafka` gives the broker
that all workers of a test run share, since a JVM is heavy. A process of its own (`python -m tests.support.kafka`) keeps
that one, and ends it when the last worker has let go of a lock, also by being killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from firnline.clock import monotonic
from tests.support.processes import free_ports, wait_until
from tests.support.proxy import Proxy, running_proxy

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Producer
    from confluent_kafka.admin import AdminClient

START_SECONDS = 120.0
CALL_SECONDS = 60.0
MARKER_SECONDS = 5.0  # for the markers of a commit that was answered, or until a transaction counts as open
ROOT = Path(__file__).parent.parent.parent
JARS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "firnline-tests" / "kafka-4.1.0"
JVM = ["-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.apache.logging.log4j.level=WARN"]
SETTINGS = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}{listeners}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}{advertised}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT{protocols}
inter.broker.listener.name=PLAINTEXT
controller.listener.names=CONTROLLER
log.dirs={folder}/data
num.partitions=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=4000
num.network.threads=2
num.io.threads=4
log.cleaner.threads=1
log.cleaner.dedupe.buffer.size=4194304
log.cleaner.backoff.ms=200
log.retention.check.interval.ms=300
log.segment.delete.delay.ms=100
log.initial.task.delay.ms=100
"""


class Record(NamedTuple):
    """A record of a topic as a reader sees it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: dict[str, bytes]


class KafkaServer:
    """One broker. It keeps its data and its address over `stop`, `kill` and `start`."""

    def __init__(self, folder: Path, port: int = 0, behind: int = 0, proxied: int = 0) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._admin: AdminClient | None = None
        self._plain_producer: Producer | None = None
        self.port = port
        self.behind = behind  # where a proxy reaches the broker; the broker tells its clients that it is at `proxied`
        self.proxied = proxied

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    # -- the process --

    def create(self, settings: Mapping[str, str] | None = None, proxies: int = 1) -> list[tuple[int, int]]:
        """Make the broker's folder; `settings` are lines of its `server.properties` that differ.

        Returns the ports of so many proxies: where each reaches the broker, and where the broker says that it is.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self.port, controller = free_ports(2)
        pairs = list(zip(free_ports(proxies), free_ports(proxies), strict=True))
        self.behind, self.proxied = pairs[0]
        lines = SETTINGS.format(
            port=self.port,
            controller=controller,
            folder=self._folder,
            listeners="".join(f",PROXIED{n}://127.0.0.1:{behind}" for n, (behind, _) in enumerate(pairs)),
            advertised="".join(f",PROXIED{n}://127.0.0.1:{proxied}" for n, (_, proxied) in enumerate(pairs)),
            protocols="".join(f",PROXIED{n}:PLAINTEXT" for n in range(proxies)),
        )
        lines += "".join(f"{name}={value}\n" for name, value in (settings or {}).items())
        (self._folder / "server.properties").write_text(lines)
        done = subprocess.run(
            [*_java(), "kafka.tools.StorageTool", "format", "-t", _cluster_id(), "-c", self._settings],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"Kafka's storage could not be made: {done.stdout}{done.stderr}")
        return pairs

    def start(self) -> None:
        """Start on the port that it had, and wait until it answers."""
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [*_java(), "kafka.Kafka", self._settings], stdout=log, stderr=log, cwd=self._folder,
                start_new_session=True,  # Ctrl-C of a test run is not for it
            )  # fmt: skip
        deadline = monotonic() + START_SECONDS
        while not self.answers():
            if self._process.poll() is not None or monotonic() > deadline:
                raise RuntimeError(f"Kafka did not start:\n{(self._folder / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as kill -9 does; it recovers from its log at the next start."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing answers, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def answers(self) -> bool:
        """Return whether the broker takes requests; waits up to a second."""
        from confluent_kafka import KafkaException

        try:
            return bool(self.admin.list_topics(timeout=1).brokers)
        except KafkaException:
            return False

    def _end(self, number: int) -> None:
        self._admin = self._plain_producer = None
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    @property
    def _settings(self) -> str:
        return str(self._folder / "server.properties")

    # -- topics --

    @property
    def admin(self) -> AdminClient:
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            self._admin = AdminClient(self.client_settings())
        return self._admin

    def client_settings(self, **settings: Any) -> dict[str, Any]:
        """Return the settings of a client; in the names of `settings`, `_` stands for a dot."""
        quiet = {"bootstrap.servers": self.bootstrap, "log_level": 0, "reconnect.backoff.max.ms": 200}
        return quiet | {name.replace("_", "."): value for name, value in settings.items()}

    def new_topic(self, partitions: int = 1, **config: Any) -> str:
        """Create a topic whose name nobody else uses."""
        name = f"t-{uuid.uuid4().hex[:12]}"
        self.create_topic(name, partitions, **config)
        return name

    def create_topic(self, name: str, partitions: int = 1, **config: Any) -> None:
        """Create a topic and wait until it can be used; in the names of `config`, `_` stands for a dot."""
        from confluent_kafka.cimpl import NewTopic

        config = {key.replace("_", "."): str(value) for key, value in config.items()}
        topic = NewTopic(name, num_partitions=partitions, replication_factor=1, config=config)
        self.admin.create_topics([topic])[name].result(CALL_SECONDS)
        wait_until(lambda: self._leaders(name) == partitions, seconds=CALL_SECONDS)

    def add_partitions(self, name: str, total: int) -> None:
        from confluent_kafka.cimpl import NewPartitions

        self._plain_producer = None  # it would not know them at once
        self.admin.create_partitions([NewPartitions(name, total)])[name].result(CALL_SECONDS)
        wait_until(lambda: self._leaders(name) == total, seconds=CALL_SECONDS)

    def delete_topic(self, name: str) -> None:
        self._plain_producer = None  # a topic of the same name is another topic
        self.admin.delete_topics([name])[name].result(CALL_SECONDS)
        wait_until(lambda: name not in self.admin.list_topics(timeout=CALL_SECONDS).topics, seconds=CALL_SECONDS)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Move the log start of a partition, as retention does."""
        from confluent_kafka import TopicPartition

        target = TopicPartition(topic, partition, before)
        for future in self.admin.delete_records([target]).values():
            future.result(CALL_SECONDS)

    def _leaders(self, name: str) -> int:
        """Return how many partitions of a topic have a leader that answers: it may learn that it is one later."""
        import confluent_kafka.admin
        from confluent_kafka import KafkaException, TopicPartition

        library: Any = confluent_kafka.admin
        found = self.admin.list_topics(name, timeout=CALL_SECONDS).topics[name].partitions
        asked = {TopicPartition(name, n): library.OffsetSpec.latest() for n, one in found.items() if one.leader >= 0}
        answers = self.admin.list_offsets(asked, request_timeout=CALL_SECONDS).values() if asked else []
        count = 0
        for answer in answers:
            with contextlib.suppress(KafkaException):
                count += answer.result(CALL_SECONDS).offset >= 0
        return count

    # -- records --

    def producer(self, **settings: Any) -> Producer:
        from confluent_kafka import Producer

        return Producer(self.client_settings(**settings))

    def produce(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        keys: Sequence[bytes | str | None] | None = None,
        partition: int = -1,
        headers: Mapping[str, str | bytes] | None = None,
        timestamp: int = 0,
        transactional_id: str = "",
        abort: bool = False,
    ) -> None:
        """Produce records and wait until the broker has them; in one transaction, if an id is given."""
        if transactional_id:
            producer = self.producer(transactional_id=transactional_id, linger_ms=1)
            producer.init_transactions(CALL_SECONDS)
            producer.begin_transaction()
        else:
            producer = self._plain_producer or self.producer(enable_idempotence=True, linger_ms=1)  # retries keep order
            self._plain_producer = producer
        failed: list[object] = []

        def delivered(error: object, _: object) -> None:
            if error is not None:
                failed.append(error)

        for index, value in enumerate(values):
            key = keys[index] if keys is not None else None
            extra: dict[str, Any] = {"partition": partition} if partition >= 0 else {}
            while True:
                try:
                    producer.produce(
                        topic, value, key, headers=dict(headers) if headers else None, timestamp=timestamp,
                        on_delivery=delivered, **extra,
                    )  # fmt: skip
                    break
                except BufferError:
                    producer.poll(0.1)
        left = producer.flush(CALL_SECONDS)
        assert not left, f"{left} records were not delivered"
        assert not failed, failed[:3]
        if transactional_id:
            (producer.abort_transaction if abort else producer.commit_transaction)(CALL_SECONDS)

    def consumer(self, **settings: Any) -> Consumer:
        from confluent_kafka import Consumer

        fixed = {"group_id": f"test-{uuid.uuid4().hex}", "enable_auto_commit": False, "auto_offset_reset": "earliest"}
        return Consumer(self.client_settings(**(fixed | settings)))

    def read(self, topic: str, *, isolation: str = "read_committed") -> list[Record]:
        """Return all records of a topic, by partition and offset, up to the ends that stand at the call.

        A commit is answered before its markers are in every partition: waits for them, unless a transaction stays open.
        """
        from confluent_kafka import KafkaError, KafkaException, TopicPartition

        if isolation == "read_committed":
            self.await_markers(topic)
        # The broker answers at once at the end of a partition, and the client returns what it has.
        consumer = self.consumer(isolation_level=isolation, enable_partition_eof=True, fetch_wait_max_ms=10)
        try:
            numbers = consumer.list_topics(topic, timeout=CALL_SECONDS).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, 0) for number in numbers])
            waiting, records, deadline = set(numbers), list[Record](), monotonic() + CALL_SECONDS
            while waiting:
                assert monotonic() < deadline, f"{topic}: no end of {waiting}"
                for message in consumer.consume(10_000, 0.02):
                    error = message.error()
                    if error is None:
                        headers: dict[str, Any] = dict(message.headers() or [])
                        place = (message.partition() or 0, message.offset() or 0)
                        records.append(Record(*place, message.key(), message.value(), headers))
                        deadline = monotonic() + CALL_SECONDS
                    elif error.code() == KafkaError._PARTITION_EOF:
                        waiting.discard(message.partition() or 0)
                    else:
                        raise KafkaException(error)
        finally:
            consumer.close()
        return sorted(records, key=lambda record: record[:2])

    def await_markers(self, topic: str) -> None:
        """Wait until committed records can be read up to the ends that stand now, unless a transaction stays open."""
        from confluent_kafka import TopicPartition

        everything, committed = (
            self.consumer(isolation_level=isolation) for isolation in ("read_uncommitted", "read_committed")
        )
        try:
            numbers = everything.list_topics(topic, timeout=CALL_SECONDS).topics[topic].partitions
            places = [TopicPartition(topic, number) for number in numbers]
            ends = [everything.get_watermark_offsets(place, timeout=CALL_SECONDS)[1] for place in places]
            deadline = monotonic() + MARKER_SECONDS
            while monotonic() < deadline:
                stable = [committed.get_watermark_offsets(place, timeout=CALL_SECONDS)[1] for place in places]
                if all(found >= end for found, end in zip(stable, ends, strict=True)):
                    return
                time.sleep(0.02)
        finally:
            everything.close()
            committed.close()

    def values(self, topic: str) -> list[bytes | None]:
        """Return the committed values of a topic, by partition and offset."""
        return [record.value for record in self.read(topic)]


@contextlib.contextmanager
def running_kafka(settings: Mapping[str, str] | None = None) -> Iterator[KafkaServer]:
    """A broker that belongs to the caller, from nothing to gone."""
    with tempfile.TemporaryDirectory(prefix="firnline-kafka-", ignore_cleanup_errors=True) as folder:
        server = KafkaServer(Path(folder))
        server.create(settings)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@contextlib.contextmanager
def proxy_before(server: KafkaServer) -> Iterator[Proxy]:
    """A proxy before a broker: clients that start at the proxy's address stay behind it, all others never meet it."""
    with running_proxy(server.behind, port=server.proxied) as proxy:
        yield proxy


@contextlib.contextmanager
def shared_kafka(root: Path) -> Iterator[KafkaServer]:
    """The broker of a test run, whose workers share `root`. Nobody stops it; the last worker to leave ends it."""
    root.mkdir(parents=True, exist_ok=True)
    address, users = root / "address", root / "users"
    with open(root / "turn", "w") as turn, open(users, "w") as users_lock:
        fcntl.flock(turn, fcntl.LOCK_EX)
        fcntl.flock(users_lock, fcntl.LOCK_SH)  # waits for a keeper that is just ending its broker
        if not address.exists():
            _start_keeper(root, address)
        fcntl.flock(turn, fcntl.LOCK_UN)
        found = json.loads(address.read_text())
        behind, proxied = found["proxies"][_worker() % len(found["proxies"])]
        yield KafkaServer(root, found["port"], behind, proxied)


def _worker() -> int:
    """The number of this test process; each has its own proxy."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def _start_keeper(root: Path, address: Path) -> None:
    with open(root / "keeper.log", "ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", __name__, str(root)], stdout=log, stderr=log, cwd=ROOT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
    wait_until(lambda: address.exists() or keeper.poll() is not None, seconds=2 * START_SECONDS)
    if not address.exists():
        raise RuntimeError(f"no Kafka broker: {(root / 'keeper.log').read_text()[-2000:]}")


def _keep(root: Path) -> None:
    """Run a broker until nobody holds the users' lock. The starter holds it already."""
    with tempfile.TemporaryDirectory(prefix="firnline-kafka-", ignore_cleanup_errors=True) as folder:
        server = KafkaServer(Path(folder))
        proxies = server.create(proxies=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
        try:
            server.start()
            draft = root / "address.new"
            draft.write_text(json.dumps({"port": server.port, "keeper": os.getpid(), "proxies": proxies}))
            draft.rename(root / "address")
            with contextlib.suppress(FileNotFoundError), open(root / "users") as users:
                fcntl.flock(users, fcntl.LOCK_EX)
                (root / "address").unlink()
        finally:
            server.stop()


def _java() -> list[str]:
    java = shutil.which("java", path=f"{os.environ.get('JAVA_HOME', '')}/bin{os.pathsep}{os.environ.get('PATH', '')}")
    if java is None or not (JARS / "complete").exists():
        raise RuntimeError("Java or the Kafka broker's jars are missing: bash scripts/ensure_servers.sh")
    return [java, *JVM, "-cp", f"{JARS}/*"]


def _cluster_id() -> str:
    return urlsafe_b64encode(b"k" + uuid.uuid4().bytes[1:]).decode().rstrip("=")  # one with "-" first is no argument


if __name__ == "__main__":
    _keep(Path(sys.argv[1]))
