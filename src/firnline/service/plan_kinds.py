"""The kinds of actions that are planned first and confirmed then: what each reads of a request, shows, and does.

Each works through `history/`, like the command line.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from firnline.config.units import parse_moment
from firnline.errors import ConfigError
from firnline.history.agreed import check_agreed
from firnline.history.dead_letters import LetterFilter
from firnline.history.file_requests import DropPlan, ask_drop, ask_reread, ask_retry, find_set_aside, plan_drop
from firnline.history.quarantine_requests import RecordFilter, ask_records, choose_records
from firnline.history.reread import RereadPlan, plan_reread
from firnline.history.savepoints.catalog import Disposed, dispose_savepoint
from firnline.history.savepoints.pins import load_pins
from firnline.history.store import on_record
from firnline.run.open_pipeline import OpenPipeline
from firnline.service.access.tokens import Role
from firnline.types import Json

if TYPE_CHECKING:  # an edit needs what runs need; the service loads it when the first one is asked for
    from firnline.history.edits.dead_letters import LetterEdit
    from firnline.history.edits.rollback import Rollback
    from firnline.history.edits.sinks import SinkEdit


@dataclass(frozen=True, slots=True)
class Planned:
    """What an action would do.

    Attributes:
        body: As the command line shows it with `--json`.
        agreed: The facts that must be the same when it is confirmed.
        request: The request, with everything that depends on the time of the plan replaced by what it meant.
    """

    body: dict[str, Json]
    agreed: dict[str, Json]
    request: Mapping[str, Json]
    refusals: list[str] = field(default_factory=list)


class Action(ABC):
    """One action on one pipeline."""

    def __init__(self, pipeline: OpenPipeline, request: Mapping[str, Json]) -> None:
        self.pipeline = pipeline
        self.request = request

    @abstractmethod
    def plan(self) -> Planned:
        """Return what it would do. Writes nothing."""

    @abstractmethod
    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        """Do it, under the run id `run`. Repeating it after a kill changes nothing more.

        Args:
            begun: Whether the audit trail has its beginning already, and no end: a former time was cut off.

        Raises:
            PlanChangedError: it would do something else than what was agreed to.
        """

    @abstractmethod
    def words(self) -> list[str]:
        """Return the command that does the same, after `firnline`, without the spec and `--yes`."""

    def command(self, spec: str) -> str:
        """Return the command line that does the same."""
        take_over = ["--take-over"] if self.request.get("take_over") else []
        return shlex.join(["firnline", *self.words(), *take_over, "-f", spec, "--yes"])


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of action.

    Attributes:
        role: Who may plan and confirm it.
        edits: Whether it is an epoch of its own, for which no run may be alive.
        ends_stopped: Whether the pipeline stays stopped afterwards: its next run would read the same input again.
    """

    role: Role
    build: Callable[[OpenPipeline, Mapping[str, Json]], Action]
    edits: bool = False
    ends_stopped: bool = False


class RollbackAction(Action):
    """Rolls tables and checkpoint back to an earlier epoch."""

    def _find_edit(self, epoch: int) -> Rollback:
        from firnline.history.edits.rollback import Rollback

        accept, leave = self.request.get("accept") or (), self.request.get("leave") or ()
        return Rollback(self.pipeline, epoch, accept=accept, leave=leave)

    def plan(self) -> Planned:
        from firnline.history.edits.rollback import find_epoch_at, find_position_texts

        to, to_time = self.request.get("to"), self.request.get("to_time")
        if (to is None) == (to_time is None):
            raise ConfigError("name the target of the rollback: `to`, an epoch, or `to_time`", hint='{"to": 41}')
        epoch = int(to) if to is not None else find_epoch_at(self.pipeline, _find_moment(str(to_time)))
        plan = self._find_edit(epoch).plan()
        request = {**self.request, "to": epoch, "to_time": None}
        body = {**plan.to_json(), "position_texts": find_position_texts(self.pipeline, plan)}
        return Planned(body, plan.agreed(), request, [error.message for error in plan.refusals])

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        self._find_edit(int(self.request["to"])).perform(run, agreed=agreed)
        return {}

    def words(self) -> list[str]:
        to = self.request.get("to")
        target = ["--to", str(to)] if to is not None else ["--to-time", str(self.request.get("to_time"))]
        names = [("--accept", name) for name in self.request.get("accept") or ()]
        names += [("--leave", name) for name in self.request.get("leave") or ()]
        return ["rollback", *target, *(word for pair in names for word in pair)]


