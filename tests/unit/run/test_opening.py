from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from firnline.process import HungError
from firnline.run import opening


def test_an_optional_sink_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "READ_SECONDS", 0.05)
    answers = threading.Event()
    optional: Any = SimpleNamespace(required=False)
    with pytest.raises(HungError):
        opening._ask(optional, answers.wait)
    answers.set()
    assert opening._ask(optional, lambda: 7) == 7
