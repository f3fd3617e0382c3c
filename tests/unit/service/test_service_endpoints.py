"""Metrics and health over real sockets: who may read what, and where it may be served. Loopback addresses only."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from firnline.errors import ConfigError, SinkError
from firnline.service.endpoints import Endpoints, ServeAt
from firnline.service.health import Health
from firnline.service.metrics_token import load_token
from firnline.sinks.base import Head

TOKEN = "a-token-of-many-letters"


@pytest.fixture
def health() -> Health:
    return Health("flights", lambda: 0.0)


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("firnline_things", "Things.", registry=registry).inc()
    return registry


def get(served: Endpoints, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"{served.url}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def get_json(served: Endpoints, path: str, **headers: str) -> tuple[int, Any]:
    status, body = get(served, path, **headers)
    return status, json.loads(body)


def test_endpoints_answer_with_status_and_reasons(health: Health, registry: CollectorRegistry) -> None:
    with Endpoints(registry, health, ServeAt(0)) as served:
        assert get(served, "/healthz")[0] == 200
        status, body = get_json(served, "/readyz")
        assert (status, body["reasons"]) == (503, ["the sinks have not been read yet"])
        health.started("r", Head(exists=True, version=3, epoch=2))
        status, body = get_json(served, "/readyz?verbose")
        assert (status, body["epoch"]) == (200, 2)
        health.stopped(3)
        assert get(served, "/healthz")[0] == 503
        assert get(served, "/metrics")[0] == 200
        assert get(served, "/")[0] == 404


def test_a_port_that_is_taken_is_a_configuration_error(health: Health, registry: CollectorRegistry) -> None:
    with Endpoints(registry, health, ServeAt(0)) as served, pytest.raises(ConfigError, match="cannot serve"):
        Endpoints(registry, health, ServeAt(served.port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_any_address_but_loopback_is_refused_without_a_token(
    health: Health, registry: CollectorRegistry, host: str
) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with pytest.raises(ConfigError, match="needs a token") as caught:
        Endpoints(registry, health, ServeAt(0, host))
    assert "--metrics-token-file" in caught.value.hint


@pytest.mark.parametrize("host", ["", "no such host", "a..b"])
def test_a_host_that_is_none_is_a_configuration_error(health: Health, registry: CollectorRegistry, host: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve metrics on|needs a token"):
        Endpoints(registry, health, ServeAt(0, host))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_every_loopback_address_serves_without_a_token(health: Health, registry: CollectorRegistry, host: str) -> None:
    try:
        served = Endpoints(registry, health, ServeAt(0, host))
    except ConfigError:
        assert host in ("127.0.0.2", "::1"), "only addresses that a machine may lack"
        pytest.skip(f"this machine has no {host}")
    with served:
        assert "firnline_things_total 1.0" in get(served, "/metrics")[1]


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        (None, 401),
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),  # the scheme is not case-sensitive
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer ", 401),
        ("Bearer", 401),
        (f"Basic {TOKEN}", 401),
        (TOKEN, 401),
        ("Bearer tökén", 401),
    ],
)
def test_metrics_need_the_token(health: Health, registry: CollectorRegistry, shown: str | None, status: int) -> None:
    headers = {} if shown is None else {"Authorization": shown}
    with Endpoints(registry, health, ServeAt(0, token=TOKEN)) as served:
        answered, body = get(served, "/metrics", **headers)
    assert answered == status
    assert ("firnline_things" in body) == (status == 200)
    assert TOKEN not in body


def test_a_probe_without_the_token_learns_the_state_alone(health: Health, registry: CollectorRegistry) -> None:
    health.trouble(SinkError("s3://secret-bucket/orders is not reachable"), 3)
    with Endpoints(registry, health, ServeAt(0, token=TOKEN)) as served:
        assert get_json(served, "/readyz") == (503, {"status": "unavailable"})
        assert get_json(served, "/healthz") == (503, {"status": "unavailable"})
        _, body = get_json(served, "/readyz", Authorization=f"Bearer {TOKEN}")
        health.idle()
        assert get_json(served, "/healthz") == (200, {"status": "ok"})
    assert any("secret-bucket" in reason for reason in body["reasons"])
    assert body["pipeline"] == "flights"


@pytest.mark.parametrize(
    ("name", "is_trusted"),
    [
        ("localhost", True),
        ("127.0.0.1:9464", True),
        ("[::1]:9464", True),
        ("evil.example:9464", False),
        ("10.1.2.3", False),
    ],
)
def test_a_page_under_another_name_reads_nothing_from_loopback(
    health: Health, registry: CollectorRegistry, name: str, is_trusted: bool
) -> None:
    with Endpoints(registry, health, ServeAt(0)) as served:
        assert get(served, "/metrics", Host=name)[0] == (200 if is_trusted else 403)
        assert ("pipeline" in get_json(served, "/healthz", Host=name)[1]) == is_trusted


def test_the_token_of_an_address_is_in_no_repr() -> None:
    assert TOKEN not in repr(ServeAt(0, token=TOKEN))


# -- the file with the token ------------------------------------------------------------------------------


def test_a_missing_token_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    before = os.umask(0)
    try:
        token, is_new = load_token(file)
    finally:
        os.umask(before)
    assert is_new
    assert len(token) >= 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_token(file) == (token, False)
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_processes_that_start_together_agree_on_the_token(tmp_path: Path) -> None:
    barrier, tokens = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        tokens.append(load_token(tmp_path / "token"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({token for token, _ in tokens}) == 1
    assert [is_new for _, is_new in tokens].count(True) == 1


def test_a_token_of_yours_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o644)  # as Kubernetes mounts secrets
    assert load_token(file) == (TOKEN, False)


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "two words that are long", "ein-tökén-mit-umlauten", "x" * 5000]
)
def test_a_file_without_a_usable_token_is_refused_and_not_echoed(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ConfigError, match="holds no token") as caught:
        load_token(file)
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read or made: No such file or directory"):
        load_token(tmp_path / "nowhere" / "token")
