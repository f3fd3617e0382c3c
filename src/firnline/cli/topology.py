"""`firnline topology`: shows pipelines that read what others write; snapshots and restores of all of them at once."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from cyclopts.validators import Number

from firnline.cli.common import Accept, Common, Duration, Flag, Leave, TakeOver
from firnline.cli.consent import Consent
from firnline.cli.output import Output, count_text, print_failure, say, size_text, time_text
from firnline.cli.table import Column
from firnline.clock import SystemClock
from firnline.config.units import parse_moment
from firnline.errors import AlreadyRunningError, ConfigError, FirnlineError

if TYPE_CHECKING:
    from firnline.history.edits.rollback import RollbackPlan
    from firnline.history.topology.graph import Topology
    from firnline.history.topology.show import ChannelView, TopologyView
    from firnline.history.topology.snapshot import Snapshots, SnapshotView
    from firnline.spec.topology import SnapshotSpec

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

SNAPSHOT_EPILOGUE = """\
A snapshot is one epoch of each member, such that no member has read anything
that another one wrote after its own. No run stops for it: each records the
snapshot in its next epoch, or in the epoch that reaches the first marker of it
in a table that it reads. Idle and paused runs take part. A member without a run
is waited for; --include-stopped starts a paused run of it, which records the
snapshot and ends. The snapshot is aborted after the time limit, by a history
edit of a member, and if a spec changes. Interrupted, it stays open, and the
next command completes it.

The topology file sets the defaults: snapshots: {every, keep, timeout,
include_stopped, max_hold (7d, or 50GB of files that only snapshots need: then
the oldest are dropped, with an alarm; of a time, by runs of members, too), copy
(true: a savepoint in the home)}.

gc, vacuum and log clean-up of Firnline keep what a completed snapshot needs,
and members keep their floors at or below it, until it is dropped. Other tools
do not know it: restorable_until is when the shortest retention of the tables
has passed.