class SinkAction(Action):
    """Copies a follower anew, lets it go on after a gap, or forgets it."""

    def _find_edit(self) -> SinkEdit:
        from firnline.history.edits.sinks import SinkEdit

        request = self.request
        if request["action"] == "resume" and not request.get("accept_gap"):
            raise ConfigError(
                f"sink {request['sink']!r} would never get the epochs that it lacks",
                hint="If it may: accept_gap: true. To copy it: resync.",
            )
        return SinkEdit(self.pipeline, request["action"], str(request["sink"]), str(request.get("copy_from") or ""))

    def plan(self) -> Planned:
        plan = self._find_edit().plan()
        body = {**asdict(plan), "epochs_skipped": plan.epochs_skipped}
        return Planned(body, plan.agreed(), self.request)

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        self._find_edit().perform(run, agreed=agreed)
        return {}

    def words(self) -> list[str]:
        words = ["sinks", str(self.request["action"]), str(self.request["sink"])]
        words += ["--accept-gap"] if self.request.get("accept_gap") else []
        return words + (["--from", str(self.request["copy_from"])] if self.request.get("copy_from") else [])


class LetterAction(Action):
    """Delivers dead letters once more, or drops them."""

    def _find_edit(self) -> LetterEdit:
        from firnline.history.edits.dead_letters import LetterEdit

        request = self.request
        wanted = LetterFilter(request.get("sink"), request.get("epoch"), request.get("reason"))
        return LetterEdit(self.pipeline, request["action"], wanted)

    def plan(self) -> Planned:
        plan = self._find_edit().plan()
        refusals = [] if plan.letters else ["there are no such dead letters"]
        return Planned(asdict(plan), plan.agreed(), self.request, refusals)

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        self._find_edit().perform(run, agreed=agreed)
        return {}

    def words(self) -> list[str]:
        return ["dead-letters", str(self.request["action"]), *_options(self.request, "sink", "epoch", "reason")]


class RetryFile(Action):
    """Reads a file that was set aside again."""

    def plan(self) -> Planned:
        path = find_set_aside(self.pipeline, str(self.request["path"]))
        changed = bool(self.request.get("changed"))
        return Planned({"path": path, "changed": changed}, {}, {"path": path, "changed": changed})

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        changed = bool(self.request.get("changed"))
        return {"asked": int(ask_retry(self.pipeline, str(self.request["path"]), run, changed=changed))}

    def words(self) -> list[str]:
        changed = ["--changed"] if self.request.get("changed") else []
        return ["files", "--retry", str(self.request["path"]), *changed]


class DropFiles(Action):
    """Gives up files that were set aside."""

    def plan(self) -> Planned:
        plan = plan_drop(self.pipeline, [str(one) for one in self.request["paths"]])
        body = {"pipeline": self.pipeline.options.name, "files": plan.rows()}
        return Planned(body, {}, {"paths": list(self.request["paths"]), "files": plan.files})

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        plan = DropPlan(tuple(self.request["paths"]), dict(self.request["files"]))
        return {"asked": ask_drop(self.pipeline, plan, run)}

    def words(self) -> list[str]:
        return ["files", *(word for path in self.request["paths"] for word in ("--drop", str(path)))]


class RereadFile(Action):
    """Reads a finished file once more, from its beginning."""

    def plan(self) -> Planned:
        plan = plan_reread(self.pipeline, str(self.request["path"]))
        body = {"pipeline": self.pipeline.options.name, **plan.to_json()}
        return Planned(body, self._agreed(plan), {"path": plan.path})

    def _agreed(self, plan: RereadPlan) -> dict[str, Json]:
        names = {"path": plan.path, "reading": plan.reading}
        return {**names, "effect": plan.effect, "operators": list(plan.operators)}

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        plan = plan_reread(self.pipeline, str(self.request["path"]))
        if begun and plan.reading != agreed["reading"]:  # the request was made, and an epoch has answered it
            with on_record(self.pipeline, "files-reread", run, from_epoch=None, to_epoch=None, path=plan.path):
                return {"asked": 0}
        check_agreed(agreed, self._agreed(plan))
        return {"asked": int(ask_reread(self.pipeline, plan, run))}

    def words(self) -> list[str]:
        return ["files", "--reread", str(self.request["path"])]


