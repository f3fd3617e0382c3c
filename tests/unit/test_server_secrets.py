"""Secrets of servers, in a spec with every kind of sink and source that has one: no form of the options shows them."""

from __future__ import annotations

import pickle
from pathlib import Path

from firnline.spec.build import build_options
from firnline.spec.loading import load_spec

SECRET = "hunter2"
TEXT = """\
name: p
sources:
  s: {type: kafka, brokers: "b:9092", topics: [t], sasl: &sasl {mechanism: PLAIN, username: me, password: "${env:KEY}"}}
sinks:
  - {name: a, type: postgres, dsn: "postgresql://me:${env:KEY}@db/x", table: t}
  - {name: b, type: redis, url: "redis://me:${env:KEY}@cache/0", stream: t}
  - name: c
    type: http
    url: https://h/x?k=${env:KEY}
    headers: {Authorization: "${env:KEY}"}
    hmac: ${env:KEY}
  - {name: d, type: kafka, brokers: "b:9092", topic: u, sasl: *sasl}
"""


def test_no_form_of_the_options_shows_a_secret_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "firnline.yml").write_text(TEXT)
    loaded = load_spec(environ={"KEY": SECRET}, cwd=tmp_path)
    built = build_options(loaded, environ={"KEY": SECRET})
    assert SECRET.encode() in pickle.dumps(built)
    shown = [repr(loaded), str(loaded.spec), repr(loaded.spec), loaded.spec.model_dump_json(), repr(built), str(built)]
    shown += [str(built.describe()), *(sink.location for sink in built.sinks), *(one.target for one in built.followers)]
    assert [text for text in shown if SECRET in text] == []
