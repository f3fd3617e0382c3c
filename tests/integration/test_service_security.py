"""The security rules of the service, one test each; see also test_service_api (tokens, roles, Host, Origin, headers),
test_serve_command (loopback, TLS), test_guard (proxies), test_service_work (secrets) and the tests of specs."""

from __future__ import annotations

import ast
import asyncio
import base64
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

import firnline
from firnline.cli.server import Server
from firnline.errors import FirnlineError
from firnline.jobs.spark import DEFAULTS, LOCAL_DEFAULTS
from firnline.pipeline import Pipeline
from firnline.schema_registry import RegistryError, SchemaRegistry
from firnline.service.access.guard import HEADERS
from firnline.service.api.common import Service, ShownRoute
from firnline.service.app import API, PAGES, ROUTERS
from firnline.service.events import Events
from firnline.storage import LocalStorage
from firnline.testing.local import run_locally
from tests.support.receiver import Reply, running_receiver
from tests.support.service import NAME, SPEC, bearer, run_epochs, serving, write_pipeline

SOURCES = Path(firnline.__file__).parent
HOSTILE = ("..%2f..%2fetc%2fpasswd", "%00", "a" * 5000, "<script>", "'; drop table x; --", "$(id)", "%0d%0aX: y", "-1")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[TestClient, Service]]:
    write_pipeline(tmp_path)
    run_epochs(tmp_path, 1)
    with serving(tmp_path) as found:
        yield found


