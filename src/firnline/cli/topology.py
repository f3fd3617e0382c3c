"""`firnline topology`: shows pipelines that read what others write; snapshots and restores of all of them at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from firnline.cli import topology_restore, topology_snapshot
from firnline.cli.common import Common
from firnline.cli.output import Output, count_text, size_text
from firnline.cli.table import Column

if TYPE_CHECKING:
    from firnline.history.topology.graph import Topology
    from firnline.history.topology.show import ChannelView, TopologyView

EPILOGUE = """\
A topology is a file, topology.yml, with `name` and `pipelines` (pipeline files
or their folders); or a list of pipeline files. Its channels are derived: a
Delta table or Kafka topic that one of the pipelines writes and another one
reads. A table or topic with several writers is no channel; the command names
it, and ends with exit code 1.

Output (JSON fields):
  topology (empty without a file)
  members   [{name, epoch, committed_at, rows_per_second (of the last hour;
            null without a record of it), error}]
  channels  [{place, kind, writer, sink, reader, source, epoch (that the sink
            holds), files_behind, bytes_behind, error}]
  cycles    [[name]]: members that read from each other
  outside   [name]: members without a channel
  conflicts [{place, writers [{pipeline, sink}]}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of every pipeline file

Examples:
  firnline topology show
  firnline topology show lake/topology.yml --json
  firnline topology show bronze.yml silver.yml gold.yml
"""
MEMBER_COLUMNS = (
    Column("name", "pipeline", cut="right"),
    Column("epoch", right=True),
    Column("committed_at", "newest checkpoint", time=True, drop=2),
    Column("rate", "rows/s", right=True, drop=1),
)
CHANNEL_COLUMNS = (
    Column("from_to", "channel"),
    Column("kind", drop=2),
    Column("epoch", right=True, drop=1),
    Column("behind", right=True),
    Column("place", cut="left", drop=3),
)


app = App(
    name="topology", help_epilogue=EPILOGUE, help="Show chained pipelines; snapshots and restores of all of them."
)


@app.command(help_epilogue=EPILOGUE)
def show(
    *files: Annotated[
        str, Parameter(help="A topology file, or pipeline files or their folders. [default: topology.yml here]")
    ],
    common: Common = Common(),
) -> int:
    """Show members, channels, lag, cycles, and tables or topics with several writers."""
    from firnline.history.topology.graph import make_topology
    from firnline.history.topology.show import load_view, show_topology
    from firnline.spec.topology import load_topology

    loaded = load_topology(files, environ=os.environ)
    topology = make_topology(loaded.pipelines)
    view = load_view(topology, datetime.now(UTC))
    if common.json:
        common.out.json(show_topology(loaded.name, topology, view))
    else:
        _show(common.out, topology, view)
    return 1 if topology.conflicts else 0


app.command(topology_snapshot.snapshot, help_epilogue=topology_snapshot.SNAPSHOT_EPILOGUE)
app.command(topology_snapshot.list_snapshots, name="list", help_epilogue=topology_snapshot.LIST_EPILOGUE)
app.command(topology_snapshot.drop, help_epilogue=topology_snapshot.DROP_EPILOGUE)
app.command(topology_restore.savepoint, help_epilogue=topology_restore.SAVEPOINT_EPILOGUE)
app.command(topology_restore.restore, help_epilogue=topology_restore.RESTORE_EPILOGUE)
app.command(topology_restore.withdraw, help_epilogue=topology_restore.WITHDRAW_EPILOGUE)


def _show(out: Output, topology: Topology, view: TopologyView) -> None:
    for line in draw(topology):
        out.line(line)
    out.line()
    rows = [{**member.to_json(), "rate": member.rows_per_second} for member in view.members]
    out.table(MEMBER_COLUMNS, rows)
    if view.channels:
        out.line()
        out.table(CHANNEL_COLUMNS, [_channel_row(channel) for channel in view.channels])
    for member in view.members:
        if member.error:
            out.sentence(f"{member.name} cannot be read: {member.error}")
    for channel in view.channels:
        if channel.error:
            out.sentence(f"{channel.channel.place}: {channel.error}")
    for cycle in topology.cycles:
        names = " and ".join(cycle)
        out.sentence(f"cycle: {names} read from each other" if len(cycle) > 1 else f"cycle: {names} reads from itself")
    if topology.outside:
        out.sentence(f"no channel: {', '.join(topology.outside)}")
    for conflict in topology.conflicts:
        out.sentence(f"several writers: {conflict}. A channel has one: give each a table or topic of its own.")


def _channel_row(view: ChannelView) -> dict[str, object]:
    channel = view.channel
    behind = None
    if view.files_behind is not None:
        words = count_text(view.files_behind, "file" if channel.kind == "delta" else "partition")
        behind = f"{words}, {size_text(view.bytes_behind or 0)}" if view.files_behind else "nothing"
    return {
        "from_to": f"{channel.writer} -> {channel.reader}",
        "kind": channel.kind,
        "epoch": view.epoch,
        "behind": behind,
        "place": channel.place,
    }


def draw(topology: Topology) -> Iterator[str]:
    """Yield the graph as lines: each member that nobody feeds, with its readers below it.

    A member that was drawn before is named again, without its readers.
    """
    readers: dict[str, list[str]] = {name: [] for name in topology.members}
    for channel in topology.channels:
        if channel.reader not in readers[channel.writer]:
            readers[channel.writer].append(channel.reader)
    fed = {channel.reader for channel in topology.channels}
    drawn: set[str] = set()

    def branch(name: str, before: str, below: str) -> Iterator[str]:
        again = name in drawn
        yield before + name + (" (above)" if again and readers[name] else "")
        if again:
            return
        drawn.add(name)
        for index, reader in enumerate(readers[name]):
            is_last = index + 1 == len(readers[name])
            yield from branch(reader, below + ("`-> " if is_last else "|-> "), below + ("    " if is_last else "|   "))

    for name in sorted(topology.members, key=lambda name: (name in fed, name)):  # the rest are in cycles
        if name not in drawn:
            yield from branch(name, "", "")
