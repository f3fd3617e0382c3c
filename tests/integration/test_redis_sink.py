"""The Redis sink against a real server: the suite of sinks, what other clients read, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.checkpoint.ledger import Ledger
from firnline.errors import (
    BadRowError,
    CommitUnknownError,
    ConfigError,
    FirnlineError,
    MissingExtraError,
    RollbackRefusedError,
    SinkError,
    SpecError,
)
from firnline.history.edits.rollback import Rollback
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.dead_letters import list_dead_letters, read_letters
from firnline.sinks.follower import EpochDelivery
from firnline.sinks.redis import client, encode, script, sink
from firnline.sinks.redis.kind import open_sink as open_redis
from firnline.sinks.redis.options import RedisSinkOptions
from firnline.spec.loading import parse_spec
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, OpenSink, ReadRows, SinkConformance, SinkDriver, rows
from tests.support.certificates import make_certificate
from tests.support.pipelines import MakeOptions, run_once, run_to_end
from tests.support.processes import free_port, wait_until
from tests.support.redis import RedisServer, running_redis
from tests.support.redis_sink import (
    HASH,
    SMALL_RANGES,
    STREAM,
    check_order,
    hashes,
    redis_ids,
    stream_entries,
    to_redis,
)
from tests.support.samples import SampleInput, table_ids


class TestStream(SinkConformance):
    @pytest.fixture(params=[1000, 1], ids=["whole", "ranges"])
    def open_sink(
        self, redis_server: RedisServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> OpenSink:
        monkeypatch.setattr(sink, "RANGE_ROWS", request.param)
        options = RedisSinkOptions("copy", redis_server.url, stream="rows")
        return lambda context: open_redis(options, context)

    @pytest.fixture
    def read_rows(self, redis_server: RedisServer) -> ReadRows:
        return lambda: [{**row, "id": int(row["id"])} for _, row in stream_entries(redis_server)]


class TestHash(SinkConformance):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, redis_server: RedisServer) -> OpenSink:
        options = RedisSinkOptions("copy", redis_server.url, mode="hash", write="upsert", key=("id",))
        return lambda context: open_redis(options, context)

    @pytest.fixture
    def read_rows(self, redis_server: RedisServer) -> ReadRows:
        return lambda: [{**row, "id": int(row["id"])} for row in hashes(redis_server, "copy:*").values()]


class TestString(SinkConformance):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, redis_server: RedisServer) -> OpenSink:
        options = RedisSinkOptions("copy", redis_server.url, mode="string", write="upsert", key=("id",), keys="n:{id}")
        return lambda context: open_redis(options, context)

    @pytest.fixture
    def read_rows(self, redis_server: RedisServer) -> ReadRows:
        def read() -> list[dict[str, Any]]:
            client: Any = redis_server.client()
            return [json.loads(client.get(key)) for key in client.keys("n:*")]

        return read


class Drive:
    """Begins runs into one server, each with the next generation."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self.ledger = Ledger(LocalStorage(str(folder / "ledger")), PIPELINE)
        self._server = server
        self._generation = 0

    def __call__(self, name: str = "copy", changes: bool = False, **settings: Any) -> SinkDriver:
        self._generation += 1
        given = {"stream": "rows"} if settings.get("mode", "stream") == "stream" else {"write": "upsert"}
        options = RedisSinkOptions(name, self._server.url, **{**given, **settings})
        return SinkDriver(
            lambda context: open_redis(options, context), self.ledger, generation=self._generation, changes=changes
        )


@pytest.fixture
def drive(tmp_path: Path, redis_server: RedisServer) -> Drive:
    return Drive(tmp_path, redis_server)


# -- what is written ----------------------------------------------------------------------------------


def test_a_stream_has_a_field_for_each_value(drive: Drive, redis_server: RedisServer) -> None:
    run = drive(event_id=True)
    run.apply([{"id": 1, "name": "é", "tags": ["a", None]}, {"id": None, "name": None, "tags": None}])
    assert stream_entries(redis_server) == [
        ("1-0", {"id": "1", "name": "é", "tags": '["a",null]', "_firnline_id": "demo/1/numbers/0"}),
        ("1-1", {"_firnline_id": "demo/1/numbers/1"}),
    ]


