"""Tokens and sessions: who is let in, with which rights, and for how long."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from firnline import faults
from firnline.clock import SystemClock
from firnline.errors import ConfigError
from firnline.faults import InjectedFaultError
from firnline.service.access.sessions import ENDED, SESSION_SECONDS, Sessions, load_key
from firnline.service.access.tokens import Identity, Tokens, ensure_tokens, hash_token, make_token
from firnline.service.problems import NotRecordedError
from firnline.storage import open_storage


class SetClock(SystemClock):
    def __init__(self) -> None:
        self.time = datetime(2026, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time


def write(path: Path, *entries: dict[str, object]) -> None:
    path.write_text(json.dumps({"tokens": list(entries)}))
    path.chmod(0o600)


def entry(name: str, token: str, role: str = "read", **more: object) -> dict[str, object]:
    return {"name": name, "role": role, "hash": hash_token(token), **more}


def test_the_first_token_is_made_with_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    file, shown = tmp_path / "state" / "tokens.json", tmp_path / "state" / "admin.token"
    assert ensure_tokens(file, shown)
    assert not ensure_tokens(file, shown)
    token = shown.read_text().strip()
    assert token not in file.read_text()
    assert {path.stat().st_mode & 0o777 for path in (file, shown)} == {0o600}
    assert Tokens(file, SystemClock()).find(token) == Identity("admin", "admin", data=True)


def test_tokens_are_found_by_their_hash_and_expire(tmp_path: Path) -> None:
    clock, token = SetClock(), make_token()
    until = (clock.time + timedelta(hours=1)).isoformat()
    write(tmp_path / "t", entry("ann", token, "operate", expires=until))
    tokens = Tokens(tmp_path / "t", clock)
    assert tokens.find(token) == Identity("ann", "operate")
    assert tokens.find(token + "x") is None
    assert tokens.find("") is None
    clock.time += timedelta(hours=1)
    assert tokens.find(token) is None


def test_the_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    one, two = make_token(), make_token()
    path = tmp_path / "t"
    write(path, entry("ann", one))
    tokens = Tokens(path, SystemClock())
    write(path, entry("bob", two), entry("carl", make_token()))
    assert tokens.find(one) is None
    assert tokens.find(two) == Identity("bob", "read")


def test_a_file_that_becomes_invalid_lets_nobody_in_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token, path = make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    tokens = Tokens(path, SystemClock())
    assert tokens.problem is None
    path.write_text("{")
    assert tokens.find(token) is None
    assert tokens.find(token) is None
    assert "no valid list" in str(tokens.problem)
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # said once
    write(path, entry("ann", token))
    assert tokens.find(token) == Identity("ann", "read")
    assert tokens.problem is None


@pytest.mark.parametrize("slip", [{"role": "root"}, {"hash": "plain"}, {"expires": "soon"}, {"data": "yes"}])
def test_an_entry_that_becomes_invalid_is_refused_and_the_others_are_not(
    tmp_path: Path, slip: dict[str, object]
) -> None:
    ann, bob, path = make_token(), make_token(), tmp_path / "t"
    write(path, entry("ann", ann), entry("bob", bob))
    tokens = Tokens(path, SystemClock())
    write(path, {**entry("ann", ann), **slip}, entry("bob", bob))
    assert tokens.find(ann) is None
    assert tokens.find(bob) == Identity("bob", "read")
    assert "entry 1 is not valid" in str(tokens.problem)


def test_two_entries_with_one_name_are_both_refused(tmp_path: Path) -> None:
    one, two, path = make_token(), make_token(), tmp_path / "t"
    write(path, entry("ann", one))
    tokens = Tokens(path, SystemClock())
    write(path, entry("ann", one), entry("ann", two, "admin"))
    assert (tokens.find(one), tokens.find(two)) == (None, None)
    assert "2 tokens with the name ann" in str(tokens.problem)


def test_a_file_that_others_may_change_lets_nobody_in_until_it_is_private(tmp_path: Path) -> None:
    token, path = make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    tokens = Tokens(path, SystemClock())
    path.chmod(0o666)
    assert tokens.find(token) is None
    assert "open to others" in str(tokens.problem)
    path.chmod(0o644)  # read, and not changed
    assert tokens.find(token) == Identity("ann", "read")
    assert "open to others" in str(tokens.problem)
    path.chmod(0o600)
    assert tokens.find(token) == Identity("ann", "read")
    assert tokens.problem is None


def test_a_change_in_place_with_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    one, two, path = make_token(), make_token(), tmp_path / "t"
    write(path, entry("ann", one))
    tokens = Tokens(path, SystemClock())
    before = path.stat()
    with path.open("r+") as file:
        file.write(json.dumps({"tokens": [entry("ann", two)]}))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert tokens.find(one) is None
    assert tokens.find(two) == Identity("ann", "read")


def test_a_deleted_file_lets_nobody_in(tmp_path: Path) -> None:
    token, path = make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    tokens = Tokens(path, SystemClock())
    path.unlink()
    assert tokens.find(token) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"tokens": 3}',
        '{"tokens": [{"name": "a", "role": "root", "hash": "' + "0" * 64 + '"}]}',
        '{"tokens": [{"name": "a", "role": "read", "hash": "plain"}]}',
        '{"tokens": [{"name": "a b", "role": "read", "hash": "' + "0" * 64 + '"}]}',
        '{"tokens": [{"name": "a", "role": "read", "data": "yes", "hash": "' + "0" * 64 + '"}]}',
        '{"tokens": [{"name": "a", "role": "read", "hash": "' + "0" * 64 + '", "expires": "2026-01-01T00:00:00"}]}',
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t").write_text(content)
    (tmp_path / "t").chmod(0o600)
    with pytest.raises(ConfigError):
        Tokens(tmp_path / "t", SystemClock())


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "t", entry("ann", make_token()))
    os.chmod(tmp_path / "t", 0o640)
    with pytest.raises(ConfigError, match="open to others"):
        Tokens(tmp_path / "t", SystemClock())


OWNERS = [("another", False), ("root", True), ("this user", True)]


def set_owner(monkeypatch: pytest.MonkeyPatch, path: Path, owner: str) -> None:
    """Have a file belong to root, to this user, or to another: the service is somebody else, if it is not ours."""
    if os.geteuid() != 0:
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid if owner == "this user" else uid + 1)
        if owner == "root":
            pytest.skip("only root can give a file to root")
        return
    os.chown(path, 0 if owner == "root" else 4242, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4242 if owner == "this user" else 4243)


@pytest.mark.parametrize(("owner", "trusted"), OWNERS)
def test_a_file_of_another_user_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, trusted: bool
) -> None:
    token, path = make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    before = Tokens(path, SystemClock())
    assert before.find(token) == Identity("ann", "read")
    set_owner(monkeypatch, path, owner)
    before._stamp = None  # who this process is does not change while it lives
    if trusted:
        assert before.find(token) == Tokens(path, SystemClock()).find(token) == Identity("ann", "read")
        return
    assert before.find(token) is None
    assert f"belongs to user {path.stat().st_uid}" in str(before.problem)
    with pytest.raises(ConfigError, match="belongs to user") as refused:
        Tokens(path, SystemClock())
    assert "chown" in refused.value.hint


@pytest.mark.parametrize(("owner", "trusted"), OWNERS)
def test_a_key_of_another_user_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, trusted: bool
) -> None:
    key = load_key(tmp_path / "key")
    set_owner(monkeypatch, tmp_path / "key", owner)
    assert (load_key(tmp_path / "key") == key) is trusted


def test_roles_include_the_lower_ones() -> None:
    assert Identity("a", "admin").may("operate")
    assert Identity("a", "operate").may("read")
    assert not Identity("a", "operate").may("admin")


def begin(sessions: Sessions, tokens: Tokens, token: str) -> str:
    identity = tokens.find(token)
    assert identity is not None
    return sessions.begin(identity)


def test_a_session_lasts_twelve_hours_and_no_longer_than_its_token(tmp_path: Path) -> None:
    clock, token, path = SetClock(), make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    tokens = Tokens(path, clock)
    sessions = Sessions(load_key(tmp_path / "key"), tokens, clock)
    cookie = begin(sessions, tokens, token)
    assert sessions.find(cookie) == Identity("ann", "read")
    again = Sessions(load_key(tmp_path / "key"), tokens, clock)  # after a restart of the service
    assert again.find(cookie) == Identity("ann", "read")
    clock.time += timedelta(seconds=SESSION_SECONDS)
    assert sessions.find(cookie) is None
    cookie = begin(sessions, tokens, token)
    write(path, entry("ann", token, "operate"))
    assert sessions.find(cookie) is None


def test_a_session_ends_when_its_token_is_replaced_under_the_same_name(tmp_path: Path) -> None:
    clock, leaked, path = SetClock(), make_token(), tmp_path / "t"
    write(path, entry("ann", leaked, "admin"))
    tokens = Tokens(path, clock)
    sessions = Sessions(b"k" * 32, tokens, clock)
    cookie = begin(sessions, tokens, leaked)
    write(path, entry("ann", make_token(), "admin"))
    assert sessions.find(cookie) is None


def test_a_session_cannot_be_forged_and_can_be_ended(tmp_path: Path) -> None:
    clock, token, path = SetClock(), make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    tokens = Tokens(path, clock)
    sessions = Sessions(b"k" * 32, tokens, clock)
    other = Sessions(b"x" * 32, tokens, clock)
    cookie = begin(sessions, tokens, token)
    assert other.find(cookie) is None
    for forged in ("", ".", cookie[1:], cookie + "0", cookie.replace(".", ""), "é.ü"):
        assert sessions.find(forged) is None
    sessions.end(cookie)
    assert sessions.find(cookie) is None


def test_a_session_that_was_ended_stays_ended_after_a_restart(tmp_path: Path) -> None:
    clock, token, path = SetClock(), make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    tokens, storage = Tokens(path, clock), open_storage(str(tmp_path))
    sessions = Sessions(b"k" * 32, tokens, clock, storage)
    ended, kept = begin(sessions, tokens, token), begin(sessions, tokens, token)
    sessions.end(ended)
    again = Sessions(b"k" * 32, tokens, clock, storage)
    assert again.find(ended) is None
    assert again.find(kept) == Identity("ann", "read")
    (tmp_path / ENDED).write_text("{")  # which sessions were ended is not known
    clock.time += timedelta(seconds=1)
    assert Sessions(b"k" * 32, tokens, clock, storage).find(kept) is None
    clock.time += timedelta(seconds=1)
    assert Sessions(b"k" * 32, tokens, clock, storage).find(begin(sessions, tokens, token)) is not None


@pytest.mark.parametrize("point", ["storage.put.before", "storage.put.after", "storage.publish.before"])
def test_an_end_that_cannot_be_recorded_is_said(tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, token, path = SetClock(), make_token(), tmp_path / "t"
    write(path, entry("ann", token))
    tokens, storage = Tokens(path, clock), open_storage(str(tmp_path))
    sessions = Sessions(b"k" * 32, tokens, clock, storage)
    cookie = begin(sessions, tokens, token)

    def fail(name: str) -> None:
        if name == point:
            raise InjectedFaultError(name)

    monkeypatch.setattr(faults, "followers", [fail])
    with pytest.raises(NotRecordedError):
        sessions.end(cookie)
    assert sessions.find(cookie) is None
    monkeypatch.setattr(faults, "followers", [])
    sessions.end(cookie)
    assert Sessions(b"k" * 32, tokens, clock, storage).find(cookie) is None


@pytest.mark.parametrize(("mode", "size"), [(0o644, 32), (0o600, 31), (0o600, 0)])
def test_a_key_that_others_could_read_or_that_is_damaged_is_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, size: int
) -> None:
    path = tmp_path / "session.key"
    path.write_bytes(b"k" * size)
    path.chmod(mode)
    key = load_key(path)
    assert (len(key), key == b"k" * 32, path.stat().st_mode & 0o777) == (32, False, 0o600)
    assert "session.key" in caplog.text
    assert load_key(path) == key
