"""`firnline topology restore` and `savepoint`: all members back to one instant, and copies of a snapshot."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from firnline.cli.common import Accept, Common, Flag, Leave, TakeOver
from firnline.cli.consent import Consent
from firnline.cli.output import Output, count_text, say
from firnline.cli.table import Column
from firnline.cli.topology_common import TopologyFile, open_snapshots, storage_options
from firnline.clock import SystemClock
from firnline.config.units import parse_moment
from firnline.errors import AlreadyRunningError, ConfigError

if TYPE_CHECKING:
    from firnline.history.edits.rollback import RollbackPlan
    from firnline.history.topology.restore import RestoreResult
    from firnline.history.topology.snapshot import Snapshots
    from firnline.topology.records import RestoreOrder

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
WITHDRAW_EPILOGUE = """\
A restore that was killed before its decision has changed no row, and holds the
members: their runs end with exit code 5. This command ends the holds. A restore
that was decided can only be finished: repeat the command that began it.

Output (JSON fields):
  withdrawn [{restore, target}]

Environment:
  FIRNLINE__A__B      overrides the key a.b of every pipeline file

Examples:
  firnline topology withdraw
  firnline topology withdraw lake/topology.yml --json
"""
RESTORE_COLUMNS = (
    Column("name", "pipeline"),
    Column("now", "epoch", right=True),
    Column("then", "back to", right=True),
    Column("rows_removed", "rows out", right=True),
    Column("rows_restored", "rows in", right=True),
    Column("again", "read again", right=True, drop=1),
)


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
    options, progress = storage_options(snapshots.topology), CopyProgress(say)
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
    from firnline.history.topology.restore import check_plans, find_inconsistent, plan_restore
    from firnline.topology.decide import Decision

    if at is not None and file is None and snapshot is not None and _names_file(snapshot):
        snapshot, file = None, snapshot
    snapshots = open_snapshots(file)
    order = _find_or_order(snapshots, snapshot, file, at, {"leave": leave, "accept": accept, "without": without})
    goes_on = snapshots.home.has_restore(order.restore)
    facts: dict[str, object] = {"restore": order.restore, "target": order.target, "goes_on": goes_on}
    if goes_on:
        say(f"restore {order.restore} was begun, and goes on")
    else:
        plans = plan_restore(snapshots, order)
        inconsistent = find_inconsistent(snapshots, order)
        facts["members"] = {name: plan.to_json() for name, plan in plans.items()}
        alive = sorted(set(snapshots.find_running()) & set(order.epochs))
        facts |= {"without": list(order.without), "inconsistent": inconsistent, "running": alive}
        if not common.json:
            _show_restore(common.out, plans, order.without, inconsistent)
            if alive and not take_over:
                _show_running(common.out, snapshots, alive)
        elif not consent.decided:
            common.out.json({**facts, "done": False})
        check_plans(snapshots, plans, order)
    if not consent.is_given(f"Restore {len(order.epochs)} pipelines", common.out):
        return 0
    result = _perform(snapshots, order, take_over=take_over)
    done = result.decision is Decision.GO
    if common.json:
        common.out.json({**facts, "done": done, "reason": result.reason, "epochs": result.epochs})
    elif done:
        common.out.sentence(f"done: every pipeline is at {order.target}; their runs may start again")
    else:
        common.out.sentence(f"withdrawn, and no row has changed: {result.reason}")
    return 0 if done else 1


def _find_or_order(
    snapshots: Snapshots, snapshot: str | None, file: str | None, at: str | None, flags: Mapping[str, Sequence[str]]
) -> RestoreOrder:
    """Return the order of the restore, with the command that finishes it."""
    from firnline.history.topology.restore import find_or_order
    from firnline.types import RandomIds

    target, epochs = _find_target(snapshots, snapshot, at)
    words = [*([target] if at is None else []), *([file] if file else []), *(["--at", at] if at else [])]
    words += [word for flag, names in flags.items() for name in names for word in (f"--{flag}", name)]
    command = shlex.join(["firnline", "topology", "restore", *words, "--yes"])
    return find_or_order(snapshots, target, epochs, SystemClock(), RandomIds(), **flags, command=command)


def _perform(snapshots: Snapshots, order: RestoreOrder, *, take_over: bool) -> RestoreResult:
    """Restore under the leases of all members.

    Raises:
        AlreadyRunningError: names every member that has a run.
    """
    from firnline.history.topology.restore import perform_restore
    from firnline.run.standby import editing_history
    from firnline.types import RandomIds

    run = RandomIds().new()
    with contextlib.ExitStack() as stack:
        held: dict[str, str] = {}
        for name in sorted(order.epochs):
            options = snapshots.topology.members[name]
            try:
                stack.enter_context(editing_history(options, run, say, take_over=take_over))
            except AlreadyRunningError as error:
                held[name] = error.message
        if held:
            raise AlreadyRunningError("; ".join(held.values()), hint=_way_to_stop(snapshots, held))
        stack.enter_context(_naming_unfinished(order.command))
        return perform_restore(snapshots, order, run, SystemClock(), say)


def _show_running(out: Output, snapshots: Snapshots, alive: Sequence[str]) -> None:
    """Show which runs stand against a restore, and what to type."""
    from firnline.history.topology.snapshot import join_names

    have = "has a run" if len(alive) == 1 else "have runs"
    out.sentence(f"refused while {join_names(alive)} {have}. {_way_to_stop(snapshots, alive)}")


def withdraw(file: TopologyFile = None, *, common: Common = Common()) -> int:
    """Give up a restore that was killed before its decision."""
    from firnline.history.topology.restore import withdraw_restores

    found = withdraw_restores(open_snapshots(file))
    if common.json:
        common.out.json({"withdrawn": [{"restore": one.restore, "target": one.target} for one in found]})
    for one in found if not common.json else ():
        common.out.sentence(f"Restore {one.restore} to {one.target} is withdrawn. No row has changed; runs may start.")
    if not found and not common.json:
        common.out.sentence("No restore is under way.")
    return 0


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
    options, run = storage_options(topology), RandomIds().new()
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


def _show_restore(
    out: Output, plans: Mapping[str, RollbackPlan], without: Iterable[str], inconsistent: Iterable[str]
) -> None:
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
    for name in without:
        out.sentence(f"{name} stays as it is.")
    for line in inconsistent:
        out.sentence(f"inconsistent: {line}")
