"""What tests of the spec share."""

from __future__ import annotations

import pytest

from firnline.sinks import registry as sinks
from firnline.sources import registry as sources


@pytest.fixture(autouse=True)
def two_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know one kind of source and one of sink, so that no message depends on what else the package lists."""
    for registry, kind in ((sources, "files"), (sinks, "delta")):
        monkeypatch.setattr(registry, "KINDS", {kind: registry.KINDS[kind]})
