"""Builds the core's options from a checked spec, and reads its secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from firnline.config.fields import ReadSecret, micros, plain
from firnline.config.secrets import MaskedText, SecretError, resolve_secret
from firnline.options import (
    BatchOptions,
    CheckpointOptions,
    Home,
    LocalTierOptions,
    OperatorOptions,
    OutboxOptions,
    PipelineOptions,
    RemoteTierOptions,
    RestartOptions,
    StagingOptions,
    StateOptions,
    StoreOptions,
    TriggerOptions,
    find_deciding,
)
from firnline.sinks.delta.options import journal_in
from firnline.spec.checks import find_home_problems, find_unshared, sink_source
from firnline.spec.loading import LoadedSpec, load_spec
from firnline.spec.models import CheckpointConfig, PipelineSpec, StoreConfig, TriggerConfig
from firnline.spec.operators import OperatorConfig, OwnOperatorConfig
from firnline.spec.problems import KeyPath, Problem, origin_of, spec_error

HOME_FOLDER = "data"  # beside the spec; the home of a pipeline is a folder of its name there
STORE_FOLDER = os.path.join("data", "firnline_checkpoints")
OPERATOR_FOLDER = "operators"
OPERATOR_PATH = "FIRNLINE_OPERATOR_PATH"


def load_options(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str],
    cwd: str | os.PathLike[str] | None = None,
) -> PipelineOptions:
    """Find, read, check and build in one step; see `load_spec` and `build_options`."""
    return build_options(load_spec(path, environ=environ, cwd=cwd), environ=environ)


def build_options(loaded: LoadedSpec, *, environ: Mapping[str, str]) -> PipelineOptions:
    """Return the options of a checked spec; references to secrets are read here and nowhere else.

    Mappings that hold secrets do not show them in their `repr`. A user's own operators come from the folder
    `operators` beside the spec and from the folders in FIRNLINE_OPERATOR_PATH; a spec cannot name other folders.

    Raises:
        SpecError: a secret's variable is not set or its file cannot be read, or there is no folder of operators.
    """
    spec, secrets = loaded.spec, _Secrets(loaded, environ)
    home = _home(loaded, secrets) if find_deciding(spec.sinks) is None else None
    options = PipelineOptions(
        name=spec.name,
        sources=tuple(s.build(name, secrets.reader("sources", name)) for name, s in spec.sources.items()),
        sinks=tuple(s.build(sink_source(spec, i), secrets.reader("sinks", i)) for i, s in enumerate(spec.sinks)),
        operators=tuple(_operator(operator) for operator in spec.operators),
        state=StateOptions(**spec.state.model_dump()),
        batch=_batch(spec),
        restart=RestartOptions(**spec.restart.model_dump()),
        checkpoint=_checkpoint(spec.checkpoint, secrets),
        staging=StagingOptions(**spec.staging.model_dump()),
        outbox=OutboxOptions(**spec.outbox.model_dump()),
        spark=plain(spec.spark, secrets.reader("spark")),
        operator_paths=_operator_paths(secrets),
        journal=journal_in(home) if home is not None else None,
    )
    secrets.raise_problems()
    return options


def _home(loaded: LoadedSpec, secrets: _Secrets) -> Home:
    """Return the home of a pipeline that decides in its journal, and report why it cannot be there."""
    spec = loaded.spec
    if spec.home is not None:
        home = Home(spec.home.path, spec.home.plain(secrets.reader("home"))["storage_options"])
    else:
        home = Home(os.path.join(loaded.folder, HOME_FOLDER, spec.name))
    at: KeyPath = ("home",) if spec.home is not None else ()
    for message in find_home_problems(spec, home.root):
        secrets.report(at, message, "Set `home` to a folder or URI of its own.")
    unshared = find_unshared(spec, home.root)
    if unshared is not None:
        secrets.report(at, unshared, f"Set `home` to a URI, for example s3://BUCKET/{spec.name}.")
    return home


def _batch(spec: PipelineSpec) -> BatchOptions:
    """Return the size of an epoch. Defaults belong to the kinds of sources; of several, the smallest counts."""
    given = spec.batch.model_dump()
    for source in spec.sources.values():
        for key, value in source.batch_defaults.items():
            if key not in spec.batch.model_fields_set:
                given[key] = min(given[key], value)
    return BatchOptions(**given)


def _operator(operator: OperatorConfig) -> OperatorOptions:
    common = set(OperatorOptions.__dataclass_fields__) - {"settings"}
    return OperatorOptions(**operator.model_dump(include=common), settings=operator.settings_json())


def _operator_paths(secrets: _Secrets) -> tuple[str, ...]:
    beside = os.path.join(secrets.loaded.folder, OPERATOR_FOLDER)
    named = [os.path.abspath(p) for p in secrets.environ.get(OPERATOR_PATH, "").split(os.pathsep) if p]
    folders = tuple(path for path in (beside, *named) if os.path.isdir(path))
    for index, operator in enumerate(secrets.loaded.spec.operators):
        if isinstance(operator, OwnOperatorConfig) and not folders:
            file = operator.type.partition(":")[0].replace(".", os.sep) + ".py"
            words = f'there is no folder that "{operator.type}" could come from'
            hint = f"Put the class into {os.path.join(beside, file)}, or name its folder in {OPERATOR_PATH}."
            secrets.report(("operators", index, "type"), words, hint)
    return folders


def _checkpoint(spec: CheckpointConfig, secrets: _Secrets) -> CheckpointOptions:
    local, remote = spec.local, spec.remote
    return CheckpointOptions(
        **spec.model_dump(exclude={"store", "local", "remote", "trigger", "keep_aborted"}),
        trigger=_trigger(spec.trigger),
        keep_aborted_secs=spec.keep_aborted.total_seconds(),
        store=_store(spec.store or StoreConfig(), secrets),
        local=LocalTierOptions(**local.model_dump()) if local else None,
        remote=RemoteTierOptions(**remote.plain(secrets.reader("checkpoint", "remote"))) if remote else None,
    )


def _trigger(spec: TriggerConfig) -> TriggerOptions:
    given = spec.model_fields_set
    event_time = spec.event_time
    return TriggerOptions(
        every_epochs=spec.every_epochs if "every_epochs" in given or not given else None,
        every_ms=spec.every_ms,
        every_records=spec.every_records,
        event_time_ms=micros(event_time) // 1000 if event_time is not None else None,
    )


def _store(spec: StoreConfig, secrets: _Secrets) -> StoreOptions:
    beside = os.path.join(secrets.loaded.folder, STORE_FOLDER) if spec.type == "file" else ""
    values = spec.plain(secrets.reader("checkpoint", "store"))
    return StoreOptions(
        **{**values, "path": spec.path or beside, "uri": spec.uri or "", "dsn": values["dsn"] or MaskedText()}
    )


class _Secrets:
    """Reads references, and collects the problems, so that one error reports them all."""

    def __init__(self, loaded: LoadedSpec, environ: Mapping[str, str]) -> None:
        self.loaded = loaded
        self.environ = environ
        self.problems: list[Problem] = []

    def reader(self, *section: str | int) -> ReadSecret:
        """Return the function that reads the secrets of one section of the spec."""

        def read(text: str, path: KeyPath) -> str:
            try:
                return resolve_secret(text, environ=self.environ, folder=self.loaded.folder)
            except SecretError as exc:
                hint = "Set the variable or write the file that the reference names."
                self.report((*section, *path), str(exc), hint)
                return ""

        return read

    def report(self, path: KeyPath, message: str, hint: str | None) -> None:
        self.problems.append(Problem(origin_of(path, self.loaded.origins), path, message, hint))

    def raise_problems(self) -> None:
        if self.problems:
            raise spec_error(self.problems, file=self.problems[0].origin.place)
