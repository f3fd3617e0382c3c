"""The HTTP sink against a real receiver: the suite of sinks, requests, answers of every kind, and secrets."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.ledger import Ledger
from firnline.errors import (
    BadRowError,
    CommitConflictError,
    CommitUnknownError,
    ConfigError,
    FencedError,
    SinkError,
    SpecError,
)
from firnline.sinks.dead_letters import list_dead_letters, read_letters
from firnline.sinks.follower import EpochDelivery, FollowerHead
from firnline.sinks.http import sink
from firnline.sinks.http.batches import Batch, cut_batches
from firnline.sinks.http.kind import open_sink as open_http
from firnline.sinks.http.options import HttpSinkOptions
from firnline.sinks.http.progress import Progress, ProgressLog
from firnline.spec.loading import parse_spec
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, OpenSink, ReadRows, SinkConformance, SinkDriver, rows
from tests.support.certificates import make_certificate
from tests.support.receiver import Receiver, Reply, Request, running_receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with running_receiver() as found:
        yield found


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the sink waited between tries; no test waits."""
    found: list[float] = []
    monkeypatch.setattr("firnline.clock.SystemClock.sleep", lambda _self, seconds: found.append(seconds))
    return found


class TestHttp(SinkConformance):
    """With a receiver that takes each key once."""

    @pytest.fixture(params=["ndjson", "json"])
    def open_sink(self, receiver: Receiver, request: pytest.FixtureRequest) -> OpenSink:
        options = HttpSinkOptions("hook", receiver.url, format=request.param, max_rows=2)
        return lambda context: open_http(options, context)

    @pytest.fixture
    def read_rows(self, receiver: Receiver) -> ReadRows:
        return lambda: receiver.rows


class Drive:
    """Begins runs to one receiver, each with the next generation."""

    def __init__(self, folder: Path, url: str) -> None:
        self.ledger = Ledger(LocalStorage(str(folder / "ledger")), PIPELINE)
        self._url = url
        self._generation = 0

    def __call__(self, **settings: Any) -> SinkDriver:
        self._generation += 1
        options = HttpSinkOptions(**{"name": "hook", "url": self._url, **settings})
        return SinkDriver(lambda context: open_http(options, context), self.ledger, generation=self._generation)


@pytest.fixture
def drive(tmp_path: Path, receiver: Receiver) -> Drive:
    return Drive(tmp_path, receiver.url)


# -- requests -----------------------------------------------------------------------------------------


def test_a_request(drive: Drive, receiver: Receiver) -> None:
    run = drive(headers={"Authorization": "Bearer sesame-sesame"}, event_id=True, max_rows=2)
    run.apply([{"id": 1, "t": 'a"b'}, {"id": 2, "t": None}, {"id": 3, "t": "é"}])
    first, second = receiver.requests
    assert (first.method, first.path) == ("POST", "/rows")
    assert first.body == (
        b'{"id":1,"t":"a\\"b","_firnline_id":"demo/1/numbers/0"}\n{"id":2,"t":null,"_firnline_id":"demo/1/numbers/1"}\n'
    )
    wanted = {
        "content-type": "application/x-ndjson",
        "idempotency-key": "demo/hook/1/0-1",
        "firnline-generation": "1",
        "firnline-epoch": "1",
        "firnline-rows": "2",
        "authorization": "Bearer sesame-sesame",
    }
    assert wanted.items() <= first.headers.items()
    assert first.headers["user-agent"] == "firnline"
    assert (second.key, [row["id"] for row in second.rows]) == ("demo/hook/1/2-2", [3])
    assert "firnline-signature" not in first.headers


def test_an_array_by_put(drive: Drive, receiver: Receiver) -> None:
    drive(format="json", method="PUT").apply(rows(1, 2))
    (request,) = receiver.requests
    assert (request.method, request.headers["content-type"]) == ("PUT", "application/json")
    assert json.loads(request.body) == [{"id": 1}, {"id": 2}]


def test_a_signature_proves_body_time_and_key(drive: Drive, receiver: Receiver) -> None:
    before = datetime.now(UTC).timestamp()
    drive(hmac="open sesame").apply(rows(1))
    (request,) = receiver.requests
    stamp = request.headers["firnline-timestamp"]
    assert before - 1 <= int(stamp) <= datetime.now(UTC).timestamp()
    message = f"{stamp}.{request.key}.".encode() + request.body
    assert (
        request.headers["firnline-signature"] == "v1=" + hmac.new(b"open sesame", message, hashlib.sha256).hexdigest()
    )


