"""A checked spec to the core's options, with its secrets read."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pydantic import SecretStr

from firnline.options import (
    BatchOptions,
    CheckpointOptions,
    DeltaSinkOptions,
    FieldOptions,
    FileSourceOptions,
    LocalTierOptions,
    PipelineOptions,
    RemoteTierOptions,
    RestartOptions,
    SchemaOptions,
    StagingOptions,
    StoreOptions,
)
from firnline.spec.loading import LoadedSpec, load_spec
from firnline.spec.models import CheckpointConfig, DeltaSinkConfig, FilesSourceConfig, StoreConfig
from firnline.spec.problems import KeyPath, Problem, origin_of, spec_error
from firnline.spec.secrets import MaskedDict, MaskedText, SecretError, resolve_secret

__all__ = ["build_options", "load_options"]

STORE_FOLDER = os.path.join("data", "firnline_checkpoints")


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

    Mappings that hold secrets do not show them in their `repr`.

    Raises:
        SpecError: a secret's variable is not set or its file cannot be read.
    """
    spec, secrets = loaded.spec, _Secrets(loaded, environ)
    source_name, source = next(iter(spec.sources.items()))
    options = PipelineOptions(
        name=spec.name,
        source=_source(source_name, source, secrets),
        sinks=tuple(_sink(sink, secrets, index) for index, sink in enumerate(spec.sinks)),
        batch=BatchOptions(**spec.batch.model_dump()),
        restart=RestartOptions(**spec.restart.model_dump()),
        checkpoint=_checkpoint(spec.checkpoint, secrets),
        staging=StagingOptions(**spec.staging.model_dump()),
        spark=secrets.read(spec.spark, ("spark",)),
    )
    secrets.raise_problems()
    return options


def _source(name: str, source: FilesSourceConfig, secrets: _Secrets) -> FileSourceOptions:
    fields = tuple(FieldOptions(f.name, f.type, f.nullable) for f in source.schema_.fields)
    return FileSourceOptions(
        name=name,
        **source.model_dump(exclude={"type", "schema_", "storage_options"}),
        schema=SchemaOptions(fields, source.schema_.evolution),
        storage_options=secrets.read(source.storage_options, ("sources", name, "storage_options")),
    )


def _sink(sink: DeltaSinkConfig, secrets: _Secrets, index: int) -> DeltaSinkOptions:
    return DeltaSinkOptions(
        **sink.model_dump(exclude={"type", "storage_options"}),
        storage_options=secrets.read(sink.storage_options, ("sinks", index, "storage_options")),
    )


def _checkpoint(spec: CheckpointConfig, secrets: _Secrets) -> CheckpointOptions:
    at = ("checkpoint",)
    local, remote = spec.local, spec.remote
    return CheckpointOptions(
        **spec.model_dump(exclude={"store", "local", "remote"}),
        store=_store(spec.store or StoreConfig(), secrets),
        local=LocalTierOptions(**local.model_dump()) if local else None,
        remote=RemoteTierOptions(
            **remote.model_dump(exclude={"storage_options"}),
            storage_options=secrets.read(remote.storage_options, (*at, "remote", "storage_options")),
        )
        if remote
        else None,
    )


def _store(spec: StoreConfig, secrets: _Secrets) -> StoreOptions:
    at = ("checkpoint", "store")
    dsn = secrets.read({"dsn": spec.dsn}, at)["dsn"] if spec.dsn is not None else ""
    return StoreOptions(
        **spec.model_dump(exclude={"path", "uri", "dsn", "storage_options"}),
        path=spec.path or (os.path.join(secrets.loaded.folder, STORE_FOLDER) if spec.type == "file" else ""),
        uri=spec.uri or "",
        dsn=MaskedText(dsn),
        storage_options=secrets.read(spec.storage_options, (*at, "storage_options")),
    )


class _Secrets:
    """Reads references and gathers what cannot be read, so that all of it is told together."""

    def __init__(self, loaded: LoadedSpec, environ: Mapping[str, str]) -> None:
        self.loaded = loaded
        self.environ = environ
        self.problems: list[Problem] = []

    def read(self, values: Mapping[str, SecretStr] | Mapping[str, SecretStr | str], at: KeyPath) -> dict[str, str]:
        plain: dict[str, str] = {}
        for key, value in values.items():
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            try:
                plain[key] = resolve_secret(text, environ=self.environ, folder=self.loaded.folder)
            except SecretError as exc:
                path = (*at, key)
                hint = "Set the variable or write the file that the reference names."
                self.problems.append(Problem(origin_of(path, self.loaded.origins), path, str(exc), hint))
        return MaskedDict(plain, shown=[key for key, value in values.items() if isinstance(value, str)])

    def raise_problems(self) -> None:
        if self.problems:
            raise spec_error(self.problems, file=self.problems[0].origin.place)
