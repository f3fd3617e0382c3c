"""What runs the tasks of an epoch: Spark in the product, something lighter in tests."""

from __future__ import annotations

from typing import Protocol

from firnline.types import Json


class Engine(Protocol):
    """Runs orders, each in a task of its own."""

    @property
    def parallelism(self) -> int:
        """Tasks that run at once."""
        ...

    def run(self, tag: str, orders: list[dict[str, Json]]) -> list[dict[str, Json]]:
        """Run every order and return their reports in order.

        Raises:
            EngineError: the engine failed; repeating is safe.
            FirnlineError: what a task itself raised.
        """
        ...

    def cancel(self, tag: str) -> None:
        """Stop a job that is no longer wanted."""
        ...

    def stop(self) -> None:
        """Let go of everything."""
        ...
