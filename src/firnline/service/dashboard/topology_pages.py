"""Pages about topologies: which there are; the members, channels and snapshots of one."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from firnline.errors import FirnlineError
from firnline.graph import Edge, Graph, Node
from firnline.history.topology.graph import Topology
from firnline.service.access.disclosure import message_text
from firnline.service.answers import AnswerRoute, kept
from firnline.service.api import topologies as api
from firnline.service.api.common import Name, Reader, TheService
from firnline.service.dashboard.drawings import NODE_HEIGHT, NODE_WIDTH, draw
from firnline.service.dashboard.readings import Readings
from firnline.service.dashboard.render import page
from firnline.service.topologies import get_topology
from firnline.service.views import summary

router = APIRouter(include_in_schema=False, route_class=AnswerRoute)

SHOWN = 50  # snapshots


@router.get("/t")
@kept
def show_topologies(request: Request, service: TheService, identity: Reader) -> HTMLResponse:
    """Show every topology that the service knows."""
    return page(request, "topologies.html", rows=api.list_topologies(service, identity)["topologies"])


@router.get("/t/{name}")
@kept
def show_topology(request: Request, service: TheService, name: Name, identity: Reader) -> HTMLResponse:
    """Show one topology: the graph with epochs, rates and lag, and its snapshots."""
    known = get_topology(api.find_known(service), name)

    def load() -> dict[str, Any]:
        snapshots = api.list_snapshots(service, name, identity)["snapshots"]
        found = api.show(service, name, identity)
        return {
            "drawing": draw(_graph_of(known.usable)),
            "members": {one["name"]: one for one in found["members"]},
            "channels": found["channels"],
            "cycles": found["cycles"],
            "conflicts": list(map(str, known.usable.conflicts)),
            "snapshots": snapshots[:SHOWN],
            "more": max(0, len(snapshots) - SHOWN),
        }

    reading, problem = None, None
    try:
        reading = cast("Readings", request.app.state.readings).get(("topology", name), load)
    except FirnlineError as error:
        problem = message_text(error.code, error.message, identity)
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    now = service.clock.now()
    states = {one.registered.name: summary(one, now)["state"] for one in service.supervisor.all()}
    return page(
        request,
        "topology.html",
        name=name,
        file=known.file,
        found=reading.value if reading else None,
        read_at=reading.read_at if reading else None,
        problem=problem,
        states=states,
        live=request.url.path,
        node_width=NODE_WIDTH,
        node_height=NODE_HEIGHT,
    )


def _graph_of(topology: Topology) -> Graph:
    """Return the members as nodes; two channels between the same members are one line."""
    nodes = {name: Node("operator", name, "pipeline") for name in topology.members}
    ends = dict.fromkeys((channel.writer, channel.reader) for channel in topology.channels)
    return Graph(tuple(nodes.values()), tuple(Edge(nodes[writer], "", nodes[reader]) for writer, reader in ends))
