"""The start of Spark: nothing that this process says is lost, and a JVM that does not start says why."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from firnline.errors import ConfigError, EngineError
from firnline.jobs.spark import JvmOutput, find_java, java_reason, open_session


def fake_java(tmp_path: Path, script: str) -> str:
    """A JAVA_HOME whose `java` is a script."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return str(tmp_path)


def start_in_a_process(java_home: str, code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Try to start Spark in another process, after `code`, and print the error."""
    program = f"""
import os, sys, threading, warnings
from firnline.errors import EngineError
from firnline.jobs.spark import open_session
{code}
try:
    open_session("test", {settings!r})
except EngineError as error:
    print(error.message)
    print(error.hint)
"""
    environ = {**os.environ, "JAVA_HOME": java_home}
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120, check=True
    )


def test_stderr_of_this_process_arrives_while_the_jvm_starts(tmp_path: Path) -> None:
    home = fake_java(
        tmp_path,
        f"echo noise of java >&2; touch {tmp_path}/up; until test -e {tmp_path}/go; do sleep 0.05; done; exit 1",
    )
    during = f"""
def talk():
    while not os.path.exists({str(tmp_path / "up")!r}):
        pass
    os.write(2, b"written to the descriptor\\n")
    warnings.warn("a warning of Python")
    print("a line on stderr", file=sys.stderr, flush=True)
    open({str(tmp_path / "go")!r}, "w").close()
threading.Thread(target=talk).start()
"""
    ended = start_in_a_process(home, during)
    for text in ("written to the descriptor", "a warning of Python", "a line on stderr"):
        assert text in ended.stderr
    assert "noise of java" not in ended.stderr
    assert ended.stdout.splitlines()[0] == "Spark does not start: noise of java"


def test_a_jvm_that_exits_says_why_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["WARNING: Using incubator modules", "Error occurred during initialization of VM", "\tat a.b.C(D.java:1)"]
    script = "\n".join(f"printf '%s\\n' \"{line}\" >&2" for line in words) + "\necho 'Could not reserve space'; exit 1"
    monkeypatch.setenv("JAVA_HOME", fake_java(tmp_path, script))
    with pytest.raises(EngineError) as caught:
        open_session("test", {})
    assert caught.value.message == (
        "Spark does not start: Error occurred during initialization of VM; Could not reserve space"
    )
    assert "JAVA_HOME" in caught.value.hint


@pytest.mark.skipif(find_java() is None, reason="needs Java")
def test_an_option_that_the_jvm_refuses_is_named() -> None:
    with pytest.raises(EngineError, match="Could not find agent library nosuch"):
        open_session("test", {"spark.driver.extraJavaOptions": "-agentlib:nosuch"})


def test_a_java_home_without_java_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"JAVA_HOME is {tmp_path}, but {tmp_path}/bin/java cannot be run"):
        open_session("test", {})


def test_the_output_of_the_jvm_is_logged_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "firnline.jobs.spark"), JvmOutput() as output:
        os.write(output.pipe, b"one\n\ntwo\xff\n")
        assert output.last_words() == "one; two\N{REPLACEMENT CHARACTER}"
    assert "spark: one" in caplog.text


def test_the_reason_of_a_java_error_is_its_exception() -> None:
    text = "An error occurred while calling None.X.\n: java.net.BindException: Cannot assign\n\tat sun.nio.ch.Net.bind0"
    assert java_reason(Exception(text)) == "java.net.BindException: Cannot assign"
    assert java_reason(Exception("")) == "Exception"
