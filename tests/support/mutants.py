"""Plants a bug in the epoch's decisions, or in the rules of a simulated world, for a search that must catch it."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType

from firnline.epoch import decide as epoch
from tests.support.simulation import Simulation
from tests.support.world import Scenario


@dataclass(frozen=True)
class Mutant:
    """One planted bug: what replaces a line of the decisions, or the world that breaks a rule."""

    scenario: Scenario
    old: str = ""
    new: str = ""
    world: type[Simulation] | None = None
    sound: type[Simulation] | None = None  # the world in which the real decisions keep every promise


def mutated(old: str, new: str) -> ModuleType:
    """The decisions with one snippet of their source changed."""
    source = inspect.getsource(epoch)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    module = ModuleType("mutated_epoch")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source.replace(old, new), "mutated_epoch.py", "exec"), module.__dict__)  # our own source
    return module