def test_a_row_without_values_is_an_entry(drive: Drive, redis_server: RedisServer) -> None:
    drive().apply([{"id": None}, {"id": 2}])
    assert stream_entries(redis_server) == [("1-0", {"_null": ""}), ("1-1", {"id": "2"})]


def test_one_field_with_the_whole_row(drive: Drive, redis_server: RedisServer) -> None:
    drive(fields="json").apply([{"id": 1, "name": None}, {"id": None, "name": 'a"b'}])
    found = [json.loads(row["json"]) for _, row in stream_entries(redis_server)]
    assert found == [{"id": 1, "name": None}, {"id": None, "name": 'a"b'}]


def test_rows_that_a_condition_leaves_out_keep_their_numbers(drive: Drive, redis_server: RedisServer) -> None:
    drive(where="id % 2 = 0").apply(rows(1, 2, 3, 4))
    assert [number for number, _ in stream_entries(redis_server)] == ["1-1", "1-3"]
    last = drive(where="id > 100")
    last.apply(rows(5))
    assert last.sink.load().epoch == 2
    assert len(stream_entries(redis_server)) == 2


def test_a_stream_is_trimmed(drive: Drive, redis_server: RedisServer) -> None:
    run = drive(maxlen=100)
    for number in range(5):
        run.apply(rows(*range(number * 1000, number * 1000 + 1000)))
    assert 100 <= redis_server.client().xlen("rows") < 500
    assert stream_entries(redis_server)[-1][1] == {"id": "4999"}


def test_a_hash_is_replaced_whole_and_deleted(drive: Drive, redis_server: RedisServer) -> None:
    run = drive(mode="hash", key=("id",), changes=True)
    run.apply([{"id": 1, "a": "x", "b": "y"}, {"id": 2, "a": "x", "b": "y"}, {"id": 3, "a": None, "b": None}])
    run.apply([{"id": 1, "a": "z", "b": None, "_op": "update"}, {"id": 2, "a": None, "b": "-", "_op": "delete"}])
    assert hashes(redis_server, "copy:*") == {"copy:1": {"id": "1", "a": "z"}, "copy:3": {"id": "3"}}


def test_keys_of_several_columns_never_meet(drive: Drive, redis_server: RedisServer) -> None:
    run = drive(mode="string", key=("a", "b"), keys="k:{b}:{a}")
    run.apply([{"a": "x:y", "b": "z"}, {"a": "x", "b": "y:z"}, {"a": "x", "b": "y%3Az"}, {"a": "", "b": ""}])
    assert sorted(redis_server.client().keys("k:*")) == [b"k::", b"k:y%253Az:x", b"k:y%3Az:x", b"k:z:x%3Ay"]


def test_large_rows_are_cut_into_ranges(
    drive: Drive, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "RANGE_BYTES", 1000)
    run = drive()
    run.apply([{"id": number, "text": "x" * (number * 100)} for number in range(30)])
    assert [int(row["id"]) for _, row in stream_entries(redis_server)] == list(range(30))
    check_order(redis_server)


def test_an_epoch_keeps_the_settings_that_it_was_made_with(drive: Drive, redis_server: RedisServer) -> None:
    commit = drive(fields="json").stage(rows(1))
    edited = drive(stream="other", fields="text")
    edited.commit(commit)
    edited.apply(rows(2))
    assert [row for _, row in stream_entries(redis_server)] == [{"json": '{"id":1}'}]
    assert [row for _, row in stream_entries(redis_server, "other")] == [{"id": "2"}]


