"""The durable records of a topology: orders and outcomes of snapshots and restores, markers, requests, holds, pins.

In the topology's home, below `_topology/<name>/`: `snapshots/<id>/order.json`, then `outcome.json`, which is created
once, then `dropped.json`; `restores/<id>/order.json`, then `decision.json` and `outcome.json`, each created once. In
the home of each member, below `_firnline/<pipeline>/`, `snapshots/<id>.json` asks it to take part, and
`holds/<id>.json` holds it for a restore.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.errors import DamagedError
from firnline.faults import fault_point
from firnline.names import (
    asked_snapshot,
    asked_snapshots,
    hold_key,
    holds_folder,
    restore_file,
    restore_of,
    snapshot_dropped,
    snapshot_of,
    snapshot_order,
    snapshot_outcome,
    topology_pin,
    topology_restores,
    topology_snapshots,
)
from firnline.storage import Storage, open_storage
from firnline.topology import decide
from firnline.topology.decide import Decision, Ending
from firnline.types import Json

KEPT_RELEASED = 64  # snapshots without a hold that a checkpoint remembers
UNATTENDED = timedelta(minutes=1)  # after its time limit, before a member aborts a snapshot: its command comes first
Status = Literal["committed", "aborted"]


@dataclass(frozen=True, slots=True)
class Marker:
    """What a member needs to know of a snapshot: the request in its home, and the marker in a channel."""

    snapshot: str
    topology: str
    home: str  # of the topology: whether there is an outcome is seen there
    members: tuple[str, ...]

    def to_json(self) -> dict[str, Json]:
        return {
            "snapshot": self.snapshot,
            "topology": self.topology,
            "home": self.home,
            "members": list(self.members),
        }

    @classmethod
    def from_json(cls, value: Json, what: str) -> Marker:
        """Parse the output of `to_json`. Raises DamagedError."""
        try:
            members = tuple(str(name) for name in value["members"])
            return cls(str(value["snapshot"]), str(value["topology"]), str(value["home"]), members)
        except (KeyError, TypeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


# -- what a checkpoint remembers ------------------------------------------------------------------------


def remember(
    before: Mapping[str, Json],
    markers: Collection[Marker],
    epoch: int,
    released: Collection[str] = (),
    settled: Collection[str] = (),
) -> dict[str, Json]:
    """Return what the checkpoint of an epoch remembers: `before`, with the snapshots that the epoch records.

    Each has the epoch of its record and, until its outcome is known (`settled`), the whole marker, for the readers of
    the channels. One that was aborted or dropped holds nothing any more.
    """
    found: dict[str, Json] = {}
    for name, known in before.items():
        is_free = name in released or bool(known.get("released"))
        keys = ("epoch", "topology", "home", *(() if is_free or name in settled else ("members",)))
        kept = {key: known[key] for key in keys if key in known}
        found[name] = {**kept, **({"released": True} if is_free else {})}
    free = sorted((one for one in found if found[one].get("released")), key=lambda one: int(found[one]["epoch"]))
    for name in free[:-KEPT_RELEASED]:
        del found[name]
    for marker in markers:
        body = marker.to_json()
        found[marker.snapshot] = {**{key: body[key] for key in ("topology", "home", "members")}, "epoch": epoch}
    return found


def markers_in(remembered: Mapping[str, Json], epoch: int) -> tuple[Marker, ...]:
    """Return the markers of one epoch, from what its checkpoint remembers. One that cannot be parsed is none."""
    return _find_markers(remembered, lambda record: record == epoch)


def markers_before(remembered: Mapping[str, Json], epoch: int) -> tuple[Marker, ...]:
    """Return the markers that an epoch lies behind, from what its checkpoint remembers: of snapshots that were open."""
    return _find_markers(remembered, lambda record: decide.is_behind(record, epoch))


def _find_markers(remembered: Mapping[str, Json], is_wanted: Callable[[int], bool]) -> tuple[Marker, ...]:
    found = []
    for name, known in remembered.items():
        if isinstance(known, Mapping) and "members" in known and "epoch" in known and is_wanted(int(known["epoch"])):
            with contextlib.suppress(DamagedError):
                found.append(Marker.from_json({"snapshot": name, **known}, f"the marker of {name}"))
    return tuple(found)


def held_records(remembered: Mapping[str, Json]) -> dict[str, int]:
    """Return the records of the snapshots that hold the floor, by id."""
    return {name: int(known["epoch"]) for name, known in remembered.items() if not known.get("released")}


# -- orders and outcomes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberOrder:
    """One member as it was when a snapshot was ordered."""

    epoch: int
    attempt: str  # of that epoch
    spec: str  # a fingerprint
    tables: tuple[str, ...] = ()  # that are pinned

    def to_json(self) -> dict[str, Json]:
        return {"epoch": self.epoch, "attempt": self.attempt, "spec": self.spec, "tables": list(self.tables)}


@dataclass(frozen=True, slots=True)
class Order:
    """A snapshot that was ordered."""

    snapshot: str
    topology: str
    created_at: str
    expires_at: str
    members: dict[str, MemberOrder]
    channels: tuple[dict[str, str], ...]
    hold_until: str = ""  # max_hold ends; empty without one
    file: str = ""  # the topology file, for commands in messages
    number: int = 0  # orders of a topology are counted: clocks go back

    def to_json(self) -> dict[str, Json]:
        return {
            "snapshot": self.snapshot,
            "number": self.number,
            "topology": self.topology,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "hold_until": self.hold_until,
            "file": self.file,
            "members": {name: one.to_json() for name, one in self.members.items()},
            "channels": [dict(channel) for channel in self.channels],
        }

    @classmethod
    def from_json(cls, body: Json, what: str) -> Order:
        try:
            members = {
                str(name): MemberOrder(
                    int(one["epoch"]), str(one["attempt"]), str(one["spec"]), tuple(map(str, one["tables"]))
                )
                for name, one in body["members"].items()
            }
            return cls(
                snapshot=str(body["snapshot"]),
                topology=str(body["topology"]),
                created_at=str(body["created_at"]),
                expires_at=str(body["expires_at"]),
                members=members,
                channels=tuple(dict(channel) for channel in body["channels"]),
                hold_until=str(body.get("hold_until", "")),
                file=str(body.get("file", "")),
                number=int(body.get("number", 0)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """How a snapshot ended. `records` are the epochs of its members; `facts` are for people."""

    status: Status
    at: str
    reason: str = ""
    records: dict[str, int] = field(default_factory=dict)
    restorable_until: str | None = None
    facts: dict[str, Json] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        return {
            "status": self.status,
            "at": self.at,
            "reason": self.reason,
            "records": dict(self.records),
            "restorable_until": self.restorable_until,
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, body: Json, what: str) -> SnapshotOutcome:
        try:
            if body["status"] not in ("committed", "aborted"):
                raise DamagedError(f"{what} has the status {body['status']!r}", what=what)
            return cls(
                status=body["status"],
                at=str(body["at"]),
                reason=str(body["reason"]),
                records={str(name): int(epoch) for name, epoch in body["records"].items()},
                restorable_until=body["restorable_until"],
                facts=dict(body["facts"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """A restore that was ordered. `target` is what somebody asked for: the id of a snapshot, or a time."""

    restore: str
    target: str
    created_at: str
    epochs: dict[str, int]
    leave: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # members that stay as they are
    command: str = ""  # that finishes it, for whoever finds a hold

    def wants(self) -> tuple[Json, ...]:
        """Return what somebody asked for; two commands that want the same are one restore."""
        return self.target, self.epochs, *(sorted(set(one)) for one in (self.leave, self.accept, self.without))

    def to_json(self) -> dict[str, Json]:
        return {
            "restore": self.restore,
            "target": self.target,
            "created_at": self.created_at,
            "epochs": dict(self.epochs),
            "leave": list(self.leave),
            "accept": list(self.accept),
            "without": list(self.without),
            "command": self.command,
        }

    @classmethod
    def from_json(cls, body: Json, what: str) -> RestoreOrder:
        try:
            return cls(
                restore=str(body["restore"]),
                target=str(body["target"]),
                created_at=str(body["created_at"]),
                epochs={str(name): int(epoch) for name, epoch in body["epochs"].items()},
                leave=tuple(map(str, body["leave"])),
                accept=tuple(map(str, body["accept"])),
                without=tuple(map(str, body.get("without", ()))),
                command=str(body.get("command", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{what} lacks {error}", what=what) from error


@dataclass(frozen=True, slots=True)
class Listed:
    """What the home has of a snapshot."""

    snapshot: str
    ordered_at: datetime  # by the clock of the storage
    is_closed: bool  # it has an outcome
    is_dropped: bool


@dataclass(frozen=True, slots=True)
class Undone:
    """What a restore took back: of each member, the epochs between the one it went to and the one that it became."""

    restore: str
    back_to: dict[str, int]
    became: dict[str, int]

    def describe(self, records: Mapping[str, int]) -> str:
        """Return, in words, which record of a snapshot was taken back; empty if none was."""
        for name, became in self.became.items():
            if self.back_to[name] < records.get(name, 0) < became:
                return f"restore {self.restore} has undone epoch {records[name]} of {name}"
        return ""


class TopologyHome:
    """The records of one topology."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name

    @property
    def root(self) -> str:
        return self.storage.root

    def put_order(self, order: Order) -> None:
        """Write an order. From here on members may be asked."""
        fault_point("topology.order.before")
        self.storage.put_new(snapshot_order(self.name, order.snapshot), canonical(seal(order.to_json())))
        fault_point("topology.order.after")

    def put_outcome(self, snapshot: str, outcome: SnapshotOutcome) -> SnapshotOutcome:
        """Write the one outcome of a snapshot. Returns the one that stands: somebody else may have been first."""
        fault_point("topology.outcome.before")
        with contextlib.suppress(FileExistsError):
            key = snapshot_outcome(self.name, snapshot)
            self.storage.put_new(key, canonical(seal(outcome.to_json())))
        fault_point("topology.outcome.after")
        return self.find_outcome(snapshot) or outcome

    def put_dropped(self, snapshot: str, at: str) -> None:
        """Write that a snapshot is no longer kept: its records hold no floor, and its pins go."""
        fault_point("topology.drop.before")
        self.storage.put(snapshot_dropped(self.name, snapshot), canonical(seal({"at": at})))
        fault_point("topology.drop.after")

    def find_order(self, snapshot: str) -> Order | None:
        key = snapshot_order(self.name, snapshot)
        with self._naming_the_way_out(snapshot):
            body = _find(self.storage, key)
            return Order.from_json(body, key) if body is not None else None

    def find_outcome(self, snapshot: str) -> SnapshotOutcome | None:
        key = snapshot_outcome(self.name, snapshot)
        with self._naming_the_way_out(snapshot):
            body = _find(self.storage, key)
            return SnapshotOutcome.from_json(body, key) if body is not None else None

    @contextlib.contextmanager
    def _naming_the_way_out(self, snapshot: str) -> Iterator[None]:
        try:
            yield
        except DamagedError as error:
            folder = f"{self.root}/{topology_snapshots(self.name)}/{snapshot}"
            error.hint = f"Bring it back from a backup; or give this snapshot up: move the folder {folder} away."
            raise

    def is_dropped(self, snapshot: str) -> bool:
        return _find(self.storage, snapshot_dropped(self.name, snapshot)) is not None

    def may_unpin(self, snapshot: str, *, ordered: bool) -> bool:
        """Return whether nobody needs the pins of a snapshot. `ordered`: it has an order, or one may yet come."""
        outcome = self.find_outcome(snapshot)
        is_aborted = outcome is not None and outcome.status == "aborted"
        dropped = self.is_dropped(snapshot)
        is_restored = dropped and any(one.target == snapshot for one in self.load_unfinished())
        return decide.may_unpin(kept=ordered and not is_aborted, dropped=dropped, restoring=is_restored)

    # -- restores -------------------------------------------------------------------------------------

    def put_restore(self, order: RestoreOrder) -> None:
        """Write the order of a restore. It does nothing yet."""
        fault_point("topology.restore.before")
        self.storage.put_new(restore_file(self.name, order.restore, "order"), canonical(seal(order.to_json())))
        fault_point("topology.restore.after")

    def decide_restore(self, restore: str, decision: Decision, reason: str) -> Decision:
        """Write the one decision about a restore. Returns the one that stands."""
        fault_point("topology.decide.before")
        with contextlib.suppress(FileExistsError):
            body = {"decision": decision.value, "reason": reason}
            self.storage.put_new(restore_file(self.name, restore, "decision"), canonical(seal(body)))
        fault_point("topology.decide.after")
        found = self.find_decision(restore)
        return found[0] if found is not None else decision

    def find_decision(self, restore: str) -> tuple[Decision, str] | None:
        """Return what was decided about a restore, and why."""
        key = restore_file(self.name, restore, "decision")
        body = _find(self.storage, key)
        try:
            return (Decision(body["decision"]), str(body["reason"])) if body is not None else None
        except (KeyError, ValueError) as error:
            raise DamagedError(f"{key} lacks {error}", what=key) from error

    def release(self, restore: str, at: str, epochs: Mapping[str, int]) -> None:
        """Write the outcome of a restore, with the new epoch of each member: from here on no hold of it counts."""
        fault_point("topology.release.before")
        with contextlib.suppress(FileExistsError):
            body = canonical(seal({"at": at, "epochs": dict(epochs)}))
            self.storage.put_new(restore_file(self.name, restore, "outcome"), body)
        fault_point("topology.release.after")

    def is_released(self, restore: str) -> bool:
        """Return whether the holds of a restore count no longer: it has ended, or was withdrawn."""
        if _find(self.storage, restore_file(self.name, restore, "outcome")) is not None:
            return True
        decided = self.find_decision(restore)
        return decided is not None and decided[0] is Decision.WITHDRAWN

    def has_restore(self, restore: str) -> bool:
        """Return whether the order of a restore was written."""
        return _find(self.storage, restore_file(self.name, restore, "order")) is not None

    def load_unfinished(self) -> list[RestoreOrder]:
        """Return the restores that were begun and have not ended: one that was decided first, then oldest first.

        Nothing of one that has ended is needed any more, so nothing of it is read.
        """
        prefix = self.storage.root + "/"
        found = []
        for stat in self.storage.list(topology_restores(self.name)):
            restore = restore_of(self.name, stat.name.removeprefix(prefix))
            if restore is None or self.is_released(restore):
                continue
            key = restore_file(self.name, restore, "order")
            body = _find(self.storage, key)
            if body is not None:
                found.append(RestoreOrder.from_json(body, key))
        return sorted(found, key=lambda one: (self.find_decision(one.restore) is None, one.created_at, one.restore))

    def load_undone(self) -> list[Undone]:
        """Return what restores that have ended took back. What cannot be read says nothing."""
        prefix, found = self.storage.root + "/", []
        for stat in self.storage.list(topology_restores(self.name)):
            restore = restore_of(self.name, stat.name.removeprefix(prefix))
            if restore is None:
                continue
            with contextlib.suppress(DamagedError):
                key = restore_file(self.name, restore, "order")
                outcome = _find(self.storage, restore_file(self.name, restore, "outcome"))
                body = _find(self.storage, key) if outcome is not None and outcome.get("epochs") else None
                if body is not None and outcome is not None:
                    new = {str(name): int(epoch) for name, epoch in outcome["epochs"].items()}
                    found.append(Undone(restore, RestoreOrder.from_json(body, key).epochs, new))
        return found

    def find_unfinished(self) -> RestoreOrder | None:
        """Return the restore that was begun and has not ended."""
        return next(iter(self.load_unfinished()), None)

    # -- looking --------------------------------------------------------------------------------------

    def list_snapshots(self) -> list[Listed]:
        """Return which snapshots there are and how far each is, oldest first, from the names of files alone."""
        prefix = self.storage.root + "/"
        times = {
            stat.name.removeprefix(prefix): stat.modified_at
            for stat in self.storage.list(topology_snapshots(self.name))
        }
        found = []
        for key, at in times.items():
            if (one := snapshot_of(self.name, key)) is not None:
                is_closed, is_dropped = (make(self.name, one) in times for make in (snapshot_outcome, snapshot_dropped))
                found.append(Listed(one, at, is_closed, is_dropped))
        return sorted(found, key=lambda one: (one.ordered_at, one.snapshot))

    def load_orders(self, snapshots: Iterable[Listed]) -> list[Order]:
        """Return the orders of some snapshots, oldest first."""
        found = [order for one in snapshots if (order := self.find_order(one.snapshot)) is not None]
        return sorted(found, key=lambda one: (one.number, one.created_at, one.snapshot))


