"""A new kind of source and of sink is one folder and one line in a registry; a spec then knows its keys."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import SpecError
from firnline.sinks import registry as sinks
from firnline.sources import registry as sources
from firnline.spec.build import load_options
from firnline.spec.loading import parse_spec
from firnline.spec.models import PipelineSpec, json_schema

OPTIONS = """
from dataclasses import dataclass
from typing import ClassVar

from firnline.options import SinkOptions, SourceOptions


@dataclass(frozen=True, slots=True)
class QueueSourceOptions(SourceOptions):
    type: ClassVar[str] = "queue"
    queue: str
    password: str = ""


@dataclass(frozen=True, slots=True)
class QueueSinkOptions(SinkOptions):
    type: ClassVar[str] = "queue"
    queue: str
    headers: dict
    batch: int = 10
"""
CONFIG = '''
from typing import Literal

from firnline.config import Count, Endpoint, Field, Secret
from firnline.sinks import SinkConfig
from firnline.sources import SourceConfig

from queue_kind.options import QueueSinkOptions, QueueSourceOptions


class QueueSourceConfig(SourceConfig):
    """A queue to read."""

    options_class = QueueSourceOptions
    type: Literal["queue"] = Field(description="Kind of source.")
    queue: str = Field(description="Its name.")
    password: Secret = Field(description="Its password.")

    @property
    def endpoint(self):
        return Endpoint("queue", f"queue://{self.queue}")


class QueueSinkConfig(SinkConfig):
    """A queue to write."""

    other_words = {"topic": "queue"}
    options_class = QueueSinkOptions
    type: Literal["queue"] = Field(description="Kind of sink.")
    queue: str = Field(description="Its name.")
    batch: Count = Field(default=10, description="Messages per call.")
    headers: dict[str, Secret] = Field(default={}, description="Headers.")

    @property
    def endpoint(self):
        return Endpoint("queue", f"queue://{self.queue}")
'''
KIND = """
def config_model():
    from queue_kind import config

    return config.Queue{what}Config
"""
SPEC = """\
name: p
sources:
  s:
    type: queue
    queue: in
    password: ${env:IN_PASSWORD}
    poll_interval_secs: 3
sinks:
  - table: out
  - type: queue
    queue: out
    headers: {authorization: "${env:TOKEN}"}
"""
SECRETS = {"IN_PASSWORD": "hunter2", "TOKEN": "sesame"}


@pytest.fixture(autouse=True)
def kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the kinds, and their lines in the registries."""
    folder = tmp_path / "lib" / "queue_kind"
    folder.mkdir(parents=True)
    modules = {"__init__": "", "options": OPTIONS, "config": CONFIG}
    modules |= {"source": KIND.format(what="Source"), "sink": KIND.format(what="Sink")}
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setitem(sources.KINDS, "queue", "queue_kind.source")
    monkeypatch.setitem(sinks.KINDS, "queue", "queue_kind.sink")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "queue_kind"]:
        del sys.modules[name]


def write(folder: Path, text: str) -> Path:
    path = folder / "firnline.yml"
    path.write_text(text)
    return path


