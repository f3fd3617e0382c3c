"""Plans of actions: shown first, performed when somebody confirms them, performed once.

The id of a plan is the run id under which its action is performed, so that the ledger and the audit trail name it. A
plan that is confirmed again answers with its first receipt: from the service's own folder, or if the service was killed
before it could write that, from the ledger or the audit trail. What is confirmed is what was shown: an action that
would do something else by now is refused.

A confirmation is recorded before anything is done, and its receipt after everything is. A service that starts ends what
lies between: it records the end of an edit that was decided, and wants of the pipeline what the plan says. So does one
whose sink did not say whether it committed an edit.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta

from firnline.checkpoint.codec import canonical, parse, seal, unseal
from firnline.checkpoint.ledger import LedgerEntry
from firnline.errors import (
    AlreadyRunningError,
    CommitUnknownError,
    ConfigError,
    DamagedError,
    FirnlineError,
    NewerFormatError,
    NotRunningError,
)
from firnline.history.store import load_audit_rows, record_end
from firnline.history.unfinished import load_unfinished
from firnline.names import PLANS_FOLDER, plan_name, plan_of
from firnline.run import standby
from firnline.run.control import ask
from firnline.run.open_pipeline import OpenPipeline, open_pipeline
from firnline.run.wanted import Wanted
from firnline.service.access.tokens import Identity
from firnline.service.plan_kinds import KINDS, Kind
from firnline.service.problems import ConflictError, ForbiddenError, NotFoundError
from firnline.service.supervise.supervisor import Supervisor
from firnline.storage import open_storage
from firnline.stores.audit import Actor, AuditRecord
from firnline.types import Clock, Ids, Json, Receipt

logger = logging.getLogger(__name__)

VALID_SECONDS = 24 * 3600.0  # a plan that nobody confirmed is forgotten
KEPT = timedelta(days=30)
BUSY_SECONDS = 600.0  # how long a second confirm waits for the first
MOST_WAITING = 8  # confirms that wait, of all pipelines
STOP_SECONDS = 60.0  # for a run that is asked to end; then it is fenced
POLL_SECONDS = 0.1
LOOKED_AT = 1000  # records of the audit trail
VIA = "REST"
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan as it was shown.

    Attributes:
        id: The run id under which it is performed.
        agreed: The facts that must not have changed when it is confirmed.
        epoch: The newest epoch when it was made.
        wanted: What was wanted of the pipeline when it was made.
        wanted_after: What is wanted once it is performed.
        steps: What happens to a run besides the action, in words.
    """

    id: str
    pipeline: str
    kind: str
    by: str
    made_at: str
    request: dict[str, Json]
    plan: dict[str, Json]
    agreed: dict[str, Json]
    refusals: list[str] = field(default_factory=list)
    epoch: int = 0
    wanted: Wanted | None = None
    wanted_after: Wanted | None = None
    steps: list[str] = field(default_factory=list)
    command: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return what a request for a plan answers."""
        return {
            "id": self.id,
            "pipeline": self.pipeline,
            "action": self.kind,
            "by": self.by,
            "made_at": self.made_at,
            "valid_until": self.valid_until.isoformat(),
            "confirmable": not self.refusals,
            "refusals": self.refusals,
            "wanted": self.wanted,
            "wanted_after": self.wanted_after,
            "steps": self.steps,
            "command": self.command,
            "plan": self.plan,
        }

    @property
    def valid_until(self) -> datetime:
        return datetime.fromisoformat(self.made_at) + timedelta(seconds=VALID_SECONDS)


class Plans:
    """Makes plans and performs them, for one service."""

    def __init__(self, supervisor: Supervisor, state: str, clock: Clock, ids: Ids) -> None:
        self._supervisor = supervisor
        self._storage = open_storage(state)
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._waiting = threading.BoundedSemaphore(MOST_WAITING)
        self.running: set[str] = set()  # the plans that are being performed
        self._cut_off = self._find_cut_off()  # by pipeline: confirmed plans of which nobody knows whether they are done

    # -- plans ----------------------------------------------------------------------------------------

    def make(self, name: str, kind: str, request: Mapping[str, Json], identity: Identity) -> Plan:
        """Plan an action, and keep the plan so that it can be confirmed. Changes nothing of the pipeline."""
        what = KINDS[kind]
        _check_role(what, identity)
        pipeline = self._open(name, identity.name)
        planned = what.build(pipeline, request).plan()
        wish = self._supervisor.load_wish(name)
        wanted = wish.wanted if wish else None
        after: Wanted | None = "stopped" if what.edits and what.ends_stopped and wanted is not None else wanted
        plan = Plan(
            id=self._ids.new(),
            pipeline=name,
            kind=kind,
            by=identity.name,
            made_at=self._clock.now().isoformat(),
            request=dict(planned.request),
            plan=planned.body,
            agreed=planned.agreed,
            refusals=planned.refusals,
            epoch=pipeline.load().epoch,
            wanted=wanted,
            wanted_after=after,
            steps=self._steps(pipeline, what, planned.request, wanted, after),
            command=what.build(pipeline, planned.request).command(str(self._supervisor.get(name).registered.path)),
        )
        self._prune()
        self._put(plan.id, "plan", asdict(plan))
        return plan

    def find(self, name: str, plan: str) -> tuple[Plan, dict[str, Json] | None]:
        """Return a plan, and its receipt if it was performed; NotFoundError if there is no such plan."""
        body = self._get(plan, "plan")
        if body is None or body["pipeline"] != name:
            raise NotFoundError("the pipeline has no such plan", hint="Plans are kept for a day; make a new one.")
        found = Plan(**body)
        return found, self._get(plan, "receipt")

    def list_unfinished(self, name: str, running: Collection[str]) -> list[dict[str, Json]]:
        """Return the actions that were begun and never ended, each with the command that ends it on this machine.

        Args:
            running: Run ids of other actions that this process carries out now.
        """
        spec = str(self._supervisor.get(name).registered.path)
        pipeline = open_pipeline(self._supervisor.usable(name))
        found = []
        for one in load_unfinished(pipeline, {*running, *self.running}):
            body = self._get(one.run, "plan") if _ID.fullmatch(one.run) and one.epoch is None else None
            command = f"{one.command} -f {shlex.quote(spec)}" if body is None else str(body["command"])
            found.append({**one.to_json(), "command": command})
        return found

    # -- confirmation ---------------------------------------------------------------------------------

    def confirm(self, name: str, plan_id: str, identity: Identity) -> dict[str, Json]:
        """Perform a plan, or answer with the receipt of the time that it was performed.

        Raises:
            NotFoundError: there is no such plan.
            ConflictError: the plan is refused or too old, or another action is under way.
            PlanChangedError: what would be done is no longer what was shown.
            AlreadyRunningError: a run is alive, and the plan does not take over.
        """
        plan, receipt = self.find(name, plan_id)
        kind = KINDS[plan.kind]
        _check_role(kind, identity)
        with self._alone(name):
            receipt = receipt or self._get(plan_id, "receipt")
            if receipt is not None:
                return receipt
            pipeline = self._open(name, identity.name)
            rows = [] if kind.edits else self._records(pipeline, plan)
            body = self._find_done(pipeline, kind, plan, rows)
            if body is not None:
                return self._end(pipeline, plan, body)
            self._check(plan)
            self._put(plan.id, "confirmed", {"by": identity.name, "at": self._clock.now().isoformat()})
            self.running.add(plan.id)
            try:
                body = self._perform(pipeline, kind, plan, identity, rows)
            except CommitUnknownError:  # it may be decided: nothing is started before the sink has been asked
                with self._lock:
                    cut_off = self._cut_off.setdefault(name, [])
                    cut_off.extend({plan.id}.difference(cut_off))
                raise
            except BaseException:
                self._go_on(plan, plan.wanted)
                raise
            finally:
                self.running.discard(plan.id)
            return self._finish(plan, body)

    def recover(self, name: str) -> None:
        """End what confirmations left open: of a service that was killed, or whose answer was lost.

        Returns at once if there is nothing.

        Raises:
            OSError, FirnlineError: the home cannot be read; the next call tries again.
        """
        with self._lock:
            plans = list(self._cut_off.get(name, ()))
            lock = self._busy.setdefault(name, threading.Lock())
        if not plans or not lock.acquire(blocking=False):  # a confirmation ends it by itself
            return
        try:
            for plan_id in plans:
                self._recover(name, plan_id)
                with self._lock:
                    self._cut_off[name].remove(plan_id)
        finally:
            lock.release()

    def _recover(self, name: str, plan_id: str) -> None:
        try:
            plan, receipt = self.find(name, plan_id)
        except NotFoundError:
            return
        confirmed = self._get(plan_id, "confirmed")
        if receipt is not None or confirmed is None:
            return
        kind, pipeline = KINDS[plan.kind], self._open(name, str(confirmed["by"]))
        rows = [] if kind.edits else self._records(pipeline, plan)
        body = self._find_done(pipeline, kind, plan, rows)
        if body is not None:
            self._end(pipeline, plan, body)
        else:
            self._go_on(plan, plan.wanted)
        logger.info("a plan was cut off", extra={"pipeline": name, "plan": plan_id, "done": body is not None})

    def _find_cut_off(self) -> dict[str, list[str]]:
        """Return the plans that were confirmed and have no receipt, by pipeline."""
        parts: dict[str, set[str]] = {}
        for stat in self._storage.list(PLANS_FOLDER):
            plan = plan_of(stat.name)
            if plan is not None:
                parts.setdefault(plan, set()).add(stat.name.rpartition("/")[2].split(".")[1])
        found: dict[str, list[str]] = {}
        for plan in sorted(plan for plan, has in parts.items() if "confirmed" in has and "receipt" not in has):
            body = self._get(plan, "plan")
            if body is not None:
                found.setdefault(str(body["pipeline"]), []).append(plan)
        return found

    def _end(self, pipeline: OpenPipeline, plan: Plan, body: dict[str, Json]) -> dict[str, Json]:
        """End a plan that was done, and whose service was killed before it could say so."""
        if KINDS[plan.kind].edits:
            self._end_record(pipeline, plan)
        return self._finish(plan, body)

    def _finish(self, plan: Plan, body: dict[str, Json]) -> dict[str, Json]:
        """Want of the pipeline what the plan says, and write the receipt, the last thing of all."""
        self._go_on(plan, plan.wanted_after)
        receipt = {"id": plan.id, "pipeline": plan.pipeline, "action": plan.kind, "done": True, **body}
        self._put(plan.id, "receipt", receipt)
        return receipt

    def _check(self, plan: Plan) -> None:
        if plan.refusals:
            raise ConflictError(f"it cannot be done: {'; '.join(plan.refusals)}", hint="Make another plan.")
        if self._clock.now() >= plan.valid_until:
            raise ConflictError("the plan is too old", hint="Make a new one.")

    def _perform(
        self, pipeline: OpenPipeline, kind: Kind, plan: Plan, identity: Identity, rows: Sequence[Mapping[str, Json]]
    ) -> dict[str, Json]:
        action = kind.build(pipeline, plan.request)
        if not kind.edits:
            result = action.perform(plan.id, plan.agreed, begun=bool(rows))
            return {"receipt": None, "result": result}
        take_over = bool(plan.request.get("take_over"))
        self._end_run(pipeline, plan, identity, take_over=take_over)
        with standby.editing_history(pipeline.options, plan.id, lambda _: None, take_over=take_over):
            action.perform(plan.id, plan.agreed, begun=False)
        body = self._find_done(pipeline, kind, plan, ())
        assert body is not None
        return body

    def _end_run(self, pipeline: OpenPipeline, plan: Plan, identity: Identity, *, take_over: bool) -> None:
        """Have no run alive that the service supervises, and none started meanwhile."""
        name = plan.pipeline
        alive = self._is_alive(pipeline)
        if alive and not take_over:
            raise AlreadyRunningError(
                f"a run of {name!r} is alive",
                hint="Stop it first (POST .../stop), or plan the action with take_over: true, which ends it.",
            )
        wish = self._supervisor.load_wish(name)
        if wish is None or wish.wanted == "stopped" or (alive and not self._supervisor.is_launched(name)):
            return
        self._supervisor.wish(name, "stopped", _stopped_by(identity, plan))
        deadline = self._clock.monotonic() + STOP_SECONDS
        while self._supervisor.is_launched(name) and self._clock.monotonic() < deadline:
            self._clock.sleep(POLL_SECONDS)

    def _is_alive(self, pipeline: OpenPipeline) -> bool:
        with contextlib.suppress(NotRunningError):
            ask(pipeline.options, {"command": "status"}, self._supervisor.environ)
            return True
        return self._supervisor.is_launched(pipeline.options.name)

    def _go_on(self, plan: Plan, wanted: Wanted | None) -> None:
        """Want something else of a pipeline that was stopped for this plan, unless somebody has decided meanwhile."""
        if not KINDS[plan.kind].edits or wanted is None or wanted == "stopped":
            return
        wish = self._supervisor.load_wish(plan.pipeline)
        if wish is not None and wish.wanted == "stopped" and wish.by.endswith(_plan_suffix(plan)):
            by = wish.by.removesuffix(_plan_suffix(plan))
            self._supervisor.wish(plan.pipeline, wanted, by, after=wish.number)

    def _find_done(
        self, pipeline: OpenPipeline, kind: Kind, plan: Plan, rows: Sequence[Mapping[str, Json]]
    ) -> dict[str, Json] | None:
        """Return what came of a plan that was performed; None if it was not. `rows`: its records, if it is no edit."""
        if kind.edits:
            for entry in pipeline.entries(pipeline.load().entry):
                if entry.checkpoint.run == plan.id:
                    return _edit_body(pipeline, entry)
                if entry.epoch <= plan.epoch:
                    return None
            return None
        done = [row for row in rows if row["outcome"] == "done"]
        return {"receipt": None, "result": {"asked": done[0]["details"].get("asked", 0)}} if done else None

    def _end_record(self, pipeline: OpenPipeline, plan: Plan) -> None:
        """Record the end of an action that was done, and whose service was killed before it could record it."""
        rows = self._records(pipeline, plan)
        if rows and not any(row["outcome"] == "done" for row in rows):
            try:
                record_end(pipeline, AuditRecord.from_json(rows[-1]))
            except (OSError, FirnlineError) as error:
                logger.warning("audit record not written", extra={"plan": plan.id, "reason": str(error)})

    def _records(self, pipeline: OpenPipeline, plan: Plan) -> list[dict[str, Json]]:
        """Return the records of a plan in the audit trail; none where nothing is recorded."""
        try:
            rows = load_audit_rows(pipeline, LOOKED_AT, None).rows
        except ConfigError:  # the spec names no store that outlives a process
            return []
        return [row for row in rows if row.get("run") == plan.id]

    # -- files ----------------------------------------------------------------------------------------

    def _steps(
        self,
        pipeline: OpenPipeline,
        kind: Kind,
        request: Mapping[str, Json],
        wanted: Wanted | None,
        after: Wanted | None,
    ) -> list[str]:
        """Say what happens to a run besides the action."""
        if not kind.edits:
            return ["The next epoch, of the run that is alive or of the next one, carries it out."]
        steps = []
        alive, launched = self._is_alive(pipeline), self._supervisor.is_launched(pipeline.options.name)
        if wanted in ("running", "paused") and not (alive and not launched):
            steps.append(f"The pipeline is wanted {wanted}: it is wanted stopped while this is done.")
        if alive and not request.get("take_over"):
            steps.append("A run is alive: confirm is refused until it has ended, or with take_over.")
        elif alive and launched:
            steps.append("The run is asked to end, and ends as fenced if it has not after a minute.")
        elif alive:
            steps.append("The run that is alive ends as fenced (exit code 5). Who started it may start it again.")
        if wanted is not None and after == "stopped" != wanted:
            steps.append("The pipeline stays stopped afterwards. Start it when you have looked at the result.")
        elif wanted in ("running", "paused"):
            steps.append(f"Afterwards it is wanted {wanted} again.")
        return steps

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One action at a time per pipeline; a second confirm waits for the first, if not too many wait."""
        with self._lock:
            lock = self._busy.setdefault(name, threading.Lock())
        is_mine = lock.acquire(blocking=False)
        if not is_mine and self._waiting.acquire(blocking=False):  # each that waits holds a thread of the service
            try:
                is_mine = lock.acquire(timeout=BUSY_SECONDS)
            finally:
                self._waiting.release()
        if not is_mine:
            raise ConflictError("another action of this pipeline is under way", hint="Confirm again later.")
        try:
            yield
        finally:
            lock.release()

    def _open(self, name: str, by: str) -> OpenPipeline:
        return open_pipeline(self._supervisor.usable(name), actor=Actor(by, VIA))

    def _put(self, plan: str, part: str, body: dict[str, Json]) -> None:
        with contextlib.suppress(FileExistsError):  # a receipt is written once
            self._storage.put_new(f"{PLANS_FOLDER}/{plan_name(plan, part)}", canonical(seal(body)))

    def _get(self, plan: str, part: str) -> dict[str, Json] | None:
        name = plan_name(plan, part)
        try:
            body = unseal(parse(self._storage.get(f"{PLANS_FOLDER}/{name}"), name), name)
        except (FileNotFoundError, DamagedError, NewerFormatError):
            return None
        return {key: value for key, value in body.items() if key not in ("checksum", "format")}

    def _prune(self) -> None:
        """Delete the plans that are too old to be asked for."""
        oldest = self._clock.now() - KEPT
        for stat in self._storage.list(PLANS_FOLDER):
            if stat.modified_at < oldest and plan_of(stat.name) is not None:
                self._storage.delete(f"{PLANS_FOLDER}/{stat.name.rpartition('/')[2]}")


def _check_role(kind: Kind, identity: Identity) -> None:
    if not identity.may(kind.role):
        raise ForbiddenError(f"this needs the role {kind.role}; the token has the role {identity.role}")


def _plan_suffix(plan: Plan) -> str:
    return f", for plan {plan.id}"


def _stopped_by(identity: Identity, plan: Plan) -> str:
    return identity.name + _plan_suffix(plan)


def _edit_body(pipeline: OpenPipeline, entry: LedgerEntry) -> dict[str, Json]:
    """Return the receipt of an edit from its ledger entry, which says the same whenever it is read."""
    found: Receipt | None = pipeline.deciding.find_receipt(entry.epoch)
    receipt = {
        "epoch": entry.epoch,
        "generation": entry.checkpoint.generation,
        "run": entry.checkpoint.run,
        "attempt": entry.checkpoint.attempt,
        "created_at": entry.checkpoint.created_at,
        "version": found.version if found is not None else None,
    }
    rows = sum(int(file["rows"]) for files in entry.staged.values() for file in files)
    return {"receipt": receipt, "result": {"new_epoch": entry.epoch, "rows": rows}}