def test_batches_have_at_most_so_many_rows_and_bytes(drive: Drive, receiver: Receiver) -> None:
    run = drive(max_rows=7, max_bytes=300)
    given = [{"id": number, "t": "x" * (number * 13 % 97)} for number in range(60)]
    given[20]["t"] = "y" * 1000
    run.apply(given)
    assert [row["id"] for row in receiver.rows] == list(range(60))
    sizes = [(len(request.rows), len(request.body)) for request in receiver.requests]
    assert all(count <= 7 and (size <= 300 or count == 1) for count, size in sizes)
    assert sum(count == 1 and size > 1000 for count, size in sizes) == 1
    edges = [tuple(map(int, request.key.rsplit("/", 1)[1].split("-"))) for request in receiver.requests]
    assert edges[0][0] == 0
    assert edges[-1][1] == 59
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(edges))


def test_rows_that_a_condition_leaves_out_are_not_sent(drive: Drive, receiver: Receiver) -> None:
    run = drive(where="id > 90", max_rows=5)
    run.apply(rows(*range(100)))
    assert [row["id"] for row in receiver.rows] == list(range(91, 100))
    assert [request.key for request in receiver.requests] == ["demo/hook/1/0-95", "demo/hook/1/96-99"]
    run.apply(rows(1, 2, 3))
    assert len(receiver.requests) == 2
    assert run.sink.load().epoch == 2


def test_files_of_an_epoch_share_requests(drive: Drive, receiver: Receiver) -> None:
    run = drive(max_rows=6)
    commit = run.stage(rows(1, 2))
    more = [file for number in range(3, 12) for file in run.stage_rows(rows(number), "b" * 16)[0]]
    run.commit(replace(commit, files=[*commit.files, *more]))
    assert [len(request.rows) for request in receiver.requests] == [6, 5]


def test_an_epoch_keeps_its_format(drive: Drive, receiver: Receiver) -> None:
    commit = drive(format="json").stage(rows(1))
    edited = drive(format="ndjson")
    edited.commit(commit)
    assert receiver.requests[0].headers["content-type"] == "application/json"


# -- repeats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 50])
def test_a_repeat_sends_the_very_same_range_whatever_the_settings_are(
    drive: Drive, receiver: Receiver, size: int
) -> None:
    """The answer to the second batch is lost, the run ends, and the next one has batches of another size."""
    receiver.behaviour = lambda _request, number: Reply(200, hangs=True, takes=True) if number >= 1 else None
    run = drive(max_rows=10, timeout_secs=1.0)
    commit = run.stage(rows(*range(45)))
    with pytest.raises(CommitUnknownError, match="no answer from"):
        run.commit(commit)
    receiver.behaviour = lambda _request, _number: None
    following = drive(max_rows=size)
    following.commit(commit)
    assert [row["id"] for row in receiver.rows] == list(range(45))
    receiver.check_repeats()
    assert [request.key for request in receiver.requests].count("demo/hook/1/10-19") == sink.TRIES + 1
    assert receiver.requests[-1].headers["firnline-generation"] == "2"


def test_a_receiver_that_knows_no_keys_sees_doubles(tmp_path: Path) -> None:
    """At least once, and not more: the guarantee is no better than the receiver."""
    with running_receiver(forgets_keys=True) as receiver:
        receiver.behaviour = lambda _request, number: Reply(503, takes=True) if number == 0 else None
        Drive(tmp_path, receiver.url)().apply(rows(1, 2))
        assert [row["id"] for row in receiver.rows] == [1, 2, 1, 2]