def _find(storage: Storage, key: str) -> dict[str, Json] | None:
    try:
        return unseal(parse(storage.get(key), key), key)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        error.hint = f"There is no other copy: bring {storage.root}/{key} back from a backup."
        raise


# -- the request in a member's home ---------------------------------------------------------------------


def ask(storage: Storage, pipeline: str, marker: Marker) -> None:
    """Ask a member to record a snapshot."""
    fault_point("topology.ask.before")
    storage.put(asked_snapshot(pipeline, marker.snapshot), canonical(seal(marker.to_json())))
    fault_point("topology.ask.after")


def stop_asking(storage: Storage, pipeline: str, snapshot: str) -> None:
    """Delete the request: the snapshot has an outcome."""
    storage.delete(asked_snapshot(pipeline, snapshot))


def load_asked(storage: Storage, pipeline: str) -> list[Marker]:
    """Return the snapshots that a member is asked to record. An unreadable request is left alone."""
    found = []
    for stat in storage.list(asked_snapshots(pipeline)):
        name = stat.name.rsplit("/", 1)[-1]
        if name.startswith("."):
            continue
        key = f"{asked_snapshots(pipeline)}/{name}"
        with contextlib.suppress(DamagedError):
            body = _find(storage, key)
            if body is not None:
                found.append(Marker.from_json(body, key))
    return sorted(found, key=lambda marker: marker.snapshot)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A snapshot that holds the floor of a member longer than `max_hold` allows."""

    snapshot: str
    topology: str
    epoch: int  # of the record: the floor stays there
    hold_until: str
    command: str  # that drops it

    def __str__(self) -> str:
        return (
            f"snapshot {self.snapshot} of topology {self.topology!r} holds the floor at epoch {self.epoch}, beyond its "
            f"max_hold, which ended at {self.hold_until}; to drop it: {self.command}"
        )


def _is_over(end: str, now: datetime) -> bool:
    """Return whether a moment has passed; an empty one never does."""
    return bool(end) and now >= datetime.fromisoformat(end)


class Outcomes:
    """What became of snapshots, as far as a member can see it: it opens their homes with its own storage options.

    A home that cannot be read says nothing: then a snapshot counts as open, and its record is kept.
    """

    def __init__(self, storage_options: Mapping[str, str]) -> None:
        self._options = dict(storage_options)
        self._found: dict[str, SnapshotOutcome] = {}
        self._orders: dict[str, Order] = {}

    def find(self, marker: Marker) -> SnapshotOutcome | None:
        """Return the outcome of a snapshot; None while it is open, or unknown."""
        if marker.snapshot not in self._found:
            with contextlib.suppress(OSError, DamagedError):
                outcome = self._home(marker.topology, marker.home).find_outcome(marker.snapshot)
                if outcome is not None:
                    self._found[marker.snapshot] = outcome
        return self._found.get(marker.snapshot)

    def is_settled(self, snapshot: str) -> bool:
        """Return whether the outcome of a snapshot was seen. Reads nothing."""
        return snapshot in self._found

    def is_released(self, snapshot: str, known: Mapping[str, Json]) -> bool:
        """Return whether a snapshot that a checkpoint remembers was aborted or dropped."""
        marker = Marker(snapshot, str(known.get("topology", "")), str(known.get("home", "")), ())
        outcome = self.find(marker)
        if outcome is None:
            return False
        try:
            dropped = self._home(marker.topology, marker.home).is_dropped(snapshot)
        except (OSError, DamagedError):
            dropped = False
        return decide.is_released(aborted=outcome.status == "aborted", dropped=dropped)

    def find_overdue(self, recorded: Mapping[str, Json], now: datetime) -> list[Overdue]:
        """Return the snapshots that hold the floor longer than `max_hold` allows, of those that a checkpoint
        remembers."""
        found = []
        for snapshot, epoch in held_records(recorded).items():
            known = self._find_order(snapshot, recorded[snapshot])
            if known is None or not _is_over(known.hold_until, now):
                continue
            if not self.is_released(snapshot, recorded[snapshot]):
                words = ["firnline", "topology", "drop", snapshot, *([known.file] if known.file else []), "--yes"]
                found.append(Overdue(snapshot, known.topology, epoch, known.hold_until, shlex.join(words)))
        return found

    def end_unattended(self, recorded: Mapping[str, Json], now: datetime) -> dict[str, str]:
        """End the snapshots that hold the floor and that nobody looks after: one without an outcome is aborted some
        time after its limit, and one that was held for longer than `max_hold` is dropped. Returns why, by id.

        A snapshot whose home cannot be written stays as it is.
        """
        found: dict[str, str] = {}
        for snapshot in held_records(recorded):
            known = self._find_order(snapshot, recorded[snapshot])
            if known is None or self.is_released(snapshot, recorded[snapshot]):
                continue
            home = self._home(known.topology, str(recorded[snapshot].get("home", "")))
            outcome = self.find(Marker(snapshot, known.topology, home.root, ()))
            ending = decide.find_ending(
                open_=outcome is None,
                aborted=outcome is not None and outcome.status == "aborted",
                expired=_is_over(known.expires_at, now - UNATTENDED),
                overdue=_is_over(known.hold_until, now),
            )
            with contextlib.suppress(OSError, DamagedError):
                match ending:
                    case Ending.ABORT:
                        reason = f"its time limit was over at {known.expires_at}, and no command completed it"
                        made = home.put_outcome(snapshot, SnapshotOutcome("aborted", now.isoformat(), reason))
                        if made.reason == reason:
                            found[snapshot] = f"aborted: {reason}"
                    case Ending.DROP:
                        home.put_dropped(snapshot, now.isoformat())
                        found[snapshot] = f"dropped: its max_hold was over at {known.hold_until}"
        return found

    def _find_order(self, snapshot: str, known: Mapping[str, Json]) -> Order | None:
        """Return the order of a snapshot that a checkpoint remembers; None if it cannot be read."""
        if snapshot not in self._orders:
            with contextlib.suppress(OSError, DamagedError):
                order = self._home(str(known.get("topology", "")), str(known.get("home", ""))).find_order(snapshot)
                if order is not None:
                    self._orders[snapshot] = order
        return self._orders.get(snapshot)

    def _home(self, topology: str, home: str) -> TopologyHome:
        return TopologyHome(open_storage(home, self._options), topology)


# -- the hold in a member's home ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """A restore holds a member: whoever claims it stops, until the restore has its outcome."""

    restore: str
    topology: str
    home: str
    command: str = ""  # that finishes the restore
    key: str = ""  # where it was found

    def find_way_out(self, storage: Storage, storage_options: Mapping[str, str]) -> str:
        """Return, in words, how the hold ends."""
        command = self.command or "repeat the `firnline topology restore` command that began it"
        try:
            home = TopologyHome(open_storage(self.home, dict(storage_options)), self.topology)
            if home.has_restore(self.restore):
                if home.find_decision(self.restore) is not None:
                    return f"Let it finish: {command}"
                return f"Let it finish: {command}. Or give it up, while undecided: firnline topology withdraw FILE"
        except (OSError, DamagedError):
            pass
        return (
            f"Let it finish: {command}. Its order cannot be read in {self.home}: bring that folder back. If it is lost "
            "for good, compare the epochs of the members (firnline topology show), and delete "
            f"{storage.root}/{self.key}"
        )


def put_hold(storage: Storage, pipeline: str, hold: Hold) -> None:
    """Hold a member. Whoever does it looks for holds of other restores afterwards, and withdraws if there is one."""
    fault_point("topology.hold.before")
    body = {"restore": hold.restore, "topology": hold.topology, "home": hold.home, "command": hold.command}
    storage.put(hold_key(pipeline, hold.restore), canonical(seal(body)))
    fault_point("topology.hold.after")


def find_holds(storage: Storage, pipeline: str, storage_options: Mapping[str, str]) -> list[Hold]:
    """Return the holds of restores that have not ended. If a topology's home cannot be read, its hold counts.

    Raises:
        DamagedError: a hold cannot be read. It may count.
    """
    found = []
    for stat in storage.list(holds_folder(pipeline)):
        name = stat.name.rsplit("/", 1)[-1]
        key = f"{holds_folder(pipeline)}/{name}"
        body = None if name.startswith(".") else _find(storage, key)
        if body is None:
            continue
        try:
            command = str(body.get("command", ""))
            hold = Hold(str(body["restore"]), str(body["topology"]), str(body["home"]), command, key)
        except KeyError as error:
            raise DamagedError(f"{key} lacks {error}", what=key) from error
        if not _has_ended(hold, storage_options):
            found.append(hold)
    return found


def _has_ended(hold: Hold, storage_options: Mapping[str, str]) -> bool:
    try:
        home = TopologyHome(open_storage(hold.home, dict(storage_options)), hold.topology)
        return home.is_released(hold.restore)
    except (OSError, DamagedError):
        return False


def delete_hold(storage: Storage, pipeline: str, restore: str) -> None:
    """Delete a hold that counts no longer."""
    storage.delete(hold_key(pipeline, restore))


# -- pins -----------------------------------------------------------------------------------------------


def put_pin(storage: Storage, snapshot: str, **facts: Json) -> None:
    """Protect what a snapshot needs of one table. With `since`, everything from that version on."""
    fault_point("topology.pin.before")
    storage.put(topology_pin(snapshot), canonical(seal({"kind": "topology", "snapshot": snapshot, **facts})))
    fault_point("topology.pin.after")


def delete_pin(storage: Storage, snapshot: str) -> None:
    """Delete the pin of a snapshot that was aborted or dropped."""
    storage.delete(topology_pin(snapshot))
