"""`firnline --server URL --token-file FILE COMMAND`: commands against a service, with the output of the local ones.

Where a command takes a spec, it takes the name of a pipeline that the service has registered. Everything else of the
command line is the same, and is parsed by the command itself.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from firnline.cli import (
    checkpoints,
    checkpoints_transfer,
    control,
    dead_letters,
    dry_run,
    files,
    quarantine,
    rollback,
    savepoint,
    schema_history,
    sinks,
    snapshot,
    status,
)
from firnline.cli.output import count_text, say, size_text
from firnline.cli.server import PAGE, Call, Server, ServerError
from firnline.clock import monotonic
from firnline.errors import ConfigError, ControlError
from firnline.types import Json

POLL_SECONDS = 0.5
JOB_SECONDS = 3700.0  # the service itself ends a job that takes an hour
LIVE = ("starting", "running", "pausing", "paused", "stopping")
UNCLEAR = ("unknown", "unreadable")  # nobody can say whether a run is alive


def _status(call: Call) -> int:
    from firnline.history.state import OperatorSnapshot
    from firnline.history.status import PipelineStatus

    if call.get("watch"):
        raise ConfigError("--watch looks at a pipeline of this machine", hint="watch firnline --server ... status NAME")
    body = call.server.get(f"{call.path}/status")
    if call.common.json:
        call.common.out.json(body)
        return 0
    operators = [OperatorSnapshot(**one) for one in body["operators"]]
    status.show_status(call.common.out, PipelineStatus(**{**body, "operators": operators}), None)
    return 0


def _wait(call: Call, is_there: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
    deadline = monotonic() + seconds
    while not is_there(row := call.server.get(call.path)):
        if monotonic() > deadline:
            raise ControlError(
                f"the pipeline is {row['state']} after {seconds:g} s, at epoch {row['epoch']}",
                hint="The service still carries it out; repeat the command, or watch it with `status`.",
            )
        time.sleep(POLL_SECONDS)
    return row


def _show_control(call: Call, row: Mapping[str, Any], word: str, text: str) -> int:
    if call.common.json:
        facts = {key: row[key] for key in ("run", "pid")} | {"status": word}
        facts |= {key: row[key] for key in ("epoch", "generation")}
        call.common.out.json({"pipeline": row["pipeline"], **facts})
    else:
        call.common.out.line(text)
    return 0


def _pause(call: Call) -> int:
    before = call.server.get(call.path)
    call.server.post(f"{call.path}/pause")
    if before["state"] not in LIVE:
        return _show_control(call, before, "wanted_paused", "no run is alive; the pipeline is wanted paused")
    row = _wait(call, lambda row: row["state"] not in ("starting", "running", "pausing"), call.get("timeout", 300.0))
    word = row["state"] if row["state"] != "paused" else "already_paused" if before["state"] == "paused" else "paused"
    return _show_control(call, row, word, f"{word.replace('_', ' ')} at epoch {row['epoch']}")


def _resume(call: Call) -> int:
    before = call.server.get(call.path)
    call.server.post(f"{call.path}/resume")
    if before["state"] not in LIVE:
        return _show_control(call, before, "wanted_running", "no run is alive; the pipeline is wanted running")
    word = "resumed" if before["state"] in ("paused", "pausing") else "already_running"
    return _show_control(call, before, word, f"{word.replace('_', ' ')}, after epoch {before['epoch']}")


def _start(call: Call) -> int:
    before = call.server.get(call.path)
    call.server.post(f"{call.path}/start")
    if before["state"] in LIVE:
        return _show_control(
            call, before, "already_running", f"already {before['state']}, after epoch {before['epoch']}"
        )
    return _show_control(call, before, "wanted_running", "the pipeline is wanted running; the service starts it")


def _stop(call: Call) -> int:
    before = call.server.get(call.path)
    number = call.server.post(f"{call.path}/stop").get("wish") or 0

    def is_stopped(row: Mapping[str, Any]) -> bool:
        """Whether it is, in a look that knows of the wish. A look that could not read the home knows nothing."""
        return (row["wish"] or 0) >= number and row["state"] not in (*LIVE, *UNCLEAR)

    row = _wait(call, is_stopped, call.get("timeout", 300.0))
    found = {**row, "run": before["run"], "pid": before["pid"]}
    return _show_control(call, found, "stopped", f"stopped after epoch {row['epoch']}")


def _checkpoint(call: Call) -> int:
    answer = call.server.post(f"{call.path}/checkpoint")
    ticket, deadline = answer["ticket"], monotonic() + call.get("timeout", 300.0)
    while not answer.get("done"):
        if monotonic() > deadline:
            raise ControlError("the checkpoint is not committed yet", hint="Repeat the command, or wait.")
        time.sleep(POLL_SECONDS)
        answer = call.server.get(f"{call.path}/checkpoint/{ticket}")
    control.show_checkpoint(call.common, answer)
    return 0


def _checkpoints(call: Call) -> int:
    from firnline.history.checkpoints import CheckpointList
    from firnline.history.store import AuditRows

    limit = 0 if call.get("every") else int(call.get("limit", 20))
    before = call.get("before")
    after = base64.urlsafe_b64encode(str(before).encode()).decode() if before is not None else None
    audit = bool(call.get("audit"))
    rows: list[dict[str, Any]] = []
    lost, damaged = None, []
    while True:
        wanted = PAGE if not limit else min(PAGE, limit - len(rows))
        found = call.server.get(f"{call.path}/{'audit' if audit else 'checkpoints'}", limit=wanted, next=after)
        rows += found["audit" if audit else "checkpoints"]
        lost, damaged = found.get("lost"), found.get("damaged", [])
        after = found["next"]
        if after is None or (limit and len(rows) >= limit):
            break
    if audit:
        checkpoints.show_audit(call.name, AuditRows(rows, more=after is not None, has_store=True), call.common)
    else:
        listing = CheckpointList(checkpoints=rows, more=after is not None, damaged=damaged, lost=lost)
        checkpoints.show_checkpoints(call.name, listing, before, call.common)
    return 0


def _files(call: Call) -> int:
    common, out = call.common, call.common.out
    if path := call.get("retry"):
        body = {"path": path, "changed": bool(call.get("changed"))}

        def told(plan: dict[str, Any], receipt: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            asked = "the next epoch reads it again" if receipt["result"]["asked"] else "already requested"
            return f"{plan['path']}: {asked}", {}

        return call.act("files/retry", body, lambda plan: out.line(plan["path"]), lambda _: f"Read {path} again", told)
    if paths := call.get("drop"):
        return call.act(
            "files/drop",
            {"paths": list(paths)},
            lambda plan: out.table(files.DROP_COLUMNS, plan["files"]),
            lambda plan: f"Give up {count_text(len(plan['files']), 'file')}",
            lambda _, __: ("the next epoch drops them", {}),
        )
    if path := call.get("reread"):
        return call.act(
            "files/reread",
            {"path": path},
            lambda plan: files.show_reread(plan, common),
            lambda plan: f"Read {plan['path']} again",
            lambda _, __: ("the next epoch reads it again", {}),
        )
    wanted, limit = call.get("status"), int(call.get("limit", 100))
    rows = list(call.server.rows(f"{call.path}/files", "files", 0, **({"status": wanted} if wanted else {})))
    files.show_files(call.name, rows[:limit] if limit else rows, len(rows), wanted, common)
    return 0


def _quarantine(call: Call) -> int:
    from firnline.history.quarantine_requests import RecordFilter

    names = ("reason", "file", "epoch", "until_epoch")
    given = {name: call.get(name) for name in names if call.get(name) is not None}
    action = next((one for one in ("replay", "drop") if call.get(one)), None)
    if action is not None:
        question, end = ("Drop {}", "drops {}") if action == "drop" else ("Read again {}", "decodes {} again")

        def records(plan: dict[str, Any]) -> str:
            return count_text(plan["records"], "record")

        return call.act(
            f"quarantine/{action}",
            given,
            lambda plan: call.common.out.table(quarantine.PLAN_COLUMNS, plan["plan"]),
            lambda plan: question.format(records(plan)),
            lambda plan, _: (f"the next epoch {end.format(records(plan))}", {}),
        )
    if call.get("pending") or call.get("export"):
        raise ConfigError("--pending and --export look at a pipeline of this machine", hint="Leave them out.")
    limit = int(call.get("limit", 20))
    first = call.server.get(f"{call.path}/quarantine", limit=1)
    if first["quarantine"] is None:
        return _show_reasons(call, first["reasons"])
    found = call.server.rows(f"{call.path}/quarantine", "quarantine", 0)
    rows = ({**row, "raw": base64.b64decode(row["raw"])} for row in found)
    wanted = RecordFilter(*(call.get(name) for name in names))
    quarantine.show_records(call.name, rows, wanted, limit, call.common)
    return 0


def _show_reasons(call: Call, reasons: Mapping[str, int]) -> int:
    """Show how many records there are by reason: all that a token without the right `data` may see."""
    out = call.common.out
    if call.common.json:
        out.json({"pipeline": call.name, "reasons": dict(reasons), "quarantine": None})
        return 0
    for reason, count in reasons.items():
        out.line(f"{reason}: {count_text(count, 'record')}")
    out.sentence("The token lacks the right `data`: records are counted, not shown." if reasons else "No record waits.")
    return 0


def _list_letters(call: Call) -> int:
    found = call.server.rows(f"{call.path}/dead-letters", "dead_letters", 0, sink=call.get("sink"))
    epoch, reason = call.get("epoch"), call.get("reason")
    rows = [
        row
        for row in found
        if (epoch is None or row["epoch"] == epoch)
        and (reason is None or reason.casefold() in str(row["reason"]).casefold())
    ]
    dead_letters.show_letters(call.name, rows, int(call.get("limit", 20)), call.common)
    return 0


def _answer_letters(action: str) -> Callable[[Call], int]:
    def answer(call: Call) -> int:
        body = {name: call.get(name) for name in ("sink", "epoch", "reason") if call.get(name) is not None}

        def finish(plan: dict[str, Any], receipt: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            epoch = receipt["receipt"]["epoch"]
            text = f"{count_text(plan['letters'], 'row')} wait in epoch {epoch}; the next run delivers them"
            if action == "drop":
                text = f"{count_text(plan['letters'], 'dead letter')} dropped by epoch {epoch}"
            return f"done: {text}", {"new_epoch": epoch}

        return call.act(
            f"dead-letters/{action}",
            {**body, "take_over": bool(call.get("take_over"))},
            lambda plan: call.common.out.table(dead_letters.PLAN_COLUMNS, plan["plan"]),
            lambda plan: f"{action.capitalize()} {count_text(plan['letters'], 'dead letter')}",
            finish,
        )

    return answer


def _list_sinks(call: Call) -> int:
    found = call.server.get(f"{call.path}/sinks")
    sinks.show_sinks(call.name, found["epoch"], found["sinks"], call.common)
    return 0


def _edit_sink(action: str) -> Callable[[Call], int]:
    def edit(call: Call) -> int:
        from firnline.history.edits.sinks import SinkPlan

        body: dict[str, Json] = {"take_over": bool(call.get("take_over"))}
        if action == "resync":
            body["copy_from"] = call.get("from_") or None
        if action == "resume":
            body["accept_gap"] = bool(call.get("accept_gap"))

        def plan_of(plan: dict[str, Any], **more: Any) -> SinkPlan:
            return SinkPlan(**{**{key: value for key, value in plan.items() if key != "epochs_skipped"}, **more})

        def finish(plan: dict[str, Any], receipt: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            facts = {"new_epoch": receipt["receipt"]["epoch"], "rows": receipt["result"]["rows"]}
            return sinks.last_line(plan_of(plan, **facts)), facts

        return call.act(
            f"sinks/{quote(str(call.get('sink')), safe='')}/{action}",
            body,
            lambda plan: sinks.show_plan(call.common, plan_of(plan)),
            lambda plan: f"{action.capitalize()} sink {plan['sink']}",
            finish,
        )

    return edit


def _rollback(call: Call) -> int:
    from firnline.history.edits.rollback import LetterChange, RollbackPlan, SchemaReturn
    from firnline.history.state import OperatorSnapshot
    from firnline.sinks.base import SinkReturn

    to, to_time = call.get("to"), call.get("to_time")
    if (to is None) == (to_time is None):
        raise ConfigError("name the target of the rollback: --to or --to-time", hint="firnline rollback --to 41")
    parts: dict[str, Callable[..., Any]] = {
        "sinks": SinkReturn, "state_now": OperatorSnapshot, "state_then": OperatorSnapshot, "schemas": SchemaReturn,
        "dead_letters": LetterChange,
    }  # fmt: skip

    def show(plan: dict[str, Any]) -> None:
        positions = plan["position_texts"]
        body = {key: value for key, value in plan.items() if key not in ("position_texts", "refusals")}
        body |= {key: [make(**one) for one in plan[key]] for key, make in parts.items()}
        rollback.show_plan(call.common.out, RollbackPlan(**body), positions)

    def finish(plan: dict[str, Any], receipt: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        epoch = receipt["receipt"]["epoch"]
        text = f"done: epoch {epoch} equals epoch {plan['to_epoch']}; the pipeline's next run continues there"
        return text, {"new_epoch": epoch}

    body = {"accept": list(call.get("accept", ())), "leave": list(call.get("leave", ()))}
    target = {"to": to} if to is not None else {"to_time": to_time}
    return call.act(
        "rollback",
        {**target, **body, "take_over": bool(call.get("take_over"))},
        show,
        lambda plan: f"Roll back to epoch {plan['to_epoch']}",
        finish,
    )


def _show_epoch(call: Call) -> int:
    from firnline.sources.base import PositionView

    known = call.server.get(f"{call.path}/checkpoints/{call.get('epoch')}")
    views = known.pop("position_views")
    if call.common.json:
        call.common.out.json(known)
    else:
        positions = {name: checkpoints.position_text(PositionView(**one)) for name, one in views.items()}
        checkpoints.show_epoch(call.common.out, known, positions)
    return 0


def _diff(call: Call) -> int:
    query = {"from": call.get("one"), "to": call.get("other")}
    changes = call.server.get(f"{call.path}/checkpoints/diff", **query)
    if call.common.json:
        call.common.out.json(changes)
    else:
        checkpoints.show_diff(call.common.out, changes)
    return 0


def _export(call: Call) -> int:
    from firnline.stores.archive import open_archive

    if call.get("dry_run"):
        raise ConfigError("--dry-run of an export looks at a pipeline of this machine", hint="Leave it out.")
    file = str(call.get("file"))
    call.server.download(f"{call.path}/checkpoints/export", file, replace=bool(call.get("yes")))
    with open_archive(file) as archive:
        checkpoints_transfer.show_exported(file, archive.manifest, call.common)
    return 0


def _wait_for_job(call: Call, path: str, body: Mapping[str, Json] | None = None) -> dict[str, Any]:
    """Begin a job, report its progress, and return its result."""
    job = call.server.post(f"{call.path}/{path}", body)
    reported: list[str] = []
    deadline = monotonic() + JOB_SECONDS
    while True:
        for line in job["progress"]:
            if line not in reported and not line.startswith(("Error: ", "Try: ")):
                say(line)
        reported = job["progress"]
        if job["ended_at"] is not None:
            break
        if monotonic() > deadline:
            raise ControlError(f"job {job['job']} has not ended", hint="GET .../jobs of the service lists it.")
        time.sleep(POLL_SECONDS)
        job = call.server.get(f"{call.path}/jobs/{job['job']}")
    if job["status"] != "done":
        error = job["error"] or {}
        raise ServerError(error.get("detail") or f"the job was {job['status']}", hint=error.get("hint"))
    result: dict[str, Any] = job["result"]
    return result


def _dry_run(call: Call) -> int:
    facts = _wait_for_job(call, "dry-run")
    if call.common.json:
        call.common.out.json(facts)
    else:
        dry_run.show_preview(call.common.out, facts, starts="firnline start")
    return 0


def _create_savepoint(call: Call) -> int:
    if call.get("path") is not None:
        raise ConfigError(
            "--path names a place of the machine of the service", hint="Leave it out, or type the command there."
        )
    savepoint.show_created(call.common, _wait_for_job(call, "savepoints", {"copy": bool(call.get("copy"))}))
    return 0


def _list_savepoints(call: Call) -> int:
    found = call.server.get(f"{call.path}/savepoints")["savepoints"]
    savepoint.show_savepoints(call.name, found, call.common)
    return 0


def _dispose(call: Call) -> int:
    from firnline.history.savepoints.catalog import Disposed

    name = str(call.get("savepoint"))
    planned = call.server.post(f"{call.path}/savepoints/{quote(name, safe='')}/dispose")
    plan = Disposed(**planned["plan"])
    if not call.consent.decided:
        savepoint.show_disposed(call.common, plan)
        if not call.consent.is_given(f"Delete savepoint {plan.id}", call.common.out):
            return 0
    call.server.post(f"{call.path}/plans/{planned['id']}/confirm")
    savepoint.show_disposed(call.common, Disposed(**{**planned["plan"], "dry_run": False}))
    return 0


def _state(call: Call) -> int:
    """Show the facts of an operator's state: its rows stay with the service."""
    if call.get("key") or call.get("sql") or call.get("export") or call.get("at") is not None:
        raise ConfigError("--key, --sql, --export and --at read rows of the state, which a service does not give away",
                          hint="Type the command on the machine of the pipeline.")  # fmt: skip
    operator, *name = call.get("words") or ("",)
    call = Call(call.server, {**call.arguments, "spec": call.get("spec") or (name[0] if name else None)})
    if not operator:
        names = [one["operator"] for one in call.server.get(f"{call.path}/state")["operators"]]
        hint = f"Stateful operators: {', '.join(names)}" if names else "This pipeline has no state yet."
        raise ConfigError("name the operator whose state to show", hint=hint)
    facts = call.server.get(f"{call.path}/state/{quote(str(operator), safe='')}")
    if call.common.json:
        call.common.out.json(facts)
        return 0
    call.common.out.facts(
        {
            "operator": facts["operator"],
            "epoch": f"{facts['snapshot_epoch']:,}",
            "size": f"{size_text(facts['size_bytes'])} in {count_text(facts['files'], 'file')}",
            "shards": f"{facts['shards']} of {facts['key_groups']} key groups",
            "key": ", ".join(f"{one['name']} {one['type']}" for one in facts["key_columns"]) or "none",
        }
    )
    return 0


