"""Who may open which page: every route of the dashboard, without a session, with each role, and from other sites."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from firnline.service.access.guard import Rules
from firnline.service.access.sessions import COOKIE
from firnline.service.access.tokens import Identity
from firnline.service.app import PAGES, make_app
from tests.support.dashboards import Served, serving, write_pipeline

VALUES = {"name": "flights", "epoch": "1", "launch": "20260101T000000-a", "action": "stop", "kind": "rollback",
          "plan": "0123456789abcdef", "content_hash": "x"}  # fmt: skip
OPEN = ("/login", "/static/")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    write_pipeline(tmp_path, "flights")
    with serving(tmp_path, only_watches=True) as found:
        found.wait_for_state("flights", "new")
        yield found


def client(served: Served, identity: Identity | None = None, *, secure: bool = False) -> TestClient:
    base = served.url.replace("http:", "https:") if secure else served.url
    found = TestClient(make_app(served.service, Rules(secure=secure)), base_url=base, raise_server_exceptions=False)
    found.headers.update({"Accept": "text/html", "Origin": base})
    if identity is not None:
        found.cookies.set(COOKIE, begin(served, identity.name))
    return found


def begin(served: Served, name: str) -> str:
    """A session of the token with this name."""
    identity = served.service.tokens.get(name)
    assert identity is not None
    return served.service.sessions.begin(identity)


def routes() -> list[tuple[str, str]]:
    found = [
        (method, re.sub(r"{(\w+)}", lambda match: VALUES[match[1]], route.path))
        for router in PAGES
        for route in router.routes
        if isinstance(route, Route)
        for method in sorted(route.methods or ())
        if method != "HEAD"
    ]
    assert len(found) > 25
    return [(method, path) for method, path in found if not path.startswith(OPEN)]


def test_no_page_answers_without_a_session(served: Served) -> None:
    browser = client(served)
    for method, path in routes():
        answer = browser.request(method, path, follow_redirects=False)
        assert answer.status_code == 303, (method, path)
        assert answer.headers["location"].startswith("/login")
        assert browser.request(method, path, headers={"HX-Request": "true"}).headers["hx-redirect"].startswith("/login")
        assert browser.request(method, path, headers={"Accept": "*/*"}).status_code == 401


def test_who_may_only_read_can_change_nothing(served: Served) -> None:
    reader = client(served, Identity("read", "read"))
    for method, path in routes():
        answer = reader.request(method, path, content="pipeline=flights")
        if method == "POST" and path != "/logout":
            assert answer.status_code == 403, (method, path)
        assert answer.status_code < 500, (method, path, answer.text)
        assert "text/html" in answer.headers["content-type"] or path.endswith("/chart")
        reader.cookies.set(COOKIE, begin(served, "read"))  # after the logout
    assert served.service.supervisor.get("flights").glance.wish is None  # type: ignore[union-attr]


def test_other_sites_and_forms_that_name_another_pipeline_change_nothing(served: Served) -> None:
    operator = client(served, Identity("operate", "operate"))
    for origin in ("http://evil.example", "null", ""):
        answer = operator.post("/p/flights/act/stop", content="pipeline=flights", headers={"Origin": origin})
        assert answer.status_code == 403
    assert operator.post("/p/flights/act/stop", content="pipeline=orders").status_code == 409
    assert operator.post("/p/flights/act/stop", content="").status_code == 409
    assert operator.post("/p/flights/plans/make/rollback", content="to=1").status_code == 403  # needs admin
    assert served.service.supervisor.load_wish("flights") is None
    assert operator.post("/p/flights/act/stop", content="pipeline=flights", follow_redirects=False).status_code == 303
    wish = served.service.supervisor.load_wish("flights")
    assert wish is not None
    assert (wish.wanted, wish.by) == ("stopped", "operate")


def test_pages_are_kept_safe_and_static_files_are_kept(served: Served) -> None:
    browser = client(served)
    answer = browser.get("/login")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    for url in re.findall(r'(?:src|href)="(/static/[^"]+)"', answer.text):
        file = browser.get(url)
        assert file.status_code == 200
        assert "immutable" in file.headers["cache-control"]
        assert browser.get(re.sub("/[0-9a-f]{16}/", "/0123456789abcdef/", url)).status_code == 404
    assert browser.get("/static/x/..%2f..%2fpages.py").status_code == 404


def test_under_tls_the_cookie_is_secure(served: Served) -> None:
    object.__setattr__(served.service, "secure", True)
    answer = client(served, secure=True).post("/login", content="token=token-of-read", follow_redirects=False)
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Secure", "Max-Age=43200"))


def test_wrong_tokens_in_the_form_are_limited(served: Served) -> None:
    browser = client(served)
    codes = [browser.post("/login", content="token=no").status_code for _ in range(12)]
    assert (codes[0], codes[-1]) == (401, 429)
    assert browser.post("/login", content="token=token-of-read").status_code == 429
