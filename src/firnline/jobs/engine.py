"""The engine that runs the tasks of an epoch: Spark in the product, something lighter in tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from firnline.exchange import Edge
from firnline.schema import schema_from_json, schema_to_json
from firnline.types import Json


@dataclass(frozen=True, slots=True)
class Output:
    """The destinations of one port's rows."""

    targets: tuple[dict[str, Json], ...] = ()  # one per sink, from `Sink.stage_target`
    edges: tuple[Edge, ...] = ()  # to the jobs of other operators

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {"targets": list(self.targets), "edges": [edge.to_json() for edge in self.edges]}

    @classmethod
    def from_json(cls, value: Json) -> Output:
        """Parse the output of `to_json`."""
        return cls(tuple(value["targets"]), tuple(Edge.from_json(edge) for edge in value["edges"]))


@dataclass(frozen=True, slots=True)
class Ping:
    """Where and how often a task sends its heartbeat."""

    folder: dict[str, Json]  # root, storage options and folder
    name: str  # of the task, for people
    seconds: float

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {"folder": self.folder, "name": self.name, "seconds": self.seconds}

    @classmethod
    def from_json(cls, value: Json) -> Ping:
        """Parse the output of `to_json`."""
        return cls(dict(value["folder"]), str(value["name"]), float(value["seconds"]))


@dataclass(frozen=True, slots=True)
class SqlTable:
    """Rows that an earlier job exchanged, as input of a query."""

    schema: pa.Schema
    exchange: dict[str, Json] = field(default_factory=dict)  # the folder of exchanged rows
    files: tuple[dict[str, Json], ...] = ()

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {"schema": schema_to_json(self.schema), "exchange": self.exchange, "files": list(self.files)}

    @classmethod
    def from_json(cls, value: Json) -> SqlTable:
        """Parse the output of `to_json`."""
        return cls(schema_from_json(value["schema"]), dict(value["exchange"]), tuple(value["files"]))


@dataclass(frozen=True, slots=True)
class SqlTask:
    """The input of the tasks that write the rows of a query; the same for all of them."""

    attempt: str
    output: Output
    exchange: dict[str, Json]  # the folder of exchanged rows
    ping: Ping  # each task appends its number

    def to_json(self) -> dict[str, Json]:
        """Return plain JSON for the workers."""
        return {
            "attempt": self.attempt,
            "output": self.output.to_json(),
            "exchange": self.exchange,
            "ping": self.ping.to_json(),
        }

    @classmethod
    def from_json(cls, value: Json) -> SqlTask:
        """Parse the output of `to_json`."""
        output, ping = Output.from_json(value["output"]), Ping.from_json(value["ping"])
        return cls(str(value["attempt"]), output, dict(value["exchange"]), ping)


@dataclass(frozen=True, slots=True)
class SqlJob:
    """One query of an epoch. `tables` are its inputs by name; `views` are queries that it reads."""

    tables: dict[str, SqlTable]
    views: dict[str, str]
    query: str
    task: SqlTask


class Engine(Protocol):
    """Runs tasks: Spark, or something lighter in tests."""

    @property
    def parallelism(self) -> int:
        """The number of tasks that run at once."""
        ...

    @property
    def workers(self) -> int:
        """Return how many tasks could run at once now: fewer than `parallelism` while workers are lost."""
        ...

    def start(self) -> None:
        """Start the engine in the background, unless it has started. A failure is raised by the first job."""
        ...

    def run(
        self, tag: str, tasks: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        """Run every task and return their reports, in the order of the tasks.

        Raises:
            EngineError: the engine failed, or did not end in time; repeating is safe.
            FirnlineError: an error that a task raised.
        """
        ...

    def run_sql(
        self, tag: str, job: SqlJob, timeout_seconds: float | None = None
    ) -> tuple[pa.Schema, list[dict[str, Json]]]:
        """Run a query, write its rows to their destinations, and return their columns and the tasks' reports.

        Raises:
            EngineError: the engine failed; repeating is safe.
            ConfigError: the query does not fit its inputs.
        """
        ...

    def cancel(self, tag: str) -> None:
        """Cancel a job."""
        ...

    def stop(self) -> None:
        """Stop the engine and free its resources."""
        ...