def describe(client: TestClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/api/v1/openapi.json", headers=bearer("read")).json()
    return found


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND")
OPEN = ("/healthz", "/readyz", "/login", "/static/{content_hash}/{name}")  # they tell nothing of a pipeline


def paths_of(routers: Iterable[APIRouter]) -> set[str]:
    return {str(getattr(route, "path", "")) for router in routers for route in router.routes}


def test_no_registered_path_answers_any_method_without_a_token(served: tuple[TestClient, Service]) -> None:
    client, _ = served
    found = {f"{prefix}{path}" for path in paths_of(ROUTERS) for prefix in (API, "")}
    found |= {*paths_of(PAGES), f"{API}/openapi.json"}
    assert {"/", "/p/{name}", "/metrics", "/pipelines/{name}/pause", "/api/v1/pipelines/{name}/rollback"} <= found
    assert len(found) > 120
    for path in sorted(found - set(OPEN)):
        url = path.replace("{name}", NAME).replace("{plan}", "0" * 16)
        for method in METHODS:
            answer = client.request(method, url, headers={"Origin": "http://127.0.0.1:8080"}, follow_redirects=False)
            assert answer.status_code == 401, (method, path)
            assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
        page = client.get(url, headers={"Accept": "text/html"}, follow_redirects=False)
        assert page.status_code == 401 or page.headers["location"].startswith("/login"), path


def test_ids_and_names_of_every_route_are_checked(served: tuple[TestClient, Service]) -> None:
    client, _ = served
    tried = 0
    for path, methods in describe(client)["paths"].items():
        parameters = re.findall(r"{(\w+)}", path)
        for method in methods:
            for hostile in HOSTILE if parameters else ():
                url = path
                for name in parameters:
                    value = NAME if name == "name" and len(parameters) > 1 else hostile
                    url = url.replace(f"{{{name}}}", value)
                answer = client.request(method, url, headers=bearer("admin"), json={} if method == "post" else None)
                assert answer.status_code in (404, 405, 409, 422), (method, url[:100], answer.status_code, answer.text)
                assert "Traceback" not in answer.text
                assert "<script>" not in answer.text
                tried += 1
    assert tried > 100


def test_no_route_takes_code_files_or_addresses(served: tuple[TestClient, Service]) -> None:
    described = describe(served[0])
    for path, methods in described["paths"].items():
        assert "import" not in path
        for method in methods.values():
            assert set(method.get("requestBody", {}).get("content", {})) <= {"application/json"}, path
    fields = {field for one in described["components"]["schemas"].values() for field in one.get("properties", {})}
    assert not fields & {"url", "uri", "host", "endpoint", "code", "sql", "class", "module", "command", "env"}


def test_what_changes_or_deletes_history_needs_an_administrator(served: tuple[TestClient, Service]) -> None:
    client, _ = served
    routes = {path for path, methods in describe(client)["paths"].items() if "post" in methods}
    admin = [
        path for path in routes if path.endswith(("/rollback", "/drop", "/resync", "/resume", "/forget", "/dispose"))
    ]
    found = [path for path in admin if not path.endswith("{name}/resume")]
    assert len(found) == 8
    for path in found:
        url = path.replace("{name}", NAME).replace("{sink}", "hook").replace("{savepoint}", "0" * 16)
        body: dict[str, Any] = {"to": 1} if path.endswith("/rollback") else {}
        assert client.post(url, headers=bearer("operate"), json=body).status_code == 403, path


def test_an_error_of_ours_is_an_id_and_no_trace(
    served: tuple[TestClient, Service], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, service = served

    def fail(*_: object) -> None:
        raise RuntimeError("/etc/secret-place")

    monkeypatch.setattr(type(service.supervisor), "all", fail)
    answer = client.get("/api/v1/pipelines", headers=bearer("read"))
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "secret-place" not in answer.text
    number = re.search(r"[0-9a-f]{16}", answer.json()["detail"])
    assert number is not None
    assert number.group() in [getattr(record, "error_id", "") for record in caplog.records]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_storage_that_fails_is_no_bug_and_names_no_folder(
    served: tuple[TestClient, Service], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    client, _ = served

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number), "/etc/secret-place")

    monkeypatch.setattr(LocalStorage, "put_new", fail)
    for path in ("stop", "pause"):
        answer = client.post(f"/api/v1/pipelines/{NAME}/{path}", headers=bearer("admin"))
        assert (answer.status_code, answer.json()["code"]) == (503, "storage")
        assert os.strerror(number) in answer.json()["detail"]
        assert "secret-place" not in answer.text


def test_a_run_is_stopped_though_that_cannot_be_recorded(
    served: tuple[TestClient, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = served
    asked: list[dict[str, Any]] = []

    def answer_as_run(_: object, request: dict[str, Any], __: object) -> dict[str, Any]:
        asked.append(request)
        return {"ok": True, "pid": 1}

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/etc/secret-place")

    monkeypatch.setattr("firnline.service.supervise.supervisor.ask", answer_as_run)
    monkeypatch.setattr(LocalStorage, "put_new", fail)
    answer = client.post(f"/api/v1/pipelines/{NAME}/stop", headers=bearer("operate"))
    assert (answer.status_code, answer.json()["code"]) == (503, "not_recorded")
    assert "asked to stop" in answer.json()["detail"]
    assert "No space left on device; the pipeline may be started again" in answer.json()["detail"]
    assert "secret-place" not in answer.text
    assert asked == [{"command": "status"}, {"command": "stop"}]


def test_a_body_of_another_type_is_told_which_type_it_needs(served: tuple[TestClient, Service]) -> None:
    client, _ = served
    url, token = f"/api/v1/pipelines/{NAME}/rollback", bearer("admin")
    for headers in ({}, {"Content-Type": "text/plain"}):
        answer = client.post(url, content=b'{"to": 1}', headers={**token, **headers})
        assert (answer.status_code, answer.json()["detail"]) == (
            422,
            "not valid: body (needs Content-Type: application/json)",
        )
    answer = client.post(url, json=["secret"], headers=token)
    assert answer.json()["detail"] == "not valid: body (is no JSON object)"


def test_every_answer_of_the_rest_interface_passes_the_disclosure(served: tuple[TestClient, Service]) -> None:
    found = [route for router in ROUTERS for route in router.routes]
    assert len(found) > 40
    assert [route for route in found if not isinstance(route, ShownRoute)] == []


def test_a_failure_has_the_headers_of_every_answer(
    served: tuple[TestClient, Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = served

    def fail(*_: object) -> None:
        raise RuntimeError("x")

    monkeypatch.setattr(type(service.supervisor), "all", fail)
    for path, accept in (("/api/v1/pipelines", "*/*"), ("/", "text/html")):
        answer = client.get(path, headers={**bearer("admin"), "Accept": accept})
        assert answer.status_code == 500
        assert all(answer.headers[name] == value for name, value in HEADERS.items() if name != "Referrer-Policy")


@pytest.mark.parametrize("number", ["-1", "9" * 40, "-" + "9" * 40, "1_0", " 1", ""])
def test_a_next_that_no_page_returned_is_refused(served: tuple[TestClient, Service], number: str) -> None:
    client, _ = served
    text = base64.urlsafe_b64encode(number.encode()).decode()
    for part in ("files", "quarantine", "dead-letters", "schemas", "audit", "checkpoints", "epochs"):
        answer = client.get(f"/api/v1/pipelines/{NAME}/{part}?next={text}", headers=bearer("admin"))
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_next"), part
        page = client.get(f"/p/{NAME}/{part}?next={text}", headers={**bearer("admin"), "Accept": "text/html"})
        assert page.status_code < 500, part


def test_a_body_without_a_length_is_limited_as_well(served: tuple[TestClient, Service]) -> None:
    client, _ = served
    parts = (b"x" * 8192 for _ in range(12))
    headers = {**bearer("admin"), "Content-Type": "application/json"}
    answer = client.post(f"/api/v1/pipelines/{NAME}/rollback", content=parts, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


def test_an_error_never_repeats_the_input(served: tuple[TestClient, Service]) -> None:
    client, _ = served
    for part, body in (
        ("files/retry", {"path": "my-input"}),
        ("files/drop", {"paths": ["my-input"]}),
        ("files/reread", {"path": "my-input"}),
        ("rollback", {"to_time": "my-input"}),
        ("rollback", {"my-input": 1}),
        ("rollback", {"to": "my-input"}),
        ("sinks/my-input/forget", {}),
    ):
        answer = client.post(f"/api/v1/pipelines/{NAME}/{part}", json=body, headers=bearer("admin"))
        assert 400 <= answer.status_code < 500
        assert answer.headers["content-type"] == "application/problem+json"
        assert "my-input" not in answer.text, part
    assert client.get(f"/api/v1/pipelines/{NAME}/checkpoints/99", headers=bearer("read")).status_code == 404


def test_values_of_records_do_not_reach_tokens_without_the_right_data(tmp_path: Path) -> None:
    spec = SPEC.replace("path: in}", "path: in, on_bad_record: fail, schema: {fields: [{name: a, type: int64}]}}")
    write_pipeline(tmp_path, spec)
    value = "SECRET-IBAN-1"
    (tmp_path / "in" / "a.ndjson").write_text(f'{{"a": "{value}"}}\n')
    run_locally(Pipeline.load(tmp_path / "firnline.yml").options)  # the value is rescued
    (tmp_path / "in" / "b.ndjson").write_text(f"{value} is no json\n")
    with pytest.raises(FirnlineError):
        run_locally(Pipeline.load(tmp_path / "firnline.yml").options)
    with serving(tmp_path) as (client, service):
        while service.supervisor.get(NAME).glance is None:
            time.sleep(0.05)
        paths = [path for path, methods in describe(client)["paths"].items() if "get" in methods and "{name}" in path]
        reached = set()
        for path in paths:
            url = path.replace("{name}", NAME).replace("{epoch}", "1")
            if "{" in url or "export" in url:
                continue
            for role in ("read", "operate"):
                assert value not in client.get(url, headers=bearer(role)).text, url
            reached |= {url} if value in client.get(url, headers=bearer("admin")).text else set()
        assert any(one.endswith("/status") for one in reached)
        for page in ("", "/runs", "/quarantine", "/checkpoints", "/checkpoints/1"):
            text = client.get(f"/p/{NAME}{page}", headers={**bearer("read"), "Accept": "text/html"}).text
            assert value not in text, page
        assert str(tmp_path) not in client.get(f"/api/v1/pipelines/{NAME}/status", headers=bearer("read")).text
        assert str(tmp_path) in client.get(f"/api/v1/pipelines/{NAME}/status", headers=bearer("admin")).text


def test_a_file_of_tokens_that_cannot_be_trusted_is_said_everywhere(
    served: tuple[TestClient, Service], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = served
    path = tmp_path / "state" / "tokens.json"
    good = path.read_text()
    path.write_text(good[:-1])
    answer = client.get("/api/v1/pipelines", headers=bearer("admin"))
    assert (answer.status_code, answer.json()["code"]) == (503, "tokens_unusable")
    assert str(tmp_path) not in answer.text
    assert client.get("/readyz").status_code == 503
    assert "tokens.json" in caplog.text
    path.write_text(good)
    path.chmod(0o644)
    page = client.get("/", headers={**bearer("admin"), "Accept": "text/html"})
    assert page.status_code == 200
    assert "is open to others" in page.text
    path.chmod(0o600)
    assert client.get("/readyz").status_code == 200


def test_a_stream_of_events_ends_with_its_token(tmp_path: Path) -> None:
    events, valid = Events(), [True]

    async def listen() -> list[str]:
        found = []
        async for text in events.listen(None, is_valid=lambda: valid[0]):
            found.append(text)
            if len(found) == 1:
                events.publish("pipeline", {"n": 1})
            elif len(found) == 2:
                valid[0] = False
                events.publish("pipeline", {"n": 2})
        return found

    assert len(asyncio.run(listen())) == 2


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_there_is_no_shell_and_no_pickle_in_what_is_stored() -> None:
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for name, call in calls(tree):
            assert name not in ("os.system", "os.popen", "pickle.load", "pickle.loads", "yaml.load"), path
            for keyword in call.keywords if name.startswith("subprocess.") else ():
                assert not (keyword.arg == "shell" and ast.unparse(keyword.value) != "False"), path
        if {"service", "stores", "checkpoint"} & set(path.relative_to(SOURCES).parts):
            imported = {
                alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
            } | {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir [{path}]", "!!python/name:os.mkdir x", "!bomb x"])
def test_a_spec_is_read_without_making_the_objects_that_it_names(tag: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "firnline.yml").write_text(f"{SPEC}batch: {{max_files: {tag.format(path=made)}}}\n")
    with pytest.raises(FirnlineError):
        Pipeline.load(tmp_path / "firnline.yml")
    assert not made.exists()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_client_of_ours_follows_a_redirect_with_its_token(status: int, tmp_path: Path) -> None:
    """The sinks' client: tests/integration/test_http_sink.py."""
    (tmp_path / "token").write_text("t" * 40)
    with running_receiver() as asked, running_receiver() as other:
        asked.behaviour = lambda _, __: Reply(status, {"Location": other.url})
        url = asked.url.removesuffix("/rows")
        with pytest.raises(FirnlineError):
            Server(url, str(tmp_path / "token")).post("/pipelines/flights/stop")
        with pytest.raises(RegistryError):
            SchemaRegistry({"url": url, "token": "t" * 40}).register("s", '"string"')
        assert len(asked.requests) == 2
        assert other.requests == []


def test_the_interface_of_spark_is_off_and_spark_listens_on_loopback() -> None:
    assert DEFAULTS["spark.ui.enabled"] == "false"
    assert {LOCAL_DEFAULTS[key] for key in ("spark.driver.bindAddress", "spark.driver.host")} == {"127.0.0.1"}


def test_faults_are_never_set_over_rest(served: tuple[TestClient, Service]) -> None:
    text = str(describe(served[0])).lower()
    assert "fault" not in text.replace("default", "")