def test_a_range_that_is_not_looked_up_is_caught(
    drive: Drive, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug: batches that are cut anew repeat rows under other keys, and the receiver takes them twice."""

    def cut_anew(one: sink.HttpSink, delivery: EpochDelivery, _progress: Progress) -> Iterator[Batch]:
        size = one._settings.max_rows
        return cut_batches(delivery.rows, delivery.first_row, event_id=False, max_rows=size, max_bytes=1 << 20)

    monkeypatch.setattr(sink.HttpSink, "_batches", cut_anew)
    with pytest.raises(AssertionError):
        test_a_repeat_sends_the_very_same_range_whatever_the_settings_are(drive, receiver, 3)
    assert max(receiver.ids.values()) == 2


def test_of_two_runs_that_build_on_one_file_only_one_succeeds(tmp_path: Path) -> None:
    """And one that slept while others went on does not, though the file that it creates was deleted long ago."""
    storage = LocalStorage(str(tmp_path))
    log = ProgressLog(storage, "demo", "hook")
    first = log.append(None, Progress(0, FollowerHead("demo", "hook", 1, "a")))
    second = log.append(first, Progress(0, FollowerHead("demo", "hook", 1, "b")))
    with pytest.raises(CommitConflictError):
        log.append(first, Progress(0, FollowerHead("demo", "hook", 1, "c")))
    with pytest.raises(CommitConflictError):
        log.append(None, Progress(0, FollowerHead("demo", "hook", 1, "c")))
    newest = second
    for number in range(2, 9):
        newest = log.append(newest, Progress(0, FollowerHead("demo", "hook", number, "b")))
    with pytest.raises(FencedError):
        log.append(first, Progress(0, FollowerHead("demo", "hook", 1, "c")))
    assert log.load() == newest
    assert len(list(storage.list("_firnline"))) == 2


# -- answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_answers_that_ask_for_another_try(drive: Drive, receiver: Receiver, status: int, waits: list[float]) -> None:
    receiver.behaviour = lambda _request, number: Reply(status) if number < 2 else None
    drive().apply(rows(1))
    assert len(receiver.requests) == 3
    assert len({request.key for request in receiver.requests}) == 1
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        ("7", 7, 7),
        ("100000", 60, 60),
        ("in 50 minutes, as a date", 60, 60),
        ("soon", 0.5, 0.5),
        ("-5", 0.5, 0.5),
    ],
)
def test_a_receiver_says_how_long_to_wait(
    drive: Drive, receiver: Receiver, asked: str, least: float, most: float, waits: list[float]
) -> None:
    if asked.endswith("as a date"):
        asked = format_datetime(datetime.now(UTC) + timedelta(minutes=50), usegmt=True)
    receiver.behaviour = lambda _request, number: Reply(429, {"Retry-After": asked}) if number == 0 else None
    drive().apply(rows(1))
    assert least <= waits[0] <= most


@pytest.mark.parametrize("status", [401, 403, 404, 405, 407, 409, 410, 418])
def test_answers_that_concern_the_sink(drive: Drive, receiver: Receiver, status: int) -> None:
    """The run tries again later; no row becomes a dead letter."""
    receiver.behaviour = lambda *_: Reply(status, text="you said Bearer open-sesame, or open-sesame\n" + "x" * 5000)
    run = drive(headers={"Authorization": "Bearer open-sesame"}, on_bad_row="dead_letter")
    with pytest.raises(SinkError, match=rf"'hook'.*answers {status}: you said \*\*\*, or \*\*\* xxx") as caught:
        run.apply(rows(1))
    assert caught.value.retryable
    assert len(caught.value.message) < 400
    assert len(receiver.requests) == 1
    assert list(list_dead_letters(run.ledger.storage, PIPELINE)) == []
    receiver.behaviour = lambda *_: None


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_no_redirect_is_followed(drive: Drive, receiver: Receiver, status: int) -> None:
    with running_receiver() as other:
        receiver.behaviour = lambda *_: Reply(status, {"Location": other.url})
        with pytest.raises(SinkError, match="follows no redirect"):
            drive().apply(rows(1))
        assert other.requests == []


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_batch_stops_the_sink_or_becomes_dead_letters(drive: Drive, receiver: Receiver, status: int) -> None:
    def refuse(request: Request, _number: int) -> Reply | None:
        return Reply(status, text="no 13") if any(row["id"] == 13 for row in request.rows) else None

    receiver.behaviour = refuse
    run = drive(max_rows=5)
    commit = run.stage(rows(*range(30)))
    with pytest.raises(BadRowError, match=f"rows 10 to 14 are refused with {status}: no 13"):
        run.commit(commit)
    kind = drive(max_rows=5, on_bad_row="dead_letter")
    kind.commit(commit)
    assert [row["id"] for row in receiver.rows] == [*range(10), *range(15, 30)]
    letters = [
        letter
        for key in list_dead_letters(run.ledger.storage, PIPELINE, "hook")
        for letter in read_letters(run.ledger.storage, key)
    ]
    assert [(letter.row, letter.values) for letter in letters] == [(number, {"id": number}) for number in range(10, 15)]


def test_three_refused_batches_in_a_row_stop_the_sink(drive: Drive, receiver: Receiver) -> None:
    """Also if the run is another one by then: the count is in the home."""
    receiver.behaviour = lambda _request, number: Reply(422, text="no") if number in (0, 2, 3, 4, 5) else None
    run = drive(max_rows=5, on_bad_row="dead_letter")
    commit = run.stage(rows(*range(30)))
    with pytest.raises(BadRowError, match="has refused 3 batches in a row"):
        run.commit(commit)
    assert len(receiver.requests) == 5
    following = drive(max_rows=5, on_bad_row="dead_letter")
    with pytest.raises(BadRowError, match="has refused 3 batches in a row"):
        following.commit(commit)
    receiver.behaviour = lambda *_: None
    following.commit(commit)
    dead = {
        letter.row
        for key in list_dead_letters(run.ledger.storage, PIPELINE)
        for letter in read_letters(run.ledger.storage, key)
    }
    assert dead == {*range(5), *range(10, 20)}
    assert sorted(row["id"] for row in receiver.rows) == [number for number in range(30) if number not in dead]


def test_a_receiver_that_is_away(tmp_path: Path) -> None:
    run = Drive(tmp_path, "http://127.0.0.1:1/rows")()
    for attempt in (run.sink.check, lambda: run.apply(rows(1))):
        with pytest.raises(SinkError, match=r"http://127.0.0.1:1/rows cannot be reached: ConnectionRefusedError"):
            attempt()


def test_a_long_answer_is_not_read_to_its_end(drive: Drive, receiver: Receiver) -> None:
    receiver.behaviour = lambda *_: Reply(200, text="x" * 10_000_000, takes=True)
    run = drive()
    run.apply(rows(1))
    run.apply(rows(2))
    assert receiver.ids == {1: 1, 2: 1}


def test_a_certificate_must_be_trusted(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with running_receiver(tls=(certificate, key)) as receiver:
        drive = Drive(tmp_path, receiver.url)
        run = drive()
        for attempt in (run.sink.check, lambda: run.apply(rows(1))):
            with pytest.raises(SinkError, match="CERTIFICATE_VERIFY_FAILED"):
                attempt()
        trusting = drive(ca_file=str(certificate))
        trusting.apply(rows(1))
        assert receiver.ids == {1: 1}


# -- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "ftp://host/x"}, "must be https://HOST/PATH"),
        ({"url": "https://"}, "must be https://HOST/PATH"),
        ({"url": "https://user:sesame@host/x"}, "has a user or a password"),
        ({"url": "https://host/a b"}, "percent-encoded"),
        ({"url": "https://host/x\r\nX: y"}, "percent-encoded"),
        ({"url": "https://host:x/"}, "is invalid"),
        ({"url": "http://example.com/x"}, "without encryption"),
        ({"headers": {"Host": "x"}}, "is set by Firnline"),
        ({"headers": {"Idempotency-Key": "x"}}, "is set by Firnline"),
        ({"headers": {"Firnline-Epoch": "1"}}, "is set by Firnline"),
        ({"headers": {"X Y": "1"}}, "is no name of a header"),
        ({"headers": {"X": "a\r\nY: b"}}, "line ends"),
        ({"url": "https://host/x", "ca_file": "/nowhere"}, "cannot be read"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Drive(tmp_path, "https://host/rows")(**settings)
    assert "sesame" not in str(caught.value)


def test_plain_http_to_another_machine_must_be_allowed() -> None:
    spec: dict[str, Any] = {"name": "p", "sources": {"s": {"path": "in"}}}
    hook = {"type": "http", "url": "http://example.com/rows"}
    with pytest.raises(SpecError, match="without encryption"):
        parse_spec({**spec, "sinks": [{"table": "out"}, hook]}, folder="/data")
    parse_spec({**spec, "sinks": [{"table": "out"}, {**hook, "allow_http": True}]}, folder="/data")
    parse_spec({**spec, "sinks": [{"table": "out"}, {**hook, "url": "http://localhost:1/x"}]}, folder="/data")


def test_secrets_are_in_no_address() -> None:
    options = HttpSinkOptions("hook", "https://host/rows?token=sesame")
    assert options.location == options.target == "https://host:443/rows"