def _with_table(call: Call) -> Call:
    """Return a call of `[TABLE] [SPEC]` with its table and the pipeline, which a single word names."""
    word, spec = str(call.get("word") or ""), call.get("spec")
    if word and spec is None:
        word, spec = "", word
    return Call(call.server, {**call.arguments, "spec": spec, "table": word or call.get("table")})


def _schema_history(call: Call) -> int:
    from firnline.history.schemas import RecordedSchema

    call = _with_table(call)
    if call.get("at") is not None and call.get("at_position"):
        raise ConfigError("--at and --at-position ask for two moments", hint="Give one of them.")
    found = call.server.rows(f"{call.path}/schemas", "schemas", 0, **({"table": t} if (t := call.get("table")) else {}))
    history = [RecordedSchema.from_json(row) for row in found][::-1]
    history = [one for one in history if call.get("source") in ("", None, one.source)]
    at, position, diff = call.get("at"), str(call.get("at_position") or ""), bool(call.get("diff"))
    schema_history.show_schemas(call.name, history, at, position, diff, call.common)
    return 0


def _snapshot(call: Call) -> int:
    call = _with_table(call)
    if call.get("table"):
        raise ConfigError(
            "a table is read again by a command on the machine of the pipeline", hint="firnline snapshot TABLE"
        )
    snapshot.show_progress(call.name, call.server.get(f"{call.path}/sources")["snapshots"], call.common)
    return 0