# -- progress -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 45])
def test_progress_is_a_row_so_ranges_of_another_size_may_follow(
    drive: Drive, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    change_ranges_in_an_epoch(drive, redis_server, monkeypatch, size)


def change_ranges_in_an_epoch(
    drive: Drive, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Deliver the first two ranges, and the rest in ranges of another size."""
    run = drive()
    commit = run.stage(rows(*range(100)))
    monkeypatch.setattr(sink, "RANGE_ROWS", 30)
    monkeypatch.setattr(sink, "IN_FLIGHT", 1)

    class FullError(Exception):
        pass

    sent = []
    original = sink.RedisSink._send

    def fail_at_third(self: Any, *arguments: Any) -> None:
        sent.append(arguments)
        if len(sent) == 3:
            raise FullError
        original(self, *arguments)

    monkeypatch.setattr(sink.RedisSink, "_send", fail_at_third)
    with pytest.raises(FullError):
        run.sink.commit(commit)
    head = run.sink.read_head()  # type: ignore[attr-defined]
    assert (head.epoch, head.partial) == (0, commit.entry)
    monkeypatch.setattr(sink, "RANGE_ROWS", size)
    run.commit(commit)
    assert [int(row["id"]) for _, row in stream_entries(redis_server)] == list(range(100))
    check_order(redis_server)


def test_a_forgotten_script_is_given_again(
    drive: Drive, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "RANGE_ROWS", 10)
    original, sent = sink.RedisSink._send, []

    def forget(self: Any, *arguments: Any) -> None:
        sent.append(arguments)
        if len(sent) in (2, 7):
            redis_server.client().script_flush()
        original(self, *arguments)

    monkeypatch.setattr(sink.RedisSink, "_send", forget)
    run = drive()
    redis_server.client().script_flush()
    run.apply(rows(*range(95)))
    assert [int(row["id"]) for _, row in stream_entries(redis_server)] == list(range(95))
    redis_server.client().script_flush()
    assert drive().epoch == 1


# -- planted bugs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [7, 45])
def test_progress_by_the_number_of_a_range_is_caught(
    drive: Drive, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Ranges of another size would then write rows again, which the ids refuse, or leave rows out."""

    def partial_head(delivery: EpochDelivery, row: int) -> Any:
        return replace(delivery.head, partial=delivery.commit.entry, row=row // sink.RANGE_ROWS)

    monkeypatch.setattr(EpochDelivery, "partial_head", partial_head)
    monkeypatch.setattr(EpochDelivery, "first_row", property(lambda one: one.head.row * sink.RANGE_ROWS))
    with pytest.raises((SinkError, AssertionError)):
        change_ranges_in_an_epoch(drive, redis_server, monkeypatch, size)


@pytest.mark.parametrize("compares_place", [True, False])
def test_a_range_that_arrives_late_changes_nothing(
    drive: Drive, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, compares_place: bool
) -> None:
    """The planted bug, a script that does not compare where the head is, brings a deleted key back."""
    line = "if (held[2] or '') ~= ARGV[3] then return {'held'} end\n"
    assert line in script.SCRIPT
    monkeypatch.setattr(client, "SCRIPT", script.SCRIPT if compares_place else script.SCRIPT.replace(line, ""))
    sent: list[bytes] = []
    original = client.RedisClient.send

    def keep(self: Any, parts: Any) -> None:
        sent.append(b"".join(bytes(part) for part in parts))
        original(self, parts)

    monkeypatch.setattr(client.RedisClient, "send", keep)
    run = drive(mode="hash", key=("id",), changes=True)
    run.apply(rows(1, 2))
    late = sent[-1]
    run.apply([{"id": 1, "_op": "delete"}])
    head = run.sink.load()
    redis_client = run.sink._client  # type: ignore[attr-defined]
    redis_client.send([late])
    answer = redis_client.receive()
    assert (answer == [b"held"]) == compares_place
    assert (sorted(hashes(redis_server, "copy:*")) == ["copy:2"]) == compares_place
    assert (run.sink.load() == head) == compares_place


# -- what is refused ----------------------------------------------------------------------------------


def test_a_stream_that_others_write_to_is_refused(drive: Drive, redis_server: RedisServer) -> None:
    redis_server.client().xadd("rows", {"foreign": "1"})
    run = drive()
    with pytest.raises(SinkError, match=r"ends with id \d+-0, not below the next id, 1-0"):
        run.apply(rows(1))
    assert run.sink.load().epoch == 0
    assert [row for _, row in stream_entries(redis_server)] == [{"foreign": "1"}]


def test_a_key_of_another_type_is_refused(drive: Drive, redis_server: RedisServer) -> None:
    redis_server.client().set("rows", "x")
    run = drive()
    for attempt in (run.sink.check, lambda: run.apply(rows(1))):
        with pytest.raises(SinkError, match="'rows' holds a string, not a stream"):
            attempt()


def test_a_target_belongs_to_one_sink(drive: Drive) -> None:
    drive().apply(rows(1))
    with pytest.raises(SinkError, match="'rows' belongs to sink demo/copy"):
        drive("other")


@pytest.mark.parametrize("on_bad_row", ["stop", "dead_letter"])
def test_rows_that_redis_cannot_hold(
    drive: Drive, redis_server: RedisServer, on_bad_row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "RANGE_ROWS", 3)
    monkeypatch.setattr(encode, "MOST_ROW_BYTES", 200)
    redis_server.client().set("n:4", "not a hash")
    redis_server.client().lpush("n:8", "a list")
    run = drive(mode="hash", key=("id",), keys="n:{id}", on_bad_row=on_bad_row)
    given: list[dict[str, Any]] = [{"id": number, "t": ""} for number in range(10)]
    given[1]["id"], given[6]["t"] = None, "x" * 300
    commit = run.stage(given)
    if on_bad_row == "stop":
        with pytest.raises(BadRowError, match="demo/1/numbers/1: a column of its key is null"):
            run.commit(commit)
        return
    run.commit(commit)
    assert sorted(hashes(redis_server, "n:[^48]")) == [f"n:{number}" for number in (0, 2, 3, 5, 7, 9)]
    assert redis_server.client().get("n:4") == b"not a hash"
    letters = [
        letter
        for key in list_dead_letters(run.ledger.storage, PIPELINE)
        for letter in read_letters(run.ledger.storage, key)
    ]
    assert sorted((letter.row, letter.reason) for letter in letters) == [
        (1, "a column of its key is null"),
        (4, "its key holds a string, not a hash"),
        (6, "is larger than 200 bytes"),
        (8, "its key holds a list, not a hash"),
    ]


def test_rows_never_replace_what_firnline_keeps(drive: Drive, redis_server: RedisServer) -> None:
    run = drive(mode="string", key=("k",), keys="{k}")
    with pytest.raises(BadRowError, match="its key begins with firnline:"):
        run.apply([{"k": "firnline:demo:copy:head"}])


SETTINGS = [
    ({"appendonly": "no"}, "keeps no log"),
    ({"appendfsync": "everysec"}, "appendfsync everysec: it may forget"),
    ({"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy allkeys-lru: it may evict"),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=str)
def test_a_server_that_may_forget_is_refused(
    drive: Drive, redis_server: RedisServer, settings: dict[str, str], words: str
) -> None:
    """Also if its settings change in the middle of a run."""
    run = drive()
    run.apply(rows(1))
    client: Any = redis_server.client()
    kept = {name: client.config_get(name)[name] for name in settings}
    try:
        for name, value in settings.items():
            client.config_set(name, value)
        version = tuple(map(int, client.info()["redis_version"].split(".")[:2]))
        if "appendfsync" not in settings or version < (7, 2):
            for attempt in (run.sink.check, drive, lambda: run.apply(rows(2))):
                with pytest.raises(SinkError, match=words):
                    attempt()
        if "maxmemory-policy" not in settings:
            trusting = drive(durability="none")
            trusting.apply(rows(2))
            assert "may forget rows" in trusting.sink.find_caveats()[0]
    finally:
        for name, value in kept.items():
            client.config_set(name, value)


def test_a_newer_server_is_asked_whether_its_log_is_durable(
    drive: Drive, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WAITAOF came with Redis 7.2. Here its answers are made up; everything else is the server's own."""
    asked: list[tuple[str | int, ...]] = []
    unwritten: set[int] = set()  # the questions that are answered with no
    ask = client.RedisClient._ask

    def newer(self: Any, *words: str | int) -> Any:
        if words[0] == "WAITAOF":
            asked.append(words)
            return [int(len(asked) not in unwritten), 0]
        found = ask(self, *words)
        if words[0] == "INFO":
            return found.replace(b"redis_version:7.0", b"redis_version:7.2")
        return [b"appendfsync", b"everysec"] if words[:2] == ("CONFIG", "GET") else found

    monkeypatch.setattr(client.RedisClient, "_ask", newer)
    run = drive()
    assert len(asked) == 2, "after the claim, and after reading it back"
    asked.clear()
    unwritten |= {2, 3}  # the first is asked for the head that the commit builds on
    commit = run.stage(rows(1))
    with pytest.raises(CommitUnknownError, match="has not written its log in time"):
        run.commit(commit)
    with pytest.raises(CommitUnknownError):
        run.sink.find_receipt(1)  # the head is there, and may still be lost
    found = run.sink.find_receipt(1)
    assert found is not None
    assert found.attempt == commit.checkpoint.attempt
    assert len(asked) == 4
    assert [row for _, row in stream_entries(redis_server)] == [{"id": "1"}]
    assert all(words[:3] == ("WAITAOF", 1, 0) for words in asked)


def test_a_server_that_does_not_say_is_refused(drive: Drive, redis_server: RedisServer, tmp_path: Path) -> None:
    client: Any = redis_server.client()
    client.execute_command("ACL", "SETUSER", "app", "on", ">hunter2", "~*", "+@all", "-config")
    drive._server = type("Shown", (), {"url": redis_server.url.replace("//", "//app:hunter2@")})()
    with pytest.raises(SinkError, match="does not say whether its log is durable") as caught:
        drive()
    assert "hunter2" not in str(caught.value)
    drive(durability="none").apply(rows(1))


@pytest.mark.parametrize("denied", ["-xadd", "-hset", "-evalsha", "-info"])
def test_a_user_that_may_not_write_leaves_nothing_half_written(
    drive: Drive, redis_server: RedisServer, denied: str
) -> None:
    redis_client: Any = redis_server.client()
    run = drive()
    run.apply(rows(1))
    commit = run.stage(rows(2, 3))
    redis_client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">hunter2", "~*", "+@all", denied)
    drive._server = type("Shown", (), {"url": redis_server.url.replace("//", "//app:hunter2@")})()
    with pytest.raises(SinkError, match=r"permission|user executing the script can't run"):
        drive(maxlen=1000).commit(commit)
    assert [row for _, row in stream_entries(redis_server)] == [{"id": "1"}]
    redis_client.execute_command("ACL", "SETUSER", "app", "+@all")
    drive(maxlen=1000).commit(commit)
    assert [row for _, row in stream_entries(redis_server)] == [{"id": "1"}, {"id": "2"}, {"id": "3"}]


def test_a_wrong_password_names_the_sink_and_not_the_password(tmp_path: Path, redis_server: RedisServer) -> None:
    drive = Drive(tmp_path, redis_server)
    drive._server = type("Shown", (), {"url": redis_server.url.replace("//", "//app:sesame@")})()
    with pytest.raises(SinkError, match="refuses this user") as caught:
        drive()
    assert "sesame" not in f"{caught.value} {caught.value.fields} {caught.value.hint}"


def test_a_server_that_is_away(tmp_path: Path) -> None:
    options = RedisSinkOptions("copy", "redis://:pass@127.0.0.1:1/0", stream="rows")
    ledger = Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)
    with pytest.raises(SinkError, match="cannot be reached") as caught:
        SinkDriver(lambda context: open_redis(options, context), ledger, generation=1)
    assert "pass" not in str(caught.value)
    assert options.location == "redis://127.0.0.1:1/0/rows"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"url": "http://host"}, "must begin with redis:// or rediss://"),
        ({"url": "redis://host/db"}, "is invalid"),
        ({"url": "redis:///0"}, "names no host"),
        ({"url": "rediss://host?ssl_cert_reqs=none"}, "'ssl_cert_reqs'"),
        ({"stream": "firnline:x"}, "must not begin with firnline:"),
        ({"stream": ""}, "needs the name of the stream"),
        ({"write": "upsert"}, "mode: stream with write: upsert"),
        ({"mode": "hash", "stream": ""}, "mode: hash with write: append"),
        ({"mode": "hash", "write": "upsert"}, "nothing says what identifies a row"),
        ({"mode": "hash", "write": "upsert", "key": ("a",), "keys": "x:{b}"}, "must name every key column once: a"),
        ({"mode": "hash", "write": "upsert", "key": ("a", "b"), "keys": "x:{a}{b}"}, "a colon between two columns"),
        ({"mode": "hash", "write": "upsert", "key": ("a",), "keys": "x:{a"}, "braces that enclose no column"),
    ],
    ids=str,
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    options = replace(RedisSinkOptions("copy", "redis://host", stream="rows"), **settings)
    ledger = Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)
    with pytest.raises(ConfigError, match=words):
        SinkDriver(lambda context: open_redis(options, context), ledger, generation=1)


