"""The REST interface over a real pipeline: who may do what, and the same facts as the command line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from firnline.clock import SystemClock
from firnline.pipeline import Pipeline
from firnline.service.access.guard import MAX_BODY_BYTES, Rules
from firnline.service.access.sessions import COOKIE, Sessions
from firnline.service.access.tokens import Role, Tokens, hash_token
from firnline.service.api.common import Service
from firnline.service.app import make_app
from firnline.service.registry import Registry
from firnline.service.supervise.supervisor import Settings, Supervisor
from firnline.testing.local import LocalEngine, run_locally
from firnline.types import RandomIds

ROLES: tuple[Role, ...] = ("read", "operate", "admin")
BASE = "http://127.0.0.1:8080"


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer token-of-{role}"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.ndjson").write_text('{"a": 1}\n{"a": 2}\nnot json\n')
    (tmp_path / "firnline.yml").write_text(
        "name: flights\nsources:\n  in: {type: files, path: in}\nsinks:\n  - {type: delta, table: out}\n"
    )
    return tmp_path


@pytest.fixture
def service(folder: Path) -> Iterator[Service]:
    tokens = [
        {"name": role, "role": role, "hash": hash_token(f"token-of-{role}"), "data": role == "admin"} for role in ROLES
    ]
    file = folder / "tokens.json"
    file.write_text(json.dumps({"tokens": tokens}))
    file.chmod(0o600)
    clock = SystemClock()
    found = Tokens(file, clock)
    registry = Registry([folder / "firnline.yml"], os.environ)
    settings = Settings(str(folder / "state"), only_watches=True, look_seconds=0.05)
    with Supervisor(registry, settings, clock, RandomIds(), os.environ) as supervisor:
        yield Service(supervisor, found, Sessions(b"k" * 32, found, clock), clock)


@pytest.fixture
def client(service: Service) -> TestClient:
    return TestClient(make_app(service, Rules()), base_url=BASE, raise_server_exceptions=False)


def paths(client: TestClient) -> list[tuple[str, str]]:
    described = client.get("/api/v1/openapi.json", headers=bearer("read")).json()
    return [(method.upper(), path) for path, methods in described["paths"].items() for method in methods]


def test_no_route_answers_without_a_token(client: TestClient) -> None:
    found = paths(client)
    assert len(found) > 20
    for method, path in found:
        answer = client.request(method, path.replace("{name}", "flights"), headers={"Origin": BASE})
        assert answer.status_code == 401, (method, path)
        assert answer.headers["content-type"] == "application/problem+json"
    assert client.get("/api/v1/openapi.json").status_code == 401


def test_health_and_readiness_need_no_token(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    deadline = time.monotonic() + 60  # every pipeline is looked at once first
    while (answer := client.get("/readyz")).status_code == 503 and time.monotonic() < deadline:
        assert answer.json() == {"status": "starting"}
    assert answer.status_code == 200


def test_whatever_changes_something_needs_more_than_the_role_read(client: TestClient) -> None:
    for method, path in paths(client):
        if method != "GET" and not path.endswith("/validate"):  # which only looks
            answer = client.request(method, path.replace("{name}", "flights"), headers=bearer("read"))
            assert answer.status_code == 403, (method, path)
            assert answer.json()["code"] == "forbidden"


def test_a_page_of_another_origin_cannot_act_with_a_session(client: TestClient, service: Service) -> None:
    identity = service.tokens.get("operate")
    assert identity is not None
    cookie = service.sessions.begin(identity)
    client.cookies.set(COOKIE, cookie)
    url = "/api/v1/pipelines/flights/pause"
    assert client.get("/api/v1/pipelines").status_code == 200
    assert client.post(url).status_code == 403
    assert client.post(url, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post(url, headers={"Origin": "null"}).status_code == 403
    assert client.post(url, headers={"Origin": BASE}).status_code == 202


def test_a_name_that_resolves_to_loopback_is_refused(client: TestClient) -> None:
    answer = client.get("/api/v1/pipelines", headers={**bearer("read"), "Host": "evil.example:8080"})
    assert answer.status_code == 403


def test_wrong_tokens_are_limited_per_address(client: TestClient) -> None:
    codes = [client.get("/api/v1/pipelines", headers={"Authorization": "Bearer no"}).status_code for _ in range(12)]
    assert codes[0] == 401
    assert codes[-1] == 429


def test_large_bodies_are_refused(client: TestClient) -> None:
    answer = client.post(
        "/api/v1/pipelines/flights/pause", headers=bearer("operate"), content=b"x" * (MAX_BODY_BYTES + 1)
    )
    assert answer.status_code == 413


def test_every_answer_has_the_headers_that_keep_a_browser_safe(client: TestClient) -> None:
    for path in ("/healthz", "/api/v1/pipelines", "/nothing"):
        answer = client.get(path, headers=bearer("read"))
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize("name", ["nope", "../etc", "a b", "%2e%2e", "x" * 200, "<script>"])
def test_only_registered_names_are_known_and_the_input_is_not_repeated(client: TestClient, name: str) -> None:
    answer = client.get(f"/api/v1/pipelines/{name}/checkpoints", headers=bearer("read"))
    assert answer.status_code in (404, 422)
    assert name not in answer.text or name == "nope"
    assert "Traceback" not in answer.text


def test_the_short_paths_answer_the_same(client: TestClient) -> None:
    long, short = (client.get(f"{prefix}/pipelines", headers=bearer("read")).json() for prefix in ("/api/v1", ""))
    names = [[one["pipeline"] for one in answer["pipelines"]] for answer in (long, short)]
    assert names == [["flights"], ["flights"]]


def test_a_pipeline_that_has_never_run(client: TestClient) -> None:
    for part in ("checkpoints", "epochs", "files", "quarantine", "dead-letters", "sinks", "sources", "schemas", "state",
                 "savepoints", "runs", "status"):  # fmt: skip
        answer = client.get(f"/api/v1/pipelines/flights/{part}", headers=bearer("read"))
        assert answer.status_code == 200, (part, answer.text)


def test_the_history_of_a_pipeline(client: TestClient, service: Service, folder: Path) -> None:
    options = Pipeline.load(folder / "firnline.yml").options
    for number in range(4):
        (folder / "in" / f"b{number}.ndjson").write_text(f'{{"a": {number}}}\n')
        run_locally(options)

    def get(path: str, role: str = "read") -> dict[str, object]:
        answer = client.get(f"/api/v1/pipelines/flights/{path}", headers=bearer(role))
        assert answer.status_code == 200, answer.text
        found: dict[str, object] = answer.json()
        return found

    first = get("checkpoints?limit=3")
    second = get(f"checkpoints?limit=3&next={first['next']}")
    epochs = [row["epoch"] for page in (first, second) for row in page["checkpoints"]]  # type: ignore[attr-defined]
    newest = get("status")["epoch"]
    assert isinstance(newest, int)
    assert epochs == list(range(newest, 0, -1))[:6]
    assert newest >= 4
    assert get("checkpoints/2")["epoch"] == 2
    assert get("checkpoints/diff?from=1&to=3")["epochs"] == 2
    assert len(get("files")["files"]) == 5  # type: ignore[arg-type]
    assert get("quarantine")["reasons"] == {"not-json": 1}
    assert get("quarantine")["quarantine"] is None
    assert len(get("quarantine", "admin")["quarantine"]) == 1  # type: ignore[arg-type]
    assert client.get("/api/v1/pipelines/flights/checkpoints/99", headers=bearer("read")).status_code == 404
    assert client.get("/api/v1/pipelines/flights/checkpoints?next=%00", headers=bearer("read")).status_code == 422


def test_the_trend_of_a_run_is_shown(client: TestClient, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firnline.pipeline.SparkEngine", lambda *_, **__: LocalEngine())
    Pipeline.load(folder / "firnline.yml").run(once=True)
    for path in ("/api/v1/pipelines/flights/trend?days=7", "/pipelines/flights/trend"):
        body = client.get(path, headers=bearer("read")).json()
        assert body["damaged"] == []
        assert [point["rows"] for point in body["points"]] == [2]
        assert body["points"][0]["quarantined"] == 1
        assert body["points"][0]["durations_ms"].keys() >= {"plan", "run", "stage", "commit"}
    for days in ("0", "31", "x"):
        assert client.get(f"/pipelines/flights/trend?days={days}", headers=bearer("read")).status_code == 422


def test_columns_that_epochs_added_are_shown(client: TestClient, folder: Path) -> None:
    for name, text in (("a", '{"a": 3}'), ("b", '{"a": 4, "late": 1}'), ("c", '{"a": 5}')):
        (folder / "in" / f"later-{name}.ndjson").write_text(f"{text}\n")
        run_locally(Pipeline.load(folder / "firnline.yml").options)
    newest = client.get("/pipelines/flights/epochs", headers=bearer("read")).json()["epochs"][0]["epoch"]
    body = client.get("/pipelines/flights/schemas", headers=bearer("read")).json()
    assert body["schemas"] == []  # it captures no tables
    added = [(one["epoch"], one["added"]) for one in body["columns"] if one["added"]]
    assert added == [(newest - 1, {"late": "int64"})]
    page = client.get("/p/flights/schemas", headers={**bearer("read"), "Accept": "text/html"}).text
    assert "<code>late</code> int64" in page


def test_the_audit_says_who_wanted_what(client: TestClient) -> None:
    for verb in ("pause", "stop"):
        assert client.post(f"/pipelines/flights/{verb}", headers=bearer("operate")).status_code == 202
    assert client.post("/pipelines/flights/pause", headers=bearer("admin")).status_code == 202
    wishes = client.get("/pipelines/flights/audit", headers=bearer("read")).json()["wishes"]
    assert [(one["wanted"], one["by"]) for one in wishes] == [
        ("paused", "admin"),
        ("stopped", "operate"),
        ("paused", "operate"),
    ]
    assert wishes[0]["at"] > wishes[1]["at"] > wishes[2]["at"]
