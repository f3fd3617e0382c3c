"""The archive of Spark's classes: found for the same Java and Spark only, and only where nobody else can write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from firnline import installed
from firnline.errors import EngineError
from firnline.jobs import class_archive
from firnline.jobs.class_archive import find_archive, make_archive


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Java without an archive; the folder of the package and the user's cache are empty ones."""
    monkeypatch.setattr(class_archive, "FOLDER", tmp_path / "package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    binary = tmp_path / "java" / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\nexit 1\n")
    binary.chmod(0o755)
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="17"')
    return str(binary)


def put(folder: Path, java: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / class_archive._name(java)
    path.write_bytes(b"classes")
    return path


def test_the_archive_of_the_installation_comes_before_the_one_of_the_user(tmp_path: Path, java: str) -> None:
    assert find_archive(java) is None
    mine = put(tmp_path / "cache" / "firnline", java)
    assert find_archive(java) == str(mine)
    shared = put(tmp_path / "package", java)
    assert find_archive(java) == str(shared)


def test_another_java_has_another_archive(tmp_path: Path, java: str) -> None:
    put(tmp_path / "package", java)
    (tmp_path / "java" / "release").write_text('JAVA_VERSION="21"')
    assert find_archive(java) is None


@pytest.mark.parametrize("open_to_all", ["file", "folder"])
def test_an_archive_that_everybody_may_write_is_not_used(tmp_path: Path, java: str, open_to_all: str) -> None:
    path = put(tmp_path / "package", java)
    if open_to_all == "file":
        path.chmod(0o666)
    else:
        path.parent.chmod(0o777)
    assert find_archive(java) is None
    if open_to_all == "folder":
        assert installed.ensure_folder(path.parent) == tmp_path / "cache" / "firnline"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_archive_of_somebody_else_is_not_used(tmp_path: Path, java: str) -> None:
    os.chown(put(tmp_path / "package", java), 12345, 12345)
    assert find_archive(java) is None


def test_a_java_that_makes_no_archive_is_an_error_and_leaves_no_file(
    tmp_path: Path, java: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    with pytest.raises(EngineError, match="no archive of Spark's classes"):
        make_archive(java)
    assert list((tmp_path / "package").iterdir()) == []


def test_prepare_says_what_it_could_not_make(tmp_path: Path) -> None:
    environ = {**os.environ, "JAVA_HOME": str(tmp_path), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "firnline.cli", "prepare", "--json"]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    found = json.loads(ended.stdout)
    assert found["decoder"]["problem"] is None
    assert Path(found["decoder"]["path"]).is_dir()
    assert (found["spark_classes"]["path"], found["spark_classes"]["problem"]) == (None, "no Java found")