class RecordsAction(Action):
    """Decodes quarantined records again, or drops them."""

    def _filter(self) -> RecordFilter:
        request = self.request
        newest = self.pipeline.load().epoch
        until = request.get("until_epoch")
        return RecordFilter(
            request.get("reason"), request.get("file"), request.get("epoch"), newest if until is None else int(until)
        )

    @property
    def _discards(self) -> bool:
        return bool(self.request["action"] == "drop")

    def plan(self) -> Planned:
        wanted = self._filter()  # records of later epochs are not meant
        chosen = choose_records(self.pipeline, wanted, discard=self._discards)
        body = {"pipeline": self.pipeline.options.name, **chosen.to_json()}
        refusals = [] if chosen.records else ["no record is left to drop" if self._discards else "no record is left"]
        return Planned(body, {}, {**self.request, "until_epoch": wanted.until_epoch}, refusals)

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        chosen = choose_records(self.pipeline, self._filter(), discard=self._discards)
        ask_records(self.pipeline, chosen, run, discard=self._discards)
        return {"asked": chosen.records.total()}

    def words(self) -> list[str]:
        chosen = _options(self.request, "reason", "file", "epoch", "until_epoch")
        return ["quarantine", f"--{self.request['action']}", *chosen]


class DisposeSavepoint(Action):
    """Deletes a savepoint, chosen by its id."""

    def plan(self) -> Planned:
        plan = self._dispose(dry_run=True, run="")
        body = asdict(plan)
        return Planned(body, {"id": plan.id, "path": plan.path}, {"savepoint": plan.id})

    def _dispose(self, *, dry_run: bool, run: str) -> Disposed:
        options = dict(self.pipeline.options.home.storage_options)
        savepoint = str(self.request["savepoint"])
        return dispose_savepoint(self.pipeline, savepoint, dry_run=dry_run, run=run, storage_options=options)

    def perform(self, run: str, agreed: Mapping[str, Json], *, begun: bool) -> dict[str, Json]:
        name = str(self.request["savepoint"])
        if begun and not any(pin.id == name for pin in load_pins(self.pipeline.storage, self.pipeline.options.name)):
            with on_record(self.pipeline, "savepoint-dispose", run, from_epoch=None, to_epoch=None, savepoint=name):
                return {"asked": 0}  # its pin goes last: nothing is left to delete
        return {"asked": self._dispose(dry_run=False, run=run).files}

    def words(self) -> list[str]:
        return ["savepoint", "dispose", str(self.request["savepoint"])]


def _find_moment(text: str) -> datetime:
    moment = parse_moment(text)
    if moment is None:
        raise ConfigError("not a time with a zone, nor a time ago", hint="2026-11-16T08:00:00Z, or 2h")
    return moment


def _options(request: Mapping[str, Json], *names: str) -> list[str]:
    given = [name for name in names if request.get(name) is not None]
    return [word for name in given for word in (f"--{name.replace('_', '-')}", str(request[name]))]


def _with(cls: type[Action], action: str) -> Callable[[OpenPipeline, Mapping[str, Json]], Action]:
    return lambda pipeline, request: cls(pipeline, {**request, "action": action})


KINDS: dict[str, Kind] = {
    "rollback": Kind("admin", RollbackAction, edits=True, ends_stopped=True),
    "savepoint-dispose": Kind("admin", DisposeSavepoint),
    "files-retry": Kind("operate", RetryFile),
    "files-drop": Kind("admin", DropFiles),
    "files-reread": Kind("operate", RereadFile),
    "quarantine-replay": Kind("operate", _with(RecordsAction, "replay")),
    "quarantine-drop": Kind("admin", _with(RecordsAction, "drop")),
    "dead-letters-retry": Kind("operate", _with(LetterAction, "retry"), edits=True),
    "dead-letters-drop": Kind("admin", _with(LetterAction, "drop"), edits=True),
    "sinks-resync": Kind("admin", _with(SinkAction, "resync"), edits=True),
    "sinks-resume": Kind("admin", _with(SinkAction, "resume"), edits=True),
    "sinks-forget": Kind("admin", _with(SinkAction, "forget"), edits=True),
}
