"""What answers show to whom: no values of records without the right `data`, no folders below admin."""

from __future__ import annotations

import json

import pytest

from firnline.errors import FirnlineError, _all_errors
from firnline.service.access.disclosure import (
    OWN_WORDS,
    WITHHELD,
    Disclosure,
    full_name,
    label_folders,
    reason_text,
    without_values,
)
from firnline.service.access.tokens import Identity

VALUE = "4111-1111-1111-1111"


@pytest.mark.parametrize(
    "body",
    [
        {"last_error": {"code": "bad-records", "message": f"line 2: not-json: {VALUE}", "hint": "look"}},
        {"error": f"sink 'hook': https://h/x answers 422: {VALUE}"},
        {"sinks_failing": {"hook": f"invalid value: {VALUE}"}},
        {"rescued": [{"column": "a", "values": 3, "first": f'"{VALUE}"'}]},
        {"dead_letters": [{"sink": "hook", "reason": f"rows 0 to 0 are refused with 422: {VALUE}", "values": [VALUE]}]},
        {"runs": [{"last_restarts": [{"code": "sink", "reason": VALUE}], "error": {"code": "sink", "message": VALUE}}]},
        {"set_aside": f"refused {VALUE}", "files": [{"path": "a", "reason": f"not-json: {VALUE}"}]},
        {"position": {"set_aside": {"in/a": f"wrong {VALUE}"}}},
        {"reasons": {f"odd {VALUE}": 2, "not-json": 1}},
        {"progress": [f"line {VALUE}"], "error": {"code": "command-failed", "detail": VALUE}},
        {"positions": {"db": {"snapshots": {"t": {"after": [VALUE], "order": [VALUE], "chunks": 1}}}}},
        {"raw": VALUE, "first_bad": [VALUE]},
        {"result": {"warnings": [f"a: 1 of 51 sampled values would not fit int64; first: in/a line 5: {VALUE}"]}},
        {"code": "schema", "detail": f"column a: {VALUE}", "status": 500},
    ],
)
def test_values_are_withheld_wherever_they_hide(body: dict[str, object]) -> None:
    assert VALUE not in json.dumps(without_values(body))
    assert VALUE in json.dumps(Disclosure(Identity("a", "admin", data=True)).show(body))


def test_what_is_withheld_is_withheld_everywhere_in_the_same_answer() -> None:
    message = f"line 2: not-json: {VALUE}"
    row = {"needs_person": f"it failed: {message}", "last_error": {"code": "bad-records", "message": message}}
    assert VALUE not in json.dumps(without_values(row))


def test_codes_counts_and_sentences_of_ours_stay() -> None:
    body = {
        "last_error": {"code": "table-lost", "message": "the table is missing", "hint": "restore it"},
        "rescued": [{"column": "a", "values": 3, "first": ""}],
        "reasons": {"not-json": 2, "too-long": 1},
        "files": [{"path": "a", "reason": None}],
        "spec": {"valid": True, "warnings": ["firnline.yml:3: holds a secret in plain text"]},
    }
    assert without_values(body) == body
    assert reason_text("not-json: {1}") == "not-json"
    assert reason_text("rows 0 to 2 are refused with 422: no") == "refused with 422"
    assert reason_text("column 'k' is null") == "column 'k' is null"
    assert reason_text("something else") == WITHHELD


def test_messages_of_errors_that_quote_others_are_not_among_our_own_words() -> None:
    quoting = {"source", "bad-records", "schema", "sink", "bad-row", "staging", "engine", "operator", "commit-unknown"}
    codes = {one.code for one in _all_errors(FirnlineError)}
    assert quoting <= codes
    assert not quoting & OWN_WORDS


def test_below_admin_texts_have_no_credentials_and_no_folders() -> None:
    folders = label_folders({"/home/ann/my pipes": [], "/tmp/p": ["/tmp/p/in", "/var/data/in"]})
    shown = Disclosure(Identity("a", "operate"), lambda: folders)
    for text, plain in (
        ("/tmp/p/firnline.yml:3: name: missing", "firnline.yml:3: name: missing"),
        ("/tmp/p/in/a.json and /tmp/p/in/b.json.", "in/a.json and in/b.json."),
        ("/var/data/in/x/a.json", ".../in/x/a.json"),
        ("/etc/ssl/private/key.pem", ".../key.pem"),
        ("file:///tmp/p/out", "out"),
        ("/home/ann/my pipes/in/a.json", "in/a.json"),
        ("/tmp/p", "."),
        ("s3://AKIA:pw@bucket/t?sig=x is gone", "s3://bucket/t is gone"),
        ("host=h password=pw dbname=x", "host=h password=*** dbname=x"),
        ("GET /api/v1/pipelines lists them", "GET /api/v1/pipelines lists them"),
        ("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00+00:00"),
    ):
        assert shown.text(text) == plain
        assert shown.show({"a": [{text: text}]}) == {"a": [{plain: plain}]}
        assert Disclosure(Identity("a", "admin")).text(text) == text


@pytest.mark.parametrize(
    "piece", ["a.", "a-", "%", "a:", "/tmp/a", "/a", "password", "password ", "pwd='", "s3://", "x,"]
)
def test_a_long_text_takes_time_that_grows_with_its_length_alone(piece: str) -> None:
    """Records and names of files are texts of strangers; what reads them must not stop the service for hours."""
    shown = Disclosure(Identity("a", "operate", data=True), lambda: {"/tmp/p": "", "/var/data": ".../data"})
    for end in ("", ":", "@", "@:", " password=hunter2"):
        text = f"@ {piece * (200_000 // len(piece))}{end}"
        assert "hunter2" not in shown.text(text)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("in/a.json", "/tmp/p/in/a.json"),
        (".../other/x/a.json", "/var/data/other/x/a.json"),
        (".../twice/a.json", ".../twice/a.json"),  # two sources end so: nothing is guessed
        ("/tmp/p/in/a.json", "/tmp/p/in/a.json"),
        ("s3://b/a.json", "s3://b/a.json"),
        ("a.json", "a.json"),  # relative to its source
        ("../../etc/passwd", "../../etc/passwd"),
    ],
)
def test_names_that_were_shown_are_found_again(name: str, full: str) -> None:
    assert full_name(name, "/tmp/p", ["/tmp/p/in", "/var/data/other", "/var/twice", "/srv/twice"]) == full
