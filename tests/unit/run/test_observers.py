"""Several observers as one: each hears everything."""

from __future__ import annotations

import inspect
from typing import Any
from unittest.mock import Mock

import pytest

from firnline.run.observer import Observer, Observers

HEARD = [name for name, _ in inspect.getmembers(Observer, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", HEARD)
def test_every_observer_hears_what_is_told(name: str) -> None:
    one, other = Mock(spec=Observer), Mock(spec=Observer)
    told: list[Any] = [object() for _ in list(inspect.signature(getattr(Observer, name)).parameters)[1:]]
    getattr(Observers(one, other), name)(*told)
    getattr(one, name).assert_called_once_with(*told)
    getattr(other, name).assert_called_once_with(*told)