def test_the_client_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    ledger = Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)
    options = RedisSinkOptions("copy", "redis://host", stream="rows")
    with pytest.raises(MissingExtraError, match="redis"):
        SinkDriver(lambda context: open_redis(options, context), ledger, generation=1)


def test_more_columns_than_a_command_takes(drive: Drive) -> None:
    run = drive()
    wide = {f"c{number}": 1 for number in range(3001)}
    with pytest.raises(FirnlineError, match="3,001 columns"):
        run.apply([wide])
    drive(fields="text", stream="narrow").apply([dict(list(wide.items())[:3000])])


# -- TLS ----------------------------------------------------------------------------------------------


def test_a_server_with_tls_must_have_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls_port = str(free_port())
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key), "tls_ca_cert_file": str(certificate)}
    with running_redis(tls_port=tls_port, tls_auth_clients="no", **files) as server:
        drive = Drive(tmp_path, server)
        url = f"rediss://localhost:{tls_port}/0"
        drive._server = type("Tls", (), {"url": url})()
        with pytest.raises(SinkError, match=r"certificate|CERTIFICATE"):
            drive()
        drive._server = type("Tls", (), {"url": f"{url}?ssl_ca_certs={certificate}"})()
        drive().apply(rows(1))
        assert [row for _, row in stream_entries(server)] == [{"id": "1"}]