Output (JSON fields; the names are those of Flink):
  id, status (IN_PROGRESS, COMPLETED, FAILED, DROPPED), trigger_timestamp,
  latest_ack_timestamp, end_to_end_duration_ms, checkpointed_size_bytes (of the
  checkpoints of its members), state_size_bytes (of the operators' state that
  they name), acknowledged (members that have recorded it / members),
  restorable_until (in place), copy (the path of its copy, with copy: true: a new
  topology can start from it at any time), reason
  members [{name, epoch, recorded_at, duration_ms (since the order), in_channels
          (its tables hold the epoch), trouble}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of every pipeline file

Examples:
  firnline topology snapshot
  firnline topology snapshot lake/topology.yml --include-stopped --timeout 2m
  firnline topology snapshot --every 10m --keep 6
"""
LIST_EPILOGUE = (
    SNAPSHOT_EPILOGUE[SNAPSHOT_EPILOGUE.index("Output (JSON") :].partition("Examples:")[0]
    + """\
Examples:
  firnline topology list
  firnline topology list lake/topology.yml --limit 0 --json
"""
)
DROP_EPILOGUE = """\
The pins of the snapshot go, and members let their floors rise with their next
epochs. A snapshot that is still open is aborted.

Output (JSON fields):
  id, done

Environment:
  FIRNLINE__A__B      overrides the key a.b of every pipeline file

Examples:
  firnline topology drop 4f2a
  firnline topology drop 4f2a lake/topology.yml --yes
"""
RESTORE_EPILOGUE = """\
Every member goes back in one epoch of its own, or none does. The command holds
all of them, so that no run goes on in between (a run that starts meanwhile ends
with exit code 5), checks that every file and state is there, decides, and then
takes each member back. Killed at any point, the same command finishes it, or
finds that it was withdrawn before the decision and no row has changed.
Afterwards each reader continues from its position, and skips what was undone.

--at needs no snapshot: it computes the newest consistent cut from the ledgers,
as far back as the floors (checkpoint.rollback_window) allow. While a run is
alive, the command is refused: stop it first, or end it with --take-over. Sinks
that cannot go back (Kafka, Redis, HTTP) must be named with --leave.

--without leaves members as they are; the plan says what becomes inconsistent.
--from-savepoint PATH starts a new topology: its members have the same names,
and tables and topics of their own (firnline topology savepoint).

Output (JSON fields):
  restore, target, goes_on (it was begun before), done, reason, epochs (the new
  epoch of each member), members {name: the fields of `firnline rollback`},
  without, inconsistent (what becomes so, in words), running (members with a
  run: while there are any, the restore is refused without --take-over)

Environment:
  FIRNLINE__A__B      overrides the key a.b of every pipeline file

Examples:
  firnline topology restore 4f2a --dry-run
  firnline topology restore 4f2a lake/topology.yml --take-over --yes
  firnline topology restore --at 2026-11-16T08:00:00Z --yes
  firnline topology restore --from-savepoint /backup/lake new/topology.yml --yes
"""
SAVEPOINT_EPILOGUE = """\
Copies a completed snapshot to another place, with all data, state and ledgers:
it then survives the loss of the tables and any vacuum. The table of each
channel is built anew, with one commit per distinct position of its readers and
one for the cut. Of each topic, the records are copied that its readers have yet
to read, up to the cut; if retention or compaction has taken some of them, the
command refuses, and names them. Killed, the same command begins anew; without
topology.json the folder is no savepoint. No run stops for it.

A new topology starts from it: pipelines, sinks and sources with the same names,
in tables and topics of their own. `firnline topology restore --from-savepoint
PATH FILE` puts the tables, the records and the state there, and each reader
goes on with what it had not read. A topic must be empty, with as many partitions
as before; on the cluster of the old topology, its sink needs another name. The
folder of each member is also a savepoint of its own.

Output (JSON fields):
  path, topology, snapshot, created_at, members {name: epoch}

Environment:
  FIRNLINE__A__B      overrides the key a.b of every pipeline file

Examples:
  firnline topology savepoint 4f2a --path /backup/lake-before-upgrade
  firnline topology savepoint 4f2a lake/topology.yml --path s3://backup/lake
"""
RESTORE_COLUMNS = (
    Column("name", "pipeline"),
    Column("now", "epoch", right=True),
    Column("then", "back to", right=True),
    Column("rows_removed", "rows out", right=True),
    Column("rows_restored", "rows in", right=True),
    Column("again", "read again", right=True, drop=1),
)
SNAPSHOT_COLUMNS = (
    Column("id"),
    Column("status"),
    Column("trigger_timestamp", "ordered", time=True),
    Column("took", right=True, drop=2),
    Column("checkpointed_size_bytes", "checkpoints", right=True, drop=4),
    Column("state_size_bytes", "state", right=True, drop=5),
    Column("acknowledged", right=True),
    Column("restorable_until", "restorable until", time=True, drop=1),
    Column("reason", cut="right", drop=3),
)
RECORD_COLUMNS = (
    Column("name", "pipeline"),
    Column("epoch", right=True),
    Column("took", right=True),
    Column("trouble", cut="right"),
)
POLL_SECONDS = 0.2
LONGEST_POLL_SECONDS = 1.0

app = App(
    name="topology", help_epilogue=EPILOGUE, help="Show chained pipelines; snapshots and restores of all of them."
)

TopologyFile = Annotated[str | None, Parameter(help="The topology file, or its folder. [default: topology.yml here]")]


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


def open_snapshots(file: str | None) -> Snapshots:
    """Open the snapshots of a topology file; without one, of the topology.yml here."""
    return _open_with_spec(file)[0]


def _open_with_spec(file: str | None) -> tuple[Snapshots, SnapshotSpec]:
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
    home = TopologyHome(open_storage(loaded.home, _storage_options(topology)), loaded.name)
    file = str(loaded.path.absolute())
    return Snapshots(topology, home, SystemClock(), RandomIds(), file, loaded.files), loaded.snapshots


def _command(verb: str, file: str | None, *words: str) -> str:
    """Return a command on the same topology, as it can be typed."""
    return shlex.join(["firnline", "topology", verb, *words, *(["--file", file] if file else [])])


def _moment(text: str) -> str:
    """Return a moment as people read it."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _storage_options(topology: Topology) -> dict[str, str]:
    return dict(next(iter(topology.members.values())).home.storage_options)


@app.command(help_epilogue=SNAPSHOT_EPILOGUE)
def snapshot(
    file: TopologyFile = None,
    *,
    timeout: Annotated[
        Duration | None, Parameter(help="Abort the snapshot after this time. [default: 10m]", show_default=False)
    ] = None,
    keep: Annotated[
        int | None,
        Parameter(
            help="Keep this many completed snapshots; drop older ones. [default: 3]",
            validator=Number(gte=1),
            show_default=False,
        ),
    ] = None,
    include_stopped: Annotated[bool, Flag, Parameter(help="Record members that have no run, too.")] = False,
    every: Annotated[
        Duration | None,
        Parameter(
            help="Take one after the other, at this interval, until interrupted. [default: one]", show_default=False
        ),
    ] = None,
    once: Annotated[bool, Flag, Parameter(help="Take one, although the topology file says `every`.")] = False,
    common: Common = Common(),
) -> int:
    """Take a snapshot of all members at one instant, while they run."""
    snapshots, spec = _open_with_spec(file)
    given = {
        "timeout": None if timeout is None else timedelta(seconds=timeout),
        "keep": keep,
        "every": None if every is None else timedelta(seconds=every),
        "include_stopped": include_stopped or None,
    }
    spec = spec.model_copy(update={name: value for name, value in given.items() if value is not None})
    for order in snapshots.find_open():
        _, reason = snapshots.settle(order)
        say(f"snapshot {order.snapshot} was open{f': {reason}' if reason else ''}")
    code = _take(snapshots, spec, file, common)
    if spec.every is None or once:
        return code
    clock = SystemClock()
    began = clock.monotonic()
    while True:
        say(f"the next snapshot is due {time_text(spec.every.total_seconds())} after this one was ordered; Ctrl-C ends")
        clock.sleep(max(0.0, began + spec.every.total_seconds() - clock.monotonic()))
        began = clock.monotonic()
        try:
            _take(snapshots, spec, file, common)
        except FirnlineError as error:  # the next one may succeed: a member starts again, storage answers
            print_failure(error, debug=common.debug)


def _take(snapshots: Snapshots, spec: SnapshotSpec, file: str | None, common: Common) -> int:
    from firnline.history.topology.savepoint import check_copied, copy_all
    from firnline.history.topology.snapshot import join_names
    from firnline.topology.decide import Outcome

    if spec.copies:
        check_copied(snapshots.topology)
    order = snapshots.order(spec.timeout, spec.max_hold if isinstance(spec.max_hold, timedelta) else None)
    say(f"snapshot {order.snapshot}: waiting for {', '.join(sorted(order.members))}")
    running = snapshots.find_running()
    stopped = [] if spec.include_stopped else sorted(set(order.members) - set(running))
    way_out = f"start {'it' if len(stopped) == 1 else 'them'} ({'; '.join(snapshots.name_command('run', stopped))}), or"
    way_out += f" record stopped members, too: {_command('snapshot', file, '--include-stopped')}"
    if stopped:
        say(f"{join_names(stopped)} {'has' if len(stopped) == 1 else 'have'} no run: {way_out}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_naming_open(order.snapshot, order.expires_at, file))
        if spec.include_stopped:
            _start_stopped(snapshots, stack)
        outcome, reason, before, pause = Outcome.WAIT, "", ", ".join(sorted(order.members)), POLL_SECONDS
        while outcome is Outcome.WAIT:
            outcome, reason = snapshots.settle(order)
            if outcome is Outcome.WAIT:
                if reason != before:
                    say(f"waiting for {reason}")
                before = reason
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_POLL_SECONDS)  # a look costs CPU that the members lack
    if outcome is Outcome.COMMIT:
        for dropped in snapshots.keep(spec.keep):
            say(f"dropped {dropped}: keep {spec.keep}")
    for dropped, why in (snapshots.limit_hold(spec.max_hold) if spec.max_hold is not None else {}).items():
        say(f"alarm: dropped {dropped}: {why} (max_hold)")
    failed = copy_all(snapshots, _storage_options(snapshots.topology), say) if spec.copies else []
    view = snapshots.view(order)
    if common.json:
        common.out.json(view.to_json())
    else:
        _show_snapshot(common.out, view)
        if outcome is Outcome.COMMIT:
            common.out.sentence(f"To go back to it: {_command('restore', file, order.snapshot, '--dry-run')}")
    if outcome is Outcome.COMMIT:
        return 1 if order.snapshot in failed else 0
    hint = "Take another one; firnline topology show shows how the members are."
    if stopped:
        hint = f"Without a run when it was ordered: {', '.join(stopped)}. Either {way_out}"
    print_failure(FirnlineError(f"snapshot {order.snapshot} was aborted: {reason}", hint=hint), debug=False)
    return 1


@contextlib.contextmanager
def _naming_open(snapshot: str, expires_at: str, file: str | None) -> Iterator[None]:
    """Say what becomes of a snapshot if the command is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        say(
            f"interrupted: snapshot {snapshot} stays open until {_moment(expires_at)}. "
            f"See it: {_command('list', file)}; end it: {_command('drop', file, snapshot, '--yes')}"
        )
        raise


def _start_stopped(snapshots: Snapshots, stack: contextlib.ExitStack) -> None:
    from firnline.history.topology.stopped import paused_run
    from firnline.jobs.spark import SparkEngine
    from firnline.sources.registry import warm_up

    for name, options in snapshots.topology.members.items():
        engine = SparkEngine(name, options.spark, prepare=functools.partial(warm_up, options.sources))
        if stack.enter_context(paused_run(options, engine, say)):
            say(f"{name} has no run: a paused one records the snapshot")


def _show_snapshot(out: Output, view: SnapshotView) -> None:
    took = f" in {time_text(view.end_to_end_duration_ms / 1000)}" if view.end_to_end_duration_ms is not None else ""
    out.sentence(f"Snapshot {view.id}: {view.status}{took}{f': {view.reason}' if view.reason else ''}")
    out.table(RECORD_COLUMNS, [{**member, "took": _took(member["duration_ms"])} for member in view.members])
    if view.restorable_until:
        out.sentence(
            f"Restorable in place until {_moment(view.restorable_until)}, unless other tools clean the tables up first."
        )
    _show_copy(out, view)


def _show_copy(out: Output, view: SnapshotView) -> None:
    from firnline.history.topology.snapshot import start_from_copy

    if view.copy:
        out.sentence(f"{view.id}: a new topology can start from its copy at any time: {start_from_copy(view.copy)}")


def _took(duration_ms: int | None) -> str:
    return "" if duration_ms is None else time_text(duration_ms / 1000)


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else size_text(size_bytes)


@app.command(name="list", help_epilogue=LIST_EPILOGUE)
def list_snapshots(
    file: TopologyFile = None,
    *,
    limit: Annotated[int, Parameter(help="Maximum number to list; 0 lists all.", validator=Number(gte=0))] = 20,
    common: Common = Common(),
) -> int:
    """List the snapshots, newest first, with what each member has recorded."""
    snapshots = open_snapshots(file)
    found = snapshots.list(limit)
    if common.json:
        common.out.json({"snapshots": [one.to_json() for one in found]})
        return 0
    if not found:
        common.out.sentence(f"No snapshot was taken yet. Take one: {_command('snapshot', file)}")
        return 0
    rows = [
        {
            **one.to_json(),
            "took": _took(one.end_to_end_duration_ms),
            "checkpointed_size_bytes": _size(one.checkpointed_size_bytes),
            "state_size_bytes": _size(one.state_size_bytes),
        }
        for one in found
    ]
    common.out.table(SNAPSHOT_COLUMNS, rows)
    if len(found) == limit:
        common.out.sentence(f"The newest {limit} are listed; --limit 0 lists all.")
    now = datetime.now(UTC)
    for one in found:
        _show_copy(common.out, one)
        if one.status == "COMPLETED" and not one.copy and one.restorable_until and _is_half_over(one, now):
            common.out.sentence(
                f"{one.id}: half of the time is over until other tools may delete what it needs. Take another one."
            )
        if one.status == "IN_PROGRESS":
            common.out.line()
            common.out.sentence(f"{one.id} is in progress:")
            common.out.table(RECORD_COLUMNS, [{**m, "took": _took(m["duration_ms"])} for m in one.members])
            waiting = {m["name"] for m in one.members if m["epoch"] is None and not m["trouble"]}
            for name in sorted(waiting - set(snapshots.find_running())):
                common.out.sentence(f"{name} has no run: {snapshots.name_command('run', [name])[0]}")
    return 0


def _is_half_over(view: SnapshotView, now: datetime) -> bool:
    begun, end = datetime.fromisoformat(view.trigger_timestamp), datetime.fromisoformat(view.restorable_until or "")
    return now - begun > (end - begun) / 2


@app.command(help_epilogue=DROP_EPILOGUE)
def drop(
    snapshot: Annotated[str, Parameter(help="The id of the snapshot, or the beginning of it.")],
    file: TopologyFile = None,
    *,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Keep a snapshot no longer."""
    snapshots = open_snapshots(file)
    order = snapshots.get_order(snapshot)
    if not common.json:
        common.out.sentence(
            f"Snapshot {order.snapshot} of {_moment(order.created_at)} will be dropped: it can then not be restored."
        )
    elif not consent.decided:
        common.out.json({"id": order.snapshot, "done": False})
    if not consent.is_given(f"Drop {order.snapshot}", common.out):
        return 0
    snapshots.drop(order.snapshot)
    if common.json:
        common.out.json({"id": order.snapshot, "done": True})
    else:
        common.out.sentence(f"done: snapshot {order.snapshot} was dropped")
    return 0


@app.command(help_epilogue=SAVEPOINT_EPILOGUE)
def savepoint(
    snapshot: Annotated[str, Parameter(help="The id of a completed snapshot, or the beginning of it.")],
    file: TopologyFile = None,
    *,
    path: Annotated[str, Parameter(help="A folder or URI that does not exist yet.")],
    common: Common = Common(),
) -> int:
    """Copy a snapshot to another place, from which a new topology can start."""
    from firnline.cli.long_task import CopyProgress, long_task
    from firnline.history.topology.savepoint import create_topology_savepoint

    snapshots = open_snapshots(file)
    options, progress = _storage_options(snapshots.topology), CopyProgress(say)
    with long_task() as task:
        saved = create_topology_savepoint(
            snapshots, snapshot, path, storage_options=options, progress=progress, stopping=task.stopping
        )
    facts = {
        "path": path,
        "topology": saved.topology,
        "snapshot": saved.snapshot,
        "created_at": saved.created_at,
        "members": saved.members,
    }
    if common.json:
        common.out.json(facts)
    else:
        common.out.sentence(f"Snapshot {saved.snapshot} is saved in {path}, with {len(saved.members)} pipelines.")
        common.out.sentence(f"Start a new topology from it: firnline topology restore --from-savepoint {path} FILE")
    return 0


@app.command(help_epilogue=RESTORE_EPILOGUE)
def restore(
    snapshot: Annotated[
        str | None, Parameter(help="The id of a completed snapshot, or the beginning of it. [default: none]")
    ] = None,
    file: TopologyFile = None,
    *,
    at: Annotated[
        str | None, Parameter(help="Restore the newest consistent cut at a time, or 30m, 1d ago. [default: none]")
    ] = None,
    accept: Accept = (),
    leave: Leave = (),
    without: Annotated[
        tuple[str, ...], Flag, Parameter(help="A member that stays as it is; repeatable. [default: none]")
    ] = (),
    from_savepoint: Annotated[
        str | None,
        Parameter(
            help="Start a new topology from this folder or URI, in tables and topics of its own. [default: none]"
        ),
    ] = None,
    take_over: TakeOver = False,
    consent: Consent = Consent(),
    common: Common = Common(),
) -> int:
    """Take every member back to one instant: a snapshot, or the newest consistent cut at a time."""
    if from_savepoint is not None:
        return _start(from_savepoint, file or snapshot, snapshot if file else None, at, consent, common)
    from firnline.history.topology import restore as restoring
    from firnline.history.topology.snapshot import join_names
    from firnline.run import standby
    from firnline.topology.decide import Decision
    from firnline.types import RandomIds

    if at is not None and file is None and snapshot is not None and _names_file(snapshot):
        snapshot, file = None, snapshot
    snapshots, clock, ids = open_snapshots(file), SystemClock(), RandomIds()
    target, epochs = _find_target(snapshots, snapshot, at)
    flags = {"--leave": leave, "--accept": accept, "--without": without}
    words = [*([target] if at is None else []), *([file] if file else []), *(["--at", at] if at else [])]
    words += [word for flag, names in flags.items() for name in names for word in (flag, name)]
    order = restoring.find_or_order(
        snapshots,
        target,
        epochs,
        clock,
        ids,
        leave=leave,
        accept=accept,
        without=without,
        command=shlex.join(["firnline", "topology", "restore", *words, "--yes"]),
    )
    goes_on = snapshots.home.has_restore(order.restore)
    facts: dict[str, object] = {"restore": order.restore, "target": order.target, "goes_on": goes_on}
    if goes_on:
        say(f"restore {order.restore} was begun, and goes on")
    else:
        plans = restoring.plan_restore(snapshots, order)
        inconsistent = restoring.find_inconsistent(snapshots, order)
        facts["members"] = {name: plan.to_json() for name, plan in plans.items()}
        alive = sorted(set(snapshots.find_running()) & set(order.epochs))
        facts |= {"without": list(order.without), "inconsistent": inconsistent, "running": alive}
        if not common.json:
            _show_restore(common.out, plans)
            for name in order.without:
                common.out.sentence(f"{name} stays as it is.")
            for line in inconsistent:
                common.out.sentence(f"inconsistent: {line}")
            if alive and not take_over:
                have = "has a run" if len(alive) == 1 else "have runs"
                common.out.sentence(f"refused while {join_names(alive)} {have}. {_way_to_stop(snapshots, alive)}")
        elif not consent.decided:
            common.out.json({**facts, "done": False})
        restoring.check_plans(snapshots, plans, order)
    if not consent.is_given(f"Restore {len(order.epochs)} pipelines", common.out):
        return 0
    run = ids.new()
    with contextlib.ExitStack() as stack:
        held: dict[str, str] = {}
        for name in sorted(order.epochs):
            options = snapshots.topology.members[name]
            try:
                stack.enter_context(standby.editing_history(options, run, say, take_over=take_over))
            except AlreadyRunningError as error:
                held[name] = error.message
        if held:
            raise AlreadyRunningError("; ".join(held.values()), hint=_way_to_stop(snapshots, held))
        stack.enter_context(_naming_unfinished(order.command))
        result = restoring.perform_restore(snapshots, order, run, clock, say)
    done = result.decision is Decision.GO
    if common.json:
        common.out.json({**facts, "done": done, "reason": result.reason, "epochs": result.epochs})
    elif done:
        common.out.sentence(f"done: every pipeline is at {order.target}; their runs may start again")
    else:
        common.out.sentence(f"withdrawn, and no row has changed: {result.reason}")
    return 0 if done else 1


def _way_to_stop(snapshots: Snapshots, members: Iterable[str]) -> str:
    """Return what to type before a restore while members have runs."""
    commands = "; ".join(snapshots.name_command("stop", members))
    return f"Stop them first: {commands}. Or repeat the command with --take-over, which ends these runs."


@contextlib.contextmanager
def _naming_unfinished(command: str) -> Iterator[None]:
    """Say how to finish a restore that is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        say(
            f"interrupted: a restore that was decided holds the pipelines until it is finished ({command}); "
            "one that was not has changed no row"
        )
        raise


def _start(path: str, file: str | None, more: str | None, at: str | None, consent: Consent, common: Common) -> int:
    """Start a new topology from a savepoint."""
    from firnline.cli.long_task import CopyProgress, long_task
    from firnline.history.topology import savepoint as saving
    from firnline.run import standby
    from firnline.storage import open_storage
    from firnline.types import RandomIds

    if more is not None or at is not None:
        raise ConfigError("--from-savepoint goes with no snapshot and no time", hint="Name the topology file only.")
    topology = open_snapshots(file).topology
    options, run = _storage_options(topology), RandomIds().new()
    saved = saving.load_topology_savepoint(open_storage(path, options))
    saving.check_start(topology, saved)
    saving.check_places(topology, path, saved, options)
    facts: dict[str, object] = {"restore": "", "target": saved.snapshot, "members": saved.members}
    if not common.json:
        for name, epoch in saved.members.items():
            common.out.sentence(f"{name}: begins with epoch {epoch} of snapshot {saved.snapshot}.")
    elif not consent.decided:
        common.out.json({**facts, "done": False})
    if not consent.is_given(f"Start {len(saved.members)} pipelines", common.out):
        return 0
    progress = CopyProgress(say)
    with contextlib.ExitStack() as stack:
        for name in sorted(saved.members):
            stack.enter_context(standby.editing_history(topology.members[name], run, say, take_over=False))
        task = stack.enter_context(long_task())
        done = saving.start_from_savepoint(
            topology, path, run, storage_options=options, report=say, progress=progress, stopping=task.stopping
        )
    epochs = {name: one.epoch for name, one in done.items()}
    if common.json:
        common.out.json({**facts, "done": True, "epochs": epochs})
    else:
        common.out.sentence(f"done: every pipeline is at snapshot {saved.snapshot}; their runs may start")
    return 0


def _find_target(snapshots: Snapshots, snapshot: str | None, at: str | None) -> tuple[str, Mapping[str, int]]:
    """Return what a restore goes to, and the epochs of the members there."""
    from firnline.history.topology.restore import find_decided, find_epochs_at, find_snapshot_epochs

    if (snapshot is None) == (at is None):
        both = ", not both" if at is not None else ""
        raise ConfigError(
            f"name a snapshot or a time{both}", hint="firnline topology list; firnline topology restore ID"
        )
    begun = find_decided(snapshots, at or snapshot or "")
    if begun is not None:
        return begun.target, {**begun.epochs, **dict.fromkeys(begun.without, 0)}
    if snapshot is not None:
        return find_snapshot_epochs(snapshots, snapshot)
    moment = parse_moment(at or "")
    if moment is None:
        raise ConfigError(f"--at {at}: not a time with a zone, nor a time ago", hint="--at 2026-11-16T08:00:00Z, or 2h")
    if moment > datetime.now(UTC):
        raise ConfigError(
            f"--at {at} is in the future: it is {datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')} now",
            hint="--at 2026-11-16T08:00:00Z, or 2h",
        )
    return at or "", find_epochs_at(snapshots, moment)


def _names_file(word: str) -> bool:
    """Return whether a word is a topology file or a folder, not the id of a snapshot."""
    from firnline.spec.topology import is_topology

    return is_topology(Path(word)) or os.path.isdir(word)


def _show_restore(out: Output, plans: Mapping[str, RollbackPlan]) -> None:
    rows = [
        {
            "name": name,
            "now": plan.from_epoch,
            "then": plan.to_epoch,
            "rows_removed": sum(sink.rows_removed for sink in plan.sinks),
            "rows_restored": sum(sink.rows_restored for sink in plan.sinks),
            "again": count_text(plan.input_records, "record"),
        }
        for name, plan in plans.items()
    ]
    out.table(RESTORE_COLUMNS, rows)
    for name, plan in plans.items():
        for sink in plan.sinks:
            if sink.left:
                out.sentence(f"{name}: sink {sink.name} keeps its rows, and gets them again")
        own = tuple(f"{sink.name}: " for sink in plan.sinks)  # what is said of each table: its readers are members
        for line in plan.not_undone:
            if not line.startswith(own):
                out.sentence(f"{name}: not undone: {line}")
    out.sentence(
        "Readers outside the topology keep what they have read. Until every pipeline is back, they may see some tables "
        "before and others after it."
    )


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
