"""The base class of stores refuses odd keys, notes and numbers, so that an own store never gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from firnline.errors import ConfigError
from firnline.stores import CheckpointStore, VersionInfo
from firnline.stores.base import MAX_NOTE, MAX_VALUE_BYTES
from firnline.testing.stores import ODD_KEYS


class ReachedError(Exception):
    """The store's own method was called."""


class OwnStore(CheckpointStore):
    """A store that checks nothing, and is never to be reached with odd arguments."""

    kind = "own"

    @property
    def place(self) -> str:
        return "nowhere"

    def open(self) -> None:
        raise ReachedError

    def get_raw(self, key: str) -> bytes | None:
        raise ReachedError

    def put_raw(self, key: str, data: bytes, note: str = "") -> int:
        raise ReachedError

    def delete(self, key: str) -> bool:
        raise ReachedError

    def list(self, prefix: str = "") -> Iterator[str]:
        raise ReachedError

    def latest_version(self, key: str) -> int:
        raise ReachedError

    def put_raw_versioned(self, key: str, data: bytes, expected: int, note: str = "") -> int:
        raise ReachedError

    def get_version_raw(self, key: str, version: int) -> bytes | None:
        raise ReachedError

    def list_versions(self, key: str, *, before: int | None = None, limit: int = 100) -> Sequence[VersionInfo]:
        raise ReachedError

    def prune(self, key: str, keep: int) -> int:
        raise ReachedError


def calls(store: CheckpointStore, key: str) -> list[Callable[[], object]]:
    """Return a call of every method with a key."""
    return [
        lambda: store.get_raw(key),
        lambda: store.put_raw(key, b"1"),
        lambda: store.put_raw_versioned(key=key, data=b"1", expected=0),
        lambda: store.delete(key),
        lambda: store.latest_version(key),
        lambda: store.get_version_raw(key, 1),
        lambda: store.list_versions(key, limit=1),
        lambda: store.prune(key, 1),
        lambda: store.rollback(key, 1),
    ]


@pytest.mark.parametrize("key", ODD_KEYS)
def test_no_method_gets_an_odd_key(key: str) -> None:
    for call in calls(OwnStore(), key):
        with pytest.raises(ConfigError):
            call()


def test_every_method_gets_a_good_key() -> None:
    for call in calls(OwnStore(), "p/part"):
        with pytest.raises(ReachedError):
            call()


def test_no_method_gets_an_odd_note_or_number_or_a_value_that_is_too_large() -> None:
    store = OwnStore()
    for note in ("two\nlines", "x" * (MAX_NOTE + 1)):
        with pytest.raises(ConfigError):
            store.put_raw("p", b"1", note)
        with pytest.raises(ConfigError):
            store.put_raw_versioned("p", b"1", 0, note=note)
    with pytest.raises(ConfigError):
        store.put_raw("p", bytes(MAX_VALUE_BYTES + 1))
    for keep in (0, -1):
        with pytest.raises(ConfigError):
            store.prune("p", keep)
