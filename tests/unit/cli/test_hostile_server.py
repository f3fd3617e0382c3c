"""`firnline --server` against what is no Firnline service, or one of another version; and files that hold no token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command

TOKEN = "fln_0123456789abcdef"
ESCAPES = "\x1b]0;title\x07\x1b[31mred\r\nsecond line\u202e"


class Double:
    """Answers every request with the same status and body; remembers what it was asked."""

    def __init__(self) -> None:
        self.status, self.body, self.asked = 200, b"{}", list[str]()
        double = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                double.asked.append(f"{self.command} {self.path} {self.headers['Authorization']}")
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(double.status)
                self.send_header("Content-Length", str(len(double.body)))
                if 300 <= double.status < 400:
                    self.send_header("Location", f"{double.url}/elsewhere")
                self.end_headers()
                self.wfile.write(double.body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def double() -> Iterator[Double]:
    made = Double()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def ask(double: Double, token: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = run_command(["--server", double.url, f"--token-file={token}", *words])
    said = capsys.readouterr()
    return code, said.out + said.err


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path / "token"


@pytest.mark.parametrize(
    "content",
    [b"", b"fln_0123\nX-Header: 1", b"fln_0123\r\nX-Header: 1", b"fln_0123 4567", b"fln_\x00", b"x" * 5000, b"\xff"],
)
def test_what_is_no_token_is_neither_sent_nor_shown(
    double: Double, token: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    token.write_bytes(content)
    code, said = ask(double, token, capsys, "status", "p")
    assert (code, double.asked) == (2, [])
    assert f"{token} holds no token" in said
    assert "fln_" not in said


def test_a_redirect_is_not_followed(double: Double, token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    double.status = 307
    code, said = ask(double, token, capsys, "status", "p")
    assert (code, len(double.asked)) == (1, 1)
    assert "is no Firnline service" in said


COMMANDS = (
    "status p",
    "pause p",
    "stop p",
    "checkpoints p",
    "files p",
    "rollback p --to 1",
    "dry-run p",
    "quarantine p",
)


@pytest.mark.parametrize("body", [b"{}", b"[" * 100_000, b'{"a": ' + b"9" * 6000 + b"}", b'{"plan": 3, "rows": null}'])
def test_an_answer_that_is_not_understood_is_no_bug(
    double: Double, token: Path, capsys: pytest.CaptureFixture[str], body: bytes
) -> None:
    double.body = body
    for words in COMMANDS:
        code, said = ask(double, token, capsys, *words.split())
        assert code == 1
        assert "no Firnline service" in said or "does not understand" in said
        assert "bug" not in said


def test_no_answer_controls_the_terminal(double: Double, token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = dict.fromkeys(("detail", "hint", "code", "state", "epoch", "pipeline", "run", "reason"), ESCAPES)
    row = {**everything, "pid": 1, "generation": 1, "wish": 1, "path": ESCAPES, "status": ESCAPES, "bytes": 1}
    job = {"job": "1", "progress": [ESCAPES], "ended_at": "x", "status": "failed", "result": None}
    for body in (row, {**job, "error": row}, {"files": [row], "next": None}, {"pipelines": [row, row]}):
        double.body = json.dumps(body).encode()
        for status in (200, 409):
            double.status = status
            for words in ("status", "status p", "stop p --timeout 0", "files p", "dry-run p", "savepoint create p"):
                _, said = ask(double, token, capsys, *words.split())
                assert all(character.isprintable() or character == "\n" for character in said), said
