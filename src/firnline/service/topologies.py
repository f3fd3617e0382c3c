"""The topologies that the service knows: topology files beside the pipeline files, and what other pipelines form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from firnline.errors import FirnlineError
from firnline.history.topology.graph import Topology, make_topology
from firnline.history.topology.snapshot import Snapshots
from firnline.service.problems import ConflictError, NotFoundError
from firnline.service.supervise.supervisor import Supervisor
from firnline.spec.topology import load_topology
from firnline.storage import open_storage
from firnline.topology.records import TopologyHome
from firnline.types import Clock, RandomIds

DERIVED = "derived"  # the name of the topology that no file names


@dataclass(frozen=True, slots=True)
class KnownTopology:
    """One topology: of a file, or derived from pipelines that no topology file names. `problem`: why it cannot be
    used."""

    name: str
    file: str | None = None
    topology: Topology | None = None
    home: str = ""
    problem: str | None = None
    path: Path | None = None  # of the file
    every: timedelta | None = None  # between two snapshots

    @property
    def usable(self) -> Topology:
        """The members and channels; ConflictError, with the problem, if the file cannot be used."""
        if self.topology is None:
            raise ConflictError(f"topology {self.name!r} cannot be used: {self.problem}", hint=f"Edit {self.file}.")
        return self.topology

    def open(self, clock: Clock) -> Snapshots:
        """Open its snapshots; ConflictError if it has no file, and so no home for them."""
        topology = self.usable
        if self.file is None:
            raise ConflictError(
                "no topology file names these pipelines, so there is no place for snapshots",
                hint="Write topology.yml with `name` and `pipelines` beside the pipeline files.",
            )
        options = next(iter(topology.members.values())).home.storage_options
        return Snapshots(topology, TopologyHome(open_storage(self.home, options), self.name), clock, RandomIds())


def find_topologies(supervisor: Supervisor, names: str) -> list[KnownTopology]:
    """Load every topology file, and derive one topology from the pipelines that none of them names.

    Args:
        names: The pattern of names that a client can ask for; a file with another name is shown with its problem.
    """
    found: dict[str, KnownTopology] = {}
    taken: set[str] = set()
    for path in supervisor.topology_files():
        one = load_known(path, supervisor.environ)
        if one.topology is not None and re.match(names, one.name) is None:
            one = KnownTopology(path.name, path.name, problem="its name has characters that addresses cannot have")
        if one.name in found:
            one = KnownTopology(f"{path.parent.name}.{path.name}", path.name, problem=f"{one.name!r} is named twice")
        found[one.name] = one
        taken |= set(one.topology.members) if one.topology is not None else set()
    seen = (one.registered.options for one in supervisor.all())
    rest = make_topology(options for options in seen if options is not None and options.name not in taken)
    joined = {name: options for name, options in rest.members.items() if name not in rest.outside}
    if joined:
        name = DERIVED
        while name in found:
            name += "-"
        found[name] = KnownTopology(name, topology=make_topology(joined.values()))
    return list(found.values())


def get_topology(known: Iterable[KnownTopology], name: str) -> KnownTopology:
    """Return the topology with this name; NotFoundError if there is none."""
    found = next((one for one in known if one.name == name), None)
    if found is None:
        raise NotFoundError("no topology has this name", hint="GET /api/v1/topologies lists them.")
    return found


def load_known(path: Path, environ: Mapping[str, str]) -> KnownTopology:
    """Load a topology file; one that cannot be used is returned with its problem."""
    try:
        loaded = load_topology([str(path)], environ=environ)
        topology = make_topology(loaded.pipelines)
        return KnownTopology(
            loaded.name, path.name, topology, loaded.home, path=path.absolute(), every=loaded.snapshots.every
        )
    except FirnlineError as error:
        return KnownTopology(path.name, path.name, problem=error.message)
    except OSError as error:
        return KnownTopology(path.name, path.name, problem=f"cannot be read: {error.strerror or error}")
