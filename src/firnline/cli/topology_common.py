"""What the commands for topologies share: opening the snapshots of a topology file, and words of messages."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from firnline.clock import SystemClock
from firnline.errors import ConfigError

if TYPE_CHECKING:
    from firnline.history.topology.graph import Topology
    from firnline.history.topology.snapshot import Snapshots
    from firnline.spec.topology import SnapshotSpec

TopologyFile = Annotated[str | None, Parameter(help="The topology file, or its folder. [default: topology.yml here]")]


def open_snapshots(file: str | None) -> Snapshots:
    """Open the snapshots of a topology file; without one, of the topology.yml here."""
    return open_with_spec(file)[0]


def open_with_spec(file: str | None) -> tuple[Snapshots, SnapshotSpec]:
    """Open the snapshots of a topology file; also returns how it says that snapshots are taken."""
    from firnline.history.topology.graph import make_topology
    from firnline.history.topology.snapshot import Snapshots
    from firnline.spec.topology import load_topology
    from firnline.storage import open_storage
    from firnline.topology.records import TopologyHome
    from firnline.types import RandomIds

    loaded = load_topology([file] if file else [], environ=os.environ)
    if loaded.path is None:
        raise ConfigError(
            f"{file} is a pipeline file",
            hint="Snapshots belong to a topology file, whose home keeps them: write topology.yml with `name` and "
            "`pipelines`.",
        )
    topology = make_topology(loaded.pipelines)
    home = TopologyHome(open_storage(loaded.home, storage_options(topology)), loaded.name)
    file = str(loaded.path.absolute())
    return Snapshots(topology, home, SystemClock(), RandomIds(), file, loaded.files), loaded.snapshots


def command_text(verb: str, file: str | None, *words: str) -> str:
    """Return a command on the same topology, as it can be typed."""
    return shlex.join(["firnline", "topology", verb, *words, *(["--file", file] if file else [])])


def moment_text(text: str) -> str:
    """Return a moment as people read it."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def storage_options(topology: Topology) -> dict[str, str]:
    """Return the settings by which the home of a topology is opened: those of its first member."""
    return dict(next(iter(topology.members.values())).home.storage_options)
