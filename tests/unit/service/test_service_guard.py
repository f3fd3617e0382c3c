"""The guard behind a proxy: only the proxy may connect, and it says who asks."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from firnline.clock import SystemClock
from firnline.service.access.guard import FAILURES, Guard, Rules, is_known_host
from firnline.service.access.sessions import Sessions
from firnline.service.access.tokens import Tokens, hash_token

FORWARDED = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https", "Host": "pipelines.example"}
BEARER = {"Authorization": "Bearer right"}


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"tokens": [{"name": "ann", "role": "read", "hash": hash_token("right")}]}))
    path.chmod(0o600)
    clock = SystemClock()
    tokens = Tokens(path, clock)
    rules = Rules(frozenset(("pipelines.example",)), secure=True, proxies=(ipaddress.ip_network("10.0.0.0/24"),))

    def show(request: Request) -> JSONResponse:
        assert request.client is not None
        return JSONResponse({"client": request.client.host})

    app = Starlette(routes=[Route("/", show), Route("/healthz", show)])
    guard = Guard(app, tokens, Sessions(b"k" * 32, tokens, clock), rules, clock)
    return TestClient(guard, client=("10.0.0.7", 1))


def test_the_proxy_says_who_asks(client: TestClient) -> None:
    answer = client.get("/", headers={**FORWARDED, **BEARER})
    assert (answer.status_code, answer.json()) == (200, {"client": "203.0.113.9"})
    assert answer.headers["strict-transport-security"]
    forged = {**FORWARDED, "X-Forwarded-For": "1.1.1.1, 203.0.113.9, 10.0.0.3"}
    assert client.get("/", headers={**forged, **BEARER}).json() == {"client": "203.0.113.9"}


@pytest.mark.parametrize(
    "changed",
    [{"X-Forwarded-Proto": "http"}, {"X-Forwarded-Proto": ""}, {"X-Forwarded-For": ""}, {"Host": "evil.example"}],
)
def test_what_the_proxy_does_not_vouch_for_is_refused(client: TestClient, changed: dict[str, str]) -> None:
    assert client.get("/", headers={**FORWARDED, **BEARER, **changed}).status_code == 403


def test_nobody_comes_around_the_proxy(client: TestClient) -> None:
    direct = TestClient(client.app, client=("203.0.113.9", 1))
    assert direct.get("/", headers={**FORWARDED, **BEARER}).status_code == 403
    assert direct.get("/healthz", headers={"Host": "10.1.2.3:8080"}).status_code == 200


def test_wrong_tokens_are_counted_per_client_not_per_proxy(client: TestClient) -> None:
    wrong = {**FORWARDED, "Authorization": "Bearer wrong"}
    codes = [client.get("/", headers=wrong).status_code for _ in range(FAILURES + 1)]
    assert codes == [401] * FAILURES + [429]
    assert client.get("/", headers={**FORWARDED, **BEARER, "X-Forwarded-For": "203.0.113.10"}).status_code == 200


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        ("203.0.113.9:{port}", "203.0.113.9"), ("[2001:db8::1]:{port}", "2001:db8::1"),
        ("[2001:DB8::1]", "2001:db8::1"), ("2001:db8:0::1", "2001:db8::1"), ("::ffff:203.0.113.9", "203.0.113.9"),
        ("203.0.113.9:{port}, 10.0.0.3:{port}", "203.0.113.9"), ("unknown:{port}", "unknown"),
    ],
)  # fmt: skip
def test_wrong_tokens_are_counted_per_address_whatever_its_port(
    client: TestClient, forwarded: str, address: str
) -> None:
    def asked(port: int, bearer: str) -> dict[str, str]:
        named = {"X-Forwarded-For": forwarded.format(port=port), "Authorization": f"Bearer {bearer}"}
        return {**FORWARDED, **named}

    assert client.get("/", headers=asked(40_000, "right")).json() == {"client": address}
    codes = [client.get("/", headers=asked(50_000 + number, "wrong")).status_code for number in range(FAILURES + 1)]
    assert codes == [401] * FAILURES + [429]


def test_the_line_that_the_proxy_adds_counts_not_the_one_of_the_client(client: TestClient) -> None:
    base = [*((key, value) for key, value in FORWARDED.items() if key != "X-Forwarded-For"), *BEARER.items()]
    lines = [("X-Forwarded-For", "198.51.100.1"), ("X-Forwarded-For", "203.0.113.9")]
    assert client.get("/", headers=[*base, *lines]).json() == {"client": "203.0.113.9"}
    schemes = [("X-Forwarded-Proto", "http")]  # the last one counts
    assert client.get("/", headers=[*base, *lines, *schemes]).status_code == 403


def test_wrong_tokens_lock_nobody_out_who_was_let_in_before(client: TestClient) -> None:
    assert client.get("/", headers={**FORWARDED, **BEARER}).status_code == 200
    wrong = {**FORWARDED, "Authorization": "Bearer wrong"}
    assert [client.get("/", headers=wrong).status_code for _ in range(FAILURES + 1)][-1] == 429
    assert client.get("/", headers={**FORWARDED, **BEARER}).status_code == 200


@pytest.mark.parametrize(
    ("header", "known"),
    [
        ("localhost:8080", True), ("127.0.0.1", True), ("[::1]:8080", True), ("me.example", True),
        ("ME.example:1", True), ("", False), ("evil.example", False), ("10.0.0.1", False),
        ("localhost.evil.example", False),
    ],
)  # fmt: skip
def test_names_of_this_service(header: str, known: bool) -> None:
    assert is_known_host(header, ["me.example"]) is known


def test_a_length_that_is_no_number_is_refused(client: TestClient) -> None:
    assert client.get("/", headers={**FORWARDED, **BEARER, "Content-Length": "-1"}).status_code == 413
