"""Airflow: an operator that runs a pipeline once, and a sensor that waits for what a pipeline has committed.

Both start the `firnline` command as a child, which may be installed in an environment of its own. Only files of DAGs
import this module. Needs Airflow 2.9 or later, 3 included (extra `airflow`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

try:
    from airflow.sdk import BaseOperator, BaseSensorOperator
    from airflow.sdk.exceptions import AirflowException, AirflowFailException
except ImportError:  # Airflow 2
    from airflow.exceptions import AirflowException, AirflowFailException
    from airflow.models import BaseOperator
    from airflow.sensors.base import BaseSensorOperator

__all__ = ["FirnlineRunOperator", "FirnlineSensor"]

# Exit codes of `firnline run`: with these, running again does not help before a person has looked.
FAILED, USAGE, FENCED, SET_ASIDE = 1, 2, 5, 7
NEEDS_PERSON = {
    FAILED: "it failed, and would fail again",
    USAGE: "the command or the spec is wrong",
    FENCED: "another run has taken over the pipeline",
    SET_ASIDE: "it finished, but files are set aside",
}
AGAIN = {
    3: "it failed, and running again is safe",
    4: "the outcome of a commit is unknown, and running again finds it out",
    6: "another run is alive",
    130: "it was stopped at once",
}


class FirnlineRunOperator(BaseOperator):
    """Runs `firnline run --once`. Returns the result of the run as its XCom.

    Exit codes 3, 4 and 6, 130 and the end by a signal fail the task in a way that Airflow retries; running again is
    safe, also after a kill. Codes 1, 2, 5 and 7 fail it for good, whatever `retries` says.

    Args:
        spec: The pipeline file, or its folder.
        command: How to call Firnline, for example `/opt/firnline/bin/firnline`.
        arguments: Further arguments of `firnline run`.
        env: Variables that are added to the environment of the worker.
        cwd: The folder to run in; empty means that of the worker.
        stop_seconds: When the task is killed, how long the run may take to end cleanly.
    """

    template_fields: ClassVar[Sequence[str]] = ("spec", "arguments", "env", "cwd")

    def __init__(
        self,
        *,
        spec: str,
        command: str | Sequence[str] = "firnline",
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        stop_seconds: float = 120.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.command = command
        self.arguments = list(arguments)
        self.env = dict(env or {})
        self.cwd = cwd
        self.stop_seconds = stop_seconds
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Run until the input is exhausted."""
        call = [*_program(self.command), "run", self.spec, "--once", "--json", *self.arguments]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
            self._process = subprocess.Popen(
                call,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                cwd=self.cwd or None,
                env={**os.environ, **self.env},
                start_new_session=True,  # a signal to the worker does not reach the run; `on_kill` ends it cleanly
            )
            assert self._process.stderr is not None
            for line in self._process.stderr:
                self.log.info("%s", line.rstrip())
            code = self._process.wait()
            answer.seek(0)
            return _judge(code, answer.read())

    def on_kill(self) -> None:
        """End the run cleanly, after the epochs in flight; if that takes too long, at once, which is as safe."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


class FirnlineSensor(BaseSensorOperator):
    """Waits until a pipeline has committed an epoch, or anything since a time, or has read all of its input.

    Asks `firnline status`, which reads only and starts no Spark. All conditions that are given must hold.

    Args:
        spec: The pipeline file, or its folder.
        epoch: Wait until this epoch is committed; a text, so that a template can give it. Empty: any.
        since: Wait for a commit at or after this time, RFC 3339, for example `{{ data_interval_end }}`. Empty: any.
        all_read: Wait until no input is outstanding.
        command, env, cwd: As for `FirnlineRunOperator`.
    """

    template_fields: ClassVar[Sequence[str]] = ("spec", "epoch", "since", "env", "cwd")

    def __init__(
        self,
        *,
        spec: str,
        epoch: int | str = "",
        since: str = "",
        all_read: bool = False,
        command: str | Sequence[str] = "firnline",
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.epoch = str(epoch)
        self.since = since
        self.all_read = all_read
        self.command = command
        self.env = dict(env or {})
        self.cwd = cwd

    def poke(self, context: Any) -> bool:
        """Return whether the conditions hold now."""
        call = [*_program(self.command), "status", self.spec, "--json"]
        done = subprocess.run(
            call,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=self.cwd or None,
            env={**os.environ, **self.env},
        )
        if done.returncode in NEEDS_PERSON:
            raise AirflowFailException(f"firnline status: {done.stderr.strip() or NEEDS_PERSON[done.returncode]}")
        if done.returncode:
            self.log.info("the status cannot be read now: %s", done.stderr.strip())
            return False
        status = _parse(done.stdout)
        waits_for = find_waiting(status, epoch=self.epoch, since=self.since, all_read=self.all_read)
        if waits_for:
            self.log.info("%s waits for %s", status.get("pipeline"), waits_for)
        return not waits_for


def find_waiting(status: Mapping[str, Any], *, epoch: str = "", since: str = "", all_read: bool = False) -> str:
    """Return what has not come yet, by the JSON of `firnline status`; empty if everything has."""
    committed, last = status.get("committed_epoch"), status.get("last_commit_at")
    if epoch and (committed is None or int(committed) < int(epoch)):
        return f"epoch {epoch}; the newest is {committed}"
    if since and (not last or _time(last) < _time(since)):
        return f"a commit since {since}; the last one was at {last}"
    if all_read and status.get("files_outstanding") != 0:
        return f"input to be read: {status.get('files_outstanding')} outstanding"
    return ""


def _program(command: str | Sequence[str]) -> list[str]:
    return [command] if isinstance(command, str) else list(command)


def _judge(code: int, answer: str) -> dict[str, Any]:
    """Return the result of a run that succeeded, and raise as Airflow expects it for any other."""
    if code == 0:
        return _parse(answer)
    try:
        error = _parse(answer).get("error") or {}
    except AirflowException:
        error = {}
    text = " ".join(str(error[key]) for key in ("message", "hint") if isinstance(error, dict) and error.get(key))
    reason = NEEDS_PERSON.get(code) or AGAIN.get(code) or "it ended by a signal; running again is safe"
    message = f"firnline run ended with {code}: {reason}. {text}".rstrip()
    if code in NEEDS_PERSON:
        raise AirflowFailException(message)
    raise AirflowException(message)


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise AirflowException(f"the answer of firnline is no JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise AirflowException(f"the answer of firnline is no object: {text[:200]!r}")
    return found


def _time(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