# -- cluster ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisServer]:
    """A cluster of one node, which has every slot."""
    with running_redis(cluster_enabled="yes", cluster_port=str(free_port())) as server:
        client: Any = server.client()
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        yield server


def test_a_cluster_takes_one_stream_with_a_tag(cluster: RedisServer, tmp_path: Path) -> None:
    drive = Drive(tmp_path, cluster)
    run = drive(stream="events:{orders}")
    run.apply(rows(1, 2))
    assert [number for number, _ in stream_entries(cluster, "events:{orders}")] == ["1-0", "1-1"]
    for settings in ({"stream": "events"}, {"mode": "hash", "key": ("id",), "keys": "row:{id}"}):
        with pytest.raises(ConfigError, match="is a cluster, which takes one stream with a hash tag"):
            drive("other", **settings)


# -- pipelines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["stream", "hash"])
def test_a_pipeline_from_files(
    make_options: MakeOptions,
    sample: SampleInput,
    tmp_path: Path,
    redis_server: RedisServer,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink, "RANGE_ROWS", next(iter(SMALL_RANGES.values())))
    options = to_redis(make_options, tmp_path, redis_server.url, None if mode == "stream" else HASH)
    for number in (1, 2, 3):
        sample.add(f"f{number}.json", 130)
        run_to_end(options)
    assert redis_ids(redis_server, mode) == table_ids(tmp_path / "table") == sample.ids
    if mode == "stream":
        check_order(redis_server)