# By the module and the name of the local command's function.
COMMANDS: dict[tuple[str, str], Callable[[Call], int]] = {
    ("status", "status"): _status,
    ("control", "pause"): _pause,
    ("control", "resume"): _resume,
    ("control", "stop"): _stop,
    ("control", "checkpoint"): _checkpoint,
    ("checkpoints", "checkpoints"): _checkpoints,
    ("files", "files"): _files,
    ("quarantine", "quarantine"): _quarantine,
    ("sinks", "list_sinks"): _list_sinks,
    ("sinks", "resync"): _edit_sink("resync"),
    ("sinks", "resume"): _edit_sink("resume"),
    ("sinks", "forget"): _edit_sink("forget"),
    ("dead_letters", "list_letters"): _list_letters,
    ("dead_letters", "retry"): _answer_letters("retry"),
    ("dead_letters", "drop"): _answer_letters("drop"),
    ("rollback", "rollback"): _rollback,
    ("checkpoints", "show"): _show_epoch,
    ("checkpoints", "diff"): _diff,
    ("checkpoints_transfer", "export"): _export,
    ("dry_run", "dry_run"): _dry_run,
    ("savepoint", "create"): _create_savepoint,
    ("savepoint", "list_"): _list_savepoints,
    ("savepoint", "dispose"): _dispose,
    ("state", "state"): _state,
    ("schema_history", "schema_history"): _schema_history,
    ("snapshot", "snapshot"): _snapshot,
}
VERBS = (
    "status, dry-run, start, pause, resume, stop, checkpoint, checkpoints (list, show, diff, export), files, sinks, "
    "quarantine, dead-letters, rollback, savepoint, state, schema-history, snapshot (list)"
)


