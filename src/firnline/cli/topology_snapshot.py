"""`firnline topology snapshot`, `list` and `drop`: snapshots of all members at one instant."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from firnline.cli.common import Common, Duration, Flag
from firnline.cli.consent import Consent
from firnline.cli.output import Output, print_failure, say, size_text, time_text
from firnline.cli.table import Column
from firnline.cli.topology_common import (
    TopologyFile,
    command_text,
    moment_text,
    open_snapshots,
    open_with_spec,
    storage_options,
)
from firnline.clock import SystemClock
from firnline.errors import FirnlineError

if TYPE_CHECKING:
    from firnline.history.topology.snapshot import Snapshots, SnapshotView
    from firnline.spec.topology import SnapshotSpec
    from firnline.topology.decide import Outcome
    from firnline.topology.records import Order

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
    snapshots, spec = open_with_spec(file)
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
    """Take one snapshot, drop older ones, and show it. Returns the exit code."""
    from firnline.history.topology.savepoint import check_copied, copy_all
    from firnline.history.topology.snapshot import join_names
    from firnline.topology.decide import Outcome

    if spec.copies:
        check_copied(snapshots.topology)
    order = snapshots.order(spec.timeout, spec.max_hold if isinstance(spec.max_hold, timedelta) else None)
    say(f"snapshot {order.snapshot}: waiting for {', '.join(sorted(order.members))}")
    stopped = [] if spec.include_stopped else sorted(set(order.members) - set(snapshots.find_running()))
    way_out = _way_to_record(snapshots, stopped, file)
    if stopped:
        say(f"{join_names(stopped)} {'has' if len(stopped) == 1 else 'have'} no run: {way_out}")
    outcome, reason = _wait(snapshots, order, file, include_stopped=spec.include_stopped)
    if outcome is Outcome.COMMIT:
        for dropped in snapshots.keep(spec.keep):
            say(f"dropped {dropped}: keep {spec.keep}")
    for dropped, why in (snapshots.limit_hold(spec.max_hold) if spec.max_hold is not None else {}).items():
        say(f"alarm: dropped {dropped}: {why} (max_hold)")
    failed = copy_all(snapshots, storage_options(snapshots.topology), say) if spec.copies else []
    view = snapshots.view(order)
    if common.json:
        common.out.json(view.to_json())
    else:
        _show_snapshot(common.out, view)
        if outcome is Outcome.COMMIT:
            common.out.sentence(f"To go back to it: {command_text('restore', file, order.snapshot, '--dry-run')}")
    if outcome is Outcome.COMMIT:
        return 1 if order.snapshot in failed else 0
    hint = "Take another one; firnline topology show shows how the members are."
    if stopped:
        hint = f"Without a run when it was ordered: {', '.join(stopped)}. Either {way_out}"
    print_failure(FirnlineError(f"snapshot {order.snapshot} was aborted: {reason}", hint=hint), debug=False)
    return 1


def _way_to_record(snapshots: Snapshots, stopped: Sequence[str], file: str | None) -> str:
    """Return what to type so that members without a run take part."""
    commands = "; ".join(snapshots.name_command("run", stopped))
    too = command_text("snapshot", file, "--include-stopped")
    return f"start {'it' if len(stopped) == 1 else 'them'} ({commands}), or record stopped members, too: {too}"


def _wait(snapshots: Snapshots, order: Order, file: str | None, *, include_stopped: bool) -> tuple[Outcome, str]:
    """Wait for the outcome of a snapshot, and say whom it waits for."""
    from firnline.topology.decide import Outcome

    outcome, reason, before, pause = Outcome.WAIT, "", ", ".join(sorted(order.members)), POLL_SECONDS
    with contextlib.ExitStack() as stack:
        stack.enter_context(_naming_open(order.snapshot, order.expires_at, file))
        if include_stopped:
            _start_stopped(snapshots, stack)
        while outcome is Outcome.WAIT:
            outcome, reason = snapshots.settle(order)
            if outcome is Outcome.WAIT:
                if reason != before:
                    say(f"waiting for {reason}")
                before = reason
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_POLL_SECONDS)  # a look costs CPU that the members lack
    return outcome, reason


@contextlib.contextmanager
def _naming_open(snapshot: str, expires_at: str, file: str | None) -> Iterator[None]:
    """Say what becomes of a snapshot if the command is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        say(
            f"interrupted: snapshot {snapshot} stays open until {moment_text(expires_at)}. "
            f"See it: {command_text('list', file)}; end it: {command_text('drop', file, snapshot, '--yes')}"
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
        until = moment_text(view.restorable_until)
        out.sentence(f"Restorable in place until {until}, unless other tools clean the tables up first.")
    _show_copy(out, view)


def _show_copy(out: Output, view: SnapshotView) -> None:
    from firnline.history.topology.snapshot import start_from_copy

    if view.copy:
        out.sentence(f"{view.id}: a new topology can start from its copy at any time: {start_from_copy(view.copy)}")


def _took(duration_ms: int | None) -> str:
    return "" if duration_ms is None else time_text(duration_ms / 1000)


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else size_text(size_bytes)


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
        common.out.sentence(f"No snapshot was taken yet. Take one: {command_text('snapshot', file)}")
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
        at = moment_text(order.created_at)
        common.out.sentence(f"Snapshot {order.snapshot} of {at} will be dropped: it can then not be restored.")
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
