"""What a checkpoint remembers of followers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from firnline.sinks.known import KnownSink, newest_seen, next_known


@pytest.mark.parametrize(
    ("head", "born", "held"),
    [(7, 0, 7), (3, 0, 3), (0, 0, 5), (2, 4, 4), (0, 4, 5)],
    ids=["it went on", "it went back", "it could not be read", "it was resumed", "resumed, and not read"],
)
def test_a_follower_that_could_not_be_read_keeps_what_it_was_seen_to_hold(head: int, born: int, held: int) -> None:
    known = {"copy": KnownSink("target", born, 5, "copy")}
    followers: list[Any] = [SimpleNamespace(name="copy", target="target", renamed_from="")]
    assert next_known(known, followers, 9, {"copy": head}, {})["copy"] == KnownSink("target", born, held, "copy")
    assert newest_seen(known, {"table": 8, "copy": head}) == {"table": 8, "copy": held}
