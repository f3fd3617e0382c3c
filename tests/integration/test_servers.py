"""The servers that tests start: they keep what they acknowledged, are shared or their own, and leave nothing behind."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.kafka import KafkaServer, proxy_before, running_kafka, shared_kafka
from tests.support.processes import wait_until
from tests.support.proxy import Proxy, kafka_call, running_proxy
from tests.support.redis import RedisServer, running_redis

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def serve(end: socket.socket) -> None:
        with end:
            while data := _received(end):
                end.sendall(data)

    def accept() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(end,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.fixture
def proxy(echo: int) -> Iterator[Proxy]:
    with running_proxy(echo) as proxy:
        yield proxy


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1024)
    except ConnectionResetError:
        return b""


def connect(proxy: Proxy) -> socket.socket:
    end = socket.create_connection(("127.0.0.1", proxy.port), timeout=60)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def ask(end: socket.socket, text: bytes) -> bytes:
    end.sendall(text)
    return end.recv(1024)


def is_refused(proxy: Proxy) -> bool:
    """Whether a connection is closed: before, while or after it is used."""
    try:
        with connect(proxy) as end:
            return ask(end, b"two") == b""
    except OSError:
        return True


def silent(end: socket.socket) -> bool:
    """Whether nothing comes for a moment."""
    end.settimeout(0.3)
    try:
        return end.recv(1024) == b"never"
    except TimeoutError:
        return True
    finally:
        end.settimeout(60)


def test_a_proxy_drops_answers_after_the_nth(proxy: Proxy) -> None:
    with connect(proxy) as end:
        proxy.treat("drop", after=2)
        assert [ask(end, b"one"), ask(end, b"two")] == [b"one", b"two"]
        end.sendall(b"three")
        proxy.wait_until_hit()
        assert silent(end)
        proxy.heal()
        assert ask(end, b"four") == b"four"
        assert proxy.requests == 4  # the server has seen the third


def test_a_proxy_resets_at_the_answer_to_a_chosen_request(proxy: Proxy) -> None:
    with connect(proxy) as other, connect(proxy) as end:
        proxy.treat("reset", on=lambda data: data == b"commit")
        assert ask(end, b"insert") == b"insert"
        end.sendall(b"commit")
        with pytest.raises(ConnectionResetError):
            end.recv(1024)
        assert proxy.was_hit
        assert ask(other, b"select") == b"select"


def test_a_proxy_freezes_answers_until_it_is_healed(proxy: Proxy) -> None:
    with connect(proxy) as end:
        proxy.treat("freeze")
        end.sendall(b"one")
        proxy.wait_until_hit()
        assert silent(end)
        proxy.heal()
        assert end.recv(1024) == b"one"


def test_a_proxy_delays_answers(proxy: Proxy) -> None:
    with connect(proxy) as end:
        proxy.treat("delay", seconds=0.5)
        end.sendall(b"one")
        proxy.wait_until_hit()
        assert silent(end)
        assert end.recv(1024) == b"one"


def test_a_proxy_refuses_connections_until_it_is_healed(proxy: Proxy) -> None:
    with connect(proxy) as end:
        proxy.treat("refuse")
        end.sendall(b"one")
        with pytest.raises(ConnectionResetError):
            end.recv(1024)
    assert is_refused(proxy)
    proxy.heal()
    with connect(proxy) as end:
        assert ask(end, b"three") == b"three"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            end.recv(1024)


@pytest.mark.kafka
def test_workers_share_a_broker_and_the_last_one_ends_it(tmp_path: Path) -> None:
    with shared_kafka(tmp_path / "kafka") as server:
        keeper = json.loads((tmp_path / "kafka" / "address").read_text())["keeper"]
        other = subprocess.Popen(
            [sys.executable, "-c", USER, str(tmp_path / "kafka")], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        topic = other.stdout.readline().strip()
        assert server.values(topic) == [b"from the other worker"]
        broker = psutil.Process(keeper).children()[0]
    assert broker.is_running(), "the other worker still uses it"
    other.kill()  # it cannot say that it is done
    other.wait()
    wait_until(lambda: has_ended(keeper) and has_ended(broker.pid))
    assert not (tmp_path / "kafka" / "address").exists()


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is our child and waits for us to ask how it ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


USER = """
import sys, time
from pathlib import Path
from tests.support.kafka import shared_kafka
with shared_kafka(Path(sys.argv[1])) as server:
    topic = server.new_topic()
    server.produce(topic, ["from the other worker"])
    print(topic, flush=True)
    time.sleep(600)
"""


@pytest.mark.kafka
def test_a_broker_keeps_committed_records_over_stop_and_kill() -> None:
    with running_kafka() as server:
        topic = server.new_topic(2)
        server.produce(topic, ["a", "b"], partition=1, keys=["k", None], headers={"h": "1"})
        server.stop()
        server.start()
        server.produce(topic, ["c"], transactional_id="t", partition=0)
        server.produce(topic, ["lost"], transactional_id="t", partition=0, abort=True)
        server.kill()
        server.start()
        assert [(r.partition, r.value) for r in server.read(topic)] == [(0, b"c"), (1, b"a"), (1, b"b")]
        assert server.read(topic)[1][1:] == (0, b"k", b"a", {"h": b"1"})
        assert len(server.read(topic, isolation="read_uncommitted")) == 4
        server.delete_records(topic, 1, 1)
        assert server.values(topic) == [b"c", b"b"]


@pytest.mark.kafka
def test_a_lost_answer_to_a_kafka_commit_is_a_commit(kafka: KafkaServer) -> None:
    from confluent_kafka import KafkaException

    with proxy_before(kafka) as proxy:
        topic = kafka.new_topic()
        producer = kafka.producer(transactional_id=topic, bootstrap_servers=proxy.address)
        producer.init_transactions(60)
        producer.begin_transaction()
        producer.produce(topic, "a")
        producer.flush(60)
        proxy.treat("drop", on=kafka_call(26))
        with pytest.raises(KafkaException):
            producer.commit_transaction(3)
        assert proxy.was_hit
        wait_until(lambda: kafka.values(topic) == [b"a"])


@pytest.mark.redis
def test_a_redis_server_keeps_what_it_acknowledged(redis_server: RedisServer) -> None:
    client = redis_server.client()
    client.set("a", "1")
    redis_server.kill()
    redis_server.start()
    assert redis_server.client().get("a") == b"1"
    redis_server.clear()
    assert redis_server.client().get("a") is None


@pytest.mark.redis
def test_a_redis_server_without_a_log_forgets() -> None:
    with running_redis(appendonly="no") as server:
        server.client().set("a", "1")
        server.kill()
        server.start()
        assert server.client().get("a") is None


@pytest.mark.kafka
def test_the_fixture_gives_a_broker_that_runs(kafka: KafkaServer) -> None:
    topic = kafka.new_topic()
    kafka.produce(topic, ["a"])
    assert kafka.values(topic) == [b"a"]