def message_of(folder: Path, text: str, **environ: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_options(write(folder, text), environ={**SECRETS, **environ}, cwd=folder)
    return caught.value.message


def test_a_spec_builds_the_options_of_new_kinds(tmp_path: Path) -> None:
    built = load_options(write(tmp_path, SPEC), environ={**SECRETS, "FIRNLINE__SINKS__1__BATCH": "7"})
    made: Any = importlib.import_module("queue_kind.options")
    assert built.sources == (made.QueueSourceOptions("s", "in", "hunter2", poll_interval_secs=3),)
    assert built.sinks[1] == made.QueueSinkOptions("queue-2", "out", {"authorization": "sesame"}, 7, input="s")
    assert [sink.type for sink in built.sinks] == ["delta", "queue"]
    assert not any(secret in repr(built) for secret in SECRETS.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("type: queue\n    queue: out", "type: kafka",
         'firnline.yml:10: sinks[1].type: "kafka" is not in this version (known: delta, queue)'),
        ("queue: in", "qeue: in", 'firnline.yml:5: sources.s.qeue: unknown key (did you mean "queue"?)'),
        ("queue: out", "topic: out", 'firnline.yml:11: sinks[1].topic: unknown key (did you mean "queue"?)'),
        ("queue: out", "table: out",
         "firnline.yml:10: sinks[1].queue: missing\n"
         "firnline.yml:11: sinks[1].table: unknown key (known: type, name, input, write, key, required, queue, batch, "
         "headers)"),
        ("queue: out", "queue: out\n    batch: 0", "firnline.yml:12: sinks[1].batch: must be at least 1, not 0"),
        ("queue: out", "queue: in", 'firnline.yml:11: sinks[1].queue: the queue is the queue of source "s"'),
        ("${env:IN_PASSWORD}", "[hunter2]",
         "firnline.yml:6: sources.s.password: must be text, not what it holds (put it in quotes)"),
        ("${env:IN_PASSWORD}", "${env:NOWHERE}",
         "firnline.yml:6: sources.s.password: environment variable NOWHERE is not set"),
        ("${env:TOKEN}", "${env:NOWHERE}",
         "firnline.yml:12: sinks[1].headers.authorization: environment variable NOWHERE is not set"),
    ],
)  # fmt: skip
def test_messages_about_new_kinds_are_as_good_as_others(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SPEC
    assert message_of(tmp_path, SPEC.replace(old, new)) == message


def test_a_secret_is_text_as_it_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, SPEC.replace("${env:IN_PASSWORD}", "0123"))
    source: Any = load_options(path, environ=SECRETS).sources[0]
    assert source.password == "0123"
    overridden: Any = load_options(path, environ={**SECRETS, "FIRNLINE__SOURCES__S__PASSWORD": "0456"}).sources[0]
    assert overridden.password == "0456"


def test_a_secret_of_the_wrong_type_is_not_shown() -> None:
    source = {"type": "queue", "queue": "in", "password": 1234}
    with pytest.raises(SpecError) as caught:
        parse_spec({"name": "p", "sources": {"s": source}, "sinks": [{"table": "out"}]})
    assert "sources.s.password: must be text" in caught.value.message
    assert "1234" not in caught.value.message


def test_the_json_schema_has_both_kinds() -> None:
    schema = json_schema()
    choices = [choice["$ref"].rpartition("/")[2] for choice in schema["properties"]["sinks"]["items"]["oneOf"]]
    assert choices == ["DeltaSinkConfig", "QueueSinkConfig"]
    assert "type" in schema["$defs"]["QueueSinkConfig"]["required"]
    assert "type" not in schema["$defs"]["DeltaSinkConfig"]["required"]


def test_a_kind_without_a_model_is_no_type_of_a_spec(tmp_path: Path) -> None:
    (tmp_path / "lib" / "queue_kind" / "sink.py").write_text("")
    assert "(known: delta)" in message_of(tmp_path, SPEC)


def test_workers_load_no_model() -> None:
    modules = [*sources.KINDS.values(), *sinks.KINDS.values(), "firnline.jobs.worker"]
    code = f"import {', '.join(m for m in modules if m.startswith('firnline'))}, sys; print('pydantic' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_only_the_folder_of_a_kind_and_its_registry_name_it() -> None:
    """What a new kind must not need: a line in the spec, in a run, or in its jobs."""
    package = Path(sys.modules[PipelineSpec.__module__].__file__ or "").parents[1]
    named = re.compile(r"(Delta|Files?)(Sink|Source)(Options|Config)")
    rooms = ("spec", "run", "jobs", "config")
    assert [p for room in rooms for p in (package / room).rglob("*.py") if named.search(p.read_text())] == []