def take_server(tokens: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split a command line into the options before its verb, `--server` and `--token-file`, and the rest.

    Raises:
        ConfigError: one of them is given without the other, or without a value.
    """
    rest, options = list(tokens), dict[str, str]()
    while rest and rest[0].partition("=")[0] in ("--server", "--token-file"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"{name} needs a value", hint="firnline --server URL --token-file FILE status NAME")
            value = rest.pop(0)
        options[name] = value
    if len(options) == 1:
        raise ConfigError(
            "--server and --token-file belong together", hint="firnline --server URL --token-file FILE status NAME"
        )
    return options, rest


def run_remotely(parse: Callable[..., Any], options: Mapping[str, str], tokens: Sequence[str]) -> int:
    """Run a command against a server; `parse` is that of the command line."""
    starts = list(tokens[:1]) == ["start"]  # a run of this machine is started by `firnline run`
    words = ["resume", *tokens[1:]] if starts else list(tokens)
    command, bound, *_ = parse(words, exit_on_error=False, print_error=False)
    module = str(command.__module__).rpartition(".")[2]
    found = _start if starts else COMMANDS.get((module, str(getattr(command, "__name__", ""))))
    if found is None:
        raise _refusal(module, tokens)
    bound.apply_defaults()
    server = Server(options["--server"], options["--token-file"])
    try:
        return found(Call(server, bound.arguments))
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # of an answer that lacks what is read of it
        raise ServerError(
            f"{server.shown} answered what this version of Firnline does not understand: {type(error).__name__}",
            hint="Compare the versions: `firnline --version` here and on the machine of the service.",
        ) from error


def _refusal(module: str, tokens: Sequence[str]) -> ConfigError:
    """Return why a command does not work with --server, and what does."""
    verb = " ".join(tokens[: 2 if tokens[0] in ("checkpoints", "position") else 1])
    if module == "run":
        return ConfigError(
            "`firnline run` does not work with --server: the service starts runs",
            hint="firnline --server URL --token-file FILE start NAME",
        )
    if module in ("init", "demo", "drill", "prepare", "serve", "spec_schema", "completion"):
        return ConfigError(f"`firnline {verb}` does not work with --server: it needs none", hint="Leave --server out.")
    return ConfigError(
        f"`firnline {verb}` does not work with --server: type it on the machine of the pipeline",
        hint=f"With --server: {VERBS}",
    )
