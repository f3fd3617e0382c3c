"""Mistakes in the keys that every follower has, in a spec with all kinds: message and hint."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.errors import SpecError
from firnline.spec.loading import load_spec

SPEC = "name: p\nsources:\n  s: {path: in}\nsinks:\n  - table: out\n"
ENVIRON = {"DSN": "postgresql://app:hunter2@db/shop"}


def error_of(folder: Path, follower: str) -> SpecError:
    (folder / "firnline.yml").write_text(f"{SPEC}  - {follower}\n")
    with pytest.raises(SpecError) as caught:
        load_spec(environ=ENVIRON, cwd=folder)
    return caught.value


def test_a_misspelt_key_with_a_secret_is_an_unknown_key(tmp_path: Path) -> None:
    """It must not advise to write the secret where it is shown."""
    error = error_of(tmp_path, "{type: postgres, dns: '${env:DSN}', table: t}")
    assert error.message == 'firnline.yml:6: sinks[1].dns: unknown key (did you mean "dsn"?)'
    assert error.hint == "Write `dsn` instead of `dns`."


def test_a_secret_in_a_key_that_takes_none_is_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, "{type: kafka, brokers: '${env:DSN}', topic: t}")
    assert error.message.endswith('sinks[1].brokers: "${env:DSN}" refers to a secret, and this key takes none')


@pytest.mark.parametrize("column", ["email", "name"])  # also one that is a key of the sink
def test_a_wrong_word_in_a_mapping_is_refused_with_the_known_ones(tmp_path: Path, column: str) -> None:
    error = error_of(tmp_path, f"{{type: postgres, dsn: '${{env:DSN}}', table: t, mask: {{{column}: hsah}}}}")
    assert error.message == (
        f'firnline.yml:6: sinks[1].mask.{column}: must be one of hash, redact, null, not "hsah" (did you mean "hash"?)'
    )


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        (
            "type: postgres, dsn: 'postgresql://a:b@db/x', table: orders",
            "type: postgres, dsn: 'host=db port=5432 dbname=x user=c', table: public.orders, input: s",
            "table",
        ),
        ("type: postgres, dsn: '${env:DSN}', table: t", "type: postgres, dsn: '${env:DSN}', table: t", "table"),
        ("type: kafka, brokers: 'a:1,b:1', topic: t", "type: kafka, brokers: ['b:1', 'a:1'], topic: t", "topic"),
        ("type: redis, url: 'redis://c:1', stream: t", "type: redis, url: 'redis://:p@c:1', stream: t", "stream"),
    ],
)
def test_two_sinks_with_one_target_are_refused(tmp_path: Path, first: str, second: str, key: str) -> None:
    error = error_of(tmp_path, f"{{name: one, {first}}}\n  - {{name: two, {second}}}")
    assert error.message == f'firnline.yml:7: sinks[2].{key}: sink "one" already writes to this {key}'


@pytest.mark.parametrize(
    "sinks",
    [
        "type: kafka, brokers: '[::1]:1', topic: {}",
        "type: postgres, dsn: 'postgresql://[::1]/x', table: {}",
        "type: postgres, dsn: '${{env:DSN}}', table: {}",
    ],
)
def test_two_targets_of_one_server_are_accepted(tmp_path: Path, sinks: str) -> None:
    followers = "".join(f"  - {{name: {name}, {sinks.format(name)}}}\n" for name in ("t", "u"))
    (tmp_path / "firnline.yml").write_text(SPEC + followers)
    assert len(load_spec(environ=ENVIRON, cwd=tmp_path).spec.sinks) == 3
