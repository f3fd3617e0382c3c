"""What runs the tasks of an epoch: Spark in the product, something lighter in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from firnline.types import Json


@dataclass(frozen=True, slots=True)
class SqlOutput:
    """Where the rows of a query go; plain JSON, since it travels to workers."""

    attempt: str
    targets: list[dict[str, Json]]
    edges: list[dict[str, Json]]
    exchange: dict[str, Json]


@dataclass(frozen=True, slots=True)
class SqlJob:
    """One query of an epoch. `tables` are rows that earlier jobs handed on; `views` are queries that it reads."""

    tables: dict[str, dict[str, Json]]
    views: dict[str, str]
    query: str
    output: SqlOutput
    ping: dict[str, Json] | None = None  # as `pings.Watch.ping` gives it; each task adds its number


class Engine(Protocol):
    """Runs orders, each in a task of its own."""

    @property
    def parallelism(self) -> int:
        """Tasks that run at once."""
        ...

    @property
    def workers(self) -> int:
        """Tasks that could run at once now: fewer than `parallelism` while workers are lost."""
        ...

    def run(
        self, tag: str, orders: list[dict[str, Json]], timeout_seconds: float | None = None
    ) -> list[dict[str, Json]]:
        """Run every order and return their reports in order.

        Raises:
            EngineError: the engine failed, or did not end in time; repeating is safe.
            FirnlineError: what a task itself raised.
        """
        ...

    def run_sql(
        self, tag: str, job: SqlJob, timeout_seconds: float | None = None
    ) -> tuple[pa.Schema, list[dict[str, Json]]]:
        """Run a query, put its rows where they go, and return their columns and what every task reports.

        Raises:
            EngineError: the engine failed; repeating is safe.
            ConfigError: the query does not fit its inputs.
        """
        ...

    def cancel(self, tag: str) -> None:
        """Stop a job that is no longer wanted."""
        ...

    def stop(self) -> None:
        """Let go of everything."""
        ...