def test_a_rollback_leaves_the_stream_and_ids_go_on_growing(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, redis_server: RedisServer
) -> None:
    options = to_redis(make_options, tmp_path, redis_server.url)
    for number in (1, 2):
        sample.add(f"f{number}.json", 3)
        run_to_end(options)
    with pytest.raises(RollbackRefusedError, match="copy cannot take rows back"):
        Rollback(open_pipeline(options), 1).perform("person")
    Rollback(open_pipeline(options), 1, leave=["copy"]).perform("person")
    run_to_end(options)
    assert table_ids(tmp_path / "table") == sample.ids
    entries = [(number, int(row["id"])) for number, row in stream_entries(redis_server)]
    assert [one for _, one in entries] == [1, 2, 3, 4, 5, 6, 4, 5, 6], "left as it was, and given again"
    assert [number.split("-")[0] for number, _ in entries] == ["1"] * 3 + ["2"] * 3 + ["4"] * 3


# -- specs --------------------------------------------------------------------------------------------

SPEC: dict[str, Any] = {"name": "p", "sources": {"s": {"path": "in"}}}
SINK: dict[str, Any] = {"type": "redis", "url": "${env:REDIS_URL}"}


def test_a_key_per_row_implies_an_upsert() -> None:
    hashed = {**SINK, "mode": "hash", "key": ["id"], "keys": "u:{id}"}
    spec = parse_spec({**SPEC, "sinks": [{"table": "out"}, {**SINK, "stream": "r"}, hashed]}, folder="/data")
    assert [one.write for one in spec.spec.sinks] == ["append", "append", "upsert"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "stream: missing: mode: stream needs the name of the stream"),
        ({"stream": "r", "keys": "u:{id}"}, "keys: only with mode: hash or string"),
        ({"stream": "r", "write": "upsert", "key": ["id"]}, "write: a stream is appended to"),
        ({"mode": "hash", "key": ["id"], "write": "append"}, "only with write: upsert"),
        ({"mode": "hash", "key": ["id"], "stream": "r"}, "stream: only with mode: stream"),
        ({"mode": "hash"}, "key: missing: a source does not say what identifies a row"),
        ({"mode": "hash", "key": ["id"], "keys": "u"}, "keys: must name every key column once: id"),
        ({"url": "http://x", "stream": "r"}, "must begin with redis:// or rediss://"),
        ({"stream": "r", "strem": "x"}, 'did you mean "stream"'),
    ],
    ids=str,
)
def test_a_wrong_spec_names_the_key(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=re.escape(words)):
        parse_spec({**SPEC, "sinks": [{"table": "out"}, {**SINK, **settings}]}, folder="/data")


@pytest.mark.parametrize("required", [True, False])
def test_a_damaged_head_is_named_with_a_way_out_and_stops_nobody_else(
    make_options: MakeOptions, sample: SampleInput, tmp_path: Path, redis_server: RedisServer, required: bool
) -> None:
    options = to_redis(make_options, tmp_path, redis_server.url, {**STREAM, "required": required})
    sample.add("f1.json", 5)
    run_to_end(options)
    client: Any = redis_server.client()
    (key,) = client.keys("firnline:*:head")
    client.hset(key, "record", client.hget(key, "record").replace(b'"epoch"', b'"epoxh"'))
    sample.add("f2.json", 5)
    result = run_once(options).result
    assert table_ids(tmp_path / "table").total() == (5 if required else 10)
    if required:
        assert result.error is not None
        assert result.error.code == "damaged"
        assert "delete the record" in str(result.error.hint)
    client.delete(key, "rows")  # as the hint says: and with it, here, the rows
    run_to_end(options)
    run_to_end(options)
    assert redis_ids(redis_server, "stream") == sample.ids
