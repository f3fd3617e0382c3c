"""`firnline serve` as a process: addresses and TLS, readable refusals, one service per state, a clean end."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from firnline.errors import ConfigError
from firnline.service.serving import Address
from tests.support.certificates import make_certificate

PATIENCE_SECONDS = 120


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "firnline.yml").write_text(
        "name: flights\nsources:\n  in: {type: files, path: in}\nsinks:\n  - {type: delta, table: out}\n"
    )
    return tmp_path


def command(folder: Path, *options: str) -> list[str]:
    serve = [sys.executable, "-m", "firnline", "serve", str(folder / "firnline.yml"), "--state", str(folder / "state")]
    return [*serve, *options]


@contextlib.contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve on a free port; yields the process and its URL."""
    process = subprocess.Popen(command(folder, "--port", "0", *options), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = ""
        for line in process.stderr:
            if found := re.search(r"serving 1 pipelines on (\S+)", line):
                url = found.group(1)
                break
        assert url
        yield process, url
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def get(url: str, token: str = "", context: ssl.SSLContext | None = None) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS, context=context) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def refusal(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(command(folder, *options), capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_and_its_token_is_kept_from_others(folder: Path, number: signal.Signals) -> None:
    with serving(folder) as (process, url):
        token = folder / "state" / "admin.token"
        assert token.stat().st_mode & 0o077 == 0
        assert get(f"{url}/api/v1/pipelines")[0] == 401
        assert get(f"{url}/api/v1/pipelines", token.read_text().strip())[0] == 200
        process.send_signal(number)
        assert process.wait(PATIENCE_SECONDS) == 0
        assert process.stderr is not None
        assert "stopped; runs go on" in process.stderr.read()


def test_listeners_are_counted_and_do_not_hold_up_the_end(folder: Path) -> None:
    with serving(folder) as (process, url), contextlib.ExitStack() as stack:
        token = (folder / "state" / "admin.token").read_text().strip()
        listeners = [listen(stack, url, token) for _ in range(4)]
        assert [code for code, _ in listeners] == [200] * 4
        assert get(f"{url}/api/v1/events", token)[0] == 429
        listeners[0][1].close()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (code := listen(stack, url, token)[0]) == 429 and time.monotonic() < deadline:
            time.sleep(0.2)  # the service learns of the end when it next sends something
        assert code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


def listen(stack: contextlib.ExitStack, url: str, token: str) -> tuple[int, http.client.HTTPConnection]:
    """Listen to events, and read the first line; returns the status and the connection."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE_SECONDS)
    stack.callback(connection.close)
    connection.request("GET", "/api/v1/events", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    if answer.status == 200:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.readline().startswith(b"retry: ")
        stack.callback(answer.close)
    return answer.status, connection


def test_two_services_do_not_share_a_state(folder: Path) -> None:
    with serving(folder) as (process, _):
        code, text = refusal(folder, "--port", "0")
        assert code == 6
        assert f"another service (process {process.pid}) uses the folder" in text
        process.kill()  # the lock goes with its process, however that ends
        process.wait()
        with serving(folder):
            pass


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = refusal(folder, "--port", str(port))
    assert code == 2
    assert f"cannot serve on 127.0.0.1:{port}: Address already in use" in text
    assert "Traceback" not in text


def test_an_answer_does_not_wait_for_the_client_to_acknowledge_its_head() -> None:
    """Head and body are two writes. With Nagle's algorithm the second waits 40 ms for a client that keeps quiet."""
    with Address(port=0).listen() as listening, socket.create_connection(listening.getsockname()[:2]):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_over_tls(folder: Path) -> None:
    certificate, key = make_certificate(folder)
    with serving(folder, "--tls-cert", str(certificate), "--tls-key", str(key)) as (_, url):
        assert url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        assert get(f"{url}/healthz", context=context) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "needs TLS"),
        ({"host": "0.0.0.0", "proxies": ("10.0.0.1",)}, "by which name"),
        ({"tls_cert": "no.pem"}, "belong together"),
        ({"tls_cert": "no.pem", "tls_key": "no.pem"}, "no.pem cannot be read"),
        ({"proxies": ("me",)}, "no address or network"),
        ({"host": "no.such.host.invalid"}, "no such address"),
    ],
)
def test_addresses_that_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Address(**options).find_rules()  # type: ignore[arg-type]


def test_a_file_that_is_no_certificate(tmp_path: Path) -> None:
    path = tmp_path / "a.pem"
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="no certificate with its key"):
        Address(tls_cert=str(path), tls_key=str(path)).find_rules()


def test_behind_a_proxy_any_address_may_be_served() -> None:
    rules = Address("0.0.0.0", proxies=("10.0.0.0/24",), hosts=("pipelines.example",)).find_rules()
    assert rules.secure
    assert rules.hosts == {"pipelines.example"}
